"""The server's routes, put together: the API, and below it the site."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Mount, Route
from starlette.types import ASGIApp

from posttrainllm.server.answers import RefusalError, as_json, as_text
from posttrainllm.server.run_api import RunApi
from posttrainllm.server.security import API, Guard
from posttrainllm.server.site import Site
from posttrainllm.server.uploads import remove_leftovers


def application(
    site: Path, runs_dir: Path, closing: asyncio.Event, *, open_to_lan: bool = False
) -> ASGIApp:
    """Return the whole server as one ASGI application.

    ``site`` is the folder of the built site, ``closing`` is set when connections that stay open
    shall end, and ``open_to_lan`` lets other machines see the site (never the runs).
    """
    api = RunApi(runs_dir, closing)

    @asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        await asyncio.to_thread(remove_leftovers, runs_dir)
        await asyncio.to_thread(api.tidy)
        yield
        api.holds.give_back_all()

    routes = [*api.routes(), Route(API + "{rest:path}", _unknown), Mount("/", Site(site))]
    inner = Starlette(
        routes=routes,
        lifespan=lifespan,
        exception_handlers={
            RefusalError: _refused,
            HTTPException: _http_error,
            ClientDisconnect: _left,
        },
    )
    inner.router.redirect_slashes = False
    return Guard(inner, open_to_lan)


async def _unknown(request: Request) -> Response:
    raise RefusalError(404, "the API has no such address", "see docs/playground.md")


async def _refused(request: Request, error: Exception) -> Response:
    assert isinstance(error, RefusalError)
    return error.response()


async def _http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    if request.url.path.startswith(API):
        answer = as_json({"error": error.detail, "hint": ""}, error.status_code)
    else:
        answer = as_text(error.detail, error.status_code)
    answer.headers.update(error.headers or {})
    return answer


async def _left(request: Request, error: Exception) -> Response:
    return as_text("the sender left", 400)
