"""A corpus: the default text, where it is cut, and the windows that are read from it."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from posttrainllm.errors import CorpusError
from posttrainllm.text import corpus as corpus_module
from posttrainllm.text.corpus import default_corpus_path, split_position, windows
from posttrainllm.text.datasets import TINY_SHAKESPEARE
from text_fixtures import TEXT, refusal, whole

pytest_plugins = ("text_fixtures",)


# The default text


def test_no_source_is_tinyshakespeare(open_text):
    text = open_text()
    assert (text.name, text.sources, text.notices) == ("TinyShakespeare", (), ())
    assert text.sha256 == TINY_SHAKESPEARE.sha256
    assert text.n_bytes == 1_115_394
    assert (len(text.train), len(text.val)) == (1_003_854, 111_540)
    assert text.train.dtype == np.uint8
    assert whole(text) == default_corpus_path().read_bytes()


def test_a_missing_default_text_says_how_to_get_it(open_text, monkeypatch, tmp_path):
    monkeypatch.setattr(corpus_module, "shakespeare_path", lambda: tmp_path / "none.txt")
    assert "python -m posttrainllm.text.datasets" in refusal(open_text)


def test_a_resumed_run_refuses_another_text(open_text, write):
    text = open_text(write("a.txt"))
    assert open_text(*text.sources, sha256=text.sha256).sha256 == text.sha256
    write("a.txt", TEXT + b"more")
    message = refusal(open_text, *text.sources, sha256=text.sha256)
    assert "is not the text of this run" in message
    assert text.sha256[:12] in message


# The two parts


@given(st.text(min_size=1), st.floats(0, 1, exclude_max=True))
def test_the_split_never_cuts_a_character(text, fraction):
    raw = np.frombuffer(text.encode(), np.uint8)
    cut = split_position(raw, fraction)
    assert 0 <= cut - int(len(raw) * (1 - fraction)) <= 3
    assert raw[:cut].tobytes().decode() + raw[cut:].tobytes().decode() == text


@given(st.binary(min_size=1), st.floats(0, 1, exclude_max=True))
def test_the_split_of_any_bytes_stays_close_to_the_fraction(raw, fraction):
    cut = split_position(np.frombuffer(raw, np.uint8), fraction)
    assert 0 <= cut - int(len(raw) * (1 - fraction)) <= 3
    assert cut <= len(raw)


def test_the_split_of_text_in_another_encoding_is_exact(open_text):
    assert split_position(np.full(1000, 0x80, np.uint8), 0.1) == 900


def test_a_short_part_names_both_numbers_and_ways_out(open_text, write):
    text = open_text(write("short.txt", TEXT[:200]))
    text.check(19)
    with pytest.raises(CorpusError) as caught:
        text.check(64)
    assert caught.value.message == (
        "the validation part has 20 tokens, a context of 64 needs at least 65"
    )
    assert caught.value.hint == "use n_ctx=19 or less, a larger file or val_fraction=0"
    with pytest.raises(CorpusError) as caught:
        text.check(1024)
    assert caught.value.message == (
        "the training part has 180 tokens, a context of 1,024 needs at least 1,025"
    )
    assert caught.value.hint == "use n_ctx=179 or less, or a larger file"
    with pytest.raises(CorpusError) as caught:
        text.check(64, fixed=True)
    assert caught.value.hint == "use a larger file"


def test_a_text_too_short_for_any_validation_part_is_refused(open_text, write):
    text = open_text(write("tiny.txt", b"ab\xc3\xa9"))
    with pytest.raises(CorpusError, match="the validation part has 0 tokens"):
        text.check(1)


def test_no_validation_part_is_fine_when_none_is_wanted(open_text, write):
    text = open_text(write("all.txt"), val_fraction=0)
    assert len(text.train) == len(TEXT)
    text.check(64)
    assert text.validation_windows(10, 64)[0].shape == (0, 64)


@pytest.mark.parametrize("fraction", [-0.1, 1.0, float("nan")])
def test_an_impossible_validation_fraction_is_refused(open_text, write, fraction):
    assert "data.val_fraction is" in refusal(open_text, write("a.txt"), val_fraction=fraction)


# Windows


def test_windows_are_tokens_and_the_tokens_one_later(open_text, write):
    text = open_text(write("a.txt"))
    tokens, targets = text.windows(np.array([0, 7, text.positions(5) - 1]), 5)
    assert tokens.dtype == targets.dtype == np.int32
    assert tokens.flags.c_contiguous
    assert targets.flags.c_contiguous
    assert bytes(tokens[1].tolist()) == TEXT[7:12]
    assert bytes(targets[1].tolist()) == TEXT[8:13]
    assert targets[2, -1] == text.train[-1]
    with pytest.raises(IndexError):
        text.windows(np.array([text.positions(5)]), 5)


def test_positions_are_every_window_of_the_training_part(open_text, write):
    text = open_text(write("a.txt", TEXT[:100]), val_fraction=0)
    assert text.positions(64) == 36
    assert text.positions(100) == text.positions(200) == 0


@given(st.integers(0, 300), st.integers(1, 20), st.integers(0, 40))
def test_validation_windows_are_fixed_spread_and_disjoint(size, n_ctx, n_windows):
    part = np.arange(size, dtype=np.uint16)
    fields = dict.fromkeys(("name", "sources", "sha256", "n_bytes", "train", "notices"))
    text = corpus_module.Corpus(
        **fields, val=part, train_text=part, val_text=part, val_fraction=0.1
    )
    offsets = text.validation_offsets(n_windows, n_ctx)
    available = max(0, size - 1) // n_ctx
    assert len(offsets) == (min(n_windows, available) if n_windows else available)
    assert np.all(np.diff(offsets) >= n_ctx)
    tokens, targets = text.validation_windows(n_windows, n_ctx)
    assert np.array_equal(tokens[:, :1].ravel(), offsets)
    assert np.array_equal(tokens + 1, targets)
    if 0 < n_windows < available:  # as much is left out before the first as behind the last
        before, behind = offsets[0] // n_ctx, available - 1 - offsets[-1] // n_ctx
        assert abs(before - behind) <= 1


def test_windows_of_an_int64_part_and_no_offsets():
    tokens, targets = windows(np.arange(10), np.zeros(0, np.int64), 4)
    assert tokens.shape == targets.shape == (0, 4)
