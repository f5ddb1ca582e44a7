"""The Runs page in Chromium, where runs lie in the browser's file system, and in front of ``posttrainllm play``."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

import posttrainllm
from model_cases import train_config
from posttrainllm.config import changed_settings, replace
from posttrainllm.runs.checkpoint import read_checkpoint
from posttrainllm.runs.folder import Run
from server_cases import served as serving
from site_visits import Visit, visit
from web import WEB
from web_storage import HALF, STEPS, python_run, unzipped, zipped

SHORT = {
    "training.eval_windows": 4,
    "training.final_windows": 8,
    "training.verdict_samples": 1,
    "training.sample_tokens": 8,
    "training.sample_every": 0,
}
ROOM = "navigator.storage.estimate().then((found) => found.usage)"


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> posttrainllm.Run:
    """A run of the terminal, undisturbed, with a verdict of one sample at its end."""
    return python_run(tmp_path_factory.mktemp("whole"), "run", **SHORT)


def half_of(run: posttrainllm.Run, folder: Path, name: str = "run") -> Path:
    """The same run as it was when it was stopped half-way."""
    target = folder / name
    shutil.copytree(run.path, target)
    shutil.rmtree(target / "checkpoints" / f"step-{STEPS:06d}")
    Run(target).start_from(HALF)
    return target


def opened(visitor: Visit) -> Any:
    """The page, empty and ready."""
    page = visitor.open("runs/")
    page.get_by_text("There is no run yet").wait_for()
    return page


def card(visitor: Visit, name: str) -> Any:
    """A run on the page."""
    page = visitor.page
    return page.locator("li.run", has=page.get_by_role("heading", name=name, exact=True))


def open_file(visitor: Visit, path: Path, name: str) -> None:
    visitor.page.set_input_files("input[type=file][multiple]", path)
    card(visitor, name).wait_for()


def archive(run: Path, folder: Path) -> Path:
    path = folder / f"{run.name}.zip"
    path.write_bytes(zipped(run))
    return path


def saved(visitor: Visit, name: str, folder: Path) -> Path:
    """The run as it comes out of the page, unpacked."""
    card(visitor, name).get_by_role("button", name="Download", exact=True).click()
    with visitor.page.expect_download() as found:
        card(visitor, name).get_by_role("button", name="Download .zip").click()
    assert found.value.suggested_filename == f"{name}.zip"
    found.value.save_as(folder / "out.zip")
    return unzipped(folder / "out.zip", folder)


def test_a_run_of_the_terminal_goes_on_in_the_page_and_back_with_the_same_losses(
    visitor: Visit, whole: posttrainllm.Run, tmp_path: Path
) -> None:
    opened(visitor)
    open_file(visitor, archive(half_of(whole, tmp_path), tmp_path), "run")
    assert f"{HALF} of {STEPS}" in card(visitor, "run").inner_text()
    card(visitor, "run").get_by_role("button", name="Go on").click()
    visitor.finish()
    visitor.page.get_by_role("link", name="Runs", exact=True).click()
    card(visitor, "run").get_by_text("finished").wait_for()
    back = saved(visitor, "run", tmp_path / "back")
    lines = Run(back).metrics.read()
    assert [line["loss"] for line in lines] == whole.losses
    assert lines[-1]["val_loss"] == pytest.approx(whole.val_loss, rel=1e-6)
    kept, wanted = read_checkpoint(back), read_checkpoint(whole.path)
    for name, array in wanted.params.items():
        assert kept.params[name].tobytes() == array.tobytes(), name
    further = posttrainllm.resume("run", runs_dir=back.parent, steps=STEPS + 3)
    wanted_further = posttrainllm.resume(
        "run", runs_dir=shutil.copytree(whole.path.parent, tmp_path / "further"), steps=STEPS + 3
    )
    assert further.losses == wanted_further.losses


def test_runs_are_compared_renamed_deleted_and_brought_back(
    visitor: Visit, whole: posttrainllm.Run, tmp_path: Path
) -> None:
    page = opened(visitor)
    for name in ("run", "other"):
        open_file(visitor, archive(half_of(whole, tmp_path, name), tmp_path), name)
    card(visitor, "run").get_by_role("button", name="Download", exact=True).click()
    page.get_by_text("Try one setting with three values").click()
    page.add_script_tag(path=WEB / "node_modules" / "axe-core" / "axe.min.js")
    for theme in ("light", "dark"):
        page.evaluate("(theme) => (document.documentElement.dataset.theme = theme)", theme)
        page.evaluate(DRAWN)  # the chart is drawn anew in the theme's colours
        assert serious(page) == []
    chart = page.get_by_role("img", name="Loss over steps")
    chart.wait_for()
    assert all(name in chart.get_attribute("aria-label") for name in ("run", "other"))
    page.get_by_label("show the curve of other").uncheck()
    page.wait_for_function("!document.querySelector('.plot').ariaLabel.includes('other')")
    card(visitor, "other").get_by_role("button", name="Rename").click()
    page.get_by_label("new name of other").fill("run")
    page.get_by_role("button", name="Save the name").click()
    page.get_by_text("There is a run run already").wait_for()
    page.get_by_label("new name of other").fill("a/b")
    page.keyboard.press("Enter")
    page.get_by_text("must not hold path separators").wait_for()
    page.get_by_label("new name of other").fill("a better name")
    page.keyboard.press("Enter")
    card(visitor, "a better name").wait_for()
    page.reload()
    card(visitor, "a better name").get_by_role("button", name="Delete").click()
    card(visitor, "a better name").wait_for(state="detached")
    page.get_by_role("button", name="Undo").click()
    card(visitor, "a better name").wait_for()
    card(visitor, "a better name").get_by_role("button", name="Delete").click()
    card(visitor, "a better name").wait_for(state="detached")
    page.reload()
    page.get_by_text("Deleted runs (1").click()
    before = page.evaluate(ROOM)
    page.get_by_role("button", name="Free the room now").click()
    page.get_by_text("Deleted runs").wait_for(state="detached")
    assert page.evaluate(ROOM) < before
    card(visitor, "run").wait_for()


def test_bad_files_are_refused_in_one_line(visitor: Visit, tmp_path: Path) -> None:
    page = opened(visitor)
    for name, content, wanted in (
        ("notes.docx", b"hello", "notes.docx is no run and no model that this page opens"),
        ("model.bin", b"\x80\x04", "is a pickle, which can run any program"),
        ("run.zip", b"PK\x03\x04 nothing", "run.zip is no zip archive"),
        ("x.tinygpt", b"GGUF" + bytes(40), "x.tinygpt is no .tinygpt file"),
        ("m.safetensors", bytes(4), "m.safetensors is cut off"),
    ):
        path = tmp_path / name
        path.write_bytes(content)
        page.set_input_files("input[type=file][multiple]", path)
        page.locator(".notice.bad", has_text=wanted[1:]).wait_for()
    assert page.locator("li.run").count() == 0


def test_a_run_that_is_open_in_another_tab_is_not_opened_twice(
    visitor: Visit, whole: posttrainllm.Run, tmp_path: Path
) -> None:
    visitor.start(replace(train_config("tiny"), {**SHORT, "training.steps": 100_000}))
    visitor.reach(20)
    other = visitor.context.new_page()
    other.goto(visitor.address + "runs/")
    row = other.locator("li.run")
    row.get_by_text("training now").wait_for()
    assert row.get_by_role("button", name="Delete").is_disabled()
    other.goto(visitor.address + "train/?run=tiny-001")
    other.get_by_text("is open on the Train page, here or in another tab").wait_for()
    visitor.page.get_by_role("button", name="Stop").click()
    visitor.page.get_by_text("stopped; saved").wait_for()
    other.goto(visitor.address + "runs/")
    row.get_by_text("stopped", exact=True).wait_for()


def test_what_was_half_written_is_passed_over(
    visitor: Visit, whole: posttrainllm.Run, tmp_path: Path
) -> None:
    page = opened(visitor)
    open_file(visitor, archive(half_of(whole, tmp_path), tmp_path), "run")
    page.evaluate(TEAR)  # as a worker that was killed while it wrote step 8 leaves it
    card(visitor, "run").get_by_role("button", name="Go on").click()
    page.get_by_text("step-000008 is not complete").wait_for()
    visitor.finish()
    assert visitor.losses("run") == whole.losses


TEAR = """async () => {
  const root = await (await navigator.storage.getDirectory()).getDirectoryHandle("runs");
  for await (const [, run] of root.entries()) {
    const folder = await run.getDirectoryHandle("checkpoints");
    const half = await folder.getDirectoryHandle("step-000008", { create: true });
    const stream = await (await half.getFileHandle("model.safetensors", { create: true })).createWritable();
    await stream.write(new Uint8Array(1000));
    await stream.close();
    const lines = await run.getFileHandle("metrics.jsonl");
    const more = await lines.createWritable({ keepExistingData: true });
    await more.seek((await lines.getFile()).size);
    await more.write('{"step": 7, "loss": 1.0, "val_loss": null}\\n{"step": 8, "lo');
    await more.close();
  }
}"""


def test_a_full_browser_says_so_and_loses_nothing(
    visitor: Visit, whole: posttrainllm.Run, tmp_path: Path
) -> None:
    page = opened(visitor)
    open_file(visitor, archive(half_of(whole, tmp_path), tmp_path), "run")
    quota = visitor.context.new_cdp_session(page)
    origin = visitor.address.rstrip("/")
    used = page.evaluate(ROOM)
    quota.send("Storage.overrideQuotaForOrigin", {"origin": origin, "quotaSize": used + 20_000})
    card(visitor, "run").get_by_role("button", name="Go on").click()
    page.get_by_text("this browser gives the page no more room").wait_for()
    page.get_by_text("not saved").first.wait_for()
    quota.send("Storage.overrideQuotaForOrigin", {"origin": origin})
    page.goto(visitor.address + "runs/")
    run = saved(visitor, "run", tmp_path / "out")
    assert read_checkpoint(run).state.step == HALF  # type: ignore[union-attr]
    assert [folder.name for folder in (run / "checkpoints").iterdir()] == ["step-000006"]


def test_a_text_of_ones_own_is_asked_for_and_kept(visitor: Visit, tmp_path: Path) -> None:
    text = tmp_path / "mine.txt"
    text.write_text("the quick brown fox jumps over the lazy dog; " * 60)
    own = python_run(tmp_path / "whole", "run", **SHORT, **{"data.corpus": [str(text)]})
    page = opened(visitor)
    open_file(visitor, archive(half_of(own, tmp_path), tmp_path), "run")
    card(visitor, "run").get_by_role("button", name="Go on").click()
    page.get_by_text("trained on a text that is not in this browser").wait_for()
    wrong = tmp_path / "wrong.txt"
    wrong.write_text("another text")
    page.get_by_label("the text of run").set_input_files(wrong)
    page.get_by_text("is not the text of run run").wait_for()
    page.get_by_label("the text of run").set_input_files(text)
    page.get_by_text("trained on a text that is not in this browser").wait_for(state="detached")
    card(visitor, "run").get_by_role("button", name="Go on").click()
    visitor.finish()
    assert visitor.losses("run") == own.losses
    page.get_by_role("link", name="Runs", exact=True).click()
    card(visitor, "run").get_by_text("finished").wait_for()
    back = saved(visitor, "run", tmp_path / "back")
    assert (back / "corpus.txt").read_bytes() == text.read_bytes()


def test_a_browser_that_lets_only_workers_write_keeps_runs_too(
    browser: Any, address: str, whole: posttrainllm.Run, tmp_path: Path
) -> None:
    with visit(browser, address) as visitor:
        visitor.context.add_init_script("delete FileSystemFileHandle.prototype.createWritable")
        page = opened(visitor)
        open_file(visitor, archive(half_of(whole, tmp_path), tmp_path), "run")
        card(visitor, "run").get_by_role("button", name="Rename").click()
        page.get_by_label("new name of run").fill("renamed")
        page.keyboard.press("Enter")
        card(visitor, "renamed").wait_for()
        page.reload()
        back = saved(visitor, "renamed", tmp_path / "back")
        assert Run(back).metrics.read() == Run(tmp_path / "run").metrics.read()
        assert read_checkpoint(back).state == read_checkpoint(tmp_path / "run").state


def test_a_sweep_of_three_values_lands_on_the_page(visitor: Visit) -> None:
    page = opened(visitor)
    page.get_by_text("Try one setting with three values").click()
    page.get_by_label("size").select_option("tiny")
    page.get_by_label("setting").select_option("training.steps")
    for k, value in enumerate(("4", "4", "6"), 1):
        page.get_by_label(f"value {k}").fill(value)
    page.get_by_text("4 stands there twice").wait_for()
    page.get_by_label("value 2").fill("5")
    page.get_by_role("button", name="Start three runs").click()
    for steps in (4, 5, 6):
        card(visitor, f"tiny-steps-{steps}").get_by_text("finished").wait_for()
        assert f"{steps} of {steps}" in card(visitor, f"tiny-steps-{steps}").inner_text()
    label = page.get_by_role("img", name="Loss over steps").get_attribute("aria-label")
    assert all(f"tiny-steps-{steps}" in label for steps in (4, 5, 6))


DRAWN = "new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))"


def serious(page: Any) -> list[str]:
    found = page.evaluate("axe.run()")["violations"]
    return [
        f"{one['id']}: {one['nodes'][0]['html']}: {one['nodes'][0]['failureSummary']}"
        for one in found
        if one["impact"] in ("serious", "critical")
    ]


def test_runs_of_the_terminal_are_there_live_and_the_tab_goes_on_with_them(
    browser: Any, site: Path, whole: posttrainllm.Run, tmp_path: Path
) -> None:
    half = half_of(whole, tmp_path / "runs")
    with serving(site, half.parent) as server, visit(browser, f"{server.origin}/") as visitor:
        visitor.open("runs/")
        card(visitor, "run").get_by_text(f"{HALF} of {STEPS}").wait_for()
        with (half / "metrics.jsonl").open("a") as lines:  # a terminal goes on
            lines.write(json.dumps({**Run(whole.path).metrics.read()[HALF]}) + "\n")
        card(visitor, "run").get_by_text(f"{HALF + 1} of {STEPS}").wait_for()
        card(visitor, "run").get_by_role("button", name="Go on").click()
        visitor.finish()
        resumed = posttrainllm.open_run("run", runs_dir=server.runs)
        assert resumed.losses == whole.losses
        assert read_checkpoint(resumed.path).state.step == STEPS  # type: ignore[union-attr]
        visitor.page.get_by_role("link", name="Runs", exact=True).click()
        card(visitor, "run").get_by_role("button", name="Copy into this browser").click()
        visitor.page.get_by_text("Copied into this browser as run").wait_for()
        visitor.page.locator("li.run").nth(1).wait_for()
        visitor.page.get_by_role("button", name="Save into runs/").click()
        visitor.page.get_by_text("Saved into runs/ as run-2").wait_for()
        again = read_checkpoint(server.runs / "run-2")
        assert again.state.step == STEPS  # type: ignore[union-attr]


def test_a_new_run_of_a_served_page_lies_in_runs_and_is_the_terminals(
    browser: Any, site: Path, tmp_path: Path
) -> None:
    config = replace(
        train_config("tiny"),
        {**SHORT, "training.steps": 12, "training.eval_every": 6, "schedule.warmup_steps": 4},
    )
    (tmp_path / "runs").mkdir()
    with (
        serving(site, tmp_path / "runs") as server,
        visit(browser, f"{server.origin}/") as visitor,
    ):
        visitor.start(config)
        visitor.finish()
        run = posttrainllm.open_run("tiny-001", runs_dir=server.runs)
        changes = {key.replace(".", "__"): value for key, value, _ in changed_settings(run.config)}
        wanted = posttrainllm.train(preset="tiny", runs_dir=tmp_path / "here", **changes)
        assert run.config.engine.name == "wasm"
        assert run.losses == wanted.losses
        visitor.open("runs/")  # gives the run back
        card(visitor, "tiny-001").get_by_text("finished").wait_for()
        further = posttrainllm.resume("tiny-001", runs_dir=server.runs, steps=15)
        again = posttrainllm.resume(wanted.path.name, runs_dir=wanted.path.parent, steps=15)
        assert further.losses == again.losses
        card(visitor, "tiny-001").get_by_text("15 of 15").wait_for()


def test_a_paused_run_of_a_served_page_is_offered_after_a_reload(
    browser: Any, site: Path, tmp_path: Path
) -> None:
    (tmp_path / "runs").mkdir()
    with serving(site, tmp_path / "runs") as server, visit(browser, f"{server.origin}/") as visitor:
        visitor.open("train/", preset="tiny")
        visitor.page.locator("button.start:not([disabled])").click()
        visitor.reach(20)
        visitor.page.get_by_role("button", name="Pause").click()
        visitor.page.get_by_text("paused; saved").wait_for()
        visitor.page.reload()  # the server holds the run for the page that left, for a moment
        visitor.page.get_by_text("stopped at step").wait_for()
