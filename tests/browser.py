"""Chromium for the tests: a small server for the runtime's files, an empty page, jobs in a Web Worker."""

from __future__ import annotations

import contextlib
import functools
import http.server
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from needs import require
from web import assets, run_node

PAGE = """<!doctype html><title>posttrainllm</title><script>
  window.perform = (work) => new Promise((done, failed) => {
    const worker = new Worker("/test/browser_worker.ts", { type: "module" });
    worker.onmessage = (event) => {
      worker.terminate();
      if (event.data.error) failed(new Error(event.data.error)); else done(event.data.value);
    };
    worker.onerror = (event) => failed(new Error(event.message || "the worker did not start"));
    worker.postMessage(work);
  });
</script>"""


class Handler(http.server.SimpleHTTPRequestHandler):
    """Files of a folder, TypeScript's names as JavaScript, with or without cross-origin isolation."""

    isolated = True
    extensions_map = {  # noqa: RUF012
        ".ts": "text/javascript",
        ".wasm": "application/wasm",
        ".json": "application/json",
        ".html": "text/html",
        "": "application/octet-stream",
    }

    def end_headers(self) -> None:
        """Add the headers that SharedArrayBuffer needs."""
        if self.isolated:
            self.send_header("Cross-Origin-Opener-Policy", "same-origin")
            self.send_header("Cross-Origin-Embedder-Policy", "require-corp")
        super().end_headers()

    def log_message(self, format: str, *args: Any) -> None:
        """Say nothing."""


def site(folder: Path) -> Path:
    """A folder to serve: page, runtime, modules; the tests put their data into ``data/``."""
    run_node("test/strip.ts", folder)
    assets(folder / "assets")
    (folder / "data").mkdir()
    (folder / "index.html").write_text(PAGE)
    return folder


@contextlib.contextmanager
def served(folder: Path, *, isolated: bool = True) -> Iterator[str]:
    """The address of a folder, while the block runs."""
    handler = type("Served", (Handler,), {"isolated": isolated})
    make = functools.partial(handler, directory=str(folder))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), make) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}/"
        finally:
            server.shutdown()
            thread.join()


@contextlib.contextmanager
def chromium_page(address: str, *flags: str) -> Iterator[Any]:
    """A page of a headless Chromium at an address; what it writes to the console as an error fails the test."""
    path = require("chromium")
    playwright = require("playwright.sync_api")
    with playwright.sync_playwright() as tools:
        browser = tools.chromium.launch(
            executable_path=path, args=["--headless=new", "--no-sandbox", *flags]
        )
        try:
            page = browser.new_page()
            page.set_default_timeout(300_000)
            page.goto(address)
            yield page
        finally:
            browser.close()


def perform(page: Any, **work: Any) -> Any:
    """A job of ``web/test/browser_worker.ts`` in a new Web Worker of the page."""
    return page.evaluate("(work) => window.perform(work)", work)
