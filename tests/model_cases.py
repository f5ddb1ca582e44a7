"""Small models for the tests of programs, plans, gradients and engines, and where their data comes from."""

from __future__ import annotations

from typing import Any

import numpy as np
from hypothesis import strategies as st

from posttrainllm.config import GPTConfig, OptimizerConfig, TrainConfig, load_config, replace
from posttrainllm.engines.base import Batch, ProgramEngine
from posttrainllm.model import (
    decode_program,
    gradients_program,
    inference_programs,
    logits_program,
    loss_program,
    prefill_program,
    training_programs,
)
from posttrainllm.optim import update_program
from posttrainllm.program import Program

Tensors = dict[str, np.ndarray]

MODEL_PROGRAMS = {
    "gradients": gradients_program,
    "loss": loss_program,
    "logits": logits_program,
    "prefill": prefill_program,
    "decode": decode_program,
}


def model(**settings: Any) -> GPTConfig:
    """Two layers, two heads, a context of 6 and sizes that are no power of two."""
    sizes = {"n_layer": 2, "n_head": 2, "n_embd": 10, "n_ctx": 6, "n_vocab": 13}
    return GPTConfig(**{**sizes, **settings})


VARIANTS = {
    "gpt2": model(),
    "one layer": model(n_layer=1),
    "three layers": model(n_layer=3),
    "untied": model(tied=False),
    "erf": model(activation="gelu"),
    "narrow MLP": model(n_inner=7),
    "all at once": model(n_layer=3, tied=False, activation="gelu", n_inner=11, n_head=5),
    "everything is one": model(n_layer=1, n_head=1, n_embd=1, n_ctx=1, n_vocab=2, n_inner=1),
}


def all_programs(config: GPTConfig) -> dict[str, Program]:
    """Every program that the package can build for a model."""
    programs = {name: build(config) for name, build in MODEL_PROGRAMS.items()}
    return programs | {"update": update_program(OptimizerConfig())}


@st.composite
def random_models(draw: st.DrawFn) -> GPTConfig:
    """Any architecture, all sizes small."""
    n_head = draw(st.integers(1, 4))
    return GPTConfig(
        n_layer=draw(st.integers(1, 4)),
        n_head=n_head,
        n_embd=n_head * draw(st.integers(1, 9)),
        n_ctx=draw(st.integers(1, 12)),
        n_vocab=draw(st.integers(2, 70)),
        n_inner=draw(st.none() | st.integers(1, 40)),
        activation=draw(st.sampled_from(["gelu_new", "gelu"])),
        tied=draw(st.booleans()),
    )


SETS = {
    "training": lambda config, batch: training_programs(config, OptimizerConfig(), batch),
    "inference": inference_programs,
}


def train_config(preset: str = "tiny", **settings: Any) -> TrainConfig:
    """A preset with settings changed: ``train_config(model__n_layer=1)``."""
    return replace(
        load_config(preset), {name.replace("__", "."): value for name, value in settings.items()}
    )


def random_params(engine: ProgramEngine, seed: int = 0) -> Tensors:
    """Values large enough for every part of the model to matter."""
    random = np.random.default_rng(seed)
    return {
        name: random.normal(
            float(".ln_" in f".{name}" and name.endswith("weight")), 0.3, place.shape
        )
        for name, (_, place) in engine.plan.layout.items()
    }


def random_batch(config: GPTConfig, batch: int, seed: int = 0, ignored: float = 0.0) -> Batch:
    """Random tokens; a share of the targets, never all of them, is -1."""
    random = np.random.default_rng(seed)
    windows = random.integers(0, config.n_vocab, (batch, config.n_ctx + 1), dtype=np.int32)
    targets = windows[:, 1:].copy()
    targets.ravel()[1:][random.random(targets.size - 1) < ignored] = -1
    return Batch(windows[:, :-1].copy(), targets)
