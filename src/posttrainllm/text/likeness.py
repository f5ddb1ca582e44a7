"""How like its corpus written text is: how many of its words are real, and how much is copied.

A loss says how well a model predicts; these say what its writing is like, and whether it writes or
recites. Both compare samples with the corpus word for word and byte for byte, so that anybody can
check them with a text search. What to make of the figures is training/writing.py.
kernels/cpp/likeness.cpp finds the same for browser and node, by other means.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Set
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from posttrainllm.text.tokenizer import to_bytes

Bytes = npt.NDArray[np.uint8]
Hashes = npt.NDArray[np.uint64]

_WORD = re.compile(r"[^\W\d_]{3,}")
_PIECE = 1 << 20  # bytes of the corpus looked at in one go

# Odd constants without a pattern (the golden ratio and a prime of xxHash), both modulo 2^64.
_BASE = 0x9E3779B97F4A7C15
_MIX = np.uint64(0xC2B2AE3D27D4EB4F)
_MARK_BITS = 20


@dataclass(frozen=True)
class WordShare:
    """How many of the written words occur in the corpus."""

    n_words: int
    n_known: int

    @property
    def share(self) -> float:
        """Known words in all words, 0 to 1; not a number when nothing was written."""
        return self.n_known / self.n_words if self.n_words else math.nan


@dataclass(frozen=True)
class Copy:
    """The longest piece of written text that stands in the corpus."""

    piece: bytes
    position: int
    """Where the corpus has it, in bytes."""

    @property
    def n_bytes(self) -> int:
        """Length of the piece."""
        return len(self.piece)


def corpus_words(corpus: bytes | Bytes) -> frozenset[str]:
    """Return the words of a corpus: runs of three letters or more of any script, in lower case.

    The sigma at the end of a Greek word is like every other, so that a word's place does not matter.

    What is not UTF-8 separates words. In scripts that put no space between words, a run of letters
    is a phrase, and few of them ever recur: compare with the share that unseen text of the same
    kind has.
    """
    found: set[str] = set()
    for piece in _cut_between_words(_array(corpus)):
        found.update(_WORD.findall(_lower(piece)))
    return frozenset(found)


def word_share(texts: Iterable[str | bytes], vocabulary: Set[str]) -> WordShare:
    """Count the words of written texts, and how many of them are in ``vocabulary``.

    A word is what it is in ``corpus_words``. One that touches the end of a text is left out: there
    the sampling stopped, not the word.
    """
    n_words = n_known = 0
    for text in texts:
        lowered = _lower(to_bytes(text))
        words = [match.group() for match in _WORD.finditer(lowered) if match.end() < len(lowered)]
        n_words += len(words)
        n_known += sum(word in vocabulary for word in words)
    return WordShare(n_words, n_known)


def longest_copy(texts: Iterable[str | bytes], corpus: bytes | Bytes) -> Copy:
    """Return the longest piece of any of the texts that stands in the corpus, byte for byte.

    Of several pieces of that length, one that the corpus has early.

    Method: hash every window of length L of the corpus and of the texts; the two share a window
    of length L only if they share one of every smaller length, so the longest is found by bisection
    over L. Equal hashes are compared byte by byte. The corpus is taken in pieces that overlap, and
    a later piece is searched only for something longer: one pass of hashing for each.
    """
    written = [_array(to_bytes(text)) for text in texts]
    source = _array(corpus)
    most = max((len(text) for text in written), default=0)
    best = Copy(b"", 0)
    for start in range(0, len(source), _PIECE):
        piece = source[start : start + _PIECE + most - 1]
        low, high = best.n_bytes, min(most, len(piece))
        length = low + 1  # first whether there is anything longer at all
        while low < high:
            found = _shared_window(written, piece, length)
            if found is None:
                high = length - 1
            else:
                text, place = found
                low = length
                best = Copy(text, start + place)
            length = (low + high + 1) // 2
    return best


def unseen_texts(val_text: Bytes, like: Iterable[str | bytes]) -> list[bytes]:
    """Return as many pieces of the validation text as there are samples, each as long as its like.

    They say what a person's writing of the same kind gets: the measure for the model's. Pieces are
    evenly spaced; the list is empty when the validation part is shorter than a sample.
    """
    sizes = [len(to_bytes(text)) for text in like]
    free = len(val_text) - max(sizes, default=0)
    if free < 0 or not sizes:
        return []
    starts = [free * number // max(1, len(sizes) - 1) for number in range(len(sizes))]
    return [val_text[at : at + n].tobytes() for at, n in zip(starts, sizes, strict=True)]


def _shared_window(texts: list[Bytes], piece: Bytes, length: int) -> tuple[bytes, int] | None:
    """Return a window of ``length`` bytes that a text and the piece share, and its place there."""
    hashes = [_window_hashes(text, length) for text in texts]
    sizes = np.array([len(each) for each in hashes])
    wanted = np.concatenate(hashes)
    if len(wanted) == 0:
        return None
    # Nearly all windows of the corpus are sorted out by one look into a table of bits.
    marked = np.zeros(1 << _MARK_BITS, np.bool_)
    marked[wanted >> np.uint64(64 - _MARK_BITS)] = True
    got = _window_hashes(piece, length)
    places = np.flatnonzero(marked[got >> np.uint64(64 - _MARK_BITS)])
    places = places[np.isin(got[places], wanted)]
    ends = np.cumsum(sizes)
    for place in places:
        window = piece[place : place + length]
        for at in np.flatnonzero(wanted == got[place]):
            number = int(np.searchsorted(ends, at, "right"))
            start = int(at - (ends[number] - sizes[number]))
            if np.array_equal(texts[number][start : start + length], window):
                return window.tobytes(), int(place)
    return None


def _window_hashes(text: Bytes, length: int) -> Hashes:
    """Return the hash of every window of ``length`` bytes (n - length + 1,), in order.

    A window's hash is the polynomial of its bytes in _BASE modulo 2^64, mixed at the end. The
    polynomial of two neighbouring windows is that of the first times _BASE^(length of the second)
    plus that of the second, so that lengths double: log2(length) passes, not length.
    """
    n_windows = len(text) - length + 1
    if n_windows <= 0:
        return np.zeros(0, np.uint64)
    level = text.astype(np.uint64)
    level += np.uint64(1)
    size, done = 1, 0
    hashes = np.zeros(n_windows, np.uint64)
    while True:
        power = np.uint64(pow(_BASE, size, 1 << 64))
        if length & size:
            hashes *= power
            hashes += level[done : done + n_windows]
            done += size
        if done == length:
            return hashes * _MIX
        level = level[:-size] * power + level[size:]
        size *= 2


def _cut_between_words(text: Bytes) -> Iterator[bytes]:
    """Yield a text in pieces of about _PIECE bytes that end behind a space or a line feed."""
    start = 0
    while start < len(text):
        piece = text[start : start + _PIECE].tobytes()
        if start + len(piece) < len(text):
            end = max(piece.rfind(b" "), piece.rfind(b"\n")) + 1
            piece = piece[:end] if end else piece
        yield piece
        start += len(piece)


def _lower(text: bytes) -> str:
    return text.decode("utf-8", "replace").lower().replace("\u03c2", "\u03c3")


def _array(text: bytes | Bytes) -> Bytes:
    return np.frombuffer(text, np.uint8) if isinstance(text, bytes) else text
