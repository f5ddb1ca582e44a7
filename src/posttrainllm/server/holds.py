"""Who may write a run: one at a time, a process that trains it or a tab.

A tab that trains into ``runs/`` holds the run by a connection that stays open: as long as it is
there, the server has the run's lock (runs/lock.py), and a terminal that wants the run is refused as
it would be by another terminal. Whoever holds it shows a token with each write. A write with no
hold takes the lock for as long as it lasts.
"""

from __future__ import annotations

import contextlib
import secrets
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from posttrainllm.errors import CheckpointError
from posttrainllm.runs.lock import RunLock
from posttrainllm.server.answers import RefusalError, refusal_of

TOKEN_HEADER = "x-hold"


@dataclass
class Hold:
    """The lock of one run, and the token of the tab that has it."""

    lock: RunLock
    token: str


class Holds:
    """The holds of all runs of this server; its methods may be called from any thread."""

    def __init__(self) -> None:
        """Nothing is held."""
        self._held: dict[Path, Hold] = {}
        self._turns: dict[Path, threading.Lock] = {}
        self._guard = threading.Lock()

    def take(self, run: Path) -> str:
        """Take a run for a tab and return its token.

        Raises: RefusalError 409 when a process or another tab has it.
        """
        with self._turn(run):
            if run in self._held:
                raise _open_elsewhere(run)
            self._held[run] = Hold(_lock(run), secrets.token_hex(16))
            return self._held[run].token

    def give_back(self, run: Path, token: str) -> None:
        """Give a run back; done twice is done once."""
        with self._turn(run):
            hold = self._held.get(run)
            if hold is not None and hold.token == token:
                del self._held[run]
                hold.lock.release()

    def give_back_all(self) -> None:
        """Give everything back, at the end of the server."""
        for run, hold in list(self._held.items()):
            self.give_back(run, hold.token)

    @contextlib.contextmanager
    def writing(self, run: Path, token: str | None) -> Iterator[None]:
        """Have the run to oneself while the block runs.

        Raises: RefusalError 409 when somebody else has it.
        """
        with self._turn(run):
            hold = self._held.get(run)
            if hold is not None:
                if hold.token != token:
                    raise _open_elsewhere(run)
                yield
                return
            if token is not None:
                raise RefusalError(409, f"run {run.name} is no longer held", "open it again")
            with _lock(run):
                yield

    def check(self, run: Path, token: str | None) -> None:
        """Say early what ``writing`` would say. Raises: RefusalError 409."""
        with self.writing(run, token):
            pass

    def _turn(self, run: Path) -> threading.Lock:
        with self._guard:
            return self._turns.setdefault(run, threading.Lock())


def _lock(run: Path) -> RunLock:
    try:
        return RunLock(run)
    except CheckpointError as error:
        raise refusal_of(error, 409) from None


def _open_elsewhere(run: Path) -> RefusalError:
    return RefusalError(409, f"run {run.name} is open in another tab", "close it there first")
