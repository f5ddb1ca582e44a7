"""A text shaded by how surprised a model was: in colours, or with marks under its characters where there are none.

    ROMEO: But soft, what light
    ▂    █ ▄   █▂    ▂    ▄

Pure functions from the parts of a text to lines; nothing here prints.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import groupby

from posttrainllm.cli.terminal import Part, cells
from posttrainllm.figures import printable
from posttrainllm.training.looking import RARER, Span, level

MARKS, LETTERS = " ▂▄▆█", " .-+#"
STYLES = (
    "",
    "black on color(229)",
    "black on color(221)",
    "black on color(209)",
    "black on color(203)",
)
FIRST = "dim"  # what nothing came before
WORD = 24  # cells that a line may be shorter to end between words


@dataclass(frozen=True)
class Shown:
    """A character as it is shown, and its level: an index of ``STYLES``, None for what nothing came before."""

    text: str
    level: int | None
    breaks: bool = False  # the line ends after it


def shaded(spans: Iterable[Span], room: int, *, unicode: bool) -> list[list[Shown]]:
    """A text in lines of at most ``room`` cells, broken between words where one is near; line breaks are shown, too."""
    lines: list[list[Shown]] = [[]]
    used = 0
    for each in _characters(spans, unicode=unicode):
        size = cells(each.text)
        if used + size > room and lines[-1]:
            lines.append(_carried(lines[-1]))
            used = sum(cells(character.text) for character in lines[-1])
        lines[-1].append(each)
        used += size
        if each.breaks:
            lines.append([])
            used = 0
    return lines if lines[-1] else lines[:-1]


def coloured(line: Iterable[Shown]) -> list[Part]:
    """A line for a terminal with colours."""
    return [
        ("".join(each.text for each in same), FIRST if shade is None else STYLES[shade])
        for shade, same in groupby(line, key=lambda each: each.level)
    ]


def marked(line: Iterable[Shown], *, unicode: bool) -> tuple[str, str]:
    """A line and the marks under it."""
    marks = MARKS if unicode else LETTERS
    line = list(line)
    under = "".join(marks[each.level or 0] * cells(each.text) for each in line)
    return "".join(each.text for each in line), under.rstrip()


def legend(*, colours: bool, unicode: bool) -> list[Part]:
    """Which shade means what."""
    parts: list[Part] = [("rarer than 1 in:", "dim")]
    marks = MARKS if unicode else LETTERS
    for limit, style, mark in zip(RARER, STYLES[1:], marks[1:], strict=True):
        parts += [" ", (f" {limit:,} ", style)] if colours else [f" {mark} {limit:,}"]
    return parts


def _characters(spans: Iterable[Span], *, unicode: bool) -> Iterable[Shown]:
    for span in spans:
        shade = level(span.surprise)
        for character in span.text:
            if character == "\n":
                yield Shown("⏎" if unicode else "\\n", shade, breaks=True)
            elif character == "\t":
                yield Shown("⇥" if unicode else "\\t", shade)
            elif unicode or character.isascii():
                yield Shown(printable(character), shade)
            else:
                yield Shown("?", shade)


def _carried(line: list[Shown]) -> list[Shown]:
    """Take the word that a full line ends in off it, unless it is a long one, to begin the next line with."""
    for length in range(len(line), max(0, len(line) - WORD), -1):
        if line[length - 1].text == " ":
            carried = line[length:]
            del line[length:]
            return carried
    return []
