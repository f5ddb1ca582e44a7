"""Real words and verbatim copies, against searches anybody can do by hand."""

from __future__ import annotations

import math
from unittest.mock import patch

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from posttrainllm.text import likeness
from posttrainllm.text.datasets import shakespeare_path
from posttrainllm.text.likeness import (
    Copy,
    WordShare,
    corpus_words,
    longest_copy,
    unseen_texts,
    word_share,
)

FEW_LETTERS = st.lists(st.sampled_from(b"ab\n\xc3\xa9"), max_size=40).map(bytes)


def longest_by_search(texts, corpus):
    """The definition: try every piece, the longest first, with the language's own search."""
    pieces = {
        text[start:end]
        for text in texts
        for start in range(len(text))
        for end in range(start + 1, len(text) + 1)
    }
    found = [(len(piece), -corpus.find(piece), piece) for piece in pieces if piece in corpus]
    n_bytes, place, piece = max(found, default=(0, 0, b""))
    return Copy(piece, -place if n_bytes else 0)


# Words


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("The cat, THE Cat's pyjamas; it is an ox.", {"the", "cat", "pyjamas"}),
        ("caf\u00e9 \u00c9COLE na\u00efve", {"caf\u00e9", "\u00e9cole", "na\u00efve"}),
        ("abc123def_ghi", {"abc", "def", "ghi"}),
        (
            "\u043c\u0438\u0440 \u041c\u0418\u0420\u0410",
            {"\u043c\u0438\u0440", "\u043c\u0438\u0440\u0430"},
        ),
        ("one\ntwo\r\nthree--four", {"one", "two", "three", "four"}),
        ("a bc 12 _ \u0394", set()),
        ("", set()),
    ],
)
def test_words_are_runs_of_three_letters_in_lower_case(text, words):
    assert corpus_words(text.encode()) == words
    assert corpus_words(np.frombuffer(text.encode(), np.uint8)) == words


def test_bytes_that_are_no_utf8_separate_words():
    assert corpus_words(b"before\xffafter \xe9tude") == {"before", "after", "tude"}


@given(st.text(), st.integers(1, 30))
def test_words_do_not_depend_on_how_the_corpus_is_read(text, size):
    spaced = " ".join(text[at : at + 5] for at in range(0, len(text), 5)).encode()
    whole = corpus_words(spaced)
    with patch.object(likeness, "_PIECE", size + 24):  # longer than any word
        assert corpus_words(spaced) == whole


def test_word_share_counts_words_and_leaves_out_the_one_that_was_cut():
    known = corpus_words(b"the quick brown fox")
    assert word_share(["The QUICK zebra sat on the fo"], known) == WordShare(5, 3)
    assert word_share(["the fox", b"the fox.", "ox"], known) == WordShare(3, 3)
    assert word_share(["the quick", "zebra "], known).share == 0.5
    assert word_share(["\u0130\u0130\u0130 the "], known) == word_share(["the "], known)


def test_word_share_of_no_words_is_not_a_number():
    assert word_share([], frozenset()) == WordShare(0, 0)
    assert math.isnan(word_share(["12 3"], frozenset()).share)


# Copies


@given(st.lists(FEW_LETTERS, max_size=4), FEW_LETTERS, st.integers(1, 50))
def test_longest_copy_is_what_a_search_finds(texts, corpus, piece):
    with patch.object(likeness, "_PIECE", piece):
        assert longest_copy(texts, corpus) == longest_by_search(texts, corpus)


def test_longest_copy_takes_text_bytes_and_arrays():
    corpus = "the caf\u00e9 is closed".encode()
    for text in ("a caf\u00e9 is open", "a caf\u00e9 is open".encode()):
        copy = longest_copy([text], np.frombuffer(corpus, np.uint8))
        assert copy == Copy(" caf\u00e9 is ".encode(), 3)
        assert copy.n_bytes == 10


def test_longest_copy_of_tinyshakespeare_is_found_wherever_it_is():
    corpus = shakespeare_path().read_bytes()
    for start in (0, 70_001, (1 << 20) - 60, len(corpus) - 150):
        copy = longest_copy([b"\0" * 50 + corpus[start : start + 150] + b"\0", b"none\0"], corpus)
        assert copy == Copy(corpus[start : start + 150], start)


def test_equal_hashes_are_not_taken_for_equal_text():
    with patch.object(likeness, "_window_hashes") as hashes:
        hashes.side_effect = lambda text, length: np.zeros(
            max(0, len(text) - length + 1), np.uint64
        )
        assert longest_copy([b"abcx", b"zbcd"], b"..bcd..") == Copy(b"bcd", 2)


@pytest.mark.parametrize(("texts", "corpus"), [([], b"abc"), ([b""], b"abc"), ([b"abc"], b"")])
def test_longest_copy_of_nothing_is_nothing(texts, corpus):
    assert longest_copy(texts, corpus) == Copy(b"", 0)


# What unseen text gets


def test_unseen_texts_are_pieces_of_the_same_sizes_spread_over_the_part():
    part = np.arange(100, dtype=np.uint8)
    pieces = unseen_texts(part, ["x" * 10, b"y" * 20, "\u00e9"])
    assert [len(piece) for piece in pieces] == [10, 20, 2]
    assert [piece[0] for piece in pieces] == [0, 40, 80]
    assert unseen_texts(part, ["x" * 100]) == [part.tobytes()]
    assert unseen_texts(part, ["x" * 101]) == []
    assert unseen_texts(part, []) == []
