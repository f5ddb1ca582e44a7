"""How numbers, times and text that others wrote are shown to people, in a terminal and in a notebook.

Pure functions to text: nothing here prints.
"""

from __future__ import annotations

import math
import unicodedata
from collections.abc import Callable

Progress = Callable[[str, int, int], None]
"""Told of long work, often: what is counted, how many are done, and of how many; 0 when nobody knows."""


def untold(what: str, done: int, total: int) -> None:
    """A ``Progress`` that tells nobody."""


TURNS = frozenset({"LRE", "RLE", "LRO", "RLO", "PDF", "LRI", "RLI", "FSI", "PDI"})
"""Kinds of characters that change the direction of what is written after them."""


def part_done(what: str, done: int, total: int) -> str:
    """Write how far long work is, as told to a ``Progress``: "bytes read: 1,024 of 4,096"."""
    return f"{what}: {done:,} of {total:,}" if total else f"{what}: {done:,}"


def clock(seconds: float) -> str:
    """Write a duration as a clock shows it: 0:07, 12:30, 1:02:03."""
    whole = max(0, round(seconds))
    hours, minutes, rest = whole // 3600, whole // 60 % 60, whole % 60
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def about(seconds: float) -> str:
    """Write an estimate with the digits it deserves: 8 s, 50 s, 3 min, 2.5 h, 4 days."""
    if seconds < 10:
        return f"{max(1, round(seconds))} s"
    if seconds < 90:
        return f"{round(seconds / 5) * 5} s"
    if seconds < 90 * 60:
        return f"{round(seconds / 60)} min"
    if seconds < 48 * 3600:
        return f"{seconds / 3600:.1f} h"
    return f"{round(seconds / 86400)} days"


def brief(seconds: float) -> str:
    """Write the time of one step: 0.8 ms, 25 ms, 3.1 s."""
    if seconds < 0.01:
        return f"{seconds * 1e3:.1f} ms"
    return f"{seconds * 1e3:.0f} ms" if seconds < 1 else f"{seconds:.1f} s"


def counted(number: int, noun: str) -> str:
    """Write a number with its noun: 1 step, 2,000 steps."""
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


def printable(text: str) -> str:
    """Show control characters instead of sending them on; line breaks and tabs stay.

    A model of bytes can write any of them, and so can a file name. A carriage return before a line
    break is left out. What turns the order of all letters after it, and bytes of a file name that are
    no text (lone surrogates), which no page or terminal takes, become U+FFFD.
    """
    text = text.replace("\r\n", "\n")
    return "".join(map(_shown, text))


def one_line(text: str) -> str:
    """Show text on one line: control characters as pictures, runs of white space as one space."""
    return " ".join(printable(text).split())


def escaped(text: str) -> str:
    """Show a piece of a text on one line, its spaces as they are."""
    return printable(text).replace("\n", "\\n").replace("\t", "\\t")


def quoted(text: str) -> str:
    """Show a piece of a text between quotes, so that its spaces are seen."""
    return f'"{escaped(text)}"'


def percent(share: float) -> str:
    """Write a probability: 41.2 %, 0.38 %, <0.01 %."""
    hundreds = 100 * share
    if hundreds < 0.01 or hundreds >= 99.95:
        return "<0.01 %" if hundreds < 0.01 else ">99.9 %"
    return f"{hundreds:.2f} %" if hundreds < 1 else f"{hundreds:.1f} %"


def perplexity(loss: float) -> str:
    """Write exp of a loss in nats: 5.1, 190, 2.3e+07."""
    value = math.exp(min(loss, 700.0))
    return f"{value:.1f}" if value < 100 else f"{value:,.0f}" if value < 1e6 else f"{value:.1e}"


def _shown(character: str) -> str:
    if character.isascii() and character.isprintable():
        return character
    category = unicodedata.category(character)
    if category == "Cs" or unicodedata.bidirectional(character) in TURNS:
        return "\ufffd"
    return _picture(character) if category == "Cc" else character


def _picture(character: str) -> str:
    code = ord(character)
    if character in "\n\t":
        return character
    if code < 32:
        return chr(0x2400 + code)  # the picture of that control character
    return "\u2421" if code == 127 else "\ufffd"
