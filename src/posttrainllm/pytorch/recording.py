"""Calls as a CUDA graph."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Lock
from typing import Any, Final

import torch

RECORDING: Final = Lock()


@contextmanager
def recording(pool: Any = None) -> Iterator[torch.cuda.CUDAGraph]:
    """Record what the block calls; the graph that is given is complete after the block.

    Other threads may use the device meanwhile (another engine, or NCCL's watchdog, which asks the driver), but not record. Python's
    collector rests: if it frees the graph of an engine that nobody has any more, CUDA gives the recording up.
    """
    with RECORDING:
        graph = torch.cuda.CUDAGraph()
        collects = gc.isenabled()
        gc.disable()
        try:
            with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
                yield graph
        finally:
            if collects:
                gc.enable()
