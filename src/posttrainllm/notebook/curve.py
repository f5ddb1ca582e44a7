"""The curves of runs as an inline SVG, for a notebook's output.

What this is: a pure function from points to text. Colours come from the page where they can (``currentColor``) and are else readable on
white and on black; there is no background, script, style sheet or id, so that any number of pictures stand in one page.
What this is not: where the points come from (``runs/curves.py``) or what stands around the picture (``page.py``).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from posttrainllm.figures import printable
from posttrainllm.runs.curves import Curve, smooth
from posttrainllm.text.counting import CountingLine

BLUE, ORANGE = "#3b82f6", "#d97706"
COLOURS = (BLUE, ORANGE, "#16a34a", "#c026d3", "#dc2626", "#0891b2")
"""Contrast of at least 3 to 1 on white and on black."""
DASHES = ("", "6 3", "2 3")
"""Of the lines in the second and third round through the colours."""

WIDTH, HEIGHT, WIDEST_PX = 480, 270, 620
LEFT, TOP, BOTTOM, RIGHT, RIGHT_NAMES = 40, 28, 36, 14, 138
FONT, LABEL_GAP = 11, 12.5  # units; labels nearer than the gap are moved apart
MOST_POINTS, MOST_DOTS = 300, 100
TOP_SHARE = 0.05
"""Of the points are above the picture: the first steps' losses would flatten the rest."""
FEW = 20  # points up to which a curve is drawn as it is, without a mean


@dataclass(frozen=True)
class Drawn:
    """A curve and how it is drawn: ``dots`` marks its points, ``noisy`` adds its mean over it."""

    curve: Curve
    colour: str = BLUE
    dash: str = ""
    dots: bool = False
    noisy: bool = False


@dataclass(frozen=True)
class _Scale:
    """From values between two ends to units of the picture."""

    low: float
    high: float
    length: float

    def at(self, value: float) -> float:
        """Halves first: the distance of two finite numbers may not be one."""
        half = self.high / 2 - self.low / 2
        share = (value / 2 - self.low / 2) / half if half else 0.5
        return self.length * min(9.0, max(-9.0, share))


def picture(
    drawn: Sequence[Drawn],
    *,
    title: str,
    counting: Sequence[CountingLine] = (),
    last_step: int = 0,
) -> str:
    """Return an SVG of curves over common axes; nothing when no point is a finite number.

    ``counting`` are lines across it, named at the right, ``last_step`` is at least the right end of the axis, and ``title`` is what the
    picture says to who does not see it.
    """
    drawn = [_finite(each) for each in drawn]
    drawn = [each for each in drawn if each.curve.y]
    if not drawn:
        return ""
    steps = [x for each in drawn for x in each.curve.x]
    lines = sorted(
        (line for line in counting if math.isfinite(line.loss)), key=lambda line: line.loss
    )
    low, high = _padded(*_range(drawn, lines))
    lines = [line for line in lines if line.loss <= high]
    right = RIGHT_NAMES if lines else RIGHT
    width, height = WIDTH - LEFT - right, HEIGHT - TOP - BOTTOM
    first = 0.0 if last_step or min(steps) >= 0 else min(steps)
    x = _Scale(first, max([*steps, last_step, first + 1]), width)
    y = _Scale(high, low, height)
    inside = [_line(each, x, y) for each in drawn]
    return "".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" role="img" aria-label="{_safe(title)}" '
            f'viewBox="0 0 {WIDTH} {HEIGHT}" style="width:100%;max-width:{WIDEST_PX}px;height:auto;display:block" '
            f'font-family="system-ui,sans-serif" font-size="{FONT}" fill="none" stroke="none">',
            f"<title>{_safe(title)}</title>",
            _legend(drawn),
            f'<g transform="translate({LEFT} {TOP})">',
            _axes(x, y),
            _counting(lines, y, width),
            # A picture in the picture, since it cuts off what leaves it.
            f'<svg x="-4" y="0" width="{width + 8}" height="{height + 4}" viewBox="-4 0 {width + 8} {height + 4}">',
            *inside,
            "</svg></g></svg>",
        ]
    )


def _finite(drawn: Drawn) -> Drawn:
    """Only points that are numbers, and as many as the picture can show."""
    most = MOST_DOTS if drawn.dots else MOST_POINTS
    points = [
        (x, y)
        for x, y in zip(drawn.curve.x, drawn.curve.y, strict=True)
        if math.isfinite(x) and math.isfinite(y)
    ]
    x, y = smooth([x for x, _ in points], most), smooth([y for _, y in points], most)
    whole = [(x, y) for x, y in zip(x, y, strict=True) if math.isfinite(x) and math.isfinite(y)]
    curve = Curve(drawn.curve.name, [x for x, _ in whole], [y for _, y in whole])
    return Drawn(curve, drawn.colour, drawn.dash, drawn.dots, drawn.noisy)


def _range(drawn: Sequence[Drawn], lines: Sequence[CountingLine]) -> tuple[float, float]:
    """The values to show: all but the highest of the curves, every dot, the lines below that and at least one line."""
    losses = sorted(y for each in drawn for y in each.curve.y)
    top = losses[math.ceil((1 - TOP_SHARE) * (len(losses) - 1))]
    dots = [y for each in drawn if each.dots for y in each.curve.y]
    lowest = [line.loss for line in lines[:1]]
    return min([losses[0], *lowest]), max([top, *dots, *lowest])


def _padded(low: float, high: float) -> tuple[float, float]:
    """The ends of an axis, a little beyond the values."""
    room = high / 2 - low / 2
    room = room / 10 if room > 1e-9 * max(abs(low), abs(high)) else max(0.5, abs(high) / 10)
    most = 1.7e308
    return max(-most, low - room), min(most, high + room)


def _line(drawn: Drawn, x: _Scale, y: _Scale) -> str:
    """A curve: its points joined, its mean over them or dots upon them where those are wanted."""
    across = [x.at(value) for value in drawn.curve.x]
    down = [y.at(value) for value in drawn.curve.y]
    colour = f'stroke="{drawn.colour}" stroke-linejoin="round" stroke-linecap="round"'
    dash = f' stroke-dasharray="{drawn.dash}"' if drawn.dash else ""
    noisy = drawn.noisy and len(down) > FEW
    parts = []
    if noisy:
        parts.append(_path(across, down, f'{colour} stroke-width="1" opacity="0.35"'))
    shown = _moving_mean(down, max(2, len(down) // 40)) if noisy else down
    thickness = 1.2 if drawn.dots else 2
    parts.append(_path(across, shown, f'{colour}{dash} stroke-width="{thickness}"'))
    if drawn.dots or len(down) == 1:
        for step, loss, to_right, below in zip(
            drawn.curve.x, drawn.curve.y, across, down, strict=True
        ):
            parts.append(
                f'<circle cx="{to_right:.1f}" cy="{below:.1f}" r="3" fill="{drawn.colour}">'
                f"<title>{_safe(drawn.curve.name)} at step {step:,.0f}: {_number(loss)}</title></circle>"
            )
    return "".join(parts)


def _path(across: Sequence[float], down: Sequence[float], style: str) -> str:
    points = " ".join(f"{x:.1f},{y:.1f}" for x, y in zip(across, down, strict=True))
    return f'<polyline points="{points}" {style}/>'


def _moving_mean(values: Sequence[float], half: int) -> list[float]:
    """The mean of ``half`` neighbours on either side; of fewer near the start, where losses fall fast."""
    found = []
    for at in range(len(values)):
        near = values[max(0, at - half) : at + min(half, at) + 1]
        found.append(sum(near) / len(near))
    return found


def _axes(x: _Scale, y: _Scale) -> str:
    """Both axes with their ticks, and what they measure."""
    parts = []
    ticks = _ticks(y.high, y.low, 5)
    for tick in ticks:
        at = y.at(tick)
        parts.append(f'<path d="M0 {at:.1f}H{x.length}" stroke="currentColor" opacity="0.12"/>')
        parts.append(_text(-6, at + 4, _tick(tick, ticks), "end"))
    for tick in _ticks(x.low, x.high, 5):
        if tick == round(tick):
            parts.append(_text(x.at(tick), y.length + 15, f"{tick:,.0f}", "middle"))
    parts.append(
        f'<path d="M0 0V{y.length}H{x.length}" stroke="currentColor" stroke-width="1" opacity="0.5"/>'
    )
    parts.append(_text(x.length / 2, y.length + 31, "step", "middle"))
    return "".join(parts)


def _counting(lines: Sequence[CountingLine], y: _Scale, width: float) -> str:
    """Lines across the picture at what counting reaches, their names at the right, none upon another."""
    parts = []
    at = [y.at(line.loss) for line in lines]  # from the bottom up
    names: list[float] = []
    for place in at:
        names.append(min(place, names[-1] - LABEL_GAP) if names else place)
    for line, place, name in zip(lines, at, names, strict=True):
        parts.append(
            f'<path d="M0 {place:.1f}H{width}l6 {name - place:.1f}" stroke="currentColor" stroke-dasharray="4 3" opacity="0.55"/>'
        )
        parts.append(_text(width + 9, name + 4, f"{line.name} {line.loss:.2f}", "start"))
    return "".join(parts)


def _legend(drawn: Sequence[Drawn]) -> str:
    """What each curve is, in one row above the picture; a row that is too long is left to the table below."""
    parts, at = [], float(LEFT)
    for each in drawn:
        dash = f' stroke-dasharray="{each.dash}"' if each.dash else ""
        parts.append(
            f'<path d="M{at:.0f} 12h18" stroke="{each.colour}" stroke-width="2"{dash}/>'
            + (f'<circle cx="{at + 9:.0f}" cy="12" r="3" fill="{each.colour}"/>' * each.dots)
            + _text(at + 23, 16, each.curve.name, "start", opacity=1)
        )
        at += 23 + 0.56 * FONT * len(each.curve.name) + 16
    return "".join(parts) if at <= WIDTH + 16 else ""


def _text(x: float, y: float, words: str, anchor: str, *, opacity: float = 0.8) -> str:
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" fill="currentColor" opacity="{opacity}">'
        f"{_safe(words)}</text>"
    )


def _ticks(low: float, high: float, most: int) -> list[float]:
    """At most ``most`` round numbers between two ends: steps of 1, 2 or 5 times a power of ten."""
    rough = (high - low) / most
    if not math.isfinite(rough) or rough <= 0:
        return [low / 2 + high / 2]
    power = 10.0 ** math.floor(math.log10(rough))
    step = next((power * factor for factor in (1, 2, 5, 10) if power * factor >= rough), power * 10)
    if not step or not math.isfinite(high / step) or abs(high / step) > 1e12:
        return [low / 2 + high / 2]
    return [n * step for n in range(math.ceil(low / step), math.floor(high / step) + 1)]


def _tick(value: float, ticks: Sequence[float]) -> str:
    """A tick with the decimals that tell it from the next one."""
    apart = ticks[1] - ticks[0] if len(ticks) > 1 else 0.0
    if not 1e-4 <= apart < 1e4 or abs(value) >= 1e5:
        return _number(value)
    return f"{value:.{max(1, -math.floor(math.log10(apart) + 1e-9))}f}"


def _number(value: float) -> str:
    """A loss with the digits that say something: 2.05, 0.0031, 1.2e+08."""
    if value == 0:
        return "0"
    return f"{value:.2f}" if 0.095 <= abs(value) < 1e4 else f"{value:.2g}"


def _safe(text: str) -> str:
    """Text for XML: escaped, and without the characters that XML has no way to write."""
    kept = (
        c if c in "\t\n" or 32 <= ord(c) < 0xD800 or 0xDFFF < ord(c) < 0xFFFE else " "
        for c in printable(text)
    )
    return escape("".join(kept))
