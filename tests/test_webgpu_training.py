"""Whole trainings on WebGPU: the golden curves, one batch that is learned by heart, the same bits twice, a NaN that stays out."""

from __future__ import annotations

import json
import os
from pathlib import Path

import numpy as np
import pytest
from tests.golden.make_golden import golden_config

from needs import require
from posttrainllm.config import load_config, replace
from posttrainllm.control import bias_corrections
from posttrainllm.engines.base import Batch, StepScalars
from posttrainllm.lab.limits import loss_limit
from posttrainllm.text.corpus import open_corpus
from posttrainllm.training.engine_choice import initial_parameters, training_engine
from posttrainllm.training.step import train_step

require("wgpu")

from webgpu_cases import device  # noqa: E402

GOLDEN = json.loads((Path(__file__).parent / "golden" / "golden.json").read_text())
STEPS = {"tiny": 200, "small": 20}
OVERFIT_STEPS, OVERFIT_LOSS = 400, 0.05


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    """Self-checks and choices of kernels of these tests stay out of the user's cache."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    device()  # or a skip


def opened(config):
    config = replace(config, {"engine.adapter": os.environ.get("POSTTRAINLLM_ADAPTER", "")})
    engine = training_engine(config)
    engine.load(initial_parameters(config.model, config.training.seed))
    return engine


def losses(preset, steps):
    config = golden_config(preset, "webgpu")
    corpus = open_corpus([], val_fraction=config.data.val_fraction)
    engine = opened(config)
    for step in range(1, steps + 1):
        train_step(engine, corpus, config, step)
    found = engine.results()
    engine.close()
    return np.array([result.loss for result in found])


@pytest.mark.parametrize("preset", STEPS)
def test_loss_curve_follows_the_golden_one_on_webgpu(preset):
    steps = STEPS[preset]
    wanted, got = np.array(GOLDEN[preset]["losses"][:steps]), losses(preset, steps)
    assert np.isfinite(got).all()
    drift = np.abs(got - wanted) / wanted
    for step, error in enumerate(drift, 1):
        limit = loss_limit("webgpu", step)
        assert limit is not None
        assert error <= limit, f"loss of step {step} is off by {error:.1e}"


def test_the_same_run_twice_has_the_same_bits_on_webgpu():
    assert losses("tiny", 12).tobytes() == losses("tiny", 12).tobytes()


def tiny_batch(config):
    shape = (config.data.batch_size, config.model.n_ctx + 1)
    ids = np.random.default_rng(2).integers(0, 200, shape).astype(np.int32)
    return Batch(np.ascontiguousarray(ids[:, :-1]), np.ascontiguousarray(ids[:, 1:]))


def train_on(engine, batch, config, steps, rate):
    optimizer = config.optimizer
    for step in range(1, steps + 1):
        engine.gradients(batch, inv_count=1.0 / batch.tokens.size, first=True)
        corrections = bias_corrections(step, optimizer.beta1, optimizer.beta2)
        engine.update(StepScalars(rate, *corrections))
    return engine.results()


def test_one_batch_is_learned_by_heart_on_webgpu():
    config = replace(load_config("tiny"), {"engine.name": "webgpu", "data.batch_size": 2})
    engine = opened(config)
    found = train_on(engine, tiny_batch(config), config, OVERFIT_STEPS, 3e-3)
    engine.close()
    assert found[-1].loss < OVERFIT_LOSS


def test_a_nan_never_reaches_the_weights_on_webgpu():
    config = replace(load_config("tiny"), {"engine.name": "webgpu"})
    engine, batch = opened(config), tiny_batch(config)
    params = initial_parameters(config.model, config.training.seed)
    params["h.0.mlp.c_fc.weight"][3, 5] = np.nan
    engine.load(params)
    found = train_on(engine, batch, config, 2, 1e-3)
    after = engine.state().params
    engine.close()
    assert not any(result.finite for result in found)
    for name, before in params.items():
        assert after[name].tobytes() == before.tobytes(), f"{name} has changed"
