"""Where the time of a training step on a CUDA card goes, kernel by kernel, and that of a run's start."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from posttrainllm.engines.base import StepScalars

FORMS = {
    "fused": ("engine.compile=off",),
    "autograd": ("engine.compile=off", "engine.fuse=false"),
    "compiled": ("engine.compile=on",),
    "calls": ("engine.compile=off", "engine.triton=off"),
}
"""How layers run: what the settings are for each."""


def profile(
    opened: Callable[[Any], Any],
    config_of: Callable[..., Any],
    random_batches: Callable[[Any], Any],
    within: Callable[[float], bool],
) -> dict[str, Any]:
    """Kernels of a step by time, form by form."""
    import torch

    found: dict[str, Any] = {}
    for preset, settings in (("small", ()), ("gpt2", ())):
        for form, setting in FORMS.items():
            if not within(25):
                continue
            config = config_of(preset, *setting, *settings)
            engine = opened(config)
            source = random_batches(config)
            for index in range(3):
                engine.gradients(source[index], inv_count=1e-4, first=True)
                engine.update(StepScalars(1e-5, 0.1, 0.05))
            torch.cuda.synchronize()
            with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as seen:
                for index in range(3):
                    engine.gradients(source[index], inv_count=1e-4, first=True)
                    engine.update(StepScalars(1e-5, 0.1, 0.05))
                torch.cuda.synchronize()
            rows = sorted(seen.key_averages(), key=lambda row: -row.device_time_total)
            total = sum(row.device_time_total for row in rows) / 3e3
            calls = sum(row.count for row in rows) / 3
            lines = [
                f"{row.device_time_total / 3e3:9.4f} ms {row.count / 3:6.1f}x {row.key[:110]}"
                for row in rows[:40]
            ]
            print(
                f"profile {preset} {form}: {total:.3f} ms of kernels, {calls:.0f} of them",
                flush=True,
            )
            print("\n".join(lines), flush=True)
            found[f"{preset} {form}"] = {"ms": total, "kernels": calls, "rows": lines}
            engine.close()
    return found


SHORT = """import sys, time
began = time.perf_counter()
import torch
imported = time.perf_counter()
sys.path[:0] = ["bench/gpu", "src"]
import torch_h200
config = torch_h200.config_of("small", "training.steps=50", sys.argv[1])
engine = torch_h200.opened(config)
torch_h200.train(engine, config, 1)
print("%.2f %.2f" % (imported - began, time.perf_counter() - began), engine.info["kernels"], engine.info["kernels_reason"])
"""


def first_steps(out: Path) -> dict[str, Any]:
    """A run of 50 steps from a cold start: seconds from Python's start to the first step's loss, in processes of their own.

    A machine may come without the libraries' bytecode and unable to keep it, so it is kept elsewhere for the later ones.
    """
    kept = {"PYTHONDONTWRITEBYTECODE": "", "PYTHONPYCACHEPREFIX": str(out / "bytecode")}
    auto, on = "engine.triton=auto", "engine.triton=on"
    found = {}
    for name, setting, more in (
        ("as the machine is", auto, {}),
        ("again", auto, {}),
        ("writing bytecode", auto, kept),
        ("with bytecode", auto, kept),
        ("with bytecode, Triton", on, kept | {"TRITON_CACHE_DIR": "/tmp/triton-of-first"}),
        ("with bytecode, Triton again", on, kept | {"TRITON_CACHE_DIR": "/tmp/triton-of-first"}),
    ):
        began = time.perf_counter()
        done = subprocess.run(
            [sys.executable, "-c", SHORT, setting],
            capture_output=True, text=True, env=os.environ | more,
        )  # fmt: skip
        found[name] = {
            "process_s": round(time.perf_counter() - began, 2),
            "import torch, first step; kernels": done.stdout.strip() or done.stderr[-500:],
        }
        print("first", name, json.dumps(found[name]), flush=True)
    shutil.rmtree(out / "bytecode", ignore_errors=True)
    return found
