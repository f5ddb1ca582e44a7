"""The first use of a GPU: ten steps of the smallest preset against the processor, since drivers do return wrong numbers silently.

What this is: ``checked_adapter`` names an adapter whose losses and gradient norms agree with the cpp engine's (numpy's where cpp is not
built). The outcome is kept in the user's cache by adapter, driver and kernels, so that it costs a second once.
What this is not: a test of the kernels (``tests/test_webgpu_ops.py``), or of a whole run (``posttrainllm parity``).
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from posttrainllm.config import load_config
from posttrainllm.control import bias_corrections
from posttrainllm.engines.base import Batch, ProgramEngine, StepScalars
from posttrainllm.engines.cpp_engine import CppEngine, runnable_builds
from posttrainllm.engines.numpy_engine import NumpyEngine
from posttrainllm.engines.webgpu.device import describe, matching_adapters
from posttrainllm.engines.webgpu.engine import WebGpuEngine
from posttrainllm.engines.webgpu.tuning import cache_folder, kernels_digest
from posttrainllm.errors import EngineError
from posttrainllm.model import training_programs
from posttrainllm.program import Program
from posttrainllm.wording import worded

STEPS = 10
CHECKED = "tiny"
LIMIT = 1e-4  # relative, of losses
NORM_FACTOR = 10  # the limit of gradient norms over that of losses
NORM_LIMIT = NORM_FACTOR * LIMIT
HALF_STEPS = 50
HALF_LIMIT = 1e-3  # of losses in half precision, against float32 on the same adapter

Losses = list[tuple[float, float]]  # with gradient norms, step by step


def checked_adapter(wanted: str = "") -> Any:
    """The best adapter that passes, among those whose names contain ``wanted``.

    Raises: EngineError when there is none: a failing one is named, with what was wrong.
    """
    failures: list[str] = []
    for adapter in matching_adapters(wanted):
        reason = self_check(adapter)
        if not reason:
            return adapter
        failures.append(f"{adapter.info['device']!r}: {reason}")
    raise EngineError(
        f"the GPU computes wrong numbers and is not used: {'; '.join(failures)}",
        worded("update its driver, or use {engine.name=cpp}"),
    )


def self_check(adapter: Any) -> str:
    """What is wrong with an adapter's numbers, or nothing; computed once for each driver and version of the kernels."""
    path = cache_folder() / f"check-{kernels_digest(describe(adapter))}.json"
    return _remembered(path, lambda: _compare(adapter), describe(adapter))


def _remembered(path: Path, compare: Callable[[], str], device: dict[str, str | int]) -> str:
    """The outcome of a comparison, from its file or into it; a file that cannot be read or written is no file."""
    try:
        return str(json.loads(path.read_text("utf-8"))["failure"])
    except (OSError, ValueError, KeyError, TypeError):
        pass
    failure = compare()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps({"device": device, "failure": failure}), "utf-8")
    except OSError:
        pass
    return failure


def check_half(adapter: Any) -> None:
    """Let an adapter compute in half precision only when its losses stay beside those of float32.

    Raises: EngineError when they do not, or when the adapter has no half precision.
    """
    path = cache_folder() / f"half-{kernels_digest(describe(adapter))}.json"
    failure = _remembered(path, lambda: _compare_half(adapter), describe(adapter))
    if failure:
        raise EngineError(
            f"half precision on {adapter.info['device']!r} is too far from float32: {failure}",
            worded("leave {engine.precision} out"),
        )


def _compare_half(adapter: Any) -> str:
    ours, theirs = (
        _train(WebGpuEngine(*_programs(), adapter=adapter, tuned=False, half=half), HALF_STEPS)
        for half in (True, False)
    )
    return _first_difference(ours, theirs, HALF_LIMIT)


def _compare(adapter: Any) -> str:
    ours = _train(WebGpuEngine(*_programs(), adapter=adapter, tuned=False))
    return _first_difference(ours, _train(_reference()), LIMIT)


def _programs() -> tuple[dict[str, Program], dict[str, dict[str, int]]]:
    config = load_config(CHECKED)
    return training_programs(config.model, config.optimizer, config.data.batch_size)


def _first_difference(ours: Losses, theirs: Losses, limit: float) -> str:
    """What is wrong with losses and gradient norms, or nothing."""
    for step, (got, want) in enumerate(zip(ours, theirs, strict=True), 1):
        for what, value, reference, allowed in zip(
            ("loss", "gradient norm"), got, want, (limit, NORM_FACTOR * limit), strict=True
        ):
            if not abs(value - reference) <= allowed * abs(reference):
                return f"the {what} of step {step} is {value:.6g}, and should be {reference:.6g}"
    return ""


def _reference() -> ProgramEngine:
    return CppEngine(*_programs()) if runnable_builds() else NumpyEngine(*_programs())


def _train(engine: ProgramEngine, steps: int = STEPS) -> Losses:
    """Losses and gradient norms of a few steps on made-up text, from made-up weights; closes the engine."""
    try:
        return _steps(engine, steps)
    finally:
        engine.close()


def _steps(engine: ProgramEngine, steps: int) -> Losses:
    config = load_config(CHECKED)
    shape = (config.data.batch_size, config.model.n_ctx)
    random = np.random.default_rng(1)
    engine.load(
        {
            name: 0.05 * random.standard_normal(place.shape, np.float32)
            + np.float32(".ln_" in name)
            for name, (_, place) in engine.plan.layout.items()
        }
    )
    for step in range(1, steps + 1):
        ids = random.integers(0, 64, (shape[0], shape[1] + 1)).astype(np.int32)
        batch = Batch(np.ascontiguousarray(ids[:, :-1]), np.ascontiguousarray(ids[:, 1:]))
        engine.gradients(batch, inv_count=1.0 / batch.tokens.size, first=True)
        optimizer = config.optimizer
        corrections = bias_corrections(step, optimizer.beta1, optimizer.beta2)
        engine.update(StepScalars(1e-3, *corrections))
    return [(result.loss, result.grad_norm) for result in engine.results()]
