"""Durable files: written, flushed to the disk, renamed into place; a failure is one line.

A rename is the only step here that readers can see, and it comes after every byte is on the disk:
a process killed at any moment leaves the old file or the new one, never half of one.
This module knows nothing of checkpoints or runs; read ``runs/checkpoint.py`` and ``runs/folder.py`` next.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import shutil
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from posttrainllm.errors import CheckpointError
from posttrainllm.wording import worded

Chunk = bytes | memoryview


@dataclass(frozen=True)
class FileHash:
    """What identifies the content of a file: SHA-256 in hexadecimal digits, and size in bytes."""

    sha256: str
    bytes: int


def write_file(path: Path, chunks: Iterable[Chunk]) -> FileHash:
    """Write a new file, flush it to the disk and return the hash of what was written.

    Raises: OSError; what was written so far stays, for the caller to remove with its folder.
    """
    digest, size = hashlib.sha256(), 0
    with path.open("xb") as stream:
        for chunk in chunks:
            stream.write(chunk)
            digest.update(chunk)
            size += len(chunk)
        stream.flush()
        os.fsync(stream.fileno())
    return FileHash(digest.hexdigest(), size)


def replace_file(path: Path, content: bytes) -> None:
    """Give a file new content in one step, whether or not it exists; one process at a time.

    Raises: OSError, with the old file intact.
    """
    temporary = path.with_name(f".{path.name}.new")
    try:
        temporary.unlink(missing_ok=True)
        write_file(temporary, [content])
        temporary.replace(path)
    except BaseException:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise
    sync_folder(path.parent)


def sync_file(path: Path) -> FileHash:
    """Flush a file that another library wrote to the disk and return its hash.

    Raises: OSError.
    """
    with path.open("r+b") as stream:
        os.fsync(stream.fileno())
    return hash_file(path)


def hash_file(path: Path) -> FileHash:
    """Read a whole file and return its hash.

    Raises: OSError.
    """
    with path.open("rb") as stream:
        digest = hashlib.file_digest(stream, "sha256").hexdigest()
        return FileHash(digest, stream.tell())


def sync_folder(folder: Path) -> None:
    """Flush the names inside a folder (files created, renamed, removed) to the disk.

    Does nothing where folders cannot be flushed: on Windows and on some network file systems.

    Raises: OSError.
    """
    if os.name == "nt":
        return
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise
    finally:
        os.close(descriptor)


def default_cache_dir() -> Path:
    """Return the folder for this user's cached files, which need not exist."""
    base = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    if base.startswith("~"):  # a user without a home
        base = tempfile.gettempdir()
    return Path(base) / "posttrainllm"


def free_bytes(folder: Path) -> int | None:
    """Return the space that this user may still fill, or None when the system does not say."""
    try:
        return shutil.disk_usage(folder).free
    except OSError:
        return None


def show_bytes(count: int) -> str:
    """Write a size for people, in powers of 1000 as disks are sold: "1.2 GB"."""
    size = float(count)
    for unit in ("bytes", "kB", "MB", "GB"):
        if size < 999.5:
            return (
                f"{size:.0f} {unit}" if unit == "bytes" or size >= 99.95 else f"{size:.1f} {unit}"
            )
        size /= 1000
    return f"{size:,.1f} TB"


def reason(error: BaseException) -> str:
    """Return what the system says about a failure, on one line."""
    text = error.strerror if isinstance(error, OSError) else None
    return " ".join((text or str(error)).split())


def read_error(path: Path, error: BaseException) -> CheckpointError:
    """Build the one line for a file or folder that the system did not let us read."""
    hint = "take it again from where it came"
    if isinstance(error, PermissionError):
        hint = "change its permissions, or copy it to where you may read it"
    return CheckpointError(f"{path} cannot be read: {reason(error)}", hint)


def write_error(
    action: str, path: Path, error: OSError, *, need: int | None = None
) -> CheckpointError:
    """Build the one line for a write that the system refused.

    ``action`` is what was tried ("save the checkpoint of step 500"), ``need`` the bytes it takes.
    """
    wanted = "" if need is None else f", which needs {show_bytes(need)}"
    line = f"cannot {action} in {path}{wanted}: "
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        free = free_bytes(path if path.exists() else path.parent)
        left = "" if free is None else f", {show_bytes(free)} are free"
        full = "the disk is full" if error.errno == errno.ENOSPC else "the disk quota is used up"
        return CheckpointError(
            f"{line}{full}{left}", worded("free some space, or use another {runs_dir}")
        )
    if error.errno == errno.EROFS:
        return CheckpointError(
            f"{line}the file system is read-only", worded("use another {runs_dir}")
        )
    if error.errno in (errno.EACCES, errno.EPERM):
        return CheckpointError(
            f"{line}no permission to write there",
            worded("change its permissions, or use another {runs_dir}"),
        )
    if error.errno == errno.EEXIST:
        return CheckpointError(
            f"{line}something that is no folder has that name", worded("use another {runs_dir}")
        )
    if error.errno in (errno.ENOENT, errno.ENOTDIR):
        return CheckpointError(
            f"{line}the folder is gone", "it was moved or removed: put it back, or use another one"
        )
    return CheckpointError(f"{line}{error.strerror or error}", worded("try another {runs_dir}"))
