"""Several runs beside each other: what they came to, and the settings in which they differ.

What this is: what ``posttrainllm runs compare`` and ``posttrainllm.compare`` both show.
What this is not: how they show it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from posttrainllm.config import settings_of
from posttrainllm.errors import ConfigError
from posttrainllm.runs.folder import Run, RunRow, describe_run
from posttrainllm.runs.records import Record, column, newest
from posttrainllm.text.corpus import DEFAULT_NAME
from posttrainllm.wording import Wording

ENOUGH = 8  # evaluations for a curve of validation losses


@dataclass(frozen=True)
class Compared:
    """One run of several: its row, its settings and its metrics."""

    row: RunRow
    settings: Mapping[str, Any]
    lines: Sequence[Record]

    def newest(self, key: str) -> float | None:
        """The newest number under a key of the metrics; None without any."""
        return newest(self.lines, key)


@dataclass(frozen=True)
class Comparison:
    """Several runs, in the order in which they were named."""

    runs: Sequence[Compared]
    differ: Sequence[str]
    """Keys of the settings that are not the same in all of them."""

    @property
    def key(self) -> str:
        """What to draw: ``val_loss`` when every run has a curve of it, else ``loss``."""
        return "val_loss" if all(map(_has_curve, self.runs)) else "loss"


def compare_runs(runs: Sequence[Run]) -> Comparison:
    """Read several runs.

    Raises: ConfigError for fewer than two, and for a configuration that cannot be used; CheckpointError for metrics that are damaged.
    """
    if len(runs) < 2:
        raise ConfigError(
            "comparing takes two runs or more",
            Wording(
                'give two of a folder of runs: compare("first", "second")',
                terminal="see posttrainllm runs list",
            ),
        )
    settings = [settings_of(run.config()) for run in runs]
    differ = [key for key in settings[0] if len({str(each[key]) for each in settings}) > 1]
    found = [
        Compared(describe_run(run), each, run.metrics.read())
        for run, each in zip(runs, settings, strict=True)
    ]
    return Comparison(found, differ)


def show_setting(key: str, value: object) -> str:
    """A setting for people: 0.001, cpp, unset; the text that is there without a file by its name."""
    if key == "data.corpus" and not value:
        return DEFAULT_NAME
    if isinstance(value, tuple):
        return " ".join(map(str, value)) or "none"
    if isinstance(value, float):  # a tenth of 0.006 is 0.0006000000000000001
        return f"{value:.10g}"
    return "unset" if value is None else str(value) or "none"


def _has_curve(run: Compared) -> bool:
    return len(column(run.lines, "val_loss")) >= ENOUGH
