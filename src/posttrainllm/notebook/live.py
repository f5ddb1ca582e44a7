"""A run in a notebook while it trains: one output that is drawn again a few times a second.

What this is: ``LiveOutput``, an ``Observer``, and how a notebook is recognised. A thread draws, so that the clock runs and an interrupt
is answered while a long step computes; the thread that trains only notes what happened. Whatever goes wrong with drawing, training
goes on: ``metrics.jsonl`` has everything.
What this is not: what the output looks like (``page.py``). IPython is never imported here unless it runs already.
"""

from __future__ import annotations

import contextlib
import contextvars
import os
import sys
import threading
import time
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any, Self
from uuid import uuid4

from posttrainllm.errors import PosttrainError
from posttrainllm.figures import part_done
from posttrainllm.notebook.page import broken_html, end_html, live_html
from posttrainllm.notebook.words import next_steps
from posttrainllm.runs.folder import Run
from posttrainllm.runs.records import number_of
from posttrainllm.training.observer import Outcome, Record, Start
from posttrainllm.training.progress import Progress
from posttrainllm.training.report import end_rows, ending

Bundle = dict[str, str]
"""What a notebook shows, by its kind: text/html for the page, text/plain for whoever cannot draw that."""

PERIOD_S = 0.5  # between two frames
SLOW_PERIOD_S = 2.0  # after a minute: a notebook that is looked at for hours need not flicker
MOST_NOTICES = 8


def kernel_shell() -> Any:
    """The shell of the notebook that this runs in (Jupyter, VS Code, Colab); None in a script or a terminal.

    None too in a process that a kernel was forked into, such as a pool's: it has the shell and may show nothing with it.
    """
    module = sys.modules.get("IPython")
    find = getattr(module, "get_ipython", None)
    shell = find() if callable(find) else None
    kernel = getattr(shell, "kernel", None)
    ours = getattr(getattr(kernel, "session", None), "pid", None) in (None, os.getpid())
    return shell if kernel is not None and ours else None


def new_output() -> Callable[[Bundle], None]:
    """A new output of the running cell: the function shows a page in it, in place of the one before."""
    show = import_module("IPython.display").display
    name, shown = uuid4().hex, False

    def show_in_place(bundle: Bundle) -> None:
        nonlocal shown
        show(bundle, raw=True, display_id=name, update=shown)
        shown = True

    return show_in_place


class LiveOutput:
    """See the module. ``show`` takes a page; a context manager, so that the last state is shown however the run ends."""

    def __init__(self, show: Callable[[Bundle], None], *, period: float = PERIOD_S) -> None:
        """Nothing has started, nothing is shown."""
        self._show = show
        self._period = period
        self._progress: Progress | None = None
        self._outcome: Outcome | None = None
        self._told: list[str] = []
        self._preparing = ""
        self._drawn = time.monotonic()
        self._lock = threading.Lock()
        self._done = threading.Event()
        # In a copy of this context, since kernels find the cell that an output belongs to by theirs.
        self._thread = threading.Thread(
            target=contextvars.copy_context().run, args=(self._keep_drawing,), daemon=True
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        """Stop drawing, and show the last state."""
        self._done.set()
        if self._thread.is_alive():
            self._thread.join()
        if self._progress is not None or self._told or self._preparing:
            self._draw(last=True)

    def preparing(self, what: str, done: int, total: int) -> None:
        """See ``Observer``: a line where the run will be."""
        if time.monotonic() - self._drawn > self._period:
            self._drawn = time.monotonic()
            self._preparing = part_done(what, done, total)
            self._draw()

    def started(self, start: Start) -> None:
        """See ``Observer``: a run that goes on shows its curve from the beginning."""
        progress = Progress(start)
        if start.first_step > 1:
            progress.saved = start.first_step - 1
            with contextlib.suppress(PosttrainError):
                _add_earlier(progress, Run(start.run))
        with self._lock:
            self._progress = progress
        self._draw()
        self._thread.start()

    def stepped(self, record: Record) -> None:
        """See ``Observer``."""
        with self._lock:
            if self._progress is not None:
                self._progress.add(record)

    def sampled(self, step: int, prompt: str, text: str) -> None:
        """See ``Observer``."""
        with self._lock:
            if self._progress is not None:
                self._progress.sample = (step, prompt, text)

    def saved(self, step: int, folder: Path) -> None:
        """See ``Observer``."""
        if self._progress is not None:
            self._progress.saved = step

    def noticed(self, message: str) -> None:
        """See ``Observer``: it stays, the newest few of many."""
        with self._lock:
            if message not in self._told:
                self._told = [*self._told, message][-MOST_NOTICES:]

    def stopping(self) -> None:
        """See ``Observer``: the next frame says so. Without the lock, which the interrupted thread may hold."""
        if self._progress is not None:
            self._progress.stopping = True

    def ended(self, outcome: Outcome) -> None:
        """See ``Observer``: shown when the context is left."""
        self._outcome = outcome

    def _keep_drawing(self) -> None:
        progress = self._progress
        assert progress is not None
        while not self._done.wait(
            self._period if progress.elapsed < 60 else max(self._period, SLOW_PERIOD_S)
        ):
            self._draw()

    def _draw(self, *, last: bool = False) -> None:
        """Show the state as it is. A page that cannot be made or shown is left out: the run is worth more."""
        with contextlib.suppress(Exception):
            with self._lock:
                bundle = self._page(last=last)
            self._show(bundle)

    def _page(self, *, last: bool) -> Bundle:
        progress, outcome = self._progress, self._outcome
        if progress is None:
            lines = [*self._told, *([self._preparing] if self._preparing and not last else [])]
            return {"text/plain": "\n".join(lines)}
        if outcome is not None and last:
            html = end_html(progress, outcome, self._told)
            return {"text/html": html, "text/plain": end_text(progress, outcome)}
        html = broken_html(progress, self._told) if last else live_html(progress, self._told)
        loss = "" if progress.loss is None else f", loss {progress.loss:.3f}"
        plain = f"{progress.start.run.name}: step {progress.step:,} of {progress.steps:,}{loss}"
        return {"text/html": html, "text/plain": plain}


def end_text(progress: Progress, outcome: Outcome) -> str:
    """A run that ended, in plain lines: what it came to and what to do next."""
    rows = [f"{label}: {value}" for label, value in end_rows(progress, outcome)]
    after = [
        f"{step.why}: {step.code}" if step.code else step.why
        for step in next_steps(progress.start.config, outcome)
    ]
    return "\n".join([ending(outcome), *rows, *after])


def _add_earlier(progress: Progress, run: Run) -> None:
    """The losses of a run from before it went on."""
    for line in run.metrics.read():
        step, loss, val_loss = (number_of(line, key) for key in ("step", "loss", "val_loss"))
        if step is not None and loss is not None:
            progress.curve.add(step, loss)
        if step is not None and val_loss is not None:
            progress.measured.add(step, val_loss)
            progress.val_loss, progress.val_step = val_loss, int(step)
