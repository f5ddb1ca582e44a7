"""Runs over HTTP, for the pages of this server. docs/playground.md has the table of addresses.

Reading takes no lock and follows no link; writing has the run to itself (holds.py). Bodies and
answers are JSON but for files. Every refusal is ``{"error": ..., "hint": ...}``.
"""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp

from posttrainllm import __version__
from posttrainllm.errors import CheckpointError
from posttrainllm.runs.checkpoint_folder import remove
from posttrainllm.runs.folder import check_name
from posttrainllm.runs.lock import is_locked
from posttrainllm.server.answers import FileAnswer, RefusalError, as_json, refusal_of
from posttrainllm.server.holds import TOKEN_HEADER, Holds
from posttrainllm.server.listing import Listing
from posttrainllm.server.live import EventStream, event, list_events, run_events
from posttrainllm.server.run_files import RUN_FILES, checkpoint_step, list_files, open_below
from posttrainllm.server.site import content_type
from posttrainllm.server.trash import (
    FOLDER,
    purge,
    remove_run,
    removed_runs,
    rename_run,
    restore_run,
)
from posttrainllm.server.uploads import append_lines, patient, take_file
from posttrainllm.storage import free_bytes, write_error

FEATURES = ("runs", "events", "holds", "trash")
MOST_JSON = 100_000  # bytes of a body of JSON


class RunApi:
    """The routes for the runs of one folder."""

    def __init__(self, runs_dir: Path, closing: asyncio.Event) -> None:
        """Serve ``runs_dir``; ``closing`` ends the connections that stay open."""
        self.listing, self.holds, self._closing = Listing(runs_dir), Holds(), closing
        self._runs_dir = runs_dir

    def routes(self) -> list[Route]:
        """Return the routes, each with its method."""
        run = "/api/runs/{name}"
        table: list[tuple[str, str, Callable[[Request], Awaitable[ASGIApp]]]] = [
            ("GET", "/api/health", self.health),
            ("GET", "/api/events", self.all_events),
            ("GET", "/api/runs", self.all_runs),
            ("POST", "/api/runs", self.create),
            ("GET", run, self.describe),
            ("DELETE", run, self.remove),
            ("POST", run + "/rename", self.rename),
            ("POST", run + "/restore", self.restore),
            ("GET", run + "/events", self.events),
            ("GET", run + "/hold", self.hold),
            ("GET", run + "/files/{path:path}", self.read),
            ("PUT", run + "/files/{path:path}", self.write),
            ("PATCH", run + "/files/{path:path}", self.append),
            ("DELETE", run + "/files/{path:path}", self.delete),
            ("DELETE", "/api/removed/{id}", self.forget),
        ]
        return [Route(path, answer, methods=[method]) for method, path, answer in table]

    def _run(self, request: Request) -> Path:
        return self.listing.find(request.path_params["name"])

    async def health(self, request: Request) -> Response:
        """Say what this is."""
        return as_json({"name": "posttrainllm", "version": __version__, "features": FEATURES})

    async def all_runs(self, request: Request) -> Response:
        """List the runs, the removed ones, and the room on the disk."""
        rows = await asyncio.to_thread(self.listing.rows)
        removed = await asyncio.to_thread(removed_runs, self._runs_dir)
        return as_json(
            {
                "runs": rows,
                "removed": [
                    {"id": run.id, "name": run.name, "removed": run.removed_ms} for run in removed
                ],
                "free": free_bytes(self._runs_dir),
            }
        )

    async def all_events(self, request: Request) -> EventStream:
        """Follow the list."""
        return EventStream(list_events(self.listing), self._closing)

    async def create(self, request: Request) -> Response:
        """Make the folder of a new run; its config.toml is written next. 409 when the name is taken."""
        name = await _text_field(request, "name")
        try:
            check_name(name)
        except CheckpointError as error:
            raise refusal_of(error) from None
        path = self._runs_dir / name
        try:
            await asyncio.to_thread(_make_run, path)
        except FileExistsError:
            raise RefusalError(
                409, f"there is a run {name} already", "go on with it, or give another name"
            ) from None
        except OSError as error:
            raise refusal_of(write_error("create a run", self._runs_dir, error), 507) from None
        return as_json({"name": name}, 201)

    async def describe(self, request: Request) -> Response:
        """Describe one run: its row, its files, and whether somebody is writing it."""
        run = self._run(request)
        row = await asyncio.to_thread(self.listing.row, run.name)
        files = await asyncio.to_thread(list_files, run)
        return as_json({**(row or {}), "name": run.name, "files": files, "locked": is_locked(run)})

    async def remove(self, request: Request) -> Response:
        """Move a run into the trash and say how it comes back."""
        run = self._run(request)

        def work() -> Response:
            with self.holds.writing(run, None):
                pass  # nobody has it
            removed = remove_run(run)
            return as_json({"id": removed.id, "name": removed.name})

        return await self._change(work)

    async def rename(self, request: Request) -> Response:
        """Give a run another name."""
        run, name = self._run(request), await _text_field(request, "name")

        def work() -> Response:
            with self.holds.writing(run, None):
                pass
            rename_run(run, name)
            return as_json({"name": name})

        return await self._change(work)

    async def restore(self, request: Request) -> Response:
        """Bring a run back from the trash: the last of its name, or the one of the id."""
        name = request.path_params["name"]
        id = (await _json(request)).get("id")
        return await self._change(
            lambda: as_json({"name": restore_run(self._runs_dir, name, id if id else None)})
        )

    async def forget(self, request: Request) -> Response:
        """Remove a run in the trash for good."""
        id = request.path_params["id"]
        if id not in [run.id for run in removed_runs(self._runs_dir)]:
            raise RefusalError(404, "this is not in the trash")
        await asyncio.to_thread(shutil.rmtree, self._runs_dir / FOLDER / id, True)
        return as_json({})

    async def _change(self, work: Callable[[], Response]) -> Response:
        try:
            return await asyncio.to_thread(work)
        except OSError as error:
            raise refusal_of(write_error("change a run", self._runs_dir, error), 507) from None

    async def events(self, request: Request) -> EventStream:
        """Follow one run, from ``?since=`` or the browser's Last-Event-ID on."""
        since = request.headers.get("last-event-id") or request.query_params.get("since", "")
        return EventStream(run_events(self._run(request), self.listing, since), self._closing)

    async def hold(self, request: Request) -> EventStream:
        """Hold a run as long as the connection stays open; the first event has the token."""
        run = self._run(request)
        token = await asyncio.to_thread(self.holds.take, run)

        async def held() -> Any:
            yield event("held", {"token": token})
            while True:
                await asyncio.sleep(1)
                yield b""

        return EventStream(held(), self._closing, lambda: self.holds.give_back(run, token))

    async def read(self, request: Request) -> FileAnswer:
        """Read a file, or a range of it."""
        path = request.path_params["path"]
        headers = {"Content-Type": content_type(path), "Cache-Control": "no-cache"}
        return FileAnswer(open_below(self._run(request), path), headers)

    async def write(self, request: Request) -> Response:
        """Write a whole file."""
        run, token = self._run(request), request.headers.get(TOKEN_HEADER)
        size, path = _number(request, "content-length"), request.path_params["path"]
        found = await take_file(run, path, request.stream(), size, self.holds, token)
        return as_json(found, 201)

    async def append(self, request: Request) -> Response:
        """Cut a file of lines to X-Offset bytes and write the body behind them."""
        run, token = self._run(request), request.headers.get(TOKEN_HEADER)
        offset = _number(request, "x-offset")
        if offset is None:
            raise RefusalError(400, "X-Offset must say where the body goes")
        path = request.path_params["path"]
        return as_json(await append_lines(run, path, request.stream(), offset, self.holds, token))

    async def delete(self, request: Request) -> Response:
        """Remove one checkpoint, or a file beside the checkpoints."""
        run, token = self._run(request), request.headers.get(TOKEN_HEADER)
        path = request.path_params["path"].rstrip("/")
        step = checkpoint_step(path)
        if step is None and path not in RUN_FILES:
            raise RefusalError(403, "only checkpoints and files of a run are removed")

        def work() -> Response:
            with self.holds.writing(run, token):
                if step is None:
                    (run / path).unlink(missing_ok=True)
                else:
                    aside = run / "checkpoints" / f".tmp-{step:06d}-removed"
                    remove(aside)
                    if (run / path).exists():
                        (run / path).rename(aside)
                    remove(aside)
            return as_json({})

        return await self._change(work)

    def tidy(self) -> None:
        """Remove for good what has been in the trash for long."""
        purge(self._runs_dir)


def _make_run(path: Path) -> None:
    if not path.parent.is_dir():
        path.parent.mkdir(parents=True)
    path.mkdir()
    (path / "checkpoints").mkdir()


async def _json(request: Request) -> dict[str, Any]:
    """Return the JSON object of a body; an empty one is {}. Raises: RefusalError 400 or 413."""
    content = b""
    async for piece in patient(request.stream()):
        content += piece
        if len(content) > MOST_JSON:
            raise RefusalError(413, "this is too long")
    if not content:
        return {}
    try:
        found = json.loads(content)
    except (ValueError, RecursionError):
        raise RefusalError(400, "the body is no JSON") from None
    if not isinstance(found, dict):
        raise RefusalError(400, "the body is no JSON object")
    return found


async def _text_field(request: Request, key: str) -> str:
    value = (await _json(request)).get(key)
    if not isinstance(value, str):
        raise RefusalError(400, f"the body must have {key}, a text")
    return value


def _number(request: Request, header: str) -> int | None:
    value = request.headers.get(header)
    if value is None:
        return None
    if not value.isascii() or not value.isdigit() or len(value) > 18:
        raise RefusalError(400, f"{header} must be a number of bytes")
    return int(value)
