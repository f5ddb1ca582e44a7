"""Flat memory of a model under PyTorch: parameters, gradients and both moments, each one tensor.

What this is: ``Arenas``, where every tensor of the model is a view into four (with a working copy
in bfloat16, five) long vectors of one common layout. So a norm is one reduction, an optimizer step
one pass, a cast one kernel and a sum over ranks one call, however many layers there are.
What this is not: the optimizer (``optim.py``) or the model (``gpt.py``).

The vocabulary may be padded here: the training module then sees ``wte.weight`` (and
``lm_head.weight``) with more rows, which stay zero, and everybody else the rows that there are.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from posttrainllm.config import GPTConfig
from posttrainllm.pytorch.gpt import GPT

ALIGNMENT = 64  # numbers: 256 bytes in float32, more than any vector or cache line
ROW = 1024  # numbers of one partial sum of the gradients' norm
VOCABULARY = ("wte.weight", "lm_head.weight")  # whose rows are tokens

Views = dict[str, Tensor]


class Arenas:
    """The numbers of one model: ``params``, ``grads``, ``m`` and ``v`` are views by parameter name.

    Every arena has the same layout: first the tensors of two or more dimensions, which decay, those
    named in ``apart`` after the others; then the vectors; zeros between them and at the end. ``decayed``
    is where the vectors begin, ``apart`` the range of the tensors named so.

    ``flat_params``, ``flat_grads``, ``flat_m``, ``flat_v`` (n,) are the arenas themselves, in ``dtype``;
    ``flat_working`` (n,) is what the training module reads: a copy of ``flat_params`` in ``working``,
    or the same tensor where that is the same type. Without ``training`` there are parameters alone.
    """

    def __init__(
        self,
        model: GPTConfig,
        *,
        device: torch.device,
        dtype: torch.dtype = torch.float32,
        working: torch.dtype | None = None,
        n_vocab: int | None = None,
        apart: frozenset[str] = frozenset(),
        training: bool = True,
    ) -> None:
        """Allocate zeros. ``n_vocab`` is the padded vocabulary, at least that of ``model``."""
        self.padded = model.model_copy(update={"n_vocab": n_vocab or model.n_vocab})
        with torch.device("meta"):
            inside = {name: p.shape for name, p in GPT(self.padded).named_parameters()}
        self._inside = inside
        self._shapes = {
            name: torch.Size((model.n_vocab, *shape[1:])) if name in VOCABULARY else shape
            for name, shape in inside.items()
        }
        matrices = [name for name, shape in inside.items() if len(shape) >= 2]
        vectors = [name for name, shape in inside.items() if len(shape) < 2]
        together = [name for name in matrices if name not in apart]
        self._starts: dict[str, int] = {}
        ends = [0]
        for group in (together, [name for name in matrices if name in apart], vectors):
            end = ends[-1]
            for name in group:
                self._starts[name] = end
                end += _round_up(inside[name].numel(), ALIGNMENT)
            ends.append(end)
        self.apart, self.decayed = (ends[1], ends[2]), ends[2]
        size = _round_up(ends[3], ROW)

        def arena(kind: torch.dtype = dtype) -> Tensor:
            return torch.zeros(size, device=device, dtype=kind)

        self.flat_params = arena()
        self.params = self.views(self.flat_params)
        self.flat_working = self.flat_params
        self.nbytes = size * dtype.itemsize
        if not training:
            return
        self.flat_grads, self.flat_m, self.flat_v = arena(), arena(), arena()
        self.grads, self.m, self.v = map(self.views, (self.flat_grads, self.flat_m, self.flat_v))
        self.nbytes *= 4
        if working not in (None, dtype):
            assert working is not None
            self.flat_working = arena(working)
            self.nbytes += size * working.itemsize

    def views(self, arena: Tensor) -> Views:
        """The tensors in an arena as everybody sees them, by name."""
        return self._cut(arena, self._shapes)

    def padded_views(self, arena: Tensor) -> Views:
        """The tensors in an arena as the training module sees them, the padded rows included."""
        return self._cut(arena, self._inside)

    def _cut(self, arena: Tensor, shapes: dict[str, torch.Size]) -> Views:
        return {
            name: arena[self._starts[name] :][: shape.numel()].view(shape)
            for name, shape in shapes.items()
        }

    def refresh_working(self) -> None:
        """Cast the parameters into the working copy, where that is another tensor."""
        if self.flat_working is not self.flat_params:
            self.flat_working.copy_(self.flat_params)


def padded_vocabulary(n_vocab: int, multiple: int) -> int:
    """Rows of the embedding in memory: matrix products want a multiple (64 of 50,257 makes 50,304)."""
    return _round_up(n_vocab, multiple)


def _round_up(number: int, multiple: int) -> int:
    return math.ceil(number / multiple) * multiple
