"""Checks and times the webgpu engine on a GPU, in one run on a bare machine; writes one JSON file a part.

    python bench/gpu/run_h200.py --out FOLDER [--parts info,parity,steps,profile,tune,products] [--presets tiny,small,...]

parity    losses of webgpu against the cpp engine (numpy where it is not built), same weights and batches
steps     wall time of a training step, nothing read back between
profile   GPU time of a step, dispatch by dispatch
tune      GPU time of every variant of every call of a step that has several
products  matrix products alone, with and without the run-time checks of a browser
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import subprocess
import sys
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[2] / "src"))

from posttrainllm.config import TrainConfig, load_config
from posttrainllm.engine_choice import initial_parameters
from posttrainllm.engines.base import Batch, ProgramEngine, StepScalars
from posttrainllm.engines.webgpu_device import GpuDevice, adapters, choose_adapter
from posttrainllm.engines.webgpu_dispatch import DispatchTable, choice_key
from posttrainllm.engines.webgpu_engine import WebGpuEngine
from posttrainllm.engines.webgpu_memory import GpuMemory
from posttrainllm.engines.webgpu_recorder import Recorder
from posttrainllm.engines.webgpu_timing import seconds
from posttrainllm.model import training_programs
from posttrainllm.plan import BoundCall, Place, Plan, Region

PARITY = ("tiny", "small", "medium", "large", "xl")
STEPS = ("tiny", "small", "medium", "large", "xl", "huge", "mega", "massive", "behemoth")


def text() -> np.ndarray[Any, Any]:
    """TinyShakespeare's bytes, or something with its statistics where the file is missing."""
    path = Path(__file__).parents[2] / "src/posttrainllm/data/tinyshakespeare.txt"
    if path.is_file():
        return np.frombuffer(path.read_bytes(), np.uint8)
    words = np.random.default_rng(1).integers(97, 123, 1 << 20).astype(np.uint8)
    return words


def batches(config: TrainConfig, seed: int = 0) -> Any:
    """Endless batches of the text."""
    tokens, random = text(), np.random.default_rng(seed)
    batch, time_ = config.data.batch_size, config.model.n_ctx
    while True:
        at = random.integers(0, len(tokens) - time_ - 1, batch)
        rows = tokens[at[:, None] + np.arange(time_ + 1)].astype(np.int32)
        rows %= config.model.n_vocab
        yield Batch(rows[:, :-1], rows[:, 1:])


def engine(config: TrainConfig, **more: Any) -> WebGpuEngine:
    programs, dims = training_programs(config.model, config.optimizer, config.data.batch_size)
    return WebGpuEngine(programs, dims, **more)


def reference(config: TrainConfig) -> ProgramEngine:
    programs, dims = training_programs(config.model, config.optimizer, config.data.batch_size)
    try:
        from posttrainllm.engines.cpp_engine import CppEngine

        return CppEngine(programs, dims)
    except Exception as error:
        print(f"no cpp engine ({error}); numpy instead", flush=True)
        from posttrainllm.engines.numpy_engine import NumpyEngine

        return NumpyEngine(programs, dims)


def train(what: ProgramEngine, config: TrainConfig, steps: int) -> list[tuple[float, float]]:
    what.load(initial_parameters(config.model, 1))
    scale = 1.0 / (config.data.batch_size * config.model.n_ctx)
    source = batches(config)
    found = []
    for step in range(1, steps + 1):
        rate = 1e-3 * min(1.0, step / 20)
        what.gradients(next(source), inv_count=scale, first=True)
        what.update(StepScalars(rate, 1 - 0.9**step, 1 - 0.95**step))
        found += [(result.loss, result.grad_norm) for result in what.results(wait=False)]
    found += [(result.loss, result.grad_norm) for result in what.results()]
    return found


def parity(presets: list[str], steps: int) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for preset in presets:
        config = load_config(preset)
        gpu, cpu = engine(config), reference(config)
        began = time.perf_counter()
        ours = np.array(train(gpu, config, steps))
        middle = time.perf_counter()
        theirs = np.array(train(cpu, config, steps))
        drift = np.abs(ours[:, 0] - theirs[:, 0]) / np.abs(theirs[:, 0])
        found[preset] = {
            "reference": cpu.info, "steps": steps, "drift_10": float(drift[:10].max()),
            "drift_50": float(drift[:50].max()), "drift_all": float(drift.max()),
            "losses": [ours[0, 0], ours[-1, 0]], "reference_losses": [theirs[0, 0], theirs[-1, 0]],
            "seconds": [middle - began, time.perf_counter() - middle],
        }  # fmt: skip
        print("parity", preset, json.dumps(found[preset]), flush=True)
        gpu.close()
        cpu.close()
    return found


def steps_of(presets: list[str]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for preset in presets:
        config = load_config(preset)
        try:
            began = time.perf_counter()
            gpu = engine(config)
            gpu.load(initial_parameters(config.model, 1) if preset != "behemoth" else _fast(gpu))
            source = [next(batches(config, seed)) for seed in range(8)]
            scale = 1.0 / (config.data.batch_size * config.model.n_ctx)

            def step(
                index: int, gpu: Any = gpu, source: Any = source, scale: float = scale
            ) -> None:
                gpu.gradients(source[index % 8], inv_count=scale, first=True)
                gpu.update(StepScalars(1e-4, 0.1, 0.05))
                gpu.results(wait=False)

            step(0)
            gpu.results()
            first = time.perf_counter() - began
            for index in range(10):
                step(index)
            gpu.results()
            times, host = [], []
            for _ in range(10):
                count = 20 if preset != "behemoth" else 3
                began = time.perf_counter()
                for index in range(count):
                    step(index)
                host.append((time.perf_counter() - began) / count)
                losses = gpu.results()
                times.append((time.perf_counter() - began) / count)
            dispatches = sum(len(gpu._prepared[key].dispatches) for key in gpu._prepared)
            found[preset] = {
                "ms": 1e3 * statistics.median(times), "ms_min": 1e3 * min(times), "ms_max": 1e3 * max(times),
                "host_ms": 1e3 * statistics.median(host), "first_step_s": first, "dispatches": dispatches,
                "loss": losses[-1].loss, "nbytes": gpu.nbytes,
            }  # fmt: skip
            gpu.close()
        except Exception as error:
            found[preset] = {"error": f"{type(error).__name__}: {error}"}
        print("steps", preset, json.dumps(found[preset]), flush=True)
    return found


def _fast(gpu: WebGpuEngine) -> dict[str, Any]:
    """Initial values of a large model, quickly."""
    random = np.random.default_rng(1)
    return {
        name: (0.02 * random.standard_normal(place.shape, np.float32)).astype(np.float32)
        for name, (_, place) in gpu.plan.layout.items()
    }


def profile(presets: list[str], repeats: int = 20) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for preset in presets:
        config = load_config(preset)
        gpu = engine(config)
        train(gpu, config, 3)
        total: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])
        for name in ("gradients", "update"):
            items = gpu._prepared[name, ()].dispatches
            runs = [seconds(gpu.device, [[item] for item in items]) for _ in range(repeats)]
            for item, value in zip(items, np.median(runs, axis=0), strict=True):
                entry = total[f"{choice_key(item.work.key)} | {item.variant} | {item.entry}"]
                entry[0] += 1e6 * value
                entry[1] += 1
            whole = [seconds(gpu.device, [list(items)])[0] for _ in range(repeats)]
            total[f"= {name} in one pass"] = [1e6 * float(np.median(whole)), len(items)]
        rows = dict(sorted(total.items(), key=lambda row: -row[1][0]))
        found[preset] = {key: [round(value, 2), count] for key, (value, count) in rows.items()}
        print("profile", preset, flush=True)
        for key, (value, count) in list(found[preset].items())[:14]:
            print(f"  {value:9.1f} us {count:4.0f} x  {key}", flush=True)
        gpu.close()
    return found


def tune(presets: list[str], repeats: int = 7, inside: int = 8) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for preset in presets:
        config = load_config(preset)
        gpu = engine(config)
        train(gpu, config, 2)
        found[preset] = {}
        seen: dict[str, BoundCall] = {}
        for name in ("gradients", "update"):
            for call in gpu.plan.bind(name):
                seen.setdefault(choice_key(call), call)
        for key, call in seen.items():
            table = gpu.recorder.table
            variants = table.candidates(call)
            if len(variants) < 2:
                continue
            rows = {}
            for variant in variants:
                table.preferred[key] = variant
                try:
                    items = gpu.recorder.record([call]).dispatches
                    passes = [list(items) * inside for _ in range(repeats)]
                    rows[variant] = round(
                        1e6 * float(np.median(seconds(gpu.device, passes))) / inside, 2
                    )
                except Exception as error:
                    rows[variant] = str(error)
                del table.preferred[key]
            found[preset][key] = {"default": variants[0], **rows}
            print("tune", preset, key, json.dumps(found[preset][key]), flush=True)
        gpu.close()
    return found


def products(checked: bool, sizes: list[int]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    device = GpuDevice(choose_adapter(), checked=checked)
    for size in sizes:
        regions = {n: Region(n, "f32", size * size) for n in ("a", "b", "c")}
        regions["in.scalars"] = Region("in.scalars", "f32", 64)
        memory = GpuMemory(Plan({}, {}, regions, {}), device)
        random = np.random.default_rng(0)
        place = {n: Place(n, 0, (size, size)) for n in "abc"}
        for name in "ab":
            memory.write(place[name], random.standard_normal((size, size), np.float32))
        memory.send_inputs()
        scalars = Place("in.scalars", 0, (8,))
        cube = (size, size, size)
        a, b, c = place["a"], place["b"], place["c"]
        calls = {
            "forward": BoundCall("linear_forward", (c, a, b, None), cube, (0.0,)),
            "backward_input": BoundCall("linear_backward_input", (c, a, b), cube, (0.0, 0.0)),
            "backward_weight": BoundCall("linear_backward_weight", (c, a, b, scalars), cube, (0.0, 0.0)),
        }  # fmt: skip
        wanted = {
            "forward": lambda x, y: x @ y, "backward_input": lambda x, y: x @ y.T,
            "backward_weight": lambda x, y: x.T @ y,
        }  # fmt: skip
        for kind, call in calls.items():
            table = DispatchTable(device.limits)
            for variant in table.candidates(call):
                if variant.startswith("slices") and size > 1024:
                    continue
                recorder = Recorder(
                    device, memory, DispatchTable(device.limits, {call.op: variant})
                )
                items = recorder.record([call]).dispatches
                inside = 20 if size <= 1024 else 8 if size <= 2048 else 3
                seconds(device, [list(items)])
                times = seconds(device, [list(items) * inside for _ in range(10)]) / inside
                x, y = memory.read(a), memory.read(b)
                ref = (
                    wanted[kind](x.astype(np.float64), y.astype(np.float64))
                    if size <= 1024
                    else wanted[kind](x, y)
                )
                error = float(np.abs(memory.read(c) - ref).max())
                tflops = 2 * size**3 / float(np.median(times)) / 1e12
                found[f"{size} {kind} {variant}"] = {"tflops": round(tflops, 2), "max_error": error}
                print("products", "checked" if checked else "unchecked", size, kind, variant,
                      f"{tflops:.2f} TFLOP/s, error {error:.2g}", flush=True)  # fmt: skip
        memory.close()
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
    parser.add_argument("--parts", default="info,products,parity,steps,profile,tune")
    parser.add_argument("--presets", default="")
    parser.add_argument("--sizes", default="1024,2048,4096")
    parser.add_argument("--parity-steps", type=int, default=200)
    given = parser.parse_args()
    given.out.mkdir(parents=True, exist_ok=True)
    sizes = [int(size) for size in given.sizes.split(",")]
    chosen = given.presets.split(",") if given.presets else []
    parts = {
        "info": info,
        "parity": lambda: parity(chosen or list(PARITY), given.parity_steps),
        "steps": lambda: steps_of(chosen or list(STEPS)),
        "profile": lambda: profile(chosen or ["small", "medium", "large", "xl", "huge", "mega"]),
        "tune": lambda: tune(chosen or ["small", "medium", "large", "xl", "huge", "mega"]),
        "products": lambda: {"unchecked": products(False, sizes), "checked": products(True, sizes)},
    }
    for part in given.parts.split(","):
        began = time.perf_counter()
        try:
            result = parts[part]()
        except Exception as error:
            result = {"error": f"{type(error).__name__}: {error}"}
            print(part, result, flush=True)
        (given.out / f"{part}.json").write_text(json.dumps(result, indent=1, default=str))
        print(f"-- {part}: {time.perf_counter() - began:.1f} s", flush=True)


if __name__ == "__main__":
    main()
