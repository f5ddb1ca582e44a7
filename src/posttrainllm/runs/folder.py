"""Run folders: created once, written by one process, found again by name.

    runs/<name>/
      config.toml          the resolved configuration
      metrics.jsonl        one line a logged step
      samples.jsonl        what the model wrote along the way
      corpus.txt           the text, in a run that came from elsewhere with a text of its own
      checkpoints/         see runs/checkpoint_folder.py
      .lock                held by the process that trains the run

Everything about a run is read from its folder; there is no index that could disagree with it. A
copied, renamed or half-removed run is listed as what it is.
"""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import count
from pathlib import Path
from typing import Literal

from posttrainllm.config import TrainConfig, from_toml, to_toml
from posttrainllm.errors import CheckpointError, ConfigError
from posttrainllm.figures import one_line
from posttrainllm.runs.checkpoint_folder import (
    clean_up,
    discard_after,
    list_checkpoints,
    remove,
    step_of,
)
from posttrainllm.runs.lock import RunLock, is_locked
from posttrainllm.runs.records import Record, Records, column
from posttrainllm.settings import did_you_mean, show
from posttrainllm.storage import read_error, replace_file, sync_folder, write_error
from posttrainllm.wording import Wording, in_terminal, python_text, setting, worded

RUNS_DIR = "runs"
"""Where runs lie unless another folder is given."""

TRAIN_FIRST = Wording(
    "train one first: posttrainllm.train()",
    terminal="train one first: posttrainllm train",
    tab="train one first",
)

CONFIG_FILE = "config.toml"
CORPUS_FILE = "corpus.txt"
MAX_NAME_BYTES = 100
MOST_NAMED = 10  # runs, where a name is not one of them

METRICS = ("step", "loss", "val_loss", "lr", "grad_norm", "tokens_per_second", "elapsed_s")
"""Keys of a line of metrics.jsonl; ``val_loss`` is null at steps without an evaluation."""

RunState = Literal["running", "finished", "stopped", "imported", "damaged"]

# Names that Windows gives to devices, whatever the extension.
_DEVICES = re.compile(r"(con|prn|aux|nul|com\d|lpt\d)(\..*)?", re.IGNORECASE)


@dataclass(frozen=True)
class Run:
    """A run folder, and where its parts are."""

    path: Path

    @property
    def name(self) -> str:
        """Name of the run: that of its folder."""
        return self.path.name

    @property
    def checkpoints(self) -> Path:
        """Folder of the checkpoints."""
        return self.path / "checkpoints"

    @property
    def metrics(self) -> Records:
        """The file of metrics, not yet opened; keep the object while appending."""
        return Records(self.path / "metrics.jsonl")

    @property
    def samples(self) -> Records:
        """The file of samples, not yet opened; keep the object while appending."""
        return Records(self.path / "samples.jsonl")

    @property
    def corpus(self) -> Path | None:
        """The run's own copy of its text, which goes before the files named in its configuration; None without one."""
        path = self.path / CORPUS_FILE
        return path if path.is_file() else None

    def config(self) -> TrainConfig:
        """Read the configuration that the run was started with.

        Raises: CheckpointError when there is none, ConfigError when it cannot be used.
        """
        path = self.path / CONFIG_FILE
        if path.exists() and not path.is_file():  # opening a pipe would wait for ever
            raise CheckpointError(f"{path} is not a regular file", "copy the run again")
        try:
            return from_toml(path.read_text(encoding="utf-8"), str(path))
        except OSError as error:
            raise read_error(path, error) from None
        except UnicodeDecodeError as error:
            raise CheckpointError(f"{path} is not UTF-8 at byte {error.start}") from None

    def write_config(self, config: TrainConfig) -> None:
        """Write the configuration, or replace it on a resume that was allowed to change settings.

        Raises: CheckpointError.
        """
        try:
            replace_file(self.path / CONFIG_FILE, to_toml(config).encode())
        except OSError as error:
            raise write_error(f"write {CONFIG_FILE}", self.path, error) from None

    def lock(self) -> RunLock:
        """Take the right to write this run; whoever trains holds it from start to end.

        Raises: CheckpointError when another process has it.
        """
        return RunLock(self.path)

    def remove_if_empty(self) -> None:
        """Remove a run in which nothing was trained: no line, no checkpoint, and nobody at work in it."""
        empty = not list_checkpoints(self.checkpoints) and not self.metrics.exists
        if empty and not is_locked(self.path):
            remove(self.path)

    def start_from(self, step: int) -> None:
        """Make the folder that of a run at ``step``: nothing beyond it, nothing half-written.

        Called with the lock held, at 0 for a new run and at the checkpoint's step on resume. The
        checkpoints go first: after a kill in between, what is left is still a run that can resume.

        Raises: CheckpointError.
        """
        clean_up(self.checkpoints)
        discard_after(self.checkpoints, step)
        self.metrics.cut_back(step)
        self.samples.cut_back(step)


def create_run(runs_dir: Path, config: TrainConfig, name: str | None = None) -> Run:
    """Create a run folder with its configuration; without a name it is "small-001" or the next.

    Making the folder is what claims the name: of two processes that want one, one gets it.

    Raises: CheckpointError when the name exists or cannot be one, or the folder cannot be written.
    """
    if name is not None:
        check_name(name)
    try:
        runs_dir.mkdir(parents=True, exist_ok=True)
        run = Run(_claim(runs_dir, config.preset, name))
        try:
            run.checkpoints.mkdir()
            sync_folder(runs_dir)
            run.write_config(config)
        except BaseException:
            remove(run.path)  # nothing is in it
            raise
    except OSError as error:
        raise write_error("create a run", runs_dir, error) from None
    return run


def _claim(runs_dir: Path, preset: str, name: str | None) -> Path:
    if name is not None:
        path = runs_dir / name
        try:
            path.mkdir()
        except FileExistsError:
            raise CheckpointError(
                f"{runs_dir} already has a run {show(name)}",
                worded("go on with it: {resume}, or give another {name}", resume=resuming(path)),
            ) from None
        return path
    numbers = [re.fullmatch(rf"{re.escape(preset)}-(\d+)", taken) for taken in _names(runs_dir)]
    highest = max((int(number.group(1)) for number in numbers if number), default=0)
    for number in count(highest + 1):  # another process may take one meanwhile
        path = runs_dir / f"{preset}-{number:03d}"
        try:
            path.mkdir()
        except FileExistsError:
            continue
        return path
    raise AssertionError("there are infinitely many numbers")


def resuming(run: Path, steps: int | None = None) -> Wording:
    """Going on with a run, as a command or a call to copy; ``steps`` is its new length."""
    more = [] if steps is None else [setting("training.steps", steps)]
    if os.path.abspath(run.parent) != os.path.abspath(RUNS_DIR):
        more.append(setting("runs_dir", run.parent))
    return Wording(
        f"posttrainllm.resume({', '.join([python_text(run.name), *more])})",
        terminal=" ".join(
            ["posttrainllm train --resume", shlex.quote(run.name), *map(in_terminal, more)]
        ),
        tab="on the Runs page",
    )


def check_name(name: str) -> None:
    """Refuse a name that is no plain folder name on every system.

    Raises: CheckpointError.
    """
    problem, size = "", len(name.encode("utf-8", "replace"))
    if not 1 <= size <= MAX_NAME_BYTES:
        problem = f"must have 1 to {MAX_NAME_BYTES} bytes, and has {size}"
    elif not name.isprintable() or any(character in '/\\:*?"<>|' for character in name):
        problem = 'must not hold path separators, control characters or any of : * ? " < > |'
    elif name[0] in ".-~ " or name[-1] in ". ":
        problem = "must not begin with a dot, dash, tilde or space, nor end with a dot or space"
    elif _DEVICES.fullmatch(name):
        problem = "is the name of a device on Windows"
    if problem:
        raise CheckpointError(
            f"the run name {show(name)} {problem}", "use letters, digits and dashes"
        )


def resolve_run(
    name_or_path: str | os.PathLike[str], runs_dir: Path, bundled: Sequence[str] = ()
) -> Path:
    """Return the folder that a name (of a run in ``runs_dir``) or a path stands for.

    A path may also lead to a checkpoint or to a model folder of transformers; ``read_checkpoint``
    takes them all. A name wins over a folder of the same name in the current directory;
    what begins with a dot (".", "../model") is a path, since no run's name does.
    ``bundled`` are names of models that are no folders and are known to the caller.

    Raises: CheckpointError, with the nearest known name.
    """
    text = os.fspath(name_or_path)
    if text:
        for path in [runs_dir / text] * (not text.startswith(".")) + [Path(text)]:
            if os.path.isdir(path):  # unlike Path.is_dir, False for a name that is too long
                return path
    names = _names(runs_dir)
    known = ", ".join(map(one_line, sorted(names)[-MOST_NAMED:]))
    if len(names) > MOST_NAMED:
        known += f" and {len(names) - MOST_NAMED} more"
    hint = f"runs: {known}" if known else TRAIN_FIRST
    if bundled:
        along = ", ".join(bundled)
        hint = worded("{first}; models that come along: {along}", first=hint, along=along)
    near = did_you_mean(text, [*names, *bundled])
    raise CheckpointError(f"there is no run {show(text)} in {runs_dir}{near}", hint)


@dataclass(frozen=True)
class RunRow:
    """One line of ``runs list``; what cannot be read from the folder is None.

    ``step`` is the last logged step or the newest checkpoint's, ``steps`` how many were planned.
    """

    name: str
    preset: str | None
    state: RunState
    step: int
    steps: int | None
    loss: float | None
    best_val_loss: float | None
    bytes: int
    modified: datetime | None


def list_runs(runs_dir: Path) -> list[RunRow]:
    """Describe every run of a folder, the last changed one last."""
    never = datetime.fromtimestamp(0, UTC)
    rows = [describe_run(Run(runs_dir / name)) for name in _names(runs_dir)]
    return sorted(rows, key=lambda row: (row.modified or never, row.name))


def describe_run(run: Run) -> RunRow:
    """Describe one run; a damaged one is described as far as it can be read."""
    state: RunState | None = None
    config: TrainConfig | None = None
    lines: list[Record] = []
    try:
        config = run.config()
        lines = run.metrics.read()
    except (CheckpointError, ConfigError):
        state = "damaged"
    saved = [step_of(folder) for folder in list_checkpoints(run.checkpoints)]
    newest = max(saved, default=0)
    if is_locked(run.path):
        state = "running"
    elif state is None and saved == [0]:  # nothing is trained here yet
        state = "imported"
    elif state is None and config is not None:
        state = "finished" if newest >= config.training.steps else "stopped"
    losses = column(lines, "loss")
    size, modified = _size_and_time(run.path)
    return RunRow(
        name=run.name,
        preset=config.preset if config else None,
        state=state or "damaged",
        step=int(max([newest, *column(lines, "step")])),
        steps=config.training.steps if config else None,
        loss=losses[-1] if losses else None,
        best_val_loss=min(column(lines, "val_loss"), default=None),
        bytes=size,
        modified=modified,
    )


def _names(runs_dir: Path) -> list[str]:
    """List the folders that can be runs."""
    try:
        return sorted(
            entry.name
            for entry in os.scandir(runs_dir)
            if not entry.name.startswith(".") and entry.is_dir()
        )
    except OSError:
        return []


def _size_and_time(folder: Path) -> tuple[int, datetime | None]:
    """Sum the sizes of all files below a folder and find the last change of any."""
    total, latest = 0, None
    for status in _statuses(folder):
        total += status.st_size
        latest = max(latest or 0.0, status.st_mtime)
    return total, None if latest is None else datetime.fromtimestamp(latest, UTC)


def _statuses(folder: Path) -> Iterator[os.stat_result]:
    for parent, _, names in os.walk(folder):
        for name in names:
            try:
                yield os.lstat(os.path.join(parent, name))
            except OSError:  # a checkpoint that was removed meanwhile
                continue
