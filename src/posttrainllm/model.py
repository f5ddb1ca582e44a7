"""The GPT: GPT-2's architecture as programs, every forward beside its backward.

What this is: the only place where the model exists for the engines that run ops. Read it from top to bottom: parameters, then piece by
piece forward and backward, then the programs that are made of the pieces.
What this is not: numbers (``config.py``), kernels (``engines/``), or the optimizer (``optim.py``). ``pytorch/gpt.py`` says the same thing a
second time, independently, with autograd, and the tests hold both to each other.

Shapes: activations are (B*T, width) row-major. Names are GPT-2's own: a parameter's prefix plus a role (``h.3.ln_1.out``); a gradient is
``grad.`` plus the name. The residual stream is ``h.{i}.in`` for i = 0 .. L, and its gradient is one buffer, ``grad.h``, that every block
adds to on the way back. Source: Radford et al. 2019, https://github.com/openai/gpt-2.
"""

from __future__ import annotations

from posttrainllm.config import GPTConfig, OptimizerConfig
from posttrainllm.extent import FIRST, Bound
from posttrainllm.ops import ADD, BETA, CHUNK, SCALARS, WRITE
from posttrainllm.optim import update_program
from posttrainllm.plan import chunk_rows
from posttrainllm.program import Init, Program, Role

ROWS = "B*T"
# Layers 0 .. L: the residual stream has one more entry than there are layers.
THROUGH_LAST = (FIRST, Bound(from_last=True, offset=1))


class _Builder:
    """A program under construction, with what every piece needs to know."""

    def __init__(
        self, name: str, config: GPTConfig, *, trains: bool, inspects: bool = False
    ) -> None:
        self.program = Program(name)
        self.config = config
        self.kept: Role = "saved" if trains else "scratch"
        self.qkv: Role = "output" if inspects else self.kept
        self.erf = float(config.activation == "gelu")
        self.head = "wte.weight" if config.tied else "lm_head.weight"
        _parameters(self.program, config, trains=trains)
        for input_name in ("tokens", "positions"):
            self.program.buffer(input_name, ROWS, role="input", dtype="i32")

    def keep(self, name: str, *shape: str) -> str:
        """An activation that the backward pass reads (work space like any other where there is no backward pass)."""
        return self.program.buffer(name, *shape, role=self.kept)

    def scratch(self, name: str, *shape: str) -> str:
        """An activation or gradient that is done with after the next few calls."""
        return self.program.buffer(name, *shape, role="scratch")


# ---- parameters -----------------------------------------------------------------------------------------------------------------------


def _parameters(p: Program, config: GPTConfig, *, trains: bool) -> None:
    """Declare parameters and, for training, their gradients: two dimensions or more are decayed, residual projections start smaller."""
    tables = [("wte.weight", ("V", "C")), ("wpe.weight", ("S", "C"))]
    if not config.tied:
        tables.append(("lm_head.weight", ("V", "C")))
    matrices: list[tuple[str, str, str, Init]] = [
        ("h.{i}.attn.c_attn", "C", "3*C", "normal"),
        ("h.{i}.attn.c_proj", "C", "C", "residual"),
        ("h.{i}.mlp.c_fc", "C", "F", "normal"),
        ("h.{i}.mlp.c_proj", "F", "C", "residual"),
    ]

    def declare(name: str, *shape: str, init: Init, decay: bool) -> None:
        p.buffer(name, *shape, role="param", init=init, decay=decay)
        if trains:
            p.buffer(f"grad.{name}", *shape, role="grad")

    for name, shape in tables:
        declare(name, *shape, init="normal", decay=True)
    for name, inputs, outputs, init in matrices:
        declare(f"{name}.weight", inputs, outputs, init=init, decay=True)
        declare(f"{name}.bias", outputs, init="zeros", decay=False)
    for name in ("h.{i}.ln_1", "h.{i}.ln_2", "ln_f"):
        declare(f"{name}.weight", "C", init="ones", decay=False)
        declare(f"{name}.bias", "C", init="zeros", decay=False)


# ---- pieces ---------------------------------------------------------------------------------------------------------------------------


def _embedding_forward(b: _Builder) -> None:
    out = b.program.buffer("h.{i}.in", ROWS, "C", role=b.kept, layers=THROUGH_LAST)
    b.program.call(
        "embedding_forward",
        [out.replace("{i}", "0")],
        ["tokens", "positions", "wte.weight", "wpe.weight"],
    )


def _embedding_backward(b: _Builder) -> None:
    """h.0.in = wte[tokens] + wpe[positions]: each table's rows collect the gradients of the places that used them."""
    for table, index, accumulate in (
        ("wte.weight", "token_index", ADD if b.config.tied else BETA),
        ("wpe.weight", "position_index", BETA),
    ):
        lists = [
            b.program.buffer(f"{index}.{part}", ROWS, role="input", dtype="i32")
            for part in ("rows", "starts", "order")
        ]
        b.program.call(
            "embedding_backward_weight",
            [f"grad.{table}"],
            ["grad.h", *lists, "scalars"],
            accumulate=accumulate,
        )


def _layernorm_forward(b: _Builder, layer: str, x: str, rows: str = ROWS) -> str:
    outputs = [
        b.keep(f"{layer}.out", rows, "C"),
        b.keep(f"{layer}.mean", rows),
        b.keep(f"{layer}.rstd", rows),
    ]
    b.program.call(
        "layernorm_forward",
        outputs,
        [x, f"{layer}.weight", f"{layer}.bias"],
        eps=b.config.layer_norm_epsilon,
    )
    return outputs[0]


def _layernorm_backward(b: _Builder, layer: str, x: str, *, accumulate: int) -> None:
    """out = layernorm(x): weight and bias from one read, then the gradient of x, added to the residual stream's."""
    saved = [f"{layer}.mean", f"{layer}.rstd"]
    b.program.call(
        "layernorm_backward_weight",
        [f"grad.{layer}.weight", f"grad.{layer}.bias"],
        [f"grad.{layer}.out", x, *saved, "scalars"],
        accumulate=BETA,
    )
    b.program.call(
        "layernorm_backward_input",
        ["grad.h"],
        [f"grad.{layer}.out", x, f"{layer}.weight", *saved],
        accumulate=accumulate,
    )


def _linear_forward(b: _Builder, layer: str, out: str, x: str) -> None:
    b.program.call("linear_forward", [out], [x, f"{layer}.weight", f"{layer}.bias"])


def _linear_backward(b: _Builder, layer: str, dx: str, dout: str, x: str) -> None:
    """out = x W + bias:  dx = dout W^T,  dW = x^T dout,  dbias = column sums of dout."""
    b.program.call("linear_backward_input", [dx], [dout, f"{layer}.weight"])
    _linear_backward_weight(b, layer, dout, x)


def _linear_backward_weight(b: _Builder, layer: str, dout: str, x: str) -> None:
    """The part that reads x. It comes after dx, so that dx lies beside x and an engine may run both at once."""
    b.program.call(
        "linear_backward_weight", [f"grad.{layer}.weight"], [x, dout, "scalars"], accumulate=BETA
    )
    b.program.call(
        "linear_backward_bias", [f"grad.{layer}.bias"], [dout, "scalars"], accumulate=BETA
    )


def _attention_forward(b: _Builder, *, cached: bool = False, appends: bool = False) -> None:
    """mid = in + c_proj(attention(c_attn(ln_1(in)))).

    With ``appends`` keys and values go to the cache, with ``cached`` they are read there.
    """
    normed = _layernorm_forward(b, "h.{i}.ln_1", "h.{i}.in")
    qkv = b.program.buffer("h.{i}.attn.qkv", ROWS, "3*C", role=b.qkv)
    _linear_forward(b, "h.{i}.attn.c_attn", qkv, normed)
    out, lse = b.keep("h.{i}.attn.out", ROWS, "C"), "h.{i}.attn.lse"
    cache = "h.{i}.attn.cache"
    if appends:
        b.program.buffer(cache, "2", "B", "S", "C", role="state")
        b.program.call("attention_append", [cache], [qkv, "positions"])
    if cached:
        b.program.call("attention_decode", [out], [qkv, cache, "positions"], n_head="H")
    else:
        b.program.buffer("segment_start", ROWS, role="input", dtype="i32")
        b.program.call(
            "attention_forward", [out, b.keep(lse, "B", "H", "T")], [qkv, "segment_start"]
        )
    proj = b.scratch("h.{i}.attn.proj", ROWS, "C")
    _linear_forward(b, "h.{i}.attn.c_proj", proj, out)
    b.program.call("add_forward", [b.keep("h.{i}.mid", ROWS, "C")], ["h.{i}.in", proj])


def _attention_backward(b: _Builder) -> None:
    """grad.h holds the gradient of mid, which is that of proj and, by the residual path, part of that of in."""
    dout = b.scratch("grad.h.{i}.attn.out", ROWS, "C")
    _linear_backward(b, "h.{i}.attn.c_proj", dout, "grad.h", "h.{i}.attn.out")
    dqkv = b.scratch("grad.h.{i}.attn.qkv", ROWS, "3*C")
    b.program.call(
        "attention_backward",
        [dqkv],
        [dout, "h.{i}.attn.qkv", "h.{i}.attn.out", "h.{i}.attn.lse", "segment_start"],
    )
    dnormed = b.scratch("grad.h.{i}.ln_1.out", ROWS, "C")
    _linear_backward(b, "h.{i}.attn.c_attn", dnormed, dqkv, "h.{i}.ln_1.out")
    _layernorm_backward(b, "h.{i}.ln_1", "h.{i}.in", accumulate=ADD)


def _mlp_forward(b: _Builder) -> None:
    """h.{i+1}.in = mid + c_proj(gelu(c_fc(ln_2(mid))))."""
    normed = _layernorm_forward(b, "h.{i}.ln_2", "h.{i}.mid")
    fc, act = b.keep("h.{i}.mlp.fc", ROWS, "F"), b.keep("h.{i}.mlp.act", ROWS, "F")
    _linear_forward(b, "h.{i}.mlp.c_fc", fc, normed)
    b.program.call("gelu_forward", [act], [fc], erf=b.erf)
    proj = b.scratch("h.{i}.mlp.proj", ROWS, "C")
    _linear_forward(b, "h.{i}.mlp.c_proj", proj, act)
    b.program.call("add_forward", ["h.{i+1}.in"], ["h.{i}.mid", proj])


def _mlp_backward(b: _Builder) -> None:
    """grad.h holds the gradient of h.{i+1}.in, which is that of proj and, by the residual path, part of that of mid."""
    dact, dfc = (
        b.scratch("grad.h.{i}.mlp.act", ROWS, "F"),
        b.scratch("grad.h.{i}.mlp.fc", ROWS, "F"),
    )
    b.program.call("linear_backward_input", [dact], ["grad.h", "h.{i}.mlp.c_proj.weight"])
    b.program.call("gelu_backward", [dfc], [dact, "h.{i}.mlp.fc"], erf=b.erf)
    _linear_backward_weight(b, "h.{i}.mlp.c_proj", "grad.h", "h.{i}.mlp.act")
    dnormed = b.scratch("grad.h.{i}.ln_2.out", ROWS, "C")
    _linear_backward(b, "h.{i}.mlp.c_fc", dnormed, dfc, "h.{i}.ln_2.out")
    _layernorm_backward(b, "h.{i}.ln_2", "h.{i}.mid", accumulate=ADD)


def _trunk_forward(b: _Builder, *, cached: bool = False, appends: bool = False) -> None:
    """From tokens to the end of the residual stream, ``h.{L}.in``: what every program of the model begins with."""
    _embedding_forward(b)
    with b.program.layers():
        _attention_forward(b, cached=cached, appends=appends)
        _mlp_forward(b)


def _head_and_loss(b: _Builder, *, trains: bool) -> None:
    """loss = inv_count * sum of cross-entropies of ln_f(h.{L}.in) head^T, in chunks of rows; each chunk's backward follows at once.

    So logits and their gradients exist for R rows only, whatever the vocabulary.
    """
    p = b.program
    p.buffer("targets", ROWS, role="input", dtype="i32")
    p.buffer("scalars", str(len(SCALARS)), role="input")
    normed = _layernorm_forward(b, "ln_f", "h.{L}.in")
    logits, lse = b.scratch("head.logits", "R", "V"), b.scratch("head.lse", "R")
    row_loss = b.scratch("row_loss", ROWS)
    with p.row_chunks("R", ROWS):
        p.call("linear_forward", [logits], [f"{normed}[rows]", b.head, None], transposed=1)
        p.call("cross_entropy_forward", [f"{row_loss}[rows]", lse], [logits, "targets[rows]"])
        if trains:
            dlogits, dnormed = (
                b.scratch("grad.head.logits", "R", "V"),
                b.scratch("grad.ln_f.out", ROWS, "C"),
            )
            p.call("cross_entropy_backward", [dlogits], [logits, "targets[rows]", lse, "scalars"])
            p.call("linear_backward_input", [f"{dnormed}[rows]"], [dlogits, b.head], transposed=1)
            p.call(
                "linear_backward_weight",
                [f"grad.{b.head}"],
                [f"{normed}[rows]", dlogits, "scalars"],
                transposed=1,
                accumulate=CHUNK,
            )
    p.call(
        "loss_sum",
        [p.buffer("loss", "1", role="output")],
        [row_loss, "scalars"],
        accumulate=BETA if trains else WRITE,
    )


# ---- programs -------------------------------------------------------------------------------------------------------------------------


def gradients_program(config: GPTConfig) -> Program:
    """Loss and gradients of one micro-batch; beta in ``scalars`` says whether they are added to those of the one before."""
    b = _Builder("gradients", config, trains=True)
    p = b.program
    _trunk_forward(b)
    _head_and_loss(b, trains=True)
    b.scratch("grad.h", ROWS, "C")
    _layernorm_backward(b, "ln_f", "h.{L}.in", accumulate=WRITE)
    with p.layers(reverse=True):
        _mlp_backward(b)
        _attention_backward(b)
    _embedding_backward(b)
    return p


def loss_program(config: GPTConfig) -> Program:
    """The loss alone, for evaluation."""
    b = _Builder("loss", config, trains=False)
    _trunk_forward(b)
    _head_and_loss(b, trains=False)
    return b.program


def logits_program(config: GPTConfig, name: str = "logits", *, inspects: bool = False) -> Program:
    """Logits of every position; ``inspects`` gives queries, keys and values of every layer too."""
    b = _Builder(name, config, trains=False, inspects=inspects)
    _trunk_forward(b)
    normed = _layernorm_forward(b, "ln_f", "h.{L}.in")
    out = b.program.buffer("logits", ROWS, "V", role="output")
    b.program.call("linear_forward", [out], [normed, b.head, None], transposed=1)
    return b.program


def prefill_program(config: GPTConfig) -> Program:
    """Read prompts of T tokens into the cache; logits of row ``last[b]`` of each."""
    return _generation_program("prefill", config, cached=False)


def decode_program(config: GPTConfig) -> Program:
    """Take T tokens on at ``positions``, reading keys and values from the cache; logits of row ``last[b]`` of each."""
    return _generation_program("decode", config, cached=True)


def _generation_program(name: str, config: GPTConfig, *, cached: bool) -> Program:
    b = _Builder(name, config, trains=False)
    p = b.program
    _trunk_forward(b, cached=cached, appends=True)
    p.buffer("last", "B", role="input", dtype="i32")
    p.call("gather_forward", [b.scratch("last.in", "B", "C")], ["h.{L}.in", "last"])
    normed = _layernorm_forward(b, "ln_f", "last.in", rows="B")
    p.call(
        "linear_forward",
        [p.buffer("next_logits", "B", "V", role="output")],
        [normed, b.head, None],
        transposed=1,
    )
    return p


def model_dims(config: GPTConfig, batch: int, time: int | None = None) -> dict[str, int]:
    """The numbers behind a program's letters for ``batch`` rows of ``time`` tokens (default: the context)."""
    time = config.n_ctx if time is None else time
    return {
        "B": batch,
        "T": time,
        "C": config.n_embd,
        "H": config.n_head,
        "F": config.inner,
        "V": config.n_vocab,
        "L": config.n_layer,
        "S": config.n_ctx,
        "R": chunk_rows(batch * time, config.n_vocab),
    }


def training_programs(
    config: GPTConfig, optimizer: OptimizerConfig, batch: int
) -> tuple[dict[str, Program], dict[str, dict[str, int]]]:
    """All that training runs, samples along the way included: programs and the dims to plan them with."""
    programs = {
        "gradients": gradients_program(config),
        "update": update_program(optimizer),
        "loss": loss_program(config),
        "prefill": prefill_program(config),
        "decode": decode_program(config),
    }
    dims = {name: model_dims(config, batch) for name in ("gradients", "update", "loss")}
    return programs, {**dims, "prefill": model_dims(config, 1), "decode": model_dims(config, 1, 1)}


def inference_programs(
    config: GPTConfig, batch: int = 1, *, logits: bool = True
) -> tuple[dict[str, Program], dict[str, dict[str, int]]]:
    """All that generating and evaluating need, without gradients and moments; ``logits`` of every position are large."""
    programs = {"loss": loss_program(config)}
    if logits:
        programs["logits"] = logits_program(config)
    programs |= {"prefill": prefill_program(config), "decode": decode_program(config)}
    dims = {name: model_dims(config, batch) for name in programs}
    return programs, {**dims, "decode": model_dims(config, batch, 1)}
