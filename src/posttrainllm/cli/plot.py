"""Curves in characters: a sparkline for one row, and a plot with axes for several curves.

    3.4 |⠣⡀
        | ⠑⠢⣀
        |    ⠉⠒⠤⠤⣀⣀⣀
    1.8 |           ⠉⠉⠉⠉
        +----------------
         1            600

Pure functions from numbers to characters: each cell of a plot knows which curve it belongs to, and
the caller chooses colours. Where there is no colour or no braille, curves are drawn with letters.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from posttrainllm.runs.curves import Curve, means

BLOCKS = "▁▂▃▄▅▆▇█"
NOTHING = -1  # the curve of a cell that belongs to none
TOP_SHARE = 0.05  # of the values are above the top of a scale: the first steps' losses would flatten the rest

# Bit of a braille character for the dot at (column, row) of its 2 x 4 dots.
_DOTS = ((0x01, 0x02, 0x04, 0x40), (0x08, 0x10, 0x20, 0x80))


@dataclass(frozen=True)
class Cell:
    """One character of a plot, and the number of the curve it belongs to."""

    character: str
    curve: int = NOTHING


def sparkline(values: Sequence[float], width: int) -> str:
    """Draw values in one row of at most ``width`` blocks, each the mean of as many of them."""
    finite = [value for value in values if math.isfinite(value)]
    if not finite or width < 1:
        return ""
    levels = means(finite, min(width, len(finite)))
    low, high = _range(levels)
    if high <= low:
        return BLOCKS[0] * len(levels)
    top = len(BLOCKS) - 1
    return "".join(BLOCKS[round(min(1.0, (value - low) / (high - low)) * top)] for value in levels)


def plot(
    curves: Sequence[Curve], width: int, height: int, *, letters: bool = False
) -> list[list[Cell]]:
    """Draw curves over common axes as ``height`` + 2 rows of cells, ``width`` at most.

    ``letters`` draws curve 0 with a, curve 1 with b, and needs neither colour nor Unicode. Without a
    finite point there is nothing to draw and the result is empty.
    """
    points = [
        [(x, y) for x, y in zip(curve.x, curve.y, strict=True) if math.isfinite(y)]
        for curve in curves
    ]
    everything = [point for each in points for point in each]
    if not everything:
        return []
    low, high = _range([y for _, y in everything])
    left, right = min(x for x, _ in everything), max(x for x, _ in everything)
    labels = [f"{high:.2f}", f"{low:.2f}"]
    margin = max(map(len, labels)) + 2
    columns = max(8, width - margin)
    canvas = _Canvas(columns, height, letters=letters)
    for number, each in enumerate(points):
        places = [(_share(x, left, right), 1.0 - min(1.0, _share(y, low, high))) for x, y in each]
        canvas.draw(places, number)
    rows = []
    for row in range(height):
        label = labels[0] if row == 0 else labels[1] if row == height - 1 else ""
        rows.append([*_text(f"{label:>{margin - 2}} |"), *canvas.row(row)])
        while rows[-1][-1].character == " ":
            rows[-1].pop()
    rows.append(_text(" " * (margin - 1) + "+" + "-" * columns))
    first, last = f"{left:,.0f}", f"{right:,.0f}"
    rows.append(_text(" " * margin + first + last.rjust(columns - len(first))))
    return rows


class _Canvas:
    """A grid of characters with lines drawn in dots: 2 x 4 a character, or one with letters."""

    def __init__(self, columns: int, rows: int, *, letters: bool) -> None:
        self.columns, self.rows, self.letters = columns, rows, letters
        self.wide, self.high = (1, 1) if letters else (2, 4)
        self._bits = [[0] * columns for _ in range(rows)]
        self._curves = [[NOTHING] * columns for _ in range(rows)]

    def draw(self, places: Sequence[tuple[float, float]], curve: int) -> None:
        """Draw a line through places, each a share of the width and of the height."""
        across, down = self.columns * self.wide - 1, self.rows * self.high - 1
        dots = [(round(x * across), round(y * down)) for x, y in places]
        if len(dots) == 1:
            self._dot(*dots[0], curve)
        for (x0, y0), (x1, y1) in pairwise(dots):
            pieces = max(abs(x1 - x0), abs(y1 - y0), 1)
            for piece in range(pieces + 1):
                self._dot(
                    x0 + round((x1 - x0) * piece / pieces),
                    y0 + round((y1 - y0) * piece / pieces),
                    curve,
                )

    def _dot(self, x: int, y: int, curve: int) -> None:
        column, row = x // self.wide, y // self.high
        self._bits[row][column] |= 1 if self.letters else _DOTS[x % 2][y % 4]
        self._curves[row][column] = curve

    def row(self, number: int) -> list[Cell]:
        """Return a row of characters."""
        return [
            Cell(self._character(bits, curve), curve)
            for bits, curve in zip(self._bits[number], self._curves[number], strict=True)
        ]

    def _character(self, bits: int, curve: int) -> str:
        if not bits:
            return " "
        return chr(ord("a") + curve % 26) if self.letters else chr(0x2800 + bits)


def _text(text: str) -> list[Cell]:
    return [Cell(character) for character in text]


def _range(values: Sequence[float]) -> tuple[float, float]:
    """Return the scale's ends: the lowest value, and a top that a few high ones do not stretch."""
    ordered = sorted(values)
    return ordered[0], ordered[math.ceil((1 - TOP_SHARE) * (len(ordered) - 1))]


def _share(value: float, low: float, high: float) -> float:
    return (value - low) / (high - low) if high > low else 0.0
