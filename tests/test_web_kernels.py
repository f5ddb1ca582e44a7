"""The /kernels page in Chromium: every op on every engine that is there, WebGPU against WebAssembly, and what is said without a GPU."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from op_cases import CASES
from op_vectors import page_cases
from posttrainllm.kernels.build_wasm import WASM
from posttrainllm.lab.limits import loss_limit
from posttrainllm.ops import OPS
from site_visits import SWIFTSHADER, Visit, chromium, served, visit
from tolerances import LIMITS
from web import WEB

BUILDS = [name for name in WASM.processors if name != "control"]


def checked(visitor: Visit, folder: Path, **asked: object) -> dict[str, Any]:
    """The report that the page gives to its downloads."""
    page = visitor.open("kernels/", **asked)
    page.get_by_role("button", name="Check this browser").click()
    page.get_by_role("button", name="Download the report").wait_for()
    with page.expect_download() as found:
        page.get_by_role("button", name="Download the report").click()
    found.value.save_as(folder / "report.json")
    report: dict[str, Any] = json.loads((folder / "report.json").read_text())
    return report


def test_the_page_has_cases_of_every_op() -> None:
    cases = page_cases()
    assert {case.op for case in cases} == set(OPS)
    assert len(cases) == len({str(case) for case in cases})
    assert all(str(case) in CASES for case in cases)


def test_without_a_gpu_every_op_runs_in_every_build_and_the_page_says_what_is_missing(
    site: Path, browser: Any, tmp_path: Path
) -> None:
    with served(site) as address, visit(browser, address) as visitor:
        report = checked(visitor, tmp_path)
        page = visitor.page
        page.get_by_text("Everything is right.").wait_for()
        assert "WebGPU" in page.get_by_label("This browser").inner_text()
        assert report["left"][0].startswith("webgpu: ")
        page.get_by_text(report["left"][0]).wait_for()
        assert report["passed"] is True
        assert report["parity"] is None
        assert [engine["name"] for engine in report["engines"]] == BUILDS
        machine = report["machine"]
        assert machine["isolated"] is True
        assert machine["wasm"] == {"simd": True, "threads": True, "memory64": True}
        for engine in report["engines"]:
            assert set(engine["ops"]) == set(OPS)
            assert engine["cases"] == len(page_cases())
            for op, found in engine["ops"].items():
                assert found["error"] <= found["limit"] == LIMITS[op].native, op
        page.add_script_tag(path=WEB / "node_modules" / "axe-core" / "axe.min.js")
        violations = page.evaluate("axe.run()")["violations"]
        assert [one["id"] for one in violations if one["impact"] in ("serious", "critical")] == []


def test_without_isolation_the_builds_with_threads_are_named_as_left_out(
    site: Path, browser: Any, tmp_path: Path
) -> None:
    with (
        served(site, isolated=False) as address,
        visit(browser, address, service_workers="block") as visitor,
    ):
        report = checked(visitor, tmp_path, only="gelu")
        assert report["machine"]["isolated"] is False
        assert [engine["name"] for engine in report["engines"]] == ["wasm32", "wasm64"]
        assert [line.partition(":")[0] for line in report["left"][:2]] == [
            "wasm32-threads",
            "wasm64-threads",
        ]
        assert "cross-origin isolation" in report["left"][0]


def test_webgpu_is_compared_op_by_op_and_step_by_step(
    site: Path, tools: Any, tmp_path: Path
) -> None:
    with (
        served(site) as address,
        chromium(tools, *SWIFTSHADER) as browser,
        visit(browser, address) as visitor,
    ):
        report = checked(visitor, tmp_path, only="layernorm", steps=3)
        gpu = report["engines"][-1]
        assert gpu["name"] == "webgpu"
        for op, found in gpu["ops"].items():
            if found["runs"]:
                assert found["error"] <= found["limit"] == LIMITS[op].webgpu, op
        assert sum(found["runs"] for found in gpu["ops"].values()) >= 8
        adapter = report["machine"]["adapter"]
        assert adapter["software"] is True
        assert adapter["limits"]["maxStorageBuffersPerShaderStage"] >= 8
        parity = report["parity"]
        difference = np.abs(np.array(parity["webgpu"]) / parity["wasm"] - 1)
        assert len(difference) == parity["steps"] == 3
        assert difference.max() == pytest.approx(parity["early"]["difference"], rel=1e-6)
        assert difference.max() <= parity["early"]["limit"] == loss_limit("webgpu", 1)
        assert parity["wasm"][2] < parity["wasm"][0]
        assert report["passed"] is True


def test_a_wrong_result_is_named(site: Path, browser: Any, tmp_path: Path) -> None:
    """The page is given references of which one is wrong: it must say so, or it could not see a wrong kernel."""
    cases = json.loads((site / "data" / "kernels" / "cases.json").read_text())
    broken = next(one for one in cases["cases"] if one["op"] == "gelu_forward")
    data = bytearray((site / "data" / "kernels" / "data.bin").read_bytes())
    at = broken["results"][0]["ref"]["offset"]
    data[at : at + 8] = np.float64(3.25).tobytes()
    with served(site) as address, visit(browser, address) as visitor:
        visitor.context.route("**/data.bin", lambda route: route.fulfill(body=bytes(data)))
        report = checked(visitor, tmp_path, only="gelu_forward")
        assert report["passed"] is False
        visitor.page.get_by_text("Something is wrong here.").wait_for()
        assert f"{broken['name']}: out is off by" in report["engines"][0]["faults"][0]
