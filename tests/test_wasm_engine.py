"""The wasm engine: the same numbers in 32 and 64 bits, memory that never grows, and a message for all it cannot do."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
import pytest

from model_cases import model, random_batch, random_params, train_config
from needs import require
from posttrainllm.control import bias_corrections
from posttrainllm.engines import wasm_engine
from posttrainllm.engines.base import Batch, StepScalars, TooLargeError
from posttrainllm.engines.numpy_engine import NumpyEngine
from posttrainllm.engines.wasm_engine import BUILDS, WasmEngine
from posttrainllm.errors import EngineError
from posttrainllm.model import inference_programs, training_programs
from posttrainllm.training import engine_choice
from tolerances import CACHED_LOGITS, OVERFIT_LOSS, OVERFIT_STEPS

require("wasmtime")


def trained(config: Any, build: str = "", steps: int = 3, batch: Batch | None = None) -> Any:
    """An engine after some steps on one batch, and the losses."""
    engine = WasmEngine(
        *training_programs(config.model, config.optimizer, config.data.batch_size), build=build
    )
    engine.load(engine_choice.initial_parameters(config.model, 1))
    batch = batch or random_batch(config.model, config.data.batch_size)
    for step in range(1, steps + 1):
        engine.gradients(batch, inv_count=1 / batch.trained, first=True)
        corrections = bias_corrections(step, config.optimizer.beta1, config.optimizer.beta2)
        engine.update(StepScalars(3e-3, *corrections))
    return engine, [result.loss for result in engine.results()]


def test_32_and_64_bits_give_the_same_bits() -> None:
    config = train_config("tiny")
    (first, losses), (second, others) = (trained(config, build, steps=5) for build in BUILDS)
    assert np.isfinite(losses).all()
    assert losses == others
    for name, values in first.state().params.items():
        assert values.tobytes() == second.state().params[name].tobytes(), name


@pytest.mark.parametrize("build", BUILDS)
def test_a_wide_model_trains(build: str) -> None:
    config = train_config("tiny", model__n_embd=256, model__n_head=8, data__batch_size=2)
    _, losses = trained(config, build, steps=12)
    assert losses[-1] < losses[0] - 1


def test_one_batch_is_learned_by_heart() -> None:
    config = train_config("tiny", data__batch_size=2)
    _, losses = trained(config, steps=OVERFIT_STEPS)
    assert losses[-1] <= OVERFIT_LOSS


def test_memory_is_made_once() -> None:
    config = train_config("tiny", data__batch_size=2)
    engine, _ = trained(config, steps=2)
    before, view = engine.nbytes, engine._instance.memory
    tokens = random_batch(config.model, 1).tokens
    for length in (1, 5, 31):
        engine.prefill(tokens[:, :length])
        engine.decode(tokens[:, length])
    engine.loss(random_batch(config.model, 2))
    engine.gradients(random_batch(config.model, 2), inv_count=0.1, first=True)
    engine.state()
    assert engine.nbytes == before
    assert engine._instance.memory is view
    needed = engine.plan.nbytes + engine._workspace_bytes + engine._table_bytes
    assert 0 <= before - needed < 2 << 20, "the module's own stack and data, and rounding"


@pytest.mark.parametrize("build", BUILDS)
def test_logits_and_cache_agree_with_the_definition(build: str) -> None:
    config = model(n_layer=3, n_ctx=9)
    programs, dims = inference_programs(config, 2)
    wasm, numpy = WasmEngine(programs, dims, build=build), NumpyEngine(programs, dims)
    params = random_params(numpy)
    wasm.load(params)
    numpy.load(params)
    tokens = random_batch(config, 2).tokens
    assert np.abs(wasm.logits(tokens) - numpy.logits(tokens)).max() <= CACHED_LOGITS
    pairs = [
        (engine.prefill(tokens[:, :4]), engine.decode(tokens[:, 4])) for engine in (wasm, numpy)
    ]
    for got, wanted in zip(*pairs, strict=True):
        assert np.abs(got - wanted).max() <= CACHED_LOGITS


# ---- what cannot be ------------------------------------------------------------------------------


def test_without_wasmtime_the_message_says_how_to_install_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "wasmtime", None)
    wasm_engine._compiled.cache_clear()
    with pytest.raises(EngineError, match=r"pip install 'posttrainllm\[wasm\]'"):
        trained(train_config("tiny"))
    wasm_engine._compiled.cache_clear()


def test_a_plan_over_four_gigabytes_takes_the_64_bit_build(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wasm_engine, "PAGES", {"wasm32": 40, "wasm64": 1 << 18})
    engine, losses = trained(train_config("tiny"), steps=1)
    assert engine.build == engine.info["build"] == "wasm64"
    assert np.isfinite(losses).all()


def test_a_plan_that_fits_nowhere_is_refused_with_both_numbers_and_a_preset(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(wasm_engine, "PAGES", {"wasm32": 200, "wasm64": 400})
    sets = training_programs(train_config("medium").model, train_config().optimizer, 16)
    with pytest.raises(
        TooLargeError, match=r"needs [\d,]+ bytes of memory and may take 24,117,248 here"
    ):
        WasmEngine(*sets)
    with pytest.raises(EngineError, match="the largest preset that fits is tiny"):
        engine_choice.training_engine(train_config("medium", engine__name="wasm"))


def test_a_trap_and_a_refused_call_are_messages() -> None:
    config = train_config("tiny", data__batch_size=1)
    engine, _ = trained(config, steps=1)
    table = engine.prepare(engine.plan.bind("update"))
    wild, wrong = table.copy(), table.copy()
    wild["buf"][0, 0] = 1 << 31
    wrong["op"][1] = 999
    with pytest.raises(EngineError, match="the WebAssembly module stopped"):
        engine.run(wild)
    with pytest.raises(EngineError, match=rf"refused call 1 of {len(table)}"):
        engine.run(wrong)
