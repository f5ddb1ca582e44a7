"""The built site for the tests: pages from Astro, data from Python, Chromium in front of it."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import subprocess
import urllib.parse
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from browser import served
from model_cases import train_config
from needs import missing, require
from op_vectors import save_for_page
from posttrainllm.config import changed_settings, replace
from posttrainllm.sections import TrainConfig
from web import WEB, assets, node_path

SWIFTSHADER = ("--enable-unsafe-webgpu", "--use-webgpu-adapter=swiftshader")
PATIENCE_MS = 120_000  # for machines that do much else
BRIEF = {
    "training.eval_windows": 4,
    "training.final_windows": 8,
    "training.verdict_samples": 1,
    "training.sample_tokens": 8,
}
"""Settings of a run whose end takes no time."""


def built_site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site as static files; made once for all workers of a test run."""
    astro = WEB / "node_modules" / "astro" / "bin" / "astro.mjs"
    if not astro.is_file():
        missing("the web tools are not installed; to install them: make setup")
    base = tmp_path_factory.getbasetemp()
    shared = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base
    folder, done = shared / "site", shared / "site.done"
    builds = WEB.parent / "build"
    builds.mkdir(exist_ok=True)
    # tools/site.py's lock: Astro puts what it builds for itself into web/.astro, whatever the folder
    with (builds / "site.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not done.exists():
            _build(astro, folder)
            done.touch()
    return folder


def _build(astro: Path, folder: Path) -> None:
    result = subprocess.run(
        [node_path(), str(astro), "build", "--outDir", str(folder)],
        cwd=WEB,
        env=os.environ | {"ASTRO_TELEMETRY_DISABLED": "1", "NO_COLOR": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert result.returncode == 0, f"{result.stdout[-4000:]}\n{result.stderr[-4000:]}"
    assets(folder / "data")
    save_for_page(folder / "data" / "kernels")


@contextlib.contextmanager
def playwright() -> Iterator[Any]:
    """Playwright, which can be opened once at a time; ``chromium`` starts browsers with it."""
    with require("playwright.sync_api").sync_playwright() as tools:
        yield tools


@contextlib.contextmanager
def chromium(tools: Any, *flags: str) -> Iterator[Any]:
    """A headless Chromium; ``visit`` opens a visitor with storage of its own in it."""
    browser = tools.chromium.launch(
        executable_path=require("chromium"), args=["--headless=new", "--no-sandbox", *flags]
    )
    try:
        yield browser
    finally:
        browser.close()


class Visit:
    """One visitor of the site: a page, what it asked the network for, and what it complained about."""

    def __init__(self, browser: Any, address: str, **context: Any) -> None:
        """Open an empty page; ``context`` are Playwright's options of a browser context.

        Motion is reduced unless they say otherwise: then text is there at once.
        """
        self.address = address
        self.context = browser.new_context(**{"reduced_motion": "reduce", **context})
        self.page = self.context.new_page()
        self.page.set_default_timeout(PATIENCE_MS)
        self.requests: list[str] = []
        self.complaints: list[str] = []
        self.context.on("request", lambda request: self.requests.append(request.url))
        self.page.on("pageerror", lambda error: self.complaints.append(str(error)))
        self.page.on("console", self._heard)

    def _heard(self, message: Any) -> None:
        if message.type == "error":
            self.complaints.append(message.text)

    def open(self, path: str = "", **query: object) -> Any:
        """Go to a place of the site; the query is encoded."""
        address = self.address + path
        self.page.goto(f"{address}?{urllib.parse.urlencode(query)}" if query else address)
        return self.page

    def start(self, config: TrainConfig, **more: object) -> None:
        """Start a run by a link that carries the configuration."""
        given = {key: text(value) for key, value, _ in changed_settings(config)}
        given = {key: value for key, value in given.items() if not key.startswith("engine.")}
        self.open("train/", preset=config.preset, **given, **more)
        self.page.locator("button.start:not([disabled])").click()

    def reach(self, step: int) -> None:
        """Wait until the run is at a step or beyond it."""
        self.page.wait_for_function(
            "(step) => Number(document.querySelector('progress')?.value ?? 0) >= step", arg=step
        )

    def finish(self) -> None:
        """Wait until the run is finished and saved."""
        self.page.get_by_text("finished; saved").wait_for()

    def run_file(self, run: str, file: str) -> str:
        """A file of a run as the browser keeps it."""
        found: str = self.page.evaluate(READ, [run, file])
        return found

    def metrics(self, run: str) -> list[dict[str, Any]]:
        """The lines of a run's metrics.jsonl."""
        return [json.loads(line) for line in self.run_file(run, "metrics.jsonl").splitlines()]

    def losses(self, run: str) -> list[float]:
        """The losses of a run, step after step."""
        lines = self.metrics(run)
        assert [line["step"] for line in lines] == list(range(1, len(lines) + 1))
        return [line["loss"] for line in lines]

    def close(self) -> None:
        """Leave, having asked no other server for anything and having met no error."""
        foreign = [
            url for url in self.requests if not url.startswith((self.address, "data:", "blob:"))
        ]
        self.context.close()
        assert not foreign, f"requests left the page: {foreign}"
        assert not self.complaints, self.complaints


@contextlib.contextmanager
def visit(browser: Any, address: str, **context: Any) -> Iterator[Visit]:
    """A visit that is checked at its end (unless the test failed before)."""
    visitor = Visit(browser, address, **context)
    yield visitor
    visitor.close()


def text(value: object) -> str:
    """A setting as a link carries it."""
    if isinstance(value, bool):
        return str(value).lower()
    return "" if value is None else str(value)


READ = """async ([run, file]) => {
  const find = async (folder, path) => {
    for await (const [name, handle] of folder.entries()) {
      if (handle.kind === "directory") {
        const found = await find(handle, [...path, name]);
        if (found !== null) return found;
      } else if (path.at(-1) === run && name === file) return (await handle.getFile()).text();
    }
    return null;
  };
  return find(await navigator.storage.getDirectory(), []);
}"""

__all__ = ["SWIFTSHADER", "Visit", "built_site", "chromium", "playwright", "served", "visit"]


def run_of(steps: int, **changes: object) -> TrainConfig:
    """A tiny run; ``changes`` with two underscores for the dot of a setting's name."""
    given = {key.replace("__", "."): value for key, value in changes.items()}
    return replace(
        train_config("tiny"),
        {**BRIEF, "training.steps": steps, "schedule.warmup_steps": 1, **given},
    )


def press(visitor: Visit, name: str) -> None:
    visitor.page.get_by_role("button", name=name, exact=True).click()


def training_workers(visitor: Visit) -> list[Any]:
    """Those that train or examine; the others are their threads."""
    return [worker for worker in visitor.page.workers if "/worker-" in worker.url]
