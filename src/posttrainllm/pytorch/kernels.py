"""Three kernels for CUDA, in Triton: what PyTorch would do in twenty small calls or three long passes.

``cross_entropy``   loss and gradient of logits: two reads and a write, in place
``finish_step``     norm of the gradients, the non-finite flag and the line of the results, in one block
``adamw``           clip, AdamW and the bfloat16 copy of the weights: one pass over the arenas

What this is not: the definitions; those are ``loss.cross_entropy`` and ``optim.py`` in PyTorch's own
calls, which run where there is no Triton, and which the tests hold these to.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _online(z, highest, total):
    """Take logits (GROUPS, WIDE) into the maximum and the sum of exp(z - maximum) of every run, (GROUPS,)."""
    higher = tl.maximum(highest, tl.max(z, 1))
    here = tl.sum(tl.exp(z - higher[:, None]), 1)
    return higher, total * tl.exp(highest - higher) + here


@triton.jit
def _cross_entropy(
    logits, targets, losses, scale, n_vocab: tl.constexpr, padded: tl.constexpr,
    GROUPS: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """One program a row: lse online over tiles of the vocabulary, then the gradient over the logits.

    A tile is GROUPS runs of WIDE neighbours. Every run keeps a maximum and a sum of its own, inside one thread, and they meet once,
    at the end of the row: a loop in which all threads met took twice the time that the memory needs. Only the last tile asks
    where the vocabulary ends, and the target is put right afterwards. The logits stay in the L2 cache between the two passes.

    Shapes: logits (R, P), overwritten; targets, losses (R,); scale ().
    """
    row = tl.program_id(0).to(tl.int64)
    logits += row * padded
    target = tl.load(targets + row)
    factor = tl.where(target < 0, 0.0, tl.load(scale))
    picked = tl.load(logits + tl.maximum(target, 0)).to(tl.float32)
    columns = tl.arange(0, GROUPS)[:, None] * WIDE + tl.arange(0, WIDE)[None, :]
    highest = tl.full([GROUPS], -1e30, tl.float32)  # finite: a run may lie beyond the vocabulary
    total = tl.zeros([GROUPS], tl.float32)
    TILE: tl.constexpr = GROUPS * WIDE
    WHOLE: tl.constexpr = n_vocab // TILE * TILE
    for start in range(0, WHOLE, TILE):
        z = tl.load(logits + start + columns, eviction_policy="evict_last").to(tl.float32)
        highest, total = _online(z, highest, total)
    for start in range(WHOLE, padded, TILE):
        # Not masked by n_vocab: that would be no multiple of a load's width, and loads would be of single numbers.
        at = start + columns
        z = tl.load(logits + at, mask=at < padded, other=0.0).to(tl.float32)
        highest, total = _online(tl.where(at < n_vocab, z, -float("inf")), highest, total)
    top = tl.max(highest, 0)
    lse = top + tl.log(tl.sum(total * tl.exp(highest - top), 0))
    tl.store(losses + row, tl.where(target < 0, 0.0, (lse - picked) * factor))
    for start in range(0, WHOLE, TILE):
        place = logits + start + columns
        z = tl.load(place, eviction_policy="evict_first").to(tl.float32)
        grad = tl.exp(z - lse) * factor
        tl.store(place, grad.to(logits.dtype.element_ty), eviction_policy="evict_first")
    for start in range(WHOLE, padded, TILE):
        at = start + columns
        z = tl.load(logits + at, mask=at < padded, other=0.0).to(tl.float32)
        grad = tl.where(at < n_vocab, tl.exp(z - lse) * factor, 0.0)
        tl.store(logits + at, grad.to(logits.dtype.element_ty), mask=at < padded)
    tl.debug_barrier()  # the row is written
    fixed = (tl.exp(picked - lse) - 1.0) * factor
    tl.store(logits + target, fixed.to(logits.dtype.element_ty), mask=target >= 0)


def cross_entropy(
    logits: Tensor, targets: Tensor, scale: Tensor, n_vocab: int
) -> tuple[Tensor, Tensor]:
    """See ``loss.cross_entropy``; the gradient takes the place of the logits.

    A thousand threads a row, so that the rows in flight (two a multiprocessor) fit into the L2 cache between
    the two passes.
    """
    rows, padded = logits.shape
    losses = torch.empty(rows, device=logits.device, dtype=torch.float32)
    wide = 16 // logits.element_size()  # a load of sixteen bytes
    groups = max(16, min(16384, triton.next_power_of_2(padded)) // wide)
    _cross_entropy[(rows,)](
        logits, targets, losses, scale, n_vocab, padded, GROUPS=groups, WIDE=wide,
        num_warps=max(1, min(32, groups // 64)),
    )  # fmt: skip
    return losses.sum(), logits


@triton.jit
def _finish_step(
    squares, count: tl.constexpr, loss, norm, nonfinite, ring, counter,
    RING: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One program. Shapes: squares (count,); loss, norm (); nonfinite, counter (1,); ring (RING, 3)."""
    lanes = tl.arange(0, BLOCK)
    partial = tl.zeros([BLOCK], tl.float32)
    for start in range(0, count, BLOCK):
        one = tl.load(squares + start + lanes, mask=start + lanes < count, other=0.0)
        partial += one * one
    length = tl.sqrt_rn(tl.sum(partial, 0))
    finite = (length == length) & (length < float("inf"))
    bad = tl.where(finite, tl.load(nonfinite), 1)
    tl.store(norm, length)
    tl.store(nonfinite, bad)
    at = tl.load(counter)
    row = ring + (at % RING) * 3
    tl.store(row, tl.load(loss))
    tl.store(row + 1, length)
    tl.store(row + 2, bad.to(tl.float32))
    tl.store(counter, at + 1)


def finish_step(
    norms: Tensor, loss: Tensor, norm: Tensor, nonfinite: Tensor, ring: Tensor, counter: Tensor
) -> None:
    """See ``optim.finish_step``."""
    _finish_step[(1,)](
        norms, norms.numel(), loss, norm, nonfinite, ring, counter,
        RING=len(ring), BLOCK=4096, num_warps=8,
    )  # fmt: skip


@triton.jit
def _adamw(
    weights, grads, m, v, working, scalars, norm, nonfinite,
    n, decayed, beta1, rest1, beta2, rest2, eps,
    weight_decay, clip_norm, CAST: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One block of the arenas a program; nothing at all once the flag is set.

    Shapes: weights, grads, m, v, working (n,); scalars (4,): inv_count, lr, corrections; norm (); nonfinite (1,).
    """
    if tl.load(nonfinite) != 0:
        return
    length = tl.load(norm)
    scale = tl.where(length > clip_norm, tl.div_rn(clip_norm, length), 1.0)
    lr = tl.load(scalars + 1)
    correction1, correction2 = tl.load(scalars + 2), tl.load(scalars + 3)
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < n
    g = tl.load(grads + at, mask=inside, other=0.0) * scale
    p = tl.load(weights + at, mask=inside, other=0.0)
    first = beta1 * tl.load(m + at, mask=inside, other=0.0) + rest1 * g
    second = beta2 * tl.load(v + at, mask=inside, other=0.0) + rest2 * g * g
    change = tl.div_rn(
        tl.div_rn(first, correction1), tl.sqrt_rn(tl.div_rn(second, correction2)) + eps
    )
    p = p - lr * (change + tl.where(at < decayed, weight_decay, 0.0) * p)
    tl.store(weights + at, p, mask=inside)
    tl.store(m + at, first, mask=inside)
    tl.store(v + at, second, mask=inside)
    if CAST:
        tl.store(working + at, p.to(working.dtype.element_ty), mask=inside)


def adamw(
    params: Tensor, grads: Tensor, m: Tensor, v: Tensor, working: Tensor, *,
    scalars: Tensor, norm: Tensor, nonfinite: Tensor, decayed: int, beta1: float, beta2: float,
    eps: float, weight_decay: float, clip_norm: float,
) -> None:  # fmt: skip
    """Clip, update and cast one range of the arenas; ``decayed`` counts from the range's start.

    Shapes: params, grads, m, v, working (n,), working the params themselves where there is no copy.
    """
    n, block = params.numel(), 1024
    _adamw[(triton.cdiv(n, block),)](
        params, grads, m, v, working, scalars, norm, nonfinite, n, decayed, beta1, 1 - beta1,
        beta2, 1 - beta2, eps, weight_decay, clip_norm,
        CAST=working.data_ptr() != params.data_ptr(), BLOCK=block, num_warps=4,
    )  # fmt: skip
