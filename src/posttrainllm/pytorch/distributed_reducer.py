"""Gradients of all ranks added up, in the arena where they are.

What this is: ``Reducer``, the ``Reduce`` of a training step: one all-reduce of the flat gradients and one of the loss, between backward and
clip. On CUDA both are part of the step's graph.
What this is not: an average. The loss was divided by the tokens of all ranks, so the sum is the gradient. Read next:
``pytorch/distributed_replica.py``.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import Tensor


class Reducer:
    """The sum over all ranks of the gradients' arena and of the loss."""

    def __call__(self, gradients: Tensor, loss: Tensor) -> None:
        """Add up over ranks, in place. Shapes: gradients (n,); loss ()."""
        works = [dist.all_reduce(values, async_op=True) for values in (gradients, loss)]
        for work in works:
            assert work is not None
            work.wait()


def bits(values: Mapping[str, Tensor]) -> int:
    """A number that differs when any bit of the tensors does, almost surely: replicas must have the same one."""
    total = 0
    for place, name in enumerate(sorted(values), 1):
        whole = values[name].detach().contiguous().view(torch.uint8).flatten()
        words = whole[: whole.numel() // 4 * 4].view(torch.int32)
        total += place * int(words.sum(dtype=torch.int64))
    return total % 2**53
