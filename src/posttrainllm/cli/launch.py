"""``train --nproc N``: N processes of this command on this machine, started, watched and ended together.

What this is: the process that the user sees. It starts rank 0 on its own terminal, the others behind it, hands signals on to rank 0, and
when a process dies it ends the rest within seconds and says in one line which one and why.
What this is not: training, or torch: nothing of it is loaded here. Several machines are torchrun's business; the processes read the same
environment from either (``pytorch/ranks.py``). Why torchrun's own agent is not used here is said in docs/decisions.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

from posttrainllm.cli.failures import FAILED
from posttrainllm.cli.worker import RUN_FILE, report_file
from posttrainllm.errors import EngineError, PosttrainError, TrainingError
from posttrainllm.interrupts import STOPPED
from posttrainllm.pytorch.needed import require_torch
from posttrainllm.pytorch.ranks import LISTENING, REPORT

GRACE_S = 5.0  # for the rest to end by itself after one has ended; whoever computes with a dead process waits for ever
POLL_S = 0.05


class RankError(TrainingError):
    """A process of the run ended, and with it the run."""

    def __init__(self, message: str, hint: str, code: int = FAILED) -> None:
        """``code`` is what the command ends with."""
        super().__init__(message, hint)
        self.exit_code = code


@dataclass
class Worker:
    """One process of the run."""

    rank: int
    process: subprocess.Popen[bytes]
    said: Path  # what it wrote to standard error; rank 0 writes to the terminal
    killed: bool = False  # from here

    @property
    def code(self) -> int | None:
        """Its exit code, negative for a signal; None while it runs."""
        return self.process.poll()

    @property
    def signalled(self) -> bool:
        """Whether a signal ended it that was not sent from here."""
        return not self.killed and (self.code or 0) < 0


def launch(count: int, arguments: Sequence[str]) -> int:
    """Run a command line in ``count`` processes and wait for them; returns rank 0's exit code.

    Raises: PosttrainError, with what ended the run, when it did not end by itself.
    """
    if sys.platform == "win32":
        raise EngineError("--nproc works on Linux and macOS", "start the processes with torchrun")
    require_torch()
    with tempfile.TemporaryDirectory(prefix="posttrainllm-") as name:
        folder = Path(name)
        workers: list[Worker] = []
        try:
            with _signals_go_to_rank_0(workers) as asked:
                _start(workers, count, arguments, folder)
                _watch(workers)
                return _result(workers, folder, stopped=bool(asked))
        finally:
            for worker in workers:
                _kill(worker)


def _start(workers: list[Worker], count: int, arguments: Sequence[str], folder: Path) -> None:
    """Start the processes. They meet at a socket that is open already: no other program can take its port."""
    command = [sys.executable, "-m", "posttrainllm", *arguments]
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)  # theirs: Ctrl-C comes through this one
    try:
        with socket.create_server(("127.0.0.1", 0)) as server:
            for rank in range(count):
                said = folder / f"rank-{rank}.txt"
                environment = _environment(rank, count, server, folder)
                with said.open("wb") as stream:
                    process = subprocess.Popen(
                        command,
                        env=environment,
                        pass_fds=[server.fileno()] if rank == 0 else [],
                        stdin=None if rank == 0 else subprocess.DEVNULL,
                        stdout=None if rank == 0 else subprocess.DEVNULL,
                        stderr=None if rank == 0 else stream,
                        start_new_session=rank > 0,
                    )
                workers.append(Worker(rank, process, said))
    except OSError as error:
        raise EngineError(
            f"process {len(workers) + 1} of {count} could not be started: {error.strerror or error}",
            "use a smaller --nproc",
        ) from None
    finally:
        signal.signal(signal.SIGINT, before)


def _environment(rank: int, count: int, server: socket.socket, folder: Path) -> dict[str, str]:
    """What torchrun would say, and where to report to."""
    near = {"GLOO_SOCKET_IFNAME": "lo"} if sys.platform == "linux" else {}
    return {
        **near,  # whatever this machine's name resolves to
        **os.environ,
        "RANK": str(rank),
        "WORLD_SIZE": str(count),
        "LOCAL_RANK": str(rank),
        "LOCAL_WORLD_SIZE": str(count),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(server.getsockname()[1]),
        LISTENING: str(server.fileno()),
        REPORT: str(folder),
    }


@contextmanager
def _signals_go_to_rank_0(workers: list[Worker]) -> Iterator[list[int]]:
    """Hand on what asks for an end: rank 0 finishes the step and saves. Yields the signals that came."""
    asked: list[int] = []

    def hand_on(number: int, frame: FrameType | None) -> None:
        asked.append(number)
        if workers:
            workers[0].process.send_signal(signal.SIGTERM if number == signal.SIGINT else number)

    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    kept = [number for number in numbers if signal.getsignal(number) != signal.SIG_IGN]
    before = {number: signal.signal(number, hand_on) for number in kept}
    try:
        yield asked
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _watch(workers: list[Worker]) -> None:
    """Wait until rank 0 has ended, or another one badly; then for the rest, which is ended after a while."""
    while workers[0].code is None and not any(worker.code for worker in workers[1:]):
        time.sleep(POLL_S)
    end = time.monotonic() + GRACE_S
    while time.monotonic() < end and any(worker.code is None for worker in workers):
        time.sleep(POLL_S)
    for worker in workers:
        _kill(worker)


def _kill(worker: Worker) -> None:
    if worker.code is None:
        worker.killed = True
        worker.process.kill()
    worker.process.wait()


def _result(workers: list[Worker], folder: Path, *, stopped: bool) -> int:
    """Rank 0's exit code when it ended by itself; else the error that ended the run.

    Raises: RankError.
    """
    first = workers[0].code
    if not workers[0].killed and first in (0, STOPPED):
        return first
    if stopped and first == -signal.SIGTERM:  # before there was anything to save
        return STOPPED
    count = len(workers)
    for worker in workers:
        if worker.signalled:
            name = signal.Signals(-(worker.code or 0)).name
            memory = " (which the system does when memory runs out)" if name == "SIGKILL" else ""
            raise RankError(
                f"rank {worker.rank} of {count} was ended by {name}{memory}; the run has stopped",
                _go_on(folder, count),
            )
    reports = [(report, worker) for worker in workers if (report := _report(worker, folder))]
    if reports:  # what a rank did wrong goes before what another noticed of it
        report, worker = min(reports, key=lambda one: (one[0]["lost"], one[0]["time"]))
        silent = next((one for one in workers if one.killed), None)
        if report["lost"] and silent is not None:
            raise RankError(
                f"rank {silent.rank} of {count} does not answer, and the run has stopped",
                _go_on(folder, count),
            )
        who = f"rank {worker.rank} of {count}: " if worker.rank else ""
        raise RankError(f"{who}{report['message']}", report["hint"], report["code"])
    worker = next((worker for worker in workers if worker.code), workers[0])
    last = worker.said.read_text("utf-8", "replace").strip().splitlines()
    reason = f": {last[-1][:200]}" if last else ""
    raise RankError(
        f"rank {worker.rank} of {count} ended with code {worker.code}{reason}",
        _go_on(folder, count),
    )


def _report(worker: Worker, folder: Path) -> dict[str, Any] | None:
    try:
        report: dict[str, Any] = json.loads(report_file(folder, worker.rank).read_text("utf-8"))
    except (OSError, ValueError):
        return None
    return report


def _go_on(folder: Path, count: int) -> str:
    """Say what is safe and how to go on with it."""
    from posttrainllm.cli.report import command, where
    from posttrainllm.runs.checkpoint import list_checkpoints, step_of
    from posttrainllm.runs.folder import Run

    try:
        run = Run(Path((folder / RUN_FILE).read_text("utf-8", "surrogateescape")))
        saved = max((step_of(found) for found in list_checkpoints(run.checkpoints)), default=0)
    except (OSError, PosttrainError):
        return "nothing was trained yet"
    how = f"{command()} train --resume {where(run.path)} --nproc {count}"
    if not saved:
        return (
            f"no checkpoint was saved; start again: {how}"
            if run.path.is_dir()
            else "nothing was saved"
        )
    return f"the newest checkpoint is of step {saved:,}; go on with it: {how}"
