"""What the optional kernels gain inside a training step: subgroups, and half precision.

Each form trains the same batches in turns; ``table`` is the table's first choice everywhere, ``tuned`` what measurement chose (which may
be a subgroup kernel), ``sums`` subgroups for layernorm, cross-entropy and norms, ``products`` subgroups for the matrix products, ``half``
forward products in f16.
"""

from __future__ import annotations

import statistics
import time
from typing import Any

from gpu_common import batches, engine, fast_parameters

from posttrainllm.config import load_config
from posttrainllm.engines.base import StepScalars

PRODUCTS = ("linear_forward", "linear_backward_input", "linear_backward_weight")
RUNS = ("linear_residual_run", "linear_gelu_run", "linear_backward_gelu_run", "linear_backward_run")
SUMS = (
    "layernorm_forward",
    "layernorm_backward_input",
    "cross_entropy_forward",
    "cross_entropy_run",
    "sum_squares",
    "gradient_clip_run",
)
FORMS: dict[str, dict[str, Any]] = {
    "table": {"tuned": False},
    "tuned": {"tuned": True},
    "sums": {"preferred": dict.fromkeys(SUMS, "subgroups")},
    "products": {
        "preferred": dict.fromkeys(PRODUCTS, "subgroups") | dict.fromkeys(RUNS[1:], "apart")
    },
    "half": {"tuned": False, "half": True},
}


def variants(presets: list[str], rounds: int = 12) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for preset in presets:
        config = load_config(preset)
        scale = 1.0 / config.tokens_per_step
        source = [next(batches(config, seed)) for seed in range(8)]
        running = {name: engine(config, **form) for name, form in FORMS.items()}
        for one in running.values():
            one.load(fast_parameters(one))
        times: dict[str, list[float]] = {name: [] for name in running}
        losses: dict[str, float] = {}
        for turn in range(rounds + 2):
            for name, one in running.items():
                began = time.perf_counter()
                for index in range(10):
                    one.gradients(source[index % 8], inv_count=scale, first=True)
                    one.update(StepScalars(1e-4, 0.1, 0.05))
                losses[name] = one.results()[-1].loss
                if turn >= 2:
                    times[name].append(1e2 * (time.perf_counter() - began))
        found[preset] = {
            name: {"median_ms": statistics.median(values), "min_ms": min(values), "loss": losses[name]}
            for name, values in times.items()
        }  # fmt: skip
        chosen = [key for key, value in running["tuned"].recorder.table.preferred.items() if value == "subgroups"]  # fmt: skip
        found[preset]["subgroups that measurement chose"] = chosen
        print("variants", preset, found[preset], flush=True)
        for one in running.values():
            one.close()
    return found
