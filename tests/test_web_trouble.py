"""What happens to a page: hostile links, impatient hands, storage that is cleared or full, workers that end."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from posttrainllm.runs.checkpoint import read_checkpoint
from posttrainllm.runs.folder import Run
from server_cases import served as serving
from site_visits import (
    Visit,
    press,
    run_of,
    training_workers,
)


def clear_storage(visitor: Visit) -> None:
    """As a person does in the settings of the browser."""
    origin = visitor.address.rstrip("/")
    asked = {"origin": origin, "storageTypes": "all"}
    visitor.context.new_cdp_session(visitor.page).send("Storage.clearDataForOrigin", asked)


def limit_storage(visitor: Visit, size: int | None) -> Any:
    """Leave the page so many bytes, or what the browser gives; the session must be kept."""
    session = visitor.context.new_cdp_session(visitor.page)
    given = {} if size is None else {"quotaSize": size}
    session.send("Storage.overrideQuotaForOrigin", {"origin": visitor.address.rstrip("/"), **given})
    return session


@pytest.mark.parametrize(
    ("query", "said"),
    [
        ("preset=constructor", 'preset "constructor": there is none of that name'),
        ("preset=__proto__", 'preset "__proto__": there is none of that name'),
        ("toString=1&__proto__=2", '"toString": a tab has no such setting'),
        ("foo=1&foo=1", '"foo": a tab has no such setting'),
        ("training.steps=NaN&training.steps=NaN", 'training.steps "NaN": must be a whole number'),
        ("&".join(f"a{n}=1" for n in range(40)), "and 32 more"),
        ("preset=<img src=x onerror=alert(1)>", 'preset "<img src=x onerror=alert(1)>"'),
    ],
)
def test_a_link_with_odd_names_is_refused_in_words(visitor: Visit, query: str, said: str) -> None:
    page = visitor.page
    page.goto(f"{visitor.address}train/?{query}")
    page.locator("button.start:not([disabled])").wait_for()
    assert said in page.inner_text("main")


def test_a_run_starts_after_one_that_failed(visitor: Visit) -> None:
    diverges = {"schedule__learning_rate": 10.0, "optimizer__weight_decay": 10.0}
    visitor.start(run_of(400, schedule__warmup_steps=0, **diverges))
    visitor.page.get_by_text("is not a finite number").wait_for()
    visitor.page.get_by_text("stopped; nothing was saved").wait_for()
    press(visitor, "New run")
    visitor.page.locator("button.start:not([disabled])").click()
    visitor.page.get_by_role("heading", name="tiny-002").wait_for()


def test_impatient_hands_start_one_run_and_lose_nothing(visitor: Visit) -> None:
    page = visitor.page
    visitor.open("train/", preset="tiny", **{"training.steps": 100_000})
    page.locator("button.start:not([disabled])").wait_for()
    page.evaluate(CLICK, ["Start training", 3])
    visitor.reach(5)
    page.evaluate(CLICK, ["Pause|Resume", 51])
    page.wait_for_function(PAUSED)  # whichever of the two was clicked last
    page.evaluate(CLICK, ["Stop", 3])
    page.get_by_text("stopped; saved").wait_for()
    at = int(page.locator("progress").get_attribute("value"))
    page.evaluate(CLICK, ["Go on", 3])
    visitor.reach(at + 5)
    press(visitor, "Stop")
    page.get_by_text("stopped; saved").wait_for()
    assert len(visitor.losses("tiny-001")) >= at + 5
    visitor.open("runs/")
    page.locator("li.run").first.wait_for()
    assert page.locator("li.run h3").all_inner_texts() == ["tiny-001"]


CLICK = """async ([names, times]) => {
  const wanted = new RegExp(`^(${names})$`);
  for (let n = 0; n < times; n++) {
    const found = [...document.querySelectorAll("button")].find((one) => wanted.test(one.innerText) && !one.disabled);
    found?.click();
    if (names.includes("|")) await new Promise((later) => setTimeout(later, n % 5 * 4));
  }
}"""

PAUSED = """() => {
  [...document.querySelectorAll("button")].find((one) => one.innerText === "Pause" && !one.disabled)?.click();
  return document.querySelector("main").innerText.includes("paused; saved");
}"""


def test_stop_ends_a_sample_however_long_it_is(visitor: Visit) -> None:
    visitor.start(run_of(50, training__sample_tokens=1_000_000))
    visitor.reach(1)
    press(visitor, "Stop")
    visitor.page.get_by_text("stopped; saved").wait_for()


def test_a_worker_that_ends_while_it_reads_the_text_is_replaced(visitor: Visit) -> None:
    page = visitor.open("train/", preset="tiny")
    page.locator("button.start:not([disabled])").wait_for()
    page.get_by_label("paste your own").check()
    page.get_by_label("Your text").fill("the cat sat on the mat. " * 40_000)
    page.wait_for_timeout(350)
    for worker in training_workers(visitor):
        worker.evaluate("self.close()")
    page.get_by_text("pasted text: 864 kB to train on").wait_for()


def test_files_of_one_name_are_noticed_once(visitor: Visit, tmp_path: Path) -> None:
    paths = [tmp_path / folder / "a.txt" for folder in ("one", "two")]
    for path in paths:
        path.parent.mkdir()
        path.write_bytes(b"the cat sat\r\n" * 200)
    page = visitor.open("train/", preset="tiny")
    page.get_by_label("files", exact=True).check()
    page.set_input_files("input[type=file]", paths)
    page.get_by_text("ends its lines with CR LF").wait_for()
    page.get_by_text("2 files: 4.7 kB to train on").wait_for()


def test_storage_that_is_cleared_under_a_run_is_filled_again(visitor: Visit) -> None:
    page = visitor.page
    visitor.start(run_of(100_000))
    visitor.reach(10)
    press(visitor, "Pause")
    page.get_by_text("paused; saved").wait_for()
    clear_storage(visitor)
    press(visitor, "Resume")
    visitor.reach(30)
    press(visitor, "Pause")
    page.get_by_text("paused; saved").wait_for()
    paused = int(page.locator("progress").get_attribute("value"))
    page.reload()
    page.get_by_text("stopped at step").wait_for()
    press(visitor, "Go on")
    visitor.reach(paused + 5)
    press(visitor, "Stop")
    page.get_by_text("stopped; saved").wait_for()
    steps = [line["step"] for line in visitor.metrics("tiny-001")]
    assert steps == list(range(steps[0], steps[-1] + 1))
    assert steps[-1] >= paused + 5


def test_what_a_full_browser_did_not_save_is_saved_when_there_is_room(visitor: Visit) -> None:
    page = visitor.page
    visitor.start(run_of(100_000))
    visitor.reach(5)
    full = limit_storage(visitor, 200_000)
    press(visitor, "Pause")
    page.get_by_text("paused; nothing was saved").wait_for()
    page.get_by_text("gives the page no more room").wait_for()
    full.detach()
    limit_storage(visitor, None)
    page.get_by_text("paused; saved").wait_for()
    assert page.get_by_text("gives the page no more room").count() == 0


def test_runs_are_deleted_in_a_full_browser(visitor: Visit) -> None:
    page = visitor.page
    visitor.start(run_of(3))
    visitor.finish()
    page.get_by_role("button", name="2 min more").wait_for()
    page.goto(visitor.address + "runs/")
    page.locator("li.run").wait_for()
    full = limit_storage(visitor, 1000)
    press(visitor, "Rename")
    page.get_by_label("new name of tiny-001").fill("other")
    page.keyboard.press("Enter")
    page.get_by_text("Cannot rename run tiny-001: this browser gives the page no more").wait_for()
    press(visitor, "Cancel")
    press(visitor, "Delete")
    page.locator("li.run").wait_for(state="detached")
    press(visitor, "Undo")
    page.get_by_text("the browser was too full to remember it").wait_for()
    full.detach()


def test_runs_of_one_name_are_deleted_one_after_the_other(visitor: Visit) -> None:
    page = visitor.page
    for _ in range(2):
        visitor.start(run_of(3))
        visitor.finish()
        page.get_by_role("button", name="2 min more").wait_for()
        page.goto(visitor.address + "runs/")
        press(visitor, "Delete")
        page.locator("li.run").wait_for(state="detached")
    page.get_by_text("Deleted runs (2").wait_for()


def test_a_prompt_of_a_megabyte_is_gone_on_from_and_copied_whole(visitor: Visit) -> None:
    visitor.context.grant_permissions(["clipboard-read", "clipboard-write"])
    page = visitor.open()
    page.locator("button[type=submit]:not([disabled])").wait_for()
    prompt = "\N{CAT FACE} sat on the mat. " * 40_000
    page.evaluate(PASTE, prompt)
    page.locator("button[type=submit]").click()
    page.locator("main .text span:not(.prompt)").first.wait_for()
    page.get_by_role("button", name="Stop").or_(page.get_by_role("button", name="Write")).click()
    assert page.locator("main .text span").count() < 10_000
    press(visitor, "Copy")
    page.get_by_role("button", name="Copied").wait_for()
    lengths = page.evaluate(
        "(prompt) => navigator.clipboard.readText().then((all) => [all.startsWith(prompt), all.length])",
        prompt,
    )
    assert lengths[0]
    assert lengths[1] > len(prompt)


PASTE = """(text) => {
  const field = document.querySelector("#prompt");
  field.value = text;
  field.dispatchEvent(new Event("input", { bubbles: true }));
}"""


@pytest.mark.parametrize("elsewhere", [False, True], ids=["alone", "and a terminal went on"])
def test_a_run_in_the_folder_outlives_its_server(
    browser: Any, site: Path, tmp_path: Path, elsewhere: bool
) -> None:
    (tmp_path / "runs").mkdir()
    lines = tmp_path / "runs" / "tiny-001" / "metrics.jsonl"
    with serving(site, tmp_path / "runs") as first:
        visitor = Visit(browser, f"{first.origin}/")
        page = visitor.page
        visitor.start(run_of(100_000))
        visitor.reach(10)
        press(visitor, "Pause")
        page.get_by_text("paused; saved").wait_for()
        press(visitor, "Resume")
    at = int(page.locator("progress").get_attribute("value"))
    visitor.reach(at + 20)
    page.get_by_text("The playground's server does not answer").first.wait_for()
    press(visitor, "Pause")
    page.get_by_text("paused; saved up to step").wait_for()
    if elsewhere:
        with lines.open("a") as metrics:
            metrics.write(lines.read_text() * 40)  # more than the page has waiting
    with serving(site, tmp_path / "runs", port=first.port):
        if elsewhere:
            page.get_by_text("went on elsewhere while the server was away").first.wait_for()
            assert lines.read_text().startswith('{"step": 1,')
        else:
            page.get_by_text(re.compile("paused; saved$")).wait_for()
            assert page.get_by_text("does not answer").count() == 0
            paused = int(page.locator("progress").get_attribute("value"))
            steps = [line["step"] for line in Run(lines.parent).metrics.read()]
            assert steps == list(range(1, paused + 1))
            assert read_checkpoint(lines.parent).state.step == paused  # type: ignore[union-attr]
        press(visitor, "Stop")
        page.get_by_text("stopped; saved").wait_for()
        assert all("Failed to load resource: net::ERR_" in one for one in visitor.complaints)
        visitor.complaints.clear()
        visitor.close()


def test_lines_that_are_no_metrics_are_left_out_of_a_run(visitor: Visit) -> None:
    page = visitor.page
    visitor.start(run_of(3))
    visitor.finish()
    page.get_by_role("button", name="2 min more").wait_for()
    page.goto(visitor.address + "runs/")
    page.evaluate(SPOIL)
    page.reload()
    press(visitor, "Train it further")
    visitor.finish()
    assert page.locator("h1").inner_text() == "tiny-001"


SPOIL = """async () => {
  const run = await (await (await navigator.storage.getDirectory()).getDirectoryHandle("runs")).getDirectoryHandle("tiny-001");
  for (const [name, line] of [["metrics", '{"step": 3, "loss": {"a": 1}, "lr": []}'], ["samples", '{"step": 3, "prompt": 5}']]) {
    const file = await run.getFileHandle(`${name}.jsonl`, { create: true });
    const stream = await file.createWritable({ keepExistingData: true });
    await stream.seek((await file.getFile()).size);
    await stream.write(`${line}\n`);
    await stream.close();
  }
}"""
