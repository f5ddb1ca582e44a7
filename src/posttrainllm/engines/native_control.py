"""The control plane in C++ where Python waits for it: initial values, several times as fast as ``control.py`` and with its bits.

What this is: what of ``kernels/cpp/control.cpp`` is worth calling from Python, for any engine. Where the kernels are not
built, the definition computes.
What this is not: the definition (``control.py``), or an engine.
"""

from __future__ import annotations

import ctypes
import functools
from concurrent.futures import ThreadPoolExecutor
from typing import Any, get_args

import numpy as np
from numpy.typing import NDArray

from posttrainllm import control
from posttrainllm.engines.cpp_engine import runnable_builds
from posttrainllm.kernels.build import library_path
from posttrainllm.machine import available_threads

PIECE = 1 << 20  # numbers that a thread draws at a time


@functools.cache
def _native_draw() -> Any:
    """``control_initial_values`` of ``kernels/cpp/control.h``, or None where no build runs here."""
    builds = runnable_builds()
    if not builds:
        return None
    try:
        function = ctypes.CDLL(str(library_path(builds[-1]))).control_initial_values
    except (OSError, AttributeError):  # a build of another version
        return None
    function.restype = None
    function.argtypes = [
        ctypes.c_void_p, ctypes.c_uint64, ctypes.c_uint64, ctypes.c_uint64, ctypes.c_uint64, ctypes.c_uint32,
        ctypes.c_uint32,
    ]  # fmt: skip
    return function


def initial_values(
    seed: int, name: str, count: int, kind: control.Init, *, n_layer: int
) -> NDArray[np.float32]:
    """See ``control.initial_values``: the same bits, with all threads of this process."""
    draw = _native_draw()
    if draw is None:
        return control.initial_values(seed, name, count, kind, n_layer=n_layer)
    values = np.empty(count, np.float32)
    stream, code = control.stream_id(name), get_args(control.Init).index(kind)

    def piece(start: int) -> None:
        numbers = min(PIECE, count - start)
        draw(values[start:].ctypes.data, seed, stream, start, numbers, code, n_layer)

    starts = range(0, count, PIECE)
    if len(starts) == 1:
        piece(0)
    else:
        with ThreadPoolExecutor(available_threads()) as pool:
            list(pool.map(piece, starts))
    return values
