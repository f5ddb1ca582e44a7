"""The TypeScript runtime in Chromium, in a Web Worker: what ``test_web_runtime.py`` asks of node."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from browser import chromium_page, perform, served, site
from needs import require
from op_cases import CASES
from op_vectors import save
from posttrainllm.kernels.build_wasm import WASM
from tolerances import LOSS_TO_STEP_10, LOSS_TO_STEP_200, OVERFIT_LOSS, OVERFIT_STEPS
from web_jobs import GOLDEN, golden_job, job, python_run, training_text

require("wasmtime")
BUILDS = [name for name in WASM.processors if name != "control"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = site(tmp_path_factory.mktemp("site"))
    training_text(made / "data" / "train.bin")
    return made


@pytest.fixture(scope="module")
def page(folder: Path) -> Iterator[Any]:
    with served(folder) as address, chromium_page(address) as opened:
        yield opened


def train(page: Any, work: dict[str, Any]) -> dict[str, Any]:
    report: dict[str, Any] = perform(page, kind="train", job=work)
    return report


def test_chromium_offers_everything(page: Any) -> None:
    assert perform(page, kind="features") == {"simd": True, "threads": True, "memory64": True}


def test_every_op_is_right_in_chromium_in_every_build(page: Any, folder: Path) -> None:
    written = save(folder / "data", [case for case in CASES.values() if not case.slow])
    report = perform(page, kind="ops", builds=BUILDS)
    assert report["cases"] == written > 500
    assert not report["faults"], "\n".join(report["faults"])


def test_every_build_has_the_bits_of_python(page: Any) -> None:
    wanted = python_run("tiny", steps=25, write=20)
    for build in BUILDS:
        threads = 3 if build.endswith("-threads") else 1
        got = train(page, job("tiny", steps=25, build=build, threads=threads, write=20))
        assert (got["info"]["build"], got["info"]["threads"]) == (build, threads)
        assert got["losses"] == wanted["losses"], build
        assert got["weights"] == wanted["weights"], build
        assert got["written"] == wanted["written"], build


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("preset", GOLDEN)
def test_the_loss_curve_is_the_golden_one(page: Any, preset: str, threads: int) -> None:
    golden = np.array(GOLDEN[preset]["losses"])
    got = train(page, golden_job(preset, steps=len(golden), threads=threads))
    assert got["info"]["threads"] == threads
    drift = np.abs(np.array(got["losses"]) - golden) / golden
    assert drift[:10].max() <= LOSS_TO_STEP_10["native"]
    assert drift.max() <= LOSS_TO_STEP_200["native"]


def test_threads_with_64_bits_and_a_wide_model_train(page: Any) -> None:
    """Elsewhere this very combination broke: memory that grew under threads."""
    settings = {"model__n_embd": 256, "model__n_head": 8, "data__batch_size": 4}
    one = train(page, job("tiny", steps=15, build="wasm32", threads=1, **settings))
    both = train(page, job("tiny", steps=15, build="wasm64-threads", threads=2, **settings))
    assert both["info"]["build"] == "wasm64-threads"
    assert both["losses"] == one["losses"]
    assert both["losses"][-1] < both["losses"][0] - 1


def test_one_batch_is_learned_by_heart(page: Any) -> None:
    work = job("tiny", steps=OVERFIT_STEPS, threads=2, overfit=True, data__batch_size=2)
    assert train(page, work)["losses"][-1] <= OVERFIT_LOSS


def test_without_isolation_one_thread_trains_and_says_why(page: Any, folder: Path) -> None:
    other = page.context.browser.new_page()
    with served(folder, isolated=False) as address:
        other.goto(address)
        assert perform(other, kind="features")["threads"] is False
        got = train(other, job("tiny", steps=2, threads=2))
    other.close()
    assert got["info"]["build"] == "wasm32"
    assert "cross-origin isolation" in got["notices"][0]


def test_a_pool_worker_that_does_not_load_is_said_and_one_thread_trains(
    page: Any, folder: Path
) -> None:
    worker = folder / "src" / "runtime" / "pool_browser.ts"
    away = worker.rename(worker.with_suffix(".away"))
    other = page.context.browser.new_context().new_page()  # nothing in its cache
    try:
        with served(folder) as address:
            other.goto(address)
            got = train(other, job("tiny", steps=2, threads=2))
    finally:
        away.rename(worker)
        other.context.close()
    assert "a thread was lost" in got["notices"][0]
    assert got["info"]["threads"] == 1
    assert got["losses"] == python_run("tiny", steps=2)["losses"]


@pytest.mark.slow
@pytest.mark.parametrize("preset", ["medium", "large", "xl", "huge", "massive", "mega"])
def test_a_preset_trains_with_the_losses_of_cpp(page: Any, preset: str) -> None:
    wanted = python_run(preset, steps=2, engine="cpp")
    got = train(page, job(preset, steps=2, threads=2))
    assert got["info"]["threads"] == 2
    drift = np.abs(np.array(got["losses"]) / wanted["losses"] - 1)
    assert drift.max() <= LOSS_TO_STEP_10["native"]
