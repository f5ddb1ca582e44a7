"""The Python API as a notebook uses it: names of settings, what objects show, what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest

import posttrainllm
from posttrainllm.config import SamplingConfig
from posttrainllm.errors import ConfigError
from posttrainllm.training.models import Sampling

SMALL = {
    "preset": "tiny",
    "steps": 3,
    "n_layer": 1,
    "batch_size": 2,
    "sample_tokens": 5,
    "verdict_samples": 0,
}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> posttrainllm.Run:
    return posttrainllm.train(
        runs_dir=tmp_path_factory.mktemp("runs"), learning_rate=1e-3, engine__threads=1, **SMALL
    )


def test_settings_are_given_by_their_own_names(run: posttrainllm.Run) -> None:
    config = run.config
    assert (config.schedule.learning_rate, config.model.n_layer, config.engine.threads) == (
        1e-3,
        1,
        1,
    )
    assert len(run.losses) == config.training.steps == 3


def test_a_run_and_a_model_show_themselves_in_one_line(run: posttrainllm.Run) -> None:
    assert repr(run).startswith("Run('")
    assert "tiny, step 3 of 3, validation loss" in repr(run)
    assert repr(run.model).startswith("Model(")
    assert "step 3)" in repr(run.model)
    assert len(repr(run.model)) < 300


def test_a_run_writes_and_goes_on(run: posttrainllm.Run) -> None:
    assert len(run.generate("ROMEO:", max_tokens=4, temperature=0)) >= 1
    more = posttrainllm.resume(run.path.name, runs_dir=run.path.parent, steps=5)
    assert len(more.losses) == 5


def test_a_model_is_named_by_a_path_too(run: posttrainllm.Run, tmp_path: Path) -> None:
    written = posttrainllm.load(run.path).generate("ROMEO:", max_tokens=4, seed=3)
    assert written == posttrainllm.load(str(run.path)).generate("ROMEO:", max_tokens=4, seed=3)
    assert posttrainllm.open_run(run.path).path == run.path
    more = posttrainllm.train(start_from=run.path, runs_dir=tmp_path, **{**SMALL, "steps": 1})
    assert more.config.training.start_from == str(
        posttrainllm.load(run.path).checkpoint.path.resolve()
    )


def test_a_model_takes_the_same_arguments_as_its_run(run: posttrainllm.Run) -> None:
    chosen = {
        "max_tokens": 12,
        "temperature": 1.5,
        "top_k": 40,
        "repetition_penalty": 1.3,
        "seed": 2,
    }
    run = posttrainllm.open_run(run.path)
    assert run.generate("a", **chosen) == posttrainllm.load(run.path).generate("a", **chosen)
    assert run.generate(max_tokens=9, temperature=1.5) != run.generate(max_tokens=9, temperature=0)
    assert set(Sampling.__annotations__) == set(SamplingConfig.model_fields)


def test_how_to_sample_is_checked_before_anything_is_written(run: posttrainllm.Run) -> None:
    for wrong, says in (
        ({"temperatur": 1}, "did you mean 'sampling.temperature'"),
        ({"top_p": 2}, "top_p must be"),
    ):
        for writes in (run.generate, run.model.generate, run.model.stream):
            with pytest.raises(ConfigError, match=says):
                writes("a", **wrong)
    for wrong in ({"stop": 5}, {"stop": ["a", b"b"]}):
        with pytest.raises(ConfigError, match="stop is a text, got"):
            run.generate("a", **wrong)


def test_a_name_too_long_for_a_file_is_no_run(tmp_path: Path) -> None:
    with pytest.raises(posttrainllm.PosttrainError, match="there is no run 'xxx"):
        posttrainllm.load("x" * 5000, runs_dir=tmp_path)


def test_text_comes_first(tmp_path: Path) -> None:
    text = tmp_path / "mine.txt"
    text.write_text("a rose is a rose is a rose\n" * 60)
    mine = posttrainllm.train(text, runs_dir=tmp_path / "runs", **SMALL)
    assert mine.config.data.corpus == (str(text),)


def test_no_setting_is_dropped_in_silence(tmp_path: Path) -> None:
    for twice in (
        {"learning_rate": 1e-3, "schedule__learning_rate": 2e-3},
        {"steps": 5, "training__steps": 9},
        {"engine": "cpp", "engine__name": "numpy"},
    ):
        with pytest.raises(ConfigError, match="is given twice"):
            posttrainllm.train(runs_dir=tmp_path, **twice)
    with pytest.raises(posttrainllm.PosttrainError, match="there is no run 'nosuch'"):
        posttrainllm.train(runs_dir=tmp_path, training__start_from="nosuch")
    run = posttrainllm.train(runs_dir=tmp_path, **SMALL)
    more = run.config.training.steps + 2
    again = posttrainllm.resume(
        run.path, training__steps=more, warmup_steps=1, engine="numpy", allow_change=True
    )
    assert (again.config.training.steps, again.config.engine.name) == (more, "numpy")


def test_a_damaged_checkpoint_that_is_passed_over_is_a_warning(tmp_path: Path) -> None:
    run = posttrainllm.train(runs_dir=tmp_path, checkpoint_every=2, **SMALL)
    newest = max((run.path / "checkpoints").iterdir())
    (newest / "model.safetensors").write_bytes(b"")
    for load in (
        lambda: posttrainllm.load(run.path),
        lambda: posttrainllm.open_run(run.path).model,
    ):
        with pytest.warns(UserWarning, match=f"{newest.name}.*using step-"):
            load()


@pytest.mark.parametrize(
    ("key", "says"),
    [
        ("stps", "did you mean steps"),
        ("learning_rat", "did you mean learning_rate"),
        ("qwerty", "posttrainllm.config.SETTINGS lists them"),
    ],
)
def test_a_wrong_name_is_refused_in_the_callers_spelling(
    key: str, says: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=says):
        posttrainllm.train(runs_dir=tmp_path, **{key: 1})
    assert not list(tmp_path.iterdir())
