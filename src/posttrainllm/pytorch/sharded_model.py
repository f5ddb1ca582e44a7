"""What a sharded model computes in one call: FSDP gathers weights around calls of a module, so a step is in one.

What this is: ``Work``, the model with its loss, and ``HeadLoss``, which puts the fused end of a step (``loss.py``) into autograd:
FSDP takes its gradients from there, not from an arena.
What this is not: the sharding (``sharded_engine.py``).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from posttrainllm.pytorch.gpt import GPT, Cache
from posttrainllm.pytorch.loss import CrossEntropy, head_loss


@dataclass(frozen=True)
class Head:
    """How the head's loss is computed: rows of logits at a time, the kernel, what the vocabulary is padded to."""

    chunk: int
    cross_entropy: CrossEntropy
    multiple: int


class HeadLoss(torch.autograd.Function):
    """``loss.head_loss`` as a part of autograd: FSDP takes gradients from there, not from an arena."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, targets: Tensor, scale: Tensor, how: Head
    ) -> Tensor:
        """Shapes: x (R, C); weight (V, C); targets (R,); scale, returned loss ()."""
        n_vocab = len(weight)
        padded = F.pad(weight, (0, 0, 0, -n_vocab % how.multiple))
        wide = torch.float32 if weight.dtype == torch.bfloat16 else weight.dtype
        grad_weight = torch.empty_like(padded, dtype=wide)  # chunks of rows are added up here
        loss, grad_x = head_loss(
            x,
            padded,
            targets,
            scale,
            grad_weight,
            n_vocab=n_vocab,
            chunk=how.chunk,
            cross_entropy=how.cross_entropy,
            first=True,
        )
        ctx.save_for_backward(grad_x, grad_weight[:n_vocab].to(weight.dtype))
        return loss

    @staticmethod
    def backward(ctx: Any, *outputs: Any) -> Any:
        """The gradients are there already; the loss is the end, so what comes back is 1."""
        grad_x, grad_weight = ctx.saved_tensors
        return grad_x, grad_weight, None, None, None


class Work(nn.Module):
    """The model behind one ``forward``: FSDP gathers weights around calls of ``forward`` alone."""

    def __init__(self, model: GPT, head: Head) -> None:
        super().__init__()
        self.model, self.head = model, head

    def forward(
        self,
        tokens: Tensor,
        targets: Tensor | None = None,
        scale: Tensor | None = None,
        cache: Cache | None = None,
    ) -> Tensor:
        """The loss times ``scale`` where there are targets, else logits.

        Shapes: tokens, targets (B, T); scale (); returned () or (B, T, V).
        """
        hidden = self.model.hidden(tokens, cache)
        if targets is None or scale is None:
            return self.model.head(hidden)
        model = self.model
        weight = model.wte.weight if model.config.tied else model.lm_head.weight
        loss: Tensor = HeadLoss.apply(  # type: ignore[no-untyped-call]
            hidden.flatten(0, 1), weight, targets.flatten(), scale, self.head
        )
        return loss
