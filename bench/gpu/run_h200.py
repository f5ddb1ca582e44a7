"""Checks and times the webgpu engine on a GPU, in one run on a bare machine; writes one JSON file, and records of bench/results' form.

    python bench/gpu/run_h200.py --out FOLDER [--parts info,checks,parity,...] [--presets small,medium,...]

info       adapter, limits, features
checks     self-check, a NaN that must not reach the weights, an adapter that is not there
parity     losses of webgpu against the cpp engine, same weights and batches
steps      wall time of training steps in turns with PyTorch (eager, CUDA graph, compiled TF32 + CUDA graph)
memory     2,000 steps at small: memory and speed at the end against the beginning
attention  time and memory by length
profile    GPU time of a step, dispatch by dispatch
tune       GPU time of every variant of every call of a step
products   matrix products alone, with and without the run-time checks of a browser
variants   what subgroups and half precision gain inside a step
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import statistics
import subprocess
import time
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import gpu_probes
import gpu_variants
import numpy as np
from gpu_common import batches, engine, fast_parameters, reference, train

from posttrainllm.config import TrainConfig, load_config
from posttrainllm.engines.base import StepScalars
from posttrainllm.engines.webgpu.device import GpuDevice, adapters, choose_adapter
from posttrainllm.errors import EngineError
from posttrainllm.lab.benchmark_record import make_record, write_record
from posttrainllm.lab.cost import step_bytes
from posttrainllm.training.engine_choice import initial_parameters
from posttrainllm.training.selfcheck import self_check

PARITY = ("small", "medium", "large", "xl")
STEPS = ("small", "medium", "large", "xl", "huge", "massive", "mega", "behemoth")
COMPILED = ("small", "medium", "large", "xl")  # torch.compile takes up to a minute a preset
ROUNDS = 12
BEGAN = time.monotonic()
GIVEN = argparse.Namespace()


def tokens_per_step(config: TrainConfig) -> int:
    return config.data.batch_size * config.model.n_ctx


def within(seconds: float) -> bool:
    """Whether so many seconds are left of the time given on the command line."""
    return bool(time.monotonic() - BEGAN + seconds < GIVEN.seconds)


# ---- parity, checks ------------------------------------------------------------------------------


def parity(presets: list[str]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for preset in presets:
        config = load_config(preset)
        gpu, cpu = engine(config), reference(config)
        began = time.perf_counter()
        ours = np.array(train(gpu, config, GIVEN.parity_steps))
        middle = time.perf_counter()
        theirs = np.array(train(cpu, config, GIVEN.parity_steps))
        drift = np.abs(ours[:, 0] - theirs[:, 0]) / np.abs(theirs[:, 0])
        found[preset] = {
            "reference": cpu.info, "steps": GIVEN.parity_steps, "drift_10": float(drift[:10].max()),
            "drift_50": float(drift[:50].max()), "drift_all": float(drift.max()),
            "losses": [ours[0, 0], ours[-1, 0]], "reference_losses": [theirs[0, 0], theirs[-1, 0]],
            "seconds": [middle - began, time.perf_counter() - middle], "engine": gpu.info,
        }  # fmt: skip
        row = {key: value for key, value in found[preset].items() if key != "engine"}
        print("parity", preset, json.dumps(row), flush=True)
        gpu.close()
        cpu.close()
    return found


def checks() -> dict[str, Any]:
    found: dict[str, Any] = {}
    config = load_config("tiny")
    gpu = engine(config)
    params = initial_parameters(config.model, 1)
    gpu.load({**params, "wte.weight": np.full_like(params["wte.weight"], np.nan)})
    source = batches(config)
    gpu.gradients(next(source), inv_count=1 / 512, first=True)
    gpu.update(StepScalars(1e-3, 0.1, 0.05))
    result = gpu.results()[0]
    after = gpu.state().params["h.0.attn.c_attn.weight"]
    found["a NaN is seen"] = not result.finite
    found["a NaN leaves the weights"] = bool(
        np.array_equal(after, params["h.0.attn.c_attn.weight"])
    )
    gpu.close()
    try:
        choose_adapter("no such adapter")
    except EngineError as error:
        found["a missing adapter"] = f"{error.message}; {error.hint}"
    began = time.perf_counter()
    found["self-check"] = self_check(choose_adapter()) or "passed"
    found["self-check_s"] = time.perf_counter() - began
    again = [train(engine(config), config, 20) for _ in range(2)]
    found["two runs are bit-identical"] = again[0] == again[1]
    print("checks", json.dumps(found, default=str), flush=True)
    return found


# ---- steps ---------------------------------------------------------------------------------------


class GpuStep:
    """A training step of the webgpu engine; kernels by table or by measurement."""

    def __init__(self, config: TrainConfig, tuned: bool) -> None:
        self.gpu = engine(config, tuned=tuned)
        fast = config.preset in ("behemoth", "massive", "mega", "huge")
        params = fast_parameters(self.gpu) if fast else initial_parameters(config.model, 1)
        self.gpu.load(params)
        self.scale = 1.0 / tokens_per_step(config)
        self.last = float("nan")

    def step(self, batch: Any) -> None:
        self.gpu.gradients(batch, inv_count=self.scale, first=True)
        self.gpu.update(StepScalars(1e-4, 0.1, 0.05))
        self._keep(wait=False)

    def wait(self) -> float:
        self._keep(wait=True)
        return self.last

    def _keep(self, wait: bool) -> None:
        for result in self.gpu.results(wait=wait):
            self.last = result.loss


class CudaStep:
    """A training step of one of the PyTorch baselines."""

    def __init__(self, config: TrainConfig, kind: str) -> None:
        from torch_baselines import TorchStep

        self.inner = TorchStep(config, kind)
        self.pinned: dict[int, Any] = {}

    def step(self, batch: Any) -> None:
        if id(batch) not in self.pinned:
            self.pinned[id(batch)] = self.inner.pinned(batch.tokens, batch.targets)
        self.inner.step(*self.pinned[id(batch)])

    def wait(self) -> float:
        return self.inner.loss()


def steps(presets: list[str]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for preset in presets:
        if not within(25):
            found[preset] = {"skipped": "no time left"}
            continue
        config = load_config(preset)
        source = [next(batches(config, seed)) for seed in range(8)]
        makers: dict[str, Callable[[], GpuStep | CudaStep]] = {
            "webgpu": partial(GpuStep, config, True),
            "webgpu table": partial(GpuStep, config, False),
            "torch eager": partial(CudaStep, config, "eager"),
            "torch graph": partial(CudaStep, config, "graph"),
        }
        if preset in COMPILED and within(80):
            makers["torch tf32 graph"] = partial(CudaStep, config, "tf32")
        running: dict[str, Any] = {}
        found[preset] = {}
        for name, make in makers.items():
            began = time.perf_counter()
            try:
                running[name] = make()
                running[name].step(source[0])
                running[name].wait()
                found[preset][name] = {"first_step_s": round(time.perf_counter() - began, 2)}
            except Exception as error:
                traceback.print_exc()
                found[preset][name] = {"error": f"{type(error).__name__}: {error}"}
                running.pop(name, None)
        _rounds(config, running, source, found[preset])
        for name, one in running.items():
            if isinstance(one, GpuStep):
                gpu = one.gpu
                keys = [key for key in gpu._prepared if key[0] in ("gradients", "update")]
                found[preset][name]["dispatches"] = sum(
                    len(gpu._prepared[key].dispatches) for key in keys
                )
                found[preset][name]["nbytes"] = gpu.nbytes
                found[preset][name]["info"] = gpu.info
                gpu.close()
        running.clear()
    return found


def _rounds(
    config: TrainConfig, running: dict[str, Any], source: list[Any], found: dict[str, Any]
) -> None:
    """Time a few steps of each in turns."""
    flops = config.flops_per_step
    count = 20 if flops < 2e11 else 8 if flops < 1e12 else 3
    times: dict[str, list[float]] = {name: [] for name in running}
    host: dict[str, list[float]] = {name: [] for name in running}
    losses: dict[str, float] = {}
    for turn in range(ROUNDS + 2):
        for name, one in running.items():
            for index in range(2):
                one.step(source[index])
            one.wait()
            began = time.perf_counter()
            for index in range(count):
                one.step(source[index % 8])
            middle = time.perf_counter()
            losses[name] = one.wait()
            ended = time.perf_counter()
            if turn >= 2:
                times[name].append(1e3 * (ended - began) / count)
                host[name].append(1e3 * (middle - began) / count)
    for name, values in times.items():
        median = statistics.median(values)
        found[name] |= {
            "median_ms": median, "min_ms": min(values), "max_ms": max(values),
            "host_ms": statistics.median(host[name]), "repeats": len(values), "steps_a_repeat": count,
            "tokens_per_second": tokens_per_step(config) / median * 1e3, "gflops": flops / median / 1e6,
            "flops_per_step": flops, "bytes_per_step": step_bytes(config), "loss": losses[name],
        }  # fmt: skip
        print(f"steps {config.preset:9s} {name:17s} {median:8.3f} ms  min {min(values):8.3f}  host "
              f"{found[name]['host_ms']:7.3f}  first {found[name]['first_step_s']:6.2f} s  loss {losses[name]:.4f}",
              flush=True)  # fmt: skip


def keep_records(found: dict[str, Any], out: Path) -> None:
    """Timings as records, one a system."""
    systems = {
        "webgpu": "webgpu", "webgpu table": "webgpu", "torch eager": "torch", "torch graph": "torch",
        "torch tf32 graph": "torch",
    }  # fmt: skip
    for system, name in systems.items():
        rows = []
        info: dict[str, Any] = {"device": "cuda", "form": system}
        for preset, row in found.items():
            if "median_ms" in row.get(system, {}):
                kept = {
                    key: value for key, value in row[system].items() if key not in ("info", "loss")
                }
                rows.append({"preset": preset, "engine": name, **kept})
                info = row[system].get("info", info)
        if rows:
            info = {key: value for key, value in info.items() if key != "choices"}
            record = make_record(
                "step",
                "step-h200" + system.removeprefix(name).replace(" ", "-"),
                engine=name,
                info=info,
                config=[load_config(row["preset"]) for row in rows],
                rows=rows,
                method={
                    "warmup": 2,
                    "repeats": ROUNDS,
                    "interleaved": list(systems),
                    "read back": "once a repeat",
                },
            )
            write_record(record, out)


# ---- memory --------------------------------------------------------------------------------------


def _memory() -> dict[str, int]:
    """Resident memory of this process, and memory used on the GPU, in bytes."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    query = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
    told = ""
    if shutil.which(query[0]):
        told = subprocess.run(query, capture_output=True, text=True).stdout
    return {
        "resident": pages * os.sysconf("SC_PAGE_SIZE"),
        "gpu": int(told.split()[0]) << 20 if told.strip() else 0,
    }


def memory(count: int = 2000) -> dict[str, Any]:
    config = load_config("small")
    running = GpuStep(config, True)
    source = [next(batches(config, seed)) for seed in range(8)]
    marks: dict[int, float] = {}
    sizes: dict[int, dict[str, int]] = {}
    for index in range(1, count + 1):
        running.step(source[index % 8])
        if index in (10, 210, count - 200, count):
            running.wait()
            sizes[index] = _memory() | {"planned": running.gpu.nbytes}
            marks[index] = time.perf_counter()
    early, late = 200 / (marks[210] - marks[10]), 200 / (marks[count] - marks[count - 200])
    found = {
        "memory": sizes, "steps_per_second": [early, late], "late / early": late / early,
        "growth": {key: sizes[count][key] - sizes[10][key] for key in sizes[10]},
    }  # fmt: skip
    print("memory", json.dumps(found), flush=True)
    running.gpu.close()
    return found


def info() -> dict[str, Any]:
    root = Path(__file__).parents[2]
    commit = subprocess.run(
        ["git", "-C", str(root), "rev-parse", "HEAD"], capture_output=True, text=True
    )
    chosen = GpuDevice(choose_adapter())
    return {
        "commit": commit.stdout.strip(), "python": platform.python_version(), "machine": platform.platform(),
        "adapters": [dict(adapter.info) for adapter in adapters()], "device": chosen.info,
        "limits": {key: int(value) for key, value in chosen.device.limits.items()},
        "features": sorted(chosen.adapter.features),
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--parts", default="info,checks,steps,parity,memory,attention,profile,tune")
    parser.add_argument("--presets", default="")
    parser.add_argument("--sizes", default="1024,2048,4096")
    parser.add_argument("--parity-steps", type=int, default=200)
    parser.add_argument("--seconds", type=float, default=540.0)
    parser.parse_args(namespace=GIVEN)
    GIVEN.out.mkdir(parents=True, exist_ok=True)
    sizes = [int(size) for size in GIVEN.sizes.split(",")]
    chosen = GIVEN.presets.split(",") if GIVEN.presets else []
    parts: dict[str, Callable[[], dict[str, Any]]] = {
        "info": info,
        "checks": checks,
        "parity": lambda: parity(chosen or list(PARITY)),
        "steps": lambda: steps(chosen or list(STEPS)),
        "memory": memory,
        "attention": gpu_probes.attention,
        "profile": lambda: gpu_probes.profile(chosen or ["small", "medium", "large", "xl"]),
        "tune": lambda: gpu_probes.tune(chosen or ["small", "medium", "large", "xl", "mega"]),
        "products": lambda: {
            "unchecked": gpu_probes.products(False, sizes),
            "checked": gpu_probes.products(True, sizes),
        },
        "variants": lambda: gpu_variants.variants(
            chosen or ["small", "medium", "large", "xl", "huge"]
        ),
    }
    results: dict[str, Any] = {}
    for part in GIVEN.parts.split(","):
        began = time.perf_counter()
        if not within(15):
            print(f"-- {part}: no time left", flush=True)
            continue
        try:
            results[part] = parts[part]()
            if part == "steps":
                keep_records(results[part], GIVEN.out / "records")
        except Exception as error:
            traceback.print_exc()
            results[part] = {"error": f"{type(error).__name__}: {error}"}
        text = json.dumps(results, indent=1, default=str)
        (GIVEN.out / "parts.json").write_text(text)
        print(f"-- {part}: {time.perf_counter() - began:.1f} s", flush=True)


if __name__ == "__main__":
    main()
