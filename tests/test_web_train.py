"""Training through the page, in Chromium: the golden curve, pauses, lost workers and devices, and what is refused."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.golden.make_golden import golden_config

from model_cases import train_config
from posttrainllm.config import TrainConfig, replace
from site_visits import SWIFTSHADER, Visit, chromium, visit
from tolerances import LOSS_TO_STEP_10, LOSS_TO_STEP_200
from web_jobs import GOLDEN

SHORT = {
    "training.eval_windows": 8,
    "training.final_windows": 16,
    "training.verdict_samples": 2,
    "training.sample_tokens": 40,
}
SMALL_GPU = {  # what a software GPU computes in seconds
    **SHORT,
    "model.n_layer": 1,
    "model.n_embd": 24,
    "model.n_ctx": 16,
    "data.batch_size": 4,
    "training.steps": 120,
    "training.eval_every": 0,
    "training.sample_every": 0,
    "schedule.warmup_steps": 3,
}


def short_run() -> TrainConfig:
    """A run of some seconds, with a short end."""
    return replace(train_config("tiny"), {**SHORT, "training.steps": 999})


@pytest.fixture(scope="module")
def undisturbed(browser: Any, address: str) -> list[float]:
    """The losses of the short run, trained in one go."""
    with visit(browser, address) as visitor:
        visitor.start(short_run())
        visitor.finish()
        visitor.page.get_by_role("button", name="2 min more").wait_for()
        assert re.match("✓ done, loss", visitor.page.title())
        return visitor.losses("tiny-001")


def test_the_loss_curve_is_the_golden_one(visitor: Visit) -> None:
    golden = np.array(GOLDEN["tiny"]["losses"])
    visitor.start(golden_config("tiny", "wasm"))
    visitor.reach(len(golden))
    visitor.page.get_by_role("button", name="Stop").click()
    visitor.page.get_by_text("stopped; saved").wait_for()
    drift = np.abs(np.array(visitor.losses("tiny-001"))[: len(golden)] - golden) / golden
    assert drift[:10].max() <= LOSS_TO_STEP_10["native"]
    assert drift.max() <= LOSS_TO_STEP_200["native"]


def test_a_paused_and_reloaded_run_has_the_losses_of_an_undisturbed_one(
    visitor: Visit, undisturbed: list[float]
) -> None:
    page = visitor.page
    visitor.start(short_run())
    visitor.reach(40)
    page.get_by_role("button", name="Pause").click()
    page.get_by_text("paused; saved").wait_for()
    paused = int(page.locator("progress").get_attribute("value"))
    page.reload()
    page.get_by_text("stopped at step").wait_for()
    said = re.findall(r"stopped at step (\d+) of (\d+)", page.inner_text("main"))
    assert said == [(str(paused), str(len(undisturbed)))]
    page.get_by_role("button", name="Go on").click()
    visitor.finish()
    assert visitor.losses("tiny-001") == undisturbed


def test_a_run_whose_worker_ends_goes_on_from_its_snapshot(
    visitor: Visit, undisturbed: list[float]
) -> None:
    page = visitor.page
    visitor.start(short_run())
    visitor.reach(20)
    page.get_by_role("button", name="Pause").click()
    page.get_by_text("paused; saved").wait_for()
    saved = int(page.locator("progress").get_attribute("value"))
    page.get_by_role("button", name="Resume").click()
    visitor.reach(saved + 15)
    trainer(page).evaluate("self.close()")
    said = page.get_by_text("The worker was lost").inner_text()
    at, again = map(int, re.findall(r"at step (\d+);.* (\d+) steps are done again", said)[0])
    assert again == at - saved > 0
    visitor.finish()
    assert visitor.losses("tiny-001") == undisturbed


def trainer(page: Any) -> Any:
    """The worker that trains (the others are its threads)."""
    return next(worker for worker in page.workers if "/worker-" in worker.url)


def test_a_finished_run_is_trained_on_by_one_click(visitor: Visit) -> None:
    page = visitor.page
    visitor.start(
        replace(train_config("tiny"), {**SHORT, "training.steps": 20, "schedule.warmup_steps": 5})
    )
    visitor.finish()
    page.get_by_role("button", name="2 min more").click()
    visitor.reach(30)
    page.get_by_role("button", name="Stop").click()
    page.get_by_text("stopped; saved").wait_for()
    assert len(visitor.losses("tiny-001")) >= 30
    assert "\nsteps = 20" not in visitor.run_file("tiny-001", "config.toml")


def test_training_goes_on_while_another_page_is_shown(visitor: Visit) -> None:
    page = visitor.page
    visitor.start(short_run())
    visitor.reach(5)
    page.get_by_role("link", name="About").click()
    page.wait_for_url("**/about/")
    chip = page.locator(".chip")
    chip.get_by_text("finished").wait_for()
    chip.click()
    page.get_by_role("button", name="2 min more").wait_for()
    assert len(visitor.losses("tiny-001")) == short_run().training.steps


def test_webgpu_trains_and_survives_the_loss_of_its_device(tools: Any, address: str) -> None:
    config = replace(train_config("tiny"), SMALL_GPU)
    with chromium(tools, *SWIFTSHADER) as browser:
        with visit(browser, address) as first:
            first.start(config, engine="wasm")
            first.finish()
            wasm = first.losses("tiny-001")
        with visit(browser, address) as second:
            page = second.page
            page.goto(address + "train/")
            page.locator("button.start:not([disabled])").wait_for()
            second.start(config, engine="webgpu")
            trainer(page).evaluate(KEEP_DEVICE)
            second.reach(4)
            trainer(page).evaluate("self.device.destroy()")
            said = page.get_by_text("The engine was lost").inner_text()
            assert re.search(r"going on from step 0, \d+ steps are done again", said)
            second.finish()
            webgpu = second.losses("tiny-001")
    assert len(webgpu) == len(wasm) == SMALL_GPU["training.steps"]
    drift = np.abs(np.array(webgpu) / wasm - 1)
    assert drift[:12].max() <= LOSS_TO_STEP_10["webgpu"]
    assert drift.max() <= LOSS_TO_STEP_200["webgpu"]


KEEP_DEVICE = """() => {
  const request = GPUAdapter.prototype.requestDevice;
  GPUAdapter.prototype.requestDevice = async function (...given) {
    return (self.device = await request.apply(this, given));
  };
}"""


@pytest.mark.parametrize("width", [390, 768, 1440])
def test_nothing_moves_while_the_numbers_of_a_run_change(
    browser: Any, address: str, width: int
) -> None:
    short = {**SHORT, "training.steps": 120, "training.eval_every": 40, "training.sample_every": 40}
    with visit(browser, address, viewport={"width": width, "height": 900}) as visitor:
        page = visitor.page
        page.add_init_script(SHIFTS)
        visitor.start(replace(train_config("tiny"), {**short, "training.final_windows": 4000}))
        visitor.finish()
        said = page.evaluate("window.said")
        assert any("measuring on unseen text" in text for text, _ in said), said
        over = next(when for text, when in said if "reading what it writes" in text)
        moved = [shift for shift in page.evaluate("window.shifts") if shift[0] < over]
        assert sum(share for _, share, _ in moved) < STILL, moved


STILL = 0.005  # of the page times how far; a question mark behind a number that gets a digit more is 0.0002
SHIFTS = """window.shifts = [], window.said = [];
new PerformanceObserver((list) => {
  for (const { startTime, value, hadRecentInput, sources } of list.getEntries()) {
    if (hadRecentInput) continue;
    window.shifts.push([startTime, value, sources.map(({ node }) => node?.parentElement?.className)]);
  }
}).observe({ type: "layout-shift", buffered: true });
new MutationObserver(() => {  // what is said for a moment only is kept: who asks may come too late
  const text = document.querySelector("[aria-label=Progress] .soft")?.textContent;
  if (text && text !== window.said.at(-1)?.[0]) window.said.push([text, performance.now()]);
}).observe(document, { subtree: true, childList: true, characterData: true });"""


def test_the_curve_is_drawn_where_the_language_is_none(visitor: Visit) -> None:
    visitor.page.add_init_script(
        "Object.defineProperty(Navigator.prototype, 'language', { get: () => 'C' })"
    )
    visitor.start(short_run())
    visitor.reach(5)
    visitor.page.locator(".plot canvas").wait_for()
    assert not visitor.complaints


def test_a_curve_that_cannot_be_loaded_is_told_in_words(visitor: Visit) -> None:
    visitor.page.route(re.compile(r"/_astro/uPlot[^/]*\.js"), lambda route: route.abort())
    visitor.start(short_run())
    visitor.page.get_by_text("The curve could not be loaded").wait_for()
    visitor.reach(5)
    assert visitor.complaints == ["Failed to load resource: net::ERR_FAILED"]
    visitor.complaints.clear()


def test_without_webgpu_the_page_says_why_and_takes_wasm(visitor: Visit) -> None:
    page = visitor.open("train/", preset="tiny")
    page.get_by_text("WebAssembly: WebGPU is there but gives no adapter").wait_for()
    page = visitor.open("train/", preset="tiny", engine="webgpu")
    page.get_by_text("Take the engine WebAssembly").wait_for()
    assert page.locator("button.start").is_disabled()


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("empty.txt", b"", "empty.txt is empty"),
        ("short.txt", b"too short", "context of 32 needs at least 33"),
        ("book.pdf", b"%PDF-1.7 ...", "book.pdf is a PDF file, not text"),
        ("wide.txt", "wide".encode("utf-16"), "wide.txt is UTF-16, not UTF-8"),
        ("noise.bin", bytes(range(256)) * 9, "binary"),
    ],
)
def test_a_file_that_is_no_text_gets_its_message(
    visitor: Visit, tmp_path: Path, name: str, content: bytes, said: str
) -> None:
    (tmp_path / name).write_bytes(content)
    page = visitor.open("train/", preset="tiny")
    page.get_by_label("files", exact=True).check()
    page.set_input_files("input[type=file]", tmp_path / name)
    page.get_by_text(said).wait_for()
    assert page.locator("button.start").is_disabled()


def test_a_text_of_ones_own_is_trained_on(visitor: Visit) -> None:
    page = visitor.open(
        "train/", preset="tiny", **{"training.steps": 60, "training.verdict_samples": 1}
    )
    page.get_by_label("paste your own").check()
    page.get_by_label("Your text").fill("the cat sat on the mat. " * 200)
    page.get_by_text("pasted text: 4.3 kB to train on").wait_for()
    page.get_by_text("this model can memorise the text").wait_for()
    page.locator("button.start:not([disabled])").click()
    visitor.finish()
    assert visitor.losses("tiny-001")[-1] < 3
    assert visitor.run_file("tiny-001", "corpus.txt").startswith("the cat sat")


def test_a_verdict_leads_on_by_one_click(visitor: Visit) -> None:
    page = visitor.page
    short = {**SHORT, "training.steps": 20, "schedule.warmup_steps": 5}
    visitor.start(replace(train_config("tiny"), short))
    page.get_by_role("link", name="Look inside").click()
    page.get_by_text("numbers that you trained here").wait_for()
    page.locator("button[type=submit]:not([disabled])").wait_for()
    page.go_back()
    page.get_by_role("button", name="A bigger one: small").click()
    visitor.reach(2)
    assert page.locator("h1").inner_text() == "small-001"
    page.get_by_role("button", name="Stop").click()
    page.get_by_text("stopped; saved").wait_for()
    page.get_by_role("button", name="New run").click()
    page.locator("button.start").wait_for()


def test_a_link_is_parsed_by_the_schema_and_what_it_refuses_is_shown(visitor: Visit) -> None:
    given = {"training.steps": "many", "model.n_layers": 3, "data.batch_size": 8}
    page = visitor.open("train/", preset="tiny", engine="cuda", **given)
    page.get_by_text("256 bytes a step").wait_for()
    shown = page.inner_text("main")
    assert 'training.steps "many": must be a whole number from 1 to 100,000,000' in shown
    assert '"model.n_layers": a tab has no such setting' in shown
    assert 'engine "cuda": must be one of auto, webgpu, wasm' in shown


def test_a_model_that_diverges_stops_with_a_next_step(visitor: Visit) -> None:
    config = replace(
        train_config("tiny"),
        {
            **SHORT,
            "schedule.learning_rate": 10.0,
            "schedule.warmup_steps": 0,
            "optimizer.weight_decay": 10.0,  # each step multiplies the weights by -99
        },
    )
    visitor.start(config)
    visitor.page.get_by_text("is not a finite number").wait_for()
    assert "try a lower learning rate" in visitor.page.inner_text("main").lower()
