"""A file that arrives from a tab: into a temporary file, flushed, and renamed into place.

A file of a run is there whole or not at all. The files of a checkpoint gather in its temporary folder
(runs/checkpoint_folder.py); the last one is hashes.json: when all that it lists is there and is what
it says, the folder gets its name, in one step. So a tab that is closed half-way leaves no checkpoint.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
from collections.abc import AsyncIterator
from pathlib import Path

from posttrainllm.errors import CheckpointError
from posttrainllm.runs.checkpoint_folder import (
    HASHES_FILE,
    move_into_place,
    temporary_folder,
    verify_hashes,
)
from posttrainllm.server.answers import RefusalError, refusal_of
from posttrainllm.server.holds import Holds
from posttrainllm.server.run_files import LINES, place_of
from posttrainllm.storage import free_bytes, show_bytes, sync_folder, write_error

PATIENCE_S = 30.0  # between two pieces of a body
BUFFER = 1 << 20
MOST_APPENDED = 8_000_000  # bytes in one go
TEMPORARY = ".up-"


async def take_file(
    run: Path,
    path: str,
    body: AsyncIterator[bytes],
    size: int | None,
    holds: Holds,
    token: str | None,
) -> dict[str, int]:
    """Write ``path`` of a run from a request's body of ``size`` bytes (None: not announced).

    Raises: RefusalError 403 for a file that a run does not have, 409 when somebody else is writing
    the run, 413 and 507 for too many bytes, 408 for a body that stops, 422 for hashes that do not hold.
    """
    step, name, most = place_of(path)
    _check_size(run, size or 0, most)
    await asyncio.to_thread(holds.check, run, token)
    temporary = run / f"{TEMPORARY}{secrets.token_hex(8)}"
    try:
        written = await _receive(temporary, body, most)
        await asyncio.to_thread(_place, run, step, name, temporary, holds, token)
    except OSError as error:
        raise _disk(f"write {name}", run, error) from None
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
    return {"bytes": written}


async def _receive(temporary: Path, body: AsyncIterator[bytes], most: int) -> int:
    """Write a body to a file and flush it. Raises: OSError, RefusalError 408 or 413."""
    written, waiting = 0, bytearray()
    with temporary.open("xb") as stream:
        async for piece in patient(body):
            written += len(piece)
            if written > most:
                raise _too_large(most)
            waiting += piece
            if len(waiting) >= BUFFER:
                await asyncio.to_thread(stream.write, waiting)
                waiting = bytearray()
        stream.write(waiting)
        stream.flush()
        await asyncio.to_thread(os.fsync, stream.fileno())
    return written


async def patient(body: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """Yield the pieces of a body. Raises: RefusalError 408 when the next one does not come."""
    pieces = aiter(body)
    while True:
        try:
            yield await asyncio.wait_for(anext(pieces), PATIENCE_S)
        except StopAsyncIteration:
            return
        except TimeoutError:
            raise RefusalError(408, f"nothing came for {PATIENCE_S:.0f} s") from None


def _place(
    run: Path, step: int | None, name: str, temporary: Path, holds: Holds, token: str | None
) -> None:
    """Rename a whole file to where it belongs. Raises: OSError, RefusalError 409 or 422."""
    with holds.writing(run, token):
        if step is None:
            temporary.replace(run / name)
            sync_folder(run)
            return
        folder = temporary_folder(run / "checkpoints", step)
        folder.mkdir(parents=True, exist_ok=True)
        temporary.replace(folder / name)
        if name != HASHES_FILE:
            return
        try:
            verify_hashes(folder)
        except CheckpointError as error:
            (folder / name).unlink(missing_ok=True)
            raise refusal_of(error, 422) from None
        sync_folder(folder)
        move_into_place(folder, step)


async def append_lines(
    run: Path, path: str, body: AsyncIterator[bytes], offset: int, holds: Holds, token: str | None
) -> dict[str, int]:
    """Cut a file of lines to ``offset`` bytes and write a body behind them.

    Raises: RefusalError 403 for another file, 409 when the file is shorter or somebody else is
    writing, 413, 408 and 507.
    """
    if path not in LINES:
        raise RefusalError(403, f"only {' and '.join(LINES)} grow", "write other files as a whole")
    content = bytearray()
    async for piece in patient(body):
        content += piece
        if len(content) > MOST_APPENDED or offset + len(content) > LINES[path]:
            raise _too_large(min(MOST_APPENDED, LINES[path]))
    _check_size(run, len(content), LINES[path])
    try:
        return await asyncio.to_thread(_append, run, path, bytes(content), offset, holds, token)
    except OSError as error:
        raise _disk(f"write {path}", run, error) from None


def _append(
    run: Path, name: str, content: bytes, offset: int, holds: Holds, token: str | None
) -> dict[str, int]:
    with holds.writing(run, token):
        flags = os.O_RDWR | os.O_CREAT | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_BINARY", 0)
        descriptor = os.open(run / name, flags, 0o666)
        try:
            size = os.lseek(descriptor, 0, os.SEEK_END)
            if size < offset:
                line = f"{name} has {size} bytes, and not {offset}"
                raise RefusalError(409, line, "read it again")
            os.ftruncate(descriptor, offset)
            os.lseek(descriptor, offset, os.SEEK_SET)
            try:
                left = memoryview(content)
                while left:
                    left = left[os.write(descriptor, left) :]
                os.fsync(descriptor)
            except OSError:
                os.ftruncate(descriptor, offset)  # no half of a line; what was there stays
                raise
        finally:
            os.close(descriptor)
    return {"bytes": offset + len(content)}


def remove_leftovers(runs_dir: Path) -> None:
    """Remove temporary files that a killed server left in its runs."""
    for left in runs_dir.glob(f"*/{TEMPORARY}*"):
        with contextlib.suppress(OSError):
            left.unlink()


def _check_size(run: Path, size: int, most: int) -> None:
    if size > most:
        raise _too_large(most)
    free = free_bytes(run)
    if free is not None and size > free:
        raise RefusalError(507, f"the disk has {show_bytes(free)} left", "free some space")


def _too_large(most: int) -> RefusalError:
    return RefusalError(413, f"this file may have {show_bytes(most)}")


def _disk(action: str, run: Path, error: OSError) -> RefusalError:
    return refusal_of(write_error(action, run, error), 507)
