"""The picture of a run's curve: well-formed, bounded, escaped, and true to its numbers, whatever these are."""

from __future__ import annotations

import math
import re
import sys
from itertools import pairwise
from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st

from display_cases import COUNTING
from posttrainllm.notebook.curve import (
    COLOURS,
    HEIGHT,
    LABEL_GAP,
    LEFT,
    RIGHT_NAMES,
    TOP,
    WIDTH,
    Drawn,
    picture,
)
from posttrainllm.runs.curves import Curve, GrowingCurve, curve_of

SVG = "{http://www.w3.org/2000/svg}"
NUMBERS = st.one_of(
    st.floats(allow_nan=False, allow_infinity=False),
    st.floats(0, 12),
    st.sampled_from([0.0, 5e-324, -5e-324, 1e-300, sys.float_info.max, -sys.float_info.max, 2.5]),
)
CURVES = st.one_of(
    st.lists(NUMBERS, min_size=1, max_size=40),
    st.tuples(NUMBERS, st.integers(1, 700)).map(lambda pair: [pair[0]] * pair[1]),
)


def parsed(svg: str) -> ElementTree.Element:
    root = ElementTree.fromstring(svg)
    assert root.tag == f"{SVG}svg"
    return root


def texts(root: ElementTree.Element) -> list[str]:
    return [element.text or "" for element in root.iter(f"{SVG}text")]


def drawn(losses: list[float], **how: object) -> Drawn:
    return Drawn(Curve("training loss", range(1, len(losses) + 1), losses), **how)


@given(CURVES, st.text(max_size=30), st.booleans(), st.booleans())
def test_any_curve_makes_a_picture_of_finite_numbers(losses, name, dots, counting):
    curve = Curve(name, list(range(1, len(losses) + 1)), losses)
    svg = picture(
        [Drawn(curve, dots=dots, noisy=not dots)],
        title=name,
        counting=COUNTING if counting else (),
    )
    root = parsed(svg)
    assert root.get("role") == "img"
    assert not re.search(
        r"\b(nan|inf)\b", re.sub(r"<text.*?</text>|<title>.*?</title>|aria-label=\".*?\"", "", svg)
    )
    lines = list(root.iter(f"{SVG}polyline"))
    assert lines
    for line in lines:
        for pair in line.get("points", "").split():
            x, y = map(float, pair.split(","))
            assert 0 <= x <= WIDTH
            assert math.isfinite(y)


@given(st.text(max_size=40))
def test_names_and_titles_are_escaped(text):
    hostile = f"{text}<script>alert(1)</script>\"' &amp;"
    svg = picture([Drawn(Curve(hostile, [1.0], [2.0]), dots=True)], title=hostile)
    assert "<script" not in svg
    root = parsed(svg)
    assert not list(root.iter(f"{SVG}script"))
    assert "<script>alert(1)</script>" in (root.find(f"{SVG}title").text or "")


def test_a_picture_without_a_finite_point_is_none():
    assert picture([], title="") == ""
    assert picture([drawn([math.nan, math.inf])], title="") == ""


def test_a_hundred_thousand_steps_are_a_small_picture_of_the_whole_run():
    steps = 100_000
    training = GrowingCurve(1024)
    measured = GrowingCurve(1024)
    for step in range(1, steps + 1):
        training.add(step, 2 + math.sin(step) / 9 + 3 / (1 + step / 1000))
        if step % 50 == 0:
            measured.add(step, 2.1)
    both = [
        Drawn(Curve("training loss", training.x, training.y), noisy=True),
        Drawn(Curve("validation loss", measured.x, measured.y), COLOURS[1], dots=True),
    ]
    svg = picture(both, title="long", counting=COUNTING, last_step=steps)
    assert len(svg.encode()) < 60_000
    across = [
        float(pair.split(",")[0])
        for pair in next(parsed(svg).iter(f"{SVG}polyline")).get("points").split()
    ]
    assert across[0] < 2
    assert across[-1] > 0.97 * (WIDTH - LEFT - RIGHT_NAMES)
    lines = [{"step": step, "loss": 2.0 + step % 7} for step in range(1, steps + 1)]
    on_disk = picture([Drawn(curve_of("loss", lines, "loss", 300), noisy=True)], title="long")
    assert len(on_disk.encode()) < 60_000


def test_a_point_stands_where_its_numbers_say():
    svg = picture(
        [Drawn(Curve("a", [0.0, 50.0, 100.0], [1.0, 3.0, 2.0]), dots=True)], title="three"
    )
    circles = [
        (float(circle.get("cx")), float(circle.get("cy")))
        for circle in next(parsed(svg).iter(f"{SVG}g")).iter(f"{SVG}circle")
    ]
    (x0, low), (x1, high), (x2, middle) = circles
    assert (x0, x1) == (0, pytest.approx(x2 / 2))
    assert 0 < high < middle < low < HEIGHT - TOP
    assert low - middle == pytest.approx(middle - high, abs=0.2)


def test_counting_lines_are_named_and_no_name_is_upon_another():
    root = parsed(picture([drawn([5.5, 3.0, 2.2])], title="", counting=COUNTING))
    names = [text for text in root.iter(f"{SVG}text") if "." in text.text and " " in text.text]
    assert [text.text for text in names][:2] == ["quadruples 1.78", "triples 2.05"]
    heights = [float(text.get("y")) for text in names]
    assert all(a - b >= LABEL_GAP - 0.2 for a, b in pairwise(heights))
    assert "letter frequencies 3.35" in texts(root)


def test_a_model_past_all_counting_still_sees_the_nearest_line():
    root = parsed(picture([drawn([1.2, 1.1, 1.0])], title="", counting=COUNTING))
    assert "quadruples 1.78" in texts(root)
    assert not any("pairs" in text for text in texts(root))


def test_axes_have_round_ticks_and_the_legend_names_every_curve():
    both = [
        drawn([5.5, 4.0, 2.0]),
        Drawn(Curve("validation loss", [3.0], [2.1]), COLOURS[1], dots=True),
    ]
    root = parsed(picture(both, title="", last_step=400))
    found = texts(root)
    assert {"2.0", "3.0", "4.0", "5.0"} <= set(found)
    assert {"0", "100", "200", "300", "400", "step"} <= set(found)
    assert {"training loss", "validation loss"} <= set(found)


def test_a_picture_has_no_background_no_script_and_no_style_sheet():
    svg = picture([drawn([2.0, 1.0])], title="plain", counting=COUNTING)
    assert "currentColor" in svg
    assert not re.search(r"<(rect|style|script|image|a)\b|\bid=|url\(|href", svg)


def test_colours_can_be_read_on_white_and_on_black():
    def luminance(colour: str) -> float:
        parts = [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]
        linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in parts]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    for colour in COLOURS:
        for page in ("#ffffff", "#111111"):
            light, dark = sorted((luminance(colour), luminance(page)), reverse=True)
            assert (light + 0.05) / (dark + 0.05) >= 3, (colour, page)


def test_a_curve_of_the_metrics_leaves_out_what_is_no_number():
    lines = [
        {"step": 1, "loss": 2.0},
        {"step": 2, "loss": None},
        {"loss": 1.0},
        {"step": 4, "loss": 1.0},
    ]
    curve = curve_of("loss", lines, "loss", 10)
    assert (curve.x, curve.y) == ([1.0, 4.0], [2.0, 1.0])
