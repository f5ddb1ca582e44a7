"""The lock of a run folder: two processes never write one run.

The operating system holds the lock and gives it back when the process ends, however it ends: a
killed run leaves nothing to clean up. What stands in the file, process and host, is for people.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import socket
import sys
import time
from pathlib import Path
from typing import Self

from posttrainllm.errors import CheckpointError
from posttrainllm.formats.untrusted import parse_object
from posttrainllm.settings import show
from posttrainllm.storage import write_error
from posttrainllm.wording import worded

LOCK_FILE = ".lock"
ATTEMPTS = 5  # `runs list` holds a lock for an instant to see whether it is free
PAUSE_S = 0.05

_BUSY = (errno.EAGAIN, errno.EACCES, errno.EDEADLK)


class RunLock:
    """The right to write one run folder, from ``RunLock(folder)`` to ``release`` or the end."""

    def __init__(self, folder: Path) -> None:
        """Take the lock.

        Raises: CheckpointError when another process has it, naming that process, or when the
        folder cannot be written.
        """
        path = folder / LOCK_FILE
        try:
            self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        except OSError as error:
            raise write_error("lock the run", folder, error) from None
        try:
            if not _take(self._descriptor, attempts=ATTEMPTS):
                raise _held(folder)
        except OSError as error:
            os.close(self._descriptor)
            raise CheckpointError(
                f"cannot lock the run in {folder}: {error.strerror or error}",
                worded("this file system has no locks: use a {runs_dir} on a local disk"),
            ) from None
        except CheckpointError:
            os.close(self._descriptor)
            raise
        owner = json.dumps({"pid": os.getpid(), "host": socket.gethostname()}) + "\n"
        with contextlib.suppress(OSError):  # on a full disk the lock holds without the note
            os.ftruncate(self._descriptor, 0)
            os.write(self._descriptor, owner.encode())

    def release(self) -> None:
        """Give the lock back; the file stays, since removing it would let two processes lock."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


def check_free(folder: Path) -> None:
    """Raise CheckpointError when a process is writing this run now, naming it. For messages alone: a moment later it may be otherwise."""
    if is_locked(folder, attempts=ATTEMPTS):
        raise _held(folder)


def is_locked(folder: Path, *, attempts: int = 1) -> bool:
    """Tell whether a process is writing this run now; whoever only asks has the lock for a moment, too, so ask several times to be sure."""
    try:
        descriptor = os.open(folder / LOCK_FILE, os.O_RDWR)
    except OSError:
        return False
    try:
        return not _take(descriptor, attempts=attempts)
    except OSError:
        return False
    finally:
        os.close(descriptor)


def _take(descriptor: int, *, attempts: int) -> bool:
    """Try to lock; a lock that stays busy gives False.

    Raises: OSError on a file system that has no locks.
    """
    for attempt in range(attempts):
        if attempt:
            time.sleep(PAUSE_S)
        try:
            _lock(descriptor)
            return True
        except OSError as error:
            if error.errno not in _BUSY:
                raise
    return False


def _lock(descriptor: int) -> None:
    if sys.platform == "win32":
        import msvcrt

        os.lseek(descriptor, 2**30, os.SEEK_SET)  # beyond the text, which stays readable
        msvcrt.locking(descriptor, msvcrt.LK_NBLCK, 1)
        os.lseek(descriptor, 0, os.SEEK_SET)
    else:
        import fcntl

        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)


def _held(folder: Path) -> CheckpointError:
    return CheckpointError(
        f"run {folder.name} is being trained by {_holder(folder / LOCK_FILE)}",
        worded("wait for it, stop it, or train under another {name}"),
    )


def _holder(path: Path) -> str:
    try:
        owner = parse_object(path.read_bytes()[:4096], str(path))
        host = " ".join(str(owner["host"]).split())
        return f"process {show(owner['pid'])} on host {host[:100]}"
    except (OSError, KeyError, CheckpointError):
        return "another process"
