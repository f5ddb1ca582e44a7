"""Does a run that was killed and resumed compute what an undisturbed one computes, bit by bit?

What this is: a run in a process of its own, undisturbed; the same run again, killed by SIGKILL as often as asked and resumed each time;
and everything the two leave on disk compared. Kills come at a step (between checkpoints), inside the writing of a checkpoint (at one of
its operations on files, ``trial.py``) and at a random time, which hits kernels at work.
What this is not: a test of what is in a checkpoint (``tests/test_checkpoint*.py``).

Checked: losses, validation losses, rates and gradient norms of every step, and the samples, equal in every bit; no step missing or
double; after each kill at most the steps since the last checkpoint lost and computed again; final weights and moments equal.
"""

from __future__ import annotations

import hashlib
import random
import signal
import struct
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

from posttrainllm.config import TrainConfig, replace, to_toml
from posttrainllm.errors import CheckpointError, TrainingError
from posttrainllm.figures import Progress, untold
from posttrainllm.formats.huggingface import WEIGHTS_FILE
from posttrainllm.formats.untrusted import plain_file, read_object
from posttrainllm.lab.trial import COUNT_FILE, STEPS_FILE, Life
from posttrainllm.runs.checkpoint import list_checkpoints, newest_checkpoint, step_of
from posttrainllm.runs.checkpoint_folder import HASHES_FILE, OPTIMIZER_FILE
from posttrainllm.runs.folder import METRICS, Run

CLOCKS = ("tokens_per_second", "elapsed_s")  # of a line of metrics.jsonl: not a function of the run
Where = Literal["step", "checkpoint", "time"]
TURNS: tuple[Where, ...] = ("step", "checkpoint", "time")
PATIENCE_S = 600.0  # for one life of a run


@dataclass(frozen=True)
class Kill:
    """One SIGKILL: where it came, the last step that was logged, and the checkpoint that was left."""

    where: Where
    logged: int
    checkpoint: int


@dataclass(frozen=True)
class VerifyResume:
    """The outcome."""

    preset: str
    engine: str
    steps: int
    kills: list[Kill]
    runs: int
    """How many times the run was taken from its start to its end to place all kills."""
    losses_sha256: str
    problems: list[str]
    repeated: int = 0
    """Steps that were computed again, over all kills."""

    @property
    def passed(self) -> bool:
        """Whether nothing differed."""
        return not self.problems

    @property
    def verdict(self) -> str:
        """One line."""
        if self.problems:
            return f"verify-resume: FAIL ({self.engine}), {self.problems[0]}"
        count = len(self.kills)
        kills = "1 kill" if count == 1 else f"{count} kills"
        return (
            f"verify-resume: PASS, {self.steps} losses bit-identical after {kills} "
            f"({self.engine}, sha256 {self.losses_sha256[:12]})"
        )


def verify_resume(
    config: TrainConfig,
    *,
    kills: int = 3,
    seed: int = 1,
    folder: Path | None = None,
    progress: Progress = untold,
) -> VerifyResume:
    """Compare an undisturbed run with killed ones in a temporary folder, or in ``folder``.

    ``config.training.steps`` should be a few times ``checkpoint_every``; ``checkable`` makes it so.

    Raises: TrainingError when a run fails by itself.
    """
    if folder is None:
        with tempfile.TemporaryDirectory(prefix="posttrainllm-resume-") as name:
            return verify_resume(
                config, kills=kills, seed=seed, folder=Path(name), progress=progress
            )
    progress("an undisturbed run", 0, kills)
    undisturbed = Run(folder / "undisturbed")
    _live(Life(str(folder), undisturbed.name, to_toml(config)))
    operations = int((folder / COUNT_FILE).read_text())
    done: list[Kill] = []
    repeated = 0
    problems = _gaps(undisturbed, config.training.steps)
    runs = 0
    while not runs or len(done) < kills:
        runs += 1
        killed = Run(folder / f"killed-{runs}")
        kill_and_resume(
            config,
            killed,
            kills=kills,
            done=done,
            problems=problems,
            operations=operations,
            rng=random.Random(f"{seed} {runs}"),
            progress=progress,
        )
        problems += differences(undisturbed, killed, config.training.steps)
        again = repeated_steps(killed)
        repeated += sum(again)
        if max(again, default=0) > (config.training.checkpoint_every or config.training.steps):
            problems.append(
                f"{max(again)} steps were repeated after a kill, more than a checkpoint holds"
            )
        if problems:
            break
    return VerifyResume(
        config.preset,
        config.engine.name,
        config.training.steps,
        done,
        runs,
        losses_sha256(undisturbed),
        problems,
        repeated,
    )


def checkable(config: TrainConfig, steps: int) -> TrainConfig:
    """A configuration cut to ``steps`` steps that evaluates, writes and saves often enough to be checked."""
    every = max(1, steps // 4)
    return replace(
        config,
        {
            "training.steps": steps,
            "schedule.warmup_steps": min(config.schedule.warmup_steps, steps // 4),
            "training.log_every": 1,
            "training.eval_every": every,
            "training.eval_windows": config.data.batch_size,
            "training.final_windows": config.data.batch_size,
            "training.sample_every": every,
            "training.sample_tokens": min(8, config.training.sample_tokens),
            "training.verdict_samples": 0,
            "training.checkpoint_every": every,
        },
    )


def kill_and_resume(
    config: TrainConfig,
    run: Run,
    *,
    kills: int,
    done: list[Kill],
    problems: list[str],
    operations: int,
    rng: random.Random,
    progress: Progress = untold,
) -> None:
    """Take a run to its end, through kills until ``done`` holds ``kills`` of them; it may end before.

    ``operations`` is how many operations on checkpoint files an undisturbed run has. ``problems`` gets a line for every kill that lost
    more than the steps since the last checkpoint.
    """
    loop = config.training
    saves = max(1, loop.steps // max(1, loop.checkpoint_every))
    finished = False
    while not finished:
        where = TURNS[len(done) % len(TURNS)] if len(done) < kills else None
        from_step = _newest(run)
        life = Life(
            str(run.path.parent),
            run.name,
            to_toml(config),
            # up to two checkpoints ahead: about every second life makes some progress
            kill_step=from_step + rng.randint(1, 2 * max(1, loop.checkpoint_every))
            if where == "step"
            else 0,
            # the first operations of a life clean up after the one before
            kill_operation=rng.randint(1, max(2, 2 * operations // saves))
            if where == "checkpoint"
            else 0,
        )
        finished = not _live(life, delay=rng if where == "time" else None, run=run)
        if not finished:
            assert where is not None
            kill = Kill(where, _last_logged(run), _newest(run))
            problems += _lost_too_much(kill, loop.checkpoint_every)
            done.append(kill)
            finished = kill.checkpoint >= loop.steps  # killed in the last steps of its end
            progress(f"killed at step {kill.logged} ({where})", len(done), kills)


def repeated_steps(run: Run) -> list[int]:
    """How many steps each life of a run computed that the one before had logged; those of lives without a repeat are left out."""
    text = (run.path.parent / STEPS_FILE.format(run.name)).read_text()
    computed = [int(line) for line in text.split()]
    return [before - step + 1 for before, step in pairwise(computed) if step <= before]


def losses_sha256(run: Run) -> str:
    """A hash over the bits of all logged losses in order."""
    digest = hashlib.sha256()
    for line in run.metrics.read():
        digest.update(struct.pack("<qd", line["step"], line["loss"]))
    return digest.hexdigest()


def differences(undisturbed: Run, killed: Run, steps: int) -> list[str]:
    """What is not the same in two finished runs; nothing when all is well."""
    found = _gaps(killed, steps)
    for line, other in zip(undisturbed.metrics.read(), killed.metrics.read(), strict=False):
        for key in METRICS:
            if key not in CLOCKS and line[key] != other[key]:
                found.append(
                    f"step {line['step']}: {key} is {other[key]!r} after resuming, {line[key]!r} undisturbed"
                )
    if undisturbed.samples.read() != killed.samples.read():
        found.append("the samples differ")
    final = [_final_hashes(run) for run in (undisturbed, killed)]
    found += [f"the final {name} differs" for name in final[0] if final[0][name] != final[1][name]]
    return found


def _gaps(run: Run, steps: int) -> list[str]:
    """Steps that metrics.jsonl lacks or has twice."""
    logged = [line["step"] for line in run.metrics.read()]
    if logged == list(range(1, steps + 1)):
        return []
    missing = sorted(set(range(1, steps + 1)) - set(logged))
    double = sorted({step for step in logged if logged.count(step) > 1})
    return [f"metrics.jsonl of {run.name}: missing steps {missing[:5]}, double steps {double[:5]}"]


def _lost_too_much(kill: Kill, every: int) -> Sequence[str]:
    """A checkpoint is due after the step that it is named after, so it is there once the next step was logged."""
    due = (kill.logged - 1) // every * every if every else 0
    if kill.checkpoint >= due:
        return []
    return [f"step {kill.logged} was logged and the checkpoint of step {due} is not there"]


def _live(life: Life, *, delay: random.Random | None = None, run: Run | None = None) -> bool:
    """Live one life; returns whether it ended by a kill.

    Raises: TrainingError with what it said, when it ended in any other way.
    """
    with tempfile.TemporaryFile("w+") as said:
        child = subprocess.Popen(
            life.command(), stdin=subprocess.DEVNULL, stdout=said, stderr=subprocess.STDOUT
        )
        try:
            if delay is not None and run is not None:
                _kill_at_a_random_time(child, run, delay)
            code = child.wait(PATIENCE_S)
        except subprocess.TimeoutExpired:
            raise TrainingError(f"a run did not end within {PATIENCE_S:.0f} s") from None
        finally:
            child.kill()
            child.wait()
        if code == -signal.SIGKILL:
            return True
        if code:
            said.seek(0)
            last = (said.read().strip().splitlines() or [f"exit code {code}"])[-1]
            raise TrainingError(f"the run failed by itself: {last}")
    return False


def _kill_at_a_random_time(child: subprocess.Popen[bytes], run: Run, rng: random.Random) -> None:
    """Wait until the child logs a step, then up to as long as it took for that, then kill it."""
    path = run.metrics.path
    began = time.monotonic()
    before = path.stat().st_mtime_ns if path.exists() else 0
    while child.poll() is None and time.monotonic() - began < PATIENCE_S:
        if path.exists() and path.stat().st_mtime_ns > before and path.stat().st_size:
            break
        time.sleep(0.002)
    time.sleep(rng.uniform(0.0, 0.2) * (time.monotonic() - began))
    child.kill()


def _newest(run: Run) -> int:
    """The step of the newest checkpoint that is whole, 0 when there is none."""
    if not list_checkpoints(run.checkpoints):
        return 0
    try:
        return step_of(newest_checkpoint(run.checkpoints)[0])
    except CheckpointError:
        return 0


def _last_logged(run: Run) -> int:
    return max((line["step"] for line in run.metrics.read()), default=0)


def _final_hashes(run: Run) -> Mapping[str, Any]:
    folder = newest_checkpoint(run.checkpoints)[0]
    files = read_object(plain_file(folder, HASHES_FILE))["files"]
    return {name: files[name] for name in (WEIGHTS_FILE, OPTIMIZER_FILE)}
