"""Options that several commands have, so that they are named and explained alike."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

RunsDir = Annotated[Path | None, typer.Option("--runs-dir", help="Folder of the runs.")]

AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON document.")]

ModelName = Annotated[
    str | None,
    typer.Argument(
        metavar="MODEL",
        help="A run, a model of the gallery, a checkpoint or Hugging Face GPT-2 folder, a .zip or "
        ".tinygpt file [dim](default: the newest run)[/dim].",
        show_default=False,
    ),
]

ModelEngine = Annotated[
    str | None,
    typer.Option(
        "--engine",
        help="numpy, cpp, wasm, webgpu, torch or auto [dim](default: the one it was trained on)[/dim].",
    ),
]

CorpusFiles = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="CORPUS",
        help="Text files, folders of .txt files, or - for standard input "
        "[dim](default: TinyShakespeare)[/dim].",
        show_default=False,
    ),
]
