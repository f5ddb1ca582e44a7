"""Half precision on WebGPU: forward products alone, off unless asked for, and only where fifty steps stay beside float32."""

from __future__ import annotations

import numpy as np
import pytest

from needs import missing, require
from op_cases import CASES
from op_inputs import operands, reference
from posttrainllm.config import load_config
from posttrainllm.errors import ConfigError, EngineError
from posttrainllm.training import selfcheck
from posttrainllm.training.engine_choice import training_engine

require("wgpu")

from posttrainllm.engines.webgpu import device as layer  # noqa: E402
from posttrainllm.engines.webgpu.device import GpuDevice  # noqa: E402
from posttrainllm.engines.webgpu.dispatch import DispatchTable, Limits  # noqa: E402
from webgpu_cases import LoneOp, device, work  # noqa: E402

UNIT = 2.0**-11  # half a unit in the last place of f16, relative
PRODUCTS = [c for c in CASES.values() if c.op == "linear_forward" and not c.slow and work(c) < 3e7]


@pytest.fixture(scope="module")
def half_device():
    if "shader-f16" not in device().adapter.features:
        missing("the adapter has no shader-f16")
    return GpuDevice(device().adapter, half=True)


@pytest.mark.parametrize("case", [c for c in PRODUCTS if c.kind == "normal"], ids=str)
def test_half_products_are_as_close_as_half_inputs_and_short_half_sums_allow(
    case, half_device, monkeypatch
):
    monkeypatch.setattr("webgpu_cases.device", lambda: half_device)
    given = operands(case)
    halves = [name for name in LoneOp(case, given).variants if name.startswith("half")]
    if case.sizes["I"] % 4 or case.sizes["O"] % 4:
        assert not halves
        return
    assert halves == ["half128", "half64"] or halves == ["half64", "half128"]
    absolute = {name: None if value is None else np.abs(value) for name, value in given.items()}
    scale = reference(case, absolute)["out"]
    for variant in halves:
        op = LoneOp(case, given, variant)
        error = np.abs(op.run()["out"] - reference(case, given)["out"])
        op.close()
        # two rounded inputs, a product and at most eight additions in f16
        assert (error <= 11 * UNIT * scale + 1e-6).all(), variant


def test_half_kernels_are_no_choice_unless_asked_for():
    case = next(c for c in PRODUCTS if c.sizes["I"] % 4 == 0 and c.sizes["O"] % 4 == 0)
    call = LoneOp(case, operands(case)).call
    assert not any(name.startswith("half") for name in DispatchTable(Limits()).candidates(call))
    assert DispatchTable(Limits(half=1)).candidates(call)[0].startswith("half")


def test_half_precision_trains_beside_float32(half_device, tmp_path, monkeypatch):
    monkeypatch.setattr(selfcheck, "cache_folder", lambda: tmp_path)
    selfcheck.check_half(half_device.adapter)
    config = load_config("tiny", flags={"engine.name": "webgpu", "engine.precision": "float16"})
    engine = training_engine(config)
    assert engine.info["precision"] == "float16"
    engine.close()


def test_half_precision_that_is_too_far_off_is_refused_with_the_step(
    half_device, tmp_path, monkeypatch
):
    monkeypatch.setattr(selfcheck, "cache_folder", lambda: tmp_path)
    monkeypatch.setattr(selfcheck, "HALF_LIMIT", 0.0)
    monkeypatch.setattr(selfcheck, "HALF_STEPS", 3)
    with pytest.raises(
        EngineError, match=r"too far from float32: the .* of step \d is .*should be"
    ):
        selfcheck.check_half(half_device.adapter)


def test_an_adapter_without_half_precision_is_named(monkeypatch):
    opened = device()
    monkeypatch.setattr(layer, "WANTED_FEATURES", ())
    with pytest.raises(EngineError, match=r"has no half precision \(shader-f16\)"):
        GpuDevice(opened.adapter, half=True)


@pytest.mark.parametrize("engine", ["numpy", "cpp", "wasm", "torch"])
def test_other_engines_refuse_float16_by_name(engine):
    with pytest.raises(ConfigError, match=f"engine {engine} has no float16"):
        load_config("tiny", flags={"engine.name": engine, "engine.precision": "float16"})
