"""Every WGSL kernel against the numpy engine in float64, on whatever adapter is here."""

from __future__ import annotations

import numpy as np
import pytest

from needs import require
from op_inputs import operands, reference
from posttrainllm.ops import OPS, OPTIONAL
from tolerances import LIMITS, errors

require("wgpu")

from posttrainllm.engines.webgpu.engine import WebGpuEngine  # noqa: E402
from webgpu_cases import HAS, SMALL, LoneOp, work  # noqa: E402


@pytest.mark.parametrize("case", SMALL, ids=str)
def test_webgpu_op_is_within_its_limit(case):
    given = operands(case)
    wanted, limit = reference(case, given), LIMITS[case.op].of("webgpu")
    variants = LoneOp(case, given).variants
    assert variants, f"no kernel takes {case}"
    for variant in variants:
        op = LoneOp(case, given, variant)
        got = op.run()
        for name, value in got.items():
            bad = np.isfinite(wanted[name]) & ~np.isfinite(value)
            assert not bad.any(), f"{case} {variant}: {name} has {bad.sum()} numbers not finite"
        for name, error in errors(case, given, wanted, got).items():
            assert error <= limit, f"{case} {variant}: {name} is off by {error:.1f}, limit {limit}"
        again = op.run()
        for name, value in got.items():
            assert np.array_equal(value, again[name], equal_nan=True), f"{case} {variant} differs"
        op.close()


@pytest.mark.parametrize("op", [op for op in OPS if op not in HAS])
def test_fused_op_is_offered(op):
    assert op in OPTIONAL
    assert op not in WebGpuEngine.fused_ops
    pytest.skip(f"not supported: webgpu has no {op}, its programs keep the ops that it joins")


@pytest.mark.parametrize("op", HAS)
def test_a_nan_that_goes_in_comes_out_on_webgpu(op):
    fitting = [
        c for c in SMALL if c.op == op and c.kind in ("normal", "above") and not c.accumulates
    ]
    case = max(fitting, key=lambda c: work(c) if work(c) < 1e5 else 0)
    for operand in case.row.inputs:
        given = operands(case)
        value = given[operand.name]
        if value is None or value.dtype == np.int32 or operand.name in ("scalars", "clip"):
            continue
        value[...] = np.nan
        for variant in LoneOp(case, given).variants:
            lone = LoneOp(case, given, variant)
            got = lone.run()
            lone.close()
            assert any(np.isnan(result).any() for result in got.values()), (operand.name, variant)
