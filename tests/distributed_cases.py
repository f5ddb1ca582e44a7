"""Several processes on this machine for the tests: a job on ranks, and the command line with --nproc."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from posttrainllm.pytorch.ranks import LISTENING

SOURCE = Path(__file__).parents[1] / "src"
JOB = Path(__file__).with_name("distributed_job.py")

# A model of about 3,000 parameters; steps at a gentle rate, so that rounding stays rounding.
SIZES = [
    "--preset=tiny",
    "--engine=torch",
    "--n-ctx=16",
    "--batch-size=8",
    "--steps=20",
    "--threads=1",
    "--set=model.n_layer=2",
    "--set=model.n_head=2",
    "--set=model.n_embd=12",
    "--set=schedule.learning_rate=1e-3",
    "--set=schedule.warmup_steps=5",
    "--set=training.eval_every=10",
    "--set=training.sample_every=0",
    "--set=training.sample_tokens=4",
    "--set=training.verdict_samples=1",
    "--set=training.final_windows=8",
    "--set=training.eval_windows=4",
    "--set=training.checkpoint_every=10",
    "--set=training.keep_checkpoints=4",
]


def environment(**more: str) -> dict[str, str]:
    """Children find the package; what a launcher of these tests may have said is not theirs."""
    kept = {
        key: value
        for key, value in os.environ.items()
        if key not in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
    }
    path = os.pathsep.join([str(SOURCE), str(JOB.parent), kept.get("PYTHONPATH", "")])
    return {**kept, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", **more}


def job_on_ranks(name: str, out: Path, count: int = 2) -> Any:
    """Run a function of ``distributed_job`` on rank 0 of ``count`` processes; returns what it found."""
    processes = []
    with socket.create_server(("127.0.0.1", 0)) as server:
        for rank in range(count):
            own = environment(
                RANK=str(rank),
                WORLD_SIZE=str(count),
                MASTER_ADDR="127.0.0.1",
                MASTER_PORT=str(server.getsockname()[1]),
                POSTTRAINLLM_TIMEOUT_S="60",
                **{LISTENING: str(server.fileno())},
            )
            command = [sys.executable, str(JOB), name, str(out)]
            handed = [server.fileno()] if rank == 0 else []
            processes.append(
                subprocess.Popen(
                    command, env=own, pass_fds=handed, stderr=subprocess.PIPE, text=True
                )
            )
    said = [process.communicate(timeout=120)[1] for process in processes]
    assert [process.returncode for process in processes] == [0] * count, said
    assert said == [""] * count
    return json.loads(out.read_text())


class Run:
    """``posttrainllm train`` in processes of its own."""

    def __init__(self, *arguments: object, **more: str) -> None:
        command = [sys.executable, "-m", "posttrainllm", "train", *map(str, arguments)]
        self.process = subprocess.Popen(
            command,
            env=environment(**more),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def ranks(self) -> list[int]:
        """The processes of the ranks, rank 0 first."""
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children")
        return sorted(map(int, children.read_text().split()))

    def end(self, seconds: float = 60) -> tuple[int, str, str]:
        """Exit code, output, errors."""
        out, err = self.process.communicate(timeout=seconds)
        return self.process.returncode, out, err


def train(*arguments: object, **more: str) -> tuple[int, str, str]:
    """Run it to its end."""
    return Run(*arguments, **more).end()


def metrics(run: Path) -> list[dict[str, Any]]:
    try:
        return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    except FileNotFoundError:
        return []


def losses(run: Path) -> list[float]:
    return [line["loss"] for line in metrics(run)]


def checkpoints(run: Path) -> list[int]:
    return sorted(int(folder.name[-6:]) for folder in (run / "checkpoints").glob("step-*"))


def wait_for_step(run: Path, step: int, process: subprocess.Popen[str]) -> None:
    """Wait until a step is logged."""
    end = time.monotonic() + 60
    path = run / "metrics.jsonl"
    while not path.exists() or path.read_bytes().count(b"\n") < step:  # the last may be half there
        assert time.monotonic() < end, "no such step within a minute"
        assert process.poll() is None, process.communicate()
        time.sleep(0.01)


def kill(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)


def worst(ours: list[float], theirs: list[float]) -> float:
    """The largest relative difference."""
    return max(abs(a - b) / abs(b) for a, b in zip(ours, theirs, strict=True))
