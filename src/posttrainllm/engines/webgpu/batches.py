"""Batches into the webgpu engine's inputs, quickly: what the host does in every step besides recording.

What this is: a shortcut for one batch after another of the same program. Positions, segments and the index of positions are those of the
batch before, so only tokens, targets and the index of tokens are written, straight into the host's copy of the inputs.
What this is not: the definition of the inputs, which is ``base.ProgramEngine``; the first batch goes that way.
"""

from __future__ import annotations

import numpy as np

from posttrainllm.engines.base import I32, Array, Batch
from posttrainllm.engines.webgpu.memory import GpuMemory

MOST_SHORT = 1 << 16  # ids below this sort as 16-bit numbers, which numpy does in linear time


class Batches:
    """The inputs of training and evaluation. ``ready_for`` names the program whose other inputs are in place."""

    def __init__(self, memory: GpuMemory) -> None:
        """Nothing is taken from the memory before the first batch."""
        self.memory = memory
        self.ready_for = ""
        self._views: dict[str, Array] = {}
        self._vocabulary = min((dims["V"] for dims in memory.plan.dims.values()), default=0)

    def valid(self, batch: Batch) -> bool:
        """Whether all ids are in the vocabulary, and targets possibly -1."""
        tokens, targets = batch.tokens, batch.targets
        low, high = int(tokens.min()), int(tokens.max())
        return 0 <= low <= high < self._vocabulary and int(targets.max()) < self._vocabulary

    def write(self, batch: Batch, *, indexed: bool) -> None:
        """Tokens, targets and, where the program has it, the index of tokens."""
        count = batch.tokens.size
        tokens = batch.tokens.ravel()
        self._view("tokens")[:count] = tokens
        self._view("targets")[:count] = batch.targets.ravel()
        if indexed:
            self._write_index(tokens, count)
        self.memory.touch_inputs()

    def _write_index(self, ids: I32, count: int) -> None:
        """``control.token_index`` in place."""
        short = ids.astype(np.uint16) if self._vocabulary <= MOST_SHORT else ids
        order = np.argsort(short, kind="stable")
        ordered = ids[order]
        begins = np.flatnonzero(ordered[1:] != ordered[:-1]) + 1
        used = len(begins) + 1
        rows, starts = self._view("token_index.rows"), self._view("token_index.starts")
        rows[0], starts[0] = ordered[0], 0
        rows[1:used] = ordered[begins]
        starts[1:used] = begins
        rows[used:count], starts[used:count] = -1, count
        self._view("token_index.order")[:count] = order

    def _view(self, name: str) -> Array:
        if name not in self._views:
            self._views[name] = self.memory.input_view(name)
        return self._views[name]
