"""Kills and full disks: what was saved before is still there, whole, and nothing is left over."""

from __future__ import annotations

import errno
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import needs
from killed_writer import check, write
from posttrainllm.errors import CheckpointError
from posttrainllm.runs import checkpoint
from posttrainllm.runs.checkpoint import read_checkpoint
from saved import save

WRITER = Path(__file__).with_name("killed_writer.py")
SOURCE = Path(checkpoint.__file__).parents[2]


def start_writer(folder, mode, **options):
    path = os.pathsep.join([str(SOURCE), os.environ.get("PYTHONPATH", "")])
    command = [sys.executable, str(WRITER), str(folder), mode]
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, env=os.environ | {"PYTHONPATH": path}, **options
    )


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_kill_at_any_file_operation_leaves_the_newest_checkpoint_whole(tmp_path):
    (tmp_path / "checkpoints").mkdir()
    writer = start_writer(tmp_path / "checkpoints", "everywhere", stderr=subprocess.PIPE)
    output, errors = writer.communicate(timeout=300)
    assert writer.returncode == 0, errors
    assert int(output) >= 40  # as many places to die


@pytest.mark.parametrize("kills", [10, pytest.param(100, marks=pytest.mark.slow)])
def test_kill_at_a_random_moment_leaves_the_newest_checkpoint_whole(tmp_path, kills):
    write(tmp_path, 1)
    moments = random.Random(5)
    last = (1, 0)
    for _ in range(kills):
        writer = start_writer(tmp_path, "random")
        assert writer.stdout is not None
        assert writer.stdout.readline() == "ready\n"
        time.sleep(moments.uniform(0, 0.1))
        writer.send_signal(signal.SIGKILL)
        writer.communicate()
        found = check(tmp_path)
        assert found >= last
        last = found
    assert last > (1, 0)


# --- disks -----------------------------------------------------------------------------------


@pytest.fixture
def mount(tmp_path):
    """Mount a small file system in memory; where that is not allowed, skip."""
    folder = tmp_path / "disk"
    folder.mkdir()
    program = shutil.which("mount")
    command = [program or "mount", "-t", "tmpfs", "-o", "size=1m", "posttrainllm-test", str(folder)]
    if program is None or subprocess.run(command, capture_output=True).returncode != 0:
        needs.missing("mounting a file system needs root: run the tests as root")

    def again(options):
        subprocess.run(["mount", "-o", f"remount,{options}", str(folder)], check=True)

    yield folder, again
    subprocess.run(["umount", str(folder)], check=True)


def refusal(folder, step):
    with pytest.raises(CheckpointError) as caught:
        write(folder, step)
    assert "\n" not in caught.value.message
    assert caught.value.hint
    assert str(folder) in caught.value.message
    return caught.value.message


@pytest.mark.parametrize("check_first", [True, False])
@pytest.mark.parametrize("room", [0, 500, 30_000, 60_000])
def test_full_disk_is_one_line_and_loses_nothing(mount, monkeypatch, room, check_first):
    folder, _ = mount
    write(folder, 1)
    if not check_first:  # as when another program fills the disk between the check and the write
        monkeypatch.setattr(checkpoint, "check_space", lambda *_, **__: None)
    free = shutil.disk_usage(folder).free
    (folder / "filler").write_bytes(bytes(max(0, free - room)))
    message = refusal(folder, 2)
    assert ("planned checkpoint, the disk has" if check_first else "the disk is full") in message
    assert sorted(path.name for path in folder.iterdir()) == ["filler", "step-000001"]
    assert check(folder) == (1, 0)
    (folder / "filler").unlink()
    write(folder, 2)  # the same call, once there is room
    assert check(folder) == (2, 0)


def test_read_only_disk_is_one_line(mount):
    folder, again = mount
    write(folder, 1)
    again("ro")
    assert "the file system is read-only" in refusal(folder, 2)
    assert check(folder) == (1, 0)


def test_folder_that_vanished_is_one_line(tmp_path):
    write(tmp_path, 1)
    assert "the folder is gone" in refusal(tmp_path / "runs" / "checkpoints", 2)
    (tmp_path / "file").write_text("")
    assert "in the way" not in refusal(tmp_path / "file" / "checkpoints", 2)


@pytest.mark.parametrize("code", [errno.EACCES, errno.EIO, errno.EDQUOT, errno.EFBIG])
@pytest.mark.parametrize("operation", ["fsync", "mkdir", "rename"])
def test_any_failing_operation_is_one_line_and_loses_nothing(
    tmp_path, monkeypatch, code, operation
):
    write(tmp_path, 1)

    def fail(*_, **__):
        raise OSError(code, os.strerror(code))

    with monkeypatch.context() as patch:
        patch.setattr(os, operation, fail)
        message = refusal(tmp_path, 2)
        assert message.startswith("cannot save the checkpoint of step 2 in ")
        assert "which needs" in message
        assert refusal(tmp_path, 1)  # replacing one
    assert [path.name for path in tmp_path.iterdir()] == ["step-000001"]
    assert check(tmp_path) == (1, 0)
    write(tmp_path, 2)
    assert check(tmp_path) == (2, 0)


def test_failing_replacement_puts_the_old_checkpoint_back(tmp_path, monkeypatch):
    write(tmp_path, 1)
    rename = os.rename

    def fail(source, target):
        if Path(source).name.startswith(".tmp-"):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        rename(source, target)

    with monkeypatch.context() as patch:
        patch.setattr(os, "rename", fail)
        refusal(tmp_path, 1)
    assert [path.name for path in tmp_path.iterdir()] == ["step-000001"]


def test_interrupt_while_writing_leaves_no_temporary_folder(tmp_path, monkeypatch):
    write(tmp_path, 1)

    def interrupt(_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", interrupt)
        with pytest.raises(KeyboardInterrupt):
            write(tmp_path, 2)
    assert [path.name for path in tmp_path.iterdir()] == ["step-000001"]


@pytest.mark.skipif(os.name == "nt" or os.geteuid() == 0, reason="root may read and write anything")
def test_folder_without_permission_is_one_line(tmp_path):
    path = save(tmp_path)
    (path / "config.json").chmod(0)
    with pytest.raises(CheckpointError, match=r"config\.json cannot be read: Permission denied"):
        read_checkpoint(path)
    tmp_path.chmod(0o500)
    try:
        assert "no permission to write there" in refusal(tmp_path, 2)
    finally:
        tmp_path.chmod(0o700)
