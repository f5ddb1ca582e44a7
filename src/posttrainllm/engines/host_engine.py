"""Engines whose memory this process sees: numpy arrays over it, so that writing and reading are assignments.

What this is: what numpy, cpp and wasm share beyond ``base.ProgramEngine``. When parameters are loaded, those that the plan has an int8 copy
of (``int8.py``) are rounded; weights that come from an int8 file are rounded to the very same int8 again.
What this is not: the rounding, which is ``rounding.py``.
"""

from __future__ import annotations

from abc import abstractmethod

from posttrainllm.engines.base import Array, ProgramEngine, Tensors
from posttrainllm.plan import Place
from posttrainllm.rounding import quantise, shared_axis, words

INT8 = "state.int8."


class HostEngine(ProgramEngine):
    """See ``base.ProgramEngine``. A subclass brings the memory, the view of a place in it, and the run."""

    @abstractmethod
    def view(self, place: Place) -> Array:
        """The place itself, not a copy."""

    def write(self, place: Place, values: Array) -> None:
        """See ``ProgramEngine.write``."""
        self.view(place)[...] = values

    def read(self, place: Place) -> Array:
        """See ``ProgramEngine.read``."""
        return self.view(place).copy()

    def load(self, params: Tensors, m: Tensors | None = None, v: Tensors | None = None) -> None:
        """See ``Engine.load``; int8 copies of weights are made here."""
        super().load(params, m, v)
        for name in self.plan.layout:
            region = INT8 + name
            if region in self.plan.regions:
                values, scale = quantise(params[name], shared_axis(name))
                packed = words(values)
                self.write(Place(region, 0, packed.shape), packed)
                self.write(Place(region + ".scale", 0, (scale.size,)), scale.ravel())
