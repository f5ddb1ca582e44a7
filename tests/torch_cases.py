"""Small models, random parameters and batches for the tests of the PyTorch model and engine."""

from __future__ import annotations

from typing import Any

import numpy as np

from needs import require
from posttrainllm.config import TrainConfig, load_config, replace
from posttrainllm.engines.base import Batch, State, StepResult, StepScalars

torch = require("torch")

from posttrainllm.pytorch.engine import TorchEngine  # noqa: E402
from posttrainllm.pytorch.gpt import GPT  # noqa: E402

Tensors = dict[str, np.ndarray]


def config_of(**settings: object) -> TrainConfig:
    """Two layers, two heads, a context of 8, odd sizes elsewhere."""
    sizes = {
        "engine.name": "torch",
        "engine.threads": 1,
        "model.n_layer": 2,
        "model.n_head": 2,
        "model.n_embd": 12,
        "model.n_ctx": 8,
        "model.n_vocab": 19,
        "data.batch_size": 4,
    }
    given = {name.replace("__", "."): value for name, value in settings.items()}
    return replace(load_config("tiny"), {**sizes, **given})


def random_params(config: TrainConfig, seed: int = 0) -> Tensors:
    """Values large enough for every part of the model to matter, in name order."""
    random = np.random.default_rng(seed)
    with torch.device("meta"):
        shapes = {name: tuple(p.shape) for name, p in GPT(config.model).named_parameters()}
    centers = {name: float("ln_" in name and name.endswith("weight")) for name in shapes}
    return {
        name: random.normal(centers[name], 0.3, shapes[name]).astype(np.float32)
        for name in sorted(shapes)
    }


def random_batch(config: TrainConfig, rows: int = 4, seed: int = 0) -> Batch:
    windows = np.random.default_rng(seed).integers(
        0, config.model.n_vocab, (rows, config.model.n_ctx + 1), dtype=np.int32
    )
    return Batch(windows[:, :-1], windows[:, 1:])


def engine_of(config: TrainConfig, dtype: Any = "float64", seed: int = 0) -> TorchEngine:
    engine = TorchEngine(config, "cpu", dtype)
    engine.load(random_params(config, seed))
    return engine


def scalars_of(config: TrainConfig, step: int, lr: float) -> StepScalars:
    """The scalars of update ``step``, which counts from 1."""
    optimizer = config.optimizer
    return StepScalars(lr, 1 - optimizer.beta1**step, 1 - optimizer.beta2**step)


def train(engine: TorchEngine, steps: int, start: int = 0) -> list[StepResult]:
    for step in range(start, start + steps):
        batch = random_batch(engine.config, seed=step)
        engine.gradients(batch, inv_count=1 / batch.targets.size, first=True)
        engine.update(scalars_of(engine.config, step + 1, lr=1e-2))
    return engine.results()


def largest_difference(got: Tensors, wanted: Tensors) -> float:
    """The largest error over all tensors, each relative to the largest number in its tensor."""
    assert got.keys() == wanted.keys()
    assert all(np.isfinite(got[name]).all() for name in got)
    return max(
        float(np.abs(got[name] - wanted[name]).max() / max(np.abs(wanted[name]).max(), 1e-30))
        for name in wanted
    )


def parts(state: State) -> tuple[Tensors, Tensors, Tensors]:
    """Parameters and both moments."""
    return state.params, state.m, state.v
