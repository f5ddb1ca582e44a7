"""Proof that a program holds together: shapes, dtypes and the order of writes and reads.

What this is: ``validate`` walks a program, unrolled for two layers and two row chunks, and raises a ProgramError that names the call,
the buffer, what was wanted and what was got; ``sizes_of`` matches one call against its row of the op table, which is also how
``plan.py`` learns the numbers an engine is given.
What this is not: it computes nothing and allocates nothing. Read next: ``plan.py``.
"""

from __future__ import annotations

from collections.abc import Mapping

from posttrainllm.errors import ProgramError
from posttrainllm.extent import ONE, Extent, shape_text
from posttrainllm.ops import ADD, BETA, OPS, WRITE, Op, Operand
from posttrainllm.program import ROWS, Buffer, Call, Program, Role, Step

ALWAYS_THERE = ("param", "grad", "moment", "state", "input")


def operand_shape(operand: Operand, call: Call) -> tuple[str, ...]:
    """The letters of an operand in this call: a linear layer's weight is turned around under ``transposed=1``."""
    return (
        operand.transposed if operand.transposed and call.attrs.get("transposed") else operand.shape
    )


def sizes_of(step: Step, buffers: Mapping[str, Buffer], where: str) -> dict[str, Extent]:
    """Match a call's buffers against the op table and give the extent of every letter.

    Raises: ProgramError, naming both buffers that disagree.
    """
    call, row = step.call, OPS[step.call.op]
    known: dict[str, tuple[Extent, str]] = {}
    waiting: list[tuple[Extent, Extent, str]] = []
    for operand, name in zip(row.operands, call.operands, strict=True):
        if name is None:
            if not operand.optional:
                raise ProgramError(
                    f"{where}: {operand.name} is missing and {call.op} cannot do without it"
                )
            continue
        wanted, got = operand_shape(operand, call), step.shape_of(name, buffers)
        if len(wanted) != len(got):
            raise ProgramError(
                f"{where}: {operand.name} {name!r} is {shape_text(got)} but {call.op} takes ({', '.join(wanted)})"
            )
        waiting += [
            (Extent.parse(entry), extent, name) for entry, extent in zip(wanted, got, strict=True)
        ]
    while waiting:
        later = []
        for pattern, extent, name in waiting:
            left, right = Extent(pattern.times), extent
            unknown = [letter for letter in pattern.dims if letter not in known]
            for letter in pattern.dims:
                if letter in known:
                    left = left.times_extent(known[letter][0])
            if len(unknown) > 1:
                later.append((pattern, extent, name))
                continue
            rest = right.divided_by(left)
            if rest is None or (not unknown and rest != ONE):
                others = sorted({known[letter][1] for letter in pattern.dims if letter in known})
                raise ProgramError(
                    f"{where}: {name!r} is {shape_text(step.shape_of(name, buffers))} where {pattern} = {left} was wanted"
                    + (
                        f", as {' and '.join(map(repr, others))} {'say' if len(others) > 1 else 'says'}"
                        if others
                        else ""
                    )
                )
            if unknown:
                known[unknown[0]] = (rest, name)
        if len(later) == len(waiting):
            raise ProgramError(
                f"{where}: the shapes of {call.op} do not determine {', '.join(str(entry[0]) for entry in later)}"
            )
        waiting = later
    return {letter: extent for letter, (extent, _) in known.items()}


def validate(program: Program) -> None:
    """Check every call of a program. Raises ProgramError at the first one that does not hold.

    Shapes and dtypes fit the op table; no op reads what it overwrites; nothing is read before it is written; parameters and inputs are
    never overwritten; a saved buffer is written once; a gradient starts once, under BETA, and is added to after that; no result of work
    is lost. What it cannot see is a term that is missing from a sum: that takes numbers, which the gradient tests have.
    """
    buffers = program.instances(n_layer=2)
    live = _Liveness(program.name, {name: buffer.role for name, buffer in buffers.items()})
    for index, step in enumerate(program.expand(n_layer=2, n_chunks=2)):
        call, where = step.call, f"program {program.name}, call {index} {step.call.op}"
        _check_form(call, where)
        row = OPS[call.op]
        for name in (operand for operand in call.operands if operand is not None):
            if step.name_of(name) not in buffers:
                raise ProgramError(f"{where}: buffer {step.name_of(name)!r} is not declared")
            if name.endswith(ROWS) and step.rows is None:
                raise ProgramError(f"{where}: {name!r} is a window of rows outside a row block")
        sizes_of(step, buffers, where)
        for wanted, given in zip(row.operands, call.operands, strict=True):
            if given is not None and buffers[step.name_of(given)].dtype != wanted.dtype:
                found = buffers[step.name_of(given)].dtype
                raise ProgramError(
                    f"{where}: {wanted.name} {given!r} is {found} but {call.op} takes {wanted.dtype}"
                )
        _check_aliases(call, where)
        live.visit(step, row, where)
    live.finish()


def _check_form(call: Call, where: str) -> None:
    """Check what ``Program.call`` sees to, for programs from elsewhere, and the code of ``accumulate``."""
    if call.op not in OPS:
        raise ProgramError(f"{where}: there is no such op")
    row = OPS[call.op]
    got, wanted = (
        f"{len(outputs)} outputs and {len(inputs)} inputs"
        for outputs, inputs in ((call.outputs, call.inputs), (row.outputs, row.inputs))
    )
    if got != wanted:
        raise ProgramError(f"{where}: has {got} where {wanted} were wanted")
    if list(call.attrs) != list(row.attrs):  # engines take them by their place
        raise ProgramError(
            f"{where}: has the attributes ({', '.join(call.attrs)}) "
            f"where ({', '.join(row.attrs)}) were wanted"
        )
    code = call.attrs.get("accumulate", WRITE)
    if code not in (WRITE, ADD, BETA):
        raise ProgramError(f"{where}: accumulate is {code}, which only a row block resolves")
    if code == BETA and all(operand.name != "scalars" for operand in row.inputs):
        raise ProgramError(f"{where}: accumulate is BETA, but {call.op} does not read scalars")


def _check_aliases(call: Call, where: str) -> None:
    outputs = [name.removesuffix(ROWS) for name in call.outputs]
    if len(set(outputs)) != len(outputs):
        raise ProgramError(f"{where}: writes {outputs[0]!r} twice")
    for name in (name.removesuffix(ROWS) for name in call.inputs if name is not None):
        if name in outputs:
            raise ProgramError(
                f"{where}: reads and writes {name!r}; give the result a buffer of its own"
            )


class _Liveness:
    """Which buffers hold something, and whether anybody has looked at it since."""

    def __init__(self, program: str, roles: Mapping[str, Role]) -> None:
        self.program, self.roles = program, roles
        self.written: dict[str, set[int | None]] = {}
        self.unread: dict[tuple[str, int | None], str] = {}

    def visit(self, step: Step, row: Op, where: str) -> None:
        call = step.call
        for read in (name for name in call.inputs if name is not None):
            self._read(read, step, where)
        for index, (operand, name) in enumerate(zip(row.outputs, call.outputs, strict=True)):
            buffer, chunk = step.name_of(name), step.chunk if name.endswith(ROWS) else None
            role = self.roles[buffer]
            adds = operand.mode == "update" or (
                operand.mode == "accumulate" and call.attrs.get("accumulate") == ADD
            )
            if role == "input" or (
                role in ("param", "moment", "state") and operand.mode != "update"
            ):
                raise ProgramError(f"{where}: overwrites {name!r}, whose role is {role}")
            if adds:
                if role == "grad" and buffer not in self.written:
                    raise ProgramError(
                        f"{where}: adds to {name!r}, which no call of this program has started"
                    )
                self._read(name, step, where)
            elif role in ("grad", "saved") and self._holds(buffer, chunk):
                kind = "a gradient is started" if role == "grad" else "saved for the backward pass"
                raise ProgramError(
                    f"{where}: writes {name!r} again, but {kind} once; what was there is lost"
                )
            elif role == "grad" and call.attrs.get("accumulate") != BETA:
                raise ProgramError(
                    f"{where}: overwrites {name!r} whatever beta is; "
                    "what the micro-batch before left there is lost"
                )
            elif (buffer, chunk) in self.unread:
                raise ProgramError(
                    f"{where}: overwrites {name!r}, and nobody has read what {self.unread[buffer, chunk]} wrote there"
                )
            self.written.setdefault(buffer, set()).add(chunk)
            if index == 0 and role in ("saved", "scratch"):
                self.unread[buffer, chunk] = where

    def _holds(self, buffer: str, chunk: int | None) -> bool:
        """Whether these rows (None: any) have been written."""
        held = self.written.get(buffer, set())
        return bool(held) if chunk is None else None in held or chunk in held

    def _read(self, operand: str, step: Step, where: str) -> None:
        buffer, chunk = step.name_of(operand), step.chunk if operand.endswith(ROWS) else None
        held = self.written.get(buffer, set())
        whole = None in held or held == {0, 1}
        there = whole or self.roles[buffer] in ALWAYS_THERE
        if not there and (chunk is None or chunk not in held):
            raise ProgramError(f"{where}: reads {operand!r} before anything has written it")
        for key in [
            key
            for key in self.unread
            if key[0] == buffer and (chunk is None or key[1] in (None, chunk))
        ]:
            del self.unread[key]

    def finish(self) -> None:
        for (buffer, _), where in self.unread.items():
            raise ProgramError(
                f"{where}: writes {buffer!r}, and no call of program {self.program} ever reads it"
            )
