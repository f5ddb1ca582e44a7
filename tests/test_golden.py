"""Every engine starts from the golden weights, sees the golden batches and follows the golden loss curves."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import numpy as np
import pytest
from tests.golden.make_golden import golden_config

from needs import require
from posttrainllm.config import load_config, replace
from posttrainllm.control import batch_offsets
from posttrainllm.kernels.build import available_builds
from posttrainllm.machine import instruction_sets
from posttrainllm.text.corpus import open_corpus
from posttrainllm.training.engine_choice import initial_parameters, training_engine
from posttrainllm.training.step import train_step

GOLDEN = json.loads((Path(__file__).parent / "golden" / "golden.json").read_text())
SHORT = 20  # steps of a curve that takes long
BUILDS = [f"cpp:{build}" for build in available_builds() if build in instruction_sets()]


@pytest.mark.parametrize("preset", GOLDEN)
def test_initial_weights_and_first_batch_are_the_golden_ones(preset: str) -> None:
    golden, config = GOLDEN[preset], load_config(preset)
    weights = initial_parameters(config.model, golden["seed"])
    hashes = {
        name: hashlib.sha256(values.tobytes()).hexdigest() for name, values in weights.items()
    }
    assert hashes == golden["parameters"]
    corpus = open_corpus([], val_fraction=config.data.val_fraction)
    assert corpus.sha256 == golden["corpus"]
    windows = corpus.positions(config.model.n_ctx)
    assert (
        batch_offsets(golden["seed"], 1, config.data.batch_size, 0, windows).tolist()
        == golden["first_offsets"]
    )


@pytest.mark.parametrize("engine", ["numpy", *BUILDS, "wasm", "torch"])
@pytest.mark.parametrize("preset", GOLDEN)
def test_loss_curve_follows_the_golden_one(preset: str, engine: str) -> None:
    golden = GOLDEN[preset]
    if engine == "numpy" and preset != "tiny":
        pytest.skip("numpy is slow on purpose: one curve is enough")
    if engine == "wasm":
        require("wasmtime")
    if engine == "torch":
        require("torch")
    name, _, build = engine.partition(":")
    config = golden_config(preset, name, build)
    if engine == "torch":  # a card has limits of its own: test_cuda.py
        config = replace(config, {"engine.device": "cpu"})
    corpus = open_corpus([], val_fraction=config.data.val_fraction)
    trained = training_engine(config)
    trained.load(initial_parameters(config.model, config.training.seed))
    whole = (
        preset == "tiny" or engine == BUILDS[-1]
    )  # small takes a second for every few steps of the others
    wanted = np.array(golden["losses"] if whole else golden["losses"][:SHORT])
    for step in range(1, len(wanted) + 1):
        train_step(trained, corpus, config, step)
    losses = np.array([result.loss for result in trained.results()])
    drift = np.abs(losses - wanted) / wanted
    assert np.isfinite(losses).all()
    assert drift[:10].max() <= 1e-6, f"step {drift[:10].argmax() + 1}"
    assert drift.max() <= 1e-5, f"step {drift.argmax() + 1}"
