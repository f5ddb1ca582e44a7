"""A notebook and the Python API when something is wrong: damaged runs, folders that are gone, arguments of the wrong kind."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest

import posttrainllm
from cli_cases import write_text
from display_cases import a_record, a_start
from notebook_cases import SMALL, Cell, well_formed
from posttrainllm.errors import PosttrainError
from posttrainllm.notebook import live
from posttrainllm.notebook.live import LiveOutput


@pytest.fixture(scope="module")
def text(tmp_path_factory) -> Path:
    return write_text(tmp_path_factory.mktemp("text"))


@pytest.fixture(scope="module")
def runs(tmp_path_factory, text):
    folder = tmp_path_factory.mktemp("trouble")
    return [posttrainllm.train(text, steps=12, runs_dir=folder / "runs", name="one", **SMALL)]


LINES = {
    b'{"a": 1}\n': [],
    b'{"step": 1, "loss": null, "val_loss": "x"}\n': [],
    b'{"step": "x", "loss": 2, "val_loss": true}\n': [2],
    b'{"step": 1e400, "loss": 2}\n': [2],
    b'{"step": %s, "loss": %s}\n' % (b"9" * 400, b"9" * 400): [],
    b'{"step": 3, "loss": 2.5, "val_loss": 1': [],  # torn
}


@pytest.mark.parametrize(("lines", "losses"), LINES.items())
def test_metrics_that_are_no_numbers_are_left_out_of_everything_that_is_shown(
    lines, losses, runs, tmp_path
):
    run = posttrainllm.Run(Path(shutil.copytree(runs[0].path, tmp_path / "odd")))
    (run.path / "metrics.jsonl").write_bytes(lines)
    assert (run.losses, run.val_loss) == (losses, None)
    assert repr(run).startswith(f"Run({str(run.path)!r}, tiny, step ")
    found = posttrainllm.compare(runs[0], run)
    assert len(repr(found).splitlines()) == 3
    for html in (run._repr_html_(), found._repr_html_()):
        well_formed(html)


def test_a_run_whose_folder_is_gone_or_damaged_is_shown_as_that(runs, tmp_path):
    run = posttrainllm.Run(Path(shutil.copytree(runs[0].path, tmp_path / "gone")))
    found = posttrainllm.compare(runs[0], run)
    for damage, words in (
        (lambda: (run.path / "metrics.jsonl").write_text("{\n{}\n"), "line 1 is not JSON"),
        (lambda: shutil.rmtree(run.path), "config.toml cannot be read"),
    ):
        damage()
        for shown in (repr(run), repr(found), run._repr_html_(), found._repr_html_()):
            assert words in shown
        for html, hint in ((run._repr_html_(), "again"), (found._repr_html_(), "again")):
            well_formed(html)
            assert hint in html, "the next step"


def test_a_folder_whose_name_is_no_text_is_shown_in_a_notebook(runs, tmp_path):
    folder = tmp_path / os.fsdecode(b"r\xff")
    run = posttrainllm.Run(Path(shutil.copytree(runs[0].path, folder / "one")))
    assert "r\ufffd/one" in run._repr_html_()
    for shown in (run._repr_html_(), repr(run), repr(posttrainllm.compare(run, run))):
        shown.encode()


@pytest.mark.parametrize(
    "name", ["<script>alert(1)<", 'a"onload=x', "&amp;", "x'y", "\u202eevil", "n\nl", "\x1b[31mred"]
)
def test_a_copied_folder_of_any_name_is_shown_escaped(name, runs, tmp_path):
    run = posttrainllm.Run(Path(shutil.copytree(runs[0].path, tmp_path / name)))
    found = posttrainllm.compare(runs[0], run)
    for html in (run._repr_html_(), found._repr_html_()):
        well_formed(html)
        for odd in ("<script", '"onload', "\x1b", "\u202e"):
            assert odd not in html
    for plain in (repr(run), repr(found)):
        assert "\x1b" not in plain
        assert "\u202e" not in plain


def test_what_python_gives_wrongly_is_said_in_its_words(runs, text, tmp_path):
    folder, name = runs[0].path.parent, runs[0].path.name
    for call, words in (
        (lambda: posttrainllm.train(text, steps=0), "got 0\n"),
        (lambda: posttrainllm.train(5), "corpus is a name or a path, got 5"),
        (lambda: posttrainllm.train([5]), "a text of corpus is a name or a path"),
        (lambda: posttrainllm.train([]), "corpus is an empty list"),
        (lambda: posttrainllm.train("To be\nor not"), "got a text of 12 characters"),
        (lambda: posttrainllm.train(text, name=5, **SMALL), "name is a text, got 5"),
        (lambda: posttrainllm.train(text, runs_dir=5), "runs_dir is a name or a path"),
        (lambda: posttrainllm.train(text, observer=object()), "has no method"),
        (lambda: posttrainllm.compare([name, name]), "compare(*runs)"),
        (lambda: posttrainllm.compare(1, 2), "a run is a name or a path, got 1"),
        (lambda: posttrainllm.load(None), "a model is a name or a path, got None"),
        (lambda: runs[0].generate(5), "a prompt is a text, got 5"),
        (lambda: runs[0].inspect("ab").attention("x"), "layer is a whole number, got 'x'"),
        (lambda: runs[0].inspect("ab").candidates(0.5), "position is a whole number"),
        (
            lambda: posttrainllm.resume(name, runs_dir=folder),
            f'give it more: posttrainllm.resume("one", steps=24, runs_dir="{folder}")',
        ),
        (
            lambda: posttrainllm.resume(name, runs_dir=folder, steps=14, learning_rate=0.5),
            "or add allow_change=True to go on",
        ),
        (
            lambda: posttrainllm.train(text, name=name, runs_dir=folder, **SMALL),
            f'go on with it: posttrainllm.resume("one", runs_dir="{folder}"), or give another name',
        ),
    ):
        with pytest.raises(PosttrainError) as caught:
            call()
        assert words in str(caught.value)
        assert "--" not in str(caught.value)
        assert "flag" not in str(caught.value)


def test_a_script_without_standard_error_trains_all_the_same(text, tmp_path, monkeypatch):
    monkeypatch.setattr("sys.stderr", None)
    run = posttrainllm.train(text, steps=2, runs_dir=tmp_path / "runs", progress=True, **SMALL)
    assert len(run.losses) == 2


def test_a_run_that_cannot_be_saved_yet_says_so_and_how_to_give_up():
    cell = Cell()
    with LiveOutput(cell, period=60) as output:
        output.started(a_start())
        output.stepped(a_record(1500))
        output.noticed("saving is tried again every 5 s; an interrupt gives up")
        output._draw()
        assert "saving" in cell.html
        assert "an interrupt gives up" in cell.html
        assert "judging" not in cell.html
        output.saved(1500, Path("x"))
        output._draw()
        assert "judging the model" in cell.html


def test_a_process_forked_from_a_kernel_is_no_notebook(monkeypatch):
    for pid, found in ((os.getpid(), True), (os.getpid() + 1, False)):
        shell = SimpleNamespace(kernel=SimpleNamespace(session=SimpleNamespace(pid=pid)))
        monkeypatch.setattr(
            live,
            "sys",
            SimpleNamespace(
                modules={"IPython": SimpleNamespace(get_ipython=lambda shell=shell: shell)}
            ),
        )
        assert (live.kernel_shell() is not None) is found
