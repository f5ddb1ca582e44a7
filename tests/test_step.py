"""The whole training step in float64: its gradients against finite differences and autograd, its update against AdamW from the paper."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from model_cases import VARIANTS, Tensors, model, random_batch, random_params
from needs import require
from posttrainllm.config import GPTConfig, OptimizerConfig
from posttrainllm.engines.base import Batch, StepScalars
from posttrainllm.engines.numpy_engine import NumpyEngine
from posttrainllm.model import logits_program, training_programs
from tolerances import ADAMW, AUTOGRAD, FINITE_DIFFERENCES, assert_close

BATCH = 3
CONFIGS = [pytest.param(config, id=name) for name, config in VARIANTS.items()]


def engine_of(
    config: GPTConfig, optimizer: OptimizerConfig | None = None, **dims: int
) -> NumpyEngine:
    """The numpy engine in float64 with large random weights, in float64 as well; ``dims`` changes the plan's."""
    programs, numbers = training_programs(config, optimizer or OptimizerConfig(), BATCH)
    programs["logits"], numbers["logits"] = logits_program(config), numbers["loss"]
    numbers = {name: {**given, **dims} for name, given in numbers.items()}
    engine = NumpyEngine(programs, numbers, dtype=np.float64)
    for name, values in random_params(engine).items():
        engine.write(engine.plan.tensor("param", name), values)
    return engine


def tensors(engine: NumpyEngine, kind: str) -> Tensors:
    """All tensors of an arena, in full precision."""
    return {name: engine.read(engine.plan.tensor(kind, name)) for name in engine.plan.layout}


def gradients(engine: NumpyEngine, *batches: Batch) -> Tensors:
    """The gradients of the mean loss over all batches together."""
    trained = sum(batch.trained for batch in batches)
    for index, batch in enumerate(batches):
        engine.gradients(batch, inv_count=1 / trained, first=index == 0)
    return tensors(engine, "grad")


# ---- gradients ----------------------------------------------------------------------------------


@pytest.mark.parametrize("config", CONFIGS)
def test_gradients_of_the_step_agree_with_finite_differences(config: GPTConfig) -> None:
    engine = engine_of(config)
    batch = random_batch(config, BATCH, ignored=0.2)
    found = gradients(engine, batch)
    random = np.random.default_rng(1)
    step = 1e-5
    for name, slopes in found.items():
        view = engine.view(engine.plan.tensor("param", name))
        largest = int(np.abs(slopes).argmax())
        for at in {largest, *random.integers(0, slopes.size, 4).tolist()}:
            middle, both = view.flat[at], []
            for sign in (1, -1):
                view.flat[at] = middle + sign * step
                both.append(engine.loss(batch))
            view.flat[at] = middle
            error = abs((both[0] - both[1]) / (2 * step) - slopes.flat[at])
            assert error <= FINITE_DIFFERENCES * abs(slopes.flat[largest]) + 1e-10, f"{name}[{at}]"


@pytest.mark.parametrize("config", CONFIGS)
def test_loss_and_gradients_of_the_step_agree_with_autograd(config: GPTConfig) -> None:
    torch = require("torch")
    from posttrainllm.pytorch.gpt import GPT

    engine = engine_of(config)
    batch = random_batch(config, BATCH, ignored=0.2)
    witness = GPT(config).double()
    witness.load_state_dict({n: torch.from_numpy(v) for n, v in tensors(engine, "param").items()})
    tokens, targets = (torch.from_numpy(ids).long() for ids in (batch.tokens, batch.targets))
    loss = witness.loss_sum(tokens, targets) / batch.trained
    loss.backward()
    wanted = {name: p.grad.numpy() for name, p in witness.named_parameters()}
    assert_close(gradients(engine, batch), wanted, AUTOGRAD, zero=1e-6)
    assert abs(engine.loss(batch) - loss.item()) <= AUTOGRAD
    with torch.no_grad():
        logits = witness(tokens).numpy()
    assert np.abs(engine.logits(batch.tokens) - logits).max() <= AUTOGRAD * np.abs(logits).max()


def test_gradients_do_not_depend_on_how_rows_are_chunked() -> None:
    config = model()
    batch = random_batch(config, BATCH, ignored=0.2)
    whole = gradients(engine_of(config), batch)
    for rows in (1, 2, 9):
        assert_close(gradients(engine_of(config, R=rows), batch), whole, AUTOGRAD)


def test_gradients_of_micro_batches_add_up_to_those_of_the_batch() -> None:
    config = model()
    parts = [random_batch(config, BATCH, seed=seed, ignored=0.3) for seed in range(4)]
    trained = sum(batch.trained for batch in parts)
    engine = engine_of(config)
    whole = gradients(engine, *parts)
    loss = float(engine.read(engine.plan.places["gradients"]["loss"])[0])
    alone = [
        {name: value * batch.trained / trained for name, value in gradients(engine, batch).items()}
        for batch in parts
    ]
    assert_close(whole, {name: sum(part[name] for part in alone) for name in whole}, AUTOGRAD)
    mean = sum(engine.loss(batch) * batch.trained for batch in parts) / trained
    assert abs(loss - mean) <= AUTOGRAD


def test_the_first_micro_batch_forgets_what_was_there_even_nan() -> None:
    config = model()
    batch = random_batch(config, BATCH)
    engine = engine_of(config)
    clean = gradients(engine, batch)
    for name in engine.plan.layout:
        engine.view(engine.plan.tensor("grad", name))[...] = np.nan
    assert_close(gradients(engine, batch), clean, 0)


def test_a_batch_of_ignored_targets_has_no_loss_and_no_gradient() -> None:
    config = model()
    batch = random_batch(config, BATCH)
    ignored = Batch(batch.tokens, np.full_like(batch.targets, -1))
    engine = engine_of(config)
    engine.gradients(ignored, inv_count=1.0, first=True)
    assert not any(value.any() for value in tensors(engine, "grad").values())
    assert engine.loss(ignored) == 0


def test_no_position_learns_from_a_later_one() -> None:
    config = model(n_ctx=6)
    engine = engine_of(config)
    batch = random_batch(config, BATCH)
    targets = np.full_like(batch.targets, -1)
    targets[:, 2] = batch.targets[:, 2]
    other = batch.tokens.copy()
    other[:, 3:] = (other[:, 3:] + 1) % config.n_vocab
    assert engine.loss(Batch(batch.tokens, targets)) == engine.loss(Batch(other, targets))
    slopes = gradients(engine, Batch(batch.tokens, targets))["wpe.weight"]
    assert slopes[:3].any(axis=1).all()
    assert not slopes[3:].any()


# ---- the update ---------------------------------------------------------------------------------


class PaperAdamW:
    """Loshchilov and Hutter 2019, algorithm 2, with clipping by global norm before it; one dict a state."""

    def __init__(self, params: Tensors, config: OptimizerConfig) -> None:
        self.params = {name: value.copy() for name, value in params.items()}
        self.m = {name: np.zeros_like(value) for name, value in params.items()}
        self.v = {name: np.zeros_like(value) for name, value in params.items()}
        self.config, self.steps = config, 0

    def step(self, grads: Tensors, lr: float) -> float:
        c = self.config
        self.steps += 1
        norm = float(np.sqrt(sum((grad**2).sum() for grad in grads.values())))
        for name, grad in grads.items():
            g = grad * min(1.0, c.clip_norm / norm)
            self.m[name] = c.beta1 * self.m[name] + (1 - c.beta1) * g
            self.v[name] = c.beta2 * self.v[name] + (1 - c.beta2) * g**2
            mhat = self.m[name] / (1 - c.beta1**self.steps)
            vhat = self.v[name] / (1 - c.beta2**self.steps)
            decay = c.weight_decay if self.params[name].ndim >= 2 else 0.0
            self.params[name] = self.params[name] - lr * (
                mhat / (np.sqrt(vhat) + c.eps) + decay * self.params[name]
            )
        return norm


def update(engine: NumpyEngine, step: int, lr: float, config: OptimizerConfig) -> None:
    engine.update(StepScalars(lr, 1 - config.beta1**step, 1 - config.beta2**step))


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"clip_norm": 1e-3},
        {"clip_norm": 1e6},
        {"weight_decay": 0.0},
        {"beta1": 0.0, "eps": 1e-2},
    ],
    ids=str,
)
def test_updates_are_adamw_with_clipping(settings: dict[str, Any]) -> None:
    config, optimizer = model(), OptimizerConfig(**settings)
    engine = engine_of(config, optimizer)
    paper = PaperAdamW(tensors(engine, "param"), optimizer)
    for step in range(1, 6):
        lr = float(np.float32(0.01 * step))
        norm = paper.step(gradients(engine, random_batch(config, BATCH, seed=step)), lr)
        update(engine, step, lr, optimizer)
        result = engine.results()[0]
        assert result.finite
        assert abs(result.grad_norm - norm) <= ADAMW * norm
        # corrections and lr pass through float32 scalars: 2^-24 of an update's size
        for kind, wanted in (("adam.m", paper.m), ("adam.v", paper.v)):
            assert_close(tensors(engine, kind), wanted, ADAMW)
        for name, value in tensors(engine, "param").items():
            assert np.abs(value - paper.params[name]).max() <= 2.0**-22 * lr * step
        paper.params = tensors(engine, "param")


def test_the_space_between_tensors_stays_zero() -> None:
    config = model()
    engine = engine_of(config)
    for step in range(1, 4):
        gradients(engine, random_batch(config, BATCH, seed=step))
        update(engine, step, 0.01, OptimizerConfig())
    for kind in ("param", "grad", "adam.m", "adam.v"):
        held = sum(np.count_nonzero(value) for value in tensors(engine, kind).values())
        arenas = [engine._memory[f"{kind}.{part}"] for part in ("decayed", "plain")]
        assert sum(np.count_nonzero(arena) for arena in arenas) == held
