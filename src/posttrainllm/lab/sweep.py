"""A sweep: the same training with one setting, or several, at each of some values.

What this is: the evidence behind a default, above all behind the learning rate of each preset. Every combination is trained to its end
with every seed, and the final validation losses are compared.
What this is not: a search. The values are the user's.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import product

from posttrainllm.config import TrainConfig, given_settings, replace
from posttrainllm.errors import ConfigError
from posttrainllm.figures import Progress, untold
from posttrainllm.lab.benchmark_record import Record, make_record
from posttrainllm.lab.measured_run import PLAIN, MeasuredRun, train_once


@dataclass(frozen=True)
class Point:
    """One combination of values: the mean final validation loss over the seeds, None when a run diverged."""

    settings: dict[str, object]
    val_loss: float | None
    spread: float
    """Highest minus lowest over the seeds."""
    runs: int
    diverged: int


@dataclass(frozen=True)
class Sweep:
    """All runs of a sweep."""

    config: TrainConfig
    runs: list[MeasuredRun]
    engine: dict[str, str | int]

    @property
    def points(self) -> list[Point]:
        """One point a combination, in the order in which they were trained."""
        found: dict[str, list[MeasuredRun]] = {}
        for run in self.runs:
            found.setdefault(str(run.settings), []).append(run)
        return [_point(runs) for runs in found.values()]

    @property
    def best(self) -> Point | None:
        """The point of the lowest loss; None when every one diverged."""
        finished = [point for point in self.points if point.val_loss is not None]
        return min(finished, key=lambda point: point.val_loss or 0.0, default=None)

    @property
    def sentence(self) -> str:
        """The result in words, with what the configuration says."""
        best = self.best
        if best is None:
            return "every run diverged"
        line = f"best: {', '.join(f'{key}={value}' for key, value in best.settings.items())}"
        line += f" at a validation loss of {best.val_loss:.3f}"
        usual = self.usual
        if usual == best:
            line += ", as configured"
        elif usual is not None and usual.val_loss is not None and best.val_loss is not None:
            line += f"; the configured values are {usual.val_loss - best.val_loss:.3f} above it"
        return line

    @property
    def usual(self) -> Point | None:
        """The point of the configuration's own values, if it is among them."""
        return next((p for p in self.points if _is_in(p.settings, self.config)), None)

    def record(self, case: str) -> Record:
        """The sweep as a benchmark record."""
        best = self.best
        return make_record(
            "sweep",
            case,
            engine=self.config.engine.name,
            info=self.engine,
            config=self.config,
            rows=[asdict(run) for run in self.runs],
            method={
                "seeds": sorted({run.seed for run in self.runs}),
                "setting_per_run": dict(PLAIN),
            },
            results={
                "points": [asdict(point) for point in self.points],
                "best": asdict(best) if best else None,
            },
        )


def sweep(
    config: TrainConfig,
    axes: Mapping[str, Sequence[object]],
    seeds: Iterable[int] = (1,),
    progress: Progress = untold,
) -> Sweep:
    """Train every combination of the axes' values with every seed.

    Raises: ConfigError for an axis or value that no setting takes, before anything is trained; CorpusError, EngineError.
    """
    config = replace(config, PLAIN)
    combinations = [dict(zip(axes, values, strict=True)) for values in product(*axes.values())]
    for combination in combinations:
        replace(config, combination)
    runs: list[MeasuredRun] = []
    engine: dict[str, str | int] = {}
    planned = [(one, seed) for one in combinations for seed in dict.fromkeys(seeds)]
    for number, (combination, seed) in enumerate(planned, start=1):
        told = _numbered(progress, f"{number}/{len(planned)} ")
        row, engine = train_once(config, combination, seed, told)
        runs.append(row)
    return Sweep(config, runs, engine)


def _numbered(progress: Progress, place: str) -> Progress:
    """The same, told which of the runs it is."""
    return lambda what, step, steps: progress(place + what, step, steps)


def parse_axes(texts: Iterable[str]) -> dict[str, list[object]]:
    """Read "section.key=value,value,..." as the command line has it.

    Raises: ConfigError.
    """
    axes: dict[str, list[object]] = {}
    for text in texts:
        key, equals, values = text.partition("=")
        if not equals or not values.strip(","):
            raise ConfigError(
                f"--set-values {text!r} has no values",
                "write it as --set-values schedule.learning_rate=1e-3,3e-3",
            )
        parts = [part.strip() for part in values.split(",") if part.strip()]
        typed = [given_settings(overrides=[f"{key}={part}"]) for part in parts]
        axes[key.strip()] = [value for one in typed for value in one.values()]
    if not axes:
        raise ConfigError(
            "a sweep needs values", "add --set-values schedule.learning_rate=1e-3,3e-3"
        )
    return axes


def _point(runs: Sequence[MeasuredRun]) -> Point:
    losses = [run.val_loss for run in runs if run.val_loss is not None]
    whole = len(losses) == len(runs)
    return Point(
        settings=runs[0].settings,
        val_loss=statistics.fmean(losses) if whole else None,
        spread=max(losses) - min(losses) if losses else 0.0,
        runs=len(runs),
        diverged=sum(run.diverged is not None for run in runs),
    )


def _is_in(settings: Mapping[str, object], config: TrainConfig) -> bool:
    return replace(config, settings) == config
