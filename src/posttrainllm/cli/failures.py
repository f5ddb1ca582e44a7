"""From exceptions to one line on standard error and an exit code; never a traceback.

    0    good
    1    a check failed, training cannot go on, or a mistake of ours
    2    wrong use or bad input
    130  stopped by the user
    141  the reader of our output ended (what a shell reports for a broken pipe)

``POSTTRAINLLM_TRACEBACK=1`` shows the traceback as well.
"""

from __future__ import annotations

import contextlib
import os
import sys
import traceback
from collections.abc import Callable

import typer

from posttrainllm.cli.worker import report_error, which_rank
from posttrainllm.errors import LostError, PosttrainError
from posttrainllm.interrupts import STOPPED, Interrupts
from posttrainllm.wording import in_terminal

GOOD, FAILED, WRONG_USE, BROKEN_PIPE = 0, 1, 2, 141

NO_MEMORY = ("can't allocate memory", "cannot allocate memory", "failed to map segment")
"""What libraries and the system's loader say in errors of other kinds."""


def exit_code(command: Callable[[], object], interrupts: Interrupts | None = None) -> int:
    """Run a command and return its exit code, telling the user what went wrong.

    ``interrupts`` are the process's: an error that a library makes of one is the interrupt.
    """
    try:
        if interrupts is not None:
            interrupts.run()
        command()
        sys.stdout.flush()
        return GOOD
    except typer.Exit as leave:
        return leave.exit_code
    except (KeyboardInterrupt, typer.Abort):
        _tell("stopped")
        return STOPPED
    except BrokenPipeError:
        from posttrainllm.cli.terminal import discard_output

        discard_output()
        return BROKEN_PIPE
    except Exception as error:
        if interrupts is not None and interrupts.count:
            _tell("stopped")
            return STOPPED
        if os.environ.get("POSTTRAINLLM_TRACEBACK"):
            traceback.print_exc()
        message, hint, code = explain(error)
        if not report_error(message, hint, code, lost=isinstance(error, LostError)):
            _tell(f"error: {which_rank()}{message}", hint)
        return code


def explain(error: Exception) -> tuple[str, str, int]:
    """Return message, hint and exit code for an exception."""
    if isinstance(error, PosttrainError):
        return error.message, in_terminal(error.hint), error.exit_code
    if hasattr(error, "format_message"):  # wrong use, as typer (or click) reports it
        context = getattr(error, "ctx", None)
        path = context.command_path if context else "posttrainllm"
        message, _, _ = (
            str(error.format_message()).strip().rstrip(".").partition(", unable to parse")
        )
        message += _given(error)
        message = message.replace("Input should be", "must be")
        return message[:1].lower() + message[1:], f"see {path} --help", WRONG_USE
    if isinstance(error, MemoryError) or any(words in str(error).lower() for words in NO_MEMORY):
        return "there is not enough memory", "use a smaller preset or --batch-size", WRONG_USE
    if isinstance(error, OSError):
        where = f": {error.filename}" if error.filename else ""
        return f"{error.strerror or error}{where}".strip(), "", WRONG_USE
    if isinstance(error, ImportError) and not str(error.name or "").startswith("posttrainllm"):
        return f"a library cannot be loaded: {error}", "install it again", WRONG_USE
    return (
        f"{type(error).__name__}: {error}",
        "this is a mistake in posttrainllm; POSTTRAINLLM_TRACEBACK=1 shows where",
        FAILED,
    )


def _given(error: Exception) -> str:
    """What was given where something else was wanted; typer from 0.29 on leaves that to the cause."""
    found: list[dict[str, object]] = getattr(error.__cause__, "errors", list)()
    if not found or "input" not in found[0]:
        return ""
    from posttrainllm.settings import show

    return f", got {show(found[0]['input'])}"


def _tell(message: str, hint: str = "") -> None:
    """Write one line, and the hint on a second one, to standard error."""
    from posttrainllm.cli.terminal import say
    from posttrainllm.figures import one_line

    with contextlib.suppress(OSError):
        sys.stdout.flush()
    with contextlib.suppress(OSError):
        head, colon, rest = one_line(message).partition(": ")
        say((head + colon, "bold red" if head == "error" else ""), rest, error=True)
        if hint:
            say("  " + one_line(hint), error=True)
