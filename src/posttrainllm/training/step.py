"""One training step over any engine: batches, gradients, update.

What this is: the part of training that a benchmark, a comparison of engines and a whole run share.
What this is not: arithmetic (``engines/``), or the loop around it (``training/trainer.py``).
"""

from __future__ import annotations

from collections.abc import Iterator

from posttrainllm.config import TrainConfig
from posttrainllm.control import batch_offsets, bias_corrections, learning_rate
from posttrainllm.engines.base import Batch, Engine, StepScalars
from posttrainllm.text.corpus import Corpus


def training_batches(corpus: Corpus, config: TrainConfig, step: int) -> Iterator[Batch]:
    """The micro-batches of a step; together they hold the same rows however the step is cut."""
    size, n_ctx = config.data.batch_size, config.model.n_ctx
    seed, high = config.training.seed, corpus.positions(n_ctx)
    for first in range(0, size * config.data.accumulation, size):
        yield Batch(*corpus.windows(batch_offsets(seed, step, size, 0, high, first), n_ctx))


def step_gradients(engine: Engine, corpus: Corpus, config: TrainConfig, step: int) -> None:
    """The gradients of a step, which change no weight yet."""
    tokens = config.tokens_per_step
    for index, batch in enumerate(training_batches(corpus, config, step)):
        engine.gradients(batch, inv_count=1.0 / tokens, first=index == 0)


def step_update(engine: Engine, config: TrainConfig, step: int) -> float:
    """The update with these gradients; its result comes from ``engine.results()``. Returns the learning rate."""
    schedule, optimizer = config.schedule, config.optimizer
    lr = learning_rate(
        step,
        config.training.steps,
        schedule.kind,
        schedule.learning_rate,
        schedule.warmup_steps,
        schedule.final_ratio,
        schedule.decay_fraction,
    )
    engine.update(StepScalars(lr, *bias_corrections(step, optimizer.beta1, optimizer.beta2)))
    return lr


def train_step(engine: Engine, corpus: Corpus, config: TrainConfig, step: int) -> float:
    """One optimizer step; its result comes from ``engine.results()``. Returns the learning rate."""
    step_gradients(engine, corpus, config, step)
    return step_update(engine, config, step)
