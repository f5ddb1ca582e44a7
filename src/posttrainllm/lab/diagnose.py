"""Why does a run not get better? What differs from the defaults, what counting reaches, and a probe of the learning rate.

What this is: the first things to look at when a loss stands still, in numbers. The probe trains the run's model from its initial weights
through its warm-up and a hundred steps more at a third, once and three times its learning rate, on the same batches: a plateau is a
hypothesis before it is the model's ceiling. (The project that this one learnt from lost months to a rate that was ten times too low.)
What this is not: a search for the best rate (``sweep.py``), and a hundred steps say nothing about the last thousand.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from posttrainllm.config import TrainConfig, changed_settings, replace
from posttrainllm.engines.base import F32
from posttrainllm.figures import Progress, untold
from posttrainllm.runs.checkpoint_folder import list_checkpoints, step_of
from posttrainllm.runs.folder import Run
from posttrainllm.runs.opening import read_folder
from posttrainllm.runs.records import column, newest
from posttrainllm.text.corpus import Corpus
from posttrainllm.text.counting import CountingLine, standing
from posttrainllm.text.counting import lines as counting_lines
from posttrainllm.text.tokenizer import Tokenizer
from posttrainllm.training.engine_choice import initial_parameters, training_engine
from posttrainllm.training.session import corpus_of, first_weights
from posttrainllm.training.step import train_step

FACTORS = (0.3, 1.0, 3.0)
PROBE_STEPS = 100
MOST_WARMUP = 100  # steps of the run's own warm-up that a probe takes; a shorter one would be measured instead of the rate
LAST = 10  # steps whose mean is the loss of a probe
MATTERS = 0.05  # nats: two probes that are closer say nothing


@dataclass(frozen=True)
class Probe:
    """The beginning of a run at one learning rate; the loss is None when it was not finite."""

    factor: float
    learning_rate: float
    loss: float | None


@dataclass(frozen=True)
class Diagnosis:
    """What was found about a run."""

    run: str
    preset: str
    engine: str
    changed: list[tuple[str, Any, Any]]
    """(setting, the run's value, the preset's value)."""
    counting: list[CountingLine]
    train_loss: float | None
    val_loss: float | None
    probe_steps: int
    probes: list[Probe]

    @property
    def standing(self) -> str:
        """The run's loss among the counting lines."""
        loss = self.train_loss if self.val_loss is None else self.val_loss
        if loss is None:
            return "no loss was logged"
        kind = "training" if self.val_loss is None else "validation"
        return f"{kind} loss {loss:.2f}: {standing(loss, self.counting)}"

    @property
    def sentence(self) -> str:
        """What the probe says, and what to do next."""
        return conclusion(self.probes, self.probe_steps)


def diagnose(
    run: Run,
    *,
    steps: int = PROBE_STEPS,
    progress: Progress = untold,
) -> Diagnosis:
    """Look at a run and probe its learning rate.

    Raises: CheckpointError, ConfigError, CorpusError, EngineError.
    """
    config = run.config()
    weights, tokenizer = _beginning(run, config)
    corpus = corpus_of(config, run=run, tokenizer=tokenizer)
    lines = run.metrics.read()
    losses = column(lines, "loss")
    return Diagnosis(
        run=run.name,
        preset=config.preset,
        engine=config.engine.name,
        changed=changed_settings(config),
        counting=counting_lines(corpus.train, corpus.val, config.model.n_vocab),
        train_loss=statistics.fmean(losses[-LAST:]) if losses else None,
        val_loss=newest(lines, "val_loss"),
        probe_steps=steps,
        probes=[probe(config, weights, corpus, factor, steps, progress) for factor in FACTORS],
    )


def _beginning(run: Run, config: TrainConfig) -> tuple[Mapping[str, F32], Tokenizer]:
    """The weights that a run began with, and how it reads its text: an imported one has them in its checkpoint of step 0."""
    saved = list_checkpoints(run.checkpoints)
    if saved and step_of(saved[0]) == 0:
        opened = read_folder(saved[0])
        return opened.checkpoint.params, opened.tokenizer
    weights, tokenizer = first_weights(config, run.path.parent)
    return weights or initial_parameters(config.model, config.training.seed), tokenizer


def probe(
    config: TrainConfig,
    weights: Mapping[str, F32],
    corpus: Corpus,
    factor: float,
    steps: int,
    progress: Progress,
) -> Probe:
    """Train through the warm-up and ``steps`` more, from the run's initial weights, at ``factor`` times its rate."""
    warmup = min(config.schedule.warmup_steps, MOST_WARMUP)
    steps += warmup
    rate = config.schedule.learning_rate * factor
    config = replace(
        config,
        {
            "schedule.kind": "constant",
            "schedule.learning_rate": rate,
            "schedule.warmup_steps": warmup,
            "training.steps": steps,
        },
    )
    engine = training_engine(config)
    losses: list[float] = []
    try:
        engine.load(weights)
        for step in range(1, steps + 1):
            train_step(engine, corpus, config, step)
            results = engine.results()
            losses += [result.loss for result in results]
            progress(f"{factor:g}x, {rate:.2g}", step, steps)
            if not all(result.finite for result in results):
                return Probe(factor, rate, None)
    finally:
        engine.close()
    return Probe(factor, rate, statistics.fmean(losses[-LAST:]))


def conclusion(probes: Sequence[Probe], steps: int) -> str:
    """Say in a sentence what the probes mean."""
    usual = next(one for one in probes if one.factor == 1)
    others = [one for one in probes if one is not usual]
    best = min(others, key=lambda one: math.inf if one.loss is None else one.loss)
    if usual.loss is None:
        return (
            f"at its own rate, {usual.learning_rate:g}, the loss is not a number within {steps} steps: "
            f"lower it, --learning-rate {usual.learning_rate * FACTORS[0]:.2g}"
        )
    gain = -math.inf if best.loss is None else usual.loss - best.loss
    if gain > MATTERS:
        name = "too low" if best.factor > 1 else "too high"
        return (
            f"at {best.factor:g}x the loss after {steps} steps is lower by {gain:.2f}: the learning rate is {name}, "
            f"and a plateau is the rate's, not the model's ceiling; try --learning-rate {best.learning_rate:.2g}"
        )
    return (
        f"no rate nearby is better by more than {MATTERS:g} after {steps} steps: the learning rate is not the reason; "
        "look at the settings that differ, at more steps, a larger preset or a larger text"
    )
