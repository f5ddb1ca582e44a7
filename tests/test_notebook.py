"""What a notebook and a script see of a run: the live output with a shell that is not real, lines, silence, comparisons."""

from __future__ import annotations

import io
import re
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import pytest

import posttrainllm
from cli_cases import write_text
from display_cases import a_record, a_start
from notebook_cases import SMALL, Cell, well_formed
from posttrainllm.errors import CheckpointError, ConfigError
from posttrainllm.notebook import live, watching
from posttrainllm.notebook.lines import Lines
from posttrainllm.notebook.live import LiveOutput
from posttrainllm.notebook.words import next_steps
from posttrainllm.runs.folder import Run as RunFolder
from posttrainllm.text.likeness import Copy, WordShare
from posttrainllm.training.observer import Outcome, Silent
from posttrainllm.training.writing import ACTIONS, Advice, Verdict


@pytest.fixture
def text(tmp_path: Path) -> Path:
    return write_text(tmp_path)


def a_verdict(*actions: Advice) -> Verdict:
    return Verdict(1.9, (), WordShare(10, 6), Copy(b"to be", 0), None, None, actions)


def an_outcome(step: int, steps: int = 1500) -> Outcome:
    return Outcome(Path("runs/small-001"), step == steps, step, [], 1.9, None, Path("x"))


# ---- the live output --------------------------------------------------------------------------------


def test_a_run_is_shown_before_its_first_step_with_what_it_costs():
    cell = Cell()
    with LiveOutput(cell, period=60) as output:
        output.started(a_start())
        assert len(cell.shown) == 1
        for words in (
            "366,432 parameters",
            "29.2 MB of memory",
            "epochs",
            "about 45 s",
            "engine cpp, build avx2",
        ):
            assert words in cell.html
        assert "can memorise the text" in cell.html, "a warning of before the start"
        well_formed(cell.html)


def test_the_output_is_drawn_no_more_often_than_its_period_and_ends_with_the_last_state():
    cell, period = Cell(), 0.1
    with LiveOutput(cell, period=period) as output:
        output.started(a_start())
        end = time.monotonic() + 0.55
        step = 0
        while time.monotonic() < end:
            step += 1
            output.stepped(a_record(step))
        output.stepped(a_record(1499))
    times = [at for at, _ in cell.shown]
    assert 2 <= len(times) <= 8
    between = [after - before for before, after in pairwise(times[:-1])]
    assert all(each > 0.8 * period for each in between), between
    assert "step 1,499 of 1,500" in cell.html
    assert not output._thread.is_alive()


def test_a_running_output_shows_losses_speed_sample_curve_and_keeps_notices():
    cell = Cell()
    with LiveOutput(cell, period=60) as output:
        output.started(a_start())
        output.noticed("the disk is full")
        for step in range(1, 501):
            output.stepped(a_record(step, 2.4, 1.951 if step == 500 else None))
        output.sampled(500, "ROMEO:\n", "Good <script>alert(1)</script> morrow\x1b[31m")
        output.noticed("the disk is full")
        output._draw()
        well_formed(cell.html)
        for words in (
            "step 500 of 1,500", "33 %", "left", "2.400", "1.951 at step 500, below triples (2.05)",
            "41,230 tokens/s", "triples 2.05", "training loss", "the disk is full", "sample at step 500",
            "&lt;script&gt;alert(1)&lt;/script&gt;",
        ):  # fmt: skip
            assert words in cell.html, words
        assert "<script" not in cell.html
        assert cell.html.count("the disk is full") == 1
        assert cell.shown[-1][1]["text/plain"] == "small-001: step 500 of 1,500, loss 2.400"


def test_an_interrupt_is_said_at_once_and_afterwards_how_to_go_on():
    cell = Cell()
    with LiveOutput(cell, period=60) as output:
        output.started(a_start())
        output.stepped(a_record(70))
        output._lock.acquire()  # a signal may come while the training thread holds it
        output.stopping()
        output._lock.release()
        output._draw()
        assert "stopping after this step" in cell.html
        output.ended(an_outcome(70))
    assert "stopped after 70 steps" in cell.html
    assert "saved" in cell.html
    assert 'run = posttrainllm.resume("small-001")' in cell.html.replace("&quot;", '"')
    assert 'posttrainllm.resume("small-001")' in cell.shown[-1][1]["text/plain"]


def test_a_run_that_an_error_cut_off_says_what_is_safe():
    for saved, words in ((0, "nothing was saved"), (40, "step 40 is saved; go on from there")):
        cell = Cell()
        with suppress(KeyboardInterrupt), LiveOutput(cell, period=60) as output:
            output.started(a_start())
            output.stepped(a_record(70))
            if saved:
                output.saved(saved, Path("x"))
            raise KeyboardInterrupt
        assert "was stopped" in cell.html
        assert words in cell.html
        assert not output._thread.is_alive()


def test_a_display_that_raises_costs_nothing_but_the_display(text, tmp_path, monkeypatch):
    cell = Cell(fails=True)
    monkeypatch.setattr(watching, "kernel_shell", lambda: SimpleNamespace(kernel=1))
    monkeypatch.setattr(watching, "new_output", lambda: cell)
    run = posttrainllm.train(text, steps=6, runs_dir=tmp_path / "runs", **SMALL)
    assert len(run.losses) == 6
    assert len(cell.shown) >= 2


def test_a_resumed_run_shows_its_curve_from_the_beginning(text, tmp_path, monkeypatch):
    run = posttrainllm.train(text, steps=6, runs_dir=tmp_path / "runs", **SMALL)
    cell = Cell()
    monkeypatch.setattr(watching, "kernel_shell", lambda: SimpleNamespace(kernel=1))
    monkeypatch.setattr(watching, "new_output", lambda: cell)
    posttrainllm.resume(run.path.name, runs_dir=run.path.parent, steps=9)
    first = cell.shown[0][1]["text/html"]
    assert "step 6 of 9" in first
    points = re.search(r'polyline points="([^"]*)"', first)
    assert points is not None
    assert len(points.group(1).split()) == 6
    assert "9 steps" in cell.html


# ---- what to do next ----------------------------------------------------------------------------------


def test_every_advice_of_a_verdict_is_said_in_python():
    start = a_start(**{"schedule.learning_rate": 1e-4})
    values = {
        "best": 1.0,
        "loss": 2.0,
        "n_bytes": 90,
        "total": 3000,
        "line": "pairs (2.48)",
        "preset": "medium",
    }
    actions = tuple(Advice(name, values) for name in ACTIONS)
    outcome = replace(an_outcome(1500), verdict=a_verdict(*actions))
    steps = next_steps(start.config, outcome)
    codes = [step.code for step in steps if step.code]
    assert codes == [
        "run.generate()",
        'run = posttrainllm.resume("small-001", steps=3000)',
        'run = posttrainllm.train("/texts/play.txt", preset="small")',
        'run = posttrainllm.train("/texts/play.txt", preset="medium")',
    ]
    assert not any("--" in step.why for step in steps)
    for code in codes:
        compile(code, "cell", "exec")


# ---- scripts ------------------------------------------------------------------------------------------


def script(lines: str, folder: Path) -> subprocess.CompletedProcess[str]:
    code = f"import posttrainllm\nfrom pathlib import Path\nsettings = {SMALL!r}\n{lines}"
    return subprocess.run(
        [sys.executable, "-c", code], cwd=folder, capture_output=True, text=True, timeout=120
    )


def test_a_script_is_silent_unless_it_asks_for_lines_on_standard_error(text, tmp_path):
    done = script(
        f"run = posttrainllm.train({str(text)!r}, steps=8, **settings)\n"
        "import sys; print('IPython' in sys.modules, len(run.losses))",
        tmp_path,
    )
    assert (done.stdout, done.stderr, done.returncode) == ("False 8\n", "", 0)
    done = script(
        f"posttrainllm.train({str(text)!r}, steps=8, progress=True, **settings)", tmp_path
    )
    assert (done.stdout, done.returncode) == ("", 0)
    lines = done.stderr.splitlines()
    assert lines[0].startswith("model     3,064 parameters (1 layer, ")
    assert any(line.startswith("engine    numpy") for line in lines)
    assert sum(line.startswith("step ") for line in lines) == 8
    assert any(line.startswith("finished 8 steps in ") for line in lines)
    assert any(line.startswith("validation loss") for line in lines)
    assert '  run = posttrainllm.resume("tiny-002", steps=16)' in lines


def test_an_observer_that_was_given_wins(text, tmp_path, capsys):
    class Counting(Silent):
        steps = 0

        def stepped(self, record):
            self.steps += 1

    observer = Counting()
    posttrainllm.train(
        text, steps=4, runs_dir=tmp_path / "runs", observer=observer, progress=True, **SMALL
    )
    assert observer.steps == 4
    assert capsys.readouterr() == ("", "")


def test_lines_on_a_stream_that_is_gone_or_knows_few_characters_stop_nothing(text, tmp_path):
    closed = io.StringIO()
    closed.close()
    narrow = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    for stream in (closed, narrow):
        lines = Lines(stream)
        lines.started(a_start())
        lines.stepped(a_record(1500))
        lines.sampled(1500, "caf\u00e9", "\u4e16\x1b[31m")
        lines.noticed("a\nb")
        lines.stopping()
        lines.ended(an_outcome(1500))
    written = narrow.buffer.getvalue().decode("ascii")
    assert "\\u4e16" in written
    assert "\x1b" not in written
    assert "notice: a b\n" in written


@pytest.mark.parametrize("shell", [None, SimpleNamespace(), SimpleNamespace(kernel=None)])
def test_a_terminal_of_ipython_is_no_notebook(shell, monkeypatch):
    monkeypatch.setitem(sys.modules, "IPython", SimpleNamespace(get_ipython=lambda: shell))
    assert live.kernel_shell() is None


def test_a_shell_with_a_kernel_is_a_notebook(monkeypatch):
    shell = SimpleNamespace(kernel=object())
    monkeypatch.setitem(sys.modules, "IPython", SimpleNamespace(get_ipython=lambda: shell))
    assert live.kernel_shell() is shell
    monkeypatch.setitem(sys.modules, "IPython", SimpleNamespace())
    assert live.kernel_shell() is None


# ---- runs ---------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("notebook")
    text = write_text(folder)
    return [
        posttrainllm.train(
            text, steps=steps, runs_dir=folder / "runs", name=name, learning_rate=rate, **SMALL
        )
        for name, steps, rate in (("one", 12, 1e-3), ("two & more", 8, 1e-2))
    ]


def test_a_run_shows_its_curve_the_facts_and_its_newest_sample_escaped(runs):
    run = runs[0]
    hostile = "<script>alert('written by a model')</script>"
    with RunFolder(run.path).samples as samples:
        samples.append({"step": 12, "prompt": "<img src=x onerror=alert(1)>", "text": hostile})
    html = run._repr_html_()
    well_formed(html)
    assert "<script" not in html
    assert "<img" not in html
    assert "&lt;script&gt;alert(&#x27;written by a model&#x27;)&lt;/script&gt;" in html
    for words in (
        "one",
        "finished",
        "step 12 of 12",
        "parameters",
        "numpy",
        "training loss",
        "validation loss",
    ):
        assert words in html, words
    assert "guessing" in html, "what counting reaches is known to who trained it"
    opened = posttrainllm.open_run(run.path)
    assert "guessing" not in opened._repr_html_()
    assert opened == run
    assert repr(run).startswith("Run('")


def test_a_damaged_run_shows_what_is_wrong_and_a_new_one_has_no_picture(tmp_path, runs):
    folder = tmp_path / "odd"
    (folder / "checkpoints").mkdir(parents=True)
    assert "config.toml" in posttrainllm.Run(folder)._repr_html_()
    (folder / "config.toml").write_text((runs[0].path / "config.toml").read_text())
    html = posttrainllm.Run(folder)._repr_html_()
    well_formed(html)
    assert "step 0 of 12" in html
    assert "<polyline" not in html
    (folder / "metrics.jsonl").write_text(
        '{"step": "x", "loss": []}\n{"step": 2, "loss": 1, "elapsed_s": "y"}\n'
    )
    (folder / "samples.jsonl").write_text('{"step": 1, "prompt": 5}\n')
    well_formed(posttrainllm.Run(folder)._repr_html_())


def test_runs_beside_each_other_are_one_picture_and_a_table(runs):
    found = posttrainllm.compare(*runs)
    lines = repr(found).splitlines()
    assert lines[0].split("  ")[0] == "run"
    for title in ("learning rate", "step", "loss", "val loss", "best val", "time"):
        assert title in lines[0]
    assert [line.split("  ")[0] for line in lines[1:]] == ["one", "two & more"]
    assert f"{runs[0].val_loss:.3f}" in lines[1]
    html = found._repr_html_()
    well_formed(html)
    assert "two &amp; more" in html
    assert html.count("<polyline") == 2
    assert "guessing" in html, "both were trained on the same text"
    named = posttrainllm.compare("one", runs[1].path, runs_dir=runs[0].path.parent)
    assert repr(named) == repr(found)
    assert "guessing" not in named._repr_html_()


def test_many_runs_are_still_told_apart_and_small(runs):
    html = posttrainllm.compare(*runs * 10)._repr_html_()
    well_formed(html)
    styles = re.findall(
        r'<path d="M1 5h22" stroke="(\S+)" stroke-width="2.5" stroke-dasharray="([^"]*)"', html
    )
    assert len(styles) == 20
    assert len(set(styles)) == 18
    assert len(html) < 60_000


def test_what_cannot_be_compared_is_said_at_once(runs, tmp_path):
    with pytest.raises(ConfigError, match="two runs or more"):
        posttrainllm.compare(runs[0])
    with pytest.raises(CheckpointError, match="there is no run"):
        posttrainllm.compare(runs[0], "three", runs_dir=tmp_path)
