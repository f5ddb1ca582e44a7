"""What the attention ops compute: their definition in numpy; a part of ``numpy_ops.py``, which says how to read it."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]


def _heads(x: Array, batch: int, time: int, n_head: int) -> Array:
    """(B*T, C) -> (B, H, T, D)."""
    return x.reshape(batch, time, n_head, -1).transpose(0, 2, 1, 3)


def _rows(x: Array) -> Array:
    """(B, H, T, D) -> (B*T, C)."""
    batch, n_head, time, size = x.shape
    return x.transpose(0, 2, 1, 3).reshape(batch * time, n_head * size)


def _scores(q: Array, k: Array, segment_start: Array) -> Array:
    """Scaled scores (B, H, T, T), -inf where row t may not look at s: s > t, or s before the start of t's segment."""
    time = q.shape[2]
    s = np.arange(time)
    hidden = (s[None, None, :] > s[None, :, None]) | (s[None, None, :] < segment_start[:, :, None])
    scores = q @ k.transpose(0, 1, 3, 2) * q.dtype.type(1 / math.sqrt(q.shape[3]))
    masked: Array = np.where(hidden[:, None], -np.inf, scores)
    return masked


def attention_forward(out: Array, lse: Array, qkv: Array, segment_start: Array) -> None:
    """out = softmax(q k^T / sqrt(D) + mask) v per head. Saves: lse, the log-sum-exp of each row of scores."""
    batch, n_head, time = lse.shape
    q, k, v = (_heads(part, batch, time, n_head) for part in np.split(qkv, 3, axis=1))
    scores = _scores(q, k, segment_start.reshape(batch, time))
    top = scores.max(axis=3, keepdims=True)
    weights = np.exp(scores - top)
    total = weights.sum(axis=3, keepdims=True)
    lse[...] = (top + np.log(total))[..., 0]
    out[...] = _rows((weights / total) @ v)


def attention_backward(
    dqkv: Array, dout: Array, qkv: Array, out: Array, lse: Array, segment_start: Array
) -> None:
    """With P = exp(scores - lse): dv = P^T dout;  ds = P (dout v^T - rowsum(dout out));  dq = ds k / sqrt(D);  dk = ds^T q / sqrt(D)."""
    batch, n_head, time = lse.shape
    q, k, v = (_heads(part, batch, time, n_head) for part in np.split(qkv, 3, axis=1))
    do = _heads(dout, batch, time, n_head)
    p = np.exp(_scores(q, k, segment_start.reshape(batch, time)) - lse[..., None])
    row_dot = (do * _heads(out, batch, time, n_head)).sum(axis=3, keepdims=True)
    ds = p * (do @ v.transpose(0, 1, 3, 2) - row_dot) * q.dtype.type(1 / math.sqrt(q.shape[3]))
    dq, dk, dv = ds @ k, ds.transpose(0, 1, 3, 2) @ q, p.transpose(0, 1, 3, 2) @ do
    dqkv[...] = np.concatenate([_rows(dq), _rows(dk), _rows(dv)], axis=1)


def attention_append(cache: Array, qkv: Array, positions: Array) -> None:
    """cache[0, b, positions[b, t]] = k[b, t];  cache[1, b, positions[b, t]] = v[b, t]."""
    _, batch, _, width = cache.shape
    for b, rows in enumerate(np.split(np.arange(len(qkv)), batch)):
        cache[0, b, positions[rows]] = qkv[rows, width : 2 * width]
        cache[1, b, positions[rows]] = qkv[rows, 2 * width :]


def attention_decode(
    out: Array, qkv: Array, cache: Array, positions: Array, *, n_head: float
) -> None:
    """Row (b, t) attends to the positions 0 .. positions[b, t] of the cache."""
    _, batch, _, width = cache.shape
    size = width // int(n_head)
    for n, position in enumerate(positions):
        b = n // (len(qkv) // batch)
        q = qkv[n, :width].reshape(int(n_head), size)
        k, v = (cache[part, b, : position + 1].reshape(-1, int(n_head), size) for part in (0, 1))
        scores = np.einsum("hd,shd->hs", q, k) * q.dtype.type(1 / math.sqrt(size))
        weights = np.exp(scores - scores.max(axis=1, keepdims=True))
        weights /= weights.sum(axis=1, keepdims=True)
        out[n] = np.einsum("hs,shd->hd", weights, v).ravel()
