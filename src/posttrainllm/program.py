"""Programs: a training step, an evaluation or a decoding step as an explicit list of op calls over named buffers.

What this is: the one form in which the model exists for every engine that runs ops. A ``Program`` is symbolic (shapes are an integer
times a product of dims, a layer is written once for all layers); ``validate`` proves that its shapes and its order of calls hold
together; ``expand`` unrolls its blocks; ``to_text`` shows it and ``to_json`` exports it. ``plan.py`` gives it numbers and memory.
What this is not: it knows no model, no engine and no numbers. Read next: ``model.py`` (who builds programs), ``plan.py`` (binding).

Names inside a layer block carry ``{i}`` or ``{i+1}``: ``h.{i}.ln_1.out``; anywhere ``{L}`` is the number of layers: ``h.{L}.in``. Inside a
row block an operand that ends in ``[rows]`` is the window of rows of the current chunk: ``ln_f.out[rows]``.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

from posttrainllm.errors import ProgramError
from posttrainllm.extent import FIRST, LAST, Bound, Extent, Shape, shape_text
from posttrainllm.ops import ADD, BETA, CHUNK, OPS, Dtype

FORMAT = 1
ROWS = "[rows]"

Role = Literal["param", "grad", "moment", "state", "input", "saved", "scratch", "output"]
# param, grad, moment  tensors that live in the arenas of that name, shared by every program of a set
# state                what stays between runs beside them: key/value caches, the sticky non-finite flag
# input                filled by the host before a run      output  read by the host after it
# saved                written once a run, by the forward pass, for the backward pass      scratch  everything else
Init = Literal["normal", "residual", "zeros", "ones"]


@dataclass(frozen=True)
class Buffer:
    """A named tensor.

    ``layers`` is None or the range of ``{i}`` in its name. ``init`` and ``decay`` belong to parameters: how the first value is drawn
    (control.initial_values) and which of the two parts of the arenas it lies in.
    """

    name: str
    shape: Shape
    role: Role
    dtype: Dtype = "f32"
    layers: tuple[Bound, Bound] | None = None
    init: Init | None = None
    decay: bool = False


@dataclass(frozen=True)
class Call:
    """One op on named buffers; operands in the op table's order; an attribute may be a dim's name."""

    op: str
    outputs: tuple[str, ...]
    inputs: tuple[str | None, ...]
    attrs: dict[str, float | str] = field(default_factory=dict)

    @property
    def operands(self) -> tuple[str | None, ...]:
        """Outputs, then inputs."""
        return self.outputs + self.inputs

    def __str__(self) -> str:
        attrs = "".join(
            f" {key}={value:g}" if isinstance(value, float) else f" {key}={value}"
            for key, value in self.attrs.items()
        )
        return f"{', '.join(self.outputs)} = {self.op}({', '.join(name or '-' for name in self.inputs)}){attrs}"


@dataclass(frozen=True)
class LayerBlock:
    """Calls repeated for the layers lo .. hi-1, in this order or in reverse."""

    lo: Bound
    hi: Bound
    reverse: bool
    body: tuple[Call, ...]

    def order(self, n_layer: int) -> range:
        """The layers in the order in which they run."""
        layers = range(self.lo.bind(n_layer), self.hi.bind(n_layer))
        return layers[::-1] if self.reverse else layers


@dataclass(frozen=True)
class RowBlock:
    """Calls repeated for chunks of ``rows`` rows out of ``total``, so that logits of a large vocabulary never exist all at once."""

    rows: Extent
    total: Extent
    body: tuple[Call, ...]


Item = Call | LayerBlock | RowBlock


@dataclass(frozen=True)
class Step:
    """One call of an expanded program: concrete names, and the row chunk it works on (None outside row blocks)."""

    call: Call
    chunk: int | None = None
    rows: Extent | None = None

    @staticmethod
    def name_of(operand: str) -> str:
        """The buffer an operand lies in."""
        return operand.removesuffix(ROWS)

    def shape_of(self, operand: str, buffers: Mapping[str, Buffer]) -> Shape:
        """The shape of an operand: its buffer's, or that of the window of rows in it."""
        shape = buffers[self.name_of(operand)].shape
        if self.rows is None or not operand.endswith(ROWS):
            return shape
        return (self.rows, *shape[1:])


class Program:
    """A named list of calls and blocks over buffers; built by the methods here, then left alone."""

    def __init__(self, name: str) -> None:
        """Start empty."""
        self.name = name
        self.buffers: dict[str, Buffer] = {}
        self.items: list[Item] = []
        self._block: list[Call] | None = None

    # ---- building -----------------------------------------------------------------------------------------------------------------

    def buffer(
        self,
        name: str,
        *shape: str,
        role: Role,
        dtype: Dtype = "f32",
        layers: tuple[Bound, Bound] | None = None,
        init: Init | None = None,
        decay: bool = False,
    ) -> str:
        """Declare a buffer and give its name back. Declaring the same buffer twice is fine, a different one under its name is not."""
        if ("{i}" in name) and layers is None:
            layers = (FIRST, LAST)
        new = Buffer(
            name, tuple(Extent.parse(entry) for entry in shape), role, dtype, layers, init, decay
        )
        if self.buffers.setdefault(name, new) != new:
            raise ProgramError(
                f"program {self.name}: buffer {name!r} is declared twice, with different shapes or roles"
            )
        return name

    def call(
        self, op: str, outputs: list[str], inputs: list[str | None], **attrs: float | str
    ) -> None:
        """Append a call; attributes that are left out take the op table's default."""
        if op not in OPS:
            raise ProgramError(f"program {self.name}: there is no op {op!r}")
        row = OPS[op]
        unknown = set(attrs) - set(row.attrs)
        missing = {key for key, default in row.attrs.items() if default is None} - set(attrs)
        if unknown or missing:
            raise ProgramError(
                f"program {self.name}: {op} takes {', '.join(row.attrs) or 'no attributes'}, not {', '.join(attrs)}"
            )
        full: dict[str, float | str] = {}
        for key, default in row.attrs.items():
            value = attrs.get(key, default)
            assert value is not None
            full[key] = value if isinstance(value, str) else float(value)
        if len(outputs) != len(row.outputs) or len(inputs) != len(row.inputs):
            raise ProgramError(
                f"program {self.name}: {op} has {len(row.outputs)} outputs and {len(row.inputs)} inputs, "
                f"given were {len(outputs)} and {len(inputs)}"
            )
        target = self.items if self._block is None else self._block
        target.append(Call(op, tuple(outputs), tuple(inputs), full))

    @contextmanager
    def layers(
        self, lo: Bound = FIRST, hi: Bound = LAST, *, reverse: bool = False
    ) -> Iterator[None]:
        """Calls made inside are repeated for every layer of [lo, hi)."""
        yield from self._collect(lambda body: LayerBlock(lo, hi, reverse, body))

    @contextmanager
    def row_chunks(self, rows: str, total: str) -> Iterator[None]:
        """Calls made inside are repeated for every chunk of ``rows`` rows of ``total``."""
        yield from self._collect(
            lambda body: RowBlock(Extent.parse(rows), Extent.parse(total), body)
        )

    def _collect(self, make: Callable[[tuple[Call, ...]], Item]) -> Iterator[None]:
        if self._block is not None:
            raise ProgramError(f"program {self.name}: blocks do not nest")
        self._block = []
        yield
        body, self._block = tuple(self._block), None
        self.items.append(make(body))

    # ---- reading ------------------------------------------------------------------------------------------------------------------

    def instances(self, n_layer: int) -> dict[str, Buffer]:
        """Every buffer by its concrete name, with per-layer buffers unrolled; the order of declaration, layer by layer."""
        found: dict[str, Buffer] = {}
        per_layer = [buffer for buffer in self.buffers.values() if buffer.layers]
        for buffer in self.buffers.values():
            if buffer.layers is None:
                found[buffer.name] = buffer
        for i in range(
            max(
                (buffer.layers[1].bind(n_layer) for buffer in per_layer if buffer.layers), default=0
            )
        ):
            for buffer in per_layer:
                assert buffer.layers is not None
                if buffer.layers[0].bind(n_layer) <= i < buffer.layers[1].bind(n_layer):
                    name = in_layer(buffer.name, i, n_layer)
                    found[name] = dataclasses.replace(buffer, name=name, layers=None)
        return found

    def expand(self, n_layer: int, n_chunks: int) -> list[Step]:
        """The calls in the order in which they run, blocks unrolled."""
        steps: list[Step] = []
        for item in self.items:
            if isinstance(item, Call):
                steps.append(Step(_call_in_layer(item, n_layer, n_layer)))
            elif isinstance(item, LayerBlock):
                steps += [
                    Step(_call_in_layer(call, i, n_layer))
                    for i in item.order(n_layer)
                    for call in item.body
                ]
            else:
                steps += [
                    Step(_call_in_chunk(_call_in_layer(call, 0, n_layer), k), k, item.rows)
                    for k in range(n_chunks)
                    for call in item.body
                ]
        return steps

    def to_text(self, n_layer: int | None = None) -> str:
        """A listing for people: symbolic with its blocks, or unrolled when ``n_layer`` is given."""
        if n_layer is not None:
            return "\n".join(
                f"{index:4d}  {step.call}" for index, step in enumerate(self.expand(n_layer, 1))
            )
        lines = [f"program {self.name}"]
        for buffer in self.buffers.values():
            lines.append(
                f"  {buffer.role:8s}{buffer.name}  {shape_text(buffer.shape)} {buffer.dtype}"
            )
        for item in self.items:
            if isinstance(item, Call):
                lines.append(f"  {item}")
                continue
            if isinstance(item, LayerBlock):
                lines.append(
                    f"  layers {item.lo} .. {item.hi}{', in reverse' if item.reverse else ''}:"
                )
            else:
                lines.append(f"  chunks of {item.rows} rows of {item.total}:")
            lines += [f"    {call}" for call in item.body]
        return "\n".join(lines)

    def to_json(self) -> str:
        """The program for other hosts: one JSON object, keys in a fixed order."""
        return json.dumps(
            {
                "format": FORMAT,
                "name": self.name,
                "buffers": [_buffer_json(buffer) for buffer in self.buffers.values()],
                "items": [_item_json(item) for item in self.items],
            },
            separators=(",", ":"),
        )

    @staticmethod
    def from_json(text: str) -> Program:
        """Read what ``to_json`` wrote. Raises ProgramError for another format version."""
        data = json.loads(text)
        if data.get("format") != FORMAT:
            raise ProgramError(
                f"program format {data.get('format')!r} is not {FORMAT}, the one this version reads"
            )
        program = Program(data["name"])
        for entry in data["buffers"]:
            shape = tuple(Extent(times, tuple(dims)) for times, dims in entry["shape"])
            layers = entry["layers"] and (Bound(*entry["layers"][0]), Bound(*entry["layers"][1]))
            program.buffers[entry["name"]] = Buffer(
                entry["name"],
                shape,
                entry["role"],
                entry["dtype"],
                layers,
                entry["init"],
                entry["decay"],
            )
        for entry in data["items"]:
            body = tuple(_call_from(call) for call in entry.get("body", ()))
            if "layers" in entry:
                lo, hi = entry["layers"]
                program.items.append(LayerBlock(Bound(*lo), Bound(*hi), entry["reverse"], body))
            elif "rows" in entry:
                (a, b), (c, d) = entry["rows"], entry["total"]
                program.items.append(RowBlock(Extent(a, tuple(b)), Extent(c, tuple(d)), body))
            else:
                program.items.append(_call_from(entry))
        return program


def in_layer(name: str, i: int, n_layer: int) -> str:
    """``h.{i+1}.in`` in layer 2 is ``h.3.in``; ``h.{L}.in`` is the end of the residual stream."""
    if "{" not in name:
        return name
    return name.replace("{i}", str(i)).replace("{i+1}", str(i + 1)).replace("{L}", str(n_layer))


def _call_in_layer(call: Call, i: int, n_layer: int) -> Call:
    return Call(
        call.op,
        tuple(in_layer(name, i, n_layer) for name in call.outputs),
        tuple(name and in_layer(name, i, n_layer) for name in call.inputs),
        call.attrs,
    )


def _call_in_chunk(call: Call, chunk: int) -> Call:
    if call.attrs.get("accumulate") != CHUNK:
        return call
    return dataclasses.replace(
        call, attrs={**call.attrs, "accumulate": float(ADD if chunk else BETA)}
    )


def _buffer_json(buffer: Buffer) -> dict[str, Any]:
    return {
        "name": buffer.name,
        "shape": [[extent.times, list(extent.dims)] for extent in buffer.shape],
        "role": buffer.role,
        "dtype": buffer.dtype,
        "layers": buffer.layers and [[bound.from_last, bound.offset] for bound in buffer.layers],
        "init": buffer.init,
        "decay": buffer.decay,
    }


def _call_json(call: Call) -> dict[str, Any]:
    return {
        "op": call.op,
        "outputs": list(call.outputs),
        "inputs": list(call.inputs),
        "attrs": call.attrs,
    }


def _call_from(entry: dict[str, Any]) -> Call:
    return Call(entry["op"], tuple(entry["outputs"]), tuple(entry["inputs"]), entry["attrs"])


def _item_json(item: Item) -> dict[str, Any]:
    if isinstance(item, Call):
        return _call_json(item)
    body = [_call_json(call) for call in item.body]
    if isinstance(item, LayerBlock):
        bounds = [[bound.from_last, bound.offset] for bound in (item.lo, item.hi)]
        return {"layers": bounds, "reverse": item.reverse, "body": body}
    return {
        "rows": [item.rows.times, list(item.rows.dims)],
        "total": [item.total.times, list(item.total.dims)],
        "body": body,
    }
