"""Resident memory of this process: now, and the highest since it was last asked to forget.

Linux tells both and forgets on demand; elsewhere the peak is that of the whole life of the process, and without either it is unknown.
"""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path

STATUS = Path("/proc/self/status")


def resident_bytes() -> int | None:
    """Bytes resident now."""
    return _status("VmRSS")


def forget_peak() -> None:
    """Let the peak start again from what is resident now, where the system allows it."""
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")


def peak_bytes() -> int | None:
    """The most bytes that were resident since ``forget_peak``."""
    peak = _status("VmHWM")
    if peak is not None or sys.platform == "win32":
        return peak
    import resource

    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def _status(field: str) -> int | None:
    try:
        for line in STATUS.read_text().splitlines():
            if line.startswith(f"{field}:"):
                return int(line.split()[1]) * 1024
    except (OSError, ValueError, IndexError):
        pass
    return None
