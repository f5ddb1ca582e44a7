"""``posttrainllm generate``: a model writes, and the text is shown as it is written."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from posttrainllm.cli.options import ModelEngine, ModelName, RunsDir

if TYPE_CHECKING:
    from posttrainllm.training.streams import Piece

SAMPLING = "Sampling"


def generate(
    run: ModelName = None,
    prompt: Annotated[
        list[str] | None,
        typer.Option(
            metavar="TEXT",
            help="Text to go on from; - reads it from standard input. Can be repeated: all are written side by side.",
        ),
    ] = None,
    n: Annotated[
        int,
        typer.Option("--n", "-n", min=1, max=1024, help="How many texts from each prompt."),
    ] = 1,
    max_tokens: Annotated[
        int | None, typer.Option(help="Length of the new text, in tokens.")
    ] = None,
    stop: Annotated[
        list[str] | None,
        typer.Option(metavar="TEXT", help="End before this text; can be repeated."),
    ] = None,
    temperature: Annotated[
        float | None,
        typer.Option(
            help="Below 1 safer, above 1 more daring, 0 the likeliest token.",
            rich_help_panel=SAMPLING,
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
    repetition_penalty: Annotated[
        float | None,
        typer.Option(
            help="Above 1, tokens among the last ones become less likely.",
            rich_help_panel=SAMPLING,
        ),
    ] = None,
    repetition_window: Annotated[
        int | None,
        typer.Option(help="How many last tokens that looks at.", rich_help_panel=SAMPLING),
    ] = None,
    seed: Annotated[
        int | None,
        typer.Option(
            help="Same seed, same text; text k of --n has the seed k - 1 above.",
            rich_help_panel=SAMPLING,
        ),
    ] = None,
    engine: ModelEngine = None,
    weights: Annotated[
        str | None,
        typer.Option(
            help="float32 or int8: what is read for each token [dim](default: int8 for models stored so)[/dim]."
        ),
    ] = None,
    runs_dir: RunsDir = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object a text, on lines of their own.")
    ] = False,
) -> None:
    """Let a model write: go on from a prompt.

    How it samples is what its run's config.toml or its card says, but for what is given here. Ctrl-C ends the text.
    """
    from posttrainllm.api import RUNS_DIR
    from posttrainllm.cli.terminal import say
    from posttrainllm.config import EngineConfig
    from posttrainllm.figures import one_line
    from posttrainllm.interrupts import STOPPED
    from posttrainllm.training.models import newest_run, open_model

    folder = runs_dir or Path(RUNS_DIR)
    chosen = None if engine is None else EngineConfig.model_validate({"name": engine})
    begun = [read_input("--prompt -") if text == "-" else text for text in prompt or ["\n"]]
    prompts = [text for text in begun for _ in range(n)]
    model = open_model(
        newest_run(folder) if run is None else run,
        runs_dir=folder,
        engine=chosen,
        batch=len(prompts),
        weights=weights,
    )
    sampling = model.sampling_with(
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        repetition_penalty=repetition_penalty,
        repetition_window=repetition_window,
        max_tokens=max_tokens,
    )
    for notice in model.checkpoint.notices:
        say(("notice: ", "yellow"), notice, error=True)
    if run is None:
        say((one_line(model.title), "dim"), error=True)
    seeds = [(1 if seed is None else seed) + number % n for number in range(len(prompts))]
    pieces = model.stream_all(prompts, sampling=sampling, seeds=seeds, stop=stop or ())
    try:
        if as_json:
            _print_objects(pieces, prompts, seeds)
        else:
            _print_texts(pieces, prompts if prompt else [""] * n, seeds)
    except KeyboardInterrupt:
        say()
        raise typer.Exit(STOPPED) from None


def _print_texts(pieces: Iterable[Piece], prompts: Sequence[str], seeds: Sequence[int]) -> None:
    """Show the first text as it is written and the others after it; several get a line of their own above each."""
    from posttrainllm.cli.terminal import is_terminal, say
    from posttrainllm.figures import printable

    show = printable if is_terminal(sys.stdout) else str
    waiting = [""] * len(prompts)
    ended = [False] * len(prompts)
    row, last = -1, ""

    def begin(number: int) -> str:
        if len(prompts) > 1:
            say((f"--- text {number + 1} of {len(prompts)}, seed {seeds[number]}", "dim"))
        say((show(prompts[number]), "dim"), end="")
        return prompts[number]

    def write(text: str) -> str:
        sys.stdout.write(show(text))
        sys.stdout.flush()
        return text

    for piece in pieces:
        if row < 0:
            row, last = 0, begin(0)
        waiting[piece.row] += piece.text
        ended[piece.row] = piece.last
        while row < len(prompts):
            last = write(waiting[row]) or last
            waiting[row] = ""
            if not ended[row]:
                break
            if not last.endswith("\n"):
                say()
            row += 1
            if row < len(prompts):
                last = begin(row)


def _print_objects(pieces: Iterable[Piece], prompts: Sequence[str], seeds: Sequence[int]) -> None:
    texts = [""] * len(prompts)
    for piece in pieces:
        texts[piece.row] += piece.text
    for prompt, text, seed in zip(prompts, texts, seeds, strict=True):
        print(json.dumps({"prompt": prompt, "text": text, "seed": seed}))


def read_input(asked_by: str) -> str:
    """The whole of standard input; bytes that are no UTF-8 go through unchanged."""
    from posttrainllm.errors import ConfigError

    if sys.stdin is None or sys.stdin.isatty():
        raise ConfigError(
            f"{asked_by} reads standard input, and that is {'closed' if sys.stdin is None else 'a terminal'}",
            "pipe a text into it, or give the text itself",
        )
    return sys.stdin.buffer.read().decode("utf-8", "surrogateescape")
