"""An evaluation that an interrupt cut off: what the metrics say of it, until the run goes on and makes up for it.

A run that is stopped while it evaluates is saved at that step, and the step's line has null as its validation loss. Whoever goes on
with it evaluates there first, so that the run becomes what it would have been undisturbed; after the last step, that is all there is
left to do.
"""

from __future__ import annotations

from dataclasses import asdict, replace

from posttrainllm.config import TrainConfig
from posttrainllm.runs.folder import METRICS, Run
from posttrainllm.runs.records import number_of
from posttrainllm.training.observer import Record


def evaluates(config: TrainConfig, step: int) -> bool:
    """Whether a validation loss is due after a step, where there is text for it."""
    every = config.training.eval_every
    return step == config.training.steps or (every > 0 and step % every == 0)


def cut_short_at(run: Run, config: TrainConfig, step: int) -> Record | None:
    """The last line of a run at ``step`` when it lacks the validation loss that is due there.

    Raises: CheckpointError when the metrics are damaged.
    """
    lines = run.metrics.read()
    if not lines or not evaluates(config, step) or not config.data.val_fraction:
        return None
    found = {key: number_of(lines[-1], key) for key in METRICS}
    missing = [key for key in METRICS if found[key] is None]
    if missing != ["val_loss"] or found.pop("step") != step:
        return None
    return Record(step=step, **found)  # type: ignore[arg-type]  # none of the others is None


def make_up(run: Run, record: Record, val_loss: float) -> Record:
    """Put the validation loss into the last line; returns that line. Raises: CheckpointError, with the line as it was."""
    whole = replace(record, val_loss=val_loss)
    run.metrics.replace_last(asdict(whole))
    return whole
