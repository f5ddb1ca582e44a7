"""A run folder that carries its own text: what a run needs that was trained on another machine or in a browser."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

import posttrainllm
from posttrainllm.errors import CorpusError
from posttrainllm.runs.folder import CORPUS_FILE

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
