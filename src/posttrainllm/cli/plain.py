"""A run in plain lines, for a pipe, a log file or a terminal that can only print."""

from __future__ import annotations

from pathlib import Path

from posttrainllm.cli.report import show_end, show_sample, show_start
from posttrainllm.cli.terminal import say
from posttrainllm.cli.watcher import Watcher
from posttrainllm.figures import one_line
from posttrainllm.training.observer import Outcome, Record
from posttrainllm.training.report import start_warnings, step_line


class Quiet(Watcher):
    """Only warnings and notices, on standard error."""

    def preparing(self, what: str, done: int, total: int) -> None:
        """See ``Observer``: not a word."""

    def show_start(self) -> None:
        """See ``Watcher``."""
        assert self.progress is not None
        for warning in start_warnings(self.progress.start):
            say(("warning: ", "yellow"), one_line(warning), error=True)


class PlainLines(Watcher):
    """One line every so many steps, and one for each evaluation."""

    def __init__(self, *, verbose: bool = False) -> None:
        """``verbose`` adds columns and shows every sample and checkpoint."""
        super().__init__()
        self.verbose = verbose

    def show_start(self) -> None:
        """See ``Watcher``."""
        assert self.progress is not None
        show_start(self.progress.start)

    def show_step(self, record: Record) -> None:
        """See ``Watcher``."""
        progress = self.progress
        assert progress is not None
        line = step_line(progress, record, verbose=self.verbose)
        if line is not None:
            say(line)

    def show_sample(self) -> None:
        """See ``Watcher``."""
        assert self.progress is not None
        if self.verbose and self.progress.sample and self.progress.step < self.progress.steps:
            show_sample(*self.progress.sample)

    def show_saved(self, folder: Path) -> None:
        """See ``Watcher``."""
        if self.verbose:
            say(f"saved {one_line(str(folder))}")

    def show_end(self, outcome: Outcome) -> None:
        """See ``Watcher``."""
        assert self.progress is not None
        show_end(self.progress, outcome)
