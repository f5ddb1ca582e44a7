"""What happens where a browser lacks something: memory, workers, locks, storage, https, a GPU that comes back."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from posttrainllm.runs.checkpoint import read_checkpoint
from posttrainllm.runs.folder import Run
from site_visits import (
    SWIFTSHADER,
    Visit,
    chromium,
    press,
    run_of,
    served,
    training_workers,
    visit,
)
from web_storage import unzipped


@pytest.fixture(scope="module")
def browser(tools: Any) -> Iterator[Any]:
    with chromium(tools, "--host-resolver-rules=MAP class.example 127.0.0.1") as opened:
        yield opened


SHARED_MEMORY_REFUSED = """{
  const Memory = WebAssembly.Memory;
  WebAssembly.Memory = class extends Memory {
    constructor(wanted) { if (wanted.shared) throw new RangeError("could not allocate memory"); super(wanted); }
  };
}"""
NO_WORKERS = (
    "Worker = class { constructor() { throw new DOMException('denied', 'SecurityError'); } };"
)
NO_LOCKS = """for (const Kind of [globalThis.Navigator, globalThis.WorkerNavigator]) {
  if (Kind) Object.defineProperty(Kind.prototype, "locks", { value: undefined });
}"""


def browser_with(visitor: Visit, fault: str) -> None:
    """Make the page and its workers miss something."""
    visitor.context.add_init_script(fault)

    def altered(route: Any) -> None:
        answer = route.fetch()
        route.fulfill(response=answer, body=fault + answer.text())

    visitor.page.route(re.compile(r"/_astro/(worker|pool_browser|opfs_writer)-[^/]*\.js"), altered)


@pytest.mark.parametrize(
    "fault",
    [
        SHARED_MEMORY_REFUSED,
        f"if (!globalThis.document) {NO_WORKERS}",
        NO_LOCKS,
        "StorageManager.prototype.estimate = () => Promise.reject(new TypeError('no'));",
        "StorageManager.prototype.getDirectory = () => Promise.reject(new TypeError('no'));",
        "Object.defineProperty(globalThis, 'indexedDB', { get() { throw new Error('no'); } });",
        "if (globalThis.document) Object.defineProperty(window, 'localStorage', { get() { throw 1; } });",
    ],
    ids=["memory", "nested workers", "locks", "estimate", "opfs", "indexeddb", "localstorage"],
)
def test_a_run_is_trained_where_the_browser_lacks_something(visitor: Visit, fault: str) -> None:
    browser_with(visitor, fault)
    visitor.start(run_of(20))
    visitor.finish()
    visitor.page.get_by_role("link", name="Runs", exact=True).click()
    visitor.page.locator("li.run").get_by_text("finished").wait_for()


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        ("delete globalThis.WebAssembly;", "This browser runs no WebAssembly"),
        (f"if (globalThis.document) {NO_WORKERS}", "The training worker does not start: denied"),
        (
            "WebAssembly.Memory = class { constructor() { throw new RangeError('no memory'); } };",
            "no memory",
        ),
    ],
    ids=["wasm", "workers", "memory"],
)
def test_a_browser_that_cannot_train_says_why(visitor: Visit, fault: str, said: str) -> None:
    browser_with(visitor, fault)
    page = visitor.open("train/", preset="tiny")
    page.get_by_text(said).first.wait_for()
    visitor.open("runs/").get_by_text("There is no run yet").wait_for()


def test_a_page_without_https_keeps_runs_in_the_database_of_the_browser(
    browser: Any, site: Path, tmp_path: Path
) -> None:
    with served(site, isolated=False) as address, visit(browser, plainly(address)) as visitor:
        plain = visitor.address
        page = visitor.page
        visitor.start(run_of(100_000))
        assert page.evaluate("[isSecureContext, navigator.storage === undefined]") == [False, True]
        visitor.reach(20)
        page.get_by_role("link", name="Runs", exact=True).click()
        row = page.locator("li.run")
        row.get_by_text("training now").wait_for()
        assert row.get_by_role("button", name="Delete").is_disabled()
        page.get_by_role("link", name="Train", exact=True).first.click()
        press(visitor, "Pause")
        page.get_by_text("paused; saved").wait_for()
        paused = int(page.locator("progress").get_attribute("value"))
        page.goto(plain + "runs/")
        press(visitor, "Download")
        with page.expect_download() as found:
            row.get_by_role("button", name="Download .zip").click()
        found.value.save_as(tmp_path / "run.zip")
        kept = Run(unzipped(tmp_path / "run.zip", tmp_path))
        assert [line["step"] for line in kept.metrics.read()] == list(range(1, paused + 1))
        assert read_checkpoint(kept.path).state.step == paused  # type: ignore[union-attr]
        press(visitor, "Go on")
        visitor.reach(paused + 5)
        press(visitor, "Stop")
        page.get_by_text("stopped; saved").wait_for()
        page.goto(plain + "?run=tiny-001")
        page.locator("main .text span:not(.prompt)").first.wait_for()
        page.goto(plain + "runs/")
        press(visitor, "Delete")
        press(visitor, "Undo")
        row.get_by_text("stopped", exact=True).wait_for()


def plainly(address: str) -> str:
    """The same server under a name that browsers do not trust without https."""
    return address.replace("127.0.0.1", "class.example")


def test_a_gpu_that_does_not_come_back_ends_in_webassembly(tools: Any, address: str) -> None:
    small = {"n_layer": 1, "n_embd": 24, "n_ctx": 16}
    config = run_of(
        100_000,
        data__batch_size=4,
        training__eval_every=0,
        training__sample_every=0,
        **{f"model__{key}": value for key, value in small.items()},
    )
    with chromium(tools, *SWIFTSHADER) as opened, visit(opened, address) as visitor:
        page = visitor.open("train/", preset="tiny")
        page.locator("button.start:not([disabled])").wait_for()
        visitor.start(config, engine="webgpu")
        training_workers(visitor)[0].evaluate(LAST_DEVICE)
        visitor.reach(3)
        training_workers(visitor)[0].evaluate("self.device.destroy()")
        said = page.get_by_text("The engine was lost").inner_text()
        assert "going on from step 0" in said
        visitor.reach(300)
        press(visitor, "Stop")
        page.get_by_text("stopped; saved").wait_for()
        assert 'name = "webgpu"' in visitor.run_file("tiny-001", "config.toml")


LAST_DEVICE = """() => {
  const request = GPUAdapter.prototype.requestDevice;
  GPUAdapter.prototype.requestDevice = async function (...given) {
    GPU.prototype.requestAdapter = async () => null;
    return (self.device = await request.apply(this, given));
  };
}"""
