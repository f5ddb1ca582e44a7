"""The numpy engine: the definition that every other engine is held to.

It runs the same programs over the same plan, in float32 or float64, one op of ``numpy_ops.py`` at a time. It is slow on purpose. It
can run every fused op and asks for none: what others are held to is the program as it was written.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from posttrainllm.engines.base import Array
from posttrainllm.engines.host_engine import HostEngine
from posttrainllm.engines.numpy_ops import NUMPY_OPS
from posttrainllm.ops import OPS
from posttrainllm.plan import BoundCall, Place
from posttrainllm.program import Program

# Arrays of the size of its largest operand that an op of ``numpy_ops.py`` holds at once.
TEMPORARIES = 6

Prepared = list[tuple[Any, list[Array | None], dict[str, float]]]


class NumpyEngine(HostEngine):
    """See ``base.Engine``. ``dtype`` is the float type of all arithmetic: float32 trains, float64 proves."""

    name = "numpy"

    def __init__(
        self,
        programs: Mapping[str, Program],
        dims: Mapping[str, Mapping[str, int]],
        *,
        dtype: type[np.floating[Any]] = np.float32,
    ) -> None:
        """Plan the programs and take the memory. Raises: TooLargeError when this machine does not have it."""
        super().__init__(programs, dims)
        self.dtype = dtype
        self.temporaries = self._temporaries() * np.dtype(dtype).itemsize // 4
        held = self.plan.nbytes * np.dtype(dtype).itemsize // 4
        self.check_memory(held + self.temporaries)
        self._memory = {
            region.name: np.zeros(region.elements, dtype if region.dtype == "f32" else np.int32)
            for region in self.plan.regions.values()
        }

    def _temporaries(self) -> int:
        """Bytes that numpy takes inside the largest op, in float32: a few arrays like its operands, and all scores of an attention."""
        largest = 0
        for name in self.plan.programs:
            for call in self.plan.bind(name):
                operands = max(place.elements for place in call.operands if place is not None)
                if call.op in ("attention_forward", "attention_backward"):
                    size = dict(zip(OPS[call.op].sizes, call.sizes, strict=True))
                    operands = max(operands, size["B"] * size["H"] * size["T"] ** 2)
                largest = max(largest, operands)
        return TEMPORARIES * 4 * largest

    @property
    def info(self) -> dict[str, str | int]:
        """The library and its float type."""
        return {"engine": self.name, "numpy": np.__version__, "dtype": np.dtype(self.dtype).name}

    @property
    def nbytes(self) -> int:
        """The plan's regions as they are held here, and what numpy takes for a moment inside the largest op."""
        return sum(array.nbytes for array in self._memory.values()) + self.temporaries

    def view(self, place: Place) -> Array:
        """See ``HostEngine.view``."""
        flat = self._memory[place.region][place.offset : place.offset + place.elements]
        return flat.reshape(place.shape)

    def prepare(self, calls: list[BoundCall]) -> Prepared:
        """Look up the function, the views and the attributes of each call."""
        return [
            (
                NUMPY_OPS[call.op],
                [None if place is None else self.view(place) for place in call.operands],
                dict(zip(OPS[call.op].attrs, call.attrs, strict=True)),
            )
            for call in calls
        ]

    def run(self, prepared: Prepared) -> None:
        """Run the calls in order. Overflow and NaN are data here, as on every engine: the clip op looks for them."""
        with np.errstate(all="ignore"):
            for function, operands, attrs in prepared:
                function(*operands, **attrs)
