"""The live display: a run in a few lines of the terminal that are drawn again four times a second.

A thread draws, so that the clock runs and Ctrl-C is answered while a long step computes; everything
else happens in the thread that trains.
"""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections.abc import Callable

from posttrainllm.cli.area import LiveArea, terminal_size
from posttrainllm.cli.frame import frame
from posttrainllm.cli.report import show_end, show_start
from posttrainllm.cli.terminal import in_foreground, say
from posttrainllm.cli.watcher import Watcher
from posttrainllm.figures import one_line
from posttrainllm.training.observer import Outcome

PERIOD_S = 0.25
ASLEEP_S = 1.5  # without a frame: the process was suspended or in the background, and the shell wrote below


class LiveDisplay(Watcher):
    """See the module."""

    def __init__(self, *, verbose: bool = False) -> None:
        """``verbose`` adds lines with the rest of the figures."""
        super().__init__()
        self.verbose = verbose
        self._area = LiveArea(sys.stdout)
        self._lock = threading.RLock()
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._keep_drawing, daemon=True)

    def close(self) -> None:
        """See ``Watcher``: the last frame stays when the run did not come to its end."""
        was_drawing = self._thread.is_alive()
        self._stop_drawing()
        with self._lock, contextlib.suppress(OSError):
            if was_drawing:
                self._draw()
            self._area.leave()

    def show_start(self) -> None:
        """See ``Watcher``."""
        assert self.progress is not None
        show_start(self.progress.start)
        self._thread.start()

    def stopping(self) -> None:
        """See ``Observer``: the next frame says so."""
        if self.progress is not None:
            self.progress.stopping = True

    def show_notice(self, message: str) -> None:
        """See ``Watcher``: above the live lines."""
        self._above(lambda: say(("notice: ", "yellow"), one_line(message)))

    def show_end(self, outcome: Outcome) -> None:
        """See ``Watcher``: the report takes the place of the live lines."""
        assert self.progress is not None
        self._stop_drawing()
        with self._lock:
            self._area.erase()
            show_end(self.progress, outcome)

    def _above(self, show: Callable[[], None]) -> None:
        with self._lock:
            self._area.erase()
            show()
            if self._thread.is_alive():
                self._draw()

    def _draw(self) -> None:
        assert self.progress is not None
        width, height = terminal_size()
        self._area.draw(frame(self.progress, width=width, height=height, verbose=self.verbose))

    def _keep_drawing(self) -> None:
        drawn = time.monotonic()
        while not self._done.wait(PERIOD_S):
            with self._lock:
                if self._done.is_set():
                    return
                if not in_foreground(sys.stdout):
                    continue
                if time.monotonic() - drawn > ASLEEP_S:
                    self._area.forget()
                drawn = time.monotonic()
                try:
                    self._draw()
                except OSError:  # the terminal is gone: the thread that trains finds out by itself
                    return

    def _stop_drawing(self) -> None:
        self._done.set()
        if self._thread.is_alive():
            self._thread.join()
