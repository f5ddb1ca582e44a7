"""Whole runs of every engine against the numpy engine in float64: same weights, same batches, same numbers.

Past the second step, because that is where whatever an engine records is replayed. Trained parameters are never compared across
engines: the key bias has a zero gradient in exact arithmetic, and AdamW turns its rounding noise into full steps.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from guarded import ENGINES as OP_ENGINES
from guarded import THREADS, obtain
from model_cases import Tensors, train_config
from needs import require
from posttrainllm.config import TrainConfig, replace
from posttrainllm.control import batch_offsets, bias_corrections, learning_rate
from posttrainllm.engines.base import Batch, Engine, StepResult, StepScalars
from posttrainllm.training.engine_choice import (
    inference_engine,
    initial_parameters,
    training_engine,
)
from tolerances import (
    AUTOGRAD,
    CACHED_LOGITS,
    LOSS_TO_STEP_10,
    LOSS_TO_STEP_200,
    OVERFIT_LOSS,
    OVERFIT_STEPS,
    STEP_0_GRADIENTS,
    assert_close,
)

CPP = tuple(name for name in OP_ENGINES if name.startswith("cpp-"))
ENGINES = ("numpy", *CPP, *(("wasm",) if "wasm32" in OP_ENGINES else ()), "torch")
STEPS = 200

# The preset tiny with a fourth of its tokens a step: five runs of 200 steps have to take seconds.
CONFIG = train_config("tiny", data__batch_size=4, model__n_vocab=64, training__steps=STEPS)


def make(
    name: str, config: TrainConfig = CONFIG, *, threads: int = 1, dtype: Any = np.float32
) -> Engine:
    """An engine by the name it has in this file, with the initial weights of seed 1 loaded."""
    settings = engine_settings(name, threads)
    engine = training_engine(replace(config, settings), dtype=dtype)
    engine.load(initial_parameters(config.model, seed=1))
    return engine


def engine_settings(name: str, threads: int = 1) -> dict[str, Any]:
    """Settings that choose an engine; skips the test when it cannot run here."""
    if name == "torch":
        require("torch")
    else:
        obtain("wasm32" if name == "wasm" else name, pytest.skip)
    family, _, build = name.partition("-")
    return {"engine.name": family, "engine.cpp_build": build, "engine.threads": threads}


@functools.cache
def text(n_vocab: int) -> np.ndarray:
    """Ids that a model can learn something about: words of a small random language, half of them frequent."""
    random = np.random.default_rng(7)
    words = [random.integers(1, n_vocab, random.integers(2, 7)) for _ in range(40)]
    order = np.minimum(random.geometric(0.12, 4000), 40) - 1
    return np.concatenate([np.append(words[at], 0) for at in order]).astype(np.int32)


def batch_of(config: TrainConfig, step: int, rows: int = 0, first_row: int = 0) -> Batch:
    """The batch of a step, in the order that training has; ``rows`` from ``first_row`` on are a micro-batch."""
    ids, time = text(config.model.n_vocab), config.model.n_ctx
    rows = rows or config.data.batch_size
    starts = batch_offsets(1, step, rows, 0, len(ids) - time - 1, first_row=first_row)
    windows = np.stack([ids[start : start + time + 1] for start in starts])
    return Batch(windows[:, :-1].copy(), windows[:, 1:].copy())


def scalars_of(config: TrainConfig, step: int) -> StepScalars:
    """Learning rate and corrections of step ``step``, which counts from 1."""
    s, o = config.schedule, config.optimizer
    lr = learning_rate(
        step,
        config.training.steps,
        s.kind,
        s.learning_rate,
        s.warmup_steps,
        s.final_ratio,
        s.decay_fraction,
    )
    return StepScalars(lr, *bias_corrections(step, o.beta1, o.beta2))


def train(
    engine: Engine, steps: int, config: TrainConfig = CONFIG, micro: int = 1
) -> list[StepResult]:
    """Train from step 1 on, each step in ``micro`` micro-batches of the configured size."""
    for step in range(1, steps + 1):
        rows = config.data.batch_size
        for part in range(micro):
            batch = batch_of(config, step, rows, part * rows)
            engine.gradients(batch, inv_count=1 / (micro * batch.trained), first=part == 0)
        engine.update(scalars_of(config, step))
    return engine.results()


@functools.cache
def reference() -> np.ndarray:
    """The losses of the numpy engine in float64."""
    return np.array([result.loss for result in train(make("numpy", dtype=np.float64), STEPS)])


@pytest.fixture(params=ENGINES)
def name(request: pytest.FixtureRequest) -> Iterator[str]:
    """Every engine by name; the number of PyTorch's threads is the process's and is put back."""
    engine_settings(request.param)
    if request.param != "torch":
        yield request.param
        return
    torch = require("torch")
    before = torch.get_num_threads()
    yield request.param
    torch.set_num_threads(before)


# ---- curves -------------------------------------------------------------------------------------


def test_losses_of_200_steps_are_those_of_float64(name: str) -> None:
    wanted = reference()
    got = np.array([result.loss for result in train(make(name), STEPS)])
    drift = np.abs(got - wanted) / np.abs(wanted)
    assert drift[:10].max() <= LOSS_TO_STEP_10["native"]
    assert drift.max() <= LOSS_TO_STEP_200["native"]


@pytest.mark.parametrize(
    ("setting", "value"),
    {
        "model.activation": "gelu",
        "model.layer_norm_epsilon": 1.1e-5,
        "optimizer.beta1": 0.901,
        "optimizer.beta2": 0.951,
        "optimizer.eps": 1e-7,
        "optimizer.weight_decay": 0.101,
        "optimizer.clip_norm": 1.01,
        "schedule.learning_rate": 3.003e-3,
        "schedule.warmup_steps": 101,
        "schedule.final_ratio": 0.11,
    }.items(),
)
def test_the_limits_see_one_constant_that_is_a_little_off(setting: str, value: Any) -> None:
    """The proof of the proof: 200 steps apart by one constant leave the limits."""
    config = replace(CONFIG, {setting: value})
    assert config != CONFIG
    got = np.array([result.loss for result in train(make(CPP[0], config), STEPS, config)])
    assert (np.abs(got - reference()) / reference()).max() > LOSS_TO_STEP_200["native"]


def test_the_reference_learns() -> None:
    wanted = reference()
    assert abs(wanted[0] - np.log(64)) <= 0.05, "an untrained model guesses"
    assert wanted[-10:].mean() <= 0.6 * wanted[0], "a curve that does not move proves nothing"


def test_torch_in_float64_trains_like_numpy_in_float64() -> None:
    engine_settings("torch")
    got = np.array([result.loss for result in train(make("torch", dtype=np.float64), 30)])
    assert (np.abs(got - reference()[:30]) / reference()[:30]).max() <= AUTOGRAD


def test_first_gradients_are_those_of_float64(name: str) -> None:
    found: list[Tensors] = []
    for engine in (make(name), make("numpy", dtype=np.float64)):
        batch = batch_of(CONFIG, 1)
        engine.gradients(batch, inv_count=1 / batch.trained, first=True)
        found.append(engine.gradient_tensors())
    assert_close(*found, STEP_0_GRADIENTS["native"])


def test_same_seed_gives_the_same_bits(name: str) -> None:
    first, second = (train(make(name), 12) for _ in range(2))
    assert first == second


@pytest.mark.parametrize("build", CPP)
def test_losses_have_the_same_bits_for_any_number_of_threads(build: str) -> None:
    engine_settings(build)
    runs = [make(build, threads=threads) for threads in THREADS]
    losses = [train(engine, 12) for engine in runs]
    assert all(other == losses[0] for other in losses[1:])
    for engine in runs[1:]:
        for kind in ("params", "m", "v"):
            mine, first = getattr(engine.state(), kind), getattr(runs[0].state(), kind)
            assert all(mine[tensor].tobytes() == first[tensor].tobytes() for tensor in first)


def test_a_run_goes_on_from_its_state_with_the_same_bits(name: str) -> None:
    whole = train(make(name), 6)
    engine = make(name)
    train(engine, 3)
    state = engine.state()
    again = make(name)
    again.load(state.params, state.m, state.v)
    for step in range(4, 7):
        batch = batch_of(CONFIG, step)
        again.gradients(batch, inv_count=1 / batch.trained, first=True)
        again.update(scalars_of(CONFIG, step))
    assert again.results() == whole[3:]


# ---- what training is for -----------------------------------------------------------------------


def test_engine_learns_one_batch_by_heart(name: str) -> None:
    config = train_config(
        "tiny",
        model__n_embd=32,
        model__n_head=2,
        model__n_ctx=16,
        model__n_vocab=64,
        data__batch_size=2,
    )
    engine = make(name, config)
    batch = batch_of(config, 1)
    for step in range(1, OVERFIT_STEPS + 1):
        engine.gradients(batch, inv_count=1 / batch.trained, first=True)
        engine.update(StepScalars(3e-3, *bias_corrections(step, 0.9, 0.95)))
    losses = [result.loss for result in engine.results()]
    assert len(losses) == OVERFIT_STEPS
    assert losses[-1] < OVERFIT_LOSS
    assert engine.loss(batch) < OVERFIT_LOSS


def test_sixteen_rows_are_four_times_four(name: str) -> None:
    whole = replace(CONFIG, {"data.batch_size": 16})
    together = make(name, whole)
    parts = make(name)
    wanted = train(together, 10, whole)
    got = train(parts, 10, micro=4)
    for one, other in zip(got, wanted, strict=True):
        assert abs(one.loss - other.loss) <= LOSS_TO_STEP_10["native"] * other.loss
        assert abs(one.grad_norm - other.grad_norm) <= STEP_0_GRADIENTS["native"] * other.grad_norm


@pytest.mark.parametrize("bad", [np.inf, np.nan])
def test_a_gradient_that_is_not_finite_never_reaches_the_parameters(name: str, bad: float) -> None:
    engine = make(name)
    train(engine, 2)
    before = engine.state()
    for inv_count in (bad, 1 / 128):
        engine.gradients(batch_of(CONFIG, 3), inv_count=inv_count, first=True)
        engine.update(scalars_of(CONFIG, 3))
    first, second = engine.results()
    assert not first.finite
    assert not second.finite, "the flag stays set until new weights are loaded"
    after = engine.state()
    for kind in ("params", "m", "v"):
        for tensor, value in getattr(before, kind).items():
            assert value.tobytes() == getattr(after, kind)[tensor].tobytes(), f"{kind} {tensor}"
    engine.load(before.params, before.m, before.v)
    engine.gradients(batch_of(CONFIG, 3), inv_count=1 / 128, first=True)
    engine.update(scalars_of(CONFIG, 3))
    assert engine.results()[0].finite


# ---- inference ----------------------------------------------------------------------------------


def large_params(config: TrainConfig) -> Tensors:
    """Weights of a trained model's size: initial ones, ten times as large, make logits of size 1 to 10."""
    found = initial_parameters(config.model, seed=3)
    return {tensor: value * 10 if value.ndim > 1 else value for tensor, value in found.items()}


@pytest.mark.parametrize("prompt", [1, 5, 31])
def test_cached_logits_equal_uncached_ones(name: str, prompt: int) -> None:
    config = replace(CONFIG, engine_settings(name))
    engine = inference_engine(config.model, config.engine, batch=3, logits=True)
    engine.load(large_params(CONFIG))
    tokens = batch_of(CONFIG, 1, rows=3).tokens
    wanted = engine.logits(tokens)
    assert np.abs(wanted).max() >= 1
    got = [engine.prefill(tokens[:, :prompt])]
    got += [engine.decode(tokens[:, at]) for at in range(prompt, tokens.shape[1])]
    assert np.abs(np.stack(got, axis=1) - wanted[:, prompt - 1 :]).max() <= CACHED_LOGITS


def test_prompts_of_different_lengths_go_on_as_if_alone(name: str) -> None:
    config = replace(CONFIG, engine_settings(name))
    engine = inference_engine(config.model, config.engine, batch=3, logits=True)
    engine.load(large_params(CONFIG))
    tokens = batch_of(CONFIG, 1, rows=3).tokens
    lengths = np.array([2, 9, 5], np.int32)
    wanted = engine.logits(tokens)
    padded = np.where(np.arange(9) < lengths[:, None], tokens[:, :9], 1).astype(np.int32)
    got = engine.prefill(padded, lengths)
    for ahead in range(12):
        at = lengths + ahead
        assert np.abs(got - wanted[np.arange(3), at - 1]).max() <= CACHED_LOGITS
        got = engine.decode(tokens[np.arange(3), at])


def test_shorter_and_fewer_rows_give_the_same_logits(name: str) -> None:
    config = replace(CONFIG, engine_settings(name))
    engine = inference_engine(config.model, config.engine, batch=3, logits=True)
    engine.load(large_params(CONFIG))
    tokens = batch_of(CONFIG, 1, rows=3).tokens
    wanted = engine.logits(tokens)
    for rows, time in ((1, 32), (2, 7), (3, 1), (1, 1)):
        got = engine.logits(tokens[:rows, :time].copy())
        assert np.abs(got - wanted[:rows, :time]).max() <= CACHED_LOGITS


def test_loss_without_gradients_is_the_loss_of_the_step(name: str) -> None:
    engine = make(name)
    batch = batch_of(CONFIG, 1)
    engine.gradients(batch, inv_count=1 / batch.trained, first=True)
    alone = engine.loss(batch)
    engine.gradients(batch, inv_count=1 / batch.trained, first=True)
    engine.update(scalars_of(CONFIG, 1))
    assert abs(engine.results()[0].loss - alone) <= LOSS_TO_STEP_10["native"] * alone
