"""Answers over HTTP: a refusal in one line, JSON, and a file with validators and ranges."""

from __future__ import annotations

import asyncio
import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, BinaryIO

from starlette.datastructures import Headers
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from posttrainllm.errors import PosttrainError
from posttrainllm.runs.trainer_state import finite
from posttrainllm.wording import in_tab

CHUNK = 256 << 10

_RANGE = re.compile(r"bytes=(\d{0,19})-(\d{0,19})")


class RefusalError(Exception):
    """What was asked cannot be done: an HTTP status, one line, and the next step."""

    def __init__(self, status: int, message: str, hint: str = "") -> None:
        """Keep the parts apart, for JSON."""
        super().__init__(message)
        self.status, self.message, self.hint = status, message, hint

    def response(self) -> Response:
        """Return it as JSON ``{"error": message, "hint": hint}``."""
        return as_json({"error": self.message, "hint": self.hint}, self.status)


def refusal_of(error: PosttrainError, status: int = 400) -> RefusalError:
    """Return one of our errors as a refusal."""
    return RefusalError(status, error.message, in_tab(error.hint))


def as_json(value: Any, status: int = 200) -> Response:
    """Return a JSON answer that no cache keeps; numbers that JSON has not are null."""
    text = json.dumps(finite(value), ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    headers = {"Cache-Control": "no-store"}
    return Response(text.encode(), status, headers, media_type="application/json")


def as_text(line: str, status: int, headers: Mapping[str, str] | None = None) -> Response:
    """Return one line for a person."""
    kept = {"Cache-Control": "no-store", **(headers or {})}
    return Response(f"{line}\n", status, kept, media_type="text/plain")


@dataclass(frozen=True)
class FileAnswer:
    """A file that is already open, as an ASGI answer; it is closed afterwards.

    ``headers`` must not hold Content-Length, ETag, Content-Range or Accept-Ranges; those are set here.
    A range is answered when it is one range of bytes; several at once are answered with the whole
    file, as the standard allows.
    """

    stream: BinaryIO
    headers: Mapping[str, str]
    variant: str = ""
    """Part of the ETag: two encodings of one file differ."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send headers and the wanted bytes."""
        try:
            await self._send(scope, receive, send)
        finally:
            self.stream.close()

    async def _send(self, scope: Scope, receive: Receive, send: Send) -> None:
        status = os.fstat(self.stream.fileno())
        size, tag = status.st_size, f'"{status.st_mtime_ns:x}-{status.st_size:x}{self.variant}"'
        asked = Headers(scope=scope)
        headers = {**self.headers, "ETag": tag, "Accept-Ranges": "bytes"}
        if tag in [part.strip().removeprefix("W/") for part in _tags(asked)]:
            await Response(status_code=304, headers=headers)(scope, receive, send)
            return
        code, start, end = 200, 0, size
        wanted = asked.get("range")
        if wanted and asked.get("if-range", tag) == tag:
            found = _range(wanted, size)
            if found == (0, 0):
                headers["Content-Range"] = f"bytes */{size}"
                await as_text(f"the file has {size} bytes", 416, headers)(scope, receive, send)
                return
            if found:
                code, (start, end) = 206, found
                headers["Content-Range"] = f"bytes {start}-{end - 1}/{size}"
        headers["Content-Length"] = str(end - start)
        raw = [(name.lower().encode(), value.encode("latin-1")) for name, value in headers.items()]
        await send({"type": "http.response.start", "status": code, "headers": raw})
        if scope["method"] == "HEAD":
            await send({"type": "http.response.body"})
            return
        self.stream.seek(start)
        left = end - start
        while left > 0:
            read = self.stream.read
            size = min(CHUNK, left)
            chunk = await asyncio.to_thread(read, size) if end - start > CHUNK else read(size)
            if not chunk:
                break  # cut meanwhile: the connection ends short, which the reader sees
            left -= len(chunk)
            await send({"type": "http.response.body", "body": chunk, "more_body": left > 0})
        if end == start:
            await send({"type": "http.response.body"})


def _tags(asked: Headers) -> list[str]:
    return asked.get("if-none-match", "").split(",")


def _range(text: str, size: int) -> tuple[int, int] | None:
    """Return start and end of a range; None when it is not one to answer, (0, 0) when outside."""
    match = _RANGE.fullmatch(text.strip())
    if match is None or match.group(0) == "bytes=-":
        return None
    first, last = match.groups()
    if not first:
        start, end = max(0, size - int(last)), size
    else:
        start, end = int(first), min(size, int(last) + 1 if last else size)
        if last and int(last) < int(first):
            return None
    return (start, end) if start < end else (0, 0)
