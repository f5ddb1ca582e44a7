"""The cpp engine: the C++ kernels as a native shared library.

The host lays all regions into one block of memory, writes the bound program as a call table (the layout of ``kernels/cpp/call.h``) and
runs a whole step with one call; threads live in the library. Results do not depend on their number.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from posttrainllm.engines.base import Array
from posttrainllm.engines.host_engine import HostEngine
from posttrainllm.errors import EngineError
from posttrainllm.kernels.build import available_builds, build_id, library_path
from posttrainllm.machine import available_threads, instruction_sets
from posttrainllm.ops import FUSED, OPS
from posttrainllm.plan import BoundCall, Place, Plan
from posttrainllm.program import Program

ABSENT = 2**64 - 1  # the offset of an optional operand that was left out
CALL = np.dtype(
    [
        ("op", "<u4"),
        ("pad", "<u4"),
        ("buf", "<u8", 10),
        ("size", "<i8", 8),
        ("attr", "<f8", 8),
        ("reserved", "<u8", 5),
    ]
)
NUMBER = {name: number for number, name in enumerate(OPS)}
PAGE = 4096


def lay_out(plan: Plan) -> tuple[dict[str, int], int]:
    """Byte offset of every region when one follows the other, and where the last one ends."""
    offsets, end = {}, 0
    for region in plan.regions.values():
        offsets[region.name], end = end, end + region.nbytes
    return offsets, end


def call_table(calls: list[BoundCall], base: Mapping[str, int]) -> NDArray[Any]:
    """Bound calls as records of ``CALL``; ``base`` gives the byte offset of every region."""
    table = np.zeros(len(calls), CALL)
    for record, call in zip(table, calls, strict=True):
        record["op"] = NUMBER[call.op]
        for index, place in enumerate(call.operands):
            record["buf"][index] = (
                ABSENT if place is None else base[place.region] + 4 * place.offset
            )
        record["size"][: len(call.sizes)] = call.sizes
        record["attr"][: len(call.attrs)] = call.attrs
    return table


def runnable_builds() -> list[str]:
    """The builds that are there and that this processor can run, the fastest last."""
    return [name for name in available_builds() if name in instruction_sets()]


def choose_build(wanted: str = "") -> str:
    """The build to load: the one asked for, else the best this processor can run.

    Raises: EngineError when it was not built or the processor lacks its instructions.
    """
    built, runnable = available_builds(), runnable_builds()
    if not built:
        raise EngineError("the C++ kernels are not built", "run: make kernels")
    if wanted and wanted not in runnable:
        why = "this processor lacks its instructions" if wanted in built else "it was not built"
        raise EngineError(
            f"cpp build {wanted!r} cannot run: {why}; there are {', '.join(runnable)}"
        )
    return wanted or runnable[-1]


def load_library(build: str) -> ctypes.CDLL:
    """Load a build and declare its entry points; checks that it has the op table of this package."""
    library = ctypes.CDLL(str(library_path(build)))
    library.posttrain_workspace.restype = ctypes.c_uint64
    library.posttrain_workspace.argtypes = [ctypes.c_void_p, ctypes.c_uint64]
    library.posttrain_run.restype = ctypes.c_int32
    library.posttrain_run.argtypes = [
        ctypes.c_void_p,
        ctypes.c_void_p,
        ctypes.c_uint64,
        ctypes.c_uint64,
        ctypes.c_uint32,
    ]
    library.posttrain_op_count.restype = ctypes.c_uint32
    library.posttrain_op_name.restype = ctypes.c_char_p
    library.posttrain_op_name.argtypes = [ctypes.c_uint32]
    names = [
        library.posttrain_op_name(number).decode() for number in range(library.posttrain_op_count())
    ]
    if names != list(OPS):
        odd = sorted(set(names) ^ set(OPS)) or ["their order"]
        raise EngineError(
            f"the C++ kernels do not fit this version: {odd[0]} differs", "run: make kernels"
        )
    return library


def aligned_memory(nbytes: int) -> NDArray[np.uint8]:
    """Zeroed memory that starts on a page."""
    raw = np.zeros(nbytes + PAGE, np.uint8)
    start = -raw.ctypes.data % PAGE
    return raw[start : start + nbytes]


class CppEngine(HostEngine):
    """See ``base.Engine``. ``threads`` 0 means all that this process may use."""

    name = "cpp"
    fused_ops = frozenset(FUSED)

    def __init__(
        self,
        programs: Mapping[str, Program],
        dims: Mapping[str, Mapping[str, int]],
        *,
        threads: int = 0,
        build: str = "",
    ) -> None:
        """Plan the programs, load the library and take the memory, the kernels' workspace included.

        Raises: TooLargeError when this machine does not have it.
        """
        super().__init__(programs, dims)
        self.build = choose_build(build)
        self.threads = threads or available_threads()
        self._library = load_library(self.build)
        self._base, end = lay_out(self.plan)
        workspace = 0
        for name in self.plan.programs:
            table = call_table(self.plan.bind(name), self._base)
            needed = self._library.posttrain_workspace(table.ctypes.data, len(table))
            workspace = max(workspace, needed)
        self._workspace = -(-end // PAGE) * PAGE
        self.check_memory(self._workspace + workspace)
        self._memory = aligned_memory(self._workspace + workspace)

    @property
    def info(self) -> dict[str, str | int]:
        """Build, its id and the threads in use."""
        return {
            "engine": self.name,
            "build": self.build,
            "build_id": build_id(self.build),
            "threads": self.threads,
        }

    @property
    def nbytes(self) -> int:
        """All memory of the engine, taken once."""
        return int(self._memory.nbytes)

    def view(self, place: Place) -> Array:
        """See ``HostEngine.view``."""
        start = self._base[place.region] + 4 * place.offset
        dtype = np.float32 if self.plan.regions[place.region].dtype == "f32" else np.int32
        return self._memory[start : start + 4 * place.elements].view(dtype).reshape(place.shape)

    def prepare(self, calls: list[BoundCall]) -> NDArray[Any]:
        """The call table."""
        return call_table(calls, self._base)

    def run(self, prepared: NDArray[Any]) -> None:
        """Run the table with one call."""
        failed = self._library.posttrain_run(
            self._memory.ctypes.data,
            prepared.ctypes.data,
            len(prepared),
            self._workspace,
            self.threads,
        )
        if failed:
            raise EngineError(f"the C++ driver refused call {failed - 1} of {len(prepared)}")
