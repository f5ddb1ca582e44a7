"""Runs one op in memory that tells on it: guards around every buffer, poisoned scratch, engines side by side.

Every buffer, input or output, lies between guards of a quiet NaN with a mark in it. A write past an end breaks a guard or changes an
input; a read past an end brings a NaN into the result. Scratch space is all NaN as well, so that reading it before writing it shows.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from needs import missing, require
from op_inputs import Array, Case, Operands
from posttrainllm.engines.cpp_engine import PAGE, aligned_memory, call_table, load_library
from posttrainllm.engines.numpy_ops import NUMPY_OPS
from posttrainllm.engines.wasm_engine import Instance
from posttrainllm.kernels.build import available_builds, host_target
from posttrainllm.kernels.build_wasm import WASM
from posttrainllm.machine import instruction_sets
from posttrainllm.ops import OPS
from posttrainllm.plan import BoundCall, Place

GUARD = 1024  # elements of four bytes on each side
MARK = np.uint32(0x7FC5A5A5)
ALIGN = 64  # elements: where a planned buffer starts
THREADS = (1, 2, 3, 5)


class GuardedMemory:
    """A block with the operands in it. ``shift`` moves every buffer off its alignment, as a window of rows may be."""

    def __init__(self, given: Operands, *, shift: int = 0, scratch: int = 0) -> None:
        """Lay the operands out and copy them in; ``scratch`` bytes follow behind the last guard."""
        self.offsets: dict[str, int | None] = {}
        end = GUARD + shift
        for name, value in given.items():
            self.offsets[name] = None if value is None else end
            if value is not None:
                end = -(-(end + value.size + GUARD) // ALIGN) * ALIGN + shift
        self.scratch = -(-4 * end // PAGE) * PAGE
        self.bytes = aligned_memory(self.scratch + scratch + 4 * GUARD)
        self.words = self.bytes[: len(self.bytes) // 4 * 4].view(np.uint32)
        self.words[:] = MARK
        self.bytes[self.scratch : self.scratch + scratch] = 0xFF
        self.views: Operands = {}
        self._inside = np.zeros(len(self.words), bool)
        self._inside[self.scratch // 4 : -(-(self.scratch + scratch) // 4)] = True
        for name, value in given.items():
            at = self.offsets[name]
            if value is None or at is None:
                self.views[name] = None
                continue
            view = self.words[at : at + value.size].view(value.dtype).reshape(value.shape)
            view[...] = value
            self.views[name] = view
            self._inside[at : at + value.size] = True

    def broken_guards(self) -> list[str]:
        """The buffers beside which something was written, with the distance to the nearest element of theirs."""
        broken = np.flatnonzero((self.words != MARK) & ~self._inside)
        found = {}
        for word in broken[:1000]:
            distances = {
                name: at - word if word < at else word - (at + view.size) + 1
                for name, at in self.offsets.items()
                if at is not None and (view := self.views[name]) is not None
            }
            nearest = min(distances, key=lambda name: distances[name])
            found.setdefault(nearest, f"{nearest} ({distances[nearest]} elements away)")
        return list(found.values())


@dataclass(frozen=True)
class Outcome:
    """What a run left: all operands, and the guards that did not hold."""

    after: Operands
    broken: list[str]

    def outputs(self, case: Case) -> dict[str, Array]:
        """The op's results by name."""
        found = {operand.name: self.after[operand.name] for operand in case.row.outputs}
        return {name: value for name, value in found.items() if value is not None}


class OpEngine(Protocol):
    """An engine to this test: it runs one op."""

    name: str
    threads: tuple[int, ...]

    def supports(self, op: str) -> bool:
        """Whether the engine has the op."""
        ...

    def run(self, case: Case, given: Operands, *, threads: int = 1, shift: int = 0) -> Outcome:
        """Run the op on copies of the operands, inside guards."""
        ...


class NumpyOps:
    """The numpy engine in float32."""

    name = "numpy"
    threads = (1,)

    def supports(self, op: str) -> bool:
        """See ``OpEngine``."""
        return op in NUMPY_OPS

    def run(self, case: Case, given: Operands, *, threads: int = 1, shift: int = 0) -> Outcome:
        """See ``OpEngine``."""
        memory = GuardedMemory(given, shift=shift)
        with np.errstate(all="ignore"):
            NUMPY_OPS[case.op](*memory.views.values(), **case.attributes())
        return Outcome(memory.views, memory.broken_guards())


class CppOps:
    """One build of the C++ kernels, run through the call table."""

    name = "cpp"
    threads = THREADS

    def __init__(self, build: str) -> None:
        """Load the library."""
        self.build = build
        self._library = load_library(build)
        count = self._library.posttrain_op_count()
        self.ops = [self._library.posttrain_op_name(number).decode() for number in range(count)]

    def supports(self, op: str) -> bool:
        """See ``OpEngine``."""
        return op in self.ops

    def run(self, case: Case, given: Operands, *, threads: int = 1, shift: int = 0) -> Outcome:
        """See ``OpEngine``."""
        memory = GuardedMemory(given, shift=shift)
        table = one_call(case, memory)
        scratch = self._library.posttrain_workspace(table.ctypes.data, 1)
        memory = GuardedMemory(given, shift=shift, scratch=scratch)
        failed = self._library.posttrain_run(
            memory.bytes.ctypes.data, table.ctypes.data, 1, memory.scratch, threads
        )
        assert not failed, f"the driver refused {case}"
        return Outcome(memory.views, memory.broken_guards())


class WasmOps:
    """One WebAssembly build of the same kernels, in wasmtime: the whole block is copied in and out."""

    name = "wasm"
    threads = (1,)

    def __init__(self, build: str) -> None:
        """Compile the module."""
        self.build = build
        self.ops = Instance(build, 0).ops

    def supports(self, op: str) -> bool:
        """See ``OpEngine``."""
        return op in self.ops

    def run(self, case: Case, given: Operands, *, threads: int = 1, shift: int = 0) -> Outcome:
        """See ``OpEngine``."""
        memory = GuardedMemory(given, shift=shift)
        raw = one_call(case, memory).view(np.uint8)
        probe = Instance(self.build, len(raw))
        probe.memory[probe.start : probe.start + len(raw)] = raw
        memory = GuardedMemory(given, shift=shift, scratch=probe.workspace(probe.start, 1))
        instance = Instance(self.build, PAGE + len(memory.bytes))
        base = instance.start + PAGE
        inside = instance.memory[base : base + len(memory.bytes)]
        instance.memory[instance.start : instance.start + len(raw)] = raw
        inside[:] = memory.bytes
        instance.run(base, instance.start, 1, memory.scratch)
        memory.bytes[:] = inside
        return Outcome(memory.views, memory.broken_guards())


def one_call(case: Case, memory: GuardedMemory) -> Array:
    """The call table of a case, with offsets from the start of the block."""
    places = tuple(
        None if at is None or view is None else Place("memory", at, view.shape)
        for at, view in zip(memory.offsets.values(), memory.views.values(), strict=True)
    )
    sizes = tuple(case.sizes[letter] for letter in OPS[case.op].sizes)
    call = BoundCall(case.op, places, sizes, tuple(case.attributes().values()))
    return call_table([call], {"memory": 0})


@functools.cache
def op_engine(name: str) -> OpEngine:
    """``numpy``, ``cpp-<build>``, ``wasm32`` or ``wasm64``."""
    if name == "numpy":
        return NumpyOps()
    return WasmOps(name) if name in WASM.processors else CppOps(name.removeprefix("cpp-"))


def obtain(name: str, skip: Callable[[str], None]) -> OpEngine:
    """The engine, or a skip (a failure in CI) that says why it cannot run here."""
    if name.startswith("cpp-"):
        build = name.removeprefix("cpp-")
        if build not in instruction_sets():
            skip(f"this processor cannot run the {build} kernels")
        if build not in available_builds():
            missing(f"the {build} kernels are not built; to build them: make kernels")
    if name in WASM.processors:
        require("wasmtime")
        if name not in available_builds(WASM):
            missing(f"the {name} kernels are not built; to build them: make kernels")
    return op_engine(name)


#: Every engine that runs ops in this process; what cannot run is skipped by name, never left out.
ENGINES = (
    "numpy",
    *(f"cpp-{build}" for build in host_target().processors),
    "wasm32",
    "wasm64",
)
