"""Fused programs: valid, smaller, and the same numbers as the plain ones on every engine."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings

from guarded import ENGINES as OP_ENGINES
from guarded import THREADS, obtain
from model_cases import (
    SETS,
    VARIANTS,
    all_programs,
    model,
    random_batch,
    random_models,
    random_params,
    train_config,
)
from needs import require
from posttrainllm.config import PRESETS, GPTConfig, TrainConfig, load_config, replace
from posttrainllm.control import bias_corrections
from posttrainllm.engines.base import Engine, ProgramEngine, StepResult, StepScalars
from posttrainllm.engines.cpp_engine import CppEngine
from posttrainllm.engines.numpy_engine import NumpyEngine
from posttrainllm.engines.wasm_engine import WasmEngine
from posttrainllm.fuse import RULES, fuse
from posttrainllm.model import gradients_program, training_programs
from posttrainllm.ops import FUSED, OPS, OPTIONAL
from posttrainllm.plan import make_plan
from posttrainllm.program import Call, Program
from posttrainllm.training.engine_choice import initial_parameters, training_engine
from posttrainllm.validate import validate
from tolerances import FUSED_IN_FLOAT64, LOSS_TO_STEP_10

CPP = tuple(name for name in OP_ENGINES if name.startswith("cpp-"))
BIT_IDENTICAL = (*CPP, "wasm")
STEPS = 20


def ops_of(program: Program) -> set[str]:
    return {step.call.op for step in program.expand(2, 1)}


# ---- the rewrite --------------------------------------------------------------------------------


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_fused_program_is_valid_and_fusing_it_again_changes_nothing(variant: str) -> None:
    for name, program in all_programs(VARIANTS[variant]).items():
        fused = fuse(program, FUSED)
        validate(fused)
        assert fused.name == name
        assert fuse(fused, FUSED).to_json() == fused.to_json()
        assert Program.from_json(fused.to_json()).to_json() == fused.to_json()


@settings(max_examples=25)
@given(config=random_models())
def test_what_hosts_read_and_write_stays_where_it_is_in_random_models(
    config: GPTConfig,
) -> None:
    programs, dims = SETS["training"](config, 2)
    fused = {name: fuse(program, FUSED) for name, program in programs.items()}
    held = {"param", "grad", "adam", "state", "in", "out"}
    regions = make_plan(fused, dims).regions
    for name, region in make_plan(programs, dims).regions.items():
        if name.split(".")[0] in held:
            assert regions[name] == region


def test_the_plain_program_is_left_as_it_was() -> None:
    program = gradients_program(model())
    before = program.to_json()
    assert fuse(program, ()).to_json() == before
    fuse(program, FUSED)
    assert program.to_json() == before


def test_a_fused_gradients_program_reads_like_the_model() -> None:
    text = fuse(gradients_program(model()), FUSED).to_text()
    for line in (
        "h.{i}.mid = linear_residual_forward(h.{i}.in, h.{i}.attn.out, h.{i}.attn.c_proj.weight, h.{i}.attn.c_proj.bias)",
        "h.{i+1}.in = linear_residual_forward(h.{i}.mid, h.{i}.mlp.act, h.{i}.mlp.c_proj.weight, h.{i}.mlp.c_proj.bias)",
        "h.{i}.mlp.act, h.{i}.mlp.fc = linear_gelu_forward(h.{i}.ln_2.out, h.{i}.mlp.c_fc.weight, h.{i}.mlp.c_fc.bias) erf=0",
        "grad.h.{i}.mlp.fc, h.{i}.mlp.act.again = gelu_linear_backward_input(grad.h, h.{i}.mlp.c_proj.weight, h.{i}.mlp.fc) erf=0",
        "grad.h.{i}.mlp.c_proj.weight, grad.h.{i}.mlp.c_proj.bias = "
        "linear_backward_weight_bias(h.{i}.mlp.act.again, grad.h, scalars) accumulate=2",
    ):
        assert f"    {line}\n" in text
    assert text.count("= layernorm_backward(") == 2, "of ln_1 and ln_2; ln_f starts grad.h"
    for gone in ("add_forward", "gelu_forward", "gelu_backward", "linear_backward_bias"):
        assert f"= {gone}(" not in text
    assert "mlp.proj" not in text
    assert "attn.proj" not in text
    assert "grad.h.{i}.mlp.act" not in text


@pytest.mark.parametrize("op", FUSED)
def test_an_engine_gets_the_fused_ops_that_it_has_and_no_others(op: str) -> None:
    for config in VARIANTS.values():
        programs = all_programs(config)
        assert all(not ops_of(program) & set(FUSED) for program in programs.values())
        found = {
            name: ops_of(fuse(program, {op})) & set(FUSED) for name, program in programs.items()
        }
        assert found["gradients"] == {op}
        assert found["update"] == set()


def test_activations_of_the_mlp_are_not_kept_for_the_backward_pass() -> None:
    plain = gradients_program(model())
    fused = fuse(plain, FUSED)
    assert plain.buffers["h.{i}.mlp.act"].role == "saved"
    assert fused.buffers["h.{i}.mlp.act"].role == "scratch"
    assert fused.buffers["h.{i}.mlp.fc"].role == "saved"


@pytest.mark.parametrize("preset", [name for name in PRESETS if name != "behemoth"])
def test_a_fused_training_step_needs_less_memory(preset: str) -> None:
    config = load_config(preset)
    programs, dims = training_programs(config.model, config.optimizer, config.data.batch_size)
    fused = {name: fuse(program, FUSED) for name, program in programs.items()}
    assert make_plan(fused, dims).nbytes < make_plan(programs, dims).nbytes


# ---- where it must not ---------------------------------------------------------------------------


def residual(role: Any = "scratch", **attrs: float) -> Program:
    """out = residual + x W, with the product in a buffer of the given role."""
    p = Program("piece")
    for name, width in (("x", "I"), ("residual", "O")):
        p.buffer(name, "N", width, role="input")
    p.buffer("w", "I", "O", role="param")
    p.buffer("product", "N", "O", role=role)
    p.buffer("out", "N", "O", role="output")
    p.call("linear_forward", ["product"], ["x", "w", None], **attrs)
    p.call("add_forward", ["out"], ["residual", "product"])
    return p


def test_calls_outside_of_blocks_are_fused_too() -> None:
    fused = fuse(residual(), FUSED)
    assert [str(item) for item in fused.items] == [
        "out = linear_residual_forward(residual, x, w, -)"
    ]
    assert "product" not in fused.buffers


def test_a_result_that_somebody_else_reads_stays() -> None:
    program = residual()
    program.buffer("again", "N", "O", role="output")
    program.call("add_forward", ["again"], ["product", "residual"])
    assert fuse(program, FUSED).to_json() == program.to_json()


def test_a_result_that_the_host_reads_stays() -> None:
    program = residual("output")
    assert fuse(program, FUSED).to_json() == program.to_json()


def test_a_product_that_is_added_to_itself_stays() -> None:
    program = residual()
    assert isinstance(program.items[1], Call)
    program.items[1] = Call("add_forward", ("out",), ("product", "product"))
    assert fuse(program, FUSED).to_json() == program.to_json()


def test_a_transposed_product_stays() -> None:
    program = residual(transposed=1)
    weight = program.buffers["w"]
    program.buffers["w"] = dataclasses.replace(weight, shape=weight.shape[::-1])
    assert fuse(program, FUSED).to_json() == program.to_json()


def test_a_gradient_that_follows_another_sum_stays() -> None:
    """linear_backward_bias of another dout than the weight's."""
    program = gradients_program(model())
    block = program.items[-3]
    assert not isinstance(block, Call)
    weights = [call for call in block.body if call.op == "linear_backward_weight"]
    biases = [call for call in block.body if call.op == "linear_backward_bias"]
    piece = Program("piece")
    piece.buffers = dict(program.buffers)
    rule = next(rule for rule in RULES if rule.fused == ("linear_backward_weight_bias",))
    assert rule.rewrite(piece, (weights[0], biases[1])) is None
    assert rule.rewrite(piece, (weights[0], biases[0])) is not None


# ---- the same numbers ----------------------------------------------------------------------------


def train(engine: Engine, config: TrainConfig, steps: int = STEPS) -> list[StepResult]:
    for step in range(1, steps + 1):
        for part in range(2):
            batch = random_batch(config.model, config.data.batch_size, seed=2 * step + part)
            engine.gradients(batch, inv_count=0.5 / batch.trained, first=part == 0)
        engine.update(StepScalars(3e-3, *bias_corrections(step, 0.9, 0.95)))
    return engine.results()


@pytest.mark.parametrize("variant", VARIANTS)
def test_numpy_in_float64_computes_the_same_gradients_and_logits(variant: str) -> None:
    config = VARIANTS[variant]
    found: list[dict[str, np.ndarray]] = []
    for ops in ((), FUSED):
        numbers: dict[str, np.ndarray] = {}
        for kind, make in SETS.items():
            programs, dims = make(config, 2)
            fused = {name: fuse(program, ops) for name, program in programs.items()}
            engine: ProgramEngine = NumpyEngine(fused, dims, dtype=np.float64)
            engine.load(random_params(engine))
            batch = random_batch(config, 2, ignored=0.3)
            if kind == "training":
                for first in (True, False):
                    engine.gradients(batch, inv_count=1 / batch.trained, first=first)
                for name in engine.plan.layout:
                    numbers[f"grad.{name}"] = engine.read(engine.plan.tensor("grad", name))
            else:
                numbers["logits"] = engine.logits(batch.tokens)
                numbers["prefill"] = engine.prefill(batch.tokens[:, : max(1, config.n_ctx - 1)])
                numbers["loss"] = np.array([engine.loss(batch)])
        found.append(numbers)
    plain, joined = found
    assert set(plain) == set(joined)
    for name, wanted in plain.items():
        scale = max(1.0, float(np.abs(wanted).max()))
        assert np.abs(joined[name] - wanted).max() <= FUSED_IN_FLOAT64 * scale, name


def pair(name: str, config: TrainConfig, threads: int = 1) -> list[Engine]:
    """The engine with plain programs and with fused ones, from the same weights."""
    obtain("wasm32" if name == "wasm" else name, pytest.skip)
    family, _, build = name.partition("-")
    found = []
    for fused in (False, True):
        changes = {
            "engine.name": family,
            "engine.cpp_build": build,
            "engine.threads": threads,
            "engine.fuse": fused,
        }
        engine = training_engine(replace(config, changes))
        engine.load(initial_parameters(config.model, seed=1))
        found.append(engine)
    return found


@pytest.mark.parametrize("activation", ["gelu_new", "gelu"])
@pytest.mark.parametrize("name", BIT_IDENTICAL)
def test_plain_and_fused_runs_have_the_same_bits_on_the_cpp_kernels(
    name: str, activation: str
) -> None:
    config = train_config("tiny", data__batch_size=3, model__activation=activation)
    threads = max(THREADS) if name != "wasm" else 1
    plain, fused = pair(name, config, threads)
    assert train(plain, config) == train(fused, config)
    for kind in ("params", "m", "v"):
        wanted, got = getattr(plain.state(), kind), getattr(fused.state(), kind)
        assert all(got[tensor].tobytes() == wanted[tensor].tobytes() for tensor in wanted)


def test_plain_and_fused_runs_follow_each_other_on_webgpu() -> None:
    require("wgpu")
    config = train_config("tiny", data__batch_size=2, model__n_layer=1)
    runs = []
    for fused in (False, True):
        engine = training_engine(replace(config, {"engine.name": "webgpu", "engine.fuse": fused}))
        engine.load(initial_parameters(config.model, seed=1))
        runs.append(np.array([result.loss for result in train(engine, config, 5)]))
        engine.close()
    assert np.abs(runs[1] / runs[0] - 1).max() <= LOSS_TO_STEP_10["webgpu"]


# ---- who fuses ----------------------------------------------------------------------------------


def test_engines_name_fused_ops_of_the_table() -> None:
    assert set(FUSED) <= set(OPS)
    assert list(OPS)[-len(OPTIONAL) :] == list(OPTIONAL), "plain ops keep their numbers"
    assert OPTIONAL[: len(FUSED)] == FUSED
    assert CppEngine.fused_ops <= set(FUSED)
    assert WasmEngine.fused_ops == CppEngine.fused_ops, "the same sources"
    assert NumpyEngine.fused_ops == frozenset(), "the definition runs what was written"


@pytest.mark.parametrize("fused", [True, False])
def test_a_setting_decides_whether_programs_are_fused(fused: bool) -> None:
    config = train_config("tiny", engine__fuse=fused)
    engine = training_engine(config)
    assert isinstance(engine, ProgramEngine)
    used = {call.op for name in engine.plan.programs for call in engine.plan.bind(name)}
    assert used & set(FUSED) == (engine.fused_ops if fused else set())
