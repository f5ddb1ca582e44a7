"""What every engine that runs programs refuses, before it touches memory; and that it allocates nothing from step to step."""

from __future__ import annotations

import tracemalloc
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from guarded import ENGINES, obtain
from model_cases import model, random_batch, random_params
from posttrainllm.config import OptimizerConfig
from posttrainllm.engines.base import Batch, ProgramEngine, StepScalars
from posttrainllm.engines.cpp_engine import CppEngine
from posttrainllm.engines.numpy_engine import NumpyEngine
from posttrainllm.errors import EngineError
from posttrainllm.model import inference_programs, logits_program, training_programs

CONFIG = model()
BATCH = 3
NAMES = [name for name in ENGINES if name == "numpy" or name.startswith("cpp-")]


def make(name: str, programs: Any, dims: Any) -> ProgramEngine:
    obtain(name, pytest.skip)
    if name == "numpy":
        return NumpyEngine(programs, dims)
    return CppEngine(programs, dims, threads=2, build=name.removeprefix("cpp-"))


@pytest.fixture(params=NAMES)
def engine(request: pytest.FixtureRequest) -> Iterator[ProgramEngine]:
    """Training and inference in one, with weights in it."""
    programs, dims = training_programs(CONFIG, OptimizerConfig(), BATCH)
    programs["logits"], dims["logits"] = logits_program(CONFIG), dims["loss"]
    made = make(request.param, programs, dims)
    made.load(random_params(made))
    yield made
    made.close()


def contents(engine: ProgramEngine) -> dict[str, bytes]:
    """Everything that a refused call must leave alone."""
    state = engine.state()
    return {
        f"{kind} {name}": value.tobytes()
        for kind, tensors in {"param": state.params, "m": state.m, "v": state.v}.items()
        for name, value in tensors.items()
    }


def changed(shape: tuple[int, int] = (BATCH, CONFIG.n_ctx), **ids: int) -> Batch:
    """A batch of a shape, with one id of ``tokens`` or ``targets`` replaced."""
    arrays = {name: np.ones(shape, np.int32) for name in ("tokens", "targets")}
    for name, value in ids.items():
        arrays[name].flat[-1] = value
    return Batch(**arrays)


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        (changed((2, 6)), r"tokens \(2, 6\) and targets \(2, 6\) are not the planned \(3, 6\)"),
        (changed((3, 7)), r"are not the planned \(3, 6\)"),
        (Batch(np.ones((3, 6), np.int32), np.ones((3, 5), np.int32)), r"targets \(3, 5\) are not"),
        (changed(tokens=13), r"token ids must lie in 0 .. 12, got 1 .. 13"),
        (changed(tokens=-1), r"token ids must lie in 0 .. 12, got -1 .. 1"),
        (changed(targets=13), r"targets must lie in 0 .. 12, or be -1; got 13"),
    ],
)
def test_a_batch_that_does_not_fit_is_refused(
    engine: ProgramEngine, batch: Batch, message: str
) -> None:
    before = contents(engine)
    for call in (
        lambda: engine.gradients(batch, inv_count=1.0, first=True),
        lambda: engine.loss(batch),
    ):
        with pytest.raises(EngineError, match=message):
            call()
    assert contents(engine) == before


@pytest.mark.parametrize("shape", [(4, 6), (3, 7), (0, 3), (1, 0)])
def test_tokens_beyond_the_plan_are_refused(engine: ProgramEngine, shape: tuple[int, int]) -> None:
    before = contents(engine)
    with pytest.raises(EngineError, match=r"tokens \(., .\) do not fit the planned \(3, 6\)"):
        engine.logits(np.ones(shape, np.int32))
    with pytest.raises(EngineError, match=r"tokens \(., .\) do not fit the planned \(1, 6\)"):
        engine.prefill(np.ones(shape, np.int32))
    assert contents(engine) == before


@pytest.mark.parametrize("lengths", [[0], [7], [-1], [3, 3]])
def test_prompt_lengths_that_do_not_fit_are_refused(
    engine: ProgramEngine, lengths: list[int]
) -> None:
    with pytest.raises(
        EngineError, match=r"prompts in \(1, 6\) tokens need 1 lengths in 1 .. 6, got"
    ):
        engine.prefill(np.ones((1, 6), np.int32), np.array(lengths, np.int32))


def test_decoding_needs_a_prefill_and_room(engine: ProgramEngine) -> None:
    message = r"decode needs a prefill of 1 prompts and room in the cache of 6 tokens"
    with pytest.raises(EngineError, match=message):
        engine.decode(np.ones(1, np.int32))
    engine.prefill(np.ones((1, 5), np.int32))
    engine.decode(np.ones(1, np.int32))
    with pytest.raises(EngineError, match=message):
        engine.decode(np.ones(1, np.int32))
    engine.prefill(np.ones((1, 5), np.int32))
    engine.decode(np.ones(1, np.int32))
    engine.load(random_params(engine, seed=2))  # other weights than those that the cache is of
    with pytest.raises(EngineError, match=message):
        engine.decode(np.ones(1, np.int32))


def test_weights_that_do_not_fit_are_refused_and_nothing_is_changed(engine: ProgramEngine) -> None:
    good = random_params(engine, seed=1)
    before = contents(engine)
    for change, message in (
        ({"lm_head.weight": good["wte.weight"]}, "'lm_head.weight' is missing or unexpected"),
        ({"ln_f.bias": np.zeros(9)}, r"'ln_f.bias' is \(9,\) but the model has \(10,\)"),
    ):
        with pytest.raises(EngineError, match=message):
            engine.load({**good, **change})
        with pytest.raises(EngineError, match=message):
            engine.load(good, good, {**good, **change})
    left_out = {name: value for name, value in good.items() if name != "ln_f.bias"}
    with pytest.raises(EngineError, match="adam.m tensors do not fit the model: 'ln_f.bias'"):
        engine.load(good, left_out, good)
    assert contents(engine) == before


@pytest.mark.parametrize("name", NAMES)
def test_an_engine_for_inference_says_that_it_cannot_train(name: str) -> None:
    engine = make(name, *inference_programs(CONFIG, BATCH))
    engine.load(random_params(engine), m={}, v={})
    with pytest.raises(EngineError, match="set up without the program 'gradients'"):
        engine.gradients(random_batch(CONFIG, BATCH), inv_count=1.0, first=True)
    with pytest.raises(EngineError, match="set up without the program 'update'"):
        engine.update(StepScalars(1e-3, 0.1, 0.05))
    assert engine.gradient_tensors() == {}
    assert engine.state().m == {}


@pytest.mark.parametrize("engine", NAMES[1:], indirect=True)
def test_nothing_grows_from_step_to_step(engine: ProgramEngine) -> None:
    batch = random_batch(CONFIG, BATCH)

    def steps(count: int) -> None:
        for _ in range(count):
            engine.gradients(batch, inv_count=1 / batch.trained, first=True)
            engine.update(StepScalars(1e-3, 0.1, 0.05))
            engine.loss(batch)
        engine.results()

    planned = engine.nbytes
    steps(5)
    tracemalloc.start()
    try:
        steps(20)
        before = tracemalloc.get_traced_memory()[0]
        steps(300)
        after = tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
    # the interpreter's own free lists settle at some 20 KiB; one small array a step would be 50
    assert after - before <= 40 << 10
    assert engine.nbytes == planned


def test_planned_bytes_are_the_bytes_that_are_held(engine: ProgramEngine) -> None:
    assert engine.plan.nbytes <= engine.nbytes
    if isinstance(engine, NumpyEngine):
        assert engine.nbytes == engine.plan.nbytes + engine.temporaries
