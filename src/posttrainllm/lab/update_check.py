"""One optimizer update from a common state, so that every constant of clip and AdamW shows.

What this is: all engines are given the parameters and moments that the reference has after its steps, and take one more step at a rate of
0.1 with gradients so large that the clip acts. The parameters they arrive at are compared in units of the rate.
Why: a loss curve hardly sees some constants. AdamW does not mind the scale of gradients, so a wrong clip moves the loss by 1e-7, and a
weight decay that is off by a tenth by 5e-7 in 25 steps; here both are off by 1e-4 and more.

Left out are numbers whose gradients have always been far smaller than their tensor's largest: AdamW divides by the root of the second
moment and would turn the rounding of such gradients into visible steps. The key bias, whose gradient is zero in exact arithmetic, is one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np

from posttrainllm.config import TrainConfig
from posttrainllm.control import bias_corrections
from posttrainllm.corpus import Corpus
from posttrainllm.engines.base import Engine, State, StepScalars
from posttrainllm.trainer import training_batches

RATE: Final = 0.1
"""Large, so that the rounding of a parameter is small beside its update."""

SCALE: Final = 1024.0
"""Of the gradients: an exact factor that brings any norm far over ``clip_norm``."""

LEAST_ROOT: Final = 1e-2
"""Numbers are compared whose root of the second moment is at least this share of the tensor's largest."""


@dataclass(frozen=True)
class Update:
    """A state, and the one that an engine made of it."""

    start: State
    end: State


def one_update(engine: Engine, corpus: Corpus, config: TrainConfig, start: State) -> Update:
    """Take the step after the last of ``config`` from a state; the rate is ``RATE``."""
    engine.load(start.params, start.m, start.v)
    step = config.training.steps + 1
    tokens = config.data.batch_size * config.data.accumulation * config.model.n_ctx
    for index, batch in enumerate(training_batches(corpus, config, step)):
        engine.gradients(batch, inv_count=SCALE / tokens, first=index == 0)
    optimizer = config.optimizer
    engine.update(StepScalars(RATE, *bias_corrections(step, optimizer.beta1, optimizer.beta2)))
    engine.results()
    return Update(start, engine.state())


def update_errors(got: Update, reference: Update) -> dict[str, float]:
    """max abs(got - reference) / RATE of every parameter's compared numbers, by name; NaN when one holds it."""
    errors = {}
    for name, wanted in reference.end.params.items():
        v, other = reference.end.v[name], got.end.v[name]
        compared = v >= LEAST_ROOT**2 * v.max()
        compared |= (v == 0) & (other == 0)  # no gradient ever: decay alone
        difference = np.abs(got.end.params[name].astype(np.float64) - wanted)
        finite = np.isfinite(got.end.params[name]).all() and np.isfinite(wanted).all()
        errors[name] = float(difference[compared].max(initial=0.0) / RATE) if finite else np.nan
    return errors
