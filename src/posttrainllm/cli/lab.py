"""The lab: is it right, is it fast, and if a run is bad, why. Commands that check and measure.

    bench  sweep  parity  verify-resume  diagnose  doctor

What this is: options, calls into ``posttrainllm.lab`` and exit codes (1 when a check failed).
What this is not: the checks. Read next: ``lab/``.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from posttrainllm.cli.failures import FAILED
from posttrainllm.cli.help import PlainCommand
from posttrainllm.cli.options import AsJson, RunsDir

if TYPE_CHECKING:
    from posttrainllm.lab.benchmark_record import Record

PANEL = "Lab"

Preset = Annotated[
    str | None, typer.Option(help="Preset [dim](default: small)[/dim].", show_default=False)
]
Presets = Annotated[
    str | None,
    typer.Option(
        help="Presets, with commas between them [dim](default: small)[/dim].", show_default=False
    ),
]
Settings = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Any setting; can be repeated."),
]
RecordDir = Annotated[
    Path | None, typer.Option("--record", help="Write records into this folder: bench/results.")
]
Steps = Annotated[int | None, typer.Option(help="Steps of a training [dim](default: all)[/dim].")]


def register(app: typer.Typer) -> None:
    """Add the lab's commands to the command line."""
    app.command(cls=PlainCommand, rich_help_panel=PANEL)(bench)
    app.command(cls=PlainCommand, rich_help_panel=PANEL)(sweep)
    app.command(cls=PlainCommand, rich_help_panel=PANEL)(parity)
    app.command("verify-resume", cls=PlainCommand, rich_help_panel=PANEL)(verify_resume)
    app.command(cls=PlainCommand, rich_help_panel=PANEL)(diagnose)
    app.command(cls=PlainCommand, rich_help_panel=PANEL)(doctor)


def bench(
    preset: Presets = None,
    engine: Annotated[
        str,
        typer.Option(
            help="Engines, with commas: cpp, numpy, torch, torch-compile, wasm, wasm-node, webgpu."
        ),
    ] = "cpp",
    threads: Annotated[
        str, typer.Option(metavar="N,N", help="Thread counts, with commas; 0 is all there are.")
    ] = "0",
    repeats: Annotated[int, typer.Option(min=1, help="Timed steps of each combination.")] = 20,
    settings: Settings = None,
    case: Annotated[str | None, typer.Option(help="Measure a case of bench/cases instead.")] = None,
    steps: Annotated[
        int | None, typer.Option(min=1, help="With --case: fewer steps, to try it out.")
    ] = None,
    record: RecordDir = None,
    as_json: AsJson = False,
) -> None:
    """Time whole training steps: engines, presets and threads in turns."""
    from posttrainllm.cli.lab_tables import show_bench
    from posttrainllm.cli.ticker import Ticker
    from posttrainllm.lab.bench import bench as run_bench
    from posttrainllm.lab.bench import check_repeats, make_cells

    if case is not None:
        _run_case(case, steps, record, as_json)
        return
    if record is not None:
        check_repeats(repeats)
    cells = make_cells(
        _names(preset or _default_preset()),
        _names(engine),
        _numbers("--threads", threads),
        settings or [],
    )
    with Ticker() as ticker:
        found = run_bench(cells, repeats=repeats, progress=ticker)
    paths = _write(found.records(), record) if record else []
    if as_json:
        _print_json([asdict(row) for row in found.rows])
        return
    show_bench(found)
    _say_where(paths)


def _run_case(name: str, steps: int | None, record: Path | None, as_json: bool) -> None:
    from posttrainllm.cli.lab_tables import show_case
    from posttrainllm.cli.ticker import Ticker
    from posttrainllm.errors import ConfigError
    from posttrainllm.lab.cases import load_case, run_case

    case = load_case(name)
    if steps is not None and record is not None:
        raise ConfigError("a case with fewer --steps is not the case", "leave --record out")
    with Ticker() as ticker:
        found = run_case(case, steps=steps, progress=ticker)
    paths = _write(found.records, record) if record else []
    if as_json:
        _print_json(found.records)
    else:
        show_case(found)
        _say_where(paths)
    if not found.passed:
        raise typer.Exit(FAILED)


def sweep(
    preset: Preset = None,
    values: Annotated[
        list[str] | None,
        typer.Option(
            "--set-values",
            metavar="KEY=A,B,...",
            help="Values of a setting, such as schedule.learning_rate=1e-3,3e-3; can be repeated.",
        ),
    ] = None,
    steps: Steps = None,
    seeds: Annotated[str, typer.Option(metavar="N,N", help="Seeds, with commas.")] = "1",
    engine: Annotated[
        str | None,
        typer.Option(
            help="numpy, cpp, wasm, webgpu or torch [dim](default: cpp)[/dim].", show_default=False
        ),
    ] = None,
    settings: Settings = None,
    record: RecordDir = None,
    as_json: AsJson = False,
) -> None:
    """Train the same model at several values of a setting, and compare."""
    from posttrainllm.cli.lab_tables import show_sweep
    from posttrainllm.cli.ticker import Ticker
    from posttrainllm.config import load_config
    from posttrainllm.lab.sweep import parse_axes
    from posttrainllm.lab.sweep import sweep as run_sweep

    config = load_config(
        preset,
        overrides=settings or [],
        flags={"training.steps": steps, "engine.name": engine},
    )
    axes = parse_axes(values or [])
    with Ticker() as ticker:
        found = run_sweep(config, axes, _numbers("--seeds", seeds), ticker)
    name = f"sweep-{'-'.join(key.rpartition('.')[2] for key in axes)}-{config.preset}"
    document = found.record(name)
    paths = _write([document], record) if record else []
    if as_json:
        _print_json(document)
        return
    show_sweep(found)
    _say_where(paths)


def parity(
    preset: Preset = None,
    engine: Annotated[
        str, typer.Option(help="Engines, with commas: numpy, cpp, wasm, webgpu, torch.")
    ] = "cpp",
    steps: Annotated[int, typer.Option(min=1, help="Training steps to compare.")] = 50,
    seed: Annotated[int | None, typer.Option(help="Seed of weights and batches.")] = None,
    threads: Annotated[int | None, typer.Option(help="Threads of the engines.")] = None,
    settings: Settings = None,
    verbose: Annotated[
        bool, typer.Option("--verbose", "-v", help="Show every step and every tensor.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Compare engines: the same weights and batches must give the same numbers.

    The reference is numpy in float64 where that takes no more than minutes, else the first engine.
    """
    from posttrainllm.cli.lab_tables import show_parity
    from posttrainllm.cli.ticker import Ticker
    from posttrainllm.config import load_config
    from posttrainllm.lab.parity import parity as run_parity
    from posttrainllm.training.session import corpus_of

    flags = {"training.seed": seed, "engine.threads": threads}
    config = load_config(preset, overrides=settings or [], flags=flags)
    with Ticker() as ticker:
        found = run_parity(config, corpus_of(config), _names(engine), steps=steps, progress=ticker)
    if as_json:
        _print_json(
            {
                "passed": found.passed,
                "verdict": found.verdict,
                "preset": found.preset,
                "steps": found.steps,
                "seed": found.seed,
                "reference": found.reference.engine,
                "reference_losses": found.reference.losses,
                "engines": [asdict(one) for one in found.comparisons],
            }
        )
    else:
        show_parity(found, verbose=verbose)
    if not found.passed:
        raise typer.Exit(FAILED)


def verify_resume(
    preset: Preset = None,
    engine: Annotated[
        str | None,
        typer.Option(
            help="numpy, cpp, wasm, webgpu or torch [dim](default: cpp)[/dim].", show_default=False
        ),
    ] = None,
    steps: Annotated[int, typer.Option(min=4, help="Steps of the run that is killed.")] = 40,
    kills: Annotated[int, typer.Option(min=1, help="How often it is killed.")] = 3,
    seed: Annotated[int, typer.Option(help="Seed of the kills.")] = 1,
    threads: Annotated[int | None, typer.Option(help="Threads of the engine.")] = None,
    settings: Settings = None,
    as_json: AsJson = False,
) -> None:
    """Kill a run and resume it: its losses must be those of an undisturbed run, bit by bit."""
    from posttrainllm.cli.lab_tables import show_verify_resume
    from posttrainllm.cli.ticker import Ticker
    from posttrainllm.config import load_config
    from posttrainllm.lab.verify_resume import checkable
    from posttrainllm.lab.verify_resume import verify_resume as run_verify

    flags = {"engine.name": engine, "engine.threads": threads}
    config = checkable(load_config(preset, overrides=settings or [], flags=flags), steps)
    with Ticker() as ticker:
        found = run_verify(config, kills=kills, seed=seed, progress=ticker)
    if as_json:
        _print_json({"passed": found.passed, "verdict": found.verdict, **asdict(found)})
    else:
        show_verify_resume(found)
    if not found.passed:
        raise typer.Exit(FAILED)


def diagnose(
    run: Annotated[str, typer.Argument(metavar="RUN", help="Name of a run, or its folder.")],
    steps: Annotated[
        int | None, typer.Option(min=1, help="Steps of each probe.", show_default=False)
    ] = None,
    runs_dir: RunsDir = None,
    as_json: AsJson = False,
) -> None:
    """Find out why a run does not get better: its settings, and a probe of its learning rate."""
    from posttrainllm.api import RUNS_DIR
    from posttrainllm.cli.lab_tables import show_diagnosis
    from posttrainllm.cli.ticker import Ticker
    from posttrainllm.lab.diagnose import PROBE_STEPS
    from posttrainllm.lab.diagnose import diagnose as run_diagnose
    from posttrainllm.runs.folder import Run, resolve_run

    found_run = Run(resolve_run(run, runs_dir or Path(RUNS_DIR)))
    with Ticker() as ticker:
        found = run_diagnose(found_run, steps=steps or PROBE_STEPS, progress=ticker)
    if as_json:
        _print_json({**asdict(found), "standing": found.standing, "sentence": found.sentence})
        return
    show_diagnosis(found)


def doctor(as_json: AsJson = False) -> None:
    """Check this installation: kernels, engines, the text, and whether they compute right."""
    from posttrainllm.cli.lab_tables import show_findings
    from posttrainllm.lab.doctor import doctor as run_doctor

    if as_json:
        findings = list(run_doctor())
        _print_json([asdict(finding) for finding in findings])
        good = all(finding.status != "problem" for finding in findings)
    else:
        good = show_findings(run_doctor())
    if not good:
        raise typer.Exit(FAILED)


def _names(text: str) -> list[str]:
    return [part.strip() for part in text.split(",") if part.strip()]


def _numbers(option: str, text: str) -> list[int]:
    from posttrainllm.errors import ConfigError

    try:
        numbers = [int(part) for part in _names(text)]
    except ValueError:
        numbers = []
    if not numbers or min(numbers) < 0:
        raise ConfigError(
            f"{option} takes whole numbers with commas between them, got {text!r}",
            f"for example {option} 1,2",
        )
    return numbers


def _default_preset() -> str:
    from posttrainllm.presets import DEFAULT_PRESET

    return DEFAULT_PRESET


def _write(records: list[Record], folder: Path) -> list[Path]:
    from posttrainllm.lab.benchmark_record import write_record

    return [write_record(record, folder) for record in records]


def _say_where(paths: list[Path]) -> None:
    from posttrainllm.cli.terminal import say

    for path in paths:
        say(f"recorded in {path}")


def _print_json(value: Mapping[str, Any] | list[Any]) -> None:
    from posttrainllm.runs.trainer_state import finite

    print(json.dumps(finite(value), allow_nan=False))
