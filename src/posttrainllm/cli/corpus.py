"""``posttrainllm corpus``: look at a text before training on it."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from posttrainllm.cli.options import AsJson, CorpusFiles


def corpus(
    files: CorpusFiles = None,
    preset: Annotated[str | None, typer.Option(help="Judge the text for this preset.")] = None,
    n_ctx: Annotated[
        int | None, typer.Option(help="Context to train with, where it is not the preset's.")
    ] = None,
    val_fraction: Annotated[
        float | None, typer.Option(help="Share of the text kept for validation.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Check a text: size, split, what counting reaches on it, and whether a preset fits it."""
    import numpy as np

    from posttrainllm.cli.terminal import WARNINGS, fields
    from posttrainllm.config import load_config
    from posttrainllm.figures import one_line
    from posttrainllm.text.corpus import open_corpus
    from posttrainllm.text.counting import lines as counting_lines
    from posttrainllm.training.writing import memorisation_warning, show_ratio

    config = load_config(preset, flags={"data.val_fraction": val_fraction, "model.n_ctx": n_ctx})
    found = open_corpus(files or (), val_fraction=config.data.val_fraction)
    found.check(config.model.n_ctx)
    counting = counting_lines(found.train, found.val, config.model.n_vocab)
    different = int(np.count_nonzero(np.bincount(found.train_text, minlength=256)))
    tokens = config.tokens_per_step
    epochs = tokens * config.training.steps / len(found.train)
    parameters = config.model.parameters()
    warning = memorisation_warning(parameters, len(found.train_text), epochs)
    warnings = [*found.notices, *([warning] if warning else [])]
    if as_json:
        facts = {
            "name": found.name,
            "sha256": found.sha256,
            "bytes": found.n_bytes,
            "train_bytes": len(found.train_text),
            "val_bytes": len(found.val_text),
            "different_bytes": different,
            "counting": {line.name: line.loss for line in counting},
            "preset": config.preset,
            "epochs": epochs,
            "warnings": warnings,
        }
        print(json.dumps(facts))
        return
    fields(
        [
            ("corpus", one_line(found.name)),
            ("bytes", f"{found.n_bytes:,}, {different} different"),
            (
                "split",
                f"{len(found.train_text):,} to train on, {len(found.val_text):,} for validation",
            ),
            ("sha256", found.sha256),
            ("counting", ", ".join(map(str, counting))),
            (
                "preset",
                f"{config.preset} reads it {show_ratio(epochs)} times in "
                f"{config.training.steps:,} steps",
            ),
            *(("warning", one_line(text)) for text in warnings),
        ],
        WARNINGS,
    )
