"""A process that ``train --nproc`` started: what it tells the one that started it, instead of printing.

What this is: the writing side of a folder that both know: why a rank ended, and where the run is.
What this is not: the watching side (``launch.py``).
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import NoReturn

from posttrainllm.pytorch.ranks import REPORT

RUN_FILE = "run"
_PR_SET_PDEATHSIG = 1


def report_folder() -> Path | None:
    """Where to report to; None in a process that nobody watches."""
    folder = os.environ.get(REPORT)
    return Path(folder) if folder else None


def report_file(folder: Path, rank: int) -> Path:
    """Where a rank says what ended it."""
    return folder / f"rank-{rank}.json"


def report_error(message: str, hint: str, code: int, *, lost: bool) -> bool:
    """Leave an error to whoever watches; False when nobody does. ``lost``: it only noticed that another process is gone."""
    folder = report_folder()
    if folder is None:
        return False
    document = {"message": message, "hint": hint, "code": code, "lost": lost, "time": time.time()}
    path = report_file(folder, int(os.environ.get("RANK", "0")))
    try:
        path.with_suffix(".tmp").write_text(json.dumps(document), "utf-8")
        path.with_suffix(".tmp").rename(path)
    except OSError:
        return False
    return True


def which_rank() -> str:
    """How an error begins on another rank than 0, under torchrun: "rank 3 of 8: "."""
    rank, count = os.environ.get("RANK", "0"), os.environ.get("WORLD_SIZE", "1")
    return "" if count == "1" or rank == "0" else f"rank {rank} of {count}: "


def report_run(run: Path) -> None:
    """Say which run this is, for what has to be said when no rank can."""
    if (folder := report_folder()) is not None:
        with suppress(OSError):
            (folder / RUN_FILE).write_text(str(run), "utf-8", "surrogateescape")


def end_with_the_launcher() -> None:
    """Let the system ask this process for an orderly end when the one that started it is killed (Linux alone can)."""
    if report_folder() is not None and sys.platform == "linux":
        import ctypes

        with suppress(OSError, AttributeError):
            ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


def leave_at_once(code: int) -> NoReturn:
    """End this process without the end of every library in it; what was printed is out."""
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):
            stream.flush()
    os._exit(code)
