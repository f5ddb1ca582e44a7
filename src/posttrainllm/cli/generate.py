"""``posttrainllm generate``: a model writes, and the text is shown as it is written."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from posttrainllm.cli.options import ModelEngine, ModelName, RunsDir

SAMPLING = "Sampling"


def generate(
    run: ModelName = None,
    prompt: Annotated[
        str | None,
        typer.Option(help="Text to go on from; - reads it from standard input."),
    ] = None,
    max_tokens: Annotated[
        int | None, typer.Option(help="Length of the new text, in tokens.")
    ] = None,
    stop: Annotated[
        list[str] | None, typer.Option(help="End before this text; can be repeated.")
    ] = None,
    temperature: Annotated[
        float | None,
        typer.Option(
            help="Below 1 bolder, above 1 wilder, 0 the likeliest token.", rich_help_panel=SAMPLING
        ),
    ] = None,
    top_k: Annotated[
        int | None,
        typer.Option(help="Choose among the k likeliest; 0 is all.", rich_help_panel=SAMPLING),
    ] = None,
    top_p: Annotated[
        float | None,
        typer.Option(
            help="Choose among the likeliest with this probability together.",
            rich_help_panel=SAMPLING,
        ),
    ] = None,
    seed: Annotated[
        int | None, typer.Option(help="Same seed, same text.", rich_help_panel=SAMPLING)
    ] = None,
    engine: ModelEngine = None,
    runs_dir: RunsDir = None,
) -> None:
    """Let a model write: go on from a prompt."""
    from posttrainllm.api import RUNS_DIR
    from posttrainllm.cli.failures import STOPPED
    from posttrainllm.cli.figures import printable
    from posttrainllm.cli.terminal import is_terminal, say
    from posttrainllm.config import EngineConfig, SamplingConfig
    from posttrainllm.training.session import newest_run, open_model

    folder = runs_dir or Path(RUNS_DIR)
    chosen = EngineConfig.model_validate({"name": engine}) if engine else None
    model = open_model(run or newest_run(folder), runs_dir=folder, engine=chosen)
    given = {
        "temperature": temperature,
        "top_k": top_k,
        "top_p": top_p,
        "max_tokens": max_tokens,
    }
    changes = {key: value for key, value in given.items() if value is not None}
    sampling = SamplingConfig.model_validate({**model.sampling.model_dump(), **changes})
    begun = "\n" if prompt is None else _read_input() if prompt == "-" else prompt
    show = printable if is_terminal(sys.stdout) else str
    for notice in model.checkpoint.notices:
        say(("notice: ", "yellow"), notice, error=True)
    if run is None:
        say((f"{model.checkpoint.path}", "dim"), error=True)
    options = {} if seed is None else {"seed": seed}
    pieces = model.stream(begun, sampling=sampling, stop=stop or (), **options)
    last = ""
    try:
        if prompt is not None:
            say((show(begun), "dim"), end="")
            last = begun
        for piece in pieces:
            sys.stdout.write(show(piece))
            sys.stdout.flush()
            last = piece or last
    except KeyboardInterrupt:
        say()
        raise typer.Exit(STOPPED) from None
    if not last.endswith("\n"):
        say()


def _read_input() -> str:
    """The whole of standard input; bytes that are no UTF-8 go through unchanged."""
    from posttrainllm.errors import ConfigError

    if sys.stdin is None or sys.stdin.isatty():
        raise ConfigError(
            "--prompt - reads standard input, and that is a terminal",
            "pipe a text into it, or give the prompt itself",
        )
    return sys.stdin.buffer.read().decode("utf-8", "surrogateescape")
