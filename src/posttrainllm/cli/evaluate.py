"""``posttrainllm eval``: how good a model is on text that it has not seen, and what its writing is like."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from posttrainllm.cli.options import AsJson, ModelEngine, ModelName, RunsDir

if TYPE_CHECKING:
    from posttrainllm.training.models import Measured


def evaluate(
    run: ModelName = None,
    corpus: Annotated[
        list[str] | None,
        typer.Option(
            metavar="FILE", help="Another text: its validation part is used. Can be repeated."
        ),
    ] = None,
    windows: Annotated[
        int | None, typer.Option(help="Windows to measure; 0 is all of them.")
    ] = None,
    samples: Annotated[
        int | None, typer.Option(help="Texts to write and judge; 0 is none.")
    ] = None,
    engine: ModelEngine = None,
    runs_dir: RunsDir = None,
    as_json: AsJson = False,
) -> None:
    """Measure a model: its loss, real words and copied text."""
    from posttrainllm.api import RUNS_DIR
    from posttrainllm.cli.terminal import fields, say
    from posttrainllm.cli.ticker import Ticker
    from posttrainllm.config import EngineConfig
    from posttrainllm.figures import one_line
    from posttrainllm.training.models import newest_run, open_model

    folder = runs_dir or Path(RUNS_DIR)
    chosen = None if engine is None else EngineConfig.model_validate({"name": engine})
    name = newest_run(folder) if run is None else run
    model = open_model(name, runs_dir=folder, engine=chosen, batch=None)
    for notice in model.checkpoint.notices:
        say(("notice: ", "yellow"), one_line(notice), error=True)
    with Ticker() as progress:
        found = model.measure(corpus or (), windows=windows, samples=samples, progress=progress)
    if as_json:
        print_figures(model.title, found)
        return
    evaluation = found.evaluation
    rows = [
        ("model", model.title),
        (
            "text",
            f"{found.corpus.name}: {evaluation.windows:,} windows, {evaluation.tokens:,} tokens "
            "of its validation part",
        ),
        ("loss", f"{evaluation.loss:.4f} nats a token, {found.verdict.standing}"),
        ("bits a byte", f"{evaluation.bits_per_byte:.4f}"),
        ("perplexity", f"{evaluation.perplexity:.3f}"),
    ]
    rows += [
        (label, value)
        for label, _, value in (line.partition(": ") for line in found.verdict.lines())
        if label != "validation loss"
    ]
    fields((label, one_line(value)) for label, value in rows)


def print_figures(model: str, found: Measured) -> None:
    """Print what was measured as one JSON object."""
    from posttrainllm.runs.trainer_state import finite

    evaluation = found.evaluation
    figures = {
        "model": model,
        "corpus": found.corpus.name,
        "windows": evaluation.windows,
        "tokens": evaluation.tokens,
        "loss": evaluation.loss,
        "bits_per_byte": evaluation.bits_per_byte,
        "perplexity": evaluation.perplexity,
        **found.verdict.figures(),
    }
    print(json.dumps(finite(figures), allow_nan=False))
