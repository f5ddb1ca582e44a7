"""Attention in characters: one head as a grid with its tokens at the sides, or all heads of a layer as small grids.

             R O M E O :
        "R"  █
        "O"  ▓ ▒
        "M"  · ░ ▓

Pure functions from numbers to lines of text. A row is a token, a column one that it looked at; what lies ahead is blank.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import zip_longest

import numpy as np
from numpy.typing import NDArray

from posttrainllm.cli.terminal import cells
from posttrainllm.training.looking import habit, largest

Weights = NDArray[np.float32]

LIMITS = (0.02, 0.08, 0.25, 0.5)  # shares of a row from which a cell is a shade darker
SHADES, LETTERS = "·░▒▓█", ".-+*#"
LABEL, TALL = 8, 4  # the longest name at the left, in cells, and the tallest above, in lines
SMALL, GAP = 24, 3  # rows and columns of a small grid, and the room between two


def legend(*, unicode: bool) -> str:
    """Which shade means which share."""
    shades = SHADES if unicode else LETTERS
    return "share of a row:  " + "  ".join(
        f"{shade} {limit:.0%}".replace("%", " %")
        for shade, limit in zip(shades[1:], LIMITS, strict=True)
    )


def one_head(
    weights: Weights, names: Sequence[str], room: int, *, unicode: bool
) -> tuple[list[str], int]:
    """Draw a head, weights (T, T), at most ``room`` cells wide; returns its lines, and of how many tokens, the last ones."""
    label = max(cells(_short(name)) for name in names)
    wide = any(cells(character) > 1 for name in names for character in name)
    unit = 2 if wide or label + 1 + 2 * len(names) <= room else 1
    shown = max(1, min(len(names), (room - label - 1) // unit))
    names = names[-shown:]
    margin = " " * (label + 1)
    above = zip_longest(*(reversed(_above(name)) for name in names), fillvalue=" ")
    lines = [
        (margin + "".join(_filled(each, unit) for each in line)).rstrip()
        for line in reversed(list(above))
    ]
    drawn = _shaded(weights[-shown:, -shown:], unicode=unicode)
    for name, row in zip(names, drawn, strict=True):
        short = _short(name)
        filled = "".join(
            each * 2 if unit == 2 and each in "░▒▓█" else each.ljust(unit) for each in row
        )
        lines.append(" " * (label - cells(short)) + short + " " + filled.rstrip())
    return lines, shown


def all_heads(weights: Weights, room: int, *, unicode: bool) -> tuple[list[str], int]:
    """Draw every head, weights (H, T, T), small and side by side.

    Returns the lines, and how many tokens a cell stands for at most, each way: it shows the largest of their weights.
    """
    time = weights.shape[1]
    size = min(time, SMALL, max(1, room))
    blocks = []
    for head, each in enumerate(weights):
        drawn = _shaded(largest(each, size), unicode=unicode)
        place, share = habit(each)
        blocks.append(
            [
                f"head {head}",
                f"{place} {share:.0%}".replace("%", " %"),
                *("".join(row) for row in drawn),
            ]
        )
    widest = max(size, *(len(line) for block in blocks for line in block))
    across = max(1, (room + GAP) // (widest + GAP))
    lines: list[str] = []
    for first in range(0, len(blocks), across):
        for parts in zip(*blocks[first : first + across], strict=True):
            lines.append((" " * GAP).join(part.ljust(widest) for part in parts).rstrip())
        lines.append("")
    return lines[:-1], -(-time // size)


def _shaded(weights: Weights, *, unicode: bool) -> list[list[str]]:
    shades = SHADES if unicode else LETTERS
    levels = np.searchsorted(LIMITS, weights, side="right")
    return [[shades[level] for level in row[: at + 1]] for at, row in enumerate(levels)]


def _short(name: str) -> str:
    """A name for the left side, cut to its end: the beginning of a long token tells more."""
    while cells(name) > LABEL:
        name = name[:-1]
    return name


def _above(name: str) -> list[str]:
    """The characters of a name, one a line, at most ``TALL``."""
    return [*name.removeprefix("\\x")][:TALL]


def _filled(character: str, unit: int) -> str:
    return character + " " * max(0, unit - cells(character))
