"""Ctrl-C, SIGTERM and a terminal that is closed: the first asks for an orderly end, the second ends at once."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from types import FrameType
from typing import Any

from posttrainllm.pytorch.ranks import REPORT

HANGUP = getattr(signal, "SIGHUP", None)  # Windows has none


class StopSignals:
    """While this context is open, the first signal sets ``requested`` and the second raises KeyboardInterrupt.

    A closed terminal (SIGHUP) may be told twice, by the shell and by the system, and never interrupts; under nohup it is ignored as before.
    Outside the main thread (a notebook's worker, a test) signals stay as they are, and ``requested`` can be set by hand.
    """

    def __init__(self, told: Callable[[], None] = lambda: None) -> None:
        """Nothing is asked for yet. ``told`` is called inside the signal handler, at the first signal."""
        self.requested = False
        self._told = told
        self._before: dict[int, Any] = {}

    def __enter__(self) -> StopSignals:
        if threading.current_thread() is threading.main_thread():
            numbers = [signal.SIGTERM]
            if REPORT not in os.environ:  # else the process that started this one hands Ctrl-C on
                numbers.append(signal.SIGINT)
            if HANGUP is not None and signal.getsignal(HANGUP) != signal.SIG_IGN:
                numbers.append(HANGUP)
            for number in numbers:
                self._before[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, *error: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if not self.requested:
            self.requested = True
            self._told()
        elif number != HANGUP:
            raise KeyboardInterrupt

    def wait(self, seconds: float) -> None:
        """Sleep, but not past a signal."""
        end = time.monotonic() + seconds
        before = self.requested
        while self.requested == before and time.monotonic() < end:
            time.sleep(min(0.05, seconds))
