"""Runs: created without collisions, found by name, listed as they are, cut back on resume."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from posttrainllm.config import load_config, replace
from posttrainllm.errors import CheckpointError, ConfigError
from posttrainllm.runs import folder
from posttrainllm.runs import lock as run_lock
from posttrainllm.runs.folder import Run, create_run, describe_run, list_runs, resolve_run
from posttrainllm.runs.lock import is_locked
from posttrainllm.wording import in_terminal
from saved import save, small_config

CONFIG = load_config("tiny", flags={"training.steps": 300})
SOURCE = Path(run_lock.__file__).parents[2]


def line(step, loss=2.0, val_loss=None):
    rest = {"lr": 1e-3, "grad_norm": 1.0, "tokens_per_second": 1e5, "elapsed_s": step / 10}
    return {"step": step, "loss": loss, "val_loss": val_loss, **rest}


# --- creating --------------------------------------------------------------------------------


def test_run_is_created_with_its_configuration(tmp_path):
    run = create_run(tmp_path / "deep" / "runs", CONFIG, "first")
    assert run.path == tmp_path / "deep" / "runs" / "first"
    assert run.name == "first"
    assert run.config() == CONFIG
    assert sorted(path.name for path in run.path.iterdir()) == ["checkpoints", "config.toml"]


def test_default_names_are_the_preset_and_the_next_number(tmp_path):
    (tmp_path / "tiny-007").mkdir()
    (tmp_path / "tiny-best").mkdir()
    (tmp_path / "small-050").mkdir()
    names = [create_run(tmp_path, CONFIG).name for _ in range(2)]
    assert names == ["tiny-008", "tiny-009"]
    (tmp_path / "tiny-999").mkdir()
    assert create_run(tmp_path, CONFIG).name == "tiny-1000"
    assert create_run(tmp_path / "new", CONFIG).name == "tiny-001"


def test_runs_created_at_once_get_different_names(tmp_path):
    found = []
    barrier = threading.Barrier(8)

    def create():
        barrier.wait()
        found.append(create_run(tmp_path, CONFIG).name)

    threads = [threading.Thread(target=create) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(found) == [f"tiny-{number:03d}" for number in range(1, 9)]


def test_name_that_exists_is_refused_with_what_to_do(tmp_path):
    create_run(tmp_path, CONFIG, "mine").metrics.append(line(1))
    with pytest.raises(CheckpointError, match="already has a run 'mine'") as caught:
        create_run(tmp_path, CONFIG, "mine")
    assert "posttrainllm train --resume mine" in in_terminal(caught.value.hint)
    assert "--name" in in_terminal(caught.value.hint)
    assert len(Run(tmp_path / "mine").metrics.read()) == 1


@pytest.mark.parametrize(
    "name",
    [
        *["", ".", "..", ".x", "-x", "~", "a ", "a.", " a", "con", "NUL.txt"],
        *["a/b", "a\\b", "/a", "c:d", "a*", "a\0b", "a\nb", "a\x1bb", "a\udc80", "a\ud800"],
        *["x" * 101, "\N{SNOWMAN}" * 40],
    ],
)
def test_name_that_is_no_folder_name_is_refused(tmp_path, name):
    with pytest.raises(CheckpointError, match="the run name") as caught:
        create_run(tmp_path, CONFIG, name)
    assert "\n" not in caught.value.message
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["a", "small run", "2026-11-29_b.3", "\N{SNOWMAN}", "x" * 100])
def test_ordinary_name_is_accepted(tmp_path, name):
    assert create_run(tmp_path, CONFIG, name).path.is_dir()


def test_runs_folder_that_cannot_be_made_is_one_line(tmp_path):
    (tmp_path / "file").write_text("")
    for runs_dir in (tmp_path / "file", tmp_path / "file" / "runs"):
        with pytest.raises(CheckpointError, match="cannot create a run in") as caught:
            create_run(runs_dir, CONFIG)
        assert "\n" not in caught.value.message


def test_run_whose_configuration_cannot_be_written_is_not_left_behind(tmp_path, monkeypatch):
    def fail(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(folder, "replace_file", fail)
    with pytest.raises(CheckpointError, match=r"cannot write config\.toml in .*the disk is full"):
        create_run(tmp_path, CONFIG)
    assert list(tmp_path.iterdir()) == []


def test_configuration_is_replaced_in_one_step(tmp_path, monkeypatch):
    run = create_run(tmp_path, CONFIG)
    longer = replace(CONFIG, {"training.steps": 400})
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", lambda _: (_ for _ in ()).throw(OSError(5, "I/O error")))
        with pytest.raises(CheckpointError, match="I/O error"):
            run.write_config(longer)
    assert run.config() == CONFIG
    run.write_config(longer)
    assert run.config() == longer
    assert sorted(path.name for path in run.path.iterdir()) == ["checkpoints", "config.toml"]


# --- the lock --------------------------------------------------------------------------------

HOLD = "import sys; from pathlib import Path; from posttrainllm.runs.lock import RunLock"
HOLD += "; lock = RunLock(Path(sys.argv[1])); print('held', flush=True); input()"


def test_second_process_is_told_who_trains_the_run(tmp_path):
    run = create_run(tmp_path, CONFIG)
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(run.path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": str(SOURCE)},
    )
    assert holder.stdout is not None
    assert holder.stdout.readline() == "held\n"
    assert describe_run(run).state == "running"
    with pytest.raises(CheckpointError) as caught:
        run.lock()
    wanted = f"run tiny-001 is being trained by process {holder.pid} on host {os.uname().nodename}"
    assert caught.value.message == wanted
    holder.kill()  # SIGKILL: nothing of ours runs, the system gives the lock back
    holder.communicate()
    with run.lock():
        assert is_locked(run.path)
    assert not is_locked(run.path)
    assert describe_run(run).state == "stopped"


def test_lock_is_held_once_within_a_process_too(tmp_path):
    run = create_run(tmp_path, CONFIG)
    with run.lock(), pytest.raises(CheckpointError, match=f"process {os.getpid()} on host"):
        run.lock()
    run.lock().release()


def test_lock_with_a_damaged_note_still_locks(tmp_path):
    run = create_run(tmp_path, CONFIG)
    lock = run.lock()
    (run.path / ".lock").write_bytes(b"\xff" * 10_000)
    with pytest.raises(CheckpointError, match="is being trained by another process"):
        run.lock()
    lock.release()


def test_lock_that_is_free_in_an_instant_is_waited_for(tmp_path):
    """As when ``runs list`` looks whether the run is being trained."""
    run = create_run(tmp_path, CONFIG)
    probe = run.lock()
    threading.Timer(run_lock.PAUSE_S / 2, probe.release).start()
    run.lock().release()


def test_run_that_vanished_cannot_be_locked(tmp_path):
    with pytest.raises(CheckpointError, match="cannot lock the run in .*: the folder is gone"):
        Run(tmp_path / "nothing").lock()
    assert not is_locked(tmp_path / "nothing")


# --- listing and finding ---------------------------------------------------------------------


def test_runs_are_listed_as_they_are(tmp_path):
    new = create_run(tmp_path, CONFIG, "new")
    half = create_run(tmp_path, CONFIG, "half")
    for row in (line(10, 4.0, 4.5), line(20, 3.0, 3.25), line(30, 2.5)):
        half.metrics.append(row)
    save(half.checkpoints, 20)
    whole = create_run(tmp_path, replace(small_config(), {"training.steps": 500}), "whole")
    save(whole.checkpoints, 500)
    damaged = create_run(tmp_path, CONFIG, "damaged")
    (damaged.path / "config.toml").write_text("preset = 3")
    (tmp_path / "empty").mkdir()
    (tmp_path / ".hidden").mkdir()
    (tmp_path / "file").write_text("")
    for age, run in enumerate([new, half, whole, damaged]):
        for parent, _, names in os.walk(run.path):
            for name in names:
                os.utime(Path(parent) / name, (1000 + age, 1000 + age))
    rows = list_runs(tmp_path)
    assert [row.name for row in rows] == ["empty", "new", "half", "whole", "damaged"]
    assert [row.state for row in rows] == ["damaged", "stopped", "stopped", "finished", "damaged"]
    assert [row.step for row in rows] == [0, 0, 30, 500, 0]
    assert [row.steps for row in rows] == [None, 300, 300, 500, None]
    assert [row.preset for row in rows] == [None, "tiny", "tiny", "tiny", None]
    half_row = rows[2]
    assert (half_row.loss, half_row.best_val_loss) == (2.5, 3.25)
    assert half_row.bytes > 30_000
    assert half_row.modified is not None
    assert half_row.modified.timestamp() == 1001
    assert rows[0].modified is None


def test_folder_without_runs_is_an_empty_list(tmp_path):
    assert list_runs(tmp_path / "nothing") == []


def test_run_is_found_by_name_and_by_path(tmp_path, monkeypatch):
    run = create_run(tmp_path / "runs", CONFIG, "mine")
    monkeypatch.chdir(tmp_path)
    for name in ("mine", "runs/mine", str(run.path), Path("runs") / "mine"):
        assert resolve_run(name, Path("runs")).resolve() == run.path
    checkpoint = save(run.checkpoints)
    assert resolve_run(checkpoint, tmp_path / "runs") == checkpoint


@pytest.mark.parametrize("name", ["", "a\0b", "x" * 5000, "a\nb", "mime", "runs/none"])
def test_run_that_is_not_there_is_refused_with_the_nearest_name(tmp_path, name):
    with pytest.raises(CheckpointError, match="there is no run") as caught:
        resolve_run(name, tmp_path)
    assert caught.value.hint == "train one first: posttrainllm.train()"
    create_run(tmp_path, CONFIG, "mine")
    with pytest.raises(CheckpointError, match="there is no run") as caught:
        resolve_run(name, tmp_path)
    assert "\n" not in caught.value.message
    assert caught.value.hint == "runs: mine"
    assert ("did you mean 'mine'?" in caught.value.message) == (name == "mime")


def test_configuration_that_cannot_be_read_is_refused_by_file(tmp_path):
    run = create_run(tmp_path, CONFIG)
    path = run.path / "config.toml"
    path.write_text("format = 99")
    with pytest.raises(ConfigError, match=r"config\.toml has configuration format 99"):
        run.config()
    path.write_bytes(b"\xff\xfe")
    with pytest.raises(CheckpointError, match="is not UTF-8 at byte 0"):
        run.config()
    path.unlink()
    with pytest.raises(CheckpointError, match="cannot be read: No such file"):
        run.config()


# --- resume ----------------------------------------------------------------------------------


def test_start_from_leaves_nothing_beyond_the_step(tmp_path):
    run = create_run(tmp_path, small_config())
    for step in (100, 200, 300):
        save(run.checkpoints, step)
    with run.metrics as metrics, run.samples as samples:
        for step in range(10, 320, 10):
            metrics.append(line(step))
        for step in (100, 200, 300):
            samples.append({"step": step, "text": "ROMEO:\n"})
    (run.checkpoints / ".tmp-000310-1").mkdir()
    run.start_from(200)
    assert [path.name for path in sorted(run.checkpoints.iterdir())] == [
        "step-000100",
        "step-000200",
    ]
    assert [record["step"] for record in run.metrics.read()] == list(range(10, 210, 10))
    assert [record["step"] for record in run.samples.read()] == [100, 200]
    run.start_from(0)
    assert run.metrics.read() == []
    assert list(run.checkpoints.iterdir()) == []


def test_what_begins_with_a_dot_is_a_path_and_no_run(tmp_path, monkeypatch):
    runs, here = tmp_path / "runs", tmp_path / "here"
    for each in (runs / "one", here, tmp_path / "model", runs.parent / "runs" / "model"):
        each.mkdir(parents=True, exist_ok=True)
    monkeypatch.chdir(here)
    assert resolve_run(".", runs) == Path()
    assert resolve_run("../model", runs / "one") == Path("../model")
    assert resolve_run("one", runs) == runs / "one"


def test_names_of_foreign_folders_are_listed_without_their_control_characters(tmp_path):
    for name in ("a\x1b[31m", "b\nc", "d\u202e"):
        (tmp_path / name).mkdir()
    with pytest.raises(CheckpointError) as caught:
        resolve_run("nothing", tmp_path)
    assert caught.value.hint.isprintable()
    assert caught.value.hint == "runs: a\u241b[31m, b c, d\ufffd"
