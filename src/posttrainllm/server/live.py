"""What changes while a terminal trains, as server-sent events.

One connection follows one run: every line of metrics.jsonl and samples.jsonl, those that are there and
each that comes, and the run's row of the list. Another follows the list itself.

    state     the run's row, at the start and when it changes
    metrics   [line, line, ...] in order
    samples   [line, ...]
    restart   {"file": "metrics"}: the file was cut back (a run was resumed); all its lines follow again
    gone      the run is no longer there; the connection ends
    runs      the list of runs, at the start and when it changes

Each event with lines has an id, from which a browser that was cut off goes on. Files are looked at,
not watched: that works on every file system, and a look costs two calls.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from posttrainllm.runs.trainer_state import finite
from posttrainllm.server.answers import RefusalError
from posttrainllm.server.listing import Listing
from posttrainllm.server.run_files import open_below

LOOK_S = 0.3
HEARTBEAT_S = 15.0
STUCK_S = 30.0  # a reader that takes nothing for so long is let go
MOST_BYTES = 256 << 10  # of lines in one event

FILES = ("metrics", "samples")


def event(kind: str, value: Any, id: str = "") -> bytes:
    """Return one event as it goes over the wire."""
    text = json.dumps(finite(value), ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    head = f"id: {id}\n" if id else ""
    return f"{head}event: {kind}\ndata: {text}\n\n".encode("utf-8", "replace")


class Tail:
    """Reads the lines of a growing file, and notices when it was cut back."""

    def __init__(self, run: Path, file: str, offset: int = 0) -> None:
        """Begin at ``offset``, which must be the end of a line; else at the start."""
        self._run, self._file = run, file
        self.offset = offset
        self._last = b""  # the last line that was read: it must still be there
        self._unsure = offset > 0

    def look(self) -> tuple[bool, list[Any]]:
        """Return whether the file starts again, and the lines that are new, up to MOST_BYTES."""
        try:
            stream = open_below(self._run, f"{self._file}.jsonl")
        except RefusalError:
            return self._restart() if self.offset else (False, [])
        with stream:
            size = os.fstat(stream.fileno()).st_size
            if size == self.offset and not self._unsure:
                return False, []
            again = size < self.offset or not self._same(stream)
            if again:
                self._restart()
            self._unsure = False
            stream.seek(self.offset)
            content = stream.read(MOST_BYTES)
            end = content.rfind(b"\n") + 1
            if end == 0 and len(content) == MOST_BYTES:  # a line longer than that is none of ours
                end = len(content)
            whole = content[:end]
        self.offset += end
        if end:
            self._last = whole[whole.rfind(b"\n", 0, end - 1) + 1 :]
        return again, [line for line in map(_parse, whole.split(b"\n")) if line is not None]

    def _same(self, stream: Any) -> bool:
        if self._unsure:
            stream.seek(self.offset - 1)
            return bool(stream.read(1) == b"\n")
        stream.seek(self.offset - len(self._last))
        return bool(stream.read(len(self._last)) == self._last)

    def _restart(self) -> tuple[bool, list[Any]]:
        self.offset, self._last, self._unsure = 0, b"", False
        return True, []


def _parse(line: bytes) -> Any:
    """One line as an object, None when it is none (a torn one is left out by every reader)."""
    try:
        found = json.loads(line, parse_constant=lambda _: None)
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None


async def run_events(run: Path, listing: Listing, since: str = "") -> AsyncIterator[bytes]:
    """Follow one run from the id of an event on."""
    tails = {
        file: Tail(run, file, offset) for file, offset in zip(FILES, _offsets(since), strict=True)
    }
    shown: dict[str, Any] | None = None
    yield b"retry: 1000\n\n"
    while True:
        row = await asyncio.to_thread(listing.row, run.name)
        if row is None:
            yield event("gone", {})
            return
        if row != shown:
            shown = row
            yield event("state", row)
        more = False
        for file, tail in tails.items():
            again, lines = await asyncio.to_thread(tail.look)
            if again:
                yield event("restart", {"file": file})
            if lines:
                more = True
                yield event(file, lines, ",".join(str(tails[name].offset) for name in FILES))
        if not more:
            await asyncio.sleep(LOOK_S)
            yield b""


def _offsets(since: str) -> list[int]:
    parts = since.split(",")
    if len(parts) == len(FILES) and all(part.isascii() and part.isdigit() for part in parts):
        return [int(part[:18]) for part in parts]
    return [0] * len(FILES)


async def list_events(listing: Listing) -> AsyncIterator[bytes]:
    """Follow the list of runs."""
    shown: Any = None
    yield b"retry: 1000\n\n"
    while True:
        rows = await asyncio.to_thread(listing.rows)
        if rows != shown:
            shown = rows
            yield event("runs", rows)
        await asyncio.sleep(2 * LOOK_S)
        yield b""


class EventStream:
    """Events as an ASGI answer, until they end, the reader leaves or the server closes."""

    def __init__(
        self,
        events: AsyncIterator[bytes],
        closing: asyncio.Event,
        done: Callable[[], None] = lambda: None,
    ) -> None:
        """``done`` is called at the end, whatever ends it. An empty piece only gives way."""
        self._events, self._closing, self._done = events, closing, done

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the events, and a comment every HEARTBEAT_S."""
        if scope["method"] == "HEAD":
            self._done()
            await Response(media_type="text/event-stream")(scope, receive, send)
            return
        tasks = [
            asyncio.ensure_future(task)
            for task in (self._send(send), _left(receive), self._closing.wait())
        ]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            if self._closing.is_set():
                with contextlib.suppress(TimeoutError, OSError):
                    end = {"type": "http.response.body", "body": b"", "more_body": False}
                    tasks[0].cancel()
                    await asyncio.gather(tasks[0], return_exceptions=True)
                    await asyncio.wait_for(send(end), 0.2)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            self._done()

    async def _send(self, send: Send) -> None:
        headers = [
            (b"content-type", b"text/event-stream; charset=utf-8"),
            (b"cache-control", b"no-store"),
            (b"x-accel-buffering", b"no"),
        ]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        clock = asyncio.get_running_loop().time
        heard = clock()
        async for piece in self._events:
            if not piece and clock() - heard < HEARTBEAT_S:
                continue
            heard = clock()
            body = {"type": "http.response.body", "body": piece or b": here\n\n", "more_body": True}
            await asyncio.wait_for(send(body), STUCK_S)
        await send({"type": "http.response.body", "body": b""})


async def _left(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
