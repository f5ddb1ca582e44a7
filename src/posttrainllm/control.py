"""The control plane: every number that decides a run and is not computed by an engine.

Random numbers, initial values, the order of the data, the learning rate of a step, the choice of a
token. These functions are the definition; ``kernels/cpp/control.cpp`` is their twin for the native
engines, the browser and node, and the two agree to the last bit. That is why this module

- uses + - * / and shifts alone: exp, cos and log differ between numpy, V8 and C libraries;
- adds in order (``np.cumsum``), never by ``np.sum``, which adds in pairs;
- draws everything from one counter-based generator, so that no value depends on an earlier one.

What it is not: a home of defaults. The settings come from ``config.py``.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Final, Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

from posttrainllm.errors import ConfigError, CorpusError, NonFiniteError
from posttrainllm.wording import worded

Init = Literal["normal", "residual", "zeros", "ones"]
Schedule = Literal["cosine", "constant", "wsd"]

INIT_STD: Final = 0.02
"""Standard deviation of initial weights (GPT-2's)."""

_MASK32: Final = 0xFFFFFFFF
_MASK64: Final = 0xFFFFFFFFFFFFFFFF


# -- random numbers ------------------------------------------------------------------------------


def philox(key: Sequence[int], counter: Sequence[ArrayLike]) -> NDArray[np.uint32]:
    """Encrypt counters with Philox4x32-10: four random words for each.

    Shapes: key (2,), counter four arrays (or numbers) that broadcast to one shape S; result (4, *S).
    Source: Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3" (Random123).
    """
    words = np.broadcast_arrays(*(np.asarray(word, dtype=np.uint64) for word in counter))
    c0, c1, c2, c3 = words
    k0, k1 = key[0] & _MASK32, key[1] & _MASK32
    mask, half = np.uint64(_MASK32), np.uint64(32)
    for _ in range(10):
        p0 = c0 * np.uint64(0xD2511F53)  # 32 x 32 -> 64 bits, exact
        p1 = c2 * np.uint64(0xCD9E8D57)
        c0, c2 = (p1 >> half) ^ c1 ^ np.uint64(k0), (p0 >> half) ^ c3 ^ np.uint64(k1)
        c1, c3 = p1 & mask, p0 & mask
        k0, k1 = (k0 + 0x9E3779B9) & _MASK32, (k1 + 0xBB67AE85) & _MASK32
    return np.stack([c0, c1, c2, c3]).astype(np.uint32)


def stream_id(name: str) -> int:
    """Number a stream of random numbers by its name: FNV-1a, 64 bits, over the UTF-8 bytes."""
    value = 0xCBF29CE484222325
    for byte in name.encode("utf-8"):
        value = ((value ^ byte) * 0x100000001B3) & _MASK64
    return value


def random_words(seed: int, stream: int, index: ArrayLike) -> NDArray[np.uint32]:
    """Return the four words at each index of a stream.

    The key is the seed, the counter is (index, stream), low word first, each of 64 bits. So
    streams never overlap, and any word can be had without those before it.

    Shapes: index S, of uint64; result (4, *S).
    """
    at = np.asarray(index, dtype=np.uint64)
    low, high = at & np.uint64(_MASK32), at >> np.uint64(32)
    key = (seed & _MASK32, (seed >> 32) & _MASK32)
    return philox(key, (low, high, stream & _MASK32, (stream >> 32) & _MASK32))


def _random_u64(seed: int, stream: int, index: ArrayLike) -> NDArray[np.uint64]:
    words = random_words(seed, stream, index).astype(np.uint64)
    joined: NDArray[np.uint64] = words[0] | (words[1] << np.uint64(32))
    return joined


# -- initial values ------------------------------------------------------------------------------

# A sum of sixteen uniform integers of 16 bits: mean 16 * 65535 / 2, variance 16 * (65536^2 - 1) / 12.
_SUM_MEAN: Final = 524280
_SUM_STD: Final = 75674.45447441297
_CHUNK: Final = 1 << 15  # elements a pass: the intermediate arrays stay in the cache


def initial_values(
    seed: int, name: str, count: int, kind: Init, n_layer: int, start: int = 0
) -> NDArray[np.float32]:
    """Draw the first values of a parameter; they depend on seed, name and element index alone.

    ``kind`` is "normal" (mean 0, std 0.02), "residual" (std 0.02 / sqrt(2 L), for the projections
    that add to the residual stream), "zeros" or "ones". ``start`` is the index of the first element
    in the row-major tensor, so that a part can be drawn without the rest.

    A normal value is a sum of sixteen uniform 16-bit integers, minus its mean, times one float32:
    the integer is exact and the product rounds once, so no library function can make a difference.
    It lies within 6.93 std; its excess kurtosis is -0.075.

    Shapes: result (count,).
    """
    if kind in ("zeros", "ones"):
        return np.full(count, kind == "ones", dtype=np.float32)
    std = INIT_STD if kind == "normal" else INIT_STD / math.sqrt(2.0 * n_layer)
    scale = np.float32(std / _SUM_STD)
    stream = stream_id(name)
    out = np.empty(count, dtype=np.float32)
    for first in range(0, count, _CHUNK):
        last = min(first + _CHUNK, count)
        element = np.arange(start + first, start + last, dtype=np.uint64)
        blocks = np.stack([element * np.uint64(2), element * np.uint64(2) + np.uint64(1)])
        words = random_words(seed, stream, blocks)  # (4, 2, n)
        halves = (words & np.uint32(0xFFFF)) + (words >> np.uint32(16))
        total = halves.astype(np.int32).sum(axis=(0, 1), dtype=np.int32)  # integers: any order
        out[first:last] = (total - np.int32(_SUM_MEAN)).astype(np.float32) * scale
    return out


# -- data order ----------------------------------------------------------------------------------


def batch_offsets(
    seed: int, step: int, rows: int, low: int, high: int, first_row: int = 0
) -> NDArray[np.int64]:
    """Choose where each row of a step's batch starts in the text: uniform in [low, high).

    Row r of step s depends on (seed, s, r) and on nothing else, so a resumed run, another number of
    ranks and another split into micro-batches (row ranges) all see the same windows.

    Shapes: result (rows,), for rows first_row .. first_row + rows.
    Raises: CorpusError when [low, high) is empty.
    """
    if low >= high:
        raise CorpusError(
            f"no window fits into the text: its starts would lie in [{low}, {high})",
            worded("use a larger text or a smaller {model.n_ctx}"),
        )
    row = np.arange(first_row, first_row + rows, dtype=np.uint64)
    drawn = _random_u64(seed, (stream_id("batch") + step) & _MASK64, row)
    return (drawn % np.uint64(high - low)).astype(np.int64) + np.int64(low)


def token_index(
    ids: NDArray[np.int32],
) -> tuple[NDArray[np.int32], NDArray[np.int32], NDArray[np.int32]]:
    """List which positions use which row of an embedding table, for its gradient.

    ``rows``    the ids that occur, ascending, then -1
    ``starts``  where the positions of rows[j] begin in ``order``, then N: they end at starts[j + 1],
                and for j = N - 1 at N
    ``order``   all positions, by id and then ascending, so that each row is summed in text order

    Shapes: ids (N,), none negative; rows, starts, order (N,).
    """
    n = len(ids)
    order = np.argsort(ids, kind="stable").astype(np.int32)
    ordered = ids[order]
    begins = np.flatnonzero(np.diff(ordered, prepend=-1))
    rows, starts = np.full(n, -1, dtype=np.int32), np.full(n, n, dtype=np.int32)
    rows[: len(begins)] = ordered[begins]
    starts[: len(begins)] = begins
    return rows, starts, order


# -- schedule ------------------------------------------------------------------------------------

_HALF_PI: Final = 1.5707963267948966
# Taylor series, the highest power first. What is left out is below 3e-16 at pi / 2 (sin: x^21 / 21!)
# and below 5e-18 at ln 2 / 2 (exp: x^14 / 14!).
_SIN: Final = tuple((-1.0) ** k / math.factorial(2 * k + 1) for k in range(9, -1, -1))
_EXP: Final = tuple(1.0 / math.factorial(k) for k in range(13, -1, -1))


def _sine(x: float) -> float:
    """sin(x) for x in [0, pi / 2], within 5e-16."""
    square, value = x * x, 0.0
    for coefficient in _SIN:
        value = value * square + coefficient
    return x * value


def learning_rate(
    step: int,
    steps: int,
    kind: Schedule,
    peak: float,
    warmup: int,
    final_ratio: float,
    decay_fraction: float,
) -> float:
    """Return the learning rate of a step. Steps are counted from 1; W is max(warmup, 1).

    Up to W    peak * step / W: the first step is peak / W, step W is peak
    cosine     from peak at W to final = final_ratio * peak at the last step, half a period:
               final + (peak - final) * cos(pi / 2 * p)^2 with p = (step - W) / (steps - W)
    constant   peak
    wsd        peak up to step S = max(W, steps - floor(decay_fraction * steps)), then linearly
               to final at the last step

    Steps after the last one keep its rate.
    """
    ramp = max(warmup, 1)
    step = min(step, max(steps, 1))
    if step <= ramp:
        return peak * float(step) / float(ramp)
    if kind == "constant":
        return peak
    final = final_ratio * peak
    if kind == "cosine":
        left = float(steps - step) / float(steps - ramp)  # 1 - p, so that the end is exact
        share = _sine(_HALF_PI * left)
        return final + (peak - final) * (share * share)
    if kind == "wsd":
        turn = max(ramp, steps - int(decay_fraction * float(steps)))
        if step <= turn:
            return peak
        return final + (peak - final) * (float(steps - step) / float(steps - turn))
    raise ConfigError(f"schedule.kind must be cosine, constant or wsd, got {kind!r}")


def bias_corrections(step: int, beta1: float, beta2: float) -> tuple[float, float]:
    """Return 1 - beta1^step and 1 - beta2^step, which AdamW divides its moments by.

    Source: Kingma and Ba 2015, section 3; the power is by repeated squaring.
    """
    return 1.0 - _power(beta1, step), 1.0 - _power(beta2, step)


def _power(base: float, exponent: int) -> float:
    value = 1.0
    while exponent:
        if exponent & 1:
            value = value * base
        base = base * base
        exponent >>= 1
    return value


# -- sampling ------------------------------------------------------------------------------------

_LOG2_E: Final = 1.4426950408889634
_LN2_HIGH: Final = 0.6931471803691238  # 32 bits, so that n * _LN2_HIGH is exact
_LN2_LOW: Final = 1.9082149292705877e-10
_EXP_LOWEST: Final = -708.0  # below, the result would leave the normal range and counts as 0


def _exp(x: NDArray[np.float64]) -> NDArray[np.float64]:
    """exp(x) for x <= 0, within 3e-16 relative: 2^n * exp(r) with x = n ln 2 + r.

    r lies within ln 2 / 2 of zero, where the Taylor series is exact to rounding; the power of two
    is made of its bits.
    """
    tiny = x < _EXP_LOWEST
    x = np.where(tiny, 0.0, x)
    n = (x * _LOG2_E - 0.5).astype(np.int64)  # rounds towards zero: the nearest for x <= 0
    r = (x - n * _LN2_HIGH) - n * _LN2_LOW
    value = np.zeros_like(r)
    for coefficient in _EXP:
        value = value * r + coefficient
    power = ((n + 1023) << 52).view(np.float64)
    return np.where(tiny, 0.0, value * power)


def sample(
    logits: NDArray[np.float32],
    seed: int,
    position: int,
    temperature: float,
    top_k: int,
    top_p: float,
) -> tuple[int, float]:
    """Choose the next token; return it and its probability among those it was chosen from.

    ``temperature`` divides the logits; 0 takes the largest one, with probability 1. ``top_k`` keeps
    the k largest logits (0: all). ``top_p`` then keeps the fewest largest ones that hold at least
    this share of the probability (1: all). Among equal logits the lowest index comes first.
    The random number depends on (seed, position) alone.

    Shapes: logits (V,), rounded to float32 when they are not.
    Raises: NonFiniteError for a logit that is not a number; ConfigError for settings out of range.
    """
    _check_sampling(temperature, top_k, top_p)
    logits = np.asarray(logits, dtype=np.float32)
    if logits.ndim != 1 or logits.size == 0:
        raise ConfigError(f"logits must be one row of numbers, got the shape {logits.shape}")
    if not np.isfinite(logits).all():
        at = int(np.flatnonzero(~np.isfinite(logits))[0])
        raise NonFiniteError(
            f"cannot choose a token: logit {at} of {logits.size} is {logits[at]}",
            "the model has diverged; go back to an earlier checkpoint or lower the learning rate",
        )
    if temperature == 0:
        return int(np.argmax(logits)), 1.0
    with np.errstate(over="ignore"):  # a tiny temperature sends all but the largest to -inf
        weights = _exp((logits.astype(np.float64) - float(logits.max())) / temperature)
    weights = _keep_largest(weights, logits, top_k, top_p)
    sums = np.cumsum(weights)
    total = float(sums[-1])
    # 53 random bits: uniform in [0, 1)
    drawn = int(_random_u64(seed, stream_id("sample"), position)) >> 11
    target = float(drawn) * 2.0**-53 * total
    token = int(np.searchsorted(sums, target, side="right"))
    if token == len(sums):  # the product was rounded up to the total
        token = int(np.flatnonzero(weights)[-1])
    return token, float(weights[token]) / total


def penalize(
    logits: NDArray[np.float32], recent: NDArray[np.int32], penalty: float
) -> NDArray[np.float32]:
    """Return logits in which the tokens of ``recent`` are less likely: positive ones / penalty, others * penalty.

    A token that stands there several times is penalized once. Computed in float64 and rounded once.

    Shapes: logits (V,); recent (n,), ids in 0 .. V - 1, in any order; returned (V,).
    Raises: ConfigError for a penalty below 1 or not finite.
    Source: Keskar et al. 2019, "CTRL", section 4.1.
    """
    if not (math.isfinite(penalty) and penalty >= 1):
        raise ConfigError(
            f"repetition_penalty must be a number of at least 1, got {penalty}", "1 is no penalty"
        )
    changed = np.array(logits, dtype=np.float32)
    before = changed[recent].astype(np.float64)
    with np.errstate(over="ignore"):  # to -inf, which ``sample`` refuses
        changed[recent] = np.where(before > 0, before / penalty, before * penalty)
    return changed


def _keep_largest(
    weights: NDArray[np.float64], logits: NDArray[np.float32], top_k: int, top_p: float
) -> NDArray[np.float64]:
    """Set the weights that top_k and top_p exclude to zero."""
    size = len(weights)
    count = size if top_k == 0 else min(top_k, size)
    if count == size and top_p >= 1.0:
        return weights
    order = np.argsort(-logits, kind="stable")
    kept = _only(weights, order[:count])
    if top_p >= 1.0:
        return kept
    threshold = top_p * float(np.cumsum(kept)[-1])
    enough = np.flatnonzero(np.cumsum(weights[order[:count]]) >= threshold)
    return _only(weights, order[: enough[0] + 1]) if len(enough) else kept


def _only(weights: NDArray[np.float64], indices: NDArray[Any]) -> NDArray[np.float64]:
    kept = np.zeros_like(weights)
    kept[indices] = weights[indices]
    return kept


def _check_sampling(temperature: float, top_k: int, top_p: float) -> None:
    if not (math.isfinite(temperature) and temperature >= 0):
        raise ConfigError(
            f"temperature must be a number of at least 0, got {temperature}",
            "0 always takes the likeliest token, 1 is the model's own distribution",
        )
    if top_k < 0:
        raise ConfigError(f"top_k must be at least 0, got {top_k}", "0 keeps all tokens")
    if not 0 < top_p <= 1:
        raise ConfigError(f"top_p must be above 0 and at most 1, got {top_p}", "1 keeps all tokens")
