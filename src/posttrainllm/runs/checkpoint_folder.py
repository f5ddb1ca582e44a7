"""A folder of checkpoints: their names and order, their hashes, and the room they take.

    checkpoints/step-000500/              a checkpoint
    checkpoints/.tmp-000500-<pid>/        one being written or removed; never read
    checkpoints/.old-000500-<pid>/        one whose replacement is being moved into place; counts as
                                          step 500 as long as step-000500 is not there

Which checkpoint is the newest is said by the step in its name, never by a time: clocks are set
back. Whether one can be used is said by its ``hashes.json``, the file that is written last.
What stands in the other files is ``runs/checkpoint.py``'s business; read that next.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
from pathlib import Path

from posttrainllm.config import GPTConfig
from posttrainllm.errors import CheckpointError
from posttrainllm.formats.huggingface import CONFIG_FILE, WEIGHTS_FILE, parameter_shapes
from posttrainllm.formats.untrusted import DAMAGED, check_version, plain_file, read_object
from posttrainllm.settings import show
from posttrainllm.storage import (
    FileHash,
    free_bytes,
    hash_file,
    read_error,
    reason,
    show_bytes,
    sync_folder,
)
from posttrainllm.wording import worded

OPTIMIZER_FILE = "optimizer.safetensors"
STATE_FILE = "trainer_state.json"
HASHES_FILE = "hashes.json"
HASHES_FORMAT = 1

_STEP = re.compile(r"step-(\d{6,12})")
_OLD = re.compile(r"\.old-(\d{6,12})-\d+")


class DamagedError(CheckpointError):
    """A checkpoint whose hashes do not hold; an older one may."""


# --- names -----------------------------------------------------------------------------------


def list_checkpoints(checkpoints: Path) -> list[Path]:
    """List the checkpoint folders, oldest step first; nothing in them has been checked yet."""
    found: dict[int, Path] = {}
    try:
        folders = sorted(checkpoints.iterdir())  # ".old-" sorts first, so that "step-" wins
    except OSError:
        return []
    for folder in folders:
        match = _OLD.fullmatch(folder.name) or _STEP.fullmatch(folder.name)
        if match and folder.is_dir():
            found[int(match.group(1))] = folder
    return [found[step] for step in sorted(found)]


def step_of(folder: Path) -> int:
    """Return the step in the name of a folder that ``list_checkpoints`` found."""
    match = _OLD.fullmatch(folder.name) or _STEP.fullmatch(folder.name)
    assert match is not None, folder
    return int(match.group(1))


def temporary_folder(checkpoints: Path, step: int) -> Path:
    """Return where a checkpoint is put together."""
    return checkpoints / f".tmp-{step:06d}-{os.getpid()}"


def move_into_place(temporary: Path, step: int) -> Path:
    """Give a finished folder its name; one that has the name is moved aside and then removed.

    Raises: OSError, with the folder that had the name still there.
    """
    final = temporary.with_name(f"step-{step:06d}")
    old = temporary.with_name(f".old-{step:06d}-{os.getpid()}")
    if final.exists():
        remove(old)
        final.rename(old)
    try:
        temporary.rename(final)
    except OSError:
        with contextlib.suppress(OSError):
            old.rename(final)
        raise
    sync_folder(final.parent)
    remove(old)
    return final


# --- removing --------------------------------------------------------------------------------


def remove(folder: Path) -> None:
    """Remove a folder if it is there; what cannot be removed is left to ``clean_up``."""
    shutil.rmtree(folder, ignore_errors=True)


def remove_oldest(checkpoints: Path, *, keep: int, keep_best: bool) -> None:
    """Leave the ``keep`` newest checkpoints and, if asked, the one of the lowest validation loss."""
    found = list_checkpoints(checkpoints)
    kept = set(found[-keep:])
    if keep_best:
        losses = {folder: loss for folder in found if (loss := _val_loss(folder)) is not None}
        kept |= {min(losses, key=losses.__getitem__)} if losses else set()
    for folder in found:
        if folder not in kept:
            _discard(folder)


def discard_after(checkpoints: Path, step: int) -> None:
    """Remove the checkpoints beyond ``step``, which training now goes on from."""
    for folder in list_checkpoints(checkpoints):
        if step_of(folder) > step:
            _discard(folder)


def clean_up(checkpoints: Path) -> None:
    """Remove what a killed process left behind, and undo a replacement that it had begun.

    Called at the start of training, while the run's lock is held: so no folder found here belongs
    to a process that is still writing.
    """
    for folder in list_checkpoints(checkpoints):
        if _OLD.fullmatch(folder.name):  # its replacement was never moved into place
            with contextlib.suppress(OSError):
                folder.rename(checkpoints / f"step-{step_of(folder):06d}")
    for pattern in (".tmp-*", ".old-*"):
        for folder in checkpoints.glob(pattern):
            remove(folder)


def _discard(folder: Path) -> None:
    """Remove a checkpoint; a kill in between leaves no half of one under a checkpoint's name."""
    aside = folder.with_name(f".tmp-{step_of(folder):06d}-{os.getpid()}")
    remove(aside)
    with contextlib.suppress(OSError):
        folder.rename(aside)
    remove(aside)


def _val_loss(folder: Path) -> float | None:
    try:
        loss = read_object(plain_file(folder, STATE_FILE)).get("val_loss")
    except CheckpointError:
        return None
    return loss if isinstance(loss, float) else None


# --- hashes ----------------------------------------------------------------------------------


def newest_checkpoint(checkpoints: Path) -> tuple[Path, tuple[str, ...]]:
    """Return the newest checkpoint whose hashes hold, and a line for each damaged one after it.

    Raises: CheckpointError when there is none, or when the newest is of a newer version.
    """
    damaged: list[DamagedError] = []
    for folder in reversed(list_checkpoints(checkpoints)):
        try:
            verify_hashes(folder)
        except DamagedError as error:
            damaged.append(error)
            continue
        return folder, tuple(f"{error.message}; using {folder.name}" for error in damaged)
    if damaged:
        raise CheckpointError(
            f"{checkpoints} has no checkpoint that is whole: {damaged[0].message}",
            "train again, or copy the run again from where it came",
        )
    try:
        os.scandir(checkpoints).close()
    except FileNotFoundError:
        pass
    except OSError as error:
        raise read_error(checkpoints, error) from None
    raise CheckpointError(
        f"{checkpoints} has no checkpoint yet", "let the run train to its first checkpoint"
    )


def verify_hashes(folder: Path, *, contents: bool = True) -> None:
    """Hold a checkpoint against its ``hashes.json``; without ``contents`` only the sizes.

    Raises: DamagedError, or another CheckpointError when a newer version wrote it.
    """
    source = folder / HASHES_FILE
    try:
        document = read_object(plain_file(folder, HASHES_FILE))
    except CheckpointError as error:
        raise DamagedError(f"{folder} is not complete: {error.message}", DAMAGED) from None
    check_version(document, HASHES_FORMAT, str(source))
    files = document.get("files")
    if not isinstance(files, dict):
        raise DamagedError(f"{source}: files must be an object, got {show(files)}", DAMAGED)
    for name in (CONFIG_FILE, WEIGHTS_FILE, STATE_FILE):  # moments are zero before the first step
        if name not in files:
            raise DamagedError(f"{source} does not list {name}", DAMAGED)
    for name, value in files.items():
        if not isinstance(value, dict) or set(value) != {"sha256", "bytes"}:
            raise DamagedError(
                f"{source}: {show(name)} must have sha256 and bytes, got {show(value)}", DAMAGED
            )
        try:
            _verify_file(plain_file(folder, name), FileHash(**value), contents=contents)
        except DamagedError:
            raise
        except CheckpointError as error:
            raise DamagedError(error.message, error.hint) from None


def _verify_file(path: Path, wanted: FileHash, *, contents: bool) -> None:
    try:
        size = path.stat().st_size
        found = hash_file(path) if contents and size == wanted.bytes else wanted
    except OSError as error:
        raise DamagedError(f"{path} cannot be read: {reason(error)}", DAMAGED) from None
    if size != wanted.bytes:
        raise DamagedError(
            f"{path} has {size} bytes and was written with {show(wanted.bytes)}", DAMAGED
        )
    if found != wanted:
        raise DamagedError(f"{path} has changed since it was written: its hash differs", DAMAGED)


# --- room on the disk ------------------------------------------------------------------------


def checkpoint_bytes(config: GPTConfig) -> int:
    """Return an upper bound of what one checkpoint of a model takes on the disk."""
    values = 3 * 4 * config.parameters()  # weights and two moments, float32
    headers = 3 * 160 * len(parameter_shapes(config))
    tokenizer = 128 * config.n_vocab
    return values + headers + tokenizer + 32 * 2**10  # and a few pages of JSON


def check_space(
    checkpoints: Path, config: GPTConfig, *, saves: int, keep: int, keep_best: bool = False
) -> None:
    """Check that the disk has room for the checkpoints that will exist at the same time.

    The trainer asks before step 0 with all planned saves, ``write_checkpoint`` with one. An old
    checkpoint is removed only after the new one is safe, so that one more than is kept must fit.

    Raises: CheckpointError, naming need, room and folder.
    """
    existing = len(list_checkpoints(checkpoints))
    most = min(existing + saves, keep + int(keep_best) + 1)
    count = max(most - existing, min(saves, 1))
    need = count * checkpoint_bytes(config)
    free = free_bytes(
        next(folder for folder in (checkpoints, *checkpoints.parents) if folder.exists())
    )
    if free is not None and need > free:
        plural = "checkpoint" if count == 1 else "checkpoints"
        raise CheckpointError(
            f"{checkpoints} needs {show_bytes(need)} for {count} planned {plural}, the disk has "
            f"{show_bytes(free)}",
            worded("free some space, or use another {runs_dir}")
            if keep == 1
            else worded(
                "free some space, use another {runs_dir}, or keep fewer with {training.keep_checkpoints=1}"
            ),
        )
