"""The operations of ``calls.py`` for CUDA, in Triton: each reads its tensors once and leaves partial sums.

A program walks over tiles of rows; what it adds up over rows stays in registers until its last tile. The number of
programs is fixed by the number of rows, so sums do not depend on timing. Sums and statistics are float32.

Rows are taken from the last to the first. The matrix products before and after go from the first to the last, so what was written last is
read first, while it is still in the L2 cache.

Loads of the next tiles run while one is computed (``num_stages``): without, half of the memory's speed was reached. Sizes of tiles were
measured on an H200 at GPT-2's sizes (docs/log.md).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from posttrainllm.pytorch.calls import PARTS
from posttrainllm.pytorch.embedding_kernels import embedding_backward, token_order

__all__ = [
    "embedding_backward", "gelu", "gelu_backward", "join", "layernorm", "layernorm_backward", "parts", "token_order",
]  # fmt: skip

TILE = 4096  # numbers of a tile, and so C at most (choices.WIDEST)
THREAD = 32  # numbers of a tile that a thread has


def parts(rows: int) -> int:
    """How many partial sums the operations write."""
    return min(PARTS, rows)


def _tile(rows: int, width: int, numbers: int = TILE) -> tuple[int, int]:
    """Rows and columns of a tile, powers of two; few rows where there are few, so that all processors work."""
    block = triton.next_power_of_2(width)
    most = max(1, numbers // block)
    fair = max(1, rows // PARTS)
    return min(most, 1 << (fair.bit_length() - 1)), block


@triton.jit
def _backwards():
    """Number of this program, counted from the last."""
    return tl.num_programs(0) - 1 - tl.program_id(0)


@triton.jit
def _layernorm(
    x, delta, weight, bias, y, out, mean, rstd, n, eps,
    C: tl.constexpr, ADD: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One tile of rows a program."""
    rows = _backwards().to(tl.int64) * ROWS + tl.arange(0, ROWS)
    columns = tl.arange(0, BLOCK)
    inside = (rows < n)[:, None] & (columns < C)[None, :]
    at = rows[:, None] * C + columns[None, :]
    value = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
    if ADD:
        value += tl.load(delta + at, mask=inside, other=0.0).to(tl.float32)
        rounded = value.to(y.dtype.element_ty)
        tl.store(y + at, rounded, mask=inside)
        value = rounded.to(tl.float32)  # backward will read this one
    center = tl.sum(value, 1) / C
    value = tl.where(inside, value - center[:, None], 0.0)
    scale = tl.div_rn(1.0, tl.sqrt_rn(tl.sum(value * value, 1) / C + eps))
    w = tl.load(weight + columns, mask=columns < C, other=0.0).to(tl.float32)
    b = tl.load(bias + columns, mask=columns < C, other=0.0).to(tl.float32)
    result = value * scale[:, None] * w[None, :] + b[None, :]
    tl.store(out + at, result.to(out.dtype.element_ty), mask=inside)
    tl.store(mean + rows, center, mask=rows < n)
    tl.store(rstd + rows, scale, mask=rows < n)


def layernorm(
    x: Tensor, delta: Tensor | None, weight: Tensor, bias: Tensor, eps: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """See ``calls.layernorm``."""
    n, width = x.shape
    y = x if delta is None else torch.empty_like(x)
    out = torch.empty_like(x)
    mean, rstd = (torch.empty(n, device=x.device, dtype=torch.float32) for _ in range(2))
    rows, block = _tile(n, width)
    _layernorm[(triton.cdiv(n, rows),)](
        x, x if delta is None else delta, weight, bias, y, out, mean, rstd, n, eps,
        C=width, ADD=delta is not None, ROWS=rows, BLOCK=block, num_warps=_warps(rows * block),
    )  # fmt: skip
    return y, out, mean, rstd


@triton.jit
def _layernorm_backward(
    grad, residual, y, mean, rstd, weight, out, weight_cols, bias_cols, sum_cols, n, stride,
    C: tl.constexpr, RESIDUAL: tl.constexpr, SUM: tl.constexpr, TIMES: tl.constexpr,
    PROGRAMS: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Every PROGRAMS-th tile of rows a program; the sums of all of them in one row of the partial sums.

    dy = rstd * (g w - mean(g w) - xhat * mean(g w xhat)) + residual, where xhat = (y - mean) * rstd
    """
    program = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    w = tl.load(weight + columns, mask=columns < C, other=0.0).to(tl.float32)[None, :]
    of_weight = tl.zeros([ROWS, BLOCK], tl.float32)
    of_bias = tl.zeros([ROWS, BLOCK], tl.float32)
    of_sum = tl.zeros([ROWS, BLOCK], tl.float32)
    for turn in tl.range(0, TIMES, num_stages=STAGES):
        rows = ((TIMES - 1 - turn) * PROGRAMS + program) * ROWS + tl.arange(0, ROWS)
        inside = (rows < n)[:, None] & (columns < C)[None, :]
        at = rows[:, None] * C + columns[None, :]
        g = tl.load(grad + at, mask=inside, other=0.0).to(tl.float32)
        value = tl.load(y + at, mask=inside, other=0.0).to(tl.float32)
        center = tl.load(mean + rows, mask=rows < n, other=0.0)[:, None]
        scale = tl.load(rstd + rows, mask=rows < n, other=0.0)[:, None]
        xhat = tl.where(inside, (value - center) * scale, 0.0)
        weighted = g * w
        both = tl.sum(weighted * xhat, 1)[:, None] / C
        one = tl.sum(weighted, 1)[:, None] / C
        result = (weighted - one - xhat * both) * scale
        if RESIDUAL:
            result += tl.load(residual + at, mask=inside, other=0.0).to(tl.float32)
        rounded = result.to(out.dtype.element_ty)
        tl.store(out + at, rounded, mask=inside)
        of_weight += g * xhat
        of_bias += g
        if SUM:
            of_sum += tl.where(inside, rounded.to(tl.float32), 0.0)
    place = program * stride + columns
    tl.store(weight_cols + place, tl.sum(of_weight, 0), mask=columns < C)
    tl.store(bias_cols + place, tl.sum(of_bias, 0), mask=columns < C)
    if SUM:
        tl.store(sum_cols + place, tl.sum(of_sum, 0), mask=columns < C)


def layernorm_backward(
    grad: Tensor, residual: Tensor | None, y: Tensor, mean: Tensor, rstd: Tensor, weight: Tensor,
    weight_cols: Tensor, bias_cols: Tensor, sum_cols: Tensor | None,
) -> Tensor:  # fmt: skip
    """See ``calls.layernorm_backward``."""
    n, width = y.shape
    programs = len(weight_cols)
    rows, block = _tile(n, width)
    out = torch.empty_like(y)
    _layernorm_backward[(programs,)](
        grad, y if residual is None else residual, y, mean, rstd, weight, out,
        weight_cols, bias_cols, weight_cols if sum_cols is None else sum_cols, n, weight_cols.stride(0),
        C=width, RESIDUAL=residual is not None, SUM=sum_cols is not None, STAGES=_stages(y),
        TIMES=triton.cdiv(n, programs * rows), PROGRAMS=programs, ROWS=rows, BLOCK=block,
        num_warps=_warps(rows * block),
    )  # fmt: skip
    return out


@triton.jit
def _gelu_parts(x, TANH: tl.constexpr):
    """GELU(x) / x, and x times its derivative: Phi(x) and x phi(x), by erf or by the tanh form as a sigmoid."""
    square = x * x
    if TANH:  # 1 / (1 + exp(-2u)), u = sqrt(2 / pi) (x + 0.044715 x^3), in powers of two
        root = tl.rsqrt(1.0 + tl.exp2(x * (-2.302208198 - 0.1029432397 * square)))
        share = root * root  # two instructions where a division takes ten
        rise = share * (1.0 - share) * (x * (1.5957691216 + 0.2140644487 * square))
    else:
        share = 0.5 + 0.5 * tl.erf(x * 0.7071067811865476)
        rise = x * 0.3989422804014327 * tl.exp(-0.5 * square)
    return share, rise


@triton.jit
def _gelu(x, out, n, TANH: tl.constexpr, BLOCK: tl.constexpr):
    """One block of numbers a program."""
    at = _backwards().to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(x + at, mask=at < n, other=0.0).to(tl.float32)
    share, _ = _gelu_parts(value, TANH)
    tl.store(out + at, (value * share).to(out.dtype.element_ty), mask=at < n)


def gelu(x: Tensor, tanh: bool) -> Tensor:
    """See ``calls.gelu``."""
    out = torch.empty_like(x)
    block = 2048
    _gelu[(triton.cdiv(x.numel(), block),)](x, out, x.numel(), TANH=tanh, BLOCK=block, num_warps=8)
    return out


@triton.jit
def _gelu_backward(
    grad, x, out, sum_cols, n, stride, F: tl.constexpr, TANH: tl.constexpr, TIMES: tl.constexpr,
    PROGRAMS: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """A block of columns of every PROGRAMS-th tile of rows a program."""
    program = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    of_sum = tl.zeros([ROWS, BLOCK], tl.float32)
    for turn in tl.range(0, TIMES, num_stages=STAGES):
        rows = ((TIMES - 1 - turn) * PROGRAMS + program) * ROWS + tl.arange(0, ROWS)
        inside = (rows < n)[:, None] & (columns < F)[None, :]
        at = rows[:, None] * F + columns[None, :]
        value = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
        share, rise = _gelu_parts(value, TANH)
        g = tl.load(grad + at, mask=inside, other=0.0).to(tl.float32)
        rounded = (g * (share + rise)).to(out.dtype.element_ty)
        tl.store(out + at, rounded, mask=inside)
        of_sum += rounded.to(tl.float32)
    tl.store(sum_cols + program * stride + columns, tl.sum(of_sum, 0), mask=columns < F)


def gelu_backward(grad: Tensor, x: Tensor, tanh: bool, sum_cols: Tensor) -> Tensor:
    """See ``calls.gelu_backward``."""
    n, width = x.shape
    programs = len(sum_cols)
    rows, block = _tile(n, min(1024, width), 2048)
    out = torch.empty_like(x)
    _gelu_backward[(programs, triton.cdiv(width, block))](
        grad, x, out, sum_cols, n, sum_cols.stride(0), F=width, TANH=tanh, STAGES=_stages(x),
        TIMES=triton.cdiv(n, programs * rows), PROGRAMS=programs, ROWS=rows, BLOCK=block,
        num_warps=2 * _warps(rows * block),
    )  # fmt: skip
    return out


@triton.jit
def _join(
    query, key, value, out, sum_cols, n, stride, C: tl.constexpr, TIMES: tl.constexpr,
    PROGRAMS: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """A block of columns of one of the three, of every PROGRAMS-th tile of rows, a program."""
    program = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    which = tl.program_id(2)
    of_sum = tl.zeros([ROWS, BLOCK], tl.float32)
    for turn in range(TIMES):
        rows = ((TIMES - 1 - turn) * PROGRAMS + program) * ROWS + tl.arange(0, ROWS)
        inside = (rows < n)[:, None] & (columns < C)[None, :]
        at = rows[:, None] * C + columns[None, :]
        if which == 0:
            part = tl.load(query + at, mask=inside, other=0.0)
        elif which == 1:
            part = tl.load(key + at, mask=inside, other=0.0)
        else:
            part = tl.load(value + at, mask=inside, other=0.0)
        tl.store(out + rows[:, None] * (3 * C) + which * C + columns[None, :], part, mask=inside)
        of_sum += part.to(tl.float32)
    place = sum_cols + program * stride + which * C + columns
    tl.store(place, tl.sum(of_sum, 0), mask=columns < C)


def join(query: Tensor, key: Tensor, value: Tensor, sum_cols: Tensor) -> Tensor:
    """See ``calls.join``."""
    n, width = query.shape
    programs = len(sum_cols)
    rows, block = _tile(n, min(1024, width), 8192)
    out = torch.empty(n, 3 * width, device=query.device, dtype=query.dtype)
    _join[(programs, triton.cdiv(width, block), 3)](
        query, key, value, out, sum_cols, n, sum_cols.stride(0), C=width,
        TIMES=triton.cdiv(n, programs * rows), PROGRAMS=programs, ROWS=rows, BLOCK=block,
        num_warps=_warps(rows * block),
    )  # fmt: skip
    return out


def _warps(numbers: int) -> int:
    """Warps for a tile."""
    return max(1, min(8, numbers // (32 * THREAD)))


def _stages(x: Tensor) -> int:
    """Tiles in flight: as many as fit into the 64 KB of shared memory that every card has; LayerNorm's backward takes 49."""
    return 3 if x.element_size() == 2 else 2
