"""Bound calls as recordings: pipelines and bind groups made once, replayed step by step.

What this is: ``Recorder.record`` asks the dispatch table what each call becomes and prepares all GPU objects; ``encode`` replays a
recording into a command encoder, which takes a few microseconds a dispatch and creates nothing but the encoder.
What this is not: the choice of kernels (``engines/webgpu/dispatch.py``) or memory (``engines/webgpu/memory.py``).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from posttrainllm.engines.webgpu.device import GpuDevice
from posttrainllm.engines.webgpu.dispatch import Dispatch, Dispatches, DispatchTable
from posttrainllm.engines.webgpu.memory import GpuMemory, Resource
from posttrainllm.engines.webgpu.native import FastPass, Item
from posttrainllm.engines.webgpu.work import Work
from posttrainllm.errors import EngineError
from posttrainllm.ops import OPS
from posttrainllm.plan import ALIGN, BoundCall

SLICE = 256  # bytes between two calls' words in the uniform buffer


@dataclass(frozen=True)
class Recorded:
    """One dispatch, ready to be replayed, with where it came from."""

    pipeline: Any
    group: Any
    grid: tuple[int, int, int]
    work: Work
    entry: str
    variant: str


@dataclass
class Recording:
    """All dispatches of a program, what is replayed for them, and what must live as long as they do."""

    dispatches: list[Recorded]
    items: list[Item]
    uniforms: Any


class Recorder:
    """Makes recordings over one memory, with one workspace for all of them."""

    def __init__(self, device: GpuDevice, memory: GpuMemory, table: DispatchTable) -> None:
        """Nothing is taken before the first recording, but for the buffer that stands in for operands left out."""
        self.device, self.memory, self.table = device, memory, table
        self.nbytes = 4 * ALIGN
        self._pass = FastPass()
        self._absent = device.buffer("absent", 4 * ALIGN)
        self._workspace: Any = None
        self._workspace_bytes = 0

    def reserve(self, calls: Sequence[BoundCall]) -> None:
        """Take the workspace that these calls need, if it is more than there is.

        Raises: EngineError, with its name and size, for a buffer that the device cannot bind at once.
        """
        for found in self._chosen(calls):  # what cannot be bound is said before the first step
            for dispatch in found.passes:
                self._bindings(found, dispatch)

    def record(self, calls: Sequence[BoundCall]) -> Recording:
        """Make all GPU objects of these calls.

        Raises: EngineError, with the call, where the device refuses one.
        """
        entries = [(found, dispatch) for found in self._chosen(calls) for dispatch in found.passes]
        words = np.zeros(max(1, len(entries)) * SLICE, np.uint8)
        for index, (_, dispatch) in enumerate(entries):
            at = index * SLICE
            words[at : at + len(dispatch.words)] = np.frombuffer(dispatch.words, np.uint8)
        uniforms = self.device.buffer("uniforms", words.nbytes, "uniform")
        self.nbytes += words.nbytes
        self.device.queue.write_buffer(uniforms, 0, words)
        recorded = []
        for index, (found, dispatch) in enumerate(entries):
            access, resources = self._bindings(found, dispatch)
            size = -(-len(dispatch.words) // 16) * 16
            resources.append((uniforms, index * SLICE, size))
            access = (*access, "uniform")
            recorded.append(
                Recorded(
                    self.device.pipeline(dispatch, access),
                    self.device.bind(access, resources),
                    dispatch.grid,
                    found.work,
                    dispatch.entry,
                    found.variant,
                )
            )
        items = self._pass.lay_out((item.pipeline, item.group, item.grid) for item in recorded)
        return Recording(recorded, items, uniforms)

    def forget(self, recording: Recording) -> None:
        """Give back what a recording holds; it is not replayed again."""
        self.nbytes -= recording.uniforms.size
        recording.uniforms.destroy()

    def close(self) -> None:
        """Give back what all recordings share."""
        self._absent.destroy()
        if self._workspace is not None:
            self._workspace.destroy()

    def encode(self, encoder: Any, *recordings: Recording) -> None:
        """Replay recordings as one compute pass."""
        compute = encoder.begin_compute_pass()
        for recording in recordings:
            self._pass.replay(compute, recording.items)
        compute.end()

    def _chosen(self, calls: Sequence[BoundCall]) -> list[Dispatches]:
        """What the table makes of calls, with workspace for the largest."""
        chosen = [self._dispatches(work) for work in self.table.merge(calls)]
        self._grow(max((found.workspace for found in chosen), default=0))
        return chosen

    def _dispatches(self, work: Work) -> Dispatches:
        windows = self.memory.windows(work.arena) if work.op in OPS and work.arena else None
        return self.table.dispatches(work, windows)

    def _grow(self, elements: int) -> None:
        nbytes = -(-4 * elements // 256) * 256
        if nbytes > self.device.binding_bytes:
            raise EngineError(
                f"the kernels' workspace takes {nbytes / 2**20:,.0f} MiB, over the "
                f"{self.device.binding_bytes / 2**20:,.0f} MiB that {self.device.name!r} binds at once"
            )
        if nbytes > self._workspace_bytes:
            self._workspace = self.device.buffer("workspace", nbytes)
            self.nbytes += nbytes - self._workspace_bytes
            self._workspace_bytes = nbytes

    def _bindings(
        self, found: Dispatches, dispatch: Dispatch
    ) -> tuple[tuple[str, ...], list[Resource]]:
        """Types and resources of the storage bindings, in the order of the table."""
        access: list[str] = []
        resources: list[Resource] = []
        for name in dispatch.bind:
            base, _, how = name.partition(":")
            if base == "workspace":
                access.append("storage" if how == "write" else "read-only-storage")
                resources.append((self._workspace, 0, max(4 * found.workspace, 16)))
                continue
            operand = found.work.operands.get(base)
            access.append("storage" if operand and operand.written else "read-only-storage")
            if operand is None or operand.place is None:
                resources.append((self._absent, 0, 4 * ALIGN))
            else:
                window = dispatch.window if operand.windowed else None
                resources.append(self.memory.resource(operand.place, window))
        return tuple(access), resources
