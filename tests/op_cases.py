"""The cases that every op is proven with on every engine: shapes, attributes and kinds of input.

Shapes hold 1, primes, sizes that no tile divides, and the linear layers of the presets. Inputs and references come from
``op_inputs.py``; an engine that does not run in Python takes both as files (``op_vectors.py``).
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from op_inputs import MODES, Case
from posttrainllm.config import PRESETS, load_config
from posttrainllm.model import model_dims
from posttrainllm.ops import OPS

SLOW_PRESETS = (
    "huge",
    "massive",
    "mega",
    "behemoth",
    "gpt2",
)  # their linear layers take seconds on one core
IN_PLACE_SUMS = ("write", "add")  # ops that do not read the scalars know no beta

EPS = {"eps": 1e-5}
ADAMW = {"beta1": 0.9, "beta2": 0.95, "eps": 1e-8, "weight_decay": 0.1}

ROWS = [
    (1, 1),
    (1, 7),
    (3, 1),
    (2, 5),
    (13, 17),
    (31, 33),
    (64, 64),
    (65, 63),
    (7, 257),
    (130, 96),
    (257, 48),
]
LENGTHS = [1, 2, 7, 63, 64, 65, 1000, 4097, 100_003]
EMBEDDINGS = [(1, 1, 1), (2, 3, 5), (7, 5, 2), (64, 48, 256), (130, 33, 50), (513, 17, 7)]
PRODUCTS = [
    (1, 1, 1), (1, 7, 5), (3, 1, 2), (5, 3, 1), (2, 2, 2), (13, 17, 19), (31, 33, 29), (64, 64, 64), (65, 63, 67),
    (97, 101, 103), (7, 257, 3), (130, 100, 36), (1, 96, 256), (257, 5, 49), (4, 384, 130),
    (33, 300, 2100), (33, 1100, 700), (9, 530, 2077),  # beyond what is packed at a time, in columns, rows, both
]  # fmt: skip
INT8 = [
    # rows, the side that is no words, words of the other
    (1, 1, 1), (1, 7, 2), (2, 3, 5), (3, 96, 72), (4, 33, 17), (5, 64, 16), (1, 256, 192), (1, 768, 64), (7, 301, 100), (1, 1024, 257),
]  # fmt: skip
ATTENTIONS = [
    # B, T, C, H
    (1, 1, 1, 1), (1, 1, 8, 2), (2, 2, 3, 1), (3, 7, 6, 2), (1, 7, 35, 5), (2, 33, 32, 2), (1, 33, 17, 1), (1, 64, 48, 3),
    (2, 65, 64, 4), (1, 65, 128, 1), (1, 66, 256, 1), (1, 130, 33, 3), (2, 130, 32, 2), (1, 127, 80, 1), (1, 257, 16, 2),
]  # fmt: skip
CACHES = [
    # B, T, C, S, H
    (1, 1, 1, 1, 1), (1, 1, 6, 5, 2), (3, 1, 32, 33, 4), (2, 5, 35, 9, 5), (1, 64, 64, 65, 1), (2, 1, 96, 130, 3), (1, 7, 7, 64, 7),
    (1, 2, 256, 70, 1),
]  # fmt: skip
LOGITS = [(3, 1), (1, 2), (2, 3), (5, 7), (1, 1000), (16, 256), (33, 257), (64, 64), (3, 50257)]


def _rows(op: str, attrs: dict[str, float] | None = None, **more: str) -> Iterator[Case]:
    for rows, width in ROWS:
        yield Case(op, {"N": rows, "C": width}, attrs or {}, **more)


def embedding() -> Iterator[Case]:
    for rows, width, table in EMBEDDINGS:
        yield Case("embedding_forward", {"N": rows, "C": width, "V": table, "S": 1 + rows // 2})
        for mode in MODES:
            yield Case("embedding_backward_weight", {"N": rows, "C": width, "K": table}, mode=mode)
    yield Case("embedding_backward_weight", {"N": 300, "C": 33, "K": 4}, kind="one row")
    yield Case("embedding_backward_weight", {"N": 300, "C": 33, "K": 4}, kind="positive")
    yield Case("embedding_backward_weight", {"N": 1024, "C": 96, "K": 256}, mode="beta1")


def layernorm() -> Iterator[Case]:
    yield from _rows("layernorm_forward", EPS)
    for kind in ("offset", "constant", "tiny"):
        for rows, width in ((5, 7), (33, 96), (3, 1280)):
            yield Case("layernorm_forward", {"N": rows, "C": width}, EPS, kind=kind)
    for mode in IN_PLACE_SUMS:
        yield from _rows("layernorm_backward_input", mode=mode)
    for mode in MODES:
        yield from _rows("layernorm_backward_weight", mode=mode)
    for op in ("layernorm_backward_input", "layernorm_backward_weight"):
        for kind in ("offset", "positive", "tiny"):
            yield Case(op, {"N": 257, "C": 96}, kind=kind)
        yield Case(op, {"N": 3, "C": 1280})
        yield Case(op, {"N": 1024, "C": 96})


def linear() -> Iterator[Case]:
    for rows, inputs, outputs in PRODUCTS:
        sizes = {"N": rows, "I": inputs, "O": outputs}
        for transposed in (0.0, 1.0):
            turned = {"transposed": transposed}
            yield Case("linear_forward", sizes, turned)
            yield Case("linear_forward", sizes, turned, without=("bias",))
            for mode in IN_PLACE_SUMS:
                yield Case("linear_backward_input", sizes, turned, mode=mode)
            for mode in MODES:
                yield Case("linear_backward_weight", sizes, turned, mode=mode)
        for mode in MODES:
            yield Case("linear_backward_bias", {"N": rows, "O": outputs}, mode=mode)
    for op in ("linear_forward", "linear_backward_input", "linear_backward_weight"):
        yield Case(op, {"N": 300, "I": 310, "O": 290}, kind="positive")
    yield Case("linear_backward_bias", {"N": 300, "O": 33}, kind="positive")
    yield Case("linear_backward_bias", {"N": 2048, "O": 96})
    yield from preset_linear()


def preset_linear() -> Iterator[Case]:
    """The products of a training step in the sizes of the presets, as the programs call them."""
    for preset in PRESETS:
        config = load_config(preset)
        dims = model_dims(config.model, config.data.batch_size)
        rows, width = dims["B"] * dims["T"], dims["C"]
        slow = preset in SLOW_PRESETS
        for inputs, outputs in (
            (width, 3 * width),
            (width, width),
            (width, dims["F"]),
            (dims["F"], width),
        ):
            sizes = {"N": rows, "I": inputs, "O": outputs}
            yield Case("linear_forward", sizes, slow=slow)
            yield Case("linear_backward_input", sizes, slow=slow)
            yield Case("linear_backward_weight", sizes, mode="beta0", slow=slow)
        sizes, turned = {"N": dims["R"], "I": width, "O": dims["V"]}, {"transposed": 1.0}
        yield Case("linear_forward", sizes, turned, without=("bias",), slow=slow)
        yield Case("linear_backward_input", sizes, turned, slow=slow)
        yield Case("linear_backward_weight", sizes, turned, mode="add", slow=slow)


def gelu() -> Iterator[Case]:
    for op in ("gelu_forward", "gelu_backward"):
        for erf in (0.0, 1.0):
            yield from _rows(op, {"erf": erf})
            for kind in ("range", "large", "zeros"):
                yield Case(op, {"N": 67, "C": 301}, {"erf": erf}, kind=kind)


def attention() -> Iterator[Case]:
    for op in ("attention_forward", "attention_backward"):
        for batch, time, width, heads in ATTENTIONS:
            sizes = {"B": batch, "T": time, "C": width, "H": heads}
            yield Case(op, sizes)
            if time > 2:
                yield Case(op, sizes, kind="segments")
        for kind in ("alone", "large", "equal"):
            yield Case(op, {"B": 2, "T": 67, "C": 48, "H": 3}, kind=kind)
    for batch, time, width, room, heads in CACHES:
        sizes = {"B": batch, "T": time, "C": width, "S": room}
        for kind in ("normal", "full"):
            yield Case("attention_append", sizes, kind=kind)
            yield Case("attention_decode", sizes, {"n_head": heads}, kind=kind)


def cross_entropy() -> Iterator[Case]:
    for op in ("cross_entropy_forward", "cross_entropy_backward"):
        for rows, width in LOGITS:
            yield Case(op, {"N": rows, "V": width})
        for kind in ("ignored", "large", "equal"):
            yield Case(op, {"N": 37, "V": 259}, kind=kind)
    for length in LENGTHS[:-1]:
        for mode in MODES:
            yield Case("loss_sum", {"N": length}, mode=mode)
    yield Case("loss_sum", {"N": 4097}, kind="positive")


def small_ops() -> Iterator[Case]:
    yield from _rows("add_forward")
    for rows, width in ROWS:
        yield Case("gather_forward", {"B": 1 + rows // 3, "N": rows, "C": width})


def optimizer() -> Iterator[Case]:
    for length in [*LENGTHS, 1_048_576]:
        yield Case("sum_squares", {"P": length})
    for norm in (1.0, 0.0):
        for kind in ("above", "below", "zero", "inf", "nan", "sticky"):
            yield Case("gradient_clip", {}, {"clip_norm": norm}, kind=kind)
    for length in LENGTHS:
        yield Case("adamw_step", {"P": length}, ADAMW)
    for kind in ("first", "clipped", "zeros", "tiny", "flagged"):
        yield Case("adamw_step", {"P": 1003}, ADAMW, kind=kind)
    yield Case("adamw_step", {"P": 1003}, {**ADAMW, "weight_decay": 0.0})


def fused() -> Iterator[Case]:
    for rows, inputs, outputs in [*PRODUCTS, (1024, 96, 384), (1024, 384, 96), (300, 310, 290)]:
        sizes = {"N": rows, "I": inputs, "O": outputs}
        for erf in (0.0, 1.0):
            yield Case("linear_gelu_forward", sizes, {"erf": erf})
            yield Case("gelu_linear_backward_input", sizes, {"erf": erf})
        yield Case("linear_gelu_forward", sizes, {"erf": 0.0}, without=("bias",))
        yield Case("linear_residual_forward", sizes)
        yield Case("linear_residual_forward", sizes, without=("bias",))
        for mode in MODES:
            yield Case("linear_backward_weight_bias", sizes, mode=mode)
    for erf in (0.0, 1.0):
        for kind in ("range", "large", "zeros"):
            sizes = {"N": 67, "I": 301, "O": 5}
            yield Case("gelu_linear_backward_input", sizes, {"erf": erf}, kind=kind)
    for op in ("linear_residual_forward", "linear_backward_weight_bias"):
        yield Case(op, {"N": 300, "I": 310, "O": 290}, kind="positive")
    for mode in MODES:
        yield from _rows("layernorm_backward", mode=mode)
    for kind in ("offset", "positive", "tiny"):
        yield Case("layernorm_backward", {"N": 257, "C": 96}, kind=kind)
    for rows, width in ((3, 1280), (1024, 96)):
        yield Case("layernorm_backward", {"N": rows, "C": width})


def int8() -> Iterator[Case]:
    """Rows of whole words: of the outputs as they are, of the inputs transposed."""
    for rows, inputs, words in INT8:
        for transposed in (0.0, 1.0):
            sizes = {"N": rows, "I": inputs, "O": 4 * words, "Q": words}
            if transposed:
                sizes["I"], sizes["O"] = sizes["O"], sizes["I"]
            yield Case("int8_forward", sizes, {"transposed": transposed})
            yield Case("int8_forward", sizes, {"transposed": transposed}, without=("bias",))
    for kind in ("positive", "ends"):
        sizes = {"N": 1, "I": 5120, "O": 64, "Q": 16}
        yield Case("int8_forward", sizes, kind=kind)


def any_sizes() -> Iterator[Case]:
    """A few cases of every op with random sizes, to be wrong in ways that nobody thought of."""
    random = np.random.default_rng(5)
    for op, row in OPS.items():
        for _ in range(6 if op != "int8_forward" else 0):  # its sizes depend on each other
            sizes = {letter: int(random.integers(1, 90)) for letter in row.sizes}
            attrs = {**(EPS if "eps" in row.attrs else {}), **(ADAMW if op == "adamw_step" else {})}
            heads = int(random.integers(1, 6))
            if op.startswith("attention"):
                sizes |= {"B": int(random.integers(1, 4)), "C": heads * int(random.integers(1, 40))}
            if "H" in sizes:
                sizes["H"] = heads
            if "n_head" in row.attrs:
                attrs["n_head"] = heads
            if "S" in sizes and "T" in sizes:
                sizes["S"] += sizes["T"]
            for flag in ("transposed", "erf"):
                if flag in row.attrs:
                    attrs[flag] = float(random.integers(0, 2))
            modes = list(MODES) if any(o.name == "scalars" for o in row.inputs) else IN_PLACE_SUMS
            mode = str(random.choice(modes)) if "accumulate" in row.attrs else "write"
            if op != "gradient_clip":
                yield Case(op, sizes, attrs, mode=mode)


FAMILIES = (
    embedding,
    layernorm,
    linear,
    gelu,
    attention,
    cross_entropy,
    small_ops,
    optimizer,
    fused,
    int8,
    any_sizes,
)
CASES = {str(case): case for family in FAMILIES for case in family()}


def cases_of(op: str) -> list[Case]:
    """The cases of one op."""
    assert op in OPS
    return [case for case in CASES.values() if case.op == op]
