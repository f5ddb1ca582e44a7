"""The highest resident memory of this process since it was last asked to forget; what it is now says ``machine.process_memory``.

Linux forgets on demand; elsewhere the peak is that of the whole life of the process, or unknown.
"""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path


def forget_peak() -> None:
    """Let the peak start again from what is resident now, where the system allows it."""
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")


def peak_bytes() -> int | None:
    """The most bytes that were resident since ``forget_peak``."""
    peak = _high_water()
    if peak is not None or sys.platform == "win32":
        return peak
    import resource

    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def _high_water() -> int | None:
    try:
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    except (OSError, ValueError, IndexError):
        pass
    return None
