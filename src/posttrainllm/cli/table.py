"""Tables for the terminal: aligned columns, of which the least important go when it is narrow."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass

from posttrainllm.cli.terminal import cells, say, width

GAP = 2


@dataclass(frozen=True)
class Column:
    """A column: its title, how it is aligned, and how early it goes when there is no room (0: never)."""

    title: str
    right: bool = False
    goes: int = 0


def print_table(columns: Sequence[Column], rows: Sequence[Sequence[str]]) -> None:
    """Print rows under their titles, and what a terminal has no room for; anything else gets every column."""
    chosen = fitting(columns, rows, width(sys.stdout))
    sizes = [max(cells(line[at]) for line in ([c.title for c in columns], *rows)) for at in chosen]
    for number, row in enumerate([[column.title for column in columns], *rows]):
        parts = []
        for at, size in zip(chosen, sizes, strict=True):
            space = " " * (size - cells(row[at]))
            parts.append(space + row[at] if columns[at].right else row[at] + space)
        say(((" " * GAP).join(parts).rstrip(), "" if number else "bold"))
    if hidden := [column.title for at, column in enumerate(columns) if at not in chosen]:
        say((f"a wider terminal also shows: {', '.join(hidden)}", "dim"))


def fitting(columns: Sequence[Column], rows: Sequence[Sequence[str]], room: int) -> list[int]:
    """Return the indices of the columns that fit into ``room`` columns of a terminal (0: any number)."""
    sizes = [
        max(cells(column.title), *(cells(row[at]) for row in rows), 0)
        for at, column in enumerate(columns)
    ]
    chosen = list(range(len(columns)))
    while room and sum(sizes[at] + GAP for at in chosen) - GAP > room:
        least = max(chosen, key=lambda at: columns[at].goes)
        if not columns[least].goes:
            break
        chosen.remove(least)
    return chosen
