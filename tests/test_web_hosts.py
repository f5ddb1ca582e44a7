"""The built site in Chromium, served by ``posttrainllm play`` and by a static host that knows nothing of it."""

from __future__ import annotations

import contextlib
import functools
import http.server
import json
import re
import shutil
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from needs import require
from server_cases import Server, served
from site_cases import built_site
from web import WEB, node_path

BASE = "/class/playground/"
WAIT_MS = 60_000


class StaticHandler(http.server.SimpleHTTPRequestHandler):
    """A host that sends files below BASE with no header of ours."""

    extensions_map = {  # noqa: RUF012
        ".html": "text/html", ".js": "text/javascript", ".wasm": "application/wasm",
        ".css": "text/css", ".json": "application/json", ".svg": "image/svg+xml", "": "text/plain",
    }  # fmt: skip

    def translate_path(self, path: str) -> str:
        return super().translate_path(
            "/" + path.removeprefix(BASE) if path.startswith(BASE) else "/-"
        )

    def log_message(self, format: str, *args: Any) -> None:
        """Say nothing."""


@contextlib.contextmanager
def static_host(folder: Path, port: int = 0) -> Iterator[int]:
    handler = functools.partial(StaticHandler, directory=str(folder))
    with http.server.ThreadingHTTPServer(("127.0.0.1", port), handler) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        try:
            yield server.server_port
        finally:
            server.shutdown()
            thread.join()


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    path = require("chromium")
    playwright = require("playwright.sync_api")
    with playwright.sync_playwright() as tools:
        found = tools.chromium.launch(executable_path=path, args=["--headless=new", "--no-sandbox"])
        yield found
        found.close()


class Watched:
    """A page that notes every request and everything that it complains of."""

    def __init__(self, browser: Any, allowed: str) -> None:
        self.context = browser.new_context()
        self.page = self.context.new_page()
        self.page.set_default_timeout(WAIT_MS)
        self.outside: list[str] = []
        self.complaints: list[str] = []
        self.context.on(
            "request",
            lambda request: (
                None
                if request.url.startswith((allowed, "data:", "blob:"))
                else self.outside.append(request.url)
            ),
        )
        self.page.on(
            "console",
            lambda message: (
                self.complaints.append(message.text) if message.type == "error" else None
            ),
        )
        self.page.on("pageerror", lambda error: self.complaints.append(str(error)))

    def check(self) -> None:
        assert self.outside == []
        assert self.complaints == []


@pytest.fixture
def watch(browser: Any) -> Iterator[Any]:
    made: list[Watched] = []

    def open_page(allowed: str) -> Watched:
        made.append(Watched(browser, allowed))
        return made[-1]

    yield open_page
    for watched in made:
        watched.context.close()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    runs = tmp_path_factory.mktemp("runs")
    with served(built_site(), runs) as found:
        yield found


def pages() -> list[str]:
    site = built_site()
    return sorted(
        f"{path.parent.relative_to(site).as_posix()}/".removeprefix("./")
        for path in site.rglob("index.html")
    )


def test_every_page_of_play_is_isolated_and_asks_nobody_else(server: Server, watch: Any) -> None:
    assert len(pages()) >= 3
    for place in pages():
        watched = watch(server.origin + "/")
        watched.page.goto(f"{server.origin}/{place}", wait_until="load")
        watched.page.locator("h1").first.wait_for()
        assert watched.page.evaluate("crossOriginIsolated"), place
        assert watched.page.evaluate("document.fonts.ready.then(() => true)")
        assert watched.page.locator("h1").count() >= 1, place
        assert (
            watched.page.evaluate(
                "navigator.serviceWorker.getRegistrations().then((all) => all.length)"
            )
            == 0
        ), "the server isolates pages itself"
        watched.check()


def test_a_static_host_is_isolated_by_the_service_worker_and_works_offline(
    watch: Any, tmp_path: Path
) -> None:
    site = tmp_path / "site"
    built_site()
    shutil.copytree(WEB / "dist", site)
    with static_host(site) as port:
        origin = f"http://127.0.0.1:{port}"
        watched = watch(origin + BASE)
        page = watched.page
        page.goto(origin + BASE)
        page.wait_for_function("crossOriginIsolated && navigator.serviceWorker.controller !== null")
        assert page.evaluate("typeof SharedArrayBuffer") == "function"
        files = listed(site)
        assert {"index.html", "data/posttrainllm.json", "data/tinyshakespeare.txt"} <= set(files)
        until(lambda: all_is_kept(page, site))
        watched.check()
    for place in pages():  # the host is gone
        answer = page.goto(origin + BASE + place)
        assert answer is not None
        assert answer.status == 200, place
        assert page.evaluate("crossOriginIsolated"), place
        assert page.locator("h1").count() >= 1, place
    sizes = page.evaluate(
        "Promise.all(['data/posttrainllm.json', 'data/tinyshakespeare.txt'].map((name) => "
        f"fetch('{BASE}' + name).then((a) => a.arrayBuffer()).then((b) => b.byteLength)))"
    )
    assert sizes[1] == (site / "data" / "tinyshakespeare.txt").stat().st_size
    change(site)
    with static_host(site, port):
        page.goto(origin + BASE + "about/")
        assert page.locator("h1").first.inner_text() == "Changed", "a new build is seen at once"
        page.wait_for_function("crossOriginIsolated")
        fresh = page.evaluate(f"fetch('{BASE}data/posttrainllm.json').then((a) => a.json())")
        assert fresh == {"changed": True}
        page.evaluate("navigator.serviceWorker.ready.then((found) => found.update().then(() => 0))")
        state = (
            "navigator.serviceWorker.getRegistration()"
            ".then((all) => [all.installing, all.waiting, all.active].map((one) => one?.state))"
        )
        until(lambda: page.evaluate(state) == [None, None, "activated"])
        assert listed(site) != files
        until(lambda: all_is_kept(page, site))
        assert watched.outside == []


MODELS = "data/models/"  # kept when they are used


def all_is_kept(page: Any, site: Path) -> bool:
    """Whether the service worker keeps all of this build, one model, and nothing else."""
    kept, files = keeps(page), set(listed(site))
    models = {name for name in kept if name.startswith(MODELS)}
    rest = {name for name in files if not name.startswith(MODELS)}
    return kept - models == rest and len(models) >= 1 and models <= files


def keeps(page: Any) -> set[str]:
    """Tell the service worker that the page has settled, and return the files that it keeps."""
    page.evaluate("navigator.serviceWorker.controller.postMessage('keep')")
    script = (
        "caches.open('posttrainllm').then((c) => c.keys()).then((all) => all.map((r) => r.url))"
    )
    urls: list[str] = page.evaluate(script)
    return {url.partition(BASE)[2].partition("?")[0] for url in urls}


def until(holds: Callable[[], bool], seconds: float = 30) -> None:
    """Wait for something that a page can only be asked for."""
    end = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < end, "it never came"
        time.sleep(0.5)


def listed(site: Path) -> dict[str, str]:
    """The files that the service worker knows, with the hashes of their contents."""
    [found] = re.findall(r"const FILES = (\{.*?\});", (site / "sw.js").read_text())
    files: dict[str, str] = json.loads(found)
    return files


def change(site: Path) -> None:
    """Another build: a page and the data differ, one file is new and one is gone."""
    page = site / "about" / "index.html"
    heading = re.compile(r"(<h1[^>]*>).*?(</h1>)", re.DOTALL)
    page.write_text(heading.sub(r"\1Changed\2", page.read_text()))
    (site / "data" / "posttrainllm.json").write_text('{"changed": true}')
    (site / "data" / "tinyshakespeare.txt").unlink()
    (site / "new.txt").write_text("new")
    shutil.copyfile(WEB / "public" / "sw.js", site / "sw.js")
    hook = "m.offline().hooks['astro:build:done']({ dir: new URL(process.argv[1]) })"
    script = f"import('./tools/offline.mjs').then((m) => {hook})"
    subprocess.run([node_path(), "-e", script, f"{site.as_uri()}/"], cwd=WEB, check=True)
