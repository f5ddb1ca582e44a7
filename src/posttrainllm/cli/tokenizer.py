"""``posttrainllm tokenizer``: make a vocabulary of a text, for models that read words instead of bytes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from posttrainllm.cli.options import AsJson, CorpusFiles

if TYPE_CHECKING:
    from posttrainllm.cli.terminal import Part

STRIPES = ("reverse", "")


def tokenizer(
    files: CorpusFiles = None,
    n_vocab: Annotated[
        int | None,
        typer.Option(
            help="Tokens of the vocabulary [dim](default: 4,096)[/dim].", show_default=False
        ),
    ] = None,
    to: Annotated[
        Path | None,
        typer.Option(
            metavar="FOLDER",
            help="The new folder [dim](default: tokenizer-4096)[/dim].",
            show_default=False,
        ),
    ] = None,
    val_fraction: Annotated[
        float | None, typer.Option(help="Share of the text kept for validation, and not read.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Make a byte-level BPE tokenizer of a text, for train --tokenizer."""
    import shlex

    from posttrainllm.api import train_tokenizer
    from posttrainllm.cli.report import command
    from posttrainllm.cli.terminal import fields, say
    from posttrainllm.cli.ticker import Ticker
    from posttrainllm.figures import one_line, printable
    from posttrainllm.text.bpe_training import SMALLEST
    from posttrainllm.text.files import STANDARD_INPUT
    from posttrainllm.training.vocabulary import USUAL

    with Ticker() as ticker:
        made = train_tokenizer(
            files,
            to,
            n_vocab=USUAL if n_vocab is None else n_vocab,
            val_fraction=val_fraction,
            progress=ticker,
        )
    if as_json:
        facts = {
            "path": str(made.path),
            "n_vocab": made.n_vocab,
            "bytes_per_token": made.bytes_per_token,
            "example": list(made.example),
            "notices": list(made.notices),
        }
        print(json.dumps(facts))
        return
    for notice in made.notices:
        say(("notice: ", "yellow"), one_line(notice), error=True)
    corpus = made.corpus
    part = "validation" if len(corpus.val_text) else "training"
    fields(
        [
            (
                "text",
                f"{one_line(corpus.name)}: {corpus.n_bytes:,} bytes, of them {len(corpus.train_text):,} read",
            ),
            (
                "vocabulary",
                f"{made.n_vocab:,} tokens: 256 bytes, {made.n_vocab - SMALLEST:,} joined, <|endoftext|>",
            ),
            ("a token", f"{made.bytes_per_token:.2f} bytes, on the {part} part"),
            ("folder", one_line(str(made.path))),
        ]
    )
    say()
    say(*_striped([printable(token) for token in made.example]))
    say()
    place = shlex.quote(str(made.path))
    named = ["FILE"] if STANDARD_INPUT in (files or ()) else [*map(shlex.quote, files or ())]
    sources = "".join(f" {source}" for source in named)
    say(("train with it:", "dim"))
    say("  ", (f"{command()} train{sources} --tokenizer {place}", "bold"))


def _striped(tokens: list[str]) -> list[Part]:
    """Tokens that can be told apart: every second one reversed on a terminal, else a bar between them."""
    import sys

    from posttrainllm.cli.terminal import has_colours

    if not has_colours(sys.stdout):
        return ["|".join(tokens)]
    return [(token, STRIPES[number % 2]) for number, token in enumerate(tokens)]
