"""From symbols to numbers and memory: one plan for a set of programs.

What this is: ``make_plan`` gives every buffer of every program a place in a region, so that each byte is known before the first step;
``Plan.bind`` turns a program into calls with numbers that an engine can run or record.
What this is not: an allocator. Nothing here takes memory, and nothing is placed later. The TypeScript host does the same and a test
holds both to the same plan. Read next: ``engines/base.py``.

Regions:
    param.* grad.* adam.m.* adam.v.*   arenas with one common layout in two parts, ``decayed`` and ``plain`` (AdamW decays one of them)
    state.* in.* out.*                 one buffer each, shared by name between the programs
    work.0, work.1, ...                slots for saved and scratch buffers, reused as soon as nobody reads a buffer any more
A region holds one dtype, both dtypes are four bytes wide, and every buffer starts on a multiple of 256 bytes.
"""

from __future__ import annotations

import bisect
import heapq
import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from posttrainllm.errors import ProgramError
from posttrainllm.extent import Extent, Shape
from posttrainllm.ops import OPS, Dtype
from posttrainllm.program import ROWS, Buffer, Program, RowBlock, Step
from posttrainllm.validate import sizes_of, validate

ALIGN = 64  # elements of four bytes: 256 bytes, WebGPU's alignment of a binding's offset
PARTS = ("decayed", "plain")
ARENAS = {"param": "", "grad": "grad.", "adam.m": "adam.m.", "adam.v": "adam.v."}
CHUNK_BYTES = 32 << 20  # the largest piece of logits that exists at once ...
CHUNK_ROWS = 64  # ... unless it would have fewer rows than this: a chunk reads the whole head


@dataclass(frozen=True)
class Region:
    """A piece of memory that an engine allocates once: ``elements`` of four bytes."""

    name: str
    dtype: Dtype
    elements: int

    @property
    def nbytes(self) -> int:
        """Its size."""
        return 4 * self.elements


@dataclass(frozen=True)
class Place:
    """Where a buffer lies: a region, an offset in elements, a shape."""

    region: str
    offset: int
    shape: tuple[int, ...]

    @property
    def elements(self) -> int:
        """How many numbers it holds."""
        return math.prod(self.shape)


@dataclass(frozen=True)
class BoundCall:
    """A call with numbers: places in the op table's order (None for an operand left out), sizes and attributes in its order."""

    op: str
    operands: tuple[Place | None, ...]
    sizes: tuple[int, ...]
    attrs: tuple[float, ...]


@dataclass
class Plan:
    """Places for a set of programs. ``layout`` holds each parameter's part and place within its arena."""

    programs: dict[str, Program]
    dims: dict[str, dict[str, int]]
    regions: dict[str, Region]
    layout: dict[str, tuple[str, Place]]
    places: dict[str, dict[str, Place]] = field(default_factory=dict)

    @property
    def nbytes(self) -> int:
        """All regions together."""
        return sum(region.nbytes for region in self.regions.values())

    def tensor(self, kind: str, name: str) -> Place:
        """The place of a parameter (kind ``param``), its gradient (``grad``) or a moment (``adam.m``, ``adam.v``)."""
        part, place = self.layout[name]
        return Place(f"{kind}.{part}", place.offset, place.shape)

    def bind(self, name: str, **smaller: int) -> list[BoundCall]:
        """The calls of a program with numbers, in order; dims may be given smaller than planned (a shorter prompt)."""
        program, dims = self.programs[name], {**self.dims[name], **smaller}
        for dim, value in smaller.items():
            if not 0 < value <= self.dims[name][dim]:
                raise ProgramError(
                    f"program {name}: {dim} = {value} does not fit the plan's {dim} = {self.dims[name][dim]}"
                )
        buffers = program.instances(dims["L"])
        return [
            _bind_step(
                step,
                buffers,
                self.places[name],
                dims,
                f"program {name}, call {index} {step.call.op}",
            )
            for index, step in enumerate(program.expand(dims["L"], chunks(program, dims)))
        ]


def chunks(program: Program, dims: Mapping[str, int]) -> int:
    """How many row chunks a program has under these dims."""
    for item in program.items:
        if isinstance(item, RowBlock):
            rows, total = item.rows.bind(dims), item.total.bind(dims)
            if total % rows:
                raise ProgramError(
                    f"program {program.name}: chunks of {rows} rows do not divide {total} rows"
                )
            return total // rows
    return 1


def chunk_rows(rows: int, n_vocab: int) -> int:
    """The largest divisor of ``rows`` whose logits stay below ``CHUNK_BYTES``; a multiple of 64 where there is one.

    Where that divisor is below ``CHUNK_ROWS``, as for a prime number of rows, the smallest one that is not.

    >>> chunk_rows(1024, 256), chunk_rows(8192, 50257), chunk_rows(1021, 50257)
    (1024, 128, 1021)
    """
    small = [size for size in range(1, math.isqrt(rows) + 1) if rows % size == 0]
    divisors = sorted({*small, *(rows // size for size in small)})
    fitting = [size for size in divisors if size * n_vocab * 4 <= CHUNK_BYTES] or [1]
    if fitting[-1] < CHUNK_ROWS:
        return next((size for size in divisors if size >= CHUNK_ROWS), rows)
    return max([size for size in fitting if size % ALIGN == 0] or fitting)


def make_plan(programs: Mapping[str, Program], dims: Mapping[str, Mapping[str, int]]) -> Plan:
    """Place every buffer of a set of programs.

    ``dims`` holds the numbers of each program; parameters, gradients, moments, state, inputs and outputs are shared by name (a shared
    region is as large as the largest of its users needs), and so is the work space.

    Raises: ProgramError for a program that does not hold together (``validate``).
    """
    for program in programs.values():
        validate(program)
    layout, arena_sizes = _layout(programs, dims)
    sized = {
        name: {**dims[name], **{f"P_{part}": arena_sizes[part] for part in PARTS}}
        for name in programs
    }
    plan = Plan(dict(programs), sized, {}, layout)
    trains = any(
        buffer.role == "grad"
        for program in programs.values()
        for buffer in program.buffers.values()
    )
    for kind in ARENAS if trains else ("param",):
        for part in PARTS:
            _claim(plan, f"{kind}.{part}", "f32", arena_sizes[part])
    for name, program in programs.items():
        buffers = program.instances(sized[name]["L"])
        slots = _slots(program, buffers, sized[name])
        for slot, size in slots.sizes.items():
            _claim(plan, slot, "f32", size)
        plan.places[name] = {
            buffer.name: slots.places[buffer.name]
            if buffer.name in slots.places
            else _place_shared(plan, buffer, sized[name])
            for buffer in buffers.values()
            if buffer.role not in ("saved", "scratch") or buffer.name in slots.places
        }
    return plan


def _aligned(elements: int) -> int:
    return -(-elements // ALIGN) * ALIGN


def _numbers(shape: Shape, dims: Mapping[str, int]) -> tuple[int, ...]:
    return tuple(extent.bind(dims) for extent in shape)


def _claim(plan: Plan, name: str, dtype: Dtype, elements: int) -> None:
    held = plan.regions.get(name)
    size = max(_aligned(elements), held.elements if held else ALIGN)
    plan.regions[name] = Region(name, dtype, size)


def _layout(
    programs: Mapping[str, Program], dims: Mapping[str, Mapping[str, int]]
) -> tuple[dict[str, tuple[str, Place]], dict[str, int]]:
    """Offsets of every parameter within its part of the arenas, in the order in which the programs declare them."""
    layout: dict[str, tuple[str, Place]] = {}
    ends = dict.fromkeys(PARTS, 0)
    for name, program in programs.items():
        for buffer in program.instances(dims[name]["L"]).values():
            if buffer.role != "param" or buffer.init is None:
                continue
            part, shape = PARTS[0] if buffer.decay else PARTS[1], _numbers(buffer.shape, dims[name])
            if buffer.name in layout:
                if layout[buffer.name][1].shape != shape:
                    held = layout[buffer.name][1].shape
                    raise ProgramError(
                        f"parameter {buffer.name!r} is {shape} in program {name} and {held} in another of the set"
                    )
                continue
            layout[buffer.name] = (part, Place(f"param.{part}", ends[part], shape))
            ends[part] += _aligned(math.prod(shape))
    return layout, {part: max(end, ALIGN) for part, end in ends.items()}


def _place_shared(plan: Plan, buffer: Buffer, dims: Mapping[str, int]) -> Place:
    """The place of anything but work space: within an arena, an arena as a whole, or a region of its own."""
    shape = _numbers(buffer.shape, dims)
    if buffer.name in plan.regions and buffer.role in ("param", "grad", "moment"):
        return Place(buffer.name, 0, shape)
    if buffer.role in ("param", "grad"):
        return plan.tensor(buffer.role, buffer.name.removeprefix(ARENAS[buffer.role]))
    region = {"state": "state.", "input": "in.", "output": "out."}[buffer.role] + buffer.name
    _claim(plan, region, buffer.dtype, math.prod(shape))
    return Place(region, 0, shape)


@dataclass
class _Slots:
    sizes: dict[str, int]
    places: dict[str, Place]


def _slots(program: Program, buffers: Mapping[str, Buffer], dims: Mapping[str, int]) -> _Slots:
    """Share work space between buffers that are never alive together.

    A buffer is alive from the call that first touches it to the last one, both included. It takes the smallest free slot that holds it,
    else the largest free slot, which grows, else a new one. What is saved lives long and takes a slot of its own size or a new one: in a
    larger one the rest would lie idle for most of the step. Slots are numbered by falling size, so that the programs of a set overlap.
    """
    alive: dict[str, tuple[int, int]] = {}
    for index, step in enumerate(program.expand(dims["L"], chunks(program, dims))):
        for operand in step.call.operands:
            if operand is not None and buffers[step.name_of(operand)].role in ("saved", "scratch"):
                name = step.name_of(operand)
                alive[name] = (alive.get(name, (index, index))[0], index)
    sizes: list[int] = []
    taken: list[tuple[int, int]] = []  # a heap of (last call, slot)
    free: list[tuple[int, int]] = []  # sorted (size, slot)
    chosen: dict[str, int] = {}
    for name, (first, last) in sorted(alive.items(), key=lambda entry: entry[1][0]):
        while taken and taken[0][0] < first:
            slot = heapq.heappop(taken)[1]
            bisect.insort(free, (sizes[slot], slot))
        need = _aligned(math.prod(_numbers(buffers[name].shape, dims)))
        saved = buffers[name].role == "saved"
        holding = bisect.bisect_left(free, (need, 0))
        if holding < len(free) and (not saved or free[holding][0] == need):
            slot = free.pop(holding)[1]
        elif free and not saved:
            slot = free.pop(bisect.bisect_left(free, (free[-1][0], 0)))[1]
            sizes[slot] = need
        else:
            slot = len(sizes)
            sizes.append(need)
        heapq.heappush(taken, (last, slot))
        chosen[name] = slot
    rank = {
        slot: place
        for place, slot in enumerate(
            sorted(range(len(sizes)), key=lambda slot: (-sizes[slot], slot))
        )
    }
    return _Slots(
        {f"work.{rank[slot]}": size for slot, size in enumerate(sizes)},
        {
            name: Place(f"work.{rank[slot]}", 0, _numbers(buffers[name].shape, dims))
            for name, slot in chosen.items()
        },
    )


def _bind_step(
    step: Step,
    buffers: Mapping[str, Buffer],
    places: Mapping[str, Place],
    dims: Mapping[str, int],
    where: str,
) -> BoundCall:
    row = OPS[step.call.op]

    def place_of(operand: str | None) -> Place | None:
        if operand is None:
            return None
        place, shape = (
            places[step.name_of(operand)],
            _numbers(step.shape_of(operand, buffers), dims),
        )
        offset = place.offset
        if operand.endswith(ROWS):
            assert step.chunk is not None
            offset += step.chunk * math.prod(shape)
        return Place(place.region, offset, shape)

    sizes = sizes_of(step, buffers, where)
    return BoundCall(
        step.call.op,
        tuple(place_of(operand) for operand in step.call.operands),
        tuple(sizes[letter].bind(dims) for letter in row.sizes),
        tuple(
            float(Extent.parse(value).bind(dims)) if isinstance(value, str) else value
            for value in step.call.attrs.values()
        ),
    )
