"""The wasm engine: the C++ kernels as WebAssembly inside wasmtime, with one thread.

It runs what the browser runs, bit for bit, from Python: the same modules, the same call table, one call
a step. Memory is made once, at the size that the plan and the kernels' workspace need, and never grows;
a run that fits into 32-bit memory uses the 32-bit module. Threads are for node and browser: wasmtime's
Python package has no shared memory. Next: ``web/src/runtime/wasm.ts``, the host with threads.
"""

from __future__ import annotations

import atexit
import ctypes
import functools
from collections.abc import Mapping
from importlib.metadata import version
from typing import Any

import numpy as np
from numpy.typing import NDArray

from posttrainllm.engines.base import Array, TooLargeError
from posttrainllm.engines.cpp_engine import CppEngine, call_table, lay_out
from posttrainllm.engines.host_engine import HostEngine
from posttrainllm.errors import EngineError
from posttrainllm.kernels.build import build_id, library_path
from posttrainllm.kernels.build_wasm import PAGE, PAGES, WASM
from posttrainllm.ops import OPS
from posttrainllm.plan import BoundCall, Place
from posttrainllm.program import Program

BUILDS = ("wasm32", "wasm64")
ALIGN = 4096
INSTALL = "pip install 'posttrainllm[wasm]'"


@functools.cache
def _compiled(build: str) -> tuple[Any, Any]:
    """wasmtime's engine and the compiled module of a build, once a process."""
    try:
        import wasmtime
    except ImportError:
        raise EngineError("the wasm engine needs the package 'wasmtime'", INSTALL) from None
    path = library_path(build, WASM)
    if not path.is_file():
        raise EngineError(f"the {build} kernels are not built", "run: make kernels")
    config = wasmtime.Config()
    config.wasm_memory64 = True
    engine = wasmtime.Engine(config)
    # while wasmtime is still whole: at the very end its objects fail to close
    atexit.register(_compiled.cache_clear)
    return engine, wasmtime.Module(engine, path.read_bytes())


class Instance:
    """A module over memory of its own. Bytes from ``start`` on are free for the host."""

    def __init__(self, build: str, free: int) -> None:
        """Make memory with ``free`` bytes for the host, and an instance over it.

        Raises: EngineError when the memory cannot be had or the module is that of another version.
        """
        engine, module = _compiled(build)
        import wasmtime

        self._store = wasmtime.Store(engine)
        start = self._heap_base(module, build == "wasm64")
        self.start = -(-start // ALIGN) * ALIGN
        pages = -(-(self.start + free) // PAGE)
        exports = self._instantiate(module, build == "wasm64", pages)
        self._run, self._workspace = exports["posttrain_run"], exports["posttrain_workspace"]
        names = self._op_names(exports)
        if names != list(OPS):
            odd = sorted(set(names) ^ set(OPS)) or ["their order"]
            raise EngineError(
                f"the {build} kernels do not fit this version: {odd[0]} differs",
                "run: make kernels",
            )
        self.ops = names

    def _instantiate(self, module: Any, is_64: bool, pages: int) -> Any:
        import wasmtime

        limits = wasmtime.Limits(pages, pages)
        try:
            memory = wasmtime.Memory(self._store, wasmtime.MemoryType(limits, is_64=is_64))
        except wasmtime.WasmtimeError as error:
            raise EngineError(f"no memory of {pages * PAGE:,} bytes: {error}") from error
        exports = wasmtime.Instance(self._store, module, [memory]).exports(self._store)
        raw = memory.get_buffer_ptr(self._store)
        self.memory: NDArray[np.uint8] = np.ctypeslib.as_array(raw)
        return exports

    def _heap_base(self, module: Any, is_64: bool) -> int:
        """Where the module's own data ends, from an instance that is made for this question."""
        least = module.imports[0].type.limits.min
        return int(self._instantiate(module, is_64, least)["__heap_base"].value(self._store))

    def _op_names(self, exports: Any) -> list[str]:
        names = []
        for number in range(exports["posttrain_op_count"](self._store)):
            at = exports["posttrain_op_name"](self._store, number)
            names.append(ctypes.string_at(self.memory[at:].ctypes.data).decode())
        return names

    def workspace(self, table: int, calls: int) -> int:
        """Bytes of scratch that the calls at address ``table`` need."""
        return int(self._workspace(self._store, table, calls))

    def run(self, base: int, table: int, calls: int, workspace: int) -> None:
        """Run the calls at ``table``; their offsets and that of the workspace count from ``base``.

        Raises: EngineError when the driver refuses a call or the module traps.
        """
        import wasmtime

        try:
            failed = self._run(self._store, base, table, calls, workspace, 1)
        except (wasmtime.Trap, wasmtime.WasmtimeError) as error:
            raise EngineError(f"the WebAssembly module stopped: {error}") from error
        if failed:
            raise EngineError(f"the WebAssembly driver refused call {failed - 1} of {calls}")


class WasmEngine(HostEngine):
    """See ``base.Engine``. ``build`` '' takes the smallest pointer size that the plan fits into."""

    name = "wasm"
    fused_ops = CppEngine.fused_ops

    def __init__(
        self,
        programs: Mapping[str, Program],
        dims: Mapping[str, Mapping[str, int]],
        *,
        build: str = "",
    ) -> None:
        """Plan the programs and make an instance with all the memory that they need.

        Raises: TooLargeError when neither build can be given that memory.
        """
        super().__init__(programs, dims)
        self._offset, end = lay_out(self.plan)
        self._scratch = -(-end // ALIGN) * ALIGN
        tables = [call_table(self.plan.bind(name), self._offset) for name in self.plan.programs]
        self._table_bytes = -(-max(table.nbytes for table in tables) // ALIGN) * ALIGN
        self.build = build or BUILDS[0]
        self._workspace_bytes = self._largest_workspace(self.build, tables)
        free = self._table_bytes + self._scratch + self._workspace_bytes
        if not build and free > _limit("wasm32"):
            self.build = "wasm64"
        if free > _limit(self.build):
            raise TooLargeError(f"the {self.build} engine", free, _limit(self.build))
        self.check_memory(free)
        self._instance = Instance(self.build, free)
        self._table = self._instance.start
        self._base = self._table + self._table_bytes
        self._in_table: NDArray[Any] | None = None

    def _largest_workspace(self, build: str, tables: list[NDArray[Any]]) -> int:
        """What the kernels need for any of the programs, asked of a small instance."""
        probe = Instance(build, self._table_bytes)
        most = 0
        for table in tables:
            probe.memory[probe.start : probe.start + table.nbytes] = table.view(np.uint8)
            most = max(most, probe.workspace(probe.start, len(table)))
        return most

    @property
    def info(self) -> dict[str, str | int]:
        """Build, its id, the version of the host; one thread always."""
        return {
            "engine": self.name,
            "build": self.build,
            "build_id": build_id(self.build, WASM),
            "host": f"wasmtime {version('wasmtime')}",
            "threads": 1,
        }

    @property
    def nbytes(self) -> int:
        """All memory of the module, made once."""
        return int(self._instance.memory.nbytes)

    def view(self, place: Place) -> Array:
        """See ``HostEngine.view``."""
        start = self._base + self._offset[place.region] + 4 * place.offset
        dtype = np.float32 if self.plan.regions[place.region].dtype == "f32" else np.int32
        raw = self._instance.memory[start : start + 4 * place.elements]
        return raw.view(dtype).reshape(place.shape)

    def prepare(self, calls: list[BoundCall]) -> NDArray[Any]:
        """The call table, checked against the planned workspace."""
        table = call_table(calls, self._offset)
        self._place_table(table)
        assert self._instance.workspace(self._table, len(table)) <= self._workspace_bytes
        return table

    def run(self, prepared: NDArray[Any]) -> None:
        """Run the table with one call."""
        if prepared is not self._in_table:
            self._place_table(prepared)
        self._instance.run(self._base, self._table, len(prepared), self._scratch)

    def _place_table(self, table: NDArray[Any]) -> None:
        """Programs take turns in one place: there are more tables (shorter prompts) than programs."""
        assert table.nbytes <= self._table_bytes
        at = self._table
        self._instance.memory[at : at + table.nbytes] = table.view(np.uint8)
        self._in_table = table


def _limit(build: str) -> int:
    """Bytes that a build can address, less the module's own stack and data."""
    return PAGES[build] * PAGE - (1 << 21)
