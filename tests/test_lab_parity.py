"""Parity: engines that agree pass, and one changed constant in one engine is found and named."""

from __future__ import annotations

import json
import math
import re

import numpy as np
import pytest

from lab_cases import as_arguments, small, text_of
from needs import require
from posttrainllm.cli import main
from posttrainllm.config import load_config
from posttrainllm.engines import numpy_engine
from posttrainllm.engines.numpy_ops import NUMPY_OPS
from posttrainllm.errors import ConfigError
from posttrainllm.lab import parity as parity_module
from posttrainllm.lab.limits import EARLY_STEPS, JUDGED_STEPS, gradient_limit, loss_limit
from posttrainllm.lab.parity import Trace, compare, parity

LAST_LINE = re.compile(
    r"parity: (PASS|FAIL), largest drift (\d\.\de-\d\d|nan) at step \d+ \(\w+ against [\w ]+\)"
)


@pytest.fixture
def config(tmp_path):
    return small(tmp_path)


@pytest.fixture
def change_numpy(monkeypatch):
    """Change an op of the numpy engine where it computes in float32: the reference, in float64, stays right."""

    def change(name, fault):
        right = NUMPY_OPS[name]

        def wrong(*operands, **attrs):
            kinds = {operand.dtype for operand in operands if operand is not None}
            if np.dtype(np.float64) in kinds:
                return right(*operands, **attrs)
            return fault(right, *operands, **attrs)

        monkeypatch.setitem(numpy_engine.NUMPY_OPS, name, wrong)

    return change


def constant(**changed):
    """A fault: some attributes have other values."""
    return lambda right, *operands, **attrs: right(*operands, **{**attrs, **changed})


def test_engines_that_compute_the_same_pass(config):
    found = parity(config, text_of(config), ["numpy", "cpp"], steps=25)
    assert found.passed
    assert found.reference.engine == "numpy float64"
    assert [one.engine for one in found.comparisons] == ["numpy", "cpp"]
    assert LAST_LINE.fullmatch(found.verdict)
    assert all(len(one.losses) == 25 for one in found.comparisons)
    names = {drift.tensor for drift in found.comparisons[0].gradients}
    assert {"wte.weight", "h.0.attn.c_attn.bias", "ln_f.weight"} <= names


def test_torch_passes_too(config):
    require("torch")
    assert parity(config, text_of(config), ["torch"], steps=25).passed


@pytest.mark.parametrize(
    ("changed", "shown_by"),
    [
        ({"beta1": 0.901}, "loss"),
        ({"beta2": 0.951}, "loss"),
        ({"eps": 1e-6}, "loss"),
        ({"weight_decay": 0.11}, "update"),
    ],
    ids=["beta1", "beta2", "eps", "weight_decay"],
)
def test_one_changed_constant_of_the_optimizer_is_found_and_named(
    config, change_numpy, changed, shown_by
):
    def fault(right, *operands, **attrs):
        # the arena without decay keeps its 0
        wrong = changed if attrs["weight_decay"] else {**changed, "weight_decay": 0.0}
        return right(*operands, **{**attrs, **wrong})

    change_numpy("adamw_step", fault)
    found = parity(config, text_of(config), ["cpp", "numpy"], steps=10)
    assert not found.passed
    assert found.comparisons[0].first_failure is None, "cpp was not changed"
    failure = found.comparisons[1].first_failure
    assert failure is not None
    assert failure.what == shown_by
    if shown_by == "loss":
        assert failure.step > 1, "the update shows in the loss of the step after it"
        assert f"; numpy: loss of step {failure.step} is off by" in found.verdict
    else:
        assert f"; numpy: update of {failure.tensor} is off by" in found.verdict
    assert LAST_LINE.match(found.verdict)


def test_a_wrong_clip_is_found(config, change_numpy):
    change_numpy("gradient_clip", constant(clip_norm=1.01))
    found = parity(config, text_of(config), ["numpy"], steps=3)
    assert not found.passed
    assert "numpy: update of" in found.verdict


def test_a_rate_that_one_engine_rounds_is_found(config, change_numpy):
    def fault(right, *operands, **attrs):
        *moving, grad, clip, scalars = operands
        return right(*moving, grad, clip, scalars * np.float32(1.002), **attrs)

    change_numpy("adamw_step", fault)
    assert not parity(config, text_of(config), ["numpy"], steps=10).passed


def test_a_wrong_gradient_is_named_before_any_step(config, change_numpy):
    def fault(right, out, *operands, **attrs):
        right(out, *operands, **attrs)
        out *= np.float32(1.0001)

    change_numpy("gelu_backward", fault)
    found = parity(config, text_of(config), ["numpy"], steps=3)
    failure = found.comparisons[0].first_failure
    assert failure is not None
    assert failure.tensor
    assert f"numpy: gradient of {failure.tensor} is off by" in found.verdict


@pytest.mark.parametrize("odd", [math.nan, math.inf])
def test_what_is_not_finite_fails_even_against_itself(odd):
    ones = {"wte.weight": np.ones(3, np.float32)}
    broken = Trace("cpp", [1.0, odd], ones)
    found = compare(broken, broken)
    assert found.first_failure is not None
    assert found.first_failure.step == 2
    hole = Trace("cpp", [1.0], {"wte.weight": np.array([1, odd, 1], np.float32)})
    found = compare(hole, Trace("numpy", [1.0], ones))
    assert found.first_failure is not None
    assert found.first_failure.tensor == "wte.weight"


def test_limits_grow_with_the_steps_and_webgpu_has_its_own():
    assert gradient_limit("cpp") < gradient_limit("webgpu")
    assert loss_limit("cpp", EARLY_STEPS) == 1e-6
    assert loss_limit("cpp", EARLY_STEPS + 1) == 1e-5
    assert loss_limit("webgpu", JUDGED_STEPS) == 1e-3
    assert loss_limit("cpp", JUDGED_STEPS + 1) is None


def test_a_large_model_is_compared_with_the_first_engine(config, monkeypatch):
    monkeypatch.setattr(parity_module, "MOST_REFERENCE_FLOPS", 1.0)
    found = parity(config, text_of(config), ["cpp", "numpy"], steps=4)
    assert found.passed
    assert found.reference.engine == "cpp"
    assert "too many for numpy float64" in found.why_reference
    with pytest.raises(ConfigError, match="nothing to be compared with"):
        parity(config, text_of(config), ["cpp"], steps=4)


def test_the_largest_preset_is_never_run_in_float64():
    affordable, why = parity_module._reference(load_config("behemoth"), 50)
    assert not affordable
    assert why


def test_progress_is_told_step_by_step(config):
    told = []
    parity(config, text_of(config), ["cpp"], steps=2, progress=lambda *facts: told.append(facts))
    assert told == [
        ("numpy float64", 1, 2),
        ("numpy float64", 2, 2),
        ("cpp", 1, 2),
        ("cpp", 2, 2),
    ]


def test_command_ends_with_the_verdict(tmp_path, capsys):
    code = main(["parity", "--engine", "numpy,cpp", "--steps", "5", *as_arguments(tmp_path)])
    lines = capsys.readouterr().out.splitlines()
    assert code == 0
    match = LAST_LINE.fullmatch(lines[-1])
    assert match
    assert match.group(1) == "PASS"


def test_command_exits_with_1_on_a_failure(tmp_path, capsys, change_numpy):
    change_numpy("adamw_step", constant(beta2=0.99))
    arguments = ["parity", "--engine", "numpy", "--steps", "5", *as_arguments(tmp_path)]
    assert main(arguments) == 1
    assert capsys.readouterr().out.splitlines()[-1].startswith("parity: FAIL")
    assert main([*arguments, "--json"]) == 1
    document = json.loads(capsys.readouterr().out)
    assert document["passed"] is False
    assert len(document["engines"][0]["losses"]) == 5
