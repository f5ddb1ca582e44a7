"""The browser's runtime in node on a GPU: the WGSL engine through Dawn beside threaded WebAssembly, in one run; writes records.

    python bench/gpu/run_dawn.py --node NODE --dawn dawn.node --out FOLDER [--parts info,ops,curves,steps,...] [--presets small,large,...]

info       adapter, limits, features
ops        every op in every variant of its kernels against the numpy engine in float64, in small cases
curves     losses of webgpu against the cpp engine, same weights and batches
steps      wall time of training steps: webgpu, and wasm with all processors
behemoth   the largest preset: losses of node beside those of the Python host, from one file of weights
variants   GPU time of every variant of every call of a step

``--dawn`` names the file of npm's package ``webgpu``, ``--node`` a node of version 24 or later; the assets are made in a temporary folder.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from gpu_common import text

from posttrainllm.config import TrainConfig, load_config, replace, settings_of
from posttrainllm.engines.base import Batch, StepScalars
from posttrainllm.export_web import write
from posttrainllm.lab.benchmark_record import make_record, write_record
from posttrainllm.lab.cost import step_bytes
from posttrainllm.lab.limits import PARITY_RATE
from posttrainllm.model import training_programs

ROOT = Path(__file__).parents[2]
STEPS = ("small", "medium", "large", "xl", "huge", "massive", "mega")
SLOW = {"huge", "massive", "mega", "behemoth"}  # few steps of wasm are enough
GIVEN = argparse.Namespace()
BEGAN = time.monotonic()


def within(seconds: float) -> bool:
    """Whether so many seconds are left of the time given on the command line."""
    return bool(time.monotonic() - BEGAN + seconds < GIVEN.seconds)


class Node:
    """Runs scripts of ``web/`` over one folder of assets."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.assets = folder, folder / "assets"
        write(self.assets)
        self.text = folder / "text.bin"
        whole = text()
        self.text.write_bytes(whole[: int(0.9 * len(whole))].tobytes())
        self.environment = os.environ | {"DAWN": str(GIVEN.dawn.resolve())}

    def run(self, script: str, *arguments: str | Path, timeout: float = 120) -> Any:
        command = [str(GIVEN.node), "--disable-warning=ExperimentalWarning", script]
        result = subprocess.run(
            [*command, str(self.assets), *map(str, arguments)],
            cwd=ROOT / "web", env=self.environment, capture_output=True, text=True, timeout=timeout,
        )  # fmt: skip
        if result.returncode or not result.stdout.strip():
            raise RuntimeError(f"{script}: rc {result.returncode}\n{result.stderr[-3000:]}")
        if result.stderr.strip():
            print(result.stderr[-1500:], flush=True)
        return json.loads(result.stdout)

    def steps(self, engine: str, config: TrainConfig, **more: Any) -> dict[str, Any]:
        request = {
            "engine": engine, "settings": settings_of(config), "threads": 0, "text": str(self.text), "weights": None,
            "losses": 1, "steps": 1, "repeats": 0, "most": 0,
        } | more  # fmt: skip
        file = self.folder / "request.json"
        file.write_text(json.dumps(request))
        found: dict[str, Any] = self.run("bench/steps.ts", file)
        return found


def info(node: Node) -> dict[str, Any]:
    found = node.run("bench/adapter.ts")
    print("info", json.dumps(found), flush=True)
    return dict(found)


def ops(node: Node) -> dict[str, Any]:
    sys.path[:0] = [str(ROOT / "tests"), str(ROOT)]
    from op_cases import CASES  # type: ignore[import-not-found]
    from op_inputs import elements  # type: ignore[import-not-found]
    from op_vectors import save  # type: ignore[import-not-found]

    chosen = [case for case in CASES.values() if not case.slow and elements(case) <= GIVEN.elements]
    save(node.folder / "vectors", chosen, engine="webgpu")
    found = node.run("test/webgpu_ops.ts", node.folder / "vectors", timeout=200)
    kept = {key: found[key] for key in ("cases", "runs", "faults", "errors")}
    print("ops", json.dumps(kept), flush=True)
    return kept


def gentle(preset: str) -> TrainConfig:
    """A preset at the rate of parity runs, where a curve does not amplify rounding."""
    return replace(load_config(preset), {
        "schedule.kind": "constant", "schedule.learning_rate": PARITY_RATE, "schedule.warmup_steps": 0,
    })  # fmt: skip


def python_losses(engine: Any, config: TrainConfig, steps: int) -> list[float]:
    """The same steps as ``web/src/runtime/training.ts``, on an engine in Python that has its weights."""
    from posttrainllm.control import batch_offsets, bias_corrections, learning_rate

    whole = text()
    tokens = whole[: int(0.9 * len(whole))]
    batch, time_ = config.data.batch_size, config.model.n_ctx
    schedule, optimizer = config.schedule, config.optimizer
    for step in range(1, steps + 1):
        at = batch_offsets(config.training.seed, step, batch, 0, len(tokens) - time_)
        rows = tokens[np.asarray(at)[:, None] + np.arange(time_ + 1)].astype(np.int32)
        engine.gradients(
            Batch(np.ascontiguousarray(rows[:, :-1]), np.ascontiguousarray(rows[:, 1:])),
            inv_count=1.0 / (batch * time_),
            first=True,
        )
        lr = learning_rate(
            step, config.training.steps, schedule.kind, schedule.learning_rate, schedule.warmup_steps,
            schedule.final_ratio, schedule.decay_fraction,
        )  # fmt: skip
        engine.update(StepScalars(lr, *bias_corrections(step, optimizer.beta1, optimizer.beta2)))
    return [result.loss for result in engine.results()]


def drift(got: list[float], wanted: list[float]) -> dict[str, Any]:
    off = np.abs(np.array(got) - np.array(wanted)) / np.abs(np.array(wanted))
    return {
        "steps": len(got), "drift_10": float(off[:10].max()), "drift_all": float(off.max()),
        "losses": [got[0], got[-1]], "reference_losses": [wanted[0], wanted[-1]],
    }  # fmt: skip


def curves(node: Node) -> dict[str, Any]:
    from posttrainllm.engines.cpp_engine import CppEngine
    from posttrainllm.training.engine_choice import initial_parameters

    found = {}
    for preset, steps in (("small", 200), ("large", 30)) if not GIVEN.count else (("tiny", 5),):
        config = gentle(preset)
        got = node.steps("webgpu", config, losses=steps)["losses"]
        programs, dims = training_programs(config.model, config.optimizer, config.data.batch_size)
        cpu = CppEngine(programs, dims)
        cpu.load(initial_parameters(config.model, config.training.seed))
        found[preset] = drift(got, python_losses(cpu, config, steps))
        cpu.close()
        print("curves", preset, json.dumps(found[preset]), flush=True)
    return found


# ---- steps ---------------------------------------------------------------------------------------


def steps(node: Node) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for preset in GIVEN.presets.split(",") if GIVEN.presets else STEPS:
        config = load_config(preset)
        for engine in GIVEN.engines.split(","):
            if not within(20):
                print("steps", preset, engine, "no time left", flush=True)
                continue
            fast = engine == "webgpu"
            count = 40 if fast and preset not in SLOW else 10 if fast else 1
            count = GIVEN.count or count
            try:
                row = node.steps(
                    engine, config, steps=count, repeats=12, most=2500 if fast else 6000
                )
            except Exception as error:
                traceback.print_exc()
                found.setdefault(preset, {})[engine] = {"error": str(error)[-500:]}
                continue
            found.setdefault(preset, {})[engine] = timed(config, row, count)
            print_row("steps", preset, engine, found[preset][engine])
    return found


def timed(config: TrainConfig, row: dict[str, Any], count: int) -> dict[str, Any]:
    """A row of a record from what node says."""
    median, flops = statistics.median(row["times"]), config.flops_per_step
    return {
        "first_step_s": round((row["open_ms"] + row["first_step_ms"]) / 1000, 3), "median_ms": median,
        "min_ms": min(row["times"]), "max_ms": max(row["times"]), "host_ms": statistics.median(row["host_times"]),
        "repeats": len(row["times"]), "steps_a_repeat": count, "tokens_per_second": config.tokens_per_step / median * 1e3,
        "gflops": flops / median / 1e6, "flops_per_step": flops, "bytes_per_step": step_bytes(config),
        "dispatches": row["dispatches"], "nbytes": row["bytes"], "loss": row["loss"], "info": row["info"],
    }  # fmt: skip


def print_row(part: str, preset: str, engine: str, row: dict[str, Any]) -> None:
    print(
        f"{part} {preset:9s} {engine:7s} {row['median_ms']:9.3f} ms  min {row['min_ms']:9.3f}  host {row['host_ms']:8.3f}  "
        f"first {row['first_step_s']:6.2f} s  n {row['repeats']}  loss {row['loss']:.4f}  {row['info'].get('threads', '')}",
        flush=True,
    )


def keep_records(found: dict[str, Any], out: Path, case: str) -> None:
    """Timings as records, one an engine."""
    for engine in ("webgpu", "wasm"):
        rows, shown = [], {}
        for preset, systems in found.items():
            row = systems.get(engine, {})
            if "median_ms" in row:
                shown = row["info"]
                kept = {key: value for key, value in row.items() if key not in ("info", "loss")}
                rows.append({"preset": preset, "engine": f"{engine}-node", **kept})
        if rows:
            record = make_record(
                "step", case, engine=f"{engine}-node", info=shown,
                config=[load_config(row["preset"]) for row in rows], rows=rows,
                method={"warmup": 2, "repeats": 12, "at_most_s": 6, "read back": "once a repeat", "dawn": GIVEN.dawn_version},
            )  # fmt: skip
            write_record(record, out)


def behemoth(node: Node) -> dict[str, Any]:
    """Times, and ten losses beside those of the Python host: both from one file of weights."""
    config = load_config("behemoth")
    programs, dims = training_programs(config.model, config.optimizer, config.data.batch_size)
    from posttrainllm.engines.webgpu.engine import WebGpuEngine

    host = WebGpuEngine(programs, dims, tuned=False)
    weights, random = node.folder / "weights.bin", np.random.default_rng(1)
    params = {}
    with weights.open("wb") as stream:
        for name, (_, place) in host.plan.layout.items():
            values = np.float32(0.02) * random.standard_normal(place.shape, np.float32)
            params[name] = values + np.float32(".ln_" in f".{name}" and name.endswith("weight"))
            stream.write(params[name].tobytes())
    print("behemoth: weights", round(time.monotonic() - BEGAN, 1), flush=True)
    host.load(params)
    wanted = python_losses(host, config, 10)
    host.close()
    del params, host
    print("behemoth: python host", round(time.monotonic() - BEGAN, 1), wanted, flush=True)
    row = node.steps(
        "webgpu", config, weights=str(weights), losses=10, steps=3, repeats=12, most=4000
    )
    found = {
        "webgpu": timed(config, row, 3),
        "against the Python host": drift(row["losses"], wanted),
    }
    print_row("steps", "behemoth", "webgpu", found["webgpu"])
    print("behemoth", json.dumps(found["against the Python host"]), flush=True)
    return found


def variants(node: Node) -> dict[str, Any]:
    found = {}
    for preset in GIVEN.variants.split(","):
        if not within(15):
            continue
        file = node.folder / "settings.json"
        file.write_text(json.dumps(settings_of(load_config(preset))))
        found[preset] = node.run("bench/variants.ts", file)
        saved = sum(
            row["count"] * (row["times"][row["chosen"]] - min(row["times"].values()))
            for row in found[preset].values()
        )
        total = sum(r["count"] * r["times"][r["chosen"]] for r in found[preset].values())
        print(f"variants {preset}: {total:.0f} us a step as chosen, {saved:.0f} us less by the best of each", flush=True)  # fmt: skip
    return found


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--node", type=Path, required=True)
    parser.add_argument("--dawn", type=Path, required=True)
    parser.add_argument("--dawn-version", default="0.6.2")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--parts", default="info,steps,curves,behemoth,ops,variants")
    parser.add_argument("--presets", default="")
    parser.add_argument("--engines", default="webgpu,wasm")
    parser.add_argument("--variants", default="small,large,xl,huge,mega")
    parser.add_argument("--count", type=int, default=0, help="steps timed together (0: by preset)")
    parser.add_argument("--elements", type=int, default=3000)
    parser.add_argument("--seconds", type=float, default=170.0)
    parser.parse_args(namespace=GIVEN)
    GIVEN.out.mkdir(parents=True, exist_ok=True)
    parts: dict[str, Callable[[Node], dict[str, Any]]] = {
        "info": info, "ops": ops, "curves": curves, "steps": steps, "behemoth": behemoth, "variants": variants,
    }  # fmt: skip
    results: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(prefix="posttrainllm-dawn-") as folder:
        node = Node(Path(folder))
        for part in GIVEN.parts.split(","):
            began = time.perf_counter()
            if not within(10):
                print(f"-- {part}: no time left", flush=True)
                continue
            try:
                results[part] = parts[part](node)
            except Exception as error:
                traceback.print_exc()
                results[part] = {"error": f"{type(error).__name__}: {error}"[-2000:]}
            if part in ("steps", "behemoth") and "error" not in results[part]:
                rows = results[part] if part == "steps" else {"behemoth": results[part]}
                keep_records(rows, GIVEN.out, f"{part}-h200-dawn")
            (GIVEN.out / "parts.json").write_text(json.dumps(results, indent=1, default=str))
            print(f"-- {part}: {time.perf_counter() - began:.1f} s", flush=True)


if __name__ == "__main__":
    main()
