"""Writes checkpoints until it is killed, for ``test_checkpoint_kills.py``.

    python killed_writer.py FOLDER random        write for ever; the test kills this process
    python killed_writer.py FOLDER everywhere    kill a child at each of its file operations in turn

Every third checkpoint replaces one of the same step. A checkpoint's numbers follow from its step
and its ``numbers.attempt``, so that a mixture of two would be noticed.
"""

from __future__ import annotations

import os
import shutil
import signal
import sys
from pathlib import Path

from posttrainllm.runs.checkpoint import (
    clean_up,
    list_checkpoints,
    newest_checkpoint,
    read_checkpoint,
    write_checkpoint,
)
from posttrainllm.runs.checkpoint_folder import verify_hashes
from posttrainllm.text.tokenizer import ByteTokenizer
from saved import make_state, make_values, small_config

CONFIG = small_config()


def write(checkpoints: Path, step: int, attempt: int = 0) -> None:
    write_checkpoint(
        checkpoints,
        state=make_state(step, CONFIG, numbers={"attempt": attempt}),
        **make_values(CONFIG, seed=1000 * step + attempt),
        tokenizer=ByteTokenizer(),
        keep=1,
    )


def check(checkpoints: Path) -> tuple[int, int]:
    """Return step and attempt of the newest checkpoint, once its numbers are known to be its own."""
    for folder in list_checkpoints(checkpoints):
        verify_hashes(folder)  # no half of one, not even of an older one
    path, _ = newest_checkpoint(checkpoints)
    back = read_checkpoint(path)
    assert back.state is not None
    attempt = back.state.numbers["attempt"]
    wanted = make_values(CONFIG, seed=1000 * back.state.step + attempt)
    for part, arrays in wanted.items():
        assert all(getattr(back, part)[n].tobytes() == a.tobytes() for n, a in arrays.items())
    return back.state.step, attempt


def write_for_ever(checkpoints: Path) -> None:
    clean_up(checkpoints)
    step, attempt = check(checkpoints)
    print("ready", flush=True)
    while True:
        step, attempt = (step, attempt + 1) if attempt < 2 else (step + 1, 0)
        write(checkpoints, step, attempt)


def kill_everywhere(checkpoints: Path) -> None:
    """Let a child die at its first file operation, then another at its second, and so on."""
    kills = 0
    for before, after in (((1, 0), (2, 0)), ((2, 0), (2, 1))):  # a new step; a replacement
        for operation in range(1, 1000):
            shutil.rmtree(checkpoints)
            checkpoints.mkdir()
            write(checkpoints, *before)
            if (child := os.fork()) == 0:
                die_at(operation)
                write(checkpoints, *after)
                os._exit(0)
            _, status = os.waitpid(child, 0)
            found = check(checkpoints)
            assert found in (before, after), found
            clean_up(checkpoints)
            assert check(checkpoints) == found
            assert not list(checkpoints.glob(".*"))
            if os.WIFEXITED(status):
                assert os.WEXITSTATUS(status) == 0
                assert found == after
                break
            kills += 1
    print(kills)


def die_at(operation: int) -> None:
    """Kill this process right before its n-th file operation from now on."""
    left = operation

    def count(event: str, _: object) -> None:
        nonlocal left
        if event in ("open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.truncate"):
            left -= 1
            if left == 0:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(count)


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    {"random": write_for_ever, "everywhere": kill_everywhere}[sys.argv[2]](folder)
