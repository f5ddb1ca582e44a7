"""Who watches a run that is trained from Python: an observer that was given, a notebook's output, lines, or nobody."""

from __future__ import annotations

import sys
from contextlib import AbstractContextManager, nullcontext

from posttrainllm.notebook.lines import Lines
from posttrainllm.notebook.live import LiveOutput, kernel_shell, new_output
from posttrainllm.training.observer import Observer


def watching(
    observer: Observer | None, progress: bool | None
) -> AbstractContextManager[Observer | None]:
    """The observer of a run, as a context around it.

    An ``observer`` that was given wins. Else ``progress`` None shows the run in a notebook and nothing in a script, True writes lines to
    standard error where there is no notebook, and False is silent.
    """
    if observer is not None or progress is False:
        return nullcontext(observer)
    if kernel_shell() is not None:
        return LiveOutput(new_output())
    return Lines(sys.stderr) if progress else nullcontext(None)
