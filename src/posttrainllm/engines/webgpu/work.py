"""Calls as the dispatch table sees them, and neighbours that share dispatches.

What this is: ``Work`` is a bound call by names: sizes, attributes and operands. ``merged`` turns runs of calls that a row under
``fused`` of ``dispatch.json`` names into one piece of work. A host that ignores those rows computes the same, with more dispatches.
What this is not: a rewrite of programs (``fuse.py``); nothing here is seen by other engines. Read next: ``engines/webgpu/dispatch.py``.

Names of a fused row: sizes and attributes of call k are ``k.N``, ``k.accumulate``; without the number, the first call that has one
gives it. Operands carry their own names, or those under ``as``; two of one name must be the same buffer. One that the row calls
``inner`` is written and read inside the run only, and never reaches memory.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from posttrainllm.ops import OPS
from posttrainllm.plan import BoundCall, Place

Number = int | float


@dataclass(frozen=True)
class Operand:
    """A buffer of a piece of work; ``windowed`` ones have the shape (P,) and may be cut into windows."""

    place: Place | None
    written: bool
    windowed: bool


@dataclass(frozen=True)
class Work:
    """One or more calls: ``op`` and ``key`` as choices of kernels are kept by, numbers and operands by name."""

    op: str
    key: str
    names: Mapping[str, Number]
    operands: Mapping[str, Operand]

    @property
    def arena(self) -> Place | None:
        """An operand that may be cut into windows."""
        found = (operand.place for operand in self.operands.values() if operand.windowed)
        return next(found, None)


def choice_key(call: BoundCall) -> str:
    """An op with its sizes and attributes, as choices are kept: ``linear_forward 1024 96 288 / 0``."""
    attrs = " ".join(f"{value:g}" for value in call.attrs)
    return f"{call.op} {' '.join(map(str, call.sizes))} / {attrs}"


def work_of(call: BoundCall) -> Work:
    """A call by names."""
    row = OPS[call.op]
    operands = {
        operand.name: Operand(place, index < len(row.outputs), operand.shape == ("P",))
        for index, (operand, place) in enumerate(zip(row.operands, call.operands, strict=True))
    }
    return Work(call.op, choice_key(call), _numbers(call), operands)


def _numbers(call: BoundCall) -> dict[str, Number]:
    row = OPS[call.op]
    names: dict[str, Number] = dict(zip(row.sizes, call.sizes, strict=True))
    for name, value in zip(row.attrs, call.attrs, strict=True):
        names[name] = int(value) if value == int(value) else value
    for operand, place in zip(row.operands, call.operands, strict=True):
        if operand.optional:
            names[f"has_{operand.name}"] = int(place is not None)
    return names


def merged(
    calls: Sequence[BoundCall],
    rules: Sequence[Mapping[str, Any]],
    wanted: Callable[[Work], bool],
) -> list[Work]:
    """Calls as pieces of work; the first rule that takes the calls from here on, and whose work is ``wanted``, merges them."""
    found: list[Work] = []
    at = 0
    while at < len(calls):
        for rule in rules:
            work = _merge(calls, at, rule)
            if work is not None and wanted(work):
                found.append(work)
                at += len(rule["calls"])
                break
        else:
            found.append(work_of(calls[at]))
            at += 1
    return found


def _merge(calls: Sequence[BoundCall], at: int, rule: Mapping[str, Any]) -> Work | None:
    run = calls[at : at + len(rule["calls"])]
    if [call.op for call in run] != [part["op"] for part in rule["calls"]]:
        return None
    names: dict[str, Number] = {}
    operands: dict[str, Operand] = {}
    for index, (call, part) in enumerate(zip(run, rule["calls"], strict=True)):
        for name, number in _numbers(call).items():
            names[f"{index}.{name}"] = number
            names.setdefault(name, number)
        for own, operand in work_of(call).operands.items():
            name = part.get("as", {}).get(own, own)
            held = operands.get(name, operand)
            if held.place != operand.place:
                return None
            written = held.written or operand.written
            operands[name] = Operand(operand.place, written, held.windowed or operand.windowed)
    for name in rule.get("inner", []):
        place = operands.pop(name).place
        if place is None or not _dead(calls[at + len(run) :], place):
            return None
    if _clash(operands):
        return None
    return Work(rule["op"], " + ".join(map(choice_key, run)), names, operands)


def _dead(calls: Sequence[BoundCall], place: Place) -> bool:
    """Whether nobody reads a place of the work space before it is written again."""
    if not place.region.startswith("work."):
        return False
    for call in calls:
        row = OPS[call.op]
        touching = [
            index < len(row.outputs) and operand.mode == "write"
            for index, (operand, other) in enumerate(zip(row.operands, call.operands, strict=True))
            if other is not None and other.region == place.region
        ]
        if touching:
            return all(touching)
    return True


def _clash(operands: Mapping[str, Operand]) -> bool:
    """Whether something that is written shares a slot of the work space with another operand."""
    slots = [
        (operand.place.region, operand.written)
        for operand in operands.values()
        if operand.place is not None and operand.place.region.startswith("work.")
    ]
    sharing = Counter(slot for slot, _ in slots)
    return any(written and sharing[slot] > 1 for slot, written in slots)
