"""What the tests of the command line share: a small run, a way to call ``main``, and the form of an error."""

from __future__ import annotations

import io
import json
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path

from posttrainllm.cli import main

# A model of about 3,000 parameters on the engine that needs nothing built: a run takes a tenth of a second.
SIZES = [
    "--preset=tiny",
    "--engine=numpy",
    "--n-ctx=16",
    "--batch-size=4",
    "--set=model.n_layer=1",
    "--set=model.n_head=2",
    "--set=model.n_embd=8",
    "--set=training.eval_every=4",
    "--set=training.sample_every=4",
    "--set=training.sample_tokens=12",
    "--set=training.verdict_samples=2",
    "--set=training.final_windows=8",
    "--set=training.eval_windows=4",
    "--set=training.checkpoint_every=3",
]
TEXT = "".join(f"{number} bottles of beer on the wall.\n" for number in range(400))


class Result:
    """What a command gave back."""

    def __init__(self, code: int, out: str, err: str) -> None:
        self.code, self.out, self.err = code, out, err

    @property
    def json(self):
        return json.loads(self.out)

    @property
    def events(self):
        return [json.loads(line) for line in self.out.splitlines()]


def cli(*arguments: object) -> Result:
    """Run a command line in this process."""
    out, err = io.StringIO(), io.StringIO()
    with redirect_stdout(out), redirect_stderr(err):
        code = main([str(argument) for argument in arguments])
    return Result(code, out.getvalue(), err.getvalue())


def write_text(folder: Path) -> Path:
    """Write the text of these tests."""
    path = folder / "beer.txt"
    path.write_text(TEXT)
    return path


def train_one(runs: Path, text: Path) -> Path:
    """Train the run "one", of six steps, and return the folder of runs."""
    arguments = ["--steps=6", "--name=one", "--runs-dir", runs, "--quiet"]
    assert cli("train", text, *SIZES, *arguments).code == 0
    return runs


def check_error(result: Result, *words: str, code: int = 2) -> None:
    """One line that begins with "error: ", perhaps a hint on a second one, and nothing else."""
    assert result.code == code, result.err
    assert result.out == ""
    lines = result.err.splitlines()
    assert 1 <= len(lines) <= 2, result.err
    assert lines[0].startswith("error: ")
    assert len(lines) == 1 or lines[1].startswith("  ")
    for word in words:
        assert word in result.err
