"""The control plane's definition: published vectors, statistics, end points, refusals.

The C++ twin is held to these functions in ``test_control_cpp.py``.
"""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from posttrainllm import control
from posttrainllm.control import (
    Schedule,
    batch_offsets,
    bias_corrections,
    initial_values,
    learning_rate,
    penalize,
    philox,
    sample,
    stream_id,
    token_index,
)
from posttrainllm.errors import ConfigError, CorpusError, NonFiniteError

# -- random numbers ------------------------------------------------------------------------------

# Random123's kat_vectors, philox4x32 with 10 rounds: counter, key, result.
VECTORS = [
    ("00000000 00000000 00000000 00000000", "00000000 00000000",
     "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
    ("ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff",
     "408f276d 41c83b0e a20bc7c6 6d5451fd"),
    ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0",
     "d16cfe09 94fdcceb 5001e420 24126ea1"),
]  # fmt: skip


def words(text: str) -> list[int]:
    return [int(word, 16) for word in text.split()]


@pytest.mark.parametrize(("counter", "key", "expected"), VECTORS)
def test_philox_gives_the_published_vectors(counter: str, key: str, expected: str) -> None:
    assert philox(words(key), words(counter)).tolist() == words(expected)


def test_philox_of_arrays_is_philox_of_each_entry() -> None:
    counters = np.random.default_rng(0).integers(0, 2**32, (4, 3, 5), dtype=np.uint64)
    together = philox((7, 9), list(counters))
    assert together.shape == (4, 3, 5)
    assert together.dtype == np.uint32
    for at in np.ndindex(3, 5):
        alone = philox((7, 9), [int(counter[at]) for counter in counters])
        assert together[(slice(None), *at)].tolist() == alone.tolist()


def test_stream_id_is_fnv1a() -> None:
    # the empty string, "a" and "foobar" of the reference implementation
    assert stream_id("") == 0xCBF29CE484222325
    assert stream_id("a") == 0xAF63DC4C8601EC8C
    assert stream_id("foobar") == 0x85944171F73967E8
    assert stream_id("é") != stream_id("e")


# -- initial values ------------------------------------------------------------------------------


GOLDEN_NORMAL = [
    "-0x1.0a756e0000000p-10",
    "0x1.022df40000000p-9",
    "0x1.8ba4ca0000000p-6",
    "0x1.c838e20000000p-9",
]
GOLDEN_RESIDUAL = ["0x1.d202fc0000000p-9", "-0x1.18c4720000000p-7"]


def test_initial_values_do_not_change_between_versions() -> None:
    # Runs are repeated from their seed: a change of these bits breaks every recorded run.
    got = initial_values(1, "wte.weight", 4, "normal", 3)
    assert [float(value).hex() for value in got] == GOLDEN_NORMAL
    got = initial_values(2**53 - 1, "h.2.mlp.c_proj.weight", 2, "residual", 3, start=2**40)
    assert [float(value).hex() for value in got] == GOLDEN_RESIDUAL


def test_normal_values_have_the_moments_of_a_normal_distribution() -> None:
    n = 400_000
    x = initial_values(1, "wte.weight", n, "normal", 3).astype(np.float64) / 0.02
    assert x.dtype == np.float64
    assert abs(x.mean()) <= 5 / math.sqrt(n)
    assert abs(x.std() - 1) <= 5 / math.sqrt(2 * n)
    assert abs((x**3).mean()) <= 5 * math.sqrt(15 / n)
    # a sum of sixteen uniforms has an excess kurtosis of -1.2 / 16
    assert abs((x**4).mean() - (3 - 0.075)) <= 5 * math.sqrt(96 / n)
    assert np.abs(x).max() <= 6.93
    for limit, share in ((1, 0.6827), (2, 0.9545), (3, 0.9973)):
        assert abs((np.abs(x) < limit).mean() - share) <= 0.004


def test_neighbours_seeds_and_names_are_uncorrelated() -> None:
    n = 100_000
    x = initial_values(1, "wte.weight", n, "normal", 3)
    others = [
        np.roll(x, 1),
        initial_values(2, "wte.weight", n, "normal", 3),
        initial_values(1 << 32, "wte.weight", n, "normal", 3),
        initial_values(1, "wpe.weight", n, "normal", 3),
    ]
    for other in others:
        assert abs(np.corrcoef(x, other)[0, 1]) <= 5 / math.sqrt(n)


def test_residual_values_are_normal_values_scaled_down() -> None:
    normal = initial_values(3, "x", 1000, "normal", 8).astype(np.float64)
    residual = initial_values(3, "x", 1000, "residual", 8).astype(np.float64)
    np.testing.assert_allclose(residual, normal / 4, rtol=3e-7)


def test_zeros_and_ones_are_exact() -> None:
    assert initial_values(1, "x", 3, "zeros", 1).tolist() == [0, 0, 0]
    assert initial_values(1, "x", 3, "ones", 1).tolist() == [1, 1, 1]
    assert initial_values(1, "x", 0, "normal", 1).shape == (0,)


WHOLE = initial_values(5, "y", 70_300, "normal", 2)


@given(st.integers(0, 70_000), st.integers(0, 300))
def test_any_range_of_initial_values_can_be_drawn_alone(start: int, count: int) -> None:
    part = initial_values(5, "y", count, "normal", 2, start=start)
    assert part.dtype == np.float32
    assert (part == WHOLE[start : start + count]).all()


# -- data order ----------------------------------------------------------------------------------


def test_offsets_are_uniform_in_their_range() -> None:
    low, high, rows, steps = 100, 150, 64, 400
    drawn = np.concatenate([batch_offsets(1, s, rows, low, high) for s in range(steps)])
    assert drawn.dtype == np.int64
    assert drawn.min() == low
    assert drawn.max() == high - 1
    counts = np.bincount(drawn - low, minlength=high - low)
    expected = rows * steps / (high - low)
    chi_square = ((counts - expected) ** 2 / expected).sum()
    assert 20 <= chi_square <= 90  # 49 degrees of freedom: 0.0001 on either side


@given(st.integers(0, 2**53 - 1), st.integers(0, 10**8), st.integers(0, 40), st.integers(1, 9))
def test_offset_depends_on_seed_step_and_row_alone(
    seed: int, step: int, first: int, rows: int
) -> None:
    whole = batch_offsets(seed, step, 50, 0, 10**12)
    assert (batch_offsets(seed, step, rows, 0, 10**12, first) == whole[first : first + rows]).all()
    assert (batch_offsets(seed, step + 1, 50, 0, 10**12) != whole).all()
    assert (batch_offsets(seed + 1, step, 50, 0, 10**12) != whole).all()


def test_offsets_of_an_empty_range_are_refused() -> None:
    with pytest.raises(CorpusError, match="no window fits"):
        batch_offsets(1, 1, 4, 10, 10)


@given(arrays.arrays(np.int32, st.integers(0, 60), elements=st.integers(0, 9)))
def test_token_index_lists_every_position_once_under_its_row(ids: Any) -> None:
    rows, starts, order = token_index(ids)
    n, used = len(ids), len(set(ids.tolist()))
    assert {rows.dtype, starts.dtype, order.dtype} == {np.dtype(np.int32)}
    assert rows.shape == starts.shape == order.shape == (n,)
    assert rows[:used].tolist() == sorted(set(ids.tolist()))
    assert (rows[used:] == -1).all()
    assert (starts[used:] == n).all()
    assert sorted(order.tolist()) == list(range(n))
    for j in range(used):
        end = starts[j + 1] if j + 1 < n else n
        positions = order[starts[j] : end].tolist()
        assert positions == np.flatnonzero(ids == rows[j]).tolist()


# -- schedule ------------------------------------------------------------------------------------


def rate(
    step: int, kind: Schedule = "cosine", steps: int = 1000, warmup: int = 100, ratio: float = 0.1
) -> float:
    return learning_rate(step, steps, kind, 3e-3, warmup, ratio, 0.2)


@pytest.mark.parametrize("kind", ["cosine", "constant", "wsd"])
def test_warmup_is_linear_and_ends_at_the_peak(kind: Schedule) -> None:
    assert rate(1, kind) == 3e-3 / 100
    assert rate(50, kind) == 3e-3 / 2
    assert rate(100, kind) == 3e-3
    assert rate(1, kind, warmup=0) == 3e-3
    assert rate(1, kind, warmup=1) == 3e-3
    assert rate(2, kind, steps=2, warmup=2) == 3e-3


@pytest.mark.parametrize("ratio", [0.0, 0.1, 0.3, 1.0])
def test_decay_ends_exactly_at_the_final_rate_and_stays_there(ratio: float) -> None:
    for kind in ("cosine", "wsd"):
        assert rate(1000, kind, ratio=ratio) == ratio * 3e-3
        assert rate(5000, kind, ratio=ratio) == ratio * 3e-3
    assert rate(1000, "constant", ratio=ratio) == 3e-3


def test_cosine_is_half_a_period_from_peak_to_final() -> None:
    for step in range(100, 1001, 25):
        p = (step - 100) / 900
        expected = 3e-4 + (3e-3 - 3e-4) * 0.5 * (1 + math.cos(math.pi * p))
        assert abs(rate(step) - expected) <= 1e-15 * 3e-3
    rates = [rate(step) for step in range(100, 1001)]
    assert rates == sorted(rates, reverse=True)


def test_wsd_is_flat_and_then_linear() -> None:
    assert rate(800, "wsd") == 3e-3
    assert rate(900, "wsd") == pytest.approx((3e-3 + 3e-4) / 2, rel=1e-15)
    # a decay that would begin inside the warm-up begins at its end
    assert learning_rate(500, 1000, "wsd", 1.0, 500, 0.0, 0.9) == 1.0
    assert learning_rate(750, 1000, "wsd", 1.0, 500, 0.0, 0.9) == 0.5
    assert learning_rate(999, 1000, "wsd", 1.0, 10, 0.1, 0.0) == 1.0  # no decay at all


def test_schedule_of_a_single_step_is_the_peak() -> None:
    assert learning_rate(1, 1, "cosine", 0.5, 0, 0.1, 0.2) == 0.5


def test_unknown_schedule_is_refused() -> None:
    with pytest.raises(ConfigError, match="got 'linear'"):
        rate(500, "linear")  # type: ignore[arg-type]


def test_sine_and_exponential_are_exact_to_rounding() -> None:
    for x in np.linspace(0, math.pi / 2, 10_001).tolist():
        assert abs(control._sine(x) - math.sin(x)) <= 5e-16
    x = np.concatenate([-np.geomspace(1e-20, 708, 10_000), [0.0, -708.0]])
    ours, theirs = control._exp(x), np.array([math.exp(v) for v in x.tolist()])
    assert np.abs(ours / theirs - 1).max() <= 5e-16
    assert control._exp(np.array([-708.1, -1e300, -np.inf])).tolist() == [0, 0, 0]


@pytest.mark.parametrize("step", [1, 2, 3, 10, 999, 1000, 123_456, 10**8])
def test_bias_corrections_are_one_minus_a_power(step: int) -> None:
    for got, beta in zip(bias_corrections(step, 0.9, 0.999), (0.9, 0.999), strict=True):
        assert got == pytest.approx(1 - beta**step, rel=1e-13)
    assert bias_corrections(step, 0.0, 0.0) == (1.0, 1.0)


def test_first_bias_correction_is_one_minus_beta() -> None:
    assert bias_corrections(1, 0.9, 0.95) == (1 - 0.9, 1 - 0.95)


# -- sampling ------------------------------------------------------------------------------------

LOGITS = np.array([1.0, 3.0, -2.0, 3.0, 0.5, 2.0, -30.0], dtype=np.float32)


def probabilities(temperature: float, keep: list[int]) -> dict[int, float]:
    """The distribution by numpy's own functions, over the tokens that are kept."""
    weights = {i: math.exp((float(LOGITS[i]) - 3.0) / temperature) for i in keep}
    total = sum(weights.values())
    return {i: weight / total for i, weight in weights.items()}


def test_temperature_zero_takes_the_largest_logit_and_the_lowest_index_of_equals() -> None:
    assert sample(LOGITS, 1, 1, 0.0, 0, 1.0) == (1, 1.0)
    assert sample(np.array([-0.0, 0.0], np.float32), 1, 1, 0.0, 0, 1.0) == (0, 1.0)


@pytest.mark.parametrize(
    ("temperature", "top_k", "top_p", "keep"),
    [
        (1.0, 0, 1.0, [0, 1, 2, 3, 4, 5, 6]),
        (0.7, 7, 1.0, [0, 1, 2, 3, 4, 5, 6]),
        (2.0, 99, 1.0, [0, 1, 2, 3, 4, 5, 6]),
        (1.0, 3, 1.0, [1, 3, 5]),
        (1.0, 2, 1.0, [1, 3]),
        (1.0, 1, 1.0, [1]),  # the lowest index of two equal logits
        (1.0, 0, 0.9, [1, 3, 5]),
        (1.0, 0, 0.5, [1, 3]),
        (1.0, 0, 1e-9, [1]),
        (1.0, 0, 5e-324, [1]),
        (1.0, 3, 0.5, [1, 3]),  # of the three: 0.42, 0.42, 0.16
        (1.0, 2, 0.9, [1, 3]),
        (1e6, 0, 1.0, [0, 1, 2, 3, 4, 5, 6]),
    ],
)
def test_samples_follow_the_distribution(
    temperature: float, top_k: int, top_p: float, keep: list[int]
) -> None:
    n = 4000
    expected = probabilities(temperature, keep)
    draws = [sample(LOGITS, 7, i, temperature, top_k, top_p) for i in range(n)]
    for token, probability in draws:
        assert probability == pytest.approx(expected[token], rel=1e-14)
    counts = Counter(token for token, _ in draws)
    bins = [i for i in keep if n * expected[i] >= 5]
    chi_square = sum((counts[i] - n * expected[i]) ** 2 / (n * expected[i]) for i in bins)
    # the mean is the number of bins - 1 (at most 6), and 30 is exceeded in one of 25,000 cases
    assert chi_square <= 30


def test_sample_depends_on_seed_and_position_alone() -> None:
    draws = [[sample(LOGITS, seed, i, 1.5, 0, 1.0) for i in range(50)] for seed in (1, 1, 2)]
    assert draws[0] == draws[1]
    assert draws[0] != draws[2]


@pytest.mark.parametrize("temperature", [1e-300, 5e-324, 1e-30])
def test_tiny_temperature_is_nearly_greedy(temperature: float) -> None:
    logits = LOGITS.copy()
    logits[3] = 2.9
    for position in range(20):
        assert sample(logits, 1, position, temperature, 0, 1.0) == (1, 1.0)


def test_vocabulary_of_one_has_one_answer() -> None:
    one = np.array([-5.0], np.float32)
    for settings in ((0.0, 0, 1.0), (1.0, 0, 1.0), (1.0, 1, 0.5), (1e-9, 5, 0.1)):
        assert sample(one, 1, 1, *settings) == (0, 1.0)


def test_extreme_logits_are_no_problem() -> None:
    largest = float(np.finfo(np.float32).max)
    logits = np.array([-largest, largest, 0.0], np.float32)
    assert sample(logits, 1, 1, 1.0, 0, 1.0) == (1, 1.0)
    assert sample(logits, 1, 1, 1.0, 3, 0.9) == (1, 1.0)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_non_finite_logits_are_refused_by_index(value: float, temperature: float) -> None:
    logits = LOGITS.copy()
    logits[4] = value
    with pytest.raises(NonFiniteError, match=f"logit 4 of 7 is {value}"):
        sample(logits, 1, 1, temperature, 0, 1.0)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ((-0.1, 0, 1.0), "temperature must be a number of at least 0, got -0.1"),
        ((math.nan, 0, 1.0), "temperature must be"),
        ((math.inf, 0, 1.0), "temperature must be"),
        ((1.0, -1, 1.0), "top_k must be at least 0, got -1"),
        ((1.0, 0, 0.0), "top_p must be above 0 and at most 1, got 0.0"),
        ((1.0, 0, 1.5), "top_p must be"),
        ((1.0, 0, math.nan), "top_p must be"),
    ],
)
def test_settings_out_of_range_are_refused(
    settings: tuple[float, int, float], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        sample(LOGITS, 1, 1, *settings)


def test_logits_of_another_shape_are_refused() -> None:
    for shape in ((0,), (2, 3)):
        with pytest.raises(ConfigError, match="one row of numbers"):
            sample(np.zeros(shape, np.float32), 1, 1, 1.0, 0, 1.0)


def test_a_repetition_penalty_divides_positive_logits_and_multiplies_the_others_once() -> None:
    logits = np.array([2.0, -2.0, 0.0, 1.0], np.float32)
    recent = np.array([1, 0, 0, 2, 0], np.int32)
    assert penalize(logits, recent, 2.0).tolist() == [1.0, -4.0, 0.0, 1.0]
    assert logits.tolist() == [2.0, -2.0, 0.0, 1.0]  # left as they were
    assert penalize(logits, recent, 1.0).tobytes() == logits.tobytes()
    assert penalize(logits, recent[:0], 9.0).tobytes() == logits.tobytes()


@pytest.mark.parametrize("penalty", [0.99, 0.0, -1.0, math.nan, math.inf])
def test_a_repetition_penalty_out_of_range_is_refused(penalty: float) -> None:
    with pytest.raises(ConfigError, match="repetition_penalty must be a number of at least 1"):
        penalize(LOGITS, np.zeros(1, np.int32), penalty)
