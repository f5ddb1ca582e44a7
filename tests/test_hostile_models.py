"""Damaged and hostile model files: each is refused in one line, quickly, in bounded memory, and leaves nothing behind."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from cli_cases import cli
from hostile_folder_cases import FOLDERS
from hostile_folders import whole_shards
from hostile_tinygpt import TINYGPT
from hostile_zip_cases import OTHERS, ZIPS
from hostile_zips import run_folder, zipped
from import_cases import model_folder, tinygpt
from needs import require
from posttrainllm import load
from posttrainllm.errors import CheckpointError
from posttrainllm.lab.peak_memory import forget_peak, peak_bytes
from posttrainllm.machine import process_memory
from posttrainllm.training.importing import import_model

require("tokenizers")

CASES = {
    f"{kind}: {name}": case
    for kind, table in (("folder", FOLDERS), ("tinygpt", TINYGPT), ("zip", ZIPS), ("file", OTHERS))
    for name, case in table.items()
}

MOST_SECONDS = 20  # of a shared machine; each takes a fraction of a second
MOST_MEMORY = 96 << 20  # a header of 8 MB of JSON is the largest thing that is ever read here


@contextmanager
def bounded() -> Iterator[None]:
    """Fail what takes too long or too much memory."""

    def late(*_: object) -> None:
        raise AssertionError(f"not refused within {MOST_SECONDS} s")

    before = process_memory()
    forget_peak()
    old = signal.signal(signal.SIGALRM, late)
    signal.alarm(MOST_SECONDS)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, old)
    peak = peak_bytes()
    if before and peak:
        assert peak - before <= MOST_MEMORY


def test_there_are_a_hundred_and_more_of_them():
    assert len(CASES) >= 100


@pytest.mark.parametrize("case", CASES)
def test_a_hostile_file_is_refused_in_one_line_and_leaves_nothing(tmp_path, case):
    make, words = CASES[case]
    (tmp_path / "given").mkdir()
    source = make(tmp_path / "given")
    runs = tmp_path / "runs"
    with bounded(), pytest.raises(CheckpointError) as caught:
        import_model(source, runs_dir=runs)
    message = caught.value.message
    assert words in message
    assert "\n" not in message
    assert len(message) < 600
    assert ".new-" not in message, "it names a folder that is gone"
    assert caught.value.hint
    assert not runs.exists() or not list(runs.iterdir())
    outside = {path.name for path in tmp_path.iterdir()}
    assert outside <= {"given", "runs"}, "something was written outside"
    assert not (tmp_path / "given" / "RAN").exists(), "a pickle was loaded"


@pytest.mark.parametrize("case", ["tinygpt: nan weight", "zip: up and out", "folder: pickle"])
def test_a_refusal_reaches_the_shell_as_one_line_and_code_2(tmp_path, case):
    make, words = CASES[case]
    (tmp_path / "given").mkdir()
    result = cli("import", make(tmp_path / "given"), "--runs-dir", tmp_path / "runs")
    assert result.code == 2
    assert result.out == ""
    lines = result.err.splitlines()
    assert len(lines) == 2
    assert lines[0].startswith("error: ")
    assert words in lines[0]


@pytest.mark.parametrize("make", [model_folder, whole_shards, tinygpt, zipped(), run_folder])
def test_the_same_files_undamaged_are_taken(tmp_path, make):
    """Without this, a refusal of everything would pass."""
    (tmp_path / "given").mkdir()
    made = import_model(make(tmp_path / "given"), runs_dir=tmp_path / "runs")
    assert made.checkpoint.path.is_dir()
    assert made.notices == ()


def cut_short(path: Path, runs: Path, step: int) -> None:
    """Import every beginning of a file, whose end comes nearer by ``step`` bytes each time."""
    content = path.read_bytes()
    places = {*range(0, len(content), step), *range(64), *range(len(content) - 64, len(content))}
    for length in sorted(place for place in places if place < len(content)):
        path.write_bytes(content[:length])
        with pytest.raises(CheckpointError) as caught:
            import_model(path, runs_dir=runs)
        assert "\n" not in caught.value.message
    assert not list(runs.iterdir())


@pytest.mark.parametrize("dtype", ["fp32", "fp16", "int4"])
def test_a_tinygpt_file_cut_off_anywhere_is_refused(tmp_path, dtype):
    path = tinygpt(tmp_path, dtype=dtype)
    cut_short(path, tmp_path / "runs", max(1, path.stat().st_size // 80))


def test_a_zip_cut_off_anywhere_is_refused(tmp_path):
    path = zipped()(tmp_path)
    cut_short(path, tmp_path / "runs", path.stat().st_size // 80)


def test_weights_cut_off_anywhere_are_refused(tmp_path):
    model = model_folder(tmp_path)
    path = model / "model.safetensors"
    content = path.read_bytes()
    places = [*range(0, len(content), len(content) // 80), *range(len(content) - 64, len(content))]
    for length in places:
        path.write_bytes(content[:length])
        with pytest.raises(CheckpointError, match="is cut off|not JSON|alone should"):
            import_model(model, runs_dir=tmp_path / "runs")


def test_a_zip_may_have_files_that_are_no_part_of_a_run_and_they_stay_inside(tmp_path):
    path = zipped(lambda files: files.update({"beer/evil.py": b"import os", "beer/.lock": b"x"}))(
        tmp_path
    )
    made = import_model(path, runs_dir=tmp_path / "runs")
    assert made.notices == ("left out a file that is no part of a run: 'evil.py'",)
    assert {p.name for p in made.path.iterdir()} == {"config.toml", "metrics.jsonl", "checkpoints"}


def test_opening_without_importing_refuses_the_same(tmp_path):
    for case in ("zip: up and out", "tinygpt: nan weight", "zip: bomb", "file: a pickle"):
        given = tmp_path / case.replace(":", "").replace(" ", "-")
        given.mkdir()
        make, words = CASES[case]
        with pytest.raises(CheckpointError) as caught:
            load(str(make(given)), runs_dir=tmp_path)
        assert words in caught.value.message
