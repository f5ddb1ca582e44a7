"""``posttrainllm import`` and ``export``: models of others into runs, and runs into files for others."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from posttrainllm.cli.options import AsJson, RunsDir


def import_(
    source: Annotated[
        Path,
        typer.Argument(
            metavar="SOURCE",
            help="A Hugging Face GPT-2 folder, a run, a .zip of either, or a .tinygpt file.",
            show_default=False,
        ),
    ],
    name: Annotated[
        str | None,
        typer.Option(help="Name of the run [dim](default: that of the source)[/dim]."),
    ] = None,
    tokenizer: Annotated[
        str | None,
        typer.Option(
            metavar="bytes|FOLDER", help="Tokenizer of a model folder that comes without one."
        ),
    ] = None,
    runs_dir: RunsDir = None,
    as_json: AsJson = False,
) -> None:
    """Make a run of somebody else's model, to write with it or to train it on."""
    from posttrainllm.api import RUNS_DIR
    from posttrainllm.cli.report import command, where
    from posttrainllm.cli.terminal import fields, say
    from posttrainllm.figures import one_line
    from posttrainllm.training.importing import import_model

    folder = runs_dir or Path(RUNS_DIR)
    made = import_model(source, runs_dir=folder, name=name, tokenizer=tokenizer)
    model, state = made.checkpoint.config, made.checkpoint.state
    assert state is not None  # a run has one
    step = state.step
    if as_json:
        print(
            json.dumps(
                {
                    "run": str(made.path),
                    "kind": made.kind,
                    "step": step,
                    "parameters": model.parameters(),
                    "moments": made.checkpoint.m is not None,
                    "model": model.model_dump(mode="json"),
                    "notices": list(made.notices),
                }
            )
        )
        return
    for notice in made.notices:
        say(("notice: ", "yellow"), one_line(notice), error=True)
    moments = "with" if made.checkpoint.m is not None else "without"
    rows = [
        (
            "model",
            f"{model.parameters():,} parameters ({model.n_layer} layers, {model.n_head} heads, "
            f"width {model.n_embd}, context {model.n_ctx}, {model.n_vocab:,} tokens)",
        ),
        ("from", f"{made.kind}, step {step:,}, {moments} optimizer state"),
        ("run", one_line(str(made.path))),
    ]
    fields(rows)
    say()
    place = where(made.path)
    for why, line in (
        ("let it write", f"generate {place}"),
        ("train it on, in a new run", f"train FILE --from {place}"),
    ):
        say((f"{why}:", "dim"))
        say("  ", (f"{command()} {line}", "bold"))


def export_(
    run: Annotated[
        str,
        typer.Argument(
            metavar="RUN",
            help="A run, a folder, a file or one of [bold]posttrainllm models[/bold].",
            show_default=False,
        ),
    ],
    place: Annotated[
        Path,
        typer.Argument(
            metavar="PLACE",
            help="The new folder; for tinygpt and zip the new file, or a folder to put it into.",
            show_default=False,
        ),
    ],
    to: Annotated[
        str, typer.Option("--to", metavar="hf|tinygpt|zip", help="What to write.")
    ] = "hf",
    dtype: Annotated[
        str,
        typer.Option(metavar="float32|float16", help="Numbers of a .tinygpt file."),
    ] = "float32",
    approximate: Annotated[
        bool,
        typer.Option(
            "--approximate",
            help="Write a model with the tanh form of GELU as .tinygpt, which has the erf form.",
        ),
    ] = False,
    runs_dir: RunsDir = None,
    as_json: AsJson = False,
) -> None:
    """Write a model as files for others, read them again and compare."""
    from posttrainllm.api import RUNS_DIR
    from posttrainllm.cli.terminal import fields, say
    from posttrainllm.figures import one_line
    from posttrainllm.storage import show_bytes
    from posttrainllm.training.exporting import export_model

    folder = runs_dir or Path(RUNS_DIR)
    made = export_model(
        run,
        to,
        place,
        runs_dir=folder,
        dtype=dtype,
        approximate=approximate,
    )
    found = made.comparison
    if as_json:
        print(
            json.dumps(
                {
                    "path": str(made.path),
                    "bytes": made.bytes,
                    "read_by": found.reader,
                    "largest_difference": found.difference,
                    "notices": list(made.notices),
                }
            )
        )
        return
    for notice in made.notices:
        say(("notice: ", "yellow"), one_line(notice), error=True)
    fields(
        [
            ("wrote", f"{one_line(str(made.path))} ({show_bytes(made.bytes)})"),
            (
                "checked",
                f"read again by {found.reader}: token ids are the same, logits differ by at most "
                f"{found.difference:.1e} (the largest is {found.largest:.3g})"
                if found.difference
                else f"read again by {found.reader}: token ids and logits are the same",
            ),
        ]
    )
