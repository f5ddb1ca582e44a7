"""One whole training as a measurement: trained in a temporary folder, remembered as a row of figures.

What this is: the trainer with a silent observer, for sweeps and for cases that train. A run that diverges is a row too.
What this is not: a run to keep; its folder is gone when the row is there.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from posttrainllm.config import TrainConfig, replace
from posttrainllm.errors import NonFiniteError
from posttrainllm.figures import Progress, untold
from posttrainllm.training.observer import Record, Silent, Start
from posttrainllm.training.session import new_trainer

LAST = 50  # steps whose mean is the training loss

# Nothing along the way but training: a sweep wants the last validation loss alone.
PLAIN: Mapping[str, object] = {
    "training.eval_every": 0,
    "training.sample_tokens": 0,
    "training.verdict_samples": 0,
    "training.checkpoint_every": 0,
}


@dataclass(frozen=True)
class MeasuredRun:
    """Figures of a run that was trained to its end; None for what was not measured."""

    settings: dict[str, object]
    """The settings that this run was given to differ from the others."""
    seed: int
    steps: int
    val_loss: float | None
    best_val_loss: float | None
    """The lowest of the evaluations along the way and the last one."""
    train_loss: float | None
    """Mean over the last steps."""
    word_share: float | None
    longest_copy: int | None
    seconds: float
    """From the engine's set-up to the last checkpoint and the verdict, evaluations and samples included."""
    tokens_per_second: float | None
    """Median over the logged steps: training alone."""
    diverged: str | None
    """Why the run stopped before its end."""


class _Listener(Silent):
    """Passes the steps on and keeps what the outcome does not have."""

    def __init__(self, label: str, steps: int, progress: Progress) -> None:
        self.label, self.steps, self.progress = label, steps, progress
        self.engine: dict[str, str | int] = {}
        self.speeds: list[float] = []
        self.best: float | None = None

    def started(self, start: Start) -> None:
        """See ``Observer``."""
        self.engine = dict(start.engine)

    def stepped(self, record: Record) -> None:
        """See ``Observer``."""
        self.speeds.append(record.tokens_per_second)
        if record.val_loss is not None:
            self.best = record.val_loss if self.best is None else min(record.val_loss, self.best)
        self.progress(self.label, record.step, self.steps)


def train_once(
    config: TrainConfig,
    settings: Mapping[str, object],
    seed: int,
    progress: Progress = untold,
) -> tuple[MeasuredRun, dict[str, str | int]]:
    """Train ``config`` with some settings changed; returns the figures and what the engine says of itself.

    Raises: ConfigError, CorpusError, EngineError.
    """
    config = replace(config, {**settings, "training.seed": seed})
    listener = _Listener(describe(settings, seed), config.training.steps, progress)
    outcome, diverged = None, None
    with tempfile.TemporaryDirectory(prefix="posttrainllm-lab-") as folder:
        trainer = new_trainer(config, runs_dir=Path(folder), observer=listener)
        began = time.monotonic()
        try:
            outcome = trainer.train()
        except NonFiniteError as error:
            diverged = error.message
        seconds = time.monotonic() - began
    if outcome is not None and outcome.stopped:
        raise KeyboardInterrupt  # a signal ended it in good order; there is nothing here to go on with
    judged = outcome.verdict if outcome else None
    row = MeasuredRun(
        settings=dict(settings),
        seed=seed,
        steps=outcome.step if outcome else len(listener.speeds),
        val_loss=outcome.val_loss if outcome else None,
        best_val_loss=listener.best,
        train_loss=statistics.fmean(outcome.losses[-LAST:]) if outcome else None,
        word_share=judged.words.share if judged and judged.words.n_words else None,
        longest_copy=judged.copy.n_bytes if judged else None,
        seconds=seconds,
        tokens_per_second=statistics.median(listener.speeds) if listener.speeds else None,
        diverged=diverged,
    )
    return row, listener.engine


def describe(settings: Mapping[str, object], seed: int) -> str:
    """A run in words: "learning_rate 0.001, seed 1"."""
    parts = [f"{key.rpartition('.')[2]} {value}" for key, value in settings.items()]
    return ", ".join([*parts, f"seed {seed}"])
