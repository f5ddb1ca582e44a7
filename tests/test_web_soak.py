"""A long run in a tab: memory and speed stay what they were, and the page answers all the while."""

from __future__ import annotations

import statistics
from typing import Any

import pytest

from model_cases import train_config
from posttrainllm.config import TrainConfig, replace
from site_visits import SWIFTSHADER, Visit, chromium, visit

pytestmark = pytest.mark.slow

ANSWER_MS = 100
SPEED_KEPT = 0.95
MEMORY_MORE = 4_000_000  # bytes: the curve's points and the samples, which the page shows
END = {"training.verdict_samples": 2, "training.final_windows": 64}

WATCH = """
window.longest = { task: 0, event: 0, input: "" };
new PerformanceObserver((list) => {
  for (const entry of list.getEntries()) longest.task = Math.max(longest.task, entry.duration);
}).observe({ type: "longtask", buffered: true });
new PerformanceObserver((list) => {
  for (const entry of list.getEntries()) {
    if (entry.duration > longest.event) Object.assign(longest, { event: entry.duration, input: entry.name });
  }
}).observe({ type: "event", durationThreshold: 16, buffered: true });
"""


def soak(visitor: Visit, config: TrainConfig, engine: str) -> None:
    """Train to the end, with a click every half second, and hold memory, speed and answers to their limits."""
    page = visitor.page
    page.add_init_script(WATCH)
    visitor.start(config, engine=engine)
    visitor.reach(10)
    page.evaluate("Object.assign(longest, { task: 0, event: 0 })")
    early = memory(page)
    help_button = page.get_by_role("button", name="Explain: step")
    while not page.get_by_text("finished; saved").is_visible():
        help_button.click()
        page.keyboard.press("Escape")
        page.wait_for_timeout(500)
    longest = page.evaluate("longest")
    assert longest["event"] <= ANSWER_MS, longest
    assert longest["task"] <= ANSWER_MS, longest
    assert memory(page) <= early + MEMORY_MORE
    speeds = [line["tokens_per_second"] for line in visitor.metrics("tiny-001")][10:]
    part = len(speeds) // 5
    early_speed, late_speed = statistics.median(speeds[:part]), statistics.median(speeds[-part:])
    assert late_speed >= SPEED_KEPT * early_speed


def memory(page: Any) -> int:
    """Bytes of page and workers together, after what is garbage was collected."""
    found: int = page.evaluate(
        "performance.measureUserAgentSpecificMemory().then((all) => all.bytes)"
    )
    return found


def test_two_thousand_steps_in_wasm(tools: Any, address: str) -> None:
    with chromium(tools) as browser, visit(browser, address) as visitor:
        soak(visitor, replace(train_config("tiny"), END), "wasm")


def test_two_hundred_steps_on_a_software_gpu(tools: Any, address: str) -> None:
    sizes = {"model.n_layer": 1, "model.n_embd": 24, "model.n_ctx": 16, "data.batch_size": 4}
    short = {"training.steps": 200, "training.sample_every": 0, "training.eval_windows": 4}
    config = replace(train_config("tiny"), {**END, **sizes, **short, "schedule.warmup_steps": 20})
    with chromium(tools, *SWIFTSHADER) as browser, visit(browser, address) as visitor:
        soak(visitor, config, "webgpu")
