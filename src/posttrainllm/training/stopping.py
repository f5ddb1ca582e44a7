"""Ctrl-C, SIGTERM and a terminal that is closed, while a run trains.

    the first    asks for an orderly end: the step is finished and saved; evaluations and samples are given up
    the second   gives up the step that is being computed, too: what was trained before it is saved
    the third    ends at once, whatever is being done

Only the third one is an exception at any place. The second one is where ``giving_up`` says that nothing is half changed.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

from posttrainllm.pytorch.ranks import REPORT

HANGUP = getattr(signal, "SIGHUP", None)  # Windows has none


class StopSignals:
    """While this context is open, signals are counted and answered as the module says.

    A closed terminal (SIGHUP) may be told twice, by the shell and by the system, and counts once.
    Those that whoever started the process has set to be ignored (nohup, a script's background) stay ignored.
    Outside the main thread (a notebook's worker, a test) signals stay as they are, and ``requested`` can be set by hand.
    """

    def __init__(self, told: Callable[[], None] = lambda: None, *, breakable: bool = True) -> None:
        """Nothing is asked for yet. ``told`` is called inside the signal handler, at the first signal.

        ``breakable`` False is for computations that other processes have a part in: a second signal then waits for the end of one.
        """
        self.requested = False
        self.again = False
        self.at_once = False
        self._told = told
        self._breakable, self._open = breakable, False
        self._before: dict[int, Any] = {}

    def __enter__(self) -> StopSignals:
        try:
            self._take()
        except BaseException:  # interrupted between two of them
            self.__exit__()
            raise
        return self

    def _take(self) -> None:
        if threading.current_thread() is not threading.main_thread():
            return
        numbers = [signal.SIGTERM]
        if REPORT not in os.environ:  # else the process that started this one hands Ctrl-C on
            numbers.insert(0, signal.SIGINT)
        if HANGUP is not None:
            numbers.append(HANGUP)
        for number in numbers:
            if (before := signal.getsignal(number)) != signal.SIG_IGN:
                self._before[number] = before
                signal.signal(number, self._handle)

    def __exit__(self, *error: object) -> None:
        for number in reversed(self._before):  # Ctrl-C last: it may interrupt what comes after
            signal.signal(number, self._before[number])

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if not self.requested:
            self.requested = True
            self._told()
        elif number == HANGUP:
            return
        elif self.again:
            self.at_once = True
            raise KeyboardInterrupt
        else:
            self.again = True
            if self._open:
                self._open = False
                raise KeyboardInterrupt

    @contextmanager
    def giving_up(self) -> Iterator[None]:
        """Around a computation that can end early since it changes nothing that is saved; what comes after it goes on.

        Within, a second signal and ``check`` raise KeyboardInterrupt, which ends here.
        """
        self._open = self._breakable
        try:
            yield
        except KeyboardInterrupt:
            if self.at_once or not self.requested:
                raise
        finally:
            self._open = False

    def check(self) -> None:
        """Between two parts of a computation inside ``giving_up``: go no further once the end was asked for."""
        if self.requested:
            raise KeyboardInterrupt

    def wait(self, seconds: float) -> None:
        """Sleep, but not past a signal."""
        end = time.monotonic() + seconds
        before = self.requested, self.again
        while (self.requested, self.again) == before and time.monotonic() < end:
            time.sleep(min(0.05, seconds))
