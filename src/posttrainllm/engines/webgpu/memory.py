"""The plan's regions as GPU buffers.

What this is: one buffer a region, made once, except that all inputs lie in one buffer, of which the host keeps a copy and sends what
changed with one write, and that arenas larger than a buffer may be are cut between two tensors.
What this is not: the plan (``plan.py``), or what runs over it (``engines/webgpu/recorder.py``).
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from posttrainllm.engines.webgpu.device import GpuDevice
from posttrainllm.errors import EngineError
from posttrainllm.plan import ALIGN, PARTS, Place, Plan, Region
from posttrainllm.wording import worded

Array = NDArray[Any]
Resource = tuple[Any, int, int]  # buffer, byte offset, bytes


@dataclass(frozen=True)
class Piece:
    """The elements [begin, end) of a region, at ``offset`` bytes of a buffer."""

    buffer: Any
    offset: int
    begin: int
    end: int


class GpuMemory:
    """All regions of a plan on a device."""

    def __init__(self, plan: Plan, device: GpuDevice) -> None:
        """Take the memory.

        Raises: EngineError, with the buffer's name and size, where the device cannot hold it.
        """
        self.plan = plan
        self.device = device
        self.nbytes = 0
        self._pieces: dict[str, list[Piece]] = {}
        inputs = [region for region in plan.regions.values() if region.name.startswith("in.")]
        self._inputs_at: dict[str, int] = {}
        end = 0
        for region in inputs:
            self._inputs_at[region.name], end = end, end + region.nbytes
        self._mirror = np.zeros(max(end, 4 * ALIGN), np.uint8)
        self._inputs = self._new("inputs", self._mirror.nbytes)
        self._dirty = (0, self._mirror.nbytes)
        for region in plan.regions.values():
            if region.name in self._inputs_at:
                piece = Piece(self._inputs, self._inputs_at[region.name], 0, region.elements)
                self._pieces[region.name] = [piece]
            else:
                self._pieces[region.name] = [
                    Piece(self._new(region.name, 4 * (end - begin)), 0, begin, end)
                    for begin, end in self._cuts(region)
                ]

    def _new(self, name: str, nbytes: int) -> Any:
        self.nbytes += nbytes
        return self.device.buffer(name, nbytes)

    def _cuts(self, region: Region) -> list[tuple[int, int]]:
        """Ranges of a region that fit a buffer: all of it, or runs of whole tensors of an arena."""
        most = self.device.buffer_bytes // 4
        part = region.name.rpartition(".")[2]
        if region.elements <= most or part not in PARTS:
            return [(0, region.elements)]
        offsets = [place.offset for held, place in self.plan.layout.values() if held == part]
        starts = [*sorted(offsets), region.elements]
        cuts, begin = [], 0
        for here, after in itertools.pairwise(starts):
            if after - begin > most:
                cuts.append((begin, here))
                begin = here
        return [cut for cut in [*cuts, (begin, region.elements)] if cut[0] < cut[1]]

    # ---- where things are ---------------------------------------------------------------------------------------------------------

    def resource(self, place: Place, window: tuple[int, int] | None = None) -> Resource:
        """What to bind for a place, or for a window of its elements."""
        begin, end = window or (0, place.elements)
        first = place.offset + begin
        for piece in self._pieces[place.region]:
            if piece.begin <= first and place.offset + end <= piece.end:
                offset, nbytes = piece.offset + 4 * (first - piece.begin), 4 * (end - begin)
                if nbytes > self.device.binding_bytes:
                    raise EngineError(
                        f"{self._name_of(place)} takes {nbytes / 2**20:,.0f} MiB, over the "
                        f"{self.device.binding_bytes / 2**20:,.0f} MiB that {self.device.name!r} binds at once",
                        worded(
                            "use a smaller preset, a smaller {data.batch_size}, or {engine.name=cpp}"
                        ),
                    )
                if offset % (4 * ALIGN):
                    raise EngineError(
                        f"a window of {self._name_of(place)} begins at byte {offset}, no multiple of 256",
                        "choose a batch and a context whose product is a multiple of 64",
                    )
                return piece.buffer, offset, nbytes
        raise EngineError(f"{self._name_of(place)} does not lie within one buffer")

    def windows(self, place: Place) -> list[tuple[int, int]]:
        """An arena as ranges that can each be bound at once."""
        most = self.device.binding_bytes // 4 // ALIGN * ALIGN
        found = []
        for piece in self._pieces[place.region]:
            end = min(piece.end, place.offset + place.elements)
            for begin in range(max(piece.begin, place.offset), end, most):
                found.append((begin - place.offset, min(end, begin + most) - place.offset))
        return found

    def _name_of(self, place: Place) -> str:
        for name, (part, held) in self.plan.layout.items():
            if place.region.endswith(f".{part}") and place.offset == held.offset:
                return f"{name!r} in {place.region}"
        users = {
            name
            for places in self.plan.places.values()
            for name, held in places.items()
            if held.region == place.region
        }
        return repr(min(users)) if len(users) == 1 else repr(place.region)

    # ---- moving data --------------------------------------------------------------------------------------------------------------

    def is_input(self, place: Place) -> bool:
        """Whether a place lies in the inputs, which the host keeps a copy of."""
        return place.region in self._inputs_at

    def dtype(self, place: Place) -> type[np.float32] | type[np.int32]:
        """The dtype of a place's region."""
        return np.float32 if self.plan.regions[place.region].dtype == "f32" else np.int32

    def set_input(self, place: Place, values: Array) -> None:
        """Change the host's copy of an input; ``send_inputs`` takes it to the GPU."""
        at = self._inputs_at[place.region] + 4 * place.offset
        held = self._mirror[at : at + 4 * place.elements].view(self.dtype(place))
        flat = values.ravel().astype(held.dtype, copy=False)
        if not np.array_equal(held, flat):
            held[...] = flat
            low, high = self._dirty
            self._dirty = (min(low, at), max(high, at + held.nbytes))

    def input_view(self, name: str) -> Array:
        """The host's copy of an input, as an array to write to; ``touch_inputs`` has it sent."""
        region = self.plan.regions[f"in.{name}"]
        at = self._inputs_at[region.name]
        dtype = self.dtype(Place(region.name, 0, ()))
        return self._mirror[at : at + region.nbytes].view(dtype)

    def touch_inputs(self) -> None:
        """Have all inputs sent."""
        self._dirty = (0, self._mirror.nbytes)

    def same_input(self, place: Place, values: Array) -> bool:
        """Whether an input already holds these values."""
        at = self._inputs_at[place.region] + 4 * place.offset
        held = self._mirror[at : at + 4 * place.elements].view(self.dtype(place))
        return bool(np.array_equal(held, values.ravel()))

    def send_inputs(self) -> None:
        """Send what changed since the last time, as one range."""
        low, high = self._dirty
        if low < high:
            with self.device.at_work():
                self.device.queue.write_buffer(self._inputs, low, self._mirror, low, high - low)
            self._dirty = (self._mirror.nbytes, 0)

    def write(self, place: Place, values: Array) -> None:
        """Copy values into a place that is no input."""
        flat = np.ascontiguousarray(values, self.dtype(place)).ravel()
        buffer, offset, _ = self._span(place)
        with self.device.at_work():
            self.device.queue.write_buffer(buffer, offset, flat)

    def read(self, place: Place) -> Array:
        """Copy a place out; waits for all that was submitted before."""
        buffer, offset, nbytes = self._span(place)
        with self.device.at_work():
            data = self.device.queue.read_buffer(buffer, offset, nbytes)
        return np.frombuffer(data, self.dtype(place)).reshape(place.shape).copy()

    def _span(self, place: Place) -> Resource:
        for piece in self._pieces[place.region]:
            if piece.begin <= place.offset and place.offset + place.elements <= piece.end:
                offset = piece.offset + 4 * (place.offset - piece.begin)
                return piece.buffer, offset, 4 * math.prod(place.shape)
        raise EngineError(f"{self._name_of(place)} does not lie within one buffer")

    def close(self) -> None:
        """Give the buffers back."""
        for pieces in self._pieces.values():
            for piece in pieces:
                piece.buffer.destroy()
        self._pieces.clear()
