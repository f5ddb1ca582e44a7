"""Probes of the webgpu engine on a GPU: time by dispatch, by variant, of products alone, of attention by length."""

from __future__ import annotations

import json
from collections import defaultdict
from typing import Any

import numpy as np
from gpu_common import engine, train

from posttrainllm.config import load_config
from posttrainllm.engines.webgpu.device import GpuDevice, choose_adapter
from posttrainllm.engines.webgpu.dispatch import DispatchTable
from posttrainllm.engines.webgpu.memory import GpuMemory
from posttrainllm.engines.webgpu.recorder import Recorder
from posttrainllm.engines.webgpu.timing import seconds
from posttrainllm.engines.webgpu.tuning import tune_times
from posttrainllm.plan import BoundCall, Place, Plan, Region


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
                entry = total[f"{item.work.key} | {item.variant} | {item.entry}"]
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


def tune(presets: list[str]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for preset in presets:
        config = load_config(preset)
        gpu = engine(config, tuned=False)
        train(gpu, config, 2)
        times = tune_times(gpu.recorder, gpu.plan.bind("gradients"))
        found[preset] = {
            key: {variant: round(1e6 * value, 2) for variant, value in row.items()}
            for key, row in times.items()
        }
        gpu.close()
    return found


def products(checked: bool, sizes: list[int]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    adapter = choose_adapter()
    device = GpuDevice(adapter, checked=checked, half="shader-f16" in adapter.features)
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


def attention(lengths: tuple[int, ...] = (256, 512, 1024, 2048, 4096)) -> dict[str, Any]:
    """Attention forward and backward of one row of 12 heads of 64 by length: time, and bytes of all buffers."""
    found: dict[str, Any] = {}
    device = GpuDevice(choose_adapter())
    heads, width = 12, 768
    for length in lengths:
        shapes = {
            "out": (length, width), "lse": (1, heads, length), "qkv": (length, 3 * width),
            "dqkv": (length, 3 * width), "dout": (length, width),
        }  # fmt: skip
        regions = {n: Region(n, "f32", int(np.prod(shape))) for n, shape in shapes.items()}
        regions["start"] = Region("start", "i32", length)
        memory = GpuMemory(Plan({}, {}, regions, {}), device)
        place = {n: Place(n, 0, shape) for n, shape in shapes.items()}
        random = np.random.default_rng(0)
        for name in ("qkv", "dout"):
            memory.write(place[name], random.standard_normal(shapes[name], np.float32))
        start = Place("start", 0, (length,))
        memory.write(start, np.zeros(length, np.int32))
        recorder = Recorder(device, memory, DispatchTable(device.limits))
        sizes = (1, length, width, heads)
        backward = [place[name] for name in ("dqkv", "dout", "qkv", "out", "lse")]
        calls = {
            "forward": BoundCall("attention_forward", (place["out"], place["lse"], place["qkv"], start), sizes, ()),
            "backward": BoundCall("attention_backward", (*backward, start), sizes, ()),
        }  # fmt: skip
        row: dict[str, Any] = {"nbytes": memory.nbytes}
        for name, call in calls.items():
            items = recorder.record([call]).dispatches
            seconds(device, [list(items)] * 3)
            times = seconds(device, [list(items) * 4 for _ in range(10)]) / 4
            row[f"{name}_us"] = round(1e6 * float(np.median(times)), 1)
        row["workspace_bytes"] = recorder.nbytes
        found[str(length)] = row
        print("attention", length, json.dumps(row), flush=True)
        memory.close()
    for name in ("forward", "backward"):
        ratio = found["2048"][f"{name}_us"] / found["1024"][f"{name}_us"]
        found[f"{name} 2048 / 1024"] = round(ratio, 2)
        print("attention", name, "2048 / 1024:", round(ratio, 2), flush=True)
    return found
