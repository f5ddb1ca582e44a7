"""The choice among kernels by measurement: every variant of every call runs inside the real step, timed by the GPU's own clock.

What this is: ``tune`` finds the fastest variants for one program on one device, ``Choices`` keeps them in a file by adapter, driver and
kernels, so that the next run starts with them and computes the same bits.
What this is not: needed. Where there are no timestamps, and on software adapters, the table's own preferences hold.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
from collections import defaultdict
from collections.abc import Mapping, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np

from posttrainllm.engines.webgpu.device import GpuDevice
from posttrainllm.engines.webgpu.dispatch import APART
from posttrainllm.engines.webgpu.recorder import Recorded, Recorder
from posttrainllm.engines.webgpu.timing import seconds
from posttrainllm.engines.webgpu.work import merged
from posttrainllm.plan import BoundCall
from posttrainllm.storage import default_cache_dir

REPEATS = 7
MARGIN = 0.97  # a variant replaces the table's choice when it takes less than this of its time
PASS_S = 1.0e-6  # what a pass of its own costs in a measurement, and a call in a step does not

Times = dict[str, dict[str, float]]  # seconds by key and variant


def tune(recorder: Recorder, calls: Sequence[BoundCall]) -> dict[str, str]:
    """The fastest variants of a program's calls, by key; only those that are not the table's own choice."""
    times = tune_times(recorder, calls)
    chosen: dict[str, str] = {}
    for key, row in times.items():
        variant = min(row, key=row.__getitem__)
        parts = key.split(" + ")
        if len(parts) > 1:
            apart = sum(min(times[part].values()) for part in parts) - PASS_S * (len(parts) - 1)
            chosen[key] = variant if row[variant] < apart else APART
        elif row[variant] < MARGIN * next(iter(row.values())):
            chosen[key] = variant
    return chosen


def tune_times(recorder: Recorder, calls: Sequence[BoundCall]) -> Times:
    """Seconds of every variant of every call, one by one and where calls can share dispatches, the table's choice first."""
    table = recorder.table
    kept = dict(table.preferred)
    table.preferred.clear()
    try:
        alone = _times(recorder, calls, {rule["op"]: APART for rule in table.rules})
        best = {key: min(times, key=times.__getitem__) for key, times in alone.items()}
        return alone | _times(recorder, calls, best)
    finally:
        table.preferred.clear()
        table.preferred.update(kept)


def _times(recorder: Recorder, calls: Sequence[BoundCall], fixed: dict[str, str]) -> Times:
    """Seconds of all variants: in round r, every call that has an r-th variant runs it, and one measurement times them all."""
    table = recorder.table
    apart = APART in fixed.values()
    works = merged(calls, [] if apart else table.rules, lambda work: bool(table.candidates(work)))
    variants = {work.key: table.candidates(work) for work in works}
    if not apart:
        variants = {key: found for key, found in variants.items() if " + " in key}
    times: Times = {key: {} for key in variants}
    for turn in range(max(map(len, variants.values()), default=0)):
        table.preferred.clear()
        table.preferred.update(fixed)
        table.preferred.update(
            {key: found[min(turn, len(found) - 1)] for key, found in variants.items()}
        )
        recording = recorder.record(calls)
        groups = _by_work(recording.dispatches)
        runs = [seconds(recorder.device, groups) for _ in range(REPEATS)]
        found: dict[tuple[str, str], list[float]] = defaultdict(list)
        for group, value in zip(groups, np.median(runs, axis=0), strict=True):
            found[group[0].work.key, group[0].variant].append(float(value))
        for (key, variant), values in found.items():
            if key in times and variant not in times[key]:
                times[key][variant] = float(np.median(values))
        recorder.forget(recording)
    return times


def _by_work(dispatches: list[Recorded]) -> list[list[Recorded]]:
    """Dispatches of one piece of work as one pass."""
    groups: list[list[Recorded]] = []
    for item in dispatches:
        if groups and groups[-1][0].work is item.work:
            groups[-1].append(item)
        else:
            groups.append([item])
    return groups


class Choices:
    """Chosen variants by key, in a file of the user's cache; a file that cannot be read or written is no file."""

    def __init__(self, device: GpuDevice) -> None:
        """Read what is kept for this adapter, driver and these kernels."""
        self.path = cache_folder() / f"kernels-{kernels_digest(device.info)}.json"
        self.held: dict[str, str] = {}
        self.tuned: list[str] = []
        try:
            content: Any = json.loads(self.path.read_text("utf-8"))
            self.held = {str(key): str(value) for key, value in content["choices"].items()}
            self.tuned = [str(key) for key in content["programs"]]
        except (OSError, ValueError, KeyError, AttributeError, TypeError):
            pass

    def keep(self, program: str, chosen: dict[str, str], info: dict[str, str | int]) -> None:
        """Add the choices of a program."""
        self.held |= chosen
        self.tuned.append(program)
        content = {"device": info, "programs": self.tuned, "choices": self.held}
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            temporary = self.path.with_suffix(f".{os.getpid()}")
            temporary.write_text(json.dumps(content, indent=1), "utf-8")
            temporary.replace(self.path)
        except OSError:
            pass


def cache_folder() -> Path:
    """Where choices and the outcome of self-checks are kept."""
    return default_cache_dir() / "webgpu"


def kernels_digest(info: Mapping[str, str | int]) -> str:
    """A short hash of an adapter, its driver and the kernels that ship with this version."""
    content = json.dumps([dict(info), wgsl_digest()], sort_keys=True)
    return hashlib.sha256(content.encode()).hexdigest()[:16]


@functools.cache
def wgsl_digest() -> str:
    """A short hash of the kernels and of the table that chooses among them."""
    digest = hashlib.sha256()
    folder = files("posttrainllm.kernels").joinpath("wgsl")
    for file in sorted(folder.iterdir(), key=lambda entry: entry.name):
        digest.update(file.read_bytes())
    return digest.hexdigest()[:16]


def program_key(calls: Sequence[BoundCall]) -> str:
    """A program with its sizes, as far as kernels are chosen by it."""
    digest = hashlib.sha256()
    for call in calls:
        digest.update(repr((call.op, call.sizes, call.attrs)).encode())
    return digest.hexdigest()[:16]
