"""Gradient clip and AdamW on the parts of parameters that one rank holds.

What this is: the formulas of ``pytorch/optim.py`` for a list of local tensors instead of one arena, since FSDP keeps every parameter's
part in memory of its own. Elementwise work needs no other rank; the norm is a sum that the engine adds up over all of them.
What this is not: ``torch.optim``, for the reasons given there. Read next: ``pytorch/sharded_engine.py``.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard

from posttrainllm.config import OptimizerConfig
from posttrainllm.engines.base import F32
from posttrainllm.errors import EngineError

Shards = dict[str, DTensor]

AT_ONCE = 12  # tensors that a step updates together, one layer's


class ShardedAdamW:
    """Parameters, gradients and moments by name, this rank's part of each."""

    def __init__(self, parameters: Mapping[str, nn.Parameter], config: OptimizerConfig) -> None:
        """Take over parameters that FSDP has cut; the moments are zeros, cut alike."""
        self._config = config
        self.params: Shards = {name: _cut(parameters[name]) for name in sorted(parameters)}
        self._m: Shards = {name: _cut(torch.zeros_like(p)) for name, p in self.params.items()}
        self._v: Shards = {name: _cut(torch.zeros_like(p)) for name, p in self.params.items()}

    def grads(self) -> Shards:
        """The gradients; zeros before the first backward."""
        return {
            name: _cut(torch.zeros_like(p) if p.grad is None else p.grad)
            for name, p in self.params.items()
        }

    def moments(self) -> dict[str, DTensor]:
        """Both moments under the names that they have in files."""
        named = {f"adam.m.{name}": tensor for name, tensor in self._m.items()}
        return named | {f"adam.v.{name}": tensor for name, tensor in self._v.items()}

    @torch.no_grad()
    def load(
        self,
        params: Mapping[str, F32],
        m: Mapping[str, F32] | None,
        v: Mapping[str, F32] | None,
    ) -> None:
        """Keep this rank's part of whole tensors; moments that are not given become zeros.

        Raises: EngineError for a missing, unexpected or misshapen tensor.
        """
        for name in sorted(self.params.keys() ^ set(params)):
            what = "is missing" if name in self.params else "is not part of this model"
            raise EngineError(f"tensor {name!r} {what}")
        for shards, values in ((self.params, params), (self._m, m), (self._v, v)):
            for name, shard in shards.items():
                if values is None:
                    shard.to_local().zero_()
                    continue
                whole = values[name]
                if whole.shape != tuple(shard.shape):
                    raise EngineError(
                        f"tensor {name!r} is {whole.shape} but the model has {tuple(shard.shape)}"
                    )
                _keep(shard, whole)

    def zero_grad(self) -> None:
        """Forget the gradients; backward makes new ones, which costs no pass over memory."""
        for parameter in self.params.values():
            parameter.grad = None

    @torch.no_grad()  # or every part of a tensor would be taken through autograd
    def sum_of_squares(self) -> Tensor:
        """The sum of this rank's squared gradients; returned ()."""
        parts = self._local(self.grads())
        if parts[0].device.type == "cpu":  # where one long vector's norm keeps too few partial sums
            return torch.stack([part.double().square().sum() for part in parts]).sum()
        norms: list[Tensor] = torch._foreach_norm(parts)  # type: ignore[assignment]
        return torch.stack(norms).double().square().sum()

    @torch.no_grad()
    def step(self, norm: float, lr: float, correction1: float, correction2: float) -> None:
        """Update this rank's parameters from their gradients, as ``Optimizer`` in ``optim.py`` does; the gradients stay as they are.

        ``norm`` is that of all gradients on all ranks: they count for clip_norm / norm where norm > clip_norm.
        """
        scale = min(1.0, self._config.clip_norm / norm) if norm > 0 else 1.0
        config, names = self._config, list(self.params)
        grads = self.grads()
        for start in range(0, len(names), AT_ONCE):  # what they need in between stays small
            part = names[start : start + AT_ONCE]
            params, g, m, v = (
                [shards[name].to_local() for name in part]
                for shards in (self.params, grads, self._m, self._v)
            )
            if scale != 1.0:
                g = list(torch._foreach_mul(g, scale))
            torch._foreach_mul_(m, config.beta1)
            torch._foreach_add_(m, g, alpha=1 - config.beta1)
            torch._foreach_mul_(v, config.beta2)
            torch._foreach_addcmul_(v, g, g, value=1 - config.beta2)
            denominator = torch._foreach_div(v, correction2)
            torch._foreach_sqrt_(denominator)
            torch._foreach_add_(denominator, config.eps)
            decayed = [
                one for name, one in zip(part, params, strict=True) if self.params[name].dim() >= 2
            ]
            torch._foreach_add_(decayed, decayed, alpha=-lr * config.weight_decay)
            torch._foreach_addcdiv_(params, m, denominator, value=-lr / correction1)

    def whole(self, shards: Shards, wanted: bool = True) -> dict[str, F32]:
        """Gather tensors one by one; every rank takes part, and keeps them where ``wanted``."""
        found: dict[str, F32] = {}
        for name, shard in shards.items():
            full = _cut(shard.detach()).full_tensor()
            if wanted:
                found[name] = np.array(full.cpu().numpy())
        return found

    def _local(self, shards: Shards) -> list[Tensor]:
        return [shard.to_local() for shard in shards.values()]


def _keep(shard: DTensor, whole: F32) -> None:
    """Copy this rank's rows of a whole tensor: FSDP gives each rank ceil(rows / n), the last ones what is left."""
    mesh = shard.device_mesh
    each = -(-len(whole) // mesh.size())
    first = min(len(whole), mesh.get_local_rank() * each)
    own = whole[first : first + each]
    local = shard.to_local()
    assert tuple(local.shape) == own.shape, (local.shape, own.shape)
    local.copy_(torch.from_numpy(np.ascontiguousarray(own)))


def _cut(tensor: Tensor) -> DTensor:
    assert isinstance(tensor, DTensor)
    assert tensor.placements == (Shard(0),)
    return tensor
