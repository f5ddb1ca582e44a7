"""``posttrainllm runs``: what has been trained, its settings and its curves."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from posttrainllm.cli.help import PlainCommand, PlainGroup
from posttrainllm.cli.options import AsJson, RunsDir

if TYPE_CHECKING:
    from posttrainllm.runs.curves import Curve
    from posttrainllm.runs.folder import Run

COLOURS = ("cyan", "yellow", "green", "magenta", "blue", "red")
WIDEST, TALL = 100, 14  # columns and rows of a plot
POINTS = 200  # of a curve; more would only be noise

app = typer.Typer(cls=PlainGroup, no_args_is_help=False)


@app.callback(invoke_without_command=True)
def runs(context: typer.Context) -> None:
    """List runs, look at one, compare several."""
    if context.invoked_subcommand is None:
        list_all()


@app.command("list", cls=PlainCommand)
def list_all(runs_dir: RunsDir = None, as_json: AsJson = False) -> None:
    """List all runs, the newest last."""
    from posttrainllm.cli.table import Column, print_table
    from posttrainllm.figures import one_line
    from posttrainllm.runs.folder import list_runs
    from posttrainllm.storage import show_bytes

    folder = _folder(runs_dir)
    rows = list_runs(folder)
    if as_json:
        _print_json([_facts(row) for row in rows])
        return
    if not rows:
        _say(f"no runs in {folder}; train one: posttrainllm train")
        return
    columns = [
        Column("run"),
        Column("preset", goes=3),
        Column("state"),
        Column("step", right=True),
        Column("loss", right=True, goes=2),
        Column("best val", right=True),
        Column("size", right=True, goes=4),
        Column("changed", goes=5),
    ]
    print_table(
        columns,
        [
            [
                one_line(row.name),
                row.preset or "-",
                row.state,
                f"{row.step:,}" + (f"/{row.steps:,}" if row.steps else ""),
                _loss(row.loss),
                _loss(row.best_val_loss),
                show_bytes(row.bytes),
                f"{row.modified.astimezone():%Y-%m-%d %H:%M}" if row.modified else "-",
            ]
            for row in rows
        ],
    )


@app.command(cls=PlainCommand)
def show(
    run: Annotated[str, typer.Argument(metavar="RUN", help="Name of a run, or its folder.")],
    runs_dir: RunsDir = None,
    as_json: AsJson = False,
) -> None:
    """Show one run: settings, losses, checkpoints and its curve."""
    from posttrainllm.cli.terminal import fields
    from posttrainllm.config import changed_settings
    from posttrainllm.figures import clock, one_line
    from posttrainllm.runs.comparing import show_setting
    from posttrainllm.runs.folder import describe_run
    from posttrainllm.storage import show_bytes
    from posttrainllm.training.progress import SMOOTHED
    from posttrainllm.training.report import model_words

    found = _open(run, _folder(runs_dir))
    row, config, lines = describe_run(found), found.config(), found.metrics.read()
    changed = changed_settings(config)
    saved = _checkpoints(found)
    last = lines[-1] if lines else {}
    if as_json:
        _print_json(
            {
                **_facts(row),
                "changed": [{"key": k, "value": v, "preset": usual} for k, v, usual in changed],
                "last": last or None,
                "checkpoints": [str(folder) for folder, _ in saved],
            }
        )
        return
    steps = f"{row.step:,} of {row.steps:,} steps" if row.steps else f"{row.step:,} steps"
    rows = [
        ("run", f"{row.name}: {row.state}, {steps}, {show_bytes(row.bytes)}"),
        ("model", model_words(config)),
        ("text", show_setting("data.corpus", config.data.corpus)),
        (
            "changed",
            ", ".join(
                f"{key} {show_setting(key, value)} (preset: {show_setting(key, usual)})"
                for key, value, usual in changed
            )
            or "nothing: every setting is the preset's",
        ),
        ("loss", f"{_loss(row.loss)} training, {_loss(row.best_val_loss)} best validation"),
    ]
    if last:
        took, paces = last.get("elapsed_s"), _numbers(lines[-SMOOTHED:], "tokens_per_second")
        if isinstance(took, int | float) and paces:
            speed = len(paces) / sum(1.0 / max(pace, 1e-9) for pace in paces)
            rows.append(("time", f"{clock(took)}, {speed:,.0f} tokens/s at the end"))
    rows += [
        ("saved" if number == 0 else "", f"{folder} ({show_bytes(size)})")
        for number, (folder, size) in enumerate(saved)
    ]
    fields((label, one_line(value)) for label, value in rows)
    _draw([_curve("training loss", lines, "loss"), _curve("validation loss", lines, "val_loss")])


@app.command(cls=PlainCommand)
def compare(
    names: Annotated[list[str], typer.Argument(metavar="RUN", help="Two runs or more.")],
    runs_dir: RunsDir = None,
    as_json: AsJson = False,
) -> None:
    """Compare runs: their curves over each other and their losses."""
    from posttrainllm.cli.table import Column, print_table
    from posttrainllm.figures import one_line
    from posttrainllm.runs.comparing import compare_runs, show_setting

    folder = _folder(runs_dir)
    found = compare_runs([_open(name, folder) for name in names])
    if as_json:
        _print_json(
            [
                {
                    **_facts(each.row),
                    "differs": {key: each.settings[key] for key in found.differ},
                    "last": each.lines[-1] if each.lines else None,
                }
                for each in found.runs
            ]
        )
        return
    _draw(
        [_curve(one_line(each.row.name), each.lines, found.key) for each in found.runs],
        title="validation loss" if found.key == "val_loss" else "training loss",
    )
    titles = [key.rpartition(".")[2] for key in found.differ]
    print_table(
        [
            Column("run"),
            Column("state", goes=99),
            Column("step", right=True, goes=98),
            Column("loss", right=True),
            Column("best val", right=True),
            *(Column(title, right=True, goes=at + 1) for at, title in enumerate(titles)),
        ],
        [
            [
                one_line(each.row.name),
                each.row.state,
                f"{each.row.step:,}",
                _loss(each.row.loss),
                _loss(each.row.best_val_loss),
                *(one_line(show_setting(key, each.settings[key])) for key in found.differ),
            ]
            for each in found.runs
        ],
    )


def _folder(runs_dir: Path | None) -> Path:
    from posttrainllm.api import RUNS_DIR

    return runs_dir or Path(RUNS_DIR)


def _open(name: str, folder: Path) -> Run:
    from posttrainllm.runs.folder import Run, resolve_run

    return Run(resolve_run(name, folder))


def _checkpoints(run: Run) -> list[tuple[Path, int]]:
    from posttrainllm.runs.checkpoint import list_checkpoints

    return [
        (folder, sum(file.stat().st_size for file in folder.iterdir()))
        for folder in list_checkpoints(run.checkpoints)
    ]


def _numbers(lines: Sequence[dict[str, Any]], key: str) -> list[float]:
    """What stands under a key of metrics.jsonl; an imported run has null there."""
    return [line[key] for line in lines if isinstance(line.get(key), int | float)]


def _curve(name: str, lines: Sequence[dict[str, Any]], key: str) -> Curve:
    """The numbers under a key of metrics.jsonl over their steps."""
    from posttrainllm.runs.curves import curve_of

    return curve_of(name, lines, key, POINTS)


def _draw(curves: list[Curve], *, title: str = "") -> None:
    """Plot curves in colours where there are any, else with letters, and say which is which."""
    from posttrainllm.cli.plot import NOTHING, plot
    from posttrainllm.cli.terminal import can_redraw, say, styled, width

    curves = [curve for curve in curves if curve.y]
    coloured = can_redraw(sys.stdout) and styled(sys.stdout).color_system is not None
    room = min(WIDEST, width(sys.stdout) or WIDEST)
    rows = plot(curves, room, TALL, letters=not coloured)
    if not rows:
        return
    styles = [COLOURS[number % len(COLOURS)] for number in range(len(curves))]
    say((title, "dim"))
    for row in rows:
        say(*((c.character, "dim" if c.curve == NOTHING else styles[c.curve]) for c in row))
    say("  ", *_legend(curves, styles, coloured=coloured))
    say()


def _legend(curves: list[Curve], styles: list[str], *, coloured: bool) -> list[tuple[str, str]]:
    parts = []
    for number, (curve, style) in enumerate(zip(curves, styles, strict=True)):
        mark = "━" if coloured else chr(ord("a") + number % 26)
        parts += [(f"{mark} ", style), (f"{curve.name}   ", "")]
    return parts


def _facts(row: Any) -> dict[str, Any]:
    """A row of ``list_runs`` as JSON takes it."""
    from dataclasses import asdict

    modified = row.modified.isoformat(timespec="seconds") if row.modified else None
    return {**asdict(row), "modified": modified}


def _print_json(value: Any) -> None:
    from posttrainllm.runs.trainer_state import finite

    print(json.dumps(finite(value), allow_nan=False))


def _say(text: str) -> None:
    from posttrainllm.cli.terminal import say

    say(text)


def _loss(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"
