"""Weights as int8: how they are rounded, what a scale belongs to, and how four of them lie in a word.

What this is: the arithmetic that files (``formats/quantised.py``) and engines (``engines/host_engine.py``) share.
What this is not: a file, or a kernel; that is ``kernels/cpp/int8.cpp``.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

LEVELS = 127  # the largest magnitude; -128 is left out, so that both signs reach as far
IN_A_WORD = 4

TABLES = ("wte.weight", "wpe.weight", "lm_head.weight")
"""Matrices whose rows are the outputs: looked up, or multiplied from the right."""

Floats = NDArray[np.float32]
Bytes = NDArray[np.int8]


def shared_axis(name: str) -> int:
    """Return the dimension that one scale covers: the inputs of the product, or the columns of a table."""
    return 1 if name in TABLES else 0


def quantise(weights: Floats, axis: int) -> tuple[Bytes, Floats]:
    """Round a matrix to int8, with one scale for everything along ``axis``.

    The largest magnitude becomes 127; halves are rounded to the even neighbour. The error of a
    weight is at most half a scale, 1/254 of the largest magnitude beside it.

    Shapes: weights (n, m); returned int8 (n, m) and scale, (1, m) for axis 0 and (n, 1) for axis 1.
    """
    scale = (np.abs(weights).max(axis=axis, keepdims=True) / np.float32(LEVELS)).astype(np.float32)
    steps = weights / np.where(scale > 0, scale, np.float32(1))
    return np.clip(np.rint(steps), -LEVELS, LEVELS).astype(np.int8), scale


def dequantise(values: Bytes, scale: Floats) -> Floats:
    """Widen int8 to float32: the product of two float32 numbers, rounded once.

    Shapes: values (n, m), scale (1, m) or (n, 1); returned (n, m).
    """
    with np.errstate(over="ignore"):  # a scale that is too large is refused by whoever read it
        widened: Floats = values.astype(np.float32) * scale
    return widened


def words(values: Bytes) -> NDArray[np.int32]:
    """The bytes as they lie in memory, seen as words of four, the first one lowest.

    Shapes: values (n, m), m a multiple of 4; returned (n, m / 4).
    """
    seen: NDArray[np.int32] = np.ascontiguousarray(values).view("<i4").astype(np.int32, copy=False)
    return seen
