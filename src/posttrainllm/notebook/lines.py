"""A run in plain lines, for a script that wants to see its training: what ``posttrainllm train`` prints into a pipe."""

from __future__ import annotations

import contextlib
import os
import time
from pathlib import Path
from typing import TextIO

from posttrainllm.figures import clock, one_line, part_done, printable
from posttrainllm.notebook.words import next_steps
from posttrainllm.training.observer import Outcome, Record, Start
from posttrainllm.training.progress import Progress
from posttrainllm.training.report import (
    Rows,
    end_rows,
    ending,
    start_rows,
    start_warnings,
    step_line,
)

TOLD_EVERY_S = 10.0  # of work before the start


class Lines:
    """An ``Observer`` that writes to a stream. A stream that is gone is left alone: training goes on."""

    def __init__(self, stream: TextIO) -> None:
        """Nothing has started."""
        self._stream = stream
        self._progress: Progress | None = None
        self._told = time.monotonic()

    def __enter__(self) -> Lines:
        return self

    def __exit__(self, *error: object) -> None:
        """Everything is written already."""

    def preparing(self, what: str, done: int, total: int) -> None:
        """See ``Observer``: a line every ten seconds."""
        if time.monotonic() - self._told > TOLD_EVERY_S:
            self._told = time.monotonic()
            self._write(part_done(what, done, total))

    def started(self, start: Start) -> None:
        """See ``Observer``."""
        self._progress = Progress(start)
        warnings = [("warning", one_line(warning)) for warning in start_warnings(start)]
        self._write(*_aligned([*start_rows(start), *warnings]), "")

    def stepped(self, record: Record) -> None:
        """See ``Observer``."""
        if self._progress is not None:
            self._progress.add(record)
            line = step_line(self._progress, record)
            self._write(*([line] if line else []))

    def sampled(self, step: int, prompt: str, text: str) -> None:
        """See ``Observer``: the last one is written at the end."""
        if self._progress is not None:
            self._progress.sample = (step, prompt, text)

    def saved(self, step: int, folder: Path) -> None:
        """See ``Observer``."""

    def noticed(self, message: str) -> None:
        """See ``Observer``."""
        self._write(f"notice: {one_line(message)}")

    def stopping(self) -> None:
        """See ``Observer``. Straight to the descriptor: a signal handler may not print."""
        with contextlib.suppress(OSError, ValueError):
            os.write(
                self._stream.fileno(), b"stopping after this step; Ctrl-C again stops at once\n"
            )

    def ended(self, outcome: Outcome) -> None:
        """See ``Observer``."""
        progress = self._progress
        if progress is None:
            return
        if outcome.finished and progress.sample:
            step, prompt, text = progress.sample
            self._write(f"sample at step {step:,}", printable(prompt) + printable(text), "")
        self._write(f"{ending(outcome)} in {clock(progress.elapsed)}")
        self._write(*_aligned(end_rows(progress, outcome)), "")
        for step_after in next_steps(progress.start.config, outcome):
            self._write(f"{step_after.why}:" if step_after.code else step_after.why)
            self._write(*([f"  {step_after.code}"] if step_after.code else []))

    def _write(self, *lines: str) -> None:
        if not lines:
            return
        text = "".join(line + "\n" for line in lines)
        with contextlib.suppress(OSError, ValueError):  # closed, or a pipe whose reader ended
            encoding = self._stream.encoding or "utf-8"
            self._stream.write(text.encode(encoding, "backslashreplace").decode(encoding))
            self._stream.flush()


def _aligned(rows: Rows) -> list[str]:
    indent = max((len(label) for label, _ in rows), default=0) + 2
    return [f"{label:<{indent}}{value}" for label, value in rows]
