"""The int8 copies of weights that a rewritten decode program reads: made when parameters are loaded.

What this is: what the engines of the C++ kernels and numpy do after ``load``. Weights that come from an int8 file are rounded to the
very same int8 again.
What this is not: the rewrite, which is ``int8.py``, or the rounding, which is ``rounding.py``.
"""

from __future__ import annotations

from posttrainllm.engines.base import ProgramEngine, Tensors
from posttrainllm.plan import Place
from posttrainllm.rounding import quantise, shared_axis, words

STATE = "state.int8."


def write_int8(engine: ProgramEngine, params: Tensors) -> None:
    """Round every parameter that the plan has an int8 copy of, and write the copy and its scales."""
    for name in engine.plan.layout:
        region = STATE + name
        if region in engine.plan.regions:
            values, scale = quantise(params[name], shared_axis(name))
            packed = words(values)
            engine.write(Place(region, 0, packed.shape), packed)
            engine.write(Place(region + ".scale", 0, (scale.size,)), scale.ravel())
