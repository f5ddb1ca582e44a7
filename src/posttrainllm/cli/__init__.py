"""The command line: parse, call, print.

What this is: the typer application and ``main``. Each command is a module here; it imports what it needs
inside its function, so that ``posttrainllm --help`` is quick.
What this is not: logic. Whatever a command does can be done from Python through ``posttrainllm.api``.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import Annotated

import typer
from typer.main import get_command

from posttrainllm import __version__
from posttrainllm.cli import lab
from posttrainllm.cli.corpus import corpus
from posttrainllm.cli.evaluate import evaluate
from posttrainllm.cli.exchange import export_, import_
from posttrainllm.cli.failures import exit_code
from posttrainllm.cli.generate import generate
from posttrainllm.cli.help import PlainCommand, PlainGroup
from posttrainllm.cli.inspect import inspect
from posttrainllm.cli.models import models
from posttrainllm.cli.play import play
from posttrainllm.cli.presets import presets
from posttrainllm.cli.runs import app as runs
from posttrainllm.cli.tokenizer import tokenizer
from posttrainllm.cli.train import train
from posttrainllm.cli.worker import leave_at_once
from posttrainllm.interrupts import Interrupts

EVERYDAY, DATA = "Everyday", "Data"

app = typer.Typer(
    cls=PlainGroup,
    name="posttrainllm",
    add_completion=False,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"posttrainllm {__version__}")
        raise typer.Exit


@app.callback(invoke_without_command=True)
def start(
    context: typer.Context,
    version: Annotated[
        bool,
        typer.Option("--version", help="Show the version.", callback=_show_version, is_eager=True),
    ] = False,
) -> None:
    """Train a small GPT, fine-tune it, look inside it, and let it write."""
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())


app.command(cls=PlainCommand, rich_help_panel=EVERYDAY)(play)
app.command(cls=PlainCommand, rich_help_panel=EVERYDAY)(train)
app.command(cls=PlainCommand, rich_help_panel=EVERYDAY)(generate)
app.command(cls=PlainCommand, rich_help_panel=EVERYDAY)(inspect)
app.command("eval", cls=PlainCommand, rich_help_panel=EVERYDAY)(evaluate)
app.add_typer(runs, name="runs", rich_help_panel=EVERYDAY)
app.command(cls=PlainCommand, rich_help_panel=EVERYDAY)(models)
app.command(cls=PlainCommand, rich_help_panel=EVERYDAY)(presets)
app.command(cls=PlainCommand, rich_help_panel=DATA)(corpus)
app.command(cls=PlainCommand, rich_help_panel=DATA)(tokenizer)
app.command("import", cls=PlainCommand, rich_help_panel=DATA)(import_)
app.command("export", cls=PlainCommand, rich_help_panel=DATA)(export_)

lab.register(app)


def main(arguments: Sequence[str] | None = None, *, interrupts: Interrupts | None = None) -> int:
    """Run a command line (default: the process's own) and return its exit code; ``interrupts`` are the process's."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:  # closed by whoever started us
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115  stays open
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):  # a terminal of another encoding shows ? for a character
            stream.reconfigure(errors="replace")
    given = sys.argv[1:] if arguments is None else list(arguments)
    code = exit_code(lambda: _run(given), interrupts)
    several = os.environ.get("WORLD_SIZE", "1") != "1"
    interrupted = interrupts is not None and interrupts.count > 0
    if arguments is None and (several or interrupted):
        # torch's end can wait for another process that is gone, and the interpreter's end can die of an interrupt that was caught.
        leave_at_once(code)
    return code


def _run(arguments: list[str]) -> None:
    """Parse and call, without the error handling that typer's own entry point brings."""
    command = get_command(app)
    # The arguments are kept for train --nproc, which starts this command line several times.
    with command.make_context("posttrainllm", list(arguments), obj=arguments) as context:
        command.invoke(context)
