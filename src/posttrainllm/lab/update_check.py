"""One optimizer update from a common state, so that every constant of clip and AdamW shows.

What this is: all engines are given the parameters and moments that the reference has after its steps, and take one more step at a rate of
0.1 with gradients so large that the clip acts. The parameters they arrive at are compared in units of the rate.
Why: a loss curve hardly sees some constants. AdamW does not mind the scale of gradients, so a wrong clip moves the loss by 1e-7, and a
weight decay that is off by a tenth by 5e-7 in 25 steps; here both are off by 1e-4 and more.

AdamW divides by the root of the second moment, and so turns the rounding of a gradient that is small beside its tensor's largest into a
visible step; the key bias, whose gradient is zero in exact arithmetic, moves by rounding alone. A difference therefore counts by the share
that its root has of the tensor's largest.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np

from posttrainllm.config import TrainConfig
from posttrainllm.control import bias_corrections
from posttrainllm.engines.base import Engine, State, StepScalars
from posttrainllm.text.corpus import Corpus
from posttrainllm.training.step import training_batches

RATE: Final = 0.1
"""Large, so that the rounding of a parameter is small beside its update."""

SCALE: Final = 1024.0
"""Of the gradients: an exact factor that brings any norm far over ``clip_norm``."""


@dataclass(frozen=True)
class Update:
    """A state, and the one that an engine made of it."""

    start: State
    end: State


def one_update(engine: Engine, corpus: Corpus, config: TrainConfig, start: State) -> Update:
    """Take the step after the last of ``config`` from a state; the rate is ``RATE``."""
    engine.load(start.params, start.m, start.v)
    step = config.training.steps + 1
    tokens = config.tokens_per_step
    for index, batch in enumerate(training_batches(corpus, config, step)):
        engine.gradients(batch, inv_count=SCALE / tokens, first=index == 0)
    optimizer = config.optimizer
    engine.update(StepScalars(RATE, *bias_corrections(step, optimizer.beta1, optimizer.beta2)))
    engine.results()
    return Update(start, engine.state())


def update_errors(got: Update, reference: Update) -> dict[str, float]:
    """max of root share * abs(got - reference) / RATE of every parameter, by name; NaN when one holds a number that is not finite."""
    assert got.start is reference.start
    errors = {}
    for name, wanted in reference.end.params.items():
        v = reference.end.v[name].astype(np.float64)
        share = np.sqrt(v / (v.max() or 1.0))
        share[(v == 0) & (got.end.v[name] == 0)] = 1.0  # no gradient ever: decay alone
        difference = share * np.abs(got.end.params[name].astype(np.float64) - wanted)
        errors[name] = float(difference.max() / RATE)
    return errors
