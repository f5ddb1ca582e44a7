"""Gradient clip, AdamW and Muon for the torch engine, over flat arenas.

What this is: an update that never asks the host anything: rate, corrections, norm and the non-finite
flag are tensors on the device, so the whole of it can be part of a CUDA graph. The formulas are those of the
ops ``gradient_clip`` and ``adamw_step``, written a second time; where Triton runs, one kernel
(``kernels.py``) does what is written here in PyTorch's calls.
What this is not: ``torch.optim``. That one counts steps itself and keeps its moments apart; here
the rate and the bias corrections come from the trainer, as on every engine. Tests hold the two to
each other. Read next: ``pytorch/step.py``.
"""

from __future__ import annotations

from collections import defaultdict
from types import ModuleType

import torch
from torch import Tensor

from posttrainllm.config import GPTConfig, OptimizerConfig
from posttrainllm.pytorch.arena import ROW, Arenas

SCALARS = ("inv_count", "lr", "correction1", "correction2")
"""What changes from step to step, in the order of the tensor of scalars."""

RESULTS = ("loss", "norm", "nonfinite")
"""What a step leaves behind, in the order of a row of the ring."""

RING = 256  # steps whose results wait on the device at most

# Muon's iteration pulls singular values towards 1; coefficients of Jordan and others 2024.
_ITERATIONS, _A, _B, _C = 5, 3.4445, -4.7750, 2.0315


def muon_names(model: GPTConfig) -> frozenset[str]:
    """The matrices that Muon updates: those of the blocks, not embeddings or the head."""
    parts = ("attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj")
    return frozenset(f"h.{i}.{part}.weight" for i in range(model.n_layer) for part in parts)


class Optimizer:
    """The update of all parameters in the arenas, and what a step reports.

    ``nonfinite`` (1,) int32 is sticky: from the first gradient norm that is not finite on, no update
    changes anything until ``reset``. ``ring`` (RING, 3) holds a row of ``RESULTS`` a step,
    row ``counter % RING``.
    """

    def __init__(
        self, arenas: Arenas, config: OptimizerConfig, kernels: ModuleType | None = None
    ) -> None:
        """``kernels`` is the module with the Triton kernels, or None for PyTorch's calls."""
        self._arenas, self._config, self.kernels = arenas, config, kernels
        flat = arenas.flat_params
        self.norm = torch.zeros((), device=flat.device, dtype=flat.dtype)
        self.nonfinite = torch.zeros(1, device=flat.device, dtype=torch.int32)
        self.ring = torch.zeros(RING, len(RESULTS), device=flat.device, dtype=flat.dtype)
        self.counter = torch.zeros(1, device=flat.device, dtype=torch.int64)

    def reset(self) -> None:
        """Forget the flag and the results."""
        self.nonfinite.zero_()
        self.counter.zero_()

    @torch.no_grad()
    def step(self, scalars: Tensor, loss: Tensor) -> None:
        """Measure the gradients, note what came out, clip and update. Shapes: scalars (4,); loss ()."""
        # In two passes, since torch's norm of one long float32 vector keeps too few partial sums: at
        # 25 million numbers (torch 2.13, CPU) it was 1.4e-3 off, relative, and this is 3e-8 off.
        norms = torch.linalg.vector_norm(self._arenas.flat_grads.view(-1, ROW), dim=1)
        finish = finish_step if self.kernels is None else self.kernels.finish_step
        finish(norms, loss, self.norm, self.nonfinite, self.ring, self.counter)
        first, last = self._arenas.apart
        if first < last:
            self._muon(scalars, first, last)
            self._adamw(scalars, 0, first)
        self._adamw(scalars, last if first < last else 0, len(self._arenas.flat_params))

    def _adamw(self, scalars: Tensor, start: int, end: int) -> None:
        """m = beta1 m + (1 - beta1) g;  v = beta2 v + (1 - beta2) g^2
        p -= lr (m / correction1 / (sqrt(v / correction2) + eps) + weight_decay p)
        where g is clipped and the decay is for the tensors of two or more dimensions only.
        """
        arenas, config = self._arenas, self._config
        flat = (arenas.flat_params, arenas.flat_grads, arenas.flat_m, arenas.flat_v)
        p, g, m, v = (one[start:end] for one in flat)
        working = arenas.flat_working[start:end]
        decayed = max(0, min(arenas.decayed, end) - start)
        if self.kernels is not None:
            self.kernels.adamw(
                p, g, m, v, working,
                scalars=scalars, norm=self.norm, nonfinite=self.nonfinite, decayed=decayed,
                beta1=config.beta1, beta2=config.beta2, eps=config.eps,
                weight_decay=config.weight_decay, clip_norm=config.clip_norm,
            )  # fmt: skip
            return
        good, clipped = self._clipped(g)
        lr = torch.where(good, scalars[1], 0)
        m.lerp_(clipped, good.to(m.dtype) * (1 - config.beta1))
        v.lerp_(clipped.square_(), good.to(v.dtype) * (1 - config.beta2))
        change = torch.div(v, scalars[3], out=clipped).sqrt_().add_(config.eps)
        torch.div(m, change, out=change).mul_(lr / scalars[2])
        # Not p.mul_(1 - lr * weight_decay): in float32 that factor is rounded the same way at every step.
        p[:decayed].addcmul_(p[:decayed], -lr * config.weight_decay)
        p.sub_(change)
        if working.dtype != p.dtype:
            working.copy_(p)

    def _clipped(self, grads: Tensor) -> tuple[Tensor, Tensor]:
        """Whether to update at all, (), and the gradients scaled to clip_norm, zeros where not."""
        clip, good = self._config.clip_norm, self.nonfinite[0] == 0
        scale = torch.where(self.norm > clip, clip / self.norm, 1.0)
        return good, (grads * scale).masked_fill_(~good, 0.0)

    def _muon(self, scalars: Tensor, start: int, end: int) -> None:
        """m = momentum m + g;  u = orthogonalized(g + momentum m);  p -= lr (0.2 sqrt(max(I, O)) u + weight_decay p)

        The factor gives an update the size that AdamW's has, so learning rates carry over (Liu and others
        2025, "Muon is scalable for LLM training"). c_attn counts as its three (C, C) parts.
        """
        arenas, config = self._arenas, self._config
        p, g, m = (one[start:end] for one in (arenas.flat_params, arenas.flat_grads, arenas.flat_m))
        good, update = self._clipped(g)
        m.mul_(1 - good.to(m.dtype) * (1 - config.momentum)).add_(update)
        update.add_(m, alpha=config.momentum)
        # The update takes the gradients' place for a moment, so that it has views by name.
        kept = g.clone()
        g.copy_(update)
        groups: dict[torch.Size, list[Tensor]] = defaultdict(list)
        for name, view in arenas.grads.items():
            if not name.startswith("h.") or view.ndim < 2:
                continue
            parts = view.chunk(3, dim=1) if name.endswith("c_attn.weight") else (view,)
            for part in parts:
                groups[part.shape].append(part)
        for shape, views in groups.items():
            size = 0.2 * max(shape) ** 0.5
            for view, result in zip(views, orthogonalized(torch.stack(views)), strict=True):
                view.copy_(result * size)
        lr = torch.where(good, scalars[1], 0)
        p.addcmul_(p, -lr * config.weight_decay)
        p.addcmul_(g, -lr)
        g.copy_(kept)
        if arenas.flat_working.dtype != p.dtype:
            arenas.flat_working[start:end].copy_(p)


def finish_step(
    norms: Tensor, loss: Tensor, norm: Tensor, nonfinite: Tensor, ring: Tensor, counter: Tensor
) -> None:
    """Write the norm of all gradients, set the flag when it is not finite, add a row to the ring.

    Shapes: norms (n,), of parts of the gradients; loss, norm (); nonfinite, counter (1,); ring (RING, 3).
    """
    norm.copy_(norms.square().sum().sqrt())
    nonfinite.copy_(nonfinite | ~norm.isfinite())
    row = torch.stack([loss, norm, nonfinite[0].to(norm.dtype)])
    ring.index_copy_(0, counter % len(ring), row[None])
    counter.add_(1)


def orthogonalized(matrices: Tensor) -> Tensor:
    """Replace the singular values of each matrix by numbers near 1, by Newton and Schulz's iteration.

    Shapes: matrices, returned (n, I, O). bfloat16 on CUDA, where that is what is fast; else their own type.
    """
    x = matrices.to(torch.bfloat16) if matrices.is_cuda else matrices
    if tall := x.shape[1] > x.shape[2]:
        x = x.mT
    x = x / (x.norm(dim=(1, 2), keepdim=True) + 1e-7)
    for _ in range(_ITERATIONS):
        square = x @ x.mT
        x = _A * x + (_B * square + _C * square @ square) @ x
    return (x.mT if tall else x).to(matrices.dtype)
