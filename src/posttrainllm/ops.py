"""The op table: every operation an engine may be asked to run, with its operands, attributes and shapes.

What this is: data. One row an op, in the order forward, backward, family by family, the fused ones last. Engines implement the rows,
``program.py`` checks calls against them, the call table of the C++ driver and the bindings of the WebGPU host are laid out by them, and a
test holds C++ symbols, WGSL entry points and documentation pages to the same names.
What this is not: an implementation. The definition of what each op computes is ``engines/numpy_ops.py``; its derivation stands in
``docs/ops/<family>.md``. Read next: ``program.py``.

Letters of shapes (one letter, one meaning, everywhere):
    B batch   T time   C n_embd   H n_head   V n_vocab   S positions of the key/value cache   N rows (B*T)   I, O inputs, outputs of a
    linear layer   P parameters of an arena   K rows of a table
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

#: How an output that may accumulate is written (the attribute ``accumulate``).
WRITE, ADD, BETA, CHUNK = 0, 1, 2, 3
# WRITE  out = new                    ADD    out += new
# BETA   out = new where scalars.beta == 0 (the old value is never read: it may be anything), out += new otherwise
# CHUNK  BETA in the first chunk of a row block and ADD in the others; ``program.expand`` resolves it, no engine ever sees it

#: Slots of the input buffer ``scalars`` (float32): all that changes from step to step without being a tensor.
SCALARS = (
    "inv_count",
    "beta",
    "lr",
    "correction1",
    "correction2",
    "reserved0",
    "reserved1",
    "reserved2",
)

#: Slots of the buffer ``clip`` that gradient_clip keeps: the global gradient norm, the factor on gradients, the sticky non-finite flag.
CLIP = ("norm", "scale", "nonfinite", "reserved")

Dtype = Literal["f32", "i32"]
Mode = Literal["read", "write", "accumulate", "update"]
# write       every element is written, the old content is never read
# accumulate  written or added to, as the attribute ``accumulate`` says
# update      read and written in place (moments, caches, the sticky flag)


@dataclass(frozen=True)
class Operand:
    """One buffer of an op: its name, its shape as letters, and how it is used.

    ``transposed`` is the shape under the attribute ``transposed=1``, where the op has one.
    """

    name: str
    shape: tuple[str, ...]
    mode: Mode = "read"
    dtype: Dtype = "f32"
    optional: bool = False
    transposed: tuple[str, ...] | None = None


@dataclass(frozen=True)
class Op:
    """One row of the table.

    ``sizes`` are the letters an engine is given as numbers, in this order; ``attrs`` the attributes with their defaults, in the order of
    the call table (None: no default, every call must say it).
    """

    name: str
    outputs: tuple[Operand, ...]
    inputs: tuple[Operand, ...]
    sizes: tuple[str, ...]
    attrs: dict[str, float | None] = field(default_factory=dict)

    @property
    def family(self) -> str:
        """The kernels' file and the documentation page this op lives in: ``layernorm`` for ``layernorm_backward_input``."""
        if self.name in FAMILY_OF:
            return FAMILY_OF[self.name]
        for suffix in ("_forward", "_backward"):
            head, found, _ = self.name.partition(suffix)
            if found:
                return head
        raise KeyError(f"{self.name} has no family")

    @property
    def operands(self) -> tuple[Operand, ...]:
        """Outputs, then inputs: the order of every argument list, call table and bind group."""
        return self.outputs + self.inputs


#: Ops whose names do not carry the family they belong to as <family>_forward or <family>_backward.
FAMILY_OF = {
    "attention_append": "attention",
    "attention_decode": "attention",
    "loss_sum": "cross_entropy",
    "sum_squares": "optimizer",
    "gradient_clip": "optimizer",
    "adamw_step": "optimizer",
    "linear_gelu_forward": "fused",
    "linear_residual_forward": "fused",
    "gelu_linear_backward_input": "fused",
}


def _out(
    name: str, *shape: str, mode: Mode = "write", transposed: tuple[str, ...] | None = None
) -> Operand:
    return Operand(name, shape, mode, transposed=transposed)


def _in(
    name: str, *shape: str, optional: bool = False, transposed: tuple[str, ...] | None = None
) -> Operand:
    return Operand(name, shape, optional=optional, transposed=transposed)


def _ids(name: str, *shape: str) -> Operand:
    return Operand(name, shape, dtype="i32")


_SCALARS = _in("scalars", str(len(SCALARS)))
_ACCUMULATE: dict[str, float | None] = {"accumulate": float(WRITE)}

_TABLE = (
    # out[n] = token_table[tokens[n]] + position_table[positions[n]]
    Op(
        "embedding_forward",
        (_out("out", "N", "C"),),
        (
            _ids("tokens", "N"),
            _ids("positions", "N"),
            _in("token_table", "V", "C"),
            _in("position_table", "S", "C"),
        ),
        ("N", "C", "V", "S"),
    ),
    # dtable[rows[j]] (+)= sum of dout[order[s]] for s in starts[j] .. starts[j+1]; under WRITE and BETA unused rows become 0
    Op(
        "embedding_backward_weight",
        (_out("dtable", "K", "C", mode="accumulate"),),
        (
            _in("dout", "N", "C"),
            _ids("rows", "N"),
            _ids("starts", "N"),
            _ids("order", "N"),
            _SCALARS,
        ),
        ("N", "C", "K"),
        _ACCUMULATE,
    ),
    # xhat = (x - mean) * rstd;  out = xhat * weight + bias
    Op(
        "layernorm_forward",
        (_out("out", "N", "C"), _out("mean", "N"), _out("rstd", "N")),
        (_in("x", "N", "C"), _in("weight", "C"), _in("bias", "C")),
        ("N", "C"),
        {"eps": None},
    ),
    Op(
        "layernorm_backward_input",
        (_out("dx", "N", "C", mode="accumulate"),),
        (
            _in("dout", "N", "C"),
            _in("x", "N", "C"),
            _in("weight", "C"),
            _in("mean", "N"),
            _in("rstd", "N"),
        ),
        ("N", "C"),
        _ACCUMULATE,
    ),
    Op(
        "layernorm_backward_weight",
        (_out("dweight", "C", mode="accumulate"), _out("dbias", "C", mode="accumulate")),
        (_in("dout", "N", "C"), _in("x", "N", "C"), _in("mean", "N"), _in("rstd", "N"), _SCALARS),
        ("N", "C"),
        _ACCUMULATE,
    ),
    # out = x W + bias (W is (I, O)); transposed: out = x W^T + bias (W is (O, I))
    Op(
        "linear_forward",
        (_out("out", "N", "O"),),
        (
            _in("x", "N", "I"),
            _in("weight", "I", "O", transposed=("O", "I")),
            _in("bias", "O", optional=True),
        ),
        ("N", "I", "O"),
        {"transposed": 0.0},
    ),
    Op(
        "linear_backward_input",
        (_out("dx", "N", "I", mode="accumulate"),),
        (_in("dout", "N", "O"), _in("weight", "I", "O", transposed=("O", "I"))),
        ("N", "I", "O"),
        {"transposed": 0.0, "accumulate": float(WRITE)},
    ),
    Op(
        "linear_backward_weight",
        (_out("dweight", "I", "O", mode="accumulate", transposed=("O", "I")),),
        (_in("x", "N", "I"), _in("dout", "N", "O"), _SCALARS),
        ("N", "I", "O"),
        {"transposed": 0.0, "accumulate": float(WRITE)},
    ),
    Op(
        "linear_backward_bias",
        (_out("dbias", "O", mode="accumulate"),),
        (_in("dout", "N", "O"), _SCALARS),
        ("N", "O"),
        _ACCUMULATE,
    ),
    # erf = 0: gelu_new (tanh form, GPT-2's);  erf = 1: gelu
    Op("gelu_forward", (_out("out", "N", "C"),), (_in("x", "N", "C"),), ("N", "C"), {"erf": 0.0}),
    Op(
        "gelu_backward",
        (_out("dx", "N", "C"),),
        (_in("dout", "N", "C"), _in("x", "N", "C")),
        ("N", "C"),
        {"erf": 0.0},
    ),
    # causal self-attention over segments: row (b, t) sees s with segment_start[b, t] <= s <= t
    Op(
        "attention_forward",
        (_out("out", "B*T", "C"), _out("lse", "B", "H", "T")),
        (_in("qkv", "B*T", "3*C"), _ids("segment_start", "B*T")),
        ("B", "T", "C", "H"),
    ),
    Op(
        "attention_backward",
        (_out("dqkv", "B*T", "3*C"),),
        (
            _in("dout", "B*T", "C"),
            _in("qkv", "B*T", "3*C"),
            _in("out", "B*T", "C"),
            _in("lse", "B", "H", "T"),
            _ids("segment_start", "B*T"),
        ),
        ("B", "T", "C", "H"),
    ),
    # cache[0, b, positions[b, t]] = k[b, t];  cache[1, b, positions[b, t]] = v[b, t]
    Op(
        "attention_append",
        (_out("cache", "2", "B", "S", "C", mode="update"),),
        (_in("qkv", "B*T", "3*C"), _ids("positions", "B*T")),
        ("B", "T", "C", "S"),
    ),
    # row (b, t) sees cache positions 0 .. positions[b, t]
    Op(
        "attention_decode",
        (_out("out", "B*T", "C"),),
        (_in("qkv", "B*T", "3*C"), _in("cache", "2", "B", "S", "C"), _ids("positions", "B*T")),
        ("B", "T", "C", "S"),
        {"n_head": None},
    ),
    Op(
        "add_forward",
        (_out("out", "N", "C"),),
        (_in("a", "N", "C"), _in("b", "N", "C")),
        ("N", "C"),
    ),
    # out[b] = x[rows[b]]
    Op(
        "gather_forward",
        (_out("out", "B", "C"),),
        (_in("x", "N", "C"), _ids("rows", "B")),
        ("B", "N", "C"),
    ),
    # lse[n] = log sum_v exp(logits[n, v]);  row_loss[n] = lse[n] - logits[n, targets[n]], 0 where targets[n] < 0
    Op(
        "cross_entropy_forward",
        (_out("row_loss", "N"), _out("lse", "N")),
        (_in("logits", "N", "V"), _ids("targets", "N")),
        ("N", "V"),
    ),
    # dlogits = inv_count * (exp(logits - lse) - onehot(targets)), 0 where targets[n] < 0
    Op(
        "cross_entropy_backward",
        (_out("dlogits", "N", "V"),),
        (_in("logits", "N", "V"), _ids("targets", "N"), _in("lse", "N"), _SCALARS),
        ("N", "V"),
    ),
    # loss (+)= inv_count * sum_n row_loss[n]
    Op(
        "loss_sum",
        (_out("loss", "1", mode="accumulate"),),
        (_in("row_loss", "N"), _SCALARS),
        ("N",),
        _ACCUMULATE,
    ),
    # out = sum_p x[p]^2
    Op("sum_squares", (_out("out", "1"),), (_in("x", "P"),), ("P",)),
    # norm = sqrt(decayed + plain);  scale = clip_norm / norm where norm > clip_norm > 0, else 1;  nonfinite |= norm is not finite
    Op(
        "gradient_clip",
        (_out("clip", str(len(CLIP)), mode="update"),),
        (_in("decayed", "1"), _in("plain", "1")),
        (),
        {"clip_norm": None},
    ),
    # g = grad * clip.scale;  m = beta1 m + (1-beta1) g;  v = beta2 v + (1-beta2) g^2
    # param -= lr * (m / correction1 / (sqrt(v / correction2) + eps) + weight_decay * param);  nothing at all where clip.nonfinite
    Op(
        "adamw_step",
        (
            _out("param", "P", mode="update"),
            _out("m", "P", mode="update"),
            _out("v", "P", mode="update"),
        ),
        (_in("grad", "P"), _in("clip", str(len(CLIP))), _SCALARS),
        ("P",),
        {"beta1": None, "beta2": None, "eps": None, "weight_decay": None},
    ),
)

# Ops that do the work of several of the rows above with fewer passes over memory. No program is written with them: ``fuse.py`` puts
# them in for engines that have them.
_FUSED = (
    # fc = x W + bias;  out = gelu(fc)
    Op(
        "linear_gelu_forward",
        (_out("out", "N", "O"), _out("fc", "N", "O")),
        (_in("x", "N", "I"), _in("weight", "I", "O"), _in("bias", "O", optional=True)),
        ("N", "I", "O"),
        {"erf": 0.0},
    ),
    # out = residual + (x W + bias)
    Op(
        "linear_residual_forward",
        (_out("out", "N", "O"),),
        (
            _in("residual", "N", "O"),
            _in("x", "N", "I"),
            _in("weight", "I", "O"),
            _in("bias", "O", optional=True),
        ),
        ("N", "I", "O"),
    ),
    # of out = gelu(fc) W + bias:  dfc = (dout W^T) gelu'(fc);  act = gelu(fc) again, so that forward need not keep it
    Op(
        "gelu_linear_backward_input",
        (_out("dfc", "N", "I"), _out("act", "N", "I")),
        (_in("dout", "N", "O"), _in("weight", "I", "O"), _in("fc", "N", "I")),
        ("N", "I", "O"),
        {"erf": 0.0},
    ),
    # dweight (+)= x^T dout;  dbias (+)= column sums of dout
    Op(
        "linear_backward_weight_bias",
        (
            _out("dweight", "I", "O", mode="accumulate"),
            _out("dbias", "O", mode="accumulate"),
        ),
        (_in("x", "N", "I"), _in("dout", "N", "O"), _SCALARS),
        ("N", "I", "O"),
        _ACCUMULATE,
    ),
    # dx += as layernorm_backward_input;  dweight, dbias (+)= as layernorm_backward_weight
    Op(
        "layernorm_backward",
        (
            _out("dx", "N", "C", mode="update"),
            _out("dweight", "C", mode="accumulate"),
            _out("dbias", "C", mode="accumulate"),
        ),
        (
            _in("dout", "N", "C"),
            _in("x", "N", "C"),
            _in("weight", "C"),
            _in("mean", "N"),
            _in("rstd", "N"),
            _SCALARS,
        ),
        ("N", "C"),
        _ACCUMULATE,
    ),
)

# out = scale * (x q) + bias, with q int8, four to a word: for programs that ``int8.py`` has rewritten.
_INT8 = Op(
    "int8_forward",
    (_out("out", "N", "O"),),
    (
        _in("x", "N", "I"),
        Operand("weight", ("I", "Q"), transposed=("O", "Q"), dtype="i32"),
        _in("scale", "O"),
        _in("bias", "O", optional=True),
    ),
    ("N", "I", "O"),
    {"transposed": 0.0},
)

#: The table by name. An op's number in the C++ call table is its place in this order.
OPS: dict[str, Op] = {op.name: op for op in _TABLE + _FUSED + (_INT8,)}
FUSED: tuple[str, ...] = tuple(op.name for op in _FUSED)
#: Ops that an engine may lack: no program is written with them.
OPTIONAL: tuple[str, ...] = (*FUSED, _INT8.name)
