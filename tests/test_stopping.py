"""Interrupts while a run trains: what was computed is saved, and a run that goes on becomes what it would have been undisturbed."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from lab_cases import small
from posttrainllm.config import TrainConfig, replace
from posttrainllm.engines.numpy_engine import NumpyEngine
from posttrainllm.errors import CheckpointError, ConfigError, EngineError
from posttrainllm.runs.checkpoint import list_checkpoints, read_checkpoint, step_of
from posttrainllm.runs.folder import Run
from posttrainllm.training import trainer as module
from posttrainllm.training.observer import Outcome, Silent
from posttrainllm.training.session import new_trainer, resumed_trainer
from posttrainllm.training.stopping import StopSignals
from posttrainllm.training.trainer import Trainer

STEPS = 8
SETTINGS = {
    "training.checkpoint_every": 0,
    "training.eval_every": 4,
    "training.eval_windows": 8,
    "training.final_windows": 8,
    "training.sample_every": 4,
    "training.sample_tokens": 4,
    "training.log_every": 1,
    "training.verdict_samples": 1,
    "data.batch_size": 2,
}


def interrupt(times: int = 1) -> None:
    for _ in range(times):
        os.kill(os.getpid(), signal.SIGINT)


@pytest.fixture
def config(tmp_path: Path) -> TrainConfig:
    return replace(small(tmp_path, engine="numpy", steps=STEPS), SETTINGS)


class Calls:
    """Acts at the n-th call of an engine's method after a step of the run, and lets all others through."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, method: str) -> None:
        self.action: Callable[[], None] = lambda: None
        self.at, self.seen = 0, 0
        original = getattr(NumpyEngine, method)

        def called(engine: NumpyEngine, *arguments: object, **options: object) -> object:
            if self.at:
                self.seen += 1
                if self.seen == self.at:
                    self.action()
            return original(engine, *arguments, **options)

        monkeypatch.setattr(NumpyEngine, method, called)


class Script(Silent):
    """An observer that acts when a step was logged."""

    def __init__(self, step: int = -1, action: Callable[[], None] = lambda: None) -> None:
        self.step, self.action = step, action
        self.told: list[str] = []

    def stepped(self, record: module.Record) -> None:
        if record.step == self.step:
            self.action()

    def noticed(self, message: str) -> None:
        self.told.append(message)


def trained(config: TrainConfig, runs: Path, script: Silent | None = None) -> Outcome:
    return new_trainer(config, runs_dir=runs, name="run", observer=script).train()


def lines(run: Path) -> list[tuple[int, float, float | None]]:
    return [(line["step"], line["loss"], line["val_loss"]) for line in Run(run).metrics.read()]


def saved(run: Path) -> list[int]:
    return [step_of(folder) for folder in list_checkpoints(Run(run).checkpoints)]


@pytest.mark.parametrize("signals", [1, 2])
@pytest.mark.parametrize("step", [4, STEPS])
def test_an_evaluation_that_is_cut_off_loses_nothing_and_is_made_up_for(
    tmp_path, config, monkeypatch, signals, step
):
    wanted = lines(trained(config, tmp_path / "undisturbed").run)
    calls = Calls(monkeypatch, "loss")
    calls.action = lambda: interrupt(signals)

    def arm() -> None:
        calls.at = 2 if signals == 1 else 1

    outcome = trained(config, tmp_path, Script(step - 1, arm))
    assert (outcome.finished, outcome.stopped, outcome.step) == (False, True, step)
    assert saved(outcome.run) == [step]
    before = [(s, loss, val if s < step else None) for s, loss, val in wanted[:step]]
    assert lines(outcome.run) == before
    again = resumed_trainer("run", runs_dir=tmp_path).train()
    assert (again.finished, again.stopped) == (True, False)
    assert again.verdict is not None
    assert lines(again.run) == wanted
    assert read_checkpoint(again.run).state.val_loss == wanted[-1][2]
    with pytest.raises(ConfigError, match="is at its last step"):
        resumed_trainer("run", runs_dir=tmp_path)


def test_an_evaluation_that_is_cut_off_again_is_still_to_be_made_up_for(
    tmp_path, config, monkeypatch
):
    calls = Calls(monkeypatch, "loss")
    calls.action, calls.at = interrupt, 5  # three evaluations of four batches each: in the second
    outcome = trained(config, tmp_path)
    calls.seen, calls.at = 0, 1
    again = resumed_trainer("run", runs_dir=tmp_path).train()
    assert (again.finished, again.step) == (False, outcome.step)
    assert lines(again.run)[-1][2] is None
    calls.at = 0
    assert resumed_trainer("run", runs_dir=tmp_path).train().finished
    assert lines(again.run)[-1][2] is not None


def test_a_second_interrupt_gives_up_the_step_and_saves_what_was_before_it(
    tmp_path, config, monkeypatch
):
    wanted = lines(trained(config, tmp_path / "undisturbed").run)
    calls = Calls(monkeypatch, "gradients")
    calls.action = lambda: interrupt(2)

    def arm() -> None:
        calls.at = 1

    outcome = trained(config, tmp_path, Script(5, arm))
    assert (outcome.stopped, outcome.step, saved(outcome.run)) == (True, 5, [5])
    assert resumed_trainer("run", runs_dir=tmp_path).train().finished
    assert lines(outcome.run) == wanted


def test_a_third_interrupt_does_not_wait_for_saving(tmp_path, config, monkeypatch):
    monkeypatch.setattr(module.Journal, "checkpoint", lambda *_: interrupt(2))
    with pytest.raises(KeyboardInterrupt):
        trained(config, tmp_path, Script(5, interrupt))
    assert saved(tmp_path / "run") == []
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


@pytest.mark.parametrize("part", ["_sample", "_verdict"])
def test_a_sample_or_a_verdict_that_is_cut_off_leaves_a_finished_run(
    tmp_path, config, monkeypatch, part
):
    original = getattr(Trainer, part)

    def interrupted(trainer: Trainer) -> object:
        if trainer.step == STEPS:
            interrupt()
        return original(trainer)

    monkeypatch.setattr(Trainer, part, interrupted)
    outcome = trained(config, tmp_path)
    assert (outcome.finished, outcome.stopped, outcome.verdict) == (True, True, None)
    assert saved(outcome.run) == [STEPS]
    state = read_checkpoint(outcome.run).state
    assert state is not None
    assert state.val_loss == lines(outcome.run)[-1][2]


@pytest.mark.parametrize("error", [EngineError("no memory on the card"), MemoryError()])
def test_an_evaluation_that_fails_does_not_cost_the_run(tmp_path, config, monkeypatch, error):
    calls = Calls(monkeypatch, "loss")

    def fail() -> None:
        raise error

    calls.action, calls.at = fail, 1
    script = Script()
    outcome = trained(config, tmp_path, script)
    assert outcome.finished
    assert len(script.told) == 1
    assert script.told[0].startswith("no validation loss at step 4: n")
    assert [step for step, _, val in lines(outcome.run) if val is not None] == [STEPS]


def test_stopping_before_a_new_step_keeps_what_the_checkpoint_knows(tmp_path, config):
    trained(config, tmp_path, Script(4, interrupt))
    before = read_checkpoint(tmp_path / "run").state
    trainer = resumed_trainer("run", runs_dir=tmp_path)
    trainer._stop.requested = True
    assert trainer.train().step == 4
    after = read_checkpoint(tmp_path / "run").state
    assert before is not None
    assert after is not None
    assert after.val_loss == before.val_loss is not None


def test_a_computation_that_others_have_a_part_in_is_not_cut_by_a_second_interrupt():
    reached = []
    with StopSignals(breakable=False) as stop:
        with stop.giving_up():
            interrupt()
            interrupt()
            reached.append("the end")
            stop.check()
            reached.append("beyond")
        assert stop.again
        with pytest.raises(KeyboardInterrupt), stop.giving_up():
            interrupt()
    assert reached == ["the end"]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_that_is_ignored_stays_ignored(number):
    before = signal.signal(number, signal.SIG_IGN)
    try:
        with StopSignals() as stop:
            os.kill(os.getpid(), number)
            assert not stop.requested
        assert signal.getsignal(number) == signal.SIG_IGN
    finally:
        signal.signal(number, before)


def test_an_interrupt_that_nobody_counts_goes_through():
    stop = StopSignals()
    with pytest.raises(KeyboardInterrupt), stop.giving_up():
        raise KeyboardInterrupt


def test_the_last_line_is_replaced_in_one_step(tmp_path):
    records = Run(tmp_path).metrics
    for step in (1, 2):
        records.append({"step": step})
    records.close()
    records.replace_last({"step": 2, "val_loss": 1.5})
    assert records.read() == [{"step": 1}, {"step": 2, "val_loss": 1.5}]
    (tmp_path / ".metrics.jsonl.new").mkdir()
    with pytest.raises(CheckpointError, match=r"rewrite metrics\.jsonl"):
        records.replace_last({"step": 2})
    assert records.read()[-1] == {"step": 2, "val_loss": 1.5}
