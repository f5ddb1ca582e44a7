"""What a notebook shows of an inspection: well-formed, escaped, of bounded size, readable on any page, and true to its numbers."""

from __future__ import annotations

import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from needs import require
from posttrainllm.config import GPTConfig
from posttrainllm.notebook.inspection import CELLS, MOST_TOKENS, inspection_html, show_inspections
from posttrainllm.text.tokenizer import ByteTokenizer
from posttrainllm.training.engine_choice import initial_parameters
from posttrainllm.training.looking import Inspection, look
from posttrainllm.training.models import Model, open_model

LIMIT = 200_000
VOID = {"br"}


class Page(HTMLParser):
    """The text of a page, its titles and the paths of its pictures; fails where tags do not match."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.text, self.titles, self.paths, self.tags = "", [], [], set()
        self.feed(html)
        self.close()
        assert not self.open

    def handle_starttag(self, tag, attrs):
        self.tags.add(tag)
        if tag not in VOID:
            self.open.append(tag)
        found = dict(attrs)
        if "title" in found:
            self.titles.append(found["title"])
        if tag == "path":
            self.paths.append(found["d"])

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text += data


@pytest.fixture(scope="module")
def model() -> Model:
    return open_model("shakespeare-small", runs_dir=Path("runs"))


def random_inspection(text: str, **sizes: int) -> Inspection:
    """Of random weights, so that anything can come next."""
    config = GPTConfig(
        **{"n_layer": 1, "n_head": 2, "n_embd": 8, "n_ctx": 64, "n_vocab": 256, **sizes}
    )
    params = {name: 9 * values for name, values in initial_parameters(config, 1).items()}
    return look(
        text, config=config, params=params, tokenizer=ByteTokenizer(), beside={"engine": "numpy"}
    )


def test_the_page_shows_the_text_what_comes_next_and_a_picture_for_every_head(model):
    page = Page(inspection_html(model.inspect("ROMEO:\nBut <b>soft</b>, 世界 🙂")))
    assert "ROMEO:⏎\nBut <b>soft</b>, 世界 🙂" in page.text
    assert "what comes next" in page.text
    assert all(f"head {number}: " in page.text for number in range(6))
    assert "layer 5" in page.text
    assert any("nats; expected " in title for title in page.titles)
    assert not page.tags & {"script", "style", "img", "iframe"}


def test_colours_are_the_pages_own_or_transparent_or_readable_on_both(model):
    html = inspection_html(model.inspect("JULIET:\nO Romeo, Romeo"))
    assert not re.search(r"[;\"]color:", html)
    colours = set(re.findall(r"background:([^;\"]+)", html))
    assert all(colour.startswith("rgba(") or colour == "#3b82f6" for colour in colours)
    assert set(re.findall(r'stroke="([^"]+)"', html)) == {"currentColor"}


@pytest.mark.parametrize("time", [1, 2, 7, CELLS, CELLS + 1, 64])
def test_a_picture_draws_every_cell_up_to_the_diagonal_once(time):
    page = Page(inspection_html(random_inspection("x" * time)))
    size = min(time, CELLS)
    drawn = np.zeros((2, size, size), int)
    head = -1
    last = ()
    for path in page.paths:
        runs = [tuple(map(int, run)) for run in re.findall(r"M(\d+) (\d+)\.5h(\d+)", path)]
        assert "".join(f"M{x} {y}.5h{width}" for x, y, width in runs) == path
        if head < 0 or drawn[head].sum() == size * (size + 1) // 2:
            head += 1
        for x, y, width in runs:
            drawn[head, y, x : x + width] += 1
        last = runs
    assert last
    assert np.array_equal(drawn, np.broadcast_to(np.tri(size, dtype=int), drawn.shape))


@given(st.binary(min_size=1, max_size=60))
def test_any_text_makes_a_well_formed_page(content):
    text = content.decode("utf-8", "surrogateescape")
    html = inspection_html(random_inspection(text))
    page = Page(html)
    html.encode("utf-8")  # no half of a surrogate pair
    assert not re.search(r"[\x00-\x08\x0b-\x1f]", html)
    assert f"{len(content[-64:])} token" in page.text


def test_the_largest_page_is_below_the_limit_and_says_what_it_leaves_out():
    inspection = random_inspection("&'\"<" * 100, n_ctx=300, n_head=30, n_embd=60)
    longest = replace(
        inspection, pieces=["'&" * 5000] * 300
    )  # as a foreign vocabulary may have them
    html = inspection_html(longest)
    assert len(html.encode()) < LIMIT
    page = Page(html)
    assert "left out at the beginning: 100 tokens" in page.text
    assert f"the last {MOST_TOKENS} tokens are shown" in page.text
    assert "the first 24 of 30" in page.text


def test_attention_that_cannot_be_computed_is_said_and_the_rest_is_shown(model, monkeypatch):
    inspection = model.inspect("ROMEO")
    monkeypatch.setattr("posttrainllm.engines.base.available_memory", lambda: 10)
    page = Page(inspection_html(inspection))
    assert "may take 10 here" in page.text
    assert "what comes next" in page.text


def test_a_notebook_shows_the_page_and_a_script_registers_nothing(model):
    require("ipykernel")
    from IPython.core.interactiveshell import InteractiveShell

    show_inspections()  # no notebook: nothing happens
    shell = InteractiveShell.instance()
    try:
        inspection = model.inspect("ROMEO")
        show_inspections()
        assert "text/html" not in shell.display_formatter.format(inspection)[0]
        shell.kernel = object()  # as in a notebook
        show_inspections()
        shown = shell.display_formatter.format(inspection)[0]
        assert shown["text/html"] == inspection_html(inspection)
        assert shown["text/plain"] == repr(inspection)
    finally:
        InteractiveShell.clear_instance()
