"""Ctrl-C at any moment in the life of a command: one line on standard error and exit code 130, never a traceback.

    starting   modules are imported: the process leaves at once; nothing has begun
    running    the first interrupt is a KeyboardInterrupt, so that what is half made is removed on the way out;
               one that comes while a module is imported waits until it is there
    ending     all is said and done: the process leaves at once, with the code it was about to end with

SIGTERM and a closed terminal (SIGHUP) interrupt, too. Only the process's own entry (``__main__.py``) does this; a notebook or a
script that calls us keeps its signals.
What this is not: the end of a training in good order, for which ``training/stopping.py`` takes the signals over while it lasts.
"""

from __future__ import annotations

import atexit
import os
import signal
import sys
import threading

TYPE_CHECKING = False  # as typing has it: this module is imported before anything that takes time
if TYPE_CHECKING:
    from types import FrameType
    from typing import NoReturn

STOPPED = 130
PATIENCE = 3
"""Interrupts after which the process leaves with whatever it has not removed."""

SOON_S = 0.02


def _is_importing(frame: FrameType | None) -> bool:
    """Whether a module is being imported: an exception there can end the process from inside a library's C++."""
    while frame is not None:
        if frame.f_code.co_filename == "<frozen importlib._bootstrap>":
            return True
        frame = frame.f_back
    return False


class Interrupts:
    """The signals of one process, from its first line to its last."""

    def __init__(self) -> None:
        """Take the signals. Those that whoever started us has set to be ignored (nohup, a shell's background) stay ignored."""
        self.count = 0
        self._running = False
        self._waiting = 0
        self._code: int | None = None
        numbers = [signal.SIGINT]
        if os.environ.get("WORLD_SIZE", "1") == "1":
            # A process of several can wait for another one where no handler runs: SIGTERM has to end it all the same.
            numbers += [signal.SIGTERM, *([signal.SIGHUP] if hasattr(signal, "SIGHUP") else [])]
        for number in numbers:
            if signal.getsignal(number) in (signal.default_int_handler, signal.SIG_DFL):
                signal.signal(number, self._handle)
                # The interpreter gives a handler's signal its default back while it ends, and would die of it.
                atexit.register(signal.signal, number, signal.SIG_IGN)
        sys.unraisablehook = self._unraisable

    def run(self) -> None:
        """From here on an interrupt is an exception."""
        self._running = True

    def end(self, code: int) -> None:
        """From here on an interrupt leaves with this code."""
        self._code = code

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self._running and not self.count and _is_importing(frame):
            if self._waiting + 1 < PATIENCE:
                return self._come_back(number)
            os.write(2, b"stopped\n")
            self._leave(STOPPED)
        self.count += 1
        if self._code is not None:
            self._leave(self._code)
        if not self._running:
            os.write(2, b"stopped\n")
            self._leave(STOPPED)
        if self.count == 1:
            raise KeyboardInterrupt
        if self.count >= PATIENCE:
            self._leave(STOPPED)

    def _come_back(self, number: int) -> None:
        """Raise the signal again a little later."""

        def again() -> None:
            self._waiting -= 1
            os.kill(os.getpid(), number)

        self._waiting += 1
        timer = threading.Timer(SOON_S, again)
        timer.daemon = True
        timer.start()

    @staticmethod
    def _leave(code: int) -> NoReturn:
        os._exit(code)

    def _unraisable(self, error: sys.UnraisableHookArgs) -> None:
        """Raise an interrupt again that came where nothing can be raised: in a callback from C, or when an object goes."""
        if isinstance(error.exc_value, KeyboardInterrupt) and self._running:
            self.count = 0
            self._come_back(signal.SIGINT)
        else:
            sys.__unraisablehook__(error)
