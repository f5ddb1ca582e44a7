"""The TypeScript runtime in node: ops against vectors, training against Python bit by bit, and what can go wrong.

The same jobs run in Chromium in ``test_web_browser.py``.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from needs import require
from op_cases import CASES
from op_vectors import save
from posttrainllm.kernels.build_wasm import WASM
from tolerances import LOSS_TO_STEP_10, LOSS_TO_STEP_200, OVERFIT_LOSS, OVERFIT_STEPS
from web import assets, run_node, run_vitest
from web_jobs import GOLDEN, golden_job, job, python_run, training_text

require("wasmtime")
BUILDS = [name for name in WASM.processors if name != "control"]
THREADS = {"wasm32-threads": 3, "wasm64-threads": 2}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return assets(tmp_path_factory.mktemp("assets"))


def train(folder: Path, tmp_path: Path, **work: Any) -> dict[str, Any]:
    text = tmp_path / "train.bin"
    training_text(text)
    (tmp_path / "job.json").write_text(json.dumps({**work, "text": str(text)}))
    report: dict[str, Any] = json.loads(run_node("test/train.ts", folder, tmp_path / "job.json"))
    return report


def test_every_op_is_right_in_node_in_every_build(folder: Path, tmp_path: Path) -> None:
    written = save(tmp_path, [case for case in CASES.values() if not case.slow])
    report = json.loads(run_node("test/ops.ts", folder, tmp_path, *BUILDS))
    assert report["cases"] == written > 500
    assert not report["faults"], "\n".join(report["faults"])


def test_every_build_has_the_bits_of_python(folder: Path, tmp_path: Path) -> None:
    wanted = python_run("tiny", steps=25, write=20)
    for build in BUILDS:
        work = job("tiny", steps=25, build=build, threads=THREADS.get(build, 1), write=20)
        got = train(folder, tmp_path, **work)
        assert (got["info"]["build"], got["info"]["threads"]) == (build, THREADS.get(build, 1))
        assert got["losses"] == wanted["losses"], build
        assert got["gradNorms"] == wanted["grad_norms"], build
        assert got["weights"] == wanted["weights"], build
        assert got["written"] == wanted["written"], build
        assert got["notices"] == []


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("preset", GOLDEN)
def test_the_loss_curve_is_the_golden_one(
    folder: Path, tmp_path: Path, preset: str, threads: int
) -> None:
    golden = np.array(GOLDEN[preset]["losses"][: 200 if preset == "tiny" else 20])
    got = train(folder, tmp_path, **golden_job(preset, steps=len(golden), threads=threads))
    drift = np.abs(np.array(got["losses"]) - golden) / golden
    assert drift[:10].max() <= LOSS_TO_STEP_10["native"]
    assert drift.max() <= LOSS_TO_STEP_200["native"]


def test_one_batch_is_learned_by_heart(folder: Path, tmp_path: Path) -> None:
    work = job("tiny", steps=OVERFIT_STEPS, threads=2, overfit=True, data__batch_size=2)
    assert train(folder, tmp_path, **work)["losses"][-1] <= OVERFIT_LOSS


@pytest.mark.parametrize(
    "preset",
    ["medium", "large", "xl"]
    + [pytest.param(p, marks=pytest.mark.slow) for p in ("huge", "massive", "mega")],
)
def test_a_preset_trains_with_the_losses_of_cpp(folder: Path, tmp_path: Path, preset: str) -> None:
    wanted = python_run(preset, steps=2, engine="cpp")
    got = train(folder, tmp_path, **job(preset, steps=2, threads=2))
    drift = np.abs(np.array(got["losses"]) / wanted["losses"] - 1)
    assert drift.max() <= LOSS_TO_STEP_10["native"]


def test_typescript_tests(folder: Path) -> None:
    run_vitest(folder, {})
