"""What the webgpu tests share: one op alone on a GPU, with guards around its outputs, and the adapter they run on.

That is a real GPU where there is one, else a software adapter; POSTTRAINLLM_ADAPTER names another by a part of its name.
"""

from __future__ import annotations

import functools
import os

import numpy as np

from needs import missing, require
from op_cases import CASES
from op_inputs import Array, Case, Operands
from posttrainllm.engines.webgpu.device import GpuDevice, adapters, choose_adapter
from posttrainllm.engines.webgpu.dispatch import DispatchTable, table_ops
from posttrainllm.engines.webgpu.memory import GpuMemory
from posttrainllm.engines.webgpu.recorder import Recorder
from posttrainllm.ops import OPS, OPTIONAL
from posttrainllm.plan import ALIGN, BoundCall, Place, Plan, Region

HAS = [op for op in OPS if op not in OPTIONAL or op in table_ops()]  # fused ops are a choice
MOST_WORK = 3e7  # multiplications of a case: a software adapter does about 1e9 a second


def work(case: Case) -> float:
    """About how many multiplications a case takes."""
    sizes = case.sizes
    if "I" in sizes:
        return sizes["N"] * sizes["I"] * sizes["O"]
    if case.op.startswith("attention") and "H" in sizes:
        return 4 * sizes["B"] * sizes["T"] ** 2 * sizes["C"]
    return float(np.prod([float(size) for size in sizes.values()] or [1.0]))


SMALL = [
    case for case in CASES.values() if not case.slow and work(case) <= MOST_WORK and case.op in HAS
]

GUARD = ALIGN  # elements before and after an output that an op may not touch
MARK = np.uint32(0x7FC5A5A5)  # a quiet NaN: what is read past an end shows in the result


@functools.cache
def device() -> GpuDevice:
    """The adapter that the tests run on; a skip, or in CI a failure, when there is none."""
    require("wgpu")
    if not adapters():
        missing("no WebGPU adapter; on Debian: apt-get install mesa-vulkan-drivers libvulkan1")
    return GpuDevice(choose_adapter(os.environ.get("POSTTRAINLLM_ADAPTER", "")))


class LoneOp:
    """One case of an op, ready to run on a device."""

    def __init__(self, case: Case, given: Operands, variant: str = "") -> None:
        self.case, self.given = case, given
        regions: dict[str, Region] = {}
        places: dict[str, Place | None] = {}
        for operand in case.row.operands:
            value = given[operand.name]
            places[operand.name] = None
            if value is not None:
                elements = -(-value.size // ALIGN) * ALIGN + 2 * GUARD
                regions[operand.name] = Region(operand.name, operand.dtype, elements)
                places[operand.name] = Place(operand.name, GUARD, value.shape)
        self.places = places
        sizes = tuple(case.sizes[letter] for letter in case.row.sizes)
        self.call = BoundCall(
            case.op, tuple(places.values()), sizes, tuple(case.attributes().values())
        )
        table = DispatchTable(device().limits, {case.op: variant} if variant else None)
        self.variants = table.candidates(self.call)
        plan = Plan({}, {}, regions, {})
        self.memory = GpuMemory(plan, device())
        self.recorder = Recorder(device(), self.memory, table)
        self.recording = self.recorder.record([self.call])

    def run(self) -> dict[str, Array]:
        """Fill all operands and guards, run, and give the outputs back; fails when a guard was touched."""
        for name, place in self.places.items():
            if place is not None:
                whole = Place(name, 0, (self.memory.plan.regions[name].elements,))
                content = np.full(whole.shape, MARK).view(self.memory.dtype(whole))
                value = self.given[name]
                assert value is not None
                content[GUARD : GUARD + value.size] = value.ravel()
                self.memory.write(whole, content)
        encoder = device().device.create_command_encoder()
        self.recorder.encode(encoder, self.recording)
        device().queue.submit([encoder.finish()])
        found = {}
        for operand in self.case.row.outputs:
            place = self.places[operand.name]
            assert place is not None
            elements = self.memory.plan.regions[operand.name].elements
            content = self.memory.read(Place(operand.name, 0, (elements,)))
            value = content[GUARD : GUARD + place.elements]
            outside = np.concatenate([content[:GUARD], content[GUARD + place.elements :]])
            assert (outside.view(np.uint32) == MARK).all(), (
                f"{self.case} wrote outside {operand.name}"
            )
            found[operand.name] = value.reshape(place.shape)
        return found

    def close(self) -> None:
        """Give the buffers back."""
        self.memory.close()
