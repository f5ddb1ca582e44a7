"""Where output goes: a terminal with or without styles, a pipe, a file.

``say`` prints a line of parts, some with a style; on anything but a terminal the styles are left out
and rich is not even imported. ``fields`` prints labels with values, wrapped to the terminal.
What this is not: the live display, which is ``display.py``.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
import textwrap
import unicodedata
from collections.abc import Iterable, Mapping
from functools import cache
from typing import TYPE_CHECKING, TextIO

if TYPE_CHECKING:
    from rich.console import Console

Part = str | tuple[str, str]
"""Text, or text with a style of rich: "bold", "dim", "yellow"."""

NO_STYLES: Mapping[str, str] = {}
WARNINGS = {"warning": "yellow"}

WIDEST = 100  # columns that prose is wrapped to, however wide the terminal is


def is_terminal(stream: TextIO) -> bool:
    """Whether a person sees this stream, on a terminal that can do more than print."""
    return stream.isatty() and os.environ.get("TERM", "") != "dumb"


def can_redraw(stream: TextIO) -> bool:
    """Whether lines on this stream can be drawn again in place, with the characters of a display."""
    return is_terminal(stream) and has_unicode(stream)


def has_unicode(stream: TextIO) -> bool:
    """Whether the stream takes every character."""
    return (stream.encoding or "utf-8").lower().replace("-", "").startswith("utf")


def has_colours(stream: TextIO) -> bool:
    """Whether the stream shows enough colours to shade with, and the user wants them (``NO_COLOR`` is not set)."""
    if not can_redraw(stream):
        return False
    console = styled(stream)
    return not console.no_color and console.color_system in ("256", "truecolor")


def in_foreground(stream: TextIO) -> bool:
    """Whether the terminal is ours now, and not a shell's that has put this process in the background."""
    try:
        return os.tcgetpgrp(stream.fileno()) == os.getpgrp()
    except (OSError, AttributeError):  # no controlling terminal, or a system without job control
        return True


def width(stream: TextIO) -> int:
    """Columns of the terminal; 0 where lines can have any length."""
    return shutil.get_terminal_size().columns if stream.isatty() else 0


def cells(text: str) -> int:
    """Columns that a text takes on a terminal: two for a wide character, none for one that combines with that before it."""
    if text.isascii():
        return len(text)
    return sum(
        2
        if unicodedata.east_asian_width(character) in "WF"
        else unicodedata.category(character) not in ("Mn", "Me", "Cf")
        for character in text
    )


def discard_output() -> None:
    """Send standard output nowhere after it failed, so that no later flush fails on it again."""
    with contextlib.suppress(OSError, ValueError):
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())
        os.close(nowhere)


def say(*parts: Part, end: str = "\n", error: bool = False) -> None:
    """Print one line of parts to standard output, or to standard error, which may be gone: nothing fails for want of it."""
    if not error:
        return _print(sys.stdout, parts, end)
    with contextlib.suppress(OSError):
        _print(sys.stderr, parts, end)


def _print(stream: TextIO, parts: Iterable[Part], end: str) -> None:
    if is_terminal(stream):
        from rich.text import Text

        styled(stream).print(Text.assemble(*parts), soft_wrap=True, end=end)
    else:
        print(
            *(part if isinstance(part, str) else part[0] for part in parts),
            sep="",
            end=end,
            file=stream,
        )
    stream.flush()


def fields(rows: Iterable[tuple[str, str]], styles: Mapping[str, str] = NO_STYLES) -> None:
    """Print labels and values in two columns; on a terminal long values are wrapped under themselves.

    ``styles`` may give the values of a label a style.
    """
    rows = list(rows)
    indent = max((len(label) for label, _ in rows), default=0) + 2
    columns = width(sys.stdout)
    room = max(20, min(columns, WIDEST) - indent) if columns else 0
    for label, value in rows:
        lines = _wrap(value, room) if room else [value]
        for number, line in enumerate(lines or [""]):
            say((f"{'' if number else label:<{indent}}", "dim"), (line, styles.get(label, "")))


def _wrap(text: str, room: int) -> list[str]:
    """Break text between words alone: a path that is too long stays one piece, to be copied."""
    return textwrap.wrap(text, room, break_on_hyphens=False, break_long_words=False)


@cache
def _console(stream: TextIO) -> Console:
    from rich.console import Console

    return Console(file=stream, highlight=False, markup=False, emoji=False)


def styled(stream: TextIO) -> Console:
    """The rich console of a stream."""
    return _console(stream)
