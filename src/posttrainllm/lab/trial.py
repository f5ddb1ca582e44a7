"""One life of a run in a process of its own, to be killed: ``python -m posttrainllm.lab.trial``.

What this is: the child of ``verify_resume.py``. It goes on with a run, or starts it, exactly as the command line does, and can be told to
die by SIGKILL at a step or at an operation on the files of a checkpoint: the n-th time that a file below ``checkpoints/`` is opened,
renamed or removed. An audit hook of the interpreter sees these operations before they happen, so nothing of the package is replaced, and
no line of Python runs after the kill.
What this is not: a place for tests of what survives; the parent looks at the files.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from posttrainllm.config import from_toml
from posttrainllm.errors import PosttrainError
from posttrainllm.training.observer import Record, Silent
from posttrainllm.training.session import new_trainer, resumed_trainer
from posttrainllm.training.trainer import Trainer

OPERATIONS = ("open", "os.rename", "os.remove", "os.mkdir", "os.rmdir", "os.truncate")
COUNT_FILE = "operations"
STEPS_FILE = "{}.steps"  # of a run's name: every step that any of its lives computed, in order


@dataclass(frozen=True)
class Life:
    """What a child is told: where the run is, and when to die (0: not)."""

    runs_dir: str
    name: str
    config: str
    kill_step: int = 0
    kill_operation: int = 0

    def command(self) -> list[str]:
        """The command that lives it."""
        return [sys.executable, "-m", "posttrainllm.lab.trial", json.dumps(asdict(self))]


def die() -> None:
    """End this process as the system would: no handler, no flush, no cleanup."""
    os.kill(os.getpid(), signal.SIGKILL)


class _Watch(Silent):
    """Counts steps outside of the run, and dies after one was computed and logged."""

    def __init__(self, life: Life) -> None:
        self.life = life
        self._steps = Path(life.runs_dir, STEPS_FILE.format(life.name))

    def stepped(self, record: Record) -> None:
        """See ``Observer``."""
        with self._steps.open("a") as stream:
            stream.write(f"{record.step}\n")
        if record.step == self.life.kill_step:
            die()


class _Operations:
    """Counts operations on the files of checkpoints, and dies at one of them."""

    def __init__(self, life: Life) -> None:
        self.folder = os.fspath(Path(life.runs_dir, life.name, "checkpoints"))
        self.kill_at = life.kill_operation
        self.count = 0

    def hook(self, event: str, arguments: tuple[Any, ...]) -> None:
        """See ``sys.addaudithook``."""
        if event not in OPERATIONS or not arguments:
            return
        path = arguments[0]
        if isinstance(path, bytes):
            path = os.fsdecode(path)
        if not isinstance(path, str | os.PathLike) or not os.fspath(path).startswith(self.folder):
            return
        self.count += 1
        if self.count == self.kill_at:
            die()


def trainer_of(life: Life, observer: Silent) -> Trainer:
    """The run at its newest checkpoint; at step 0 when it has none yet."""
    runs_dir, path = Path(life.runs_dir), Path(life.runs_dir, life.name)
    if not path.is_dir():
        config = from_toml(life.config, "trial")
        return new_trainer(config, runs_dir=runs_dir, name=life.name, observer=observer)
    return resumed_trainer(life.name, runs_dir=runs_dir, observer=observer)


def live(life: Life) -> int:
    """Train to the end, or to death. Returns how many operations on checkpoint files there were."""
    trainer = trainer_of(life, _Watch(life))
    operations = _Operations(life)
    sys.addaudithook(operations.hook)
    trainer.train()
    return operations.count


def main() -> None:
    """Live the life of the first argument; standard output gets the number of operations."""
    life = Life(**json.loads(sys.argv[1]))
    try:
        count = live(life)
    except PosttrainError as error:
        sys.exit(error.message)
    Path(life.runs_dir, COUNT_FILE).write_text(str(count))


if __name__ == "__main__":
    main()
