"""What an op is handed when it is proven: random inputs that make sense, and what must come out of them.

A ``Case`` (they are listed in ``op_cases.py``) is an op, its sizes, its attributes and the kind of its inputs. ``operands(case)`` draws
the inputs from the case's name, so that they are the same everywhere; ``reference(case, given)`` computes the results with the numpy
engine in float64 from the same float32 numbers. Engines that do not run in Python get both as files: see ``op_vectors.py``. The limits
are in ``tolerances.py``.

What an output holds before the op runs:
    write        finite poison: an element that is not written shows up as a huge error
    accumulate   random values where they are added to, NaN where the old value must never be read (WRITE, and BETA with beta = 0)
    update       values that make sense for the op
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from posttrainllm.control import token_index
from posttrainllm.engines.numpy_ops import NUMPY_OPS
from posttrainllm.extent import Extent
from posttrainllm.ops import ADD, BETA, CLIP, OPS, SCALARS, WRITE, Op

Array = NDArray[Any]
Operands = dict[str, Array | None]

UNNAMED = ("eps", "beta1", "beta2")  # attributes that do not vary from case to case
POISON = np.float32(-7.25e30)
MODES = {"write": (WRITE, 0.0), "add": (ADD, 0.0), "beta0": (BETA, 0.0), "beta1": (BETA, 1.0)}


@dataclass(frozen=True)
class Case:
    """One op under test. ``mode`` is a key of MODES, ``kind`` says how the inputs are drawn, ``without`` what is left out."""

    op: str
    sizes: Mapping[str, int]
    attrs: Mapping[str, float] = field(default_factory=dict)
    mode: str = "write"
    kind: str = "normal"
    without: tuple[str, ...] = ()
    slow: bool = False

    @property
    def row(self) -> Op:
        """The op's row of the table."""
        return OPS[self.op]

    @property
    def accumulates(self) -> bool:
        """Whether the old content of the outputs counts."""
        return self.mode in ("add", "beta1")

    def attributes(self) -> dict[str, float]:
        """All attributes in the table's order."""
        given = {**self.attrs, "accumulate": float(MODES[self.mode][0])}
        return {
            name: float(given.get(name, 0.0 if default is None else default))
            for name, default in self.row.attrs.items()
        }

    def __str__(self) -> str:
        parts = [self.op, "".join(f"{letter}{size}" for letter, size in self.sizes.items())]
        parts += [f"{name}{value:g}" for name, value in self.attrs.items() if name not in UNNAMED]
        parts += [f"without_{name}" for name in self.without]
        parts += [word for word in (self.mode, self.kind) if word not in ("write", "normal")]
        return "-".join(part for part in parts if part)


def shape_of(case: Case, name: str) -> tuple[int, ...]:
    """The numbers of an operand's shape."""
    operand = next(operand for operand in case.row.operands if operand.name == name)
    letters = (
        operand.transposed if operand.transposed and case.attrs.get("transposed") else operand.shape
    )
    return tuple(Extent.parse(entry).bind(case.sizes) for entry in letters)


def elements(case: Case) -> int:
    """How many numbers all operands hold."""
    names = [operand.name for operand in case.row.operands if operand.name not in case.without]
    return sum(math.prod(shape_of(case, name)) for name in names)


def operands(case: Case) -> Operands:
    """Outputs with their old content and inputs, in the table's order; float32 and int32."""
    random = np.random.default_rng(zlib.crc32(str(case).encode()))
    found: Operands = {}
    for operand in case.row.operands:
        shape = shape_of(case, operand.name)
        if operand.name in case.without:
            found[operand.name] = None
        elif operand.dtype == "i32":
            found[operand.name] = np.zeros(shape, np.int32)
        elif operand.mode == "write":
            found[operand.name] = np.full(shape, POISON)
        elif operand.mode == "accumulate" and not case.accumulates:
            found[operand.name] = np.full(shape, np.float32(np.nan))
        else:
            values = random.standard_normal(shape)
            found[operand.name] = np.abs(values) if case.kind == "positive" else values
    if "scalars" in found:
        slots = {
            "inv_count": 1 / 37,
            "beta": MODES[case.mode][1],
            "lr": 3e-3,
            "correction1": 0.271,
            "correction2": 0.142625,
        }
        found["scalars"] = np.array([slots.get(slot, np.nan) for slot in SCALARS])
    _FILL.get(case.op, lambda *_: None)(case, random, found)
    return {
        name: value if value is None or value.dtype == np.int32 else value.astype(np.float32)
        for name, value in found.items()
    }


def run_numpy(case: Case, given: Operands, dtype: type[Any]) -> Operands:
    """The numpy engine's op on copies of the operands, in a float type."""
    used = {
        name: value if value is None or value.dtype == np.int32 else value.astype(dtype)
        for name, value in given.items()
    }
    with np.errstate(all="ignore"):
        NUMPY_OPS[case.op](*used.values(), **case.attributes())
    return used


def reference(case: Case, given: Operands) -> dict[str, Array]:
    """What the outputs must be: the definition in float64 on the same float32 inputs."""
    after = run_numpy(case, given, np.float64)
    return {operand.name: _present(after, operand.name) for operand in case.row.outputs}


def _present(found: Operands, name: str) -> Array:
    value = found[name]
    assert value is not None, f"{name} is left out"
    return value


# ---- inputs that make sense ---------------------------------------------------------------------


def _saved(op: str, case: Case, found: Operands, **sources: str) -> None:
    """Values that a forward op saves, as float32: what the backward op under test is handed."""
    row = OPS[op]
    forward = Case(op, case.sizes, {"eps": 1e-5} if "eps" in row.attrs else {})
    given: Operands = {}
    for operand in row.operands:
        source = found.get(sources.get(operand.name, operand.name))
        given[operand.name] = (
            np.zeros(shape_of(forward, operand.name))
            if operand.mode == "write" or source is None
            else source
        )
    after = run_numpy(forward, given, np.float64)
    for operand in row.outputs:
        if operand.name in found:
            found[operand.name] = after[operand.name]


def _embedding_forward(case: Case, random: np.random.Generator, found: Operands) -> None:
    found["tokens"] = random.integers(0, case.sizes["V"], case.sizes["N"], dtype=np.int32)
    found["positions"] = random.integers(0, case.sizes["S"], case.sizes["N"], dtype=np.int32)


def _embedding_backward(case: Case, random: np.random.Generator, found: Operands) -> None:
    ids = random.integers(0, case.sizes["K"], case.sizes["N"], dtype=np.int32)
    if case.kind == "one row":
        ids[:] = case.sizes["K"] - 1
    found["rows"], found["starts"], found["order"] = token_index(ids)


def _layernorm(case: Case, random: np.random.Generator, found: Operands) -> None:
    x = _present(found, "x")
    if case.kind == "offset":
        x += 1000
    elif case.kind == "constant":
        x[:] = x[:, :1]
    elif case.kind == "tiny":
        x *= 1e-6
    if "mean" in found and case.op != "layernorm_forward":
        whole = {"weight": np.ones(case.sizes["C"]), "bias": np.ones(case.sizes["C"])}
        both = {**found, **whole}
        _saved("layernorm_forward", case, both)
        found["mean"], found["rstd"] = both["mean"], both["rstd"]


def _gelu(case: Case, random: np.random.Generator, found: Operands) -> None:
    x = _present(found, "fc" if "fc" in found else "x")
    if case.kind == "range":
        x[:] = np.linspace(-14, 14, x.size).reshape(x.shape)
    elif case.kind == "large":
        x *= 10.0 ** random.uniform(-8, 4, x.shape)
    elif case.kind == "zeros":
        x[:] = 0


def _attention(case: Case, random: np.random.Generator, found: Operands) -> None:
    batch, time, width = case.sizes["B"], case.sizes["T"], case.sizes["C"]
    qkv = _present(found, "qkv")
    if case.kind == "large":
        qkv[:, : 2 * width] *= 12
    elif case.kind == "equal":
        qkv[:, : 2 * width] = 0
    starts = np.zeros((batch, time), np.int32)
    for row in starts:
        for begin in sorted(
            random.choice(time, random.integers(1, 1 + min(4, time)), replace=False)
        ):
            row[begin:] = begin if case.kind == "segments" else 0
    if case.kind == "alone":
        starts[:] = np.arange(time)
    found["segment_start"] = starts.ravel()
    if case.op == "attention_backward":
        _saved("attention_forward", case, found)


def _cached(case: Case, random: np.random.Generator, found: Operands) -> None:
    batch, time, room = case.sizes["B"], case.sizes["T"], case.sizes["S"]
    positions = [np.sort(random.choice(room, time, replace=False)) for _ in range(batch)]
    if case.kind == "full":
        positions = [np.arange(room - time, room)] * batch
    found["positions"] = np.concatenate(positions).astype(np.int32)


def _gather(case: Case, random: np.random.Generator, found: Operands) -> None:
    found["rows"] = random.integers(0, case.sizes["N"], case.sizes["B"], dtype=np.int32)


def _int8(case: Case, random: np.random.Generator, found: Operands) -> None:
    rows, words = shape_of(case, "weight")
    values = random.integers(-127, 128, (rows, 4 * words)).astype(np.int8)
    if case.kind == "positive":
        values = np.abs(values)
    elif case.kind == "ends":  # also the one value that rounding never writes
        values = random.choice(np.array([-128, -127, 0, 127], np.int8), values.shape)
    found["weight"] = values.view("<i4").astype(np.int32)


def _cross_entropy(case: Case, random: np.random.Generator, found: Operands) -> None:
    logits = _present(found, "logits")
    logits *= {"large": 1e4, "equal": 0.0}.get(case.kind, 3.0)
    targets = random.integers(0, case.sizes["V"], case.sizes["N"], dtype=np.int32)
    targets[random.random(len(targets)) < {"ignored": 1.0}.get(case.kind, 0.25)] = -1
    found["targets"] = targets
    if case.op == "cross_entropy_backward":
        _saved("cross_entropy_forward", case, found)


def _gradient_clip(case: Case, random: np.random.Generator, found: Operands) -> None:
    large, value = np.float32(3.7), case.kind
    found["clip"] = np.array([np.nan, np.nan, float(value == "sticky"), np.nan])
    found["decayed"] = np.array([{"below": 0.25, "zero": 0.0, "inf": np.inf}.get(value, large)])
    found["plain"] = np.array([{"below": 0.125, "zero": 0.0, "nan": np.nan}.get(value, large)])


def _adamw(case: Case, random: np.random.Generator, found: Operands) -> None:
    size = case.sizes["P"]
    clip = {
        "norm": 4.0,
        "scale": 0.37 if case.kind == "clipped" else 1.0,
        "nonfinite": case.kind == "flagged",
    }
    found["clip"] = np.array([float(clip.get(slot, np.nan)) for slot in CLIP])
    if case.kind == "first":
        found["m"], found["v"] = np.zeros(size), np.zeros(size)
    else:
        found["m"] = random.standard_normal(size) * 0.1
        found["v"] = random.standard_normal(size) ** 2 * 0.1 + 1e-4
    if case.kind == "zeros":
        found["grad"] = found["m"] = found["v"] = np.zeros(size)
    if case.kind == "tiny":  # where eps counts
        found["grad"] = random.standard_normal(size) * 1e-8
        found["m"], found["v"] = random.standard_normal(size) * 1e-8, np.full(size, 1e-17)
    if case.kind == "flagged":
        found["grad"] = np.full(size, np.nan)


_FILL: dict[str, Callable[[Case, np.random.Generator, Operands], None]] = {
    "embedding_forward": _embedding_forward,
    "embedding_backward_weight": _embedding_backward,
    "layernorm_forward": _layernorm,
    "layernorm_backward_input": _layernorm,
    "layernorm_backward_weight": _layernorm,
    "gelu_forward": _gelu,
    "gelu_backward": _gelu,
    "attention_forward": _attention,
    "attention_backward": _attention,
    "attention_append": _cached,
    "attention_decode": _cached,
    "gather_forward": _gather,
    "cross_entropy_forward": _cross_entropy,
    "cross_entropy_backward": _cross_entropy,
    "gradient_clip": _gradient_clip,
    "adamw_step": _adamw,
    "gelu_linear_backward_input": _gelu,
    "layernorm_backward": _layernorm,
    "int8_forward": _int8,
}
