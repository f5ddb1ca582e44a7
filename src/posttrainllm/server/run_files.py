"""Files below a folder, by the names that a stranger gives: what may be named, opened safely.

No name leads outside: every part of a path is a plain name, and no symbolic link is followed, not
even one that appears between the check and the opening (each part is opened inside the one before).
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

from posttrainllm.formats.huggingface import CONFIG_FILE, GENERATION_FILE, WEIGHTS_FILE
from posttrainllm.runs.checkpoint_folder import HASHES_FILE, OPTIMIZER_FILE, STATE_FILE
from posttrainllm.runs.folder import CONFIG_FILE as RUN_CONFIG_FILE
from posttrainllm.runs.folder import CORPUS_FILE
from posttrainllm.server.answers import RefusalError
from posttrainllm.text.tokenizer import TOKENIZER_CONFIG_FILE, TOKENIZER_FILE

MB = 1_000_000
LONGEST = 255  # bytes of a name
DEEPEST = 8

LINES = {"metrics.jsonl": 512 * MB, "samples.jsonl": 512 * MB}
"""Files that grow line by line, and the most bytes that each may have."""

RUN_FILES = {RUN_CONFIG_FILE: MB, CORPUS_FILE: 4000 * MB, **LINES}
CHECKPOINT_FILES = {
    CONFIG_FILE: MB,
    GENERATION_FILE: MB,
    TOKENIZER_FILE: 64 * MB,
    TOKENIZER_CONFIG_FILE: MB,
    STATE_FILE: MB,
    HASHES_FILE: MB,
    WEIGHTS_FILE: 64_000 * MB,
    OPTIMIZER_FILE: 128_000 * MB,
}
"""What may be written into a run and into a checkpoint of it, and the most bytes of each."""

_CHECKPOINT = re.compile(r"checkpoints/step-(\d{6,12})")
_CHECKPOINT_FILE = re.compile(r"checkpoints/step-(\d{6,12})/([^/]+)")


def is_plain_name(name: str) -> bool:
    """Whether a name is one file's or folder's, not hidden, and text on every system."""
    if not name or name[0] == "." or not name.isprintable() or "\ufffd" in name:
        return False
    if any(character in name for character in '/\\:*?"<>|'):
        return False
    try:
        return len(name.encode()) <= LONGEST
    except UnicodeEncodeError:
        return False


def checkpoint_step(path: str) -> int | None:
    """Return the step of ``checkpoints/step-000500``, or None for another path."""
    match = _CHECKPOINT.fullmatch(path)
    return int(match.group(1)) if match else None


def place_of(path: str) -> tuple[int | None, str, int]:
    """Return where a written file goes: step of its checkpoint or None, name, most bytes.

    Raises: RefusalError 403 when a run has no such file.
    """
    if path in RUN_FILES:
        return None, path, RUN_FILES[path]
    match = _CHECKPOINT_FILE.fullmatch(path)
    if match and match.group(2) in CHECKPOINT_FILES:
        return int(match.group(1)), match.group(2), CHECKPOINT_FILES[match.group(2)]
    raise RefusalError(403, "a run has no such file", "see docs/playground.md for its files")


def open_below(folder: Path, path: str) -> BinaryIO:
    """Open a regular file below a folder for reading.

    Raises: RefusalError 404 when there is none, or when a link is in the way.
    """
    parts = path.split("/")
    if len(parts) > DEEPEST or not all(map(is_plain_name, parts)):
        raise RefusalError(404, "there is no such file")
    try:
        descriptor = _open_parts(folder, parts)
    except OSError:
        raise RefusalError(404, "there is no such file") from None
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise RefusalError(404, "there is no such file")
    return os.fdopen(descriptor, "rb")


def _open_parts(folder: Path, parts: list[str]) -> int:
    flags = os.O_RDONLY | getattr(os, "O_BINARY", 0) | getattr(os, "O_NONBLOCK", 0)
    if os.open not in os.supports_dir_fd:  # Windows: links need rights there that few have
        path = folder.joinpath(*parts)
        if path.resolve() != folder.resolve().joinpath(*parts):
            raise OSError
        return os.open(path, flags)
    inside = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        for part in parts[:-1]:
            step = os.open(part, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=inside)
            os.close(inside)
            inside = step
        return os.open(parts[-1], flags | os.O_NOFOLLOW, dir_fd=inside)
    finally:
        os.close(inside)


def list_files(folder: Path) -> list[dict[str, Any]]:
    """List the files of a run: path, bytes, and seconds since 1970 of the last change."""
    return sorted(_files(folder, ""), key=lambda file: str(file["path"]))


def _files(folder: Path, prefix: str, depth: int = 1) -> Iterator[dict[str, Any]]:
    try:
        entries = list(os.scandir(folder))
    except OSError:
        return
    for entry in entries:
        if not is_plain_name(entry.name):
            continue
        try:
            if entry.is_dir(follow_symlinks=False) and depth < DEEPEST:
                yield from _files(Path(entry.path), f"{prefix}{entry.name}/", depth + 1)
            elif entry.is_file(follow_symlinks=False):
                status = entry.stat(follow_symlinks=False)
                yield {
                    "path": prefix + entry.name,
                    "bytes": status.st_size,
                    "modified": status.st_mtime,
                }
        except OSError:  # removed meanwhile
            continue
