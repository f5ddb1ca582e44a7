"""Who watches a run from the command line: what the displays share.

``PlainLines``, ``LiveDisplay``, ``JsonLines`` and ``Quiet`` are ``Observer`` and context manager each. When
standard output is gone (its reader ended), training goes on without it: ``metrics.jsonl`` has
everything.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import Self

from posttrainllm.cli.terminal import discard_output, say
from posttrainllm.cli.ticker import Ticker
from posttrainllm.figures import one_line
from posttrainllm.training.observer import Outcome, Record, Start
from posttrainllm.training.progress import Progress
from posttrainllm.wording import in_terminal


class Watcher:
    """What all displays share: the progress, and a standard output that may go away."""

    def __init__(self) -> None:
        """Nothing has started."""
        self.progress: Progress | None = None
        self._ticker: Ticker | None = None
        self._open = True

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._prepared()
        self.close()

    def close(self) -> None:
        """Leave the terminal as it should be, however the run ended."""

    def preparing(self, what: str, done: int, total: int) -> None:
        """See ``Observer``: a line on standard error, whatever the display."""
        if self._ticker is None:
            self._ticker = Ticker()
        self._ticker(what, done, total)

    def _prepared(self) -> None:
        if self._ticker is not None:
            self._ticker.erase()
            self._ticker = None

    def started(self, start: Start) -> None:
        """See ``Observer``."""
        self._prepared()
        self.progress = Progress(start)
        self._print(self.show_start)

    def stepped(self, record: Record) -> None:
        """See ``Observer``."""
        assert self.progress is not None
        self.progress.add(record)
        self._print(lambda: self.show_step(record))

    def sampled(self, step: int, prompt: str, text: str) -> None:
        """See ``Observer``."""
        assert self.progress is not None
        self.progress.sample = (step, prompt, text)
        self._print(self.show_sample)

    def saved(self, step: int, folder: Path) -> None:
        """See ``Observer``."""
        assert self.progress is not None
        self.progress.saved = step
        self._print(lambda: self.show_saved(folder))

    def noticed(self, message: str) -> None:
        """See ``Observer``."""
        self._print(lambda: self.show_notice(in_terminal(message)))

    def stopping(self) -> None:
        """See ``Observer``. Straight to the descriptor: a signal handler may not print."""
        with contextlib.suppress(OSError):
            os.write(2, b"stopping after this step; Ctrl-C again stops at once\n")

    def ended(self, outcome: Outcome) -> None:
        """See ``Observer``."""
        self._print(lambda: self.show_end(outcome))

    def _print(self, show: Callable[[], None]) -> None:
        """Print unless standard output is gone."""
        if not self._open:
            return
        try:
            show()
        except OSError as error:
            self._open = False
            discard_output()
            what = error.strerror or str(error)
            with contextlib.suppress(OSError):
                say(f"notice: standard output is gone ({what}); training goes on", error=True)

    def show_start(self) -> None:
        """Before the first step."""

    def show_step(self, record: Record) -> None:
        """After a logged step; the progress has it already."""

    def show_sample(self) -> None:
        """The model wrote something; the progress has it already."""

    def show_saved(self, folder: Path) -> None:
        """A checkpoint is on the disk."""

    def show_notice(self, message: str) -> None:
        """Training goes on, and the user should know this."""
        say(("notice: ", "yellow"), one_line(message), error=True)

    def show_end(self, outcome: Outcome) -> None:
        """The run is over."""
