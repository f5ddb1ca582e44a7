"""The torch engine on a CUDA card: layers, graphs, precision. Where there is no card, that is what is tested.

Run it on a machine with a card: pytest tests/test_cuda.py. The same claims on the CPU, call by call, are in
tests/test_torch_step.py, the kernels one by one in tests/test_triton_kernels.py.
"""

from __future__ import annotations

import gc
from typing import Any

import numpy as np
import pytest

from needs import require
from posttrainllm.config import TrainConfig, load_config, replace
from posttrainllm.engines.base import Batch, StepResult
from posttrainllm.errors import EngineError
from posttrainllm.training.engine_choice import initial_parameters, training_engine

torch = require("torch")

from posttrainllm.pytorch.engine import TorchEngine  # noqa: E402
from posttrainllm.pytorch.recording import recording  # noqa: E402
from torch_cases import random_batch, scalars_of  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")  # torch's own, when it compiles
CARD = torch.cuda.is_available()


def config_of(preset: str = "tiny", **settings: object) -> TrainConfig:
    given = {name.replace("__", "."): value for name, value in settings.items()}
    first = {"engine.name": "torch"} | ({"engine.triton": "on"} if CARD else {})
    return replace(load_config(preset), {**first, **given})


def on_processor(config: TrainConfig) -> TrainConfig:
    return replace(
        config, {"engine.device": "cpu", "engine.compile": "off", "engine.triton": "auto"}
    )


def opened(config: TrainConfig) -> TorchEngine:
    engine: Any = training_engine(config)
    engine.load(initial_parameters(config.model, 1))
    return engine  # type: ignore[no-any-return]


def train(engine: Any, config: TrainConfig, steps: int, start: int = 0) -> list[StepResult]:
    for step in range(start + 1, start + steps + 1):
        batch = random_batch(config, rows=config.data.batch_size, seed=step)
        engine.gradients(batch, inv_count=1 / batch.targets.size, first=True)
        engine.update(scalars_of(config, step, lr=1e-3))
    return engine.results()  # type: ignore[no-any-return]


def losses(results: list[StepResult]) -> np.ndarray:
    assert all(result.finite for result in results)
    return np.array([result.loss for result in results])


def drift(ours: list[StepResult], theirs: list[StepResult]) -> float:
    return float(np.max(np.abs(losses(ours) - losses(theirs)) / losses(theirs)))


if not CARD:

    def test_a_machine_without_a_card_says_so() -> None:
        with pytest.raises(EngineError, match="finds no device cuda"):
            TorchEngine(config_of(engine__device="cuda"))


else:

    @pytest.mark.parametrize("precision", ["float32", "bf16"])
    @pytest.mark.parametrize("preset", ["tiny", "xl"])
    def test_fused_layers_have_the_gradients_of_autograd(preset: str, precision: str) -> None:
        found = []
        for fuse in (True, False):
            config = config_of(preset, engine__precision=precision, engine__fuse=fuse)
            engine = opened(config)
            assert engine.info["kernels"] == ("fused" if fuse else "triton and torch")
            batch = random_batch(config, rows=config.data.batch_size)
            engine.gradients(batch, inv_count=1 / batch.targets.size, first=True)
            found.append(engine.gradient_tensors())
        limit = 1e-4 if precision == "float32" else 0.1
        for name, wanted in found[1].items():
            if name.endswith("c_attn.bias"):  # the key's part is zero but for rounding
                continue
            error = np.abs(found[0][name] - wanted).max() / np.abs(wanted).max()
            assert error <= limit, (name, error)

    @pytest.mark.parametrize(
        ("compiled", "triton", "kind"),
        [
            ("off", "on", "adamw"), ("on", "on", "adamw"), ("off", "off", "adamw"),
            ("off", "off", "muon"), ("off", "on", "muon"),
        ],
    )  # fmt: skip
    @pytest.mark.parametrize("accumulation", [1, 3])
    def test_graph_gives_the_losses_of_the_processor(
        compiled: str, triton: str, kind: str, accumulation: int
    ) -> None:
        config = config_of(
            engine__precision="float32", engine__compile=compiled, engine__triton=triton,
            data__accumulation=accumulation, optimizer__kind=kind,
        )  # fmt: skip
        both = []
        for device in ("cuda", "cpu"):
            one = on_processor(config) if device == "cpu" else config
            engine = opened(one)
            for step in range(1, 31):
                for part in range(accumulation):
                    batch = random_batch(config, rows=16, seed=step * 10 + part)
                    count = accumulation * batch.targets.size
                    engine.gradients(batch, inv_count=1 / count, first=part == 0)
                engine.update(scalars_of(config, step, lr=1e-3))
            both.append(engine.results())
        assert drift(*both) <= 1e-4

    def test_two_hundred_losses_in_float32_are_those_of_the_cpp_engine() -> None:
        for preset in ("tiny", "small"):
            config = config_of(preset, engine__precision="float32")
            ours = train(opened(config), config, 200)
            cpp = replace(load_config(preset), {})
            assert drift(ours, train(training_engine_of(cpp), cpp, 200)) <= 1e-4

    def training_engine_of(config: TrainConfig) -> Any:
        engine = training_engine(config)
        engine.load(initial_parameters(config.model, 1))
        return engine

    def test_losses_in_bf16_are_within_a_percent_of_float32() -> None:
        found = [
            train(opened(config), config, 200)
            for config in (config_of("small", engine__precision=one) for one in ("bf16", "float32"))
        ]
        assert drift(*found) <= 0.01

    def test_a_nan_never_reaches_the_weights_although_nobody_waits() -> None:
        config = config_of()
        engine = opened(config)
        train(engine, config, 3)
        before = engine.state()
        for step in range(4, 12):
            batch = random_batch(config, rows=16, seed=step)
            scale = np.inf if step == 6 else 1 / batch.targets.size
            if step == 6:
                before = engine.state()
            engine.gradients(batch, inv_count=scale, first=True)
            engine.update(scalars_of(config, step, lr=1e-3))
        results = engine.results()
        assert [result.finite for result in results[-6:]] == [False] * 6
        after = engine.state()
        for name, value in before.params.items():
            assert np.array_equal(value, after.params[name]), name

    @pytest.mark.parametrize("compiled", ["off", "on"])
    def test_resume_draws_the_same_dropout_masks(compiled: str) -> None:
        config = config_of(model__dropout=0.3, engine__compile=compiled)
        wanted = train(opened(config), config, 12)
        part = opened(config)
        train(part, config, 6)
        torch.rand(10, device="cuda")  # whoever draws in between changes nothing
        state = part.state()
        again = opened(config)
        again.load(state.params, state.m, state.v)
        assert drift(train(again, config, 6, start=6), wanted[6:]) <= 3e-5
        plain = config_of(engine__compile=compiled)
        assert drift(train(opened(plain), plain, 12), wanted) > 3e-4

    def test_batches_of_another_shape_run_without_a_graph() -> None:
        config = config_of(engine__precision="float32")
        engine, other = opened(config), opened(on_processor(config))
        batch = random_batch(config, rows=5)
        short = Batch(batch.tokens[:, :7], batch.targets[:, :7])
        for one in (batch, short):
            found = []
            for each in (engine, other):
                each.gradients(one, inv_count=1 / one.targets.size, first=True)
                each.update(scalars_of(config, 1, lr=0.0))
                found.append(each.results())
            assert drift(*found) <= 1e-5

    def test_pythons_collector_rests_while_calls_are_recorded() -> None:
        given = torch.zeros(3, device="cuda")
        with recording() as graph:
            assert not gc.isenabled()
            given += 1
        assert gc.isenabled()
        graph.replay()
        assert given.tolist() == [1, 1, 1]

    def test_written_tokens_are_those_of_the_processor() -> None:
        config = config_of("small", engine__precision="float32")
        engine, other = opened(config), opened(on_processor(config))
        for rows, lengths in ((1, [5]), (3, [1, 9, 4]), (1, [2])):
            tokens = random_batch(config, rows=rows).tokens
            filled = np.array(lengths, np.int32)
            prompts = tokens[:, : max(lengths)]
            got, wanted = (one.prefill(prompts, filled) for one in (engine, other))
            assert np.abs(got - wanted).max() <= 1e-4
            for step in range(20):
                got, wanted = (one.decode(tokens[:, 20 + step]) for one in (engine, other))
                assert np.abs(got - wanted).max() <= 1e-4

    def test_a_model_beyond_the_cards_memory_is_refused_before_it_is_taken() -> None:
        with pytest.raises(EngineError, match="bytes of memory"):
            TorchEngine(config_of("gpt2", data__batch_size=1_000_000))
