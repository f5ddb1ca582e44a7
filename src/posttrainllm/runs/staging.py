"""A run folder that is put together elsewhere and appears whole, or not at all.

    runs/.new-<pid>-<number>/      being filled; never listed, never read
    runs/<name>/                   after the rename

For runs that are not trained here from their first step: imported ones. A process that is killed
half-way leaves a hidden folder, which the next import removes; its lock says whether anybody is still
at work in it.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from contextlib import suppress
from itertools import count
from pathlib import Path
from typing import TypeVar

from posttrainllm.errors import CheckpointError
from posttrainllm.runs.checkpoint_folder import remove
from posttrainllm.runs.folder import check_name
from posttrainllm.runs.lock import LOCK_FILE, RunLock, is_locked
from posttrainllm.settings import show
from posttrainllm.storage import sync_folder, write_error
from posttrainllm.wording import worded

HIDDEN = ".new-"
MAX_FIT_BYTES = 80  # of a name that is made; a number may follow

Filled = TypeVar("Filled")


def stage_run(
    runs_dir: Path, name: str | None, base: str, fill: Callable[[Path], Filled]
) -> tuple[Path, Filled]:
    """Let ``fill`` write into a new folder, then give it the name; return the run's folder and what ``fill`` did.

    Without a name it is ``base``, made fit for a folder, with a number behind it when it is taken.

    Raises: CheckpointError when the name is taken or cannot be one, or the folder cannot be written,
    and whatever ``fill`` raises; nothing is left then.
    """
    if name is not None:
        check_name(name)
        _check_free(runs_dir, name)
    try:
        runs_dir.mkdir(parents=True, exist_ok=True)
        _remove_left_over(runs_dir)
        folder = _hidden(runs_dir)
    except OSError as error:
        raise write_error("create a run", runs_dir, error) from None
    try:
        with RunLock(folder):
            filled = fill(folder)
        try:
            (folder / LOCK_FILE).unlink()
            sync_folder(folder)
            final = _take_name(runs_dir, name, base, folder)
            sync_folder(runs_dir)
        except OSError as error:
            raise write_error("create a run", runs_dir, error) from None
    finally:
        remove(folder)  # after success there is none
    return final, filled


def fit_name(base: str) -> str:
    """Make the name of a file into one that a run can have: "a:b*c" gives "a-b-c", and "..." gives "imported"."""
    name = re.sub(r'[/\\:*?"<>|\x00-\x1f\x7f]+', "-", base).lstrip("-~. ")
    name = name.encode("utf-8", "ignore")[:MAX_FIT_BYTES].decode("utf-8", "ignore").rstrip(". ")
    try:
        check_name(name)
    except CheckpointError:
        return "imported"
    return name


def _check_free(runs_dir: Path, name: str) -> None:
    if os.path.lexists(runs_dir / name):
        raise CheckpointError(
            f"{runs_dir} already has a run {show(name)}",
            worded("give it another name: {name=NAME}"),
        )


def _take_name(runs_dir: Path, name: str | None, base: str, folder: Path) -> Path:
    """Rename the folder onto an empty one: making that is what claims the name among processes."""
    fit = fit_name(base)
    for number in count(1):
        final = runs_dir / (name or (fit if number == 1 else f"{fit}-{number}"))
        try:
            final.mkdir()
        except FileExistsError:
            if name is not None:
                _check_free(runs_dir, name)
            continue
        try:
            if os.name == "nt":  # where a folder is not renamed onto another, even an empty one
                final.rmdir()
            folder.rename(final)
        except BaseException:
            with suppress(OSError):
                final.rmdir()  # as long as it is empty
            raise
        return final
    raise AssertionError("there are infinitely many numbers")


def _hidden(runs_dir: Path) -> Path:
    for number in count():
        folder = runs_dir / f"{HIDDEN}{os.getpid()}-{number}"
        try:
            folder.mkdir()
        except FileExistsError:
            continue
        return folder
    raise AssertionError("there are infinitely many numbers")


def _remove_left_over(runs_dir: Path) -> None:
    for folder in runs_dir.glob(f"{HIDDEN}*"):
        if not is_locked(folder):
            remove(folder)
