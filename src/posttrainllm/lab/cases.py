"""Benchmark cases: files that say what is measured, so that a record can be made again by its name.

    bench/cases/<name>.toml

    kind = "step" | "ladder" | "training" | "sweep" | "decode"      about = "one sentence"
    preset = "small" (or presets = [...])     engine = "cpp" (or engines = [...])
    set = ["section.key=value", ...]          as after --set
    step:      threads = [1, 2]   repeats = 20
    ladder:    repeats = 10       rungs = [["section.key=value", ...], ...]  each a set of settings, from slow to fast
    training:  seeds = [1, 2, 3]  expect = { val_loss_at_most = 1.92, word_share_at_least = 0.6 }
    sweep:     seeds = [1]        values = ["schedule.learning_rate=1e-3,3e-3"]
    decode:    threads = [1, 2]   repeats = 10   engines may be transformers, cpp-int8, cpp-recomputing
                                  expect = { times_transformers_at_least = 3 }

What this is not: the measuring (``bench.py``, ``ladder.py``, ``sweep.py``, ``measured_run.py``).
"""

from __future__ import annotations

import statistics
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from posttrainllm.config import TrainConfig, load_config, replace
from posttrainllm.errors import ConfigError
from posttrainllm.figures import Progress, untold
from posttrainllm.lab.bench import Bench, bench, check_repeats, make_cells
from posttrainllm.lab.benchmark_record import Record, make_record, source_tree
from posttrainllm.lab.decode_bench import DecodeBench, decode_bench
from posttrainllm.lab.ladder import ladder
from posttrainllm.lab.measured_run import MeasuredRun, train_once
from posttrainllm.lab.sweep import Sweep, parse_axes, sweep
from posttrainllm.settings import did_you_mean, show

FOLDER = Path("bench", "cases")
DECODE_FIGURES = (
    "times_transformers",
    "times_recomputing",
    "times_int8",
    "times_transformers_int8",
    "first_words_s",
)


class Case(BaseModel):
    """A case as its file says it."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str
    kind: Literal["step", "ladder", "training", "sweep", "decode"]
    about: str
    presets: list[str] = Field(min_length=1)
    engines: list[str] = Field(min_length=1)
    set: list[str] = []
    threads: list[int] = [0]
    repeats: int = 20
    seeds: list[int] = [1]
    values: list[str] = []
    rungs: list[list[str]] = []
    expect: dict[str, float] = {}

    def config(self, steps: int | None = None) -> TrainConfig:
        """The configuration of a case that trains."""
        flags = {"engine.name": self.engines[0]}
        config = load_config(self.presets[0], overrides=self.set, flags=flags)
        if steps is None:
            return config
        warmup = min(config.schedule.warmup_steps, steps // 10)
        return replace(config, {"training.steps": steps, "schedule.warmup_steps": warmup})


@dataclass(frozen=True)
class Check:
    """One expectation and what became of it."""

    text: str
    passed: bool


@dataclass(frozen=True)
class CaseResult:
    """What a case measured, by its kind (a ladder gives a ``bench`` too), its records and its checks."""

    case: Case
    records: list[Record]
    checks: list[Check]
    bench: Bench | None = None
    sweep: Sweep | None = None
    decode: DecodeBench | None = None
    runs: Sequence[MeasuredRun] = ()

    @property
    def passed(self) -> bool:
        """Whether all expectations were met."""
        return all(check.passed for check in self.checks)


def find_case(name: str) -> Path:
    """A case by the path of its file, or by name in ``bench/cases`` here or in the source tree.

    Raises: ConfigError, with the names there are.
    """
    path = Path(name)
    if path.suffix == ".toml" and path.is_file():
        return path
    roots = [root for root in (Path(), source_tree()) if root is not None]
    folders = [root / FOLDER for root in roots if (root / FOLDER).is_dir()]
    for folder in folders:
        if (folder / f"{name}.toml").is_file():
            return folder / f"{name}.toml"
    names = sorted({file.stem for folder in folders for file in folder.glob("*.toml")})
    raise ConfigError(
        f"there is no benchmark case {show(name)}{did_you_mean(name, names)}",
        f"cases: {', '.join(names)}" if names else "cases are in the source tree, bench/cases",
    )


def load_case(name: str) -> Case:
    """Read a case. Raises: ConfigError, naming the file and the field."""
    path = find_case(name)
    try:
        document = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} cannot be read: {error}") from None
    for one, several in (("preset", "presets"), ("engine", "engines")):
        if one in document:
            document[several] = [document.pop(one)]
    try:
        case = Case.model_validate({"name": path.stem, "engines": ["cpp"], **document})
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False)[0]
        place = ".".join(map(str, first["loc"]))
        raise ConfigError(f"{path}: {place}: {first['msg'].lower()}") from None
    known = DECODE_FIGURES if case.kind == "decode" else MeasuredRun.__dataclass_fields__
    for expectation in case.expect:
        if _expectation(expectation)[0] not in known:
            raise ConfigError(f"{path}: expect.{expectation} is no figure of a run")
    return case


def run_case(
    case: Case,
    *,
    steps: int | None = None,
    progress: Progress = untold,
) -> CaseResult:
    """Measure a case. ``steps`` shortens its trainings, to try it out.

    Raises: ConfigError, CorpusError, EngineError.
    """
    if case.kind == "step":
        return _step(case, progress)
    if case.kind == "ladder":
        return _ladder(case, progress)
    if case.kind == "decode":
        return _decode(case, progress)
    config = case.config(steps)
    if case.kind == "sweep":
        swept = sweep(config, parse_axes(case.values), case.seeds, progress)
        return CaseResult(case, [swept.record(case.name)], [], sweep=swept)
    return _training(case, config, progress)


def _step(case: Case, progress: Progress) -> CaseResult:
    check_repeats(case.repeats)
    cells = make_cells(case.presets, case.engines, case.threads, case.set)
    timed = bench(cells, repeats=case.repeats, progress=progress)
    records = [{**record, "case": case.name} for record in timed.records()]
    return CaseResult(case, records, [], bench=timed)


def _ladder(case: Case, progress: Progress) -> CaseResult:
    engine = case.engines[0]
    timed, record = ladder(
        case.name, case.presets, engine, case.rungs, case.set, case.repeats, progress
    )
    return CaseResult(case, [record], [], bench=timed)


def _decode(case: Case, progress: Progress) -> CaseResult:
    written = decode_bench(
        case.name,
        case.presets[0],
        case.engines,
        case.threads,
        repeats=case.repeats,
        progress=progress,
    )
    checks = _checks(case, written.figures)
    results = {"about": case.about, "expect": case.expect, **written.figures}
    passed = {"passed": all(check.passed for check in checks)}
    record = {**written.record, "results": {**results, **passed}}
    return CaseResult(case, [record], checks, decode=written)


def _training(case: Case, config: TrainConfig, progress: Progress) -> CaseResult:
    """Train the configuration once for each seed."""
    runs: list[MeasuredRun] = []
    info: dict[str, str | int] = {}
    for seed in case.seeds:
        run, info = train_once(config, {}, seed, progress)
        runs.append(run)
    checks = [check for run in runs for check in _checks(case, asdict(run), f"seed {run.seed}: ")]
    record = make_record(
        "training",
        case.name,
        engine=config.engine.name,
        info=info,
        config=config,
        rows=[asdict(run) for run in runs],
        method={"seeds": case.seeds, "repeats": len(runs), "warmup": 0},
        results={
            "about": case.about,
            "expect": case.expect,
            "passed": all(check.passed for check in checks),
            **{name: _range(runs, name) for name in ("val_loss", "word_share", "seconds")},
        },
    )
    return CaseResult(case, [record], checks, runs=runs)


def _checks(case: Case, figures: Mapping[str, Any], whose: str = "") -> list[Check]:
    found = []
    for expectation, bound in case.expect.items():
        name, at_most = _expectation(expectation)
        value = figures.get(name)
        good = value is not None and (value <= bound if at_most else value >= bound)
        shown = "not measured" if value is None else f"{value:.4g}"
        words = "at most" if at_most else "at least"
        found.append(Check(f"{whose}{name} is {shown}, wanted {words} {bound:g}", bool(good)))
    return found


def _expectation(text: str) -> tuple[str, bool]:
    """Split "val_loss_at_most" into the figure and whether the bound is an upper one."""
    at_most = text.endswith("_at_most")
    return text.removesuffix("_at_most").removesuffix("_at_least"), at_most


def _range(runs: Sequence[MeasuredRun], name: str) -> dict[str, float] | None:
    values = [value for run in runs if (value := getattr(run, name)) is not None]
    if not values:
        return None
    return {"median": statistics.median(values), "min": min(values), "max": max(values)}
