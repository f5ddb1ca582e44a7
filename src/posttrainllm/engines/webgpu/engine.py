"""The webgpu engine: the WGSL kernels on a GPU, through the package wgpu.

Programs are recorded once and replayed; a step is one submit. Nothing waits for the GPU along the way: results of updates gather in a ring
on the GPU and come back many at a time. Bit-identical on the same adapter and driver; the limits against other engines are STYLE's.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from typing import Any

import numpy as np

from posttrainllm.engines.base import I32, Array, Batch, ProgramEngine, StepResult, StepScalars
from posttrainllm.engines.webgpu.batches import Batches
from posttrainllm.engines.webgpu.device import GpuDevice, choose_adapter
from posttrainllm.engines.webgpu.dispatch import DispatchTable, table_ops
from posttrainllm.engines.webgpu.memory import GpuMemory
from posttrainllm.engines.webgpu.recorder import Recorder, Recording
from posttrainllm.engines.webgpu.tuning import Choices, program_key, tune, wgsl_digest
from posttrainllm.errors import EngineError
from posttrainllm.ops import CLIP, FUSED, SCALARS
from posttrainllm.plan import BoundCall, Place
from posttrainllm.program import Program

RING = 64  # steps whose results may wait on the GPU
SLOT = 32  # bytes a step: the clip buffer, the loss, padding
PATIENCE = 0.25  # seconds that results may wait


class WebGpuEngine(ProgramEngine):
    """See ``base.Engine``. ``adapter`` is one of ``device.adapters()``; None takes the best one."""

    name = "webgpu"
    fused_ops = frozenset(FUSED) & table_ops()

    def __init__(
        self,
        programs: Mapping[str, Program],
        dims: Mapping[str, Mapping[str, int]],
        *,
        adapter: Any = None,
        preferred: Mapping[str, str] | None = None,
        tuned: bool | None = None,
        half: bool = False,
    ) -> None:
        """Plan the programs, open the device and take the memory.

        ``preferred`` names variants of kernels by op; without it, they are measured at the first step where the adapter allows it, unless
        ``tuned`` is False. ``half`` computes forward products in f16 (``linear_half.wgsl``); those are not measured against the others.
        """
        super().__init__(programs, dims)
        self.device = GpuDevice(choose_adapter() if adapter is None else adapter, half=half)
        self.memory = GpuMemory(self.plan, self.device)
        measurable = self.device.timestamps and not self.device.software and not half
        self._tunes = preferred is None and (measurable if tuned is None else tuned)
        self._choices = Choices(self.device) if self._tunes else None
        known = self._choices.held if self._choices else preferred
        self.recorder = Recorder(self.device, self.memory, DispatchTable(self.device.limits, known))
        for name in self.plan.programs:
            self.recorder.reserve(self.plan.bind(name))
        self._batches = Batches(self.memory)
        self._scalars_view = (
            self.memory.input_view("scalars")
            if "in.scalars" in self.plan.regions
            else np.zeros(len(SCALARS), np.float32)
        )
        self._ring = self.device.buffer("results", RING * SLOT)
        self._pending: list[Recording] = []
        self._waiting = 0  # steps in the ring
        self._read_at = time.monotonic()

    @property
    def info(self) -> dict[str, str | int]:
        """Adapter, driver, backend and version of wgpu, the kernels by their hash, and which of them run."""
        choices = json.dumps(self.recorder.table.preferred, sort_keys=True)
        return {
            "engine": self.name,
            **self.device.info,
            "precision": "float16" if self.device.limits.half else "float32",
            "kernels": wgsl_digest(),
            "choices": choices,
        }

    @property
    def nbytes(self) -> int:
        """All buffers."""
        return self.memory.nbytes + self.recorder.nbytes + RING * SLOT

    def write(self, place: Place, values: Array) -> None:
        """See ``ProgramEngine.write``. Programs that were asked for run first, unless nothing changes for them."""
        if self.memory.is_input(place):
            if self._pending and not self.memory.same_input(place, values):
                self.flush()
            self.memory.set_input(place, values)
        else:
            self.flush()
            self.memory.write(place, values)

    def read(self, place: Place) -> Array:
        """See ``ProgramEngine.read``."""
        self.flush()
        return self.memory.read(place)

    def prepare(self, calls: list[BoundCall]) -> Recording:
        """Record the calls; the first time, with the kernels that are fastest in this place."""
        key = program_key(calls)
        if self._choices and key not in self._choices.tuned and self._is_step(calls):
            self.memory.send_inputs()
            try:
                chosen = tune(self.recorder, calls)
            except EngineError:  # no room for a variant: the table knows one that fits
                chosen = {}
            self._choices.keep(key, chosen, self.device.info)
            self.recorder.table.preferred.update(chosen)
        return self.recorder.record(calls)

    def _is_step(self, calls: list[BoundCall]) -> bool:
        """Whether calls are those of a training step, which alone is worth measuring; running them changes no weight."""
        return any(call.op == "embedding_backward_weight" for call in calls)

    def run(self, prepared: Recording) -> None:
        """Put a recording down to be submitted with what comes next: a step is one submit."""
        self._pending.append(prepared)

    def flush(self) -> None:
        """Submit what was asked for; does not wait for it."""
        if self._pending:
            self._submit()

    def _submit(self, *, keeping_results: bool = False) -> None:
        """Run what was asked for as one submit; the results of an update go into the next slot of the ring."""
        self.memory.send_inputs()
        with self.device.at_work():
            encoder = self.device.device.create_command_encoder()
            self.recorder.encode(encoder, *self._pending)
            self._pending.clear()
            if keeping_results:
                at = self._waiting * SLOT
                for region, offset, size in (("state.clip", 0, 4 * len(CLIP)), ("out.loss", 16, 4)):
                    buffer, begin, _ = self.memory.resource(Place(region, 0, (1,)))
                    encoder.copy_buffer_to_buffer(buffer, begin, self._ring, at + offset, size)
            self.device.queue.submit([encoder.finish()])

    def _set_tokens(self, program: str, tokens: I32, positions: I32) -> None:
        """See ``ProgramEngine``."""
        self._batches.ready_for = ""
        super()._set_tokens(program, tokens, positions)

    def _set_batch(self, program: str, batch: Batch) -> None:
        """See ``ProgramEngine``; one batch after another of the same program changes only what differs between them."""
        planned = self.plan.dims[program]
        fits = batch.tokens.shape == batch.targets.shape == (planned["B"], planned["T"])
        if self._batches.ready_for == program and fits and self._batches.valid(batch):
            self.flush()
            self._batches.write(batch, indexed=program == "gradients")
        else:
            super()._set_batch(program, batch)
            self._batches.ready_for = program

    def _set_scalars(self, **slots: float) -> None:
        self.flush()
        self._put_scalars(**slots)

    def _put_scalars(self, **slots: float) -> None:
        """Change scalars without running what was asked for before: it reads other slots."""
        for slot, value in slots.items():
            self._scalars[SCALARS.index(slot)] = value
        self._scalars_view[: len(SCALARS)] = self._scalars
        self.memory.touch_inputs()

    def update(self, scalars: StepScalars) -> None:
        """See ``Engine.update``. The scalars go along with those of the gradients before, which read other slots of the same buffer."""
        self._put_scalars(
            lr=scalars.lr, correction1=scalars.correction1, correction2=scalars.correction2
        )
        self.run_program("update")
        if self._waiting == RING:
            self._collect()
        self._submit(keeping_results=True)
        self._waiting += 1

    def _collect(self) -> None:
        """Read the ring; waits for the GPU."""
        self.flush()
        if self._waiting:
            with self.device.at_work():
                data = self.device.queue.read_buffer(self._ring, 0, self._waiting * SLOT)
            slots = np.frombuffer(data, np.float32).reshape(-1, SLOT // 4)
            for norm, _, nonfinite, _, loss in slots[:, :5]:
                finite = not nonfinite and bool(np.isfinite(loss))
                self._results.append(StepResult(float(loss), float(norm), finite))
        self._waiting = 0
        self._read_at = time.monotonic()

    def results(self, wait: bool = True) -> list[StepResult]:
        """See ``Engine.results``. Without ``wait``, those of several steps come at a time."""
        overdue = time.monotonic() - self._read_at > PATIENCE
        if wait or (self._waiting and overdue):
            self._collect()
        return super().results()

    def load(self, *args: Any, **kwargs: Any) -> None:
        """See ``Engine.load``."""
        self._collect()
        super().load(*args, **kwargs)

    def close(self) -> None:
        """Give the GPU's memory back."""
        self._pending.clear()
        for recording in self._prepared.values():
            self.recorder.forget(recording)
        super().close()
        self.recorder.close()
        self.memory.close()
        self._ring.destroy()
