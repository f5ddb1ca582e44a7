"""What counting reaches: the losses that a model must get below to have learnt something.

A table of n-grams guesses a token from the n-1 tokens before it by how often each followed them in
the training part:

    p(t | c) = (count(c, t) + k) / (count(c) + k * A)

    c         the n-1 tokens before t; none for letter frequencies (n = 1), one for pairs (n = 2),
              two for triples (n = 3), three for quadruples (n = 4)
    count(c)  how often c occurs in the training part with a token behind it
    k = 0.1   keeps what was never seen possible (additive smoothing, Lidstone's)
    A         how many different tokens the text has, both parts; not the vocabulary, of which a
              text uses little: TinyShakespeare has 65 of 256 bytes, and with A = 256 the
              quadruples would lose 0.14 for bytes that no text of its kind has

A line is the mean of -log p in nats a token over the validation part, at every token with n-1 more
before it. "Guessing" is the logarithm of the vocabulary, where an untrained model starts. With no
validation part the tables are tried on the training part itself, like the model.
kernels/cpp/counting.cpp computes the same for browser and node.

Tables are sorted arrays of codes, never V^n cells: about 50 bytes a counted token, whatever the
vocabulary. From a longer text, MOST_TRAIN and MOST_VAL tokens are taken in evenly spaced runs.
On TinyShakespeare, 90/10, the lines are 5.55, 3.35, 2.48, 2.05 and 1.78.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

Tokens = npt.NDArray[Any]
Codes = npt.NDArray[Any]

SMOOTHING = 0.1
NAMES = ("guessing", "letter frequencies", "pairs", "triples", "quadruples")

MOST_TRAIN = 20_000_000  # tokens; counted in one to three seconds
MOST_VAL = 2_000_000
RUNS = 64


@dataclass(frozen=True)
class CountingLine:
    """The loss of one table."""

    name: str
    """guessing, letter frequencies, pairs, triples or quadruples."""
    loss: float
    """Nats a token on the validation part."""
    n_counted: int
    """Training tokens that were counted: fewer than there are when the text is long."""

    def __str__(self) -> str:
        """Name and loss, as in a sentence: ``triples (2.05)``."""
        return f"{self.name} ({self.loss:.2f})"


def lines(train: Tokens, val: Tokens, n_vocab: int = 256) -> list[CountingLine]:
    """Return guessing and the losses of the tables for n = 1 to 4, in this order.

    Shapes: train, val (n,) tokens of any unsigned integer type, perhaps mapped from a file.

    A table is left out when the validation part has fewer than n tokens, or when its codes do not
    fit into 64 bits: quadruples of more than 65,536 different tokens.
    """
    train_runs = _runs(train, MOST_TRAIN)
    val_runs = _runs(val if len(val) else train, MOST_VAL)
    n_counted = sum(map(len, train_runs))
    found = [CountingLine(NAMES[0], math.log(n_vocab), n_counted)]
    alphabet = np.unique(np.concatenate([np.unique(run) for run in [*train_runs, *val_runs]]))
    if len(alphabet) == 0:
        return found
    rank = np.zeros(int(alphabet[-1]) + 1, np.uint32)
    rank[alphabet] = np.arange(len(alphabet))
    ranked_train = [rank[run] for run in train_runs]
    ranked_val = [rank[run] for run in val_runs]
    for n in range(1, len(NAMES)):
        if len(alphabet) ** n > 1 << 64 or all(len(run) < n for run in ranked_val):
            break
        loss = _table_loss(ranked_train, ranked_val, n, len(alphabet))
        found.append(CountingLine(NAMES[n], loss, n_counted))
    return found


def standing(loss: float, lines: Sequence[CountingLine]) -> str:
    """Say where a loss stands: below the lowest line it is under, or above them all.

    ``below triples (2.05)``; ``above guessing (5.55)``; ``not a number``. Of a short text longer counts are worse, and whoever is below
    quadruples there may be far above pairs: only lines count that are lower than all before them.
    """
    if not math.isfinite(loss):
        return "not a number"
    where, lowest = f"above {lines[0]}", math.inf
    for line in lines:
        if line.loss < lowest:
            lowest = line.loss
            if loss < lowest:
                where = f"below {line}"
    return where


def _runs(tokens: Tokens, most: int) -> list[Tokens]:
    """Return the tokens, or when they are too many RUNS evenly spaced stretches of them."""
    if len(tokens) <= most:
        return [tokens]
    length = most // RUNS
    starts = np.linspace(0, len(tokens) - length, RUNS).astype(np.int64)
    return [tokens[start : start + length] for start in starts]


def _table_loss(train: Sequence[Tokens], val: Sequence[Tokens], n: int, n_different: int) -> float:
    """Return the mean loss on ``val`` of the table of n-grams of ``train``, in nats a token."""
    grams, counts = np.unique(_codes(train, n, n_different), return_counts=True)
    contexts = grams // n_different
    first = np.flatnonzero(np.concatenate(([True], contexts[1:] != contexts[:-1]))[: len(grams)])
    context_counts = np.add.reduceat(counts, first) if len(first) else counts
    wanted, weights = np.unique(_codes(val, n, n_different), return_counts=True)
    seen = _look_up(wanted, grams, counts)
    behind = _look_up(wanted // n_different, contexts[first], context_counts)
    losses = np.log(behind + SMOOTHING * n_different) - np.log(seen + SMOOTHING)
    return float(losses @ weights / weights.sum())


def _codes(runs: Sequence[Tokens], n: int, n_different: int) -> Codes:
    """Return each n-gram as one number, its tokens the digits in base ``n_different``."""
    kind = np.uint32 if n_different**n <= 1 << 32 else np.uint64
    found = []
    for run in runs:
        n_grams = max(0, len(run) - n + 1)
        code: Codes = run[:n_grams].astype(kind)
        for place in range(1, n):
            code *= n_different
            code += run[place : place + n_grams]
        found.append(code)
    return np.concatenate(found)


def _look_up(wanted: Codes, keys: Codes, values: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Return the value of each wanted key, 0 where it is missing; both are sorted."""
    if len(keys) == 0:
        return np.zeros(len(wanted), np.int64)
    at = np.minimum(np.searchsorted(keys, wanted), len(keys) - 1)
    return np.where(keys[at] == wanted, values[at], 0)
