"""Token by token: prompts into a cache, then one token a row, over one float32 module.

What this is: ``Writer``, behind ``prefill`` and ``decode`` of the torch engine. On CUDA a token is one graph, since its
kernels are so small that starting them one by one takes ten times as long as running them.
What this is not: sampling (``control.py``), or the attention over the cache (``gpt.py``).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from posttrainllm.pytorch.gpt import GPT, Cache
from posttrainllm.pytorch.recording import recording

ALLOWED = 1e-3  # how far a graph's logits may be from those of its calls, as a share of the largest
KEPT = 4  # how many numbers of rows have a cache and a graph kept on CUDA

LITTLE = 1 << 22
"""Tokens times parameters up to which they are one thread's on the CPU.

Threads meet after every small operation, and one that the system has put aside keeps the others waiting: at preset tiny a token took
14.7 ms with two threads on two processors that had other work, 0.3 ms with one."""


@dataclass
class _Recorded:
    """The graph of a token for so many rows, and what it reads and writes: tokens (B, 1), logits (B, V)."""

    graph: torch.cuda.CUDAGraph
    tokens: Tensor
    logits: Tensor


class Writer:
    """Writes with one model; a prefill starts anew. ``trouble`` says why tokens are no graphs on CUDA, else it is empty."""

    def __init__(self, module: GPT, device: torch.device, dtype: torch.dtype) -> None:
        """``module``'s weights stay where they are in memory; their values may change."""
        self._module, self._device, self._dtype = module, device, dtype
        self._parameters = module.config.parameters()
        self._caches: dict[int, Cache] = {}
        self._recorded: dict[int, _Recorded] = {}
        self.cache: Cache | None = None
        self.trouble = ""

    def prefill(self, tokens: Tensor, lengths: Tensor) -> Tensor:
        """Take prompts (B, T), right-padded, of ``lengths`` (B,); returned logits (B, V) of the last token of each."""
        batch = len(tokens)
        self.cache = self._cache(batch)
        with self._threads(tokens.numel()):
            hidden = self._module.hidden(tokens, self.cache)
            self.cache.advance(lengths)
            rows = torch.arange(batch, device=self._device)
            return self._module.head(hidden[rows, lengths - 1])

    def decode(self, tokens: Tensor) -> Tensor:
        """Take one token a row, (B,); returned logits (B, V), valid until the next call."""
        cache, batch = self.cache, len(tokens)
        assert cache is not None
        if self._device.type == "cuda" and not self.trouble and batch not in self._recorded:
            self._record(tokens, cache)
        recorded = self._recorded.get(batch)
        if recorded is None:
            with self._threads(batch):
                logits = self._next(tokens[:, None], cache)
                cache.advance(1)
            return logits
        recorded.tokens.copy_(tokens[:, None])
        recorded.graph.replay()
        cache.longest += 1
        return recorded.logits

    def forget(self) -> None:
        """Free caches and graphs."""
        self._caches.clear()
        self._recorded.clear()
        self.cache = None

    def _cache(self, batch: int) -> Cache:
        """An empty cache: a new one, or on CUDA the one that the graph of so many rows knows."""
        config = self._module.config
        if self._device.type != "cuda":
            return Cache(config, batch, device=self._device, dtype=self._dtype)
        if batch not in self._caches:
            if len(self._caches) >= KEPT:
                oldest = next(iter(self._caches))
                del self._caches[oldest]
                self._recorded.pop(oldest, None)
            self._caches[batch] = Cache(
                config, batch, device=self._device, dtype=self._dtype, whole=True
            )
        self._caches[batch].restart()
        return self._caches[batch]

    @contextmanager
    def _threads(self, tokens: int) -> Iterator[None]:
        """Compute with one thread where so many tokens are too little work for several."""
        before = torch.get_num_threads()
        if self._device.type != "cpu" or before == 1 or tokens * self._parameters > LITTLE:
            yield
            return
        torch.set_num_threads(1)
        try:
            yield
        finally:
            torch.set_num_threads(before)

    def _next(self, tokens: Tensor, cache: Cache) -> Tensor:
        """Shapes: tokens (B, 1); returned (B, V)."""
        return self._module.head(self._module.hidden(tokens, cache)[:, 0])

    def _record(self, tokens: Tensor, cache: Cache) -> None:
        """Record a token for so many rows, and hold it to the calls that it is made of; where it fails, say so in ``trouble``.

        The cache ends as it was, but for the place that the token is about to fill. Raises: torch.OutOfMemoryError.
        """
        lengths = cache.lengths.clone()
        try:
            recorded = self._captured(len(tokens), cache)
            recorded.tokens.copy_(tokens[:, None])
            recorded.graph.replay()
            cache.lengths.copy_(lengths)
            wanted = self._next(tokens[:, None], cache)
            error = float((recorded.logits - wanted).abs().max() / wanted.abs().max())
            self.trouble = "" if error <= ALLOWED else f"a graph's logits are off by {error:.2g}"
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            self.trouble = f"no graph: {str(error).strip().splitlines()[0]}"
            cache.lengths.copy_(lengths)
        if not self.trouble:
            self._recorded[len(tokens)] = recorded

    def _captured(self, batch: int, cache: Cache) -> _Recorded:
        tokens = torch.zeros((batch, 1), device=self._device, dtype=torch.int64)
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(2):
                self._next(tokens, cache)
        torch.cuda.current_stream().wait_stream(side)
        with recording() as graph:
            logits = self._next(tokens, cache)
            cache.lengths += 1
        return _Recorded(graph, tokens, logits)
