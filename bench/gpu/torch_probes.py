"""Where the time of a training step on a CUDA card goes, kernel by kernel."""

from __future__ import annotations

from collections.abc import Callable
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
