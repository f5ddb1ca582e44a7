"""The counting lines, against tables of Python dictionaries and the figures of TinyShakespeare."""

from __future__ import annotations

import math
from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from posttrainllm.text import counting
from posttrainllm.text.counting import CountingLine, lines, standing
from posttrainllm.text.datasets import shakespeare_path


def table_loss(train, val, n, n_different):
    """The definition, word for word."""
    grams = Counter(tuple(train[at : at + n]) for at in range(len(train) - n + 1))
    contexts = Counter()
    for gram, count in grams.items():
        contexts[gram[:-1]] += count
    losses = []
    for at in range(len(val) - n + 1):
        gram = tuple(val[at : at + n])
        p = (grams[gram] + 0.1) / (contexts[gram[:-1]] + 0.1 * n_different)
        losses.append(-math.log(p))
    return sum(losses) / len(losses)


def tokens_of(text, kind=np.uint8):
    return np.frombuffer(text, np.uint8).astype(kind)


def test_lines_of_tinyshakespeare_are_the_known_figures():
    text = np.fromfile(shakespeare_path(), np.uint8)
    found = lines(text[:1_003_854], text[1_003_854:])
    assert [line.name for line in found] == list(counting.NAMES)
    assert [line.loss for line in found] == pytest.approx(
        [5.545177, 3.347329, 2.483830, 2.045801, 1.783986], abs=1e-6
    )
    assert {line.n_counted for line in found} == {1_003_854}


@given(
    st.lists(st.integers(0, 5), max_size=60),
    st.lists(st.integers(0, 7), min_size=1, max_size=60),
    st.sampled_from([np.uint8, np.uint16, np.uint32, np.int32]),
    st.sampled_from([1, 40, 300]),
)
def test_lines_are_those_of_the_definition(train, val, kind, spread):
    train, val = [token * spread % 256 for token in train], [token * spread % 256 for token in val]
    n_different = len({*train, *val})
    found = lines(np.array(train, kind), np.array(val, kind), n_vocab=300)
    assert found[0] == CountingLine("guessing", math.log(300), len(train))
    assert len(found) == 1 + min(4, len(val))
    for n, line in enumerate(found[1:], start=1):
        assert line.loss == pytest.approx(table_loss(train, val, n, n_different), abs=1e-12)


def test_lines_of_a_large_vocabulary_need_no_table_of_all_pairs():
    generator = np.random.default_rng(1)
    text = generator.integers(0, 50_257, 40_000).astype(np.uint16)
    train, val = text[:39_900], text[39_900:]
    found = lines(train, val, 50_257)
    assert [line.name for line in found] == list(counting.NAMES)
    n_different = len(set(text.tolist()))
    for n in (1, 2, 3, 4):
        wanted = table_loss(train.tolist(), val.tolist(), n, n_different)
        assert found[n].loss == pytest.approx(wanted, abs=1e-9)


def test_quadruples_that_do_not_fit_into_64_bits_are_left_out():
    text = np.arange(70_000, dtype=np.uint32)
    assert [line.name for line in lines(text, text[:100], 70_000)] == list(counting.NAMES[:4])


def test_without_a_validation_part_the_training_part_is_the_measure():
    text = tokens_of(b"to be or not to be")
    assert lines(text, text[:0]) == lines(text, text)


@pytest.mark.parametrize(("size", "n_lines"), [(0, 1), (1, 2), (2, 3), (3, 4), (4, 5)])
def test_a_text_too_short_for_a_table_has_no_such_line(size, n_lines):
    text = tokens_of(b"abcdefgh")
    assert len(lines(text[:size], text[:0])) == n_lines
    assert all(math.isfinite(line.loss) for line in lines(text[:0], text[:size]))


def test_a_long_text_is_sampled_evenly_and_says_so(monkeypatch):
    text = np.fromfile(shakespeare_path(), np.uint8)
    train, val = text[:1_003_854], text[1_003_854:]
    whole = lines(train, val)
    monkeypatch.setattr(counting, "MOST_TRAIN", 500_000)
    monkeypatch.setattr(counting, "MOST_VAL", 50_000)
    sampled = lines(train, val)
    assert sampled[0].n_counted == 64 * (500_000 // 64)
    for one, other in zip(whole, sampled, strict=True):
        assert other.loss == pytest.approx(one.loss, abs=0.12)
    runs = counting._runs(np.arange(1000), 640)
    assert [len(run) for run in runs] == [10] * 64
    assert runs[0][0] == 0
    assert runs[-1][-1] == 999


LINES = [
    CountingLine("guessing", 5.545, 9),
    CountingLine("letter frequencies", 3.347, 9),
    CountingLine("pairs", 2.484, 9),
    CountingLine("triples", 2.046, 9),
    CountingLine("quadruples", 1.784, 9),
]


@pytest.mark.parametrize(
    ("loss", "words"),
    [
        (1.2, "below quadruples (1.78)"),
        (1.9, "below triples (2.05)"),
        (2.046, "below pairs (2.48)"),
        (5.0, "below guessing (5.54)"),
        (5.545, "above guessing (5.54)"),
        (99.0, "above guessing (5.54)"),
        (math.nan, "not a number"),
        (math.inf, "not a number"),
    ],
)
def test_standing_names_the_lowest_line_that_is_beaten(loss, words):
    assert standing(loss, LINES) == words


def test_standing_knows_that_on_a_short_text_longer_counts_are_worse():
    short = [*LINES[:3], CountingLine("triples", 2.9, 9), CountingLine("quadruples", 3.9, 9)]
    assert standing(2.4, short) == "below pairs (2.48)"
    assert standing(2.6, short) == "below letter frequencies (3.35)"  # pairs are ahead of it
    assert standing(3.6, short) == "below guessing (5.54)"
