"""Which kernels an op becomes on WebGPU: the table ``kernels/wgsl/dispatch.json``, read and evaluated.

What this is: plain arithmetic on data. For one bound call it chooses a variant and gives its dispatches: entry point, bindings by operand
name, override constants, uniform words, workgroups, workspace. The TypeScript host evaluates the same table in the same way.
What this is not: anything that touches a GPU. Read next: ``engines/webgpu/recorder.py``. The grammar of the table stands in
``docs/ops/dispatch.md``; in short, an expression is a number, a name, or a list ``[operator, operand, ...]``.
"""

from __future__ import annotations

import functools
import json
import operator
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.resources import files
from typing import Any

from posttrainllm.engines.webgpu.work import Number, Work, merged, work_of
from posttrainllm.errors import EngineError
from posttrainllm.plan import BoundCall

FORMAT = 1
APART = "apart"  # chosen for fused work: its calls one by one
MOST_GROUPS = 65_535  # workgroups a dimension, on every adapter

Names = Mapping[str, Number]
Expression = Any  # a number, a name or a list: JSON

_OPERATORS: dict[str, Callable[[Number, Number], Number]] = {
    "+": operator.add,
    "-": operator.sub,
    "*": operator.mul,
    "div": operator.floordiv,
    "ceil": lambda a, b: -(-a // b),
    "mod": operator.mod,
    "min": min,
    "max": max,
    "==": lambda a, b: int(a == b),
    "!=": lambda a, b: int(a != b),
    "<": lambda a, b: int(a < b),
    "<=": lambda a, b: int(a <= b),
    ">": lambda a, b: int(a > b),
    ">=": lambda a, b: int(a >= b),
}


def evaluate(expression: Expression, names: Names) -> Number:
    """A number, the number behind a name, an operator over expressions from left to right, or ``rsqrt``, 1 / sqrt(x)."""
    if isinstance(expression, str):
        return names[expression]
    if isinstance(expression, list):
        values = [evaluate(entry, names) for entry in expression[1:]]
        if expression[0] == "rsqrt":
            return float(values[0] ** -0.5)
        return functools.reduce(_OPERATORS[expression[0]], values)
    number: Number = expression
    return number


@dataclass(frozen=True)
class Dispatch:
    """One dispatch of an entry point. ``window`` is a range of elements of the operands of shape (P,), for ops on whole arenas."""

    file: str
    entry: str
    bind: tuple[str, ...]
    overrides: tuple[tuple[str, int], ...]
    words: bytes
    grid: tuple[int, int, int]
    window: tuple[int, int] | None = None


@dataclass(frozen=True)
class Dispatches:
    """What work becomes: the variant's name, its dispatches in order, and the workspace they share, in elements."""

    work: Work
    variant: str
    passes: tuple[Dispatch, ...]
    workspace: int


@dataclass(frozen=True)
class Limits:
    """What the choice of a variant may depend on; the defaults are what every adapter has."""

    workgroup_bytes: int = 16_384
    invocations: int = 256
    subgroups: int = 0  # 1 where the feature is there
    binding_bytes: int = 134_217_728
    half: int = 0  # 1 where half precision was asked for, and is there
    checked: int = 0  # 1 where shaders have run-time checks, as in a browser

    def names(self) -> dict[str, int]:
        """As names for expressions."""
        return dict(vars(self))


def _read_table() -> dict[str, Any]:
    text = files("posttrainllm.kernels").joinpath("wgsl/dispatch.json").read_text("utf-8")
    table: dict[str, Any] = json.loads(text)
    if table["format"] != FORMAT:
        raise EngineError(f"dispatch.json has format {table['format']}, not {FORMAT}")
    return table


@functools.cache
def extensions(file: str) -> tuple[str, ...]:
    """The WGSL extensions that a file of kernels needs."""
    return tuple(_read_table()["enables"].get(file, ()))


@functools.cache
def source(file: str) -> str:
    """The WGSL text of a file of kernels, behind that of the parts that it shares with others.

    They come first because naga 29 (wgpu 0.32) aborts over an override that is declared behind an array whose size is one.
    """
    folder = files("posttrainllm.kernels").joinpath("wgsl")
    parts = _read_table()["parts"].get(file, ())
    return "\n".join(folder.joinpath(f"{name}.wgsl").read_text("utf-8") for name in (*parts, file))


def table_ops() -> frozenset[str]:
    """The ops that have kernels."""
    return frozenset(_read_table()["ops"])


class DispatchTable:
    """The table, and the choice among its variants.

    ``preferred`` names a variant for an op, or for an op and its sizes (``work.choice_key``), that is taken where its conditions hold.
    """

    def __init__(self, limits: Limits, preferred: Mapping[str, str] | None = None) -> None:
        """Read the table that ships with the package."""
        self.limits = limits
        self.preferred = dict(preferred or {})
        table = _read_table()
        self.ops = {op: _variants(rows, table["shared"]) for op, rows in table["ops"].items()}
        self.rules: list[dict[str, Any]] = table["fused"]
        self.ops |= {
            rule["op"]: _variants(rule["variants"], table["shared"]) for rule in self.rules
        }

    def merge(self, calls: Sequence[BoundCall]) -> list[Work]:
        """Calls as pieces of work: neighbours become one where a rule says so and, by choice or by the table, a variant is preferred."""
        return merged(calls, self.rules, self._wants)

    def _wants(self, work: Work) -> bool:
        names = self._names(work, 1)
        chosen = self.preferred.get(work.key) or self.preferred.get(work.op)
        if chosen == APART:
            return False
        fitting = [row for row in self.ops[work.op] if _fits(row, names)]
        if chosen:
            return any(row["variant"] == chosen for row in fitting)
        return any(_holds(row.get("prefer", []), _extended(row, names)) for row in fitting)

    def candidates(self, call: BoundCall | Work, windows: int = 1) -> list[str]:
        """Names of the variants that can run a call, the default one first."""
        work = call if isinstance(call, Work) else work_of(call)
        names = self._names(work, windows)
        fitting = [row for row in self.ops.get(work.op, []) if _fits(row, names)]
        fitting.sort(key=lambda row: not _holds(row.get("prefer", []), _extended(row, names)))
        return [row["variant"] for row in fitting]

    def dispatches(
        self,
        call: BoundCall | Work,
        windows: list[tuple[int, int]] | None = None,
        variant: str = "",
    ) -> Dispatches:
        """The dispatches of work. ``windows`` cuts operands of shape (P,) into ranges [begin, end) of elements.

        Raises: EngineError when no variant takes these sizes on this adapter, or a grid is too large.
        """
        work = call if isinstance(call, Work) else work_of(call)
        pieces = windows or [(0, int(work.names.get("P", 0)))]
        names = self._names(work, len(pieces))
        if windows:
            names["P"] = max(end - begin for begin, end in pieces)
        row = self._choose(work, names, variant)
        names = _extended(row, names)
        for name, expression in row.get("let", []):
            names[name] = evaluate(expression, names)
        passes: list[Dispatch] = []
        for entry in row["passes"]:
            if entry.get("windowed"):
                for index, (begin, end) in enumerate(pieces):
                    inner = {**names, "P": end - begin, "window": index}
                    passes.append(replace(_dispatch(work, entry, inner), window=(begin, end)))
            else:
                passes.append(_dispatch(work, entry, names))
        workspace = int(evaluate(row.get("workspace", 0), names))
        return Dispatches(work, row["variant"], tuple(passes), workspace)

    def _names(self, work: Work, windows: int) -> dict[str, Number]:
        return {**self.limits.names(), "windows": windows, **work.names}

    def _choose(self, work: Work, names: Names, variant: str) -> dict[str, Any]:
        fitting = [row for row in self.ops.get(work.op, []) if _fits(row, names)]
        if not fitting:
            raise EngineError(f"no webgpu kernel takes {work.key} on this adapter")
        wanted = variant or self.preferred.get(work.key) or self.preferred.get(work.op)
        preferred = (row for row in fitting if _holds(row.get("prefer", []), _extended(row, names)))
        first = next(preferred, fitting[0])
        return next((row for row in fitting if row["variant"] == wanted), first)


def _variants(rows: list[dict[str, Any]], shared: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The variants of an op: a row that is ``like`` a shared list takes all of it, under its own names and operands."""
    found: list[dict[str, Any]] = []
    for row in rows:
        if "like" not in row:
            found.append(row)
            continue
        for variant in shared[row["like"]]:
            passes = [
                {**entry, "bind": [row["operands"].get(name, name) for name in entry["bind"]]}
                for entry in variant["passes"]
            ]
            when = [*row.get("when", []), *variant.get("when", [])]
            found.append({**variant, "when": when, "names": row["names"], "passes": passes})
    return found


def _extended(row: Mapping[str, Any], names: Names) -> dict[str, Number]:
    """Names with those that the row defines for its conditions."""
    known = dict(names)
    for name, expression in row.get("names", []):
        known[name] = evaluate(expression, known)
    return known


def _holds(conditions: list[Expression], names: Names) -> bool:
    return all(evaluate(condition, names) for condition in conditions)


def _fits(row: Mapping[str, Any], names: Names) -> bool:
    return _holds(row.get("when", []), _extended(row, names))


def _dispatch(work: Work, entry: Mapping[str, Any], names: Names) -> Dispatch:
    counts = [int(evaluate(expression, names)) for expression in entry["grid"]]
    grid = _fold(counts[0]) if len(counts) == 1 else (counts[0], counts[1], (*counts, 1)[2])
    if max(grid) > MOST_GROUPS:
        raise EngineError(
            f"{work.key} needs {max(grid):,} workgroups in one dimension, "
            f"over WebGPU's limit of {MOST_GROUPS:,}"
        )
    overrides = entry.get("overrides", {}).items()
    return Dispatch(
        entry["file"],
        entry["entry"],
        tuple(entry["bind"]),
        tuple((name, int(evaluate(expression, names))) for name, expression in overrides),
        b"".join(_word(argument, names) for argument in entry["args"]),
        grid,
    )


def _fold(count: int) -> tuple[int, int, int]:
    """A flat number of workgroups in two dimensions; the kernel counts x + y * (groups in x) and checks its bounds."""
    rows = -(-count // MOST_GROUPS)
    return (-(-count // rows), rows, 1)


def _word(argument: Expression, names: Names) -> bytes:
    if isinstance(argument, list) and argument[0] == "f32":
        return struct.pack("<f", evaluate(argument[1], names))
    return struct.pack("<I", evaluate(argument, names))
