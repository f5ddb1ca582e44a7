"""A run folder that carries its own text: what a run needs that was trained on another machine or in a browser."""

from __future__ import annotations

import shutil
import zipfile
from pathlib import Path

import pytest

import posttrainllm
from posttrainllm.errors import CorpusError
from posttrainllm.runs.folder import CORPUS_FILE
from posttrainllm.training.exporting import export_model
from posttrainllm.training.importing import import_model

SIZES = {
    "n_layer": 1,
    "n_embd": 12,
    "n_head": 3,
    "n_ctx": 8,
    "batch_size": 2,
    "eval_windows": 4,
    "final_windows": 4,
    "sample_tokens": 0,
    "verdict_samples": 0,
    "warmup_steps": 2,
}


def trained(folder: Path, text: Path, steps: int, **settings: int) -> posttrainllm.Run:
    given = {**SIZES, **settings}
    return posttrainllm.train(
        text, preset="tiny", engine="cpp", steps=steps, runs_dir=folder, name="own", **given
    )


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "mine.txt"
    path.write_text("the quick brown fox jumps over the lazy dog; " * 40)
    return path


def moved(run: posttrainllm.Run, text: Path, folder: Path) -> Path:
    """The run with its text inside, in another place; the original text is gone."""
    target = folder / "own"
    shutil.copytree(run.path, target)
    shutil.move(text, target / CORPUS_FILE)
    return target


def test_a_run_with_its_own_text_goes_on_where_the_original_is_gone(
    tmp_path: Path, text: Path
) -> None:
    whole = trained(tmp_path / "whole", text, 8)
    half = trained(tmp_path / "half", text, 8, checkpoint_every=4)
    shutil.rmtree(half.path / "checkpoints" / "step-000008")
    moved(half, text, tmp_path / "there")
    resumed = posttrainllm.resume("own", runs_dir=tmp_path / "there")
    assert resumed.losses == whole.losses
    assert resumed.model.measure(samples=1).corpus.name == CORPUS_FILE


def test_the_own_text_must_be_the_one_that_the_run_was_trained_on(
    tmp_path: Path, text: Path
) -> None:
    target = moved(trained(tmp_path / "runs", text, 4), text, tmp_path / "there")
    (target / CORPUS_FILE).write_text("another text, long enough for a window " * 20)
    with pytest.raises(CorpusError, match="is not the text of this run"):
        posttrainllm.resume("own", runs_dir=tmp_path / "there", steps=8)


def test_an_exported_zip_brings_its_text_and_goes_on_elsewhere(tmp_path: Path, text: Path) -> None:
    whole = trained(tmp_path / "whole", text, 8)
    half = trained(tmp_path / "half", text, 8, checkpoint_every=4)
    shutil.rmtree(half.path / "checkpoints" / "step-000008")
    made = export_model("own", "zip", tmp_path / "own.zip", runs_dir=tmp_path / "half")
    assert made.notices == ()
    with zipfile.ZipFile(made.path) as archive:
        assert archive.read(f"own/{CORPUS_FILE}") == text.read_bytes()
    text.unlink()
    import_model(made.path, runs_dir=tmp_path / "there")
    assert posttrainllm.resume("own", runs_dir=tmp_path / "there").losses == whole.losses
    again = export_model("own", "zip", tmp_path / "again.zip", runs_dir=tmp_path / "there")
    assert again.notices == ()


def test_a_zip_without_its_text_says_so(tmp_path: Path, text: Path) -> None:
    trained(tmp_path / "runs", text, 4)
    text.unlink()
    made = export_model("own", "zip", tmp_path / "own.zip", runs_dir=tmp_path / "runs")
    assert "the text is not in it" in made.notices[0]
    assert list(tmp_path.glob(".own*")) == []


def test_a_run_on_tinyshakespeare_carries_no_text(tmp_path: Path) -> None:
    posttrainllm.train(preset="tiny", engine="cpp", steps=4, name="own", runs_dir=tmp_path, **SIZES)
    made = export_model("own", "zip", tmp_path / "own.zip", runs_dir=tmp_path)
    with zipfile.ZipFile(made.path) as archive:
        assert f"own/{CORPUS_FILE}" not in archive.namelist()
