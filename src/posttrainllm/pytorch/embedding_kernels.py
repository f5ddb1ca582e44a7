"""The gradient of an embedding table for CUDA, in Triton: rows of activations added up by token, in a fixed order, without atomics.

The tokens of a micro-batch are sorted, so that rows of one token are a run of neighbours. A program takes ``PIECE`` of them and adds
up each token's rows by one small matrix product, with ones where two tokens are equal. A run inside a piece is added to the table at
once. Of one that leaves its piece, the part where it begins is left in ``tails`` and the parts in the pieces after it in ``heads``;
a second kernel adds them up.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

PIECE = 32  # sorted positions of a program
COLUMNS = 256  # of a program
AT_ONCE = 16  # parts of a long run that are read together

Order = tuple[Tensor, Tensor]
"""Tokens in ascending order and the positions that they came from, both (N,)."""


def token_order(tokens: Tensor) -> Order:
    """See ``calls.token_order``."""
    ordered, positions = torch.sort(tokens.flatten(), stable=True)
    return ordered, positions


@triton.jit
def _pieces(
    grad, tokens, positions, table, heads, tails, n, C: tl.constexpr,
    PIECE: tl.constexpr, COLUMNS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Shapes: grad (N, C); tokens, positions (N,); table (V, C), added to; heads, tails (pieces, C)."""
    piece = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    within = (columns < C)[None, :]
    lanes = tl.arange(0, PIECE)
    at = piece * PIECE + lanes
    there = at < n
    token = tl.load(tokens + at, mask=there, other=-1)
    before = tl.load(tokens + at - 1, mask=there & (at > 0), other=-1)
    after = tl.load(tokens + (piece + 1) * PIECE, mask=(piece + 1) * PIECE < n, other=-1)
    row = tl.load(positions + at, mask=there, other=0)
    from_row = grad + row[:, None] * C + columns[None, :]
    rows = tl.load(from_row, mask=there[:, None] & within, other=0.0).to(tl.float32)
    equal = (token[:, None] == token[None, :]).to(tl.float32)
    sums = tl.dot(equal, rows, input_precision=PRECISION)
    opened = (lanes == 0) & (token == before)
    begins = there & (token != before)
    goes_on = token == after
    own = piece * C + columns[None, :] + tl.zeros([PIECE, 1], tl.int64)
    tl.store(heads + own, sums, mask=(there & opened)[:, None] & within)
    tl.store(tails + own, sums, mask=(begins & goes_on)[:, None] & within)
    place = table + token.to(tl.int64)[:, None] * C + columns[None, :]
    inside = (begins & ~goes_on)[:, None] & within
    tl.store(place, tl.load(place, mask=inside, other=0.0) + sums, mask=inside)


@triton.jit
def _runs(
    tokens, table, heads, tails, n, C: tl.constexpr,
    PIECE: tl.constexpr, COLUMNS: tl.constexpr, AT_ONCE: tl.constexpr,
):  # fmt: skip
    """Shapes: as in ``_pieces``. A program adds up the run that begins in its piece and leaves it, if there is one."""
    piece = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    within = columns < C
    start, end = piece * PIECE, (piece + 1) * PIECE
    before = tl.load(tokens + start - 1, mask=start > 0, other=-1)
    token = tl.load(tokens + end - 1, mask=end < n, other=-1)
    after = tl.load(tokens + end, mask=end < n, other=-2)
    if (token == after) & (token != before):
        total = tl.load(tails + piece * C + columns, mask=within, other=0.0)
        other = piece + 1
        going = True
        while going:
            others = other + tl.arange(0, AT_ONCE)
            first = tl.load(tokens + others * PIECE, mask=others * PIECE < n, other=-1)
            mine = first == token
            at = others[:, None] * C + columns[None, :]
            total += tl.sum(tl.load(heads + at, mask=mine[:, None] & within[None, :], other=0.0), 0)
            other += AT_ONCE
            going = tl.sum(mine.to(tl.int32), 0) == AT_ONCE
        place = table + token.to(tl.int64) * C + columns
        tl.store(place, tl.load(place, mask=within) + total, mask=within)


def embedding_backward(grad: Tensor, order: Order, table: Tensor) -> None:
    """See ``calls.embedding_backward``; sums are float32."""
    tokens, positions = order
    n, width = grad.shape
    pieces = triton.cdiv(n, PIECE)
    columns = max(16, min(COLUMNS, triton.next_power_of_2(width)))
    heads, tails = (table.new_empty(pieces, width) for _ in range(2))
    grid = (pieces, triton.cdiv(width, columns))
    _pieces[grid](
        grad, tokens, positions, table, heads, tails, n, C=width, PIECE=PIECE, COLUMNS=columns,
        PRECISION="ieee" if grad.dtype == torch.float32 else "tf32",  # tf32 holds every bfloat16
        num_warps=4,
    )  # fmt: skip
    _runs[grid](
        tokens, table, heads, tails, n, C=width, PIECE=PIECE, COLUMNS=columns, AT_ONCE=AT_ONCE,
        num_warps=4,
    )  # fmt: skip
