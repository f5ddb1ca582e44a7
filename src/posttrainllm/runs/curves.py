"""The curves of a run: the numbers of its metrics over their steps, thinned to means.

What this is: points, for whoever draws them. ``GrowingCurve`` is for a run that trains, ``curve_of`` for one on the disk.
What this is not: a drawing; that is ``cli/plot.py`` (characters) and ``notebook/curve.py`` (SVG).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from posttrainllm.runs.records import number_of


@dataclass(frozen=True)
class Curve:
    """A named curve: y over x, both in order of x."""

    name: str
    x: Sequence[float]
    y: Sequence[float]


def smooth(values: Sequence[float], most: int) -> list[float]:
    """Return at most ``most`` means of neighbouring values."""
    return means(values, min(most, len(values))) if values else []


def means(values: Sequence[float], count: int) -> list[float]:
    """Return ``count`` means of neighbouring values, of which there are at least as many."""
    bounds = [len(values) * number // count for number in range(count + 1)]
    return [_mean(values[start:end]) for start, end in pairwise(bounds)]


def _mean(values: Sequence[float]) -> float:
    """Divided first: the sum of numbers need not be one."""
    return sum(value / len(values) for value in values)


def curve_of(name: str, lines: Sequence[Mapping[str, Any]], key: str, most: int) -> Curve:
    """The numbers under a key of metrics.jsonl over their steps, thinned out to at most ``most`` means."""
    found = [(number_of(line, "step"), number_of(line, key)) for line in lines]
    points = [(float(x), float(y)) for x, y in found if x is not None and y is not None]
    return Curve(name, smooth([x for x, _ in points], most), smooth([y for _, y in points], most))


@dataclass
class GrowingCurve:
    """A curve that is added to, and never has more than ``most`` points: later they are means of 2, 4, 8 ... neighbours."""

    most: int
    x: list[float] = field(default_factory=list)
    y: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        """Every point is one that was added, so far."""
        self._waiting: list[tuple[float, float]] = []
        self._each = 1

    def add(self, x: float, y: float) -> None:
        """Add a point behind the others."""
        self._waiting.append((x, y))
        if len(self._waiting) == self._each:
            self.x.append(_mean([x for x, _ in self._waiting]))
            self.y.append(_mean([y for _, y in self._waiting]))
            self._waiting.clear()
        if len(self.y) == self.most:
            self.x, self.y = smooth(self.x, self.most // 2), smooth(self.y, self.most // 2)
            self._each *= 2
