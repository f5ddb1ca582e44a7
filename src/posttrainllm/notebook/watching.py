"""Who watches a run that is trained from Python: an observer that was given, a notebook's output, lines, or nobody."""

from __future__ import annotations

import sys
from contextlib import AbstractContextManager, nullcontext

from posttrainllm.errors import ConfigError
from posttrainllm.notebook.lines import Lines
from posttrainllm.notebook.live import LiveOutput, kernel_shell, new_output
from posttrainllm.settings import show
from posttrainllm.training.observer import Observer, Silent

EVENTS = [name for name in vars(Silent) if not name.startswith("_")]
"""Methods of an ``Observer``."""


def watching(
    observer: Observer | None, progress: bool | None
) -> AbstractContextManager[Observer | None]:
    """The observer of a run, as a context around it.

    An ``observer`` that was given wins. Else ``progress`` None shows the run in a notebook and nothing in a script, True writes lines to
    standard error where there is no notebook, and False is silent.

    Raises: ConfigError for an observer that lacks a method.
    """
    lacking = [name for name in EVENTS if not callable(getattr(observer, name, None))]
    if observer is not None and lacking:
        raise ConfigError(
            f"observer is {show(observer)}, which has no method {lacking[0]}",
            "derive its class from posttrainllm.training.observer.Silent",
        )
    if observer is not None or progress is False:
        return nullcontext(observer)
    if kernel_shell() is not None:
        return LiveOutput(new_output())
    # A process that was started without standard error has None there.
    return Lines(sys.stderr) if progress and sys.stderr is not None else nullcontext(None)
