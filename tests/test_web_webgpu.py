"""The WGSL engine in TypeScript: the same choices of kernels as in Python, every op, whole trainings, and a GPU that is lost.

In node with Dawn, and in Chromium; on a software adapter where there is no other one.
"""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from browser import chromium_page, perform, served, site
from needs import require
from op_cases import CASES
from op_inputs import Case, elements
from op_vectors import MAX_ELEMENTS, save
from posttrainllm.config import PRESETS, load_config, settings_of
from posttrainllm.engines.webgpu.dispatch import DispatchTable, Limits
from posttrainllm.engines.webgpu.memory import GpuMemory
from posttrainllm.errors import EngineError
from posttrainllm.model import inference_programs, training_programs
from posttrainllm.ops import OPS
from posttrainllm.plan import Plan, make_plan
from test_web_plan import random_config
from tolerances import LOSS_TO_STEP_10, LOSS_TO_STEP_200
from web import assets, run_node, run_vitest, webgpu_environment
from web_jobs import GOLDEN, golden_job, job, training_text

require("wasmtime")
CHOICES = 24  # random configurations whose kernels are compared
SMALL = 2000  # elements of an op's case that runs in every test run ...
FEW = 3  # ... and about how many of them an op has there
BROWSER = ("--enable-unsafe-webgpu", "--use-webgpu-adapter=swiftshader")
MODEL = {"model__n_layer": 1, "model__n_ctx": 8, "data__batch_size": 2}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return assets(tmp_path_factory.mktemp("assets"))


# ---- the choice of kernels -----------------------------------------------------------------------


class Nowhere:
    """A device of the right size that holds nothing."""

    name = "nowhere"

    def __init__(self, limits: Limits, buffer_bytes: int) -> None:
        self.binding_bytes, self.buffer_bytes = limits.binding_bytes, buffer_bytes

    def buffer(self, *_: Any) -> None:
        """Take nothing."""


def choice_cases() -> list[dict[str, Any]]:
    draw = random.Random(9)
    configs = [load_config(preset) for preset in PRESETS]
    configs += [random_config(draw) for _ in range(CHOICES)]
    found = []
    for index, config in enumerate(configs):
        kind = "training" if index < len(PRESETS) else draw.choice(["training", "inference"])
        binding = draw.choice([2**20, 2**27, 2**31 - 4])
        limits = Limits(
            workgroup_bytes=draw.choice([16384, 32768, 49152]),
            subgroups=draw.choice([0, 1]),
            checked=draw.choice([0, 1, 1]),
            binding_bytes=2**31 - 4 if index < len(PRESETS) else binding,
        )
        names = draw.choice(["", "subgroups", "slices64", "tile32", "blocked", "rows", "apart"])
        found.append(
            {
                "config": config,
                "settings": settings_of(config),
                "kind": kind,
                "batch": config.data.batch_size if kind == "training" else draw.randint(1, 3),
                "smaller": {"prefill": {"B": 1, "T": draw.randint(1, config.model.n_ctx)}},
                "limits": limits.names(),
                "python_limits": limits,
                "bufferBytes": draw.choice([limits.binding_bytes, 2**32]),
                "preferred": dict.fromkeys(DispatchTable(Limits()).ops, names) if names else {},
            }
        )
    return found


def describe_choices(case: dict[str, Any]) -> str:
    config, limits = case["config"], case["python_limits"]
    if case["kind"] == "training":
        programs, dims = training_programs(config.model, config.optimizer, case["batch"])
    else:
        programs, dims = inference_programs(config.model, case["batch"])
    plan: Plan = make_plan(programs, dims)
    table = DispatchTable(limits, case["preferred"])
    memory = GpuMemory(plan, Nowhere(limits, case["bufferBytes"]))  # type: ignore[arg-type]
    lines = []
    for name in programs:
        for smaller in ({}, case["smaller"].get(name, {})):
            for work in table.merge(plan.bind(name, **smaller)):
                lines.append(f"{name} {','.join(table.candidates(work))}")
                windows = memory.windows(work.arena) if work.op in OPS and work.arena else None
                try:
                    found = table.dispatches(work, windows)
                except EngineError as error:
                    lines.append(f"{work.key} {error.message}")
                    continue
                lines.append(f"{work.key} {found.variant} {found.workspace}")
                for one in found.passes:
                    constants = ",".join(f"{key}={value}" for key, value in one.overrides)
                    window = "-" if one.window is None else f"{one.window[0]}..{one.window[1]}"
                    grid = "x".join(map(str, one.grid))
                    lines.append(
                        f"  {one.file} {one.entry} {','.join(one.bind)} {constants} {one.words.hex()} {grid} {window}"
                    )
    return "\n".join(lines)


def test_kernels_are_chosen_as_in_python(folder: Path, tmp_path: Path) -> None:
    given = choice_cases()
    file = tmp_path / "cases.json"
    kept = ("config", "python_limits")
    file.write_text(json.dumps([{k: v for k, v in c.items() if k not in kept} for c in given]))
    hashes = run_node("test/webgpu_dispatches.ts", folder, file).split()
    assert len(hashes) == len(given) == CHOICES + len(PRESETS)
    for index, (case, got) in enumerate(zip(given, hashes, strict=True)):
        wanted = describe_choices(case)
        if hashlib.sha256(wanted.encode()).hexdigest() != got:
            other = run_node("test/webgpu_dispatches.ts", folder, file, str(index)).rstrip("\n")
            assert other.split("\n") == wanted.split("\n"), f"case {index}: {case['settings']}"


# ---- in node, with Dawn --------------------------------------------------------------------------


def train(folder: Path, tmp_path: Path, **work: Any) -> dict[str, Any]:
    text = tmp_path / "train.bin"
    training_text(text)
    (tmp_path / "job.json").write_text(json.dumps({**work, "text": str(text)}))
    environment = webgpu_environment() if work.get("engine") == "webgpu" else {}
    arguments = ("test/train.ts", folder, tmp_path / "job.json")
    report: dict[str, Any] = json.loads(run_node(*arguments, environment=environment, timeout=1500))
    return report


def some_cases() -> list[Case]:
    """A few cases of every op, small ones, spread over its shapes."""
    found = []
    for op in OPS:
        fitting = [c for c in CASES.values() if c.op == op and not c.slow and elements(c) <= SMALL]
        found += fitting[:: max(1, len(fitting) // FEW)]
    return found


def check_ops(folder: Path, tmp_path: Path, chosen: list[Case]) -> None:
    save(tmp_path, chosen, engine="webgpu")
    output = run_node(
        "test/webgpu_ops.ts", folder, tmp_path, environment=webgpu_environment(), timeout=1500
    )
    report = json.loads(output)
    assert set(report["errors"]) == set(DispatchTable(Limits()).ops) & set(OPS)
    assert report["cases"] == sum(case.op in report["errors"] for case in chosen)
    assert report["runs"] > report["cases"]
    assert not report["faults"], "\n".join(report["faults"])


def test_every_op_is_right_in_every_variant_in_node(folder: Path, tmp_path: Path) -> None:
    check_ops(folder, tmp_path, some_cases())


@pytest.mark.slow
def test_every_op_is_right_in_larger_cases_in_node(folder: Path, tmp_path: Path) -> None:
    check_ops(
        folder, tmp_path, [c for c in CASES.values() if not c.slow and elements(c) <= MAX_ELEMENTS]
    )


def drift_of(losses: list[float], preset: str) -> Any:
    golden = np.array(GOLDEN[preset]["losses"][: len(losses)])
    return np.abs(np.array(losses) - golden) / golden


def test_the_loss_curve_is_the_golden_one_and_the_writing_that_of_wasm(
    folder: Path, tmp_path: Path
) -> None:
    work = golden_job("tiny", steps=8, threads=1) | {"write": 4}
    got = train(folder, tmp_path, **work, engine="webgpu")
    assert got["info"]["engine"] == "webgpu"
    drift = drift_of(got["losses"], "tiny")
    assert drift.max() <= LOSS_TO_STEP_10["webgpu"]
    assert got["written"] == train(folder, tmp_path, **work)["written"]


@pytest.mark.slow
@pytest.mark.parametrize(("preset", "steps"), [("tiny", 200), ("small", 20)])
def test_the_whole_loss_curve_is_the_golden_one(
    folder: Path, tmp_path: Path, preset: str, steps: int
) -> None:
    got = train(folder, tmp_path, **golden_job(preset, steps=steps, threads=1), engine="webgpu")
    drift = drift_of(got["losses"], preset)
    assert drift[:10].max() <= LOSS_TO_STEP_10["webgpu"]
    assert drift.max() <= LOSS_TO_STEP_200["webgpu"]


def test_typescript_tests_of_the_gpu(folder: Path) -> None:
    run_vitest(folder, webgpu_environment() | {"WEBGPU": "1"}, "test/webgpu")


def soak(folder: Path, tmp_path: Path, **work: Any) -> dict[str, Any]:
    training_text(tmp_path / "train.bin")
    (tmp_path / "job.json").write_text(json.dumps(work))
    report: dict[str, Any] = json.loads(
        run_node(
            "test/webgpu_soak.ts",
            folder,
            tmp_path / "job.json",
            tmp_path / "train.bin",
            environment=webgpu_environment(),
            timeout=1500,
        )
    )
    return report


@pytest.mark.slow
def test_200_steps_end_with_the_memory_of_step_10(folder: Path, tmp_path: Path) -> None:
    report = soak(folder, tmp_path, **job("tiny", steps=200))
    assert report["bytes"][-1] == report["bytes"][0]
    assert report["heap"][-1] <= report["heap"][0] + 2**19
    assert report["resident"][-1] <= 1.03 * report["resident"][0]
    assert report["late"] >= 0.95 * report["early"]


# ---- in Chromium ---------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    made = site(tmp_path_factory.mktemp("site"))
    training_text(made / "data" / "train.bin")
    with served(made) as address, chromium_page(address, *BROWSER) as opened:
        yield opened


def test_chromium_says_which_adapter_there_is(page: Any) -> None:
    report = perform(page, kind="adapter")
    assert report["usable"], report["reason"]
    assert report["software"]
    assert report["limits"]["maxStorageBuffersPerShaderStage"] >= 8


def test_the_loss_curve_in_chromium_is_the_golden_one(page: Any) -> None:
    got = perform(
        page, kind="train", job=golden_job("tiny", steps=3, threads=1) | {"engine": "webgpu"}
    )
    assert got["info"]["host"] == "browser"
    assert drift_of(got["losses"], "tiny").max() <= LOSS_TO_STEP_10["webgpu"]


def test_a_device_that_is_lost_in_chromium_ends_the_engine_at_once_and_a_new_one_goes_on(
    page: Any,
) -> None:
    settings = job("tiny", steps=0, **MODEL)["settings"]
    got = perform(page, kind="lose", settings=settings, after=3)
    assert got["error"] == "EngineLost"
    assert "go on from the last snapshot" in got["message"]
    assert got["heard"] < 1000
    assert got["before"] + got["after"] == got["whole"]


def test_without_webgpu_the_page_is_told_so(page: Any) -> None:
    other = page.context.browser.browser_type.launch(
        executable_path=require("chromium"),
        args=["--headless=new", "--no-sandbox", "--disable-features=WebGPU"],
    )
    tab = other.new_page()
    tab.goto(page.url)
    report = perform(tab, kind="adapter")
    other.close()
    assert not report["usable"]
    assert "gives no adapter" in report["reason"]
