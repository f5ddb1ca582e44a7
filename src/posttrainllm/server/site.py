"""The files of the built site.

A name with a hash in it (``_astro/``) never changes its content and is kept for a year; everything
else is asked for again each time and answered with 304 when it is as before. What tools/site.py
compressed beforehand (``name.gz``) is sent so; nothing is compressed while somebody waits.
"""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import BinaryIO

from starlette.datastructures import Headers
from starlette.responses import RedirectResponse, Response
from starlette.types import Receive, Scope, Send

from posttrainllm.gallery.catalogue import FOLDER as GALLERY
from posttrainllm.server.answers import FileAnswer, RefusalError, as_text
from posttrainllm.server.run_files import is_plain_name, open_below
from posttrainllm.server.security import NOTHING, READING, page_policy

SITE = Path(__file__).parent.parent / "site"
"""Where tools/site.py puts the built site, and where a wheel has it."""

MODELS = "data/models/"
"""Models of the gallery, which are the package's own files: once for the terminal and the browser."""

MISSING = "404.html"
"""The page for an address that is not there; a static host finds it by this name."""

HASHED = "_astro/"
KEEP = "public, max-age=31536000, immutable"
ASK = "no-cache"

# Our own, since the system's table may say anything.
TYPES = {
    ".css": "text/css; charset=utf-8",
    ".html": "text/html; charset=utf-8",
    ".ico": "image/x-icon",
    ".js": "text/javascript; charset=utf-8",
    ".json": "application/json",
    ".map": "application/json",
    ".mjs": "text/javascript; charset=utf-8",
    ".png": "image/png",
    ".svg": "image/svg+xml",
    ".txt": "text/plain; charset=utf-8",
    ".wasm": "application/wasm",
    ".webmanifest": "application/manifest+json",
    ".webp": "image/webp",
    ".wgsl": "text/plain; charset=utf-8",
    ".woff2": "font/woff2",
    ".xml": "application/xml",
}
OTHER = "application/octet-stream"


def content_type(name: str) -> str:
    """Return the type of a file by its ending."""
    return TYPES.get(os.path.splitext(name)[1].lower(), OTHER)


class Site:
    """An ASGI application for a folder of static files."""

    def __init__(self, folder: Path) -> None:
        """Serve ``folder``, in which a page is a folder with an index.html."""
        self._folder = folder
        self._policies: dict[str, tuple[tuple[int, int], str]] = {}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer with a file, a way to the page, or 404."""
        if scope["method"] not in READING:
            refused = as_text("pages can only be read", 405, {"Allow": "GET, HEAD"})
            await refused(scope, receive, send)
            return
        path = str(scope["path"])[1:]
        name = path + "index.html" if path == "" or path.endswith("/") else path
        if not _is_site_name(name):
            await self._missing(scope, receive, send)
            return
        if os.path.splitext(name)[1] == "" and self._is_page(name):
            await RedirectResponse(f"/{name}/", 308)(scope, receive, send)
            return
        try:
            stream, headers = self._open(name, Headers(scope=scope))
        except RefusalError:
            await self._missing(scope, receive, send)
            return
        variant = "-gz" if "Content-Encoding" in headers else ""
        await FileAnswer(stream, headers, variant)(scope, receive, send)

    def _open(self, name: str, asked: Headers) -> tuple[BinaryIO, Mapping[str, str]]:
        """Open a file, compressed when it lies there so and is wanted so; Raises: RefusalError."""
        headers = {
            "Content-Type": content_type(name),
            "Cache-Control": KEEP if name.startswith(HASHED) else ASK,
            "Content-Security-Policy": NOTHING,
            "Vary": "Accept-Encoding",
        }
        if name.endswith(".html"):
            headers["Content-Security-Policy"] = self._policy(name)
        elif name.endswith(".js"):  # a worker's own policy: what the pages' scripts may load
            headers["Content-Security-Policy"] = page_policy(b"")
        if "range" not in asked and _takes_gzip(asked.get("accept-encoding", "")):
            try:
                return open_below(self._folder, name + ".gz"), {
                    **headers,
                    "Content-Encoding": "gzip",
                }
            except RefusalError:
                pass
        return self._open_plain(name), headers

    def _open_plain(self, name: str) -> BinaryIO:
        try:
            return open_below(self._folder, name)
        except RefusalError:
            if not name.startswith(MODELS):
                raise
            return open_below(GALLERY, name.removeprefix(MODELS))

    def _policy(self, name: str) -> str:
        """The policy of a page, worked out again when the page changes."""
        with open_below(self._folder, name) as stream:
            status = os.fstat(stream.fileno())
            key = (status.st_mtime_ns, status.st_size)
            known = self._policies.get(name)
            if known is None or known[0] != key:
                known = (key, page_policy(stream.read()))
                self._policies[name] = known
            return known[1]

    def _is_page(self, name: str) -> bool:
        try:
            status = os.lstat(self._folder / name / "index.html")
        except OSError:
            return False
        return stat.S_ISREG(status.st_mode)

    async def _missing(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer 404: with the site's own page to a person's browser, else in one line."""
        answer: Response = as_text("there is nothing here", 404, {"Vary": "Accept"})
        if "text/html" in Headers(scope=scope).get("accept", ""):
            with contextlib.suppress(RefusalError), open_below(self._folder, MISSING) as stream:
                page = stream.read()
                headers = {
                    "Cache-Control": "no-store",
                    "Content-Security-Policy": page_policy(page),
                    "Vary": "Accept",
                }
                answer = Response(page, 404, headers, media_type="text/html")
        await answer(scope, receive, send)


def _is_site_name(name: str) -> bool:
    return not name.endswith(".gz") and all(is_plain_name(part) for part in name.split("/"))


def _takes_gzip(accepted: str) -> bool:
    """Whether an Accept-Encoding header allows gzip."""
    for part in accepted.lower().split(","):
        coding, _, weight = part.partition(";")
        if coding.strip() in ("gzip", "*"):
            return weight.replace(" ", "") not in ("q=0", "q=0.0", "q=0.00", "q=0.000")
    return False
