"""Opening runs: what is refused before anything is made, and how a resumed run gets the engine it was trained with."""

from __future__ import annotations

import weakref
from pathlib import Path

import numpy as np
import pytest

from posttrainllm.config import load_config
from posttrainllm.engines.cpp_engine import runnable_builds
from posttrainllm.errors import CheckpointError, ConfigError, EngineError, PosttrainError
from posttrainllm.runs.checkpoint import list_checkpoints, read_checkpoint
from posttrainllm.runs.folder import Run as RunFolder
from posttrainllm.runs.folder import create_run
from posttrainllm.text.corpus import open_corpus
from posttrainllm.training.engine_choice import (
    differences,
    inference_engine,
    initial_parameters,
    training_engine,
)
from posttrainllm.training.observer import Silent
from posttrainllm.training.samples import Samples
from posttrainllm.training.session import new_trainer, resumed_trainer
from posttrainllm.training.step import train_step
from posttrainllm.training.stopping import StopSignals

SMALL = {
    "model.n_layer": 1,
    "data.batch_size": 2,
    "training.steps": 4,
    "training.checkpoint_every": 2,
}


class Listener(Silent):
    """An observer that keeps what it is told."""

    def __init__(self) -> None:
        self.notices: list[str] = []

    def noticed(self, message: str) -> None:
        self.notices.append(message)


def test_a_model_with_other_tokens_than_its_text_is_refused_before_a_folder_is_made(
    tmp_path: Path,
) -> None:
    for size in (100, 5000):
        config = load_config("tiny", flags={**SMALL, "model.n_vocab": size})
        with pytest.raises(ConfigError, match=f"n_vocab is {size:,}"):
            new_trainer(config, runs_dir=tmp_path / "runs")
    assert not (tmp_path / "runs").exists()


def test_a_resumed_run_gets_the_build_it_was_trained_with_and_keeps_its_settings(
    tmp_path: Path,
) -> None:
    build = runnable_builds()[0]
    listener = Listener()
    trainer = new_trainer(
        load_config("tiny", flags={**SMALL, "engine.cpp_build": build}), runs_dir=tmp_path, name="a"
    )
    trainer.train()
    changes = {"training.steps": 6, "engine.cpp_build": ""}
    again = resumed_trainer(
        "a", runs_dir=tmp_path, changes=changes, allow_change=True, observer=listener
    )
    again.train()
    assert again.engine.info["build"] == build
    assert again.config.engine.cpp_build == ""
    assert not [
        notice for notice in listener.notices if "not what the run was trained with" in notice
    ]


def test_what_a_run_starts_from_is_not_kept_in_memory_while_it_trains(tmp_path: Path) -> None:
    class Watcher(Silent):
        def started(self, start: object) -> None:
            seen.append([array() for array in held])

    config = load_config("tiny", flags=SMALL)
    new_trainer(config, runs_dir=tmp_path, name="a").train()
    start = {"training.start_from": str(tmp_path / "a")}
    seen: list[list[object]] = []
    tuned = new_trainer(
        load_config("tiny", flags={**SMALL, **start}), runs_dir=tmp_path, observer=Watcher()
    )
    assert tuned.start is not None
    held = [weakref.ref(array) for array in tuned.start.values()]
    tuned.train()
    resumed = resumed_trainer(
        "a",
        runs_dir=tmp_path,
        changes={"training.steps": 6},
        allow_change=True,
        observer=Watcher(),
    )
    assert resumed.resumed is not None
    kept = (resumed.resumed.params, resumed.resumed.m or {}, resumed.resumed.v or {})
    held = [weakref.ref(array) for tensors in kept for array in tensors.values()]
    del kept
    resumed.train()
    assert [len(arrays) for arrays in seen] == [16, 48]
    assert not any(array is not None for arrays in seen for array in arrays)


def test_another_engine_than_before_is_told_by_key() -> None:
    before = {"engine": "cpp", "build": "avx2", "build_id": "1", "threads": 8}
    assert differences({**before, "threads": 2}, before) == []
    assert differences({**before, "build_id": "2"}, before) == ["build_id: 1 -> 2"]
    torch = {"engine": "torch", "torch": "2.13", "threads": 2}
    assert differences({**torch, "threads": 1}, torch) == ["threads: 2 -> 1"]


def test_a_build_that_is_gone_is_no_obstacle_to_resuming() -> None:
    config = load_config("tiny", flags=SMALL)
    engine = training_engine(config, before={"engine": "cpp", "build": "of another processor"})
    assert engine.info["build"] == runnable_builds()[-1]


def test_a_sample_that_fails_does_not_cost_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(self: Samples, *arguments: object) -> str:
        raise PosttrainError("no words today")

    listener = Listener()
    monkeypatch.setattr(Samples, "write", fail)
    config = load_config(
        "tiny", flags={**SMALL, "training.sample_every": 1, "training.verdict_samples": 0}
    )
    outcome = new_trainer(config, runs_dir=tmp_path, observer=listener).train()
    assert outcome.finished
    assert listener.notices[0] == "no sample at step 1: no words today"


def test_stopping_before_the_first_step_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        StopSignals,
        "requested",
        property(lambda self: True, lambda self, value: None),
        raising=False,
    )
    with pytest.raises(KeyboardInterrupt):
        new_trainer(load_config("tiny", flags=SMALL), runs_dir=tmp_path).train()
    assert not list(tmp_path.iterdir())


def test_samples_of_neighbouring_seeds_share_no_seed() -> None:
    seeds = set()
    for run in (1, 2, 3):
        config = load_config("tiny", flags={"training.seed": run})
        samples = Samples(None, config, None, None)  # type: ignore[arg-type]
        seeds |= {samples.seed("verdict", n) for n in range(20)} | {
            samples.seed("sample", n) for n in range(2000)
        }
    assert len(seeds) == 3 * 2020


def test_logits_of_every_position_are_planned_only_when_asked_for() -> None:
    config = load_config("tiny", flags=SMALL)
    without = inference_engine(config.model, config.engine, batch=4)
    with_logits = inference_engine(config.model, config.engine, batch=4, logits=True)
    assert without.nbytes < with_logits.nbytes
    without.load(initial_parameters(config.model, 1))
    with pytest.raises(EngineError, match="logits"):
        without.logits(np.zeros((1, 4), np.int32))


def test_a_step_in_micro_batches_is_the_step_in_one() -> None:
    corpus, losses, norms = open_corpus([], val_fraction=0.1), [], []
    for accumulation in (1, 3):
        cut = {"data.batch_size": 6 // accumulation, "data.accumulation": accumulation}
        config = load_config("tiny", flags={**SMALL, **cut, "engine.name": "numpy"})
        engine = training_engine(config)
        engine.load(initial_parameters(config.model, 1))
        train_step(engine, corpus, config, 1)
        (result,) = engine.results()
        losses.append(result.loss)
        norms.append(result.grad_norm)
        engine.close()
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)
    assert norms[0] == pytest.approx(norms[1], rel=1e-5)


def test_the_best_step_is_kept_where_that_is_asked_for(tmp_path: Path) -> None:
    """The validation part is of letters that training never sees: soon every step makes the loss on it worse."""
    text = tmp_path / "text.txt"
    text.write_text("ab" * 2700 + "xyz." * 150)
    flags = {
        "data.corpus": (str(text),),
        "engine.name": "numpy",
        "model.n_layer": 1,
        "training.steps": 12,
        "training.eval_every": 3,
        "training.checkpoint_every": 0,
        "training.keep_checkpoints": 1,
        "training.verdict_samples": 0,
    }
    kept = {}
    for best in (False, True):
        name = f"best-{best}"
        config = load_config("tiny", flags={**flags, "training.save_best": best})
        run = new_trainer(config, runs_dir=tmp_path, name=name).train().run
        losses = {
            line["step"]: line["val_loss"]
            for line in RunFolder(run).metrics.read()
            if line["val_loss"] is not None
        }
        step = min(losses, key=losses.__getitem__)
        assert step < 12, "a loss that rises again is what this test is about"
        kept[best] = [path.name for path in list_checkpoints(RunFolder(run).checkpoints)]
    assert kept == {False: ["step-000012"], True: [f"step-{step:06d}", "step-000012"]}
    saved = read_checkpoint(tmp_path / "best-True" / "checkpoints" / f"step-{step:06d}").state
    assert saved is not None
    assert saved.val_loss == saved.best_val_loss


@pytest.mark.parametrize("saved", [True, False])
def test_a_run_that_is_being_trained_is_named_so_before_its_settings_are_compared(tmp_path, saved):
    config = load_config("tiny", flags=SMALL)
    if saved:
        run = RunFolder(new_trainer(config, runs_dir=tmp_path).train().run)
    else:
        run = create_run(tmp_path, config)
    with run.lock(), pytest.raises(CheckpointError, match="is being trained by process"):
        resumed_trainer(run.path.name, runs_dir=tmp_path, changes={"data.batch_size": 3})
    with pytest.raises(ConfigError):
        resumed_trainer(run.path.name, runs_dir=tmp_path, changes={"data.batch_size": 3})


def test_fewer_steps_than_were_trained_are_named_before_other_settings(tmp_path: Path) -> None:
    flags = {**SMALL, "schedule.warmup_steps": 3}
    new_trainer(load_config("tiny", flags=flags), runs_dir=tmp_path, name="a").train()
    with pytest.raises(ConfigError, match="is at step 4, beyond the 2 that are wanted"):
        resumed_trainer("a", runs_dir=tmp_path, changes={"training.steps": 2}, allow_change=True)
    with pytest.raises(ConfigError, match="whole number"):
        resumed_trainer("a", runs_dir=tmp_path, changes={"training.steps": 0}, allow_change=True)
