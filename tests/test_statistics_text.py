"""Real words and verbatim copies in C++ against their definitions in Python.

Texts are fed in pieces of any size.
"""

from __future__ import annotations

import re
import sys
import unicodedata
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from posttrainllm.kernels import build
from posttrainllm.text.datasets import shakespeare_path
from posttrainllm.text.likeness import (
    Copy,
    WordShare,
    corpus_words,
    longest_copy,
    unseen_texts,
    word_share,
)
from statistics_cases import State, array, functions, pieces


@pytest.fixture(scope="module")
def cpp() -> Any:
    return functions()


# -- words -----------------------------------------------------------------------------------------


def cpp_shares(
    cpp: Any, groups: Sequence[Sequence[bytes]], parts: Sequence[bytes], size: int
) -> list[list[WordShare]]:
    """Shares of each group in the training part, in the validation part, in either."""
    n_bytes = sum(len(text) for texts in groups for text in texts)
    state = State(cpp.likeness_words_bytes(n_bytes))
    cpp.likeness_words_begin(state.at, n_bytes)
    for group, texts in enumerate(groups):
        for text in texts:
            cpp.likeness_words_written(state.at, array(text).ctypes.data, len(text), group)
    for part, text in enumerate(parts):
        for piece in pieces(array(text), size):
            cpp.likeness_words_read(state.at, piece.ctypes.data, len(piece), part)
        cpp.likeness_words_end(state.at, part)
    out = np.zeros(2, np.uint64)
    found = []
    for group in range(len(groups)):
        row = []
        for mask in (1, 2, 3):
            cpp.likeness_words_count(state.at, out.ctypes.data, group, mask)
            row.append(WordShare(int(out[0]), int(out[1])))
        found.append(row)
    state.check()
    return found


def shares(groups: Sequence[Sequence[bytes]], parts: Sequence[bytes]) -> list[list[WordShare]]:
    train, val = map(corpus_words, parts)
    return [[word_share(texts, known) for known in (train, val, train | val)] for texts in groups]


LETTERS = st.text(
    st.sampled_from(
        "abcABC\u00e9\u00c9\u00df\u03a3\u03c2\u03c3\u039b\u0130\u0131\u01c5\u0416\u0436\u042f\u4e2d\u6587"
        "1_ -'\u00b2\u00bd\n\u0307\u0345\U00010400\U00010428\ufb01\u023a\u2c65\u212a"
    ),
    max_size=30,
)
TEXTS = LETTERS.map(str.encode) | st.text(max_size=20).map(
    lambda text: text.encode("utf-8", "surrogatepass")
)
BROKEN = st.tuples(TEXTS, st.integers(0, 40), st.binary(max_size=4)).map(
    lambda parts: parts[0][: parts[1]] + parts[2] + parts[0][parts[1] :]
)


@given(
    st.lists(st.lists(TEXTS | BROKEN, max_size=4), min_size=2, max_size=2),
    st.lists(TEXTS | BROKEN, min_size=2, max_size=2),
    st.integers(1, 40),
)
@settings(deadline=None, max_examples=400)
def test_shares_of_words_are_the_definition(
    cpp: Any, groups: list[list[bytes]], parts: list[bytes], size: int
) -> None:
    assert cpp_shares(cpp, groups, parts, size) == shares(groups, parts)


def test_words_of_tinyshakespeare_are_the_definition(cpp: Any) -> None:
    text = shakespeare_path().read_bytes()
    parts = [text[:1_003_854], text[1_003_854:]]
    groups = [
        [text[at : at + 300] for at in range(0, 60_000, 2_000)],
        [text[at : at + 500].swapcase()[::-1] for at in range(0, 40_000, 4_000)],
    ]
    assert cpp_shares(cpp, groups, parts, 65_536) == shares(groups, parts)


def test_a_word_longer_than_all_that_was_written_is_read_safely(cpp: Any) -> None:
    assert cpp_shares(cpp, [[b"abc "], []], [b"abc" * 1000, b" abc "], 100)[0] == [
        WordShare(1, 0), WordShare(1, 1), WordShare(1, 1),
    ]  # fmt: skip


def test_the_table_of_letters_is_that_of_python(cpp: Any) -> None:
    """Every character between two letters: is it one, and what is its lower case?

    Python's tables grow with its version; what later ones added is left out where they differ.
    """
    table = (build.SOURCE_DIR / "letters.h").read_text(encoding="utf-8")
    version = re.search(r"Unicode (\S+) beyond", table)
    assert version is not None
    same = version.group(1) == unicodedata.unidata_version
    codes = [*range(1, 0xD800), *range(0xE000, 0x20000), *range(0x20000, sys.maxunicode, 61)]
    if not same:
        codes = [code for code in codes if code < 0x500]
    known = [f"xx{chr(code)}xx".encode() for code in codes]
    probes = [f" xx{chr(code).lower()}xx ".encode() for code in codes]
    for start in range(0, len(codes), 4096):
        stop = start + 4096
        groups, corpus = [probes[start:stop], []], b" ".join(known[start:stop])
        got = cpp_shares(cpp, groups, [corpus, b""], 1 << 16)
        assert got == shares(groups, [corpus, b""]), f"from U+{codes[start]:04X}"


# -- copies ----------------------------------------------------------------------------------------


def cpp_copy(cpp: Any, texts: Sequence[bytes], corpus: bytes, size: int) -> Copy:
    n_bytes = sum(map(len, texts))
    state = State(cpp.likeness_copy_bytes(n_bytes, len(texts)))
    cpp.likeness_copy_begin(state.at, n_bytes, len(texts))
    for text in texts:
        cpp.likeness_copy_written(state.at, array(text).ctypes.data, len(text))
    for piece in pieces(array(corpus), size):
        cpp.likeness_copy_read(state.at, piece.ctypes.data, len(piece))
    out = np.zeros(2, np.uint64)
    cpp.likeness_copy_longest(state.at, out.ctypes.data)
    state.check()
    length, place = map(int, out)
    return Copy(corpus[place : place + length], place)


FEW = st.lists(st.sampled_from(b"ab\n\xc3"), max_size=60).map(bytes)


@given(st.lists(FEW, max_size=5), FEW, st.integers(1, 70))
@settings(deadline=None, max_examples=400)
def test_the_longest_copy_is_the_definition(
    cpp: Any, texts: list[bytes], corpus: bytes, size: int
) -> None:
    assert cpp_copy(cpp, texts, corpus, size) == longest_copy(texts, corpus)


def test_the_longest_copy_of_tinyshakespeare_is_the_definition(cpp: Any) -> None:
    corpus = shakespeare_path().read_bytes()
    train, val = corpus[:1_003_854], corpus[1_003_854:]
    for texts in (
        unseen_texts(array(val), [b"x" * 400] * 20),
        [train[70_001:70_151] + b"\0", val[:5000]],
        [bytes(256), b"e" * 50_000],
    ):
        assert cpp_copy(cpp, texts, train, 65_536) == longest_copy(texts, train)


def test_places_of_unseen_texts_are_the_definition(cpp: Any) -> None:
    part = np.arange(1000) % 251
    for sizes in ([], [10], [10, 20, 2], [1000], [1001], [999, 1000, 3], [0], [5] * 33):
        given_sizes, starts = np.array(sizes, np.uint64), np.zeros(len(sizes) + 1, np.uint64)
        found = cpp.likeness_unseen(
            starts.ctypes.data, given_sizes.ctypes.data, len(sizes), len(part)
        )
        expected = unseen_texts(part.astype(np.uint8), [b"x" * size for size in sizes])
        assert bool(found) == bool(expected)
        for start, text in zip(starts, expected, strict=False):
            at = int(start)
            assert part[at : at + len(text)].astype(np.uint8).tobytes() == text
        assert starts[-1] == 0
