"""What the tests of the C++ statistics share: the functions of statistics.h, and memory with guards."""

from __future__ import annotations

import ctypes
from collections.abc import Iterable
from functools import cache
from typing import Any

import numpy as np

from posttrainllm.kernels import build

u32, u64, i64, f64 = ctypes.c_uint32, ctypes.c_uint64, ctypes.c_int64, ctypes.c_double
pointer = ctypes.c_void_p
SIGNATURES: dict[str, tuple[Any, list[Any]]] = {
    "corpus_split_near": (u64, [u64, f64]),
    "corpus_split": (u64, [pointer, u64, f64]),
    "corpus_validation_offsets": (u64, [pointer, u64, u64, u64]),
    "movement_add": (None, [pointer, pointer, pointer, u64]),
    "movement_ratio": (f64, [pointer]),
    "counting_runs": (u64, [pointer, pointer, u64, u32]),
    "counting_bytes": (u64, [u64, u32]),
    "counting_begin": (None, [pointer, u64, u32]),
    "counting_validation": (None, [pointer, pointer, u64, u32]),
    "counting_train": (None, [pointer, pointer, u64, u32]),
    "counting_loss": (f64, [pointer, u32]),
    "counting_counted": (u64, [pointer]),
    "counting_guessing": (f64, [u64]),
    "counting_standing": (i64, [f64, pointer, u64]),
    "likeness_words_bytes": (u64, [u64]),
    "likeness_words_begin": (None, [pointer, u64]),
    "likeness_words_written": (None, [pointer, pointer, u64, u32]),
    "likeness_words_read": (None, [pointer, pointer, u64, u32]),
    "likeness_words_end": (None, [pointer, u32]),
    "likeness_words_count": (None, [pointer, pointer, u32, u32]),
    "likeness_copy_bytes": (u64, [u64, u64]),
    "likeness_copy_begin": (None, [pointer, u64, u64]),
    "likeness_copy_written": (None, [pointer, pointer, u64]),
    "likeness_copy_read": (None, [pointer, pointer, u64]),
    "likeness_copy_longest": (None, [pointer, pointer]),
    "likeness_unseen": (u32, [pointer, pointer, u64, u64]),
    "writing_epochs": (f64, [u64] * 5),
    "writing_warning": (u32, [u64, u64, f64]),
    "writing_enough": (u64, [u64]),
    "writing_actions": (u32, [pointer, pointer, u32, pointer, u64, u64, i64, u32]),
    "writing_ahead": (i64, [f64, pointer, u64]),
    "writing_larger": (i64, [pointer, pointer, pointer, u64, u64, u64]),
}
GUARD = 0xA5
SPACE = 64  # bytes on each side of a state that must stay as they are


@cache
def functions() -> Any:
    """The functions of statistics.h, of the library that the engine loads."""
    assert "plain" not in build.stale_builds(), "run: make kernels"
    library = ctypes.CDLL(str(build.library_path("plain")))
    found = type("Functions", (), {})()
    for function, (result, arguments) in SIGNATURES.items():
        bound = library[function]
        bound.restype, bound.argtypes = result, arguments
        setattr(found, function, bound)
    return found


class State:
    """Memory for a state, full of rubbish, with guards around it."""

    def __init__(self, size: int) -> None:
        self.memory = np.full(2 * SPACE + size, GUARD, np.uint8)
        self.at = self.memory.ctypes.data + SPACE
        assert self.at % 8 == 0

    def check(self) -> None:
        assert (self.memory[:SPACE] == GUARD).all()
        assert (self.memory[-SPACE:] == GUARD).all()


def pieces(text: np.ndarray, size: int) -> Iterable[np.ndarray]:
    for at in range(0, len(text), size):
        yield np.ascontiguousarray(text[at : at + size])


def array(text: bytes) -> np.ndarray:
    return np.frombuffer(text, np.uint8)
