"""A training whose disk fails while it runs: one line, nothing lost, and it goes on when the disk does."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import contextmanager, nullcontext
from datetime import UTC, datetime
from pathlib import Path

import pytest

from disks import Disk, small_disk
from lab_cases import small, write_text
from posttrainllm import storage
from posttrainllm.config import replace
from posttrainllm.errors import CheckpointError, TrainingError
from posttrainllm.runs import trainer_state
from posttrainllm.runs.checkpoint import list_checkpoints, read_checkpoint, step_of
from posttrainllm.runs.folder import Run
from posttrainllm.training import journal
from posttrainllm.training.observer import Silent
from posttrainllm.training.session import new_trainer, resumed_trainer
from posttrainllm.training.stopping import StopSignals

NOBODY = 65534
STEPS = 12
SAVED = 3  # steps between checkpoints


class Script(Silent):
    """Does something after given steps, and keeps what the user is told."""

    def __init__(self, **actions):
        self.actions = {int(name.removeprefix("step")): done for name, done in actions.items()}
        self.notices: list[str] = []
        self.on_notice = lambda: None

    def stepped(self, record):
        self.actions.get(record.step, lambda: None)()

    def noticed(self, message):
        self.notices.append(message)
        self.on_notice()


@pytest.fixture
def disk(tmp_path):
    with small_disk(tmp_path / "disk") as found:
        yield found


@pytest.fixture
def config(tmp_path):
    settings = {
        "training.checkpoint_every": SAVED,
        "training.verdict_samples": 0,
        "training.sample_tokens": 0,
        "training.eval_every": 0,
    }
    return replace(small(tmp_path, steps=STEPS), settings)


@pytest.fixture(autouse=True)
def _impatient(monkeypatch):
    monkeypatch.setattr(journal, "RETRY_S", 0.05)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """The losses that no disk may change."""
    folder = tmp_path_factory.mktemp("undisturbed")
    calm = replace(small(folder, steps=STEPS), {"training.verdict_samples": 0})
    return new_trainer(calm, runs_dir=folder, name="run").train().losses


def train(config, folder, script, name="run"):
    return new_trainer(config, runs_dir=folder, name=name, observer=script).train()


def check_whole(outcome, undisturbed):
    """The run ended as if nothing had been: losses, metrics and a checkpoint that holds them."""
    assert outcome.finished
    assert outcome.losses == undisturbed
    run = outcome.run
    back = read_checkpoint(run)
    assert back.state.step == STEPS
    lines = Run(run).metrics.read()
    assert [line["step"] for line in lines] == list(range(1, STEPS + 1))
    assert [line["loss"] for line in lines] == undisturbed
    assert not list((run / "checkpoints").glob(".*"))


def steps(folder):
    return [step_of(path) for path in list_checkpoints(folder / "run" / "checkpoints")]


# --- full ------------------------------------------------------------------------------------


@pytest.mark.parametrize("room", [0, 20_000])
def test_disk_that_fills_is_one_line_and_training_goes_on(disk, config, undisturbed, room):
    """Full from step 4 to 8: the checkpoint of step 6 fails and that of step 9 is written."""
    seen = []

    def free():
        seen.extend(steps(disk.folder))
        disk.free()

    script = Script(step4=lambda: disk.fill(room), step8=free)
    outcome = train(config, disk.folder, script)
    assert seen == [3]
    assert len(script.notices) == 1
    assert "training goes on" in script.notices[0]
    assert "\n" not in script.notices[0]
    check_whole(outcome, undisturbed)


def test_disk_that_fills_inside_a_checkpoint_leaves_the_one_before(
    disk, config, undisturbed, monkeypatch
):
    """Another program takes the room after it was checked, between two files of the checkpoint."""
    real, done = storage.write_file, []

    def write_file(path, chunks):
        if path.name == "trainer_state.json" and path.parent.name.startswith(".tmp-000006"):
            disk.fill(0)
            done.append(path)
        return real(path, chunks)

    monkeypatch.setattr("posttrainllm.runs.checkpoint.write_file", write_file)
    script = Script(step8=lambda: (check_intact(disk), disk.free()))
    outcome = train(config, disk.folder, script)
    assert done
    assert len(script.notices) == 1
    assert "cannot save the checkpoint of step 6 in " in script.notices[0]
    assert "the disk is full" in script.notices[0]
    check_whole(outcome, undisturbed)


def check_intact(disk: Disk) -> None:
    assert steps(disk.folder) == [3]
    assert read_checkpoint(disk.folder / "run").state.step == 3


def test_last_save_is_tried_until_there_is_room(disk, config, undisturbed):
    script = Script(step10=disk.fill)
    waits = []

    def notice():
        if "tried again every" in script.notices[-1]:
            waits.append(time.monotonic())
            disk.free()

    script.on_notice = notice
    outcome = train(config, disk.folder, script)
    assert len(waits) == 1
    assert (
        len(script.notices) <= 2
    )  # the lines of the metrics, if they do not fit; the last checkpoint
    check_whole(outcome, undisturbed)


def test_user_who_gives_up_on_the_last_save_keeps_the_checkpoint_before(disk, config, monkeypatch):
    tries = []

    def wait(stop, seconds):
        tries.append(seconds)
        stop.requested = len(tries) == 3

    monkeypatch.setattr(StopSignals, "wait", wait)
    with pytest.raises(TrainingError, match="the last state was not saved") as caught:
        train(config, disk.folder, Script(step10=disk.fill))
    assert "step-000009" in caught.value.hint
    assert caught.value.exit_code == 1
    assert len(tries) == 3
    disk.free()
    outcome = resumed_trainer("run", runs_dir=disk.folder).train()
    assert outcome.finished
    assert [line["step"] for line in Run(disk.folder / "run").metrics.read()] == list(range(1, 13))


def test_room_for_no_checkpoint_is_refused_before_the_first_step(disk, config):
    disk.fill(30_000)
    with pytest.raises(CheckpointError, match="the disk has"):
        train(config, disk.folder, Script())
    assert [path.name for path in disk.folder.iterdir()] == ["filler"]


# --- read-only, removed, without permission -----------------------------------------------------


def test_disk_that_becomes_read_only_is_one_line_and_training_goes_on(
    disk, config, undisturbed, monkeypatch
):
    # A file that is open for writing keeps a mount writable, so there is no lock, and the log is closed.
    monkeypatch.setattr(Run, "lock", lambda run: nullcontext())
    script = Script(step8=lambda: disk.remount("rw"))
    trainer = new_trainer(config, runs_dir=disk.folder, name="run", observer=script)

    def read_only():
        trainer.journal.close()
        disk.remount("ro")

    script.actions[4] = read_only
    outcome = trainer.train()
    assert len(script.notices) == 1
    assert "the file system is read-only" in script.notices[0]
    check_whole(outcome, undisturbed)


def test_run_folder_that_is_moved_away_and_back_is_one_line(tmp_path, config, undisturbed):
    run, aside = tmp_path / "run", tmp_path / "aside"
    script = Script(step4=lambda: run.rename(aside), step8=lambda: aside.rename(run))
    outcome = train(config, tmp_path, script)
    assert len(script.notices) == 1
    assert "the folder is gone" in script.notices[0]
    check_whole(outcome, undisturbed)


def test_run_folder_that_is_removed_can_be_made_again_for_the_last_save(tmp_path, config):
    run = tmp_path / "run"
    script = Script(step4=lambda: shutil.rmtree(run))
    script.on_notice = lambda: run.mkdir() if "tried again" in script.notices[-1] else None
    outcome = train(config, tmp_path, script)
    assert len(script.notices) == 2
    assert all("the folder is gone" in notice for notice in script.notices)
    assert read_checkpoint(run).state.step == outcome.step == STEPS
    assert [line["step"] for line in Run(run).metrics.read()] == list(range(5, STEPS + 1))


def test_folder_that_loses_its_permissions_is_one_line(config, undisturbed):
    with folder_of_nobody() as folder:
        mine = replace(config, {"data.corpus": (str(write_text(folder)),)})
        checkpoints = folder / "run" / "checkpoints"
        script = Script(step4=lambda: checkpoints.chmod(0), step8=lambda: checkpoints.chmod(0o700))
        outcome = train(mine, folder, script)
        assert len(script.notices) == 1
        assert "no permission to write there" in script.notices[0]
        check_whole(outcome, undisturbed)


@contextmanager
def folder_of_nobody():
    """A folder, and a user who may not do everything: root may write anywhere."""
    with tempfile.TemporaryDirectory() as name:
        if not hasattr(os, "geteuid") or os.geteuid() != 0:
            yield Path(name)
            return
        os.chown(name, NOBODY, NOBODY)
        os.seteuid(NOBODY)
        try:
            yield Path(name)
        finally:
            os.seteuid(0)


# --- clocks, and a second process ------------------------------------------------------------


def test_clock_that_is_set_back_changes_nothing(tmp_path, config, undisturbed, monkeypatch):
    class Clock(datetime):
        @classmethod
        def now(cls, tz=None):
            return datetime(1970, 1, 1, tzinfo=tz or UTC)

    def set_back():
        monkeypatch.setattr(time, "time", lambda: 0.0)
        monkeypatch.setattr(trainer_state, "datetime", Clock)

    first = Script(step4=set_back)
    first.actions[7] = lambda: os.kill(os.getpid(), signal.SIGINT)
    outcome = train(config, tmp_path, first)
    assert not outcome.finished
    for path in list_checkpoints(tmp_path / "run" / "checkpoints"):
        os.utime(path, (step_of(path) * -1000 + 10**6,) * 2)
    outcome = resumed_trainer("run", runs_dir=tmp_path).train()
    lines = Run(outcome.run).metrics.read()
    assert [line["loss"] for line in lines] == undisturbed
    elapsed = [line["elapsed_s"] for line in lines]
    assert elapsed == sorted(elapsed)
    assert all(0 < line["tokens_per_second"] < 1e12 for line in lines)


def test_second_process_on_a_run_is_refused_and_changes_nothing(tmp_path, config, undisturbed):
    results = []

    def second():
        command = [sys.executable, "-m", "posttrainllm", "train", "--resume", "run", "--quiet"]
        results.append(
            subprocess.run(
                [*command, "--runs-dir", str(tmp_path)],
                capture_output=True,
                text=True,
                env=os.environ | {"PYTHONPATH": str(Path(journal.__file__).parents[2])},
            )
        )

    outcome = train(config, tmp_path, Script(step5=second))
    (result,) = results
    assert result.returncode == 2
    lines = result.stderr.splitlines()
    assert lines[0].startswith(f"error: run run is being trained by process {os.getpid()} on host ")
    assert len(lines) == 2
    check_whole(outcome, undisturbed)


def test_two_new_runs_of_one_name_are_one_run(tmp_path, config, undisturbed):
    errors = []

    def second():
        try:
            new_trainer(config, runs_dir=tmp_path, name="run")
        except CheckpointError as error:
            errors.append(error.message)

    outcome = train(config, tmp_path, Script(step5=second))
    assert errors == [f"{tmp_path} already has a run 'run'"]
    check_whole(outcome, undisturbed)
