"""Parity: several engines train the same steps from the same weights, and their numbers are compared.

What this is: step-0 gradients of every tensor, losses of every step, and one update from a common state (``update_check.py``), engine by
engine, against a reference, with a verdict. The reference is the numpy engine in float64 where that is affordable, else the first engine
that was named.
What this is not: a test of single ops (``tests/test_ops.py``), or of trained weights, which cannot be compared across engines: the key
bias has no gradient in exact arithmetic, and AdamW turns its rounding noise into full steps.

A number that is not finite fails, whatever it is compared with.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from posttrainllm.config import TrainConfig, replace
from posttrainllm.engines.base import Engine
from posttrainllm.errors import ConfigError
from posttrainllm.figures import Progress, untold
from posttrainllm.lab.cost import fits_float64
from posttrainllm.lab.limits import PARITY_RATE, gradient_limit, loss_limit, update_limit
from posttrainllm.lab.update_check import Update, one_update, update_errors
from posttrainllm.text.corpus import Corpus
from posttrainllm.training.engine_choice import initial_parameters, training_engine
from posttrainllm.training.step import train_step, training_batches

REFERENCE = "numpy float64"
MOST_REFERENCE_FLOPS = (
    2e12  # a few minutes of the numpy engine; beyond it the first engine is the reference
)


@dataclass(frozen=True)
class Trace:
    """What one engine computed: gradients before step 1, losses of steps 1 to N, and an update after them."""

    engine: str
    losses: list[float]
    gradients: dict[str, NDArray[np.float32]]
    update: Update | None = None


@dataclass(frozen=True)
class Drift:
    """A relative difference, and where it is: the loss of a step (counted from 1), or the gradient or update of a tensor."""

    error: float
    limit: float | None
    step: int = 0
    tensor: str = ""
    what: Literal["loss", "gradient", "update"] = "loss"

    @property
    def passed(self) -> bool:
        """Within the limit; NaN and infinity are not."""
        return math.isfinite(self.error) and (self.limit is None or self.error <= self.limit)

    def __str__(self) -> str:
        """Say where it is and how far off: "loss of step 3 is off by 1.2e-04, the limit is 1e-06"."""
        where = (
            f"loss of step {self.step}" if self.what == "loss" else f"{self.what} of {self.tensor}"
        )
        if not math.isfinite(self.error):
            return f"{where} is not a finite number"
        limit = "" if self.limit is None else f", the limit is {self.limit:.0e}"
        return f"{where} is off by {self.error:.1e}{limit}"


@dataclass(frozen=True)
class Comparison:
    """One engine against the reference."""

    engine: str
    losses: list[float]
    gradients: list[Drift]
    drifts: list[Drift]
    updates: list[Drift]

    @property
    def worst_gradient(self) -> Drift:
        """The tensor that is furthest off."""
        return max(self.gradients, key=_badness)

    @property
    def worst_update(self) -> Drift | None:
        """The tensor whose update is furthest off; None when there was none to compare."""
        return max(self.updates, key=_badness, default=None)

    @property
    def worst_loss(self) -> Drift:
        """The step that is furthest off."""
        return max(self.drifts, key=_badness)

    @property
    def first_failure(self) -> Drift | None:
        """The first thing over its limit, in the order in which it was computed."""
        everything = [*self.gradients, *self.drifts, *self.updates]
        return next((drift for drift in everything if not drift.passed), None)

    def worst_within(self, first: int, last: int) -> Drift | None:
        """The worst loss of steps ``first`` to ``last``; None when the run is shorter."""
        return max((d for d in self.drifts if first <= d.step <= last), key=_badness, default=None)


@dataclass(frozen=True)
class Parity:
    """The outcome of a parity run."""

    preset: str
    steps: int
    seed: int
    reference: Trace
    why_reference: str
    comparisons: list[Comparison]

    @property
    def passed(self) -> bool:
        """Whether every engine stayed within its limits."""
        return all(one.first_failure is None for one in self.comparisons)

    @property
    def verdict(self) -> str:
        """One line: the verdict, the largest drift and, when it failed, what went over its limit first."""
        worst = max(self.comparisons, key=lambda one: _badness(one.worst_loss))
        drift = worst.worst_loss
        line = (
            f"parity: {'PASS' if self.passed else 'FAIL'}, largest drift {drift.error:.1e} at step {drift.step} "
            f"({worst.engine} against {self.reference.engine})"
        )
        for one in self.comparisons:
            if (failure := one.first_failure) is not None:
                line += f"; {one.engine}: {failure}"
        return line


def parity(
    config: TrainConfig,
    corpus: Corpus,
    engines: Sequence[str],
    *,
    steps: int,
    progress: Progress = untold,
) -> Parity:
    """Train ``steps`` steps on every engine and compare.

    The model, batches and seed are the configuration's; the rate is ``limits.PARITY_RATE``.

    Raises: ConfigError when there is nothing to compare, EngineError when an engine cannot run here.
    """
    config = replace(
        config,
        {
            "training.steps": steps,
            "schedule.kind": "constant",
            "schedule.learning_rate": PARITY_RATE,
            "schedule.warmup_steps": 0,
        },
    )
    names = list(
        dict.fromkeys(replace(config, {"engine.name": name}).engine.chosen for name in engines)
    )
    affordable, why = _reference(config, steps)
    if not names or (len(names) < 2 and not affordable):
        raise ConfigError(
            f"one engine has nothing to be compared with: {why}",
            "name two engines: --engine cpp,torch",
        )
    if affordable:
        reference = trace(config, corpus, "numpy", steps, progress, float64=True)
    else:
        reference = trace(config, corpus, names.pop(0), steps, progress)
    comparisons = [
        compare(trace(config, corpus, name, steps, progress, after=reference.update), reference)
        for name in names
    ]
    return Parity(config.preset, steps, config.training.seed, reference, why, comparisons)


def trace(
    config: TrainConfig,
    corpus: Corpus,
    engine: str,
    steps: int,
    progress: Progress = untold,
    *,
    float64: bool = False,
    after: Update | None = None,
) -> Trace:
    """Train the first steps of a configuration on one engine and keep what can be compared.

    The update at the end starts from the state that ``after`` started from, or without one from the engine's own.

    The gradients of step 1 are computed twice, once to be read here: so what a step leaves behind in work space is part of the check.
    """
    exact = {"engine.precision": "float32"} if config.engine.precision == "auto" else {}
    config = replace(config, {"engine.name": engine, **exact})
    label = f"{engine} float64" if float64 else engine
    runner = training_engine(config, dtype=np.float64 if float64 else np.float32)
    try:
        runner.load(initial_parameters(config.model, config.training.seed))
        gradients = first_gradients(runner, corpus, config)
        losses = []
        for step in range(1, steps + 1):
            train_step(runner, corpus, config, step)
            losses += [result.loss for result in runner.results()]
            progress(label, step, steps)
        assert len(losses) == steps
        start = runner.state() if after is None else after.start
        update = one_update(runner, corpus, config, start)
    finally:
        runner.close()
    return Trace(label, losses, gradients, update)


def first_gradients(
    engine: Engine, corpus: Corpus, config: TrainConfig
) -> dict[str, NDArray[np.float32]]:
    """Gradients of the mean loss of step 1, by parameter name, before any clip."""
    tokens = config.tokens_per_step
    for index, batch in enumerate(training_batches(corpus, config, 1)):
        engine.gradients(batch, inv_count=1.0 / tokens, first=index == 0)
    return engine.gradient_tensors()


def compare(got: Trace, reference: Trace) -> Comparison:
    """Hold one engine's numbers to the reference's."""
    limit = gradient_limit(got.engine)
    gradients = [
        Drift(_max_norm(got.gradients[name], wanted), limit, tensor=name, what="gradient")
        for name, wanted in reference.gradients.items()
    ]
    losses = zip(got.losses, reference.losses, strict=True)
    drifts = [
        Drift(_relative(loss, wanted), loss_limit(got.engine, step), step=step)
        for step, (loss, wanted) in enumerate(losses, start=1)
    ]
    updates: list[Drift] = []
    if got.update is not None and reference.update is not None:
        errors = update_errors(got.update, reference.update)
        limit = update_limit(got.engine)
        updates = [Drift(errors[name], limit, tensor=name, what="update") for name in errors]
    return Comparison(got.engine, got.losses, gradients, drifts, updates)


def _relative(got: float, wanted: float) -> float:
    return abs(got - wanted) / abs(wanted) if wanted else math.inf


def _max_norm(got: NDArray[np.float32], wanted: NDArray[np.float32]) -> float:
    """max abs(got - wanted) / max abs(wanted); NaN when either holds one."""
    difference = np.max(np.abs(got.astype(np.float64) - wanted))
    scale = np.max(np.abs(wanted)).astype(np.float64)
    if difference == 0 and np.isfinite(scale):
        return 0.0
    return float(difference / scale) if scale else math.inf


def _badness(drift: Drift) -> tuple[bool, float]:
    """What is not a number is worse than any number."""
    return not math.isfinite(drift.error), drift.error if math.isfinite(drift.error) else 0.0


def _reference(config: TrainConfig, steps: int) -> tuple[bool, str]:
    """Whether the numpy engine in float64 is affordable, and the reason in words."""
    need = config.flops_per_step * steps
    if need > MOST_REFERENCE_FLOPS:
        return False, (
            f"{need / 1e12:.1f} TFLOP are too many for {REFERENCE}, over {MOST_REFERENCE_FLOPS / 1e12:.0f}"
        )
    if not fits_float64(config):
        return False, f"{REFERENCE} does not fit into memory"
    return True, f"{REFERENCE} is affordable: {need / 1e9:.1f} GFLOP"
