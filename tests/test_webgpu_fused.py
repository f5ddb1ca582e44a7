"""Runs of calls that share dispatches on WebGPU: every variant gives the gradients of the numpy engine, and so does none."""

from __future__ import annotations

import functools

import numpy as np
import pytest

from needs import require
from posttrainllm.config import GPTConfig, OptimizerConfig
from posttrainllm.engines.base import Batch, StepScalars
from posttrainllm.engines.numpy_engine import NumpyEngine
from posttrainllm.model import training_programs
from posttrainllm.training.engine_choice import initial_parameters

require("wgpu")

from posttrainllm.engines.webgpu.dispatch import APART, DispatchTable, Limits  # noqa: E402
from posttrainllm.engines.webgpu.engine import WebGpuEngine  # noqa: E402
from webgpu_cases import device  # noqa: E402

LIMIT = 5e-5  # of a gradient's largest element: STYLE's limit of step-0 gradients
CONFIG = GPTConfig(n_layer=2, n_head=3, n_embd=36, n_ctx=72, n_vocab=100)
ROWS = 2
RULES = {rule["op"]: rule for rule in DispatchTable(Limits()).rules}
VARIANTS = DispatchTable(Limits()).ops
BACKWARD = ("linear_backward_gelu_run", "linear_backward_run", "linear_backward_head_run")


def batches() -> list[Batch]:
    random = np.random.default_rng(5)
    ids = random.integers(0, CONFIG.n_vocab, (3, ROWS, CONFIG.n_ctx + 1)).astype(np.int32)
    ids[1, 1, 7:20] = -1  # targets that do not count
    return [Batch(np.maximum(rows[:, :-1], 0), np.ascontiguousarray(rows[:, 1:])) for rows in ids]


def gradients(engine):
    """Two micro-batches, so that the second one is added, then an update and one more step's loss."""
    engine.load({k: v * 4 for k, v in initial_parameters(CONFIG, 3).items()})
    first, second, third = batches()
    engine.gradients(first, inv_count=0.01, first=True)
    engine.gradients(second, inv_count=0.01, first=False)
    found = engine.gradient_tensors()
    engine.update(StepScalars(1e-3, 0.1, 0.05))
    engine.gradients(third, inv_count=0.01, first=True)
    engine.update(StepScalars(1e-3, 0.19, 0.0975))
    results = engine.results()
    engine.close()
    return found, [(result.loss, result.grad_norm) for result in results]


@functools.cache
def reference():
    programs = training_programs(CONFIG, OptimizerConfig(), ROWS)
    return gradients(NumpyEngine(*programs, dtype=np.float64))


def check(preferred):
    device()
    engine = WebGpuEngine(*training_programs(CONFIG, OptimizerConfig(), ROWS), preferred=preferred)
    used = {work.op for work in engine.recorder.table.merge(engine.plan.bind("gradients"))}
    (wanted, numbers), (got, ours) = reference(), gradients(engine)
    for name, value in wanted.items():
        error = np.abs(got[name] - value).max() / np.abs(value).max()
        assert error <= LIMIT, f"gradient of {name} is off by {error:.1e}, limit {LIMIT:.0e}"
    np.testing.assert_allclose(ours, numbers, rtol=LIMIT)
    return used


@pytest.mark.parametrize("variant", [row["variant"] for row in VARIANTS["linear_backward_run"]])
def test_products_that_share_a_dispatch_give_the_gradients(variant):
    assert set(BACKWARD) <= check(dict.fromkeys(BACKWARD, variant))


@pytest.mark.parametrize("variant", [row["variant"] for row in VARIANTS["linear_gelu_run"]])
def test_linear_and_gelu_in_one_dispatch_give_the_gradients(variant):
    assert "linear_gelu_run" in check({"linear_gelu_run": variant})


def test_calls_one_by_one_give_the_gradients():
    assert not check(dict.fromkeys(RULES, APART)) & set(RULES)


def test_the_table_merges_a_training_step():
    programs, dims = training_programs(CONFIG, OptimizerConfig(), ROWS)
    table, plan = DispatchTable(Limits()), NumpyEngine(programs, dims).plan
    works = [*table.merge(plan.bind("gradients")), *table.merge(plan.bind("update"))]
    assert set(RULES) <= {work.op for work in works}
