"""Gradients of all ranks added up in their arena, while backward still runs.

What this is: ``Reducer``, the ``Reduce`` of a training step. The arena is one flat tensor, so a bucket is a range of it and nothing is
copied for the network's sake. Buckets are cut from the arena's end, where backward begins; one is sent as soon as all gradients in it and
in the buckets before it are there. Every rank cuts and sends alike, since order and sizes come from the model alone. On CUDA all of it is
part of the step's graph.
What this is not: an average. The loss was divided by the tokens of all ranks, so the sum is the gradient. Read next:
``pytorch/distributed_replica.py``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import repeat

import torch
import torch.distributed as dist
from torch import Tensor

BUCKET_BYTES = 32 * 2**20
"""Least size of a bucket: enough for a link's full speed, and small enough that many are hidden behind backward."""


class Reducer:
    """The sum over all ranks of one arena of gradients and of one loss."""

    def __init__(self, bucket_bytes: int = BUCKET_BYTES) -> None:
        """``bind`` says of which arena."""
        self._bucket_bytes = bucket_bytes
        self._waiting = False
        self._works: list[dist.Work] = []

    def bind(self, arena: Tensor, views: Mapping[str, Tensor], head: str) -> None:
        """Learn where gradients are: ``views`` are places in ``arena``, by parameter name.

        The head's gradient is in its place before backward begins: with tied weights the rest is added there.
        """
        self._arena, self._views, self._head = arena, views, head
        self.edges = bucket_edges(arena, views, self._bucket_bytes)
        self._members: list[set[str]] = [set() for _ in self.edges]
        self._bucket = {}
        for name, view in views.items():
            offset = view.storage_offset() - arena.storage_offset()
            bucket = next(i for i, (start, end) in enumerate(self.edges) if start <= offset < end)
            self._bucket[name] = bucket
            if name != "lm_head.weight":  # no gradient comes for it from behind
                self._members[bucket].add(name)

    def expect(self, first: bool) -> None:
        """The next backward completes the step's gradients: take them, written when ``first``, else added, and send them."""
        self._missing = [set(members) for members in self._members]
        self._taken: list[dict[str, Tensor]] = [{} for _ in self.edges]
        self._first, self._sent, self._waiting = first, 0, True
        self._send_full()

    def __call__(self, gradients: Tensor, loss: Tensor) -> None:
        """Send what is left, the loss too, and wait for all. Shapes: gradients (n,), the arena; loss (); both in place."""
        if not self._waiting:  # the last backward was over before anybody knew that it was the last
            self._sent = 0
            self._taken = [{} for _ in self.edges]
        self._waiting = False
        while self._sent < len(self.edges):
            self._send()
        self._add_up(loss)
        for work in self._works:
            work.wait()
        self._works.clear()

    def take(self, names: Sequence[str], grads: Sequence[Tensor] | None) -> None:
        """Gradients that are there now; None where they are in their places already."""
        for name, grad in zip(names, repeat(None) if grads is None else grads, strict=False):
            bucket = self._bucket[name]
            if grad is not None:
                self._taken[bucket][name] = grad
            self._missing[bucket].discard(name)
        self._send_full()

    def _send_full(self) -> None:
        while self._sent < len(self.edges) and not self._missing[self._sent]:
            self._send()

    def _send(self) -> None:
        """Put the next bucket's gradients into their places and start the sum."""
        taken = self._taken[self._sent]
        added = {n: g for n, g in taken.items() if not self._first or n == self._head}
        written = {n: g for n, g in taken.items() if n not in added}
        if written:
            torch._foreach_copy_([self._views[name] for name in written], list(written.values()))
        if added:
            torch._foreach_add_([self._views[name] for name in added], list(added.values()))
        start, end = self.edges[self._sent]
        self._add_up(self._arena[start:end])
        self._taken[self._sent] = {}
        self._sent += 1

    def _add_up(self, values: Tensor) -> None:
        work = dist.all_reduce(values, async_op=True)
        assert work is not None
        self._works.append(work)


def bucket_edges(
    arena: Tensor, views: Mapping[str, Tensor], bucket_bytes: int
) -> list[tuple[int, int]]:
    """Cut an arena into ranges of at least ``bucket_bytes``, in the order in which backward fills them.

    Cuts are at the beginnings of matrices. The vectors of all layers, at the arena's end, are complete only with the first layer, so they
    go before the last bucket alone, which has the embeddings.
    """
    base, least = arena.storage_offset(), max(1, bucket_bytes // arena.element_size())
    places = [(int(view.storage_offset() - base), view.dim()) for view in views.values()]
    matrices = sorted(start for start, dim in places if dim >= 2)
    vectors = min((start for start, dim in places if dim < 2), default=len(arena))
    edges: list[tuple[int, int]] = []
    end = vectors
    for start in reversed(matrices):
        if end - start >= least or start == matrices[0]:
            edges.append((start, end))
            end = start
    edges.insert(len(edges) - 1, (vectors, len(arena)))
    return [(start, end) for start, end in edges if start < end]


def bits(values: Mapping[str, Tensor]) -> int:
    """A number that differs when any bit of the tensors does, almost surely: replicas must have the same one."""
    total = 0
    for place, name in enumerate(sorted(values), 1):
        whole = values[name].detach().contiguous().view(torch.uint8).flatten()
        words = whole[: whole.numel() // 4 * 4].view(torch.int32)
        total += place * int(words.sum(dtype=torch.int64))
    return total % 2**53
