"""Calls as a CUDA graph."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch


@contextmanager
def recording(pool: Any = None, mode: str = "global") -> Iterator[torch.cuda.CUDAGraph]:
    """Record what the block calls; the graph that is given is complete after the block.

    Python's collector rests meanwhile: if it frees the graph of an engine that nobody has any more, CUDA gives the recording up.
    """
    graph = torch.cuda.CUDAGraph()
    collects = gc.isenabled()
    gc.disable()
    try:
        with torch.cuda.graph(graph, pool=pool, capture_error_mode=mode):
            yield graph
    finally:
        if collects:
            gc.enable()
