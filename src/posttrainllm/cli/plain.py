"""A run in plain lines, for a pipe, a log file or a terminal that can only print."""

from __future__ import annotations

from pathlib import Path

from posttrainllm.cli.figures import clock, one_line
from posttrainllm.cli.report import show_end, show_sample, show_start, start_warnings
from posttrainllm.cli.terminal import say
from posttrainllm.cli.watcher import Watcher
from posttrainllm.training.observer import Outcome, Record

LINES = 20  # of progress, about: what a log can bear


class Quiet(Watcher):
    """Only warnings and notices, on standard error."""

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
        measured = record.val_loss is not None
        every = max(1, progress.steps // LINES)
        if record.step % every and record.step != progress.steps and not measured:
            return
        val = "-" if progress.val_loss is None else f"{progress.val_loss:.3f}"
        line = (
            f"step {record.step:>{len(str(progress.steps))}}/{progress.steps}  "
            f"loss {progress.loss:.3f}  val {val:>5}  "
            f"{record.tokens_per_second:>9,.0f} tokens/s  {clock(progress.seconds_left):>5} left"
        )
        if self.verbose:
            line += f"  lr {record.lr:.2e}  gradient norm {record.grad_norm:.3f}"
        if measured and record.val_loss is not None:
            line += f"  {progress.stands(record.val_loss)}"
        say(line.rstrip())

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
