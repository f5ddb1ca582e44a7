"""Removed runs: moved aside in one step, brought back on request, gone for good after a week.

runs/.trash/<name>.<milliseconds since 1970>/
"""

from __future__ import annotations

import re
import shutil
import time
from dataclasses import dataclass
from itertools import count
from pathlib import Path

from posttrainllm.errors import CheckpointError
from posttrainllm.runs.folder import check_name
from posttrainllm.server.answers import RefusalError, refusal_of

FOLDER = ".trash"
KEPT_MS = 7 * 24 * 3600 * 1000

_ENTRY = re.compile(r"(.+)\.(\d{13})", re.DOTALL)


@dataclass(frozen=True)
class Removed:
    """A run in the trash."""

    id: str
    name: str
    removed_ms: int


def removed_runs(runs_dir: Path) -> list[Removed]:
    """List the runs in the trash, the last one first."""
    found = []
    try:
        entries = [entry for entry in (runs_dir / FOLDER).iterdir() if entry.is_dir()]
    except OSError:
        return []
    for entry in entries:
        match = _ENTRY.fullmatch(entry.name)
        if match and not entry.is_symlink():
            found.append(Removed(entry.name, match.group(1), int(match.group(2))))
    return sorted(found, key=lambda run: run.removed_ms, reverse=True)


def remove_run(run: Path) -> Removed:
    """Move a run into the trash. Raises: OSError."""
    trash = run.parent / FOLDER
    trash.mkdir(exist_ok=True)
    for now in count(time.time_ns() // 1_000_000):
        removed = Removed(f"{run.name}.{now}", run.name, now)
        if not (trash / removed.id).exists():
            run.rename(trash / removed.id)
            return removed
    raise AssertionError("there are infinitely many numbers")


def restore_run(runs_dir: Path, name: str, id: str | None = None) -> str:
    """Bring a run back and return the name that it has now: "name-2" when another has its own.

    Raises: RefusalError 404 when it is not in the trash, OSError.
    """
    for removed in removed_runs(runs_dir):
        if removed.name == name and id in (None, removed.id):
            break
    else:
        raise RefusalError(404, f"run {name} is not in the trash")
    for number in count(1):
        free = name if number == 1 else f"{name}-{number}"
        if not (runs_dir / free).exists():
            (runs_dir / FOLDER / removed.id).rename(runs_dir / free)
            return free
    raise AssertionError("there are infinitely many numbers")


def rename_run(run: Path, name: str) -> None:
    """Give a run another name. Raises: RefusalError 400 or 409, OSError."""
    try:
        check_name(name)
    except CheckpointError as error:
        raise refusal_of(error) from None
    target = run.with_name(name)
    if name == run.name:
        return
    if target.exists() and not target.samefile(run):  # case alone may change
        raise RefusalError(409, f"there is a run {name} already", "give another name")
    run.rename(target)


def purge(runs_dir: Path, older_than_ms: int = KEPT_MS) -> None:
    """Remove for good what has been in the trash for longer than a time."""
    now = time.time_ns() // 1_000_000
    for removed in removed_runs(runs_dir):
        if now - removed.removed_ms >= older_than_ms:
            shutil.rmtree(runs_dir / FOLDER / removed.id, ignore_errors=True)
