"""The attention kernels' algorithm in plain loops: where to bisect when a kernel is wrong.

``kernels/cpp/attention.cpp`` goes over blocks of queries and keys as FlashAttention-2 does (Dao 2023, algorithms 1 and 2), with an online
softmax forward and P recomputed from the saved lse backward. The same loops in the same order stand here, one head at a time, readable
and slow, and are proven against the naive op. A kernel that is off can be compared with them step by step.

Shapes: q, k, v, out, dout (T, D); lse, start, row_sums (T,).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
import pytest

from op_inputs import Array
from posttrainllm.engines.numpy_ops import attention_backward, attention_forward
from tolerances import BLOCKS, assert_close


@dataclass
class Head:
    """One head's inputs and the size of a block."""

    q: Array
    k: Array
    v: Array
    start: Array
    block: int
    scale: float = field(init=False)

    def __post_init__(self) -> None:
        self.scale = 1 / np.sqrt(self.q.shape[1])

    @property
    def blocks(self) -> int:
        """How many blocks the rows make; the last one may be shorter."""
        return -(-len(self.q) // self.block)

    def rows(self, i: int) -> range:
        """The rows of block i."""
        return range(i * self.block, min(len(self.q), (i + 1) * self.block))

    def first_block(self, i: int) -> int:
        """The first block of keys that any query of block i may see; those before it are skipped."""
        return int(min(self.start[t] for t in self.rows(i))) // self.block

    def scores(self, i: int, j: int) -> Array:
        """Scaled scores of a block of queries and a block of keys, -inf where a key is not visible."""
        found = self.q[self.rows(i)] @ self.k[self.rows(j)].T * self.scale
        for a, t in enumerate(self.rows(i)):
            for b, s in enumerate(self.rows(j)):
                if not self.start[t] <= s <= t:
                    found[a, b] = -np.inf
        return found


def forward(head: Head) -> tuple[Array, Array]:
    """out and lse; no more than one block of scores exists at a time."""
    out, lse = np.full_like(head.q, np.nan), np.full(len(head.q), np.nan)
    for i in range(head.blocks):
        rows = head.rows(i)
        most = np.full(len(rows), -np.inf)  # running maximum of a row's scores
        total = np.zeros(len(rows))  # running sum of exp(score - most)
        mixed = np.zeros((len(rows), head.q.shape[1]))  # running sum of exp(score - most) v
        for j in range(head.first_block(i), i + 1):
            scores = head.scores(i, j)
            for a in range(len(rows)):
                new = max(most[a], scores[a].max())
                if new == -np.inf:
                    continue  # the row's segment starts in a later block
                shrink = np.exp(most[a] - new)  # 0 for the first visible block
                weights = np.exp(scores[a] - new)
                total[a] = total[a] * shrink + weights.sum()
                mixed[a] = mixed[a] * shrink + weights @ head.v[head.rows(j)]
                most[a] = new
        out[rows] = mixed / total[:, None]
        lse[rows] = most + np.log(total)
    return out, lse


@dataclass
class Gradients:
    """dq, dk, dv of one head, zero at first."""

    q: Array
    k: Array
    v: Array

    @staticmethod
    def zeros(head: Head) -> Gradients:
        return Gradients(*(np.zeros_like(part) for part in (head.q, head.k, head.v)))


def add_block(
    d: Gradients, head: Head, dout: Array, lse: Array, row_sums: Array, i: int, j: int, into: str
) -> None:
    """What the block (i, j) of P and dS adds to dq (``into`` has a q), and to dk and dv (a k)."""
    if j < head.first_block(i):
        return
    queries, keys = head.rows(i), head.rows(j)
    p = np.exp(head.scores(i, j) - lse[queries][:, None])
    ds = p * (dout[queries] @ head.v[keys].T - row_sums[queries][:, None]) * head.scale
    if "q" in into:
        d.q[queries] += ds @ head.k[keys]
    if "k" in into:
        d.k[keys] += ds.T @ head.q[queries]
        d.v[keys] += p.T @ dout[queries]


def backward(head: Head, dout: Array, out: Array, lse: Array, *, passes: int) -> Gradients:
    """In one pass over the blocks, or in two that could run in parallel: dk and dv by keys, dq by queries."""
    d, row_sums = Gradients.zeros(head), (dout * out).sum(axis=1)
    for into in ("qk",) if passes == 1 else ("k", "q"):
        for outer in range(head.blocks):
            if into == "q":
                pairs = [(outer, j) for j in range(outer + 1)]
            else:
                pairs = [(i, outer) for i in range(outer, head.blocks)]
            for i, j in pairs:
                add_block(d, head, dout, lse, row_sums, i, j, into)
    return d


# ---- proof --------------------------------------------------------------------------------------


def segments(kind: str, time: int) -> Array:
    """segment_start of one row: whole, cut at random, at every position, or in the middle of a block."""
    starts = {
        "whole": np.zeros(time),
        "cut": np.maximum.accumulate(np.arange(time) * (np.arange(time) % 5 == 3)),
        "alone": np.arange(time),
        "late": np.where(np.arange(time) < time // 2, 0, time // 2),
    }
    return starts[kind].astype(np.int32)


def cases() -> Iterator[tuple[int, int, int, str]]:
    for time, size in ((1, 1), (2, 3), (7, 4), (13, 5), (33, 8)):
        for block in (1, 2, 4, 8, 64):
            for kind in ("whole", "cut", "alone", "late"):
                yield time, size, block, kind


@pytest.mark.parametrize(("time", "size", "block", "kind"), list(cases()))
def test_blockwise_attention_equals_the_naive_one(
    time: int, size: int, block: int, kind: str
) -> None:
    random = np.random.default_rng(time * 100 + size)
    qkv, dout = random.normal(0, 1.5, (time, 3 * size)), random.normal(size=(time, size))
    start = segments(kind, time)
    head = Head(*np.split(qkv, 3, axis=1), start, block)
    out, lse = np.empty((time, size)), np.empty((1, 1, time))
    attention_forward(out, lse, qkv, start)
    dqkv = np.empty_like(qkv)
    attention_backward(dqkv, dout, qkv, out, lse, start)

    found_out, found_lse = forward(head)
    assert_close(
        {"out": found_out, "lse": found_lse}, {"out": out, "lse": lse.ravel()}, BLOCKS, zero=1
    )
    one = backward(head, dout, found_out, found_lse, passes=1)
    wanted = dict(zip("qkv", np.split(dqkv, 3, axis=1), strict=True))
    assert_close({"q": one.q, "k": one.k, "v": one.v}, wanted, BLOCKS, zero=1)
    two = backward(head, dout, found_out, found_lse, passes=2)
    for name in "qkv":
        assert getattr(one, name).tobytes() == getattr(two, name).tobytes(), (
            f"d{name} in two passes"
        )


def test_online_softmax_survives_scores_beyond_the_range_of_exp() -> None:
    """exp(800) overflows in float64: only differences to the running maximum may be exponentiated."""
    random = np.random.default_rng(0)
    q, k, v = (random.normal(size=(9, 4)) for _ in range(3))
    out, lse = forward(Head(q * 1e3, k * 10, v, np.zeros(9, np.int32), 2))
    assert np.isfinite(out).all()
    assert np.abs(lse).max() > 800
    assert (np.abs(out) <= np.abs(v).max() + 1e-12).all(), "a mean of v stays among its values"


def test_blocks_that_nobody_sees_are_skipped() -> None:
    head = Head(*np.zeros((3, 12, 2)), np.array([0] * 4 + [4] * 4 + [7] * 4, np.int32), 4)  # type: ignore[misc]
    assert [head.first_block(i) for i in range(head.blocks)] == [0, 1, 1]
