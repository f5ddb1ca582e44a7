"""The machine this process runs on: what it may use of it and how a record names it."""

from __future__ import annotations

import os
import platform
from pathlib import Path


def available_threads() -> int:
    """Processors this process may use: its affinity, limited by the control group's quota, at least 1."""
    if hasattr(os, "sched_getaffinity"):
        count = len(os.sched_getaffinity(0))
    else:
        count = os.cpu_count() or 1
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()[:2]
        if quota != "max":
            count = min(count, max(1, int(quota) // int(period)))
    except (OSError, ValueError):
        pass
    return max(1, count)


def processor_name() -> str:
    """The processor's own name, or its architecture where the system does not tell."""
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def instruction_sets() -> list[str]:
    """The cpp builds that this processor can run, the best last: ``plain`` always, ``avx2`` and ``avx512`` as the processor says.

    A build is compiled for x86-64-v3 (avx2) or x86-64-v4 (avx512); the flags below are what those levels add for our kernels.
    """
    sets = ["plain"]
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return sets
    flags = next(
        (
            set(line.split(":", 1)[1].split())
            for line in text.splitlines()
            if line.startswith("flags")
        ),
        set(),
    )
    if {"avx2", "fma", "bmi1", "bmi2", "f16c", "movbe"} <= flags:
        sets.append("avx2")
        if {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"} <= flags:
            sets.append("avx512")
    return sets


def available_memory() -> int:
    """Bytes of memory that can still be taken, 0 when unknown: the system's own figure, limited by control group and ``ulimit -v``."""
    limits = _address_space()
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                limits.append(int(line.split()[1]) * 1024)
    except OSError:
        pass
    try:
        maximum = Path("/sys/fs/cgroup/memory.max").read_text().strip()
        if maximum != "max":
            held = int(Path("/sys/fs/cgroup/memory.current").read_text())
            limits.append(int(maximum) - held + _reclaimable())
    except (OSError, ValueError):
        pass
    return max(0, min(limits)) if limits else 0


def _address_space() -> list[int]:
    """What this process may still map, if that is limited. Some of it goes to libraries that are not loaded yet."""
    try:
        import resource  # Windows has none

        limit, _ = resource.getrlimit(resource.RLIMIT_AS)
        if limit == resource.RLIM_INFINITY:
            return []
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        return [max(1, limit - pages * resource.getpagesize())]
    except (ImportError, OSError, ValueError):
        return []


def _reclaimable() -> int:
    """Bytes of file cache that the control group counts as used and gives back when asked."""
    for line in Path("/sys/fs/cgroup/memory.stat").read_text().splitlines():
        if line.startswith("inactive_file "):
            return int(line.split()[1])
    return 0


def process_memory() -> int:
    """Bytes of memory that this process holds now, 0 when unknown."""
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError, AttributeError):
        return 0
