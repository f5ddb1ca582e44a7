"""``posttrainllm train``: a new run, or going on with one."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from posttrainllm.cli.options import CorpusFiles
from posttrainllm.interrupts import STOPPED

if TYPE_CHECKING:
    from posttrainllm.cli.watcher import Watcher
    from posttrainllm.config import TrainConfig
    from posttrainllm.training.trainer import Trainer

MODEL, RUN, OUTPUT = "Model and schedule", "Run", "Output"


def train(
    context: typer.Context,
    corpus: CorpusFiles = None,
    preset: Annotated[
        str | None,
        typer.Option(
            help="Sizes and schedule: see [bold]posttrainllm presets[/bold].", rich_help_panel=MODEL
        ),
    ] = None,
    start_from: Annotated[
        str | None,
        typer.Option(
            "--from",
            metavar="MODEL",
            help="Start from a model's weights: see [bold]posttrainllm models[/bold], or a run.",
            rich_help_panel=MODEL,
        ),
    ] = None,
    tokenizer: Annotated[
        str | None,
        typer.Option(
            metavar="FOLDER",
            help="Read the text with this folder's BPE tokenizer, not as bytes.",
            rich_help_panel=MODEL,
        ),
    ] = None,
    steps: Annotated[
        int | None, typer.Option(help="Optimizer steps.", rich_help_panel=MODEL)
    ] = None,
    batch_size: Annotated[
        int | None,
        typer.Option(help="Windows a step, times data.accumulation.", rich_help_panel=MODEL),
    ] = None,
    n_ctx: Annotated[
        int | None, typer.Option(help="Context: tokens a window.", rich_help_panel=MODEL)
    ] = None,
    learning_rate: Annotated[
        float | None,
        typer.Option(help="Highest learning rate, after the warm-up.", rich_help_panel=MODEL),
    ] = None,
    val_fraction: Annotated[
        float | None,
        typer.Option(help="Share of the text kept for validation.", rich_help_panel=MODEL),
    ] = None,
    seed: Annotated[
        int | None,
        typer.Option(help="Seed of weights, batches and samples.", rich_help_panel=MODEL),
    ] = None,
    config: Annotated[
        Path | None,
        typer.Option(
            help="TOML file of settings, such as a run's config.toml.", rich_help_panel=MODEL
        ),
    ] = None,
    settings: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="KEY=VALUE",
            help="Any setting, such as optimizer.beta2=0.99; can be repeated.",
            rich_help_panel=MODEL,
        ),
    ] = None,
    engine: Annotated[
        str | None,
        typer.Option(help="numpy, cpp, wasm, webgpu, torch or auto.", rich_help_panel=RUN),
    ] = None,
    threads: Annotated[
        int | None, typer.Option(help="Threads of the engine.", rich_help_panel=RUN)
    ] = None,
    nproc: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            help="Processes that train together, one a GPU, with engine torch.",
            rich_help_panel=RUN,
        ),
    ] = None,
    parallel: Annotated[
        str | None,
        typer.Option(
            help="What several processes divide: ddp the batch, fsdp the model too.",
            rich_help_panel=RUN,
        ),
    ] = None,
    cpp_build: Annotated[
        str | None,
        typer.Option(help="Build of the C++ kernels: plain, avx2, avx512.", rich_help_panel=RUN),
    ] = None,
    name: Annotated[str | None, typer.Option(help="Name of the run.", rich_help_panel=RUN)] = None,
    runs_dir: Annotated[
        Path | None, typer.Option(help="Folder of the runs.", rich_help_panel=RUN)
    ] = None,
    resume: Annotated[
        str | None,
        typer.Option(
            metavar="NAME", help="Go on with a run from its last checkpoint.", rich_help_panel=RUN
        ),
    ] = None,
    allow_change: Annotated[
        bool,
        typer.Option(
            "--allow-change",
            help="Let --resume change settings that decide what is computed.",
            rich_help_panel=RUN,
        ),
    ] = False,
    verbose: Annotated[
        bool, typer.Option("--verbose", "-v", help="Show every figure.", rich_help_panel=OUTPUT)
    ] = False,
    quiet: Annotated[
        bool, typer.Option("--quiet", "-q", help="Show warnings only.", rich_help_panel=OUTPUT)
    ] = False,
    as_json: Annotated[
        bool,
        typer.Option("--json", help="Print events as JSON lines.", rich_help_panel=OUTPUT),
    ] = False,
) -> None:
    """Train a model on a text, or go on with a run.

    Ctrl-C finishes the step, saves, and says how to go on; a second one does not wait for the step, and a third one for nothing.
    """
    from posttrainllm.cli import together
    from posttrainllm.cli.display import watcher
    from posttrainllm.cli.worker import report_run

    flags: dict[str, Any] = {
        "data.corpus": corpus or None,
        "training.steps": steps,
        "training.start_from": start_from,
        "data.tokenizer": tokenizer,
        "data.batch_size": batch_size,
        "model.n_ctx": n_ctx,
        "schedule.learning_rate": learning_rate,
        "data.val_fraction": val_fraction,
        "training.seed": seed,
        "engine.name": engine,
        "engine.threads": threads,
        "engine.cpp_build": cpp_build,
        "engine.parallel": parallel,
        "preset": preset,
    }
    ranks = together.ranks_for(nproc)
    if ranks is not None or (nproc or 1) > 1:
        together.take_torch(flags, config, settings or [], new=resume is None)
    if ranks is None and nproc is not None and nproc > 1:
        loaded = None if resume else _settings(config, settings or [], flags, runs_dir)
        raise typer.Exit(together.launch(nproc, loaded, context.find_root().obj))
    with (
        together.joined(ranks) as group,
        watcher(verbose=verbose, quiet=quiet, as_json=as_json) as display,
    ):
        if resume is None:
            trainer = _new(config, settings or [], flags, runs_dir, name, display)
        else:
            trainer = _resumed(
                resume, config, settings or [], flags, runs_dir, name, allow_change, display
            )
        trainer.group = group
        report_run(trainer.run.path)
        try:
            outcome = trainer.train()
        except KeyboardInterrupt:
            display.close()
            _tell_where_it_is(trainer)
            raise typer.Exit(STOPPED) from None
    if outcome.stopped:
        raise typer.Exit(STOPPED)


def _new(
    config: Path | None,
    settings: list[str],
    flags: dict[str, Any],
    runs_dir: Path | None,
    name: str | None,
    display: Watcher,
) -> Trainer:
    from posttrainllm.api import RUNS_DIR
    from posttrainllm.training.session import new_trainer

    loaded = _settings(config, settings, flags, runs_dir)
    return new_trainer(loaded, runs_dir=runs_dir or Path(RUNS_DIR), name=name, observer=display)


def _settings(
    config: Path | None, settings: list[str], flags: dict[str, Any], runs_dir: Path | None
) -> TrainConfig:
    from posttrainllm.api import RUNS_DIR
    from posttrainllm.training.starting import load_settings

    folder = runs_dir or Path(RUNS_DIR)
    return load_settings(file=config, overrides=settings, flags=flags, runs_dir=folder)


def _resumed(
    resume: str,
    config: Path | None,
    settings: list[str],
    flags: dict[str, Any],
    runs_dir: Path | None,
    name: str | None,
    allow_change: bool,
    display: Watcher,
) -> Trainer:
    from posttrainllm.api import RUNS_DIR
    from posttrainllm.config import given_settings
    from posttrainllm.errors import ConfigError
    from posttrainllm.text.files import STANDARD_INPUT, find_files
    from posttrainllm.training.session import resumed_trainer

    if name is not None:
        raise ConfigError(
            f"--resume {resume} goes on under its own name, and --name gives another",
            "leave one of the two out",
        )
    if flags["data.corpus"]:
        files = find_files(flags["data.corpus"])
        flags["data.corpus"] = tuple(str(file.path or STANDARD_INPUT) for file in files)
    return resumed_trainer(
        resume,
        runs_dir=runs_dir or Path(RUNS_DIR),
        changes=given_settings(config, settings, flags),
        allow_change=allow_change,
        observer=display,
    )


def _tell_where_it_is(trainer: Trainer) -> None:
    """After a second Ctrl-C: which step is safe."""
    from posttrainllm.cli.report import command, where
    from posttrainllm.cli.terminal import say
    from posttrainllm.runs.checkpoint import list_checkpoints, step_of

    saved = max(
        (step_of(folder) for folder in list_checkpoints(trainer.run.checkpoints)), default=0
    )
    if saved:
        say(f"stopped; the newest checkpoint is of step {saved:,}, go on with it:", error=True)
        say(f"  {command()} train --resume {where(trainer.run.path)}", error=True)
    else:
        say("stopped; no checkpoint was saved", error=True)
