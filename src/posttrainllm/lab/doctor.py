"""Is this installation able to train? Every part that a run needs, looked at and, where it computes, tried out.

What this is: a list of findings, each with the next action where something is missing. An engine is not just looked for: it trains two
steps of a very small model, which are compared with the numpy engine in float64 under the limits of a parity run.
What this is not: a repair.
"""

from __future__ import annotations

import platform
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import numpy as np

import posttrainllm
from posttrainllm.config import TrainConfig, load_config
from posttrainllm.engine_settings import ENGINES
from posttrainllm.errors import EngineError, PosttrainError
from posttrainllm.kernels.build import available_builds, build_info, host_target, stale_builds
from posttrainllm.lab.benchmark_record import versions
from posttrainllm.lab.parity import Comparison, compare, trace
from posttrainllm.machine import (
    available_memory,
    available_threads,
    instruction_sets,
    processor_name,
)
from posttrainllm.storage import show_bytes
from posttrainllm.text.corpus import Corpus
from posttrainllm.text.datasets import TINY_SHAKESPEARE, shakespeare_path
from posttrainllm.wording import in_terminal

Status = Literal["ok", "note", "problem"]
NEEDED = ("numpy", "cpp")  # without these the default run does not work

CHECK_STEPS = 2
CHECK_MODEL = {  # odd sizes, so that no tile fits
    "model.n_layer": 1,
    "model.n_head": 3,
    "model.n_embd": 21,
    "model.n_ctx": 13,
    "data.batch_size": 3,
}


@dataclass(frozen=True)
class Finding:
    """One part: fine, not there but not needed (note), or broken."""

    name: str
    status: Status
    detail: str
    fix: str = ""


def doctor() -> Iterator[Finding]:
    """Look at everything, the quick things first."""
    yield from _environment()
    yield _corpus()
    yield from _kernels()
    yield from _engines()


def _environment() -> Iterator[Finding]:
    found = versions()
    yield Finding("posttrainllm", "ok", f"{posttrainllm.__version__} on Python {found['python']}")
    packages = ", ".join(
        f"{name} {found[name]}" for name in found if name not in ("posttrainllm", "python")
    )
    yield Finding("packages", "ok", packages)
    yield Finding("system", "ok", f"{platform.system()} {platform.machine()}, {sys.executable}")
    yield Finding("processor", "ok", processor_name())
    threads = available_threads()
    yield Finding("threads", "ok", f"{threads} may be used by this process")
    memory = available_memory()
    yield Finding("memory", "ok", f"{show_bytes(memory)} available" if memory else "unknown here")


def _corpus() -> Finding:
    path = shakespeare_path()
    fix = "python -m posttrainllm.text.datasets"
    try:
        data = path.read_bytes()
    except OSError:
        return Finding("text", "problem", f"TinyShakespeare is not at {path}", fix)
    if not TINY_SHAKESPEARE.matches(data):
        detail = f"{path} is not TinyShakespeare: {len(data):,} bytes with another hash"
        return Finding("text", "problem", detail, fix)
    return Finding("text", "ok", f"TinyShakespeare, {show_bytes(len(data))}, its hash is right")


def _kernels() -> Iterator[Finding]:
    try:
        known = list(host_target().processors)
    except EngineError as error:
        yield Finding("kernels", "problem", error.message, in_terminal(error.hint))
        return
    built, runnable = available_builds(), instruction_sets()
    usable = [name for name in built if name in runnable]
    for name in known:
        if name not in built:
            status: Status = "problem" if not usable else "note"
            yield Finding(f"kernels {name}", status, "not built", "make kernels")
        elif name not in runnable:
            yield Finding(f"kernels {name}", "note", "built; this processor cannot run them")
        else:
            chosen = ", the choice on this processor" if name == usable[-1] else ""
            yield Finding(f"kernels {name}", "ok", f"build {build_info(name)['id']}{chosen}")
    try:
        stale = [name for name in stale_builds() if name in built]
    except PosttrainError:
        stale = []  # an installation without sources has nothing to compare with
    if stale:
        detail = f"{', '.join(stale)}: the sources have changed since they were built"
        yield Finding("kernels", "note", detail, "make kernels")


def _engines() -> Iterator[Finding]:
    for engine in ENGINES:
        builds = [""]
        if engine == "cpp":
            builds = [name for name in available_builds() if name in instruction_sets()] or [""]
        for build in builds:
            yield _engine(engine, build)


def _engine(engine: str, build: str) -> Finding:
    """Train two steps on an engine and compare them."""
    name = f"engine {engine} {build}".rstrip()
    missing: Status = "problem" if engine in NEEDED else "note"
    try:
        found = self_check(engine, build)
    except EngineError as error:
        return Finding(name, missing, error.message, in_terminal(error.hint))
    except Exception as error:  # a library or a driver, whatever it raises
        return Finding(name, missing, f"failed: {type(error).__name__}: {error}")
    worst = found.first_failure
    if worst is not None:
        detail = f"computes something else than numpy float64: {worst}"
        return Finding(name, "problem", detail, "make kernels" if engine in ("cpp", "wasm") else "")
    drift = max(found.worst_loss.error, found.worst_gradient.error)
    return Finding(
        name, "ok", f"{CHECK_STEPS} steps agree with numpy float64, to {drift:.1e} at most"
    )


def self_check(engine: str, build: str = "") -> Comparison:
    """Two steps of a very small model on an engine, against numpy in float64.

    Raises: EngineError when the engine cannot run here.
    """
    config = _config(engine, build)
    corpus = _text()
    reference = trace(config, corpus, "numpy", CHECK_STEPS, float64=True)
    return compare(trace(config, corpus, engine, CHECK_STEPS, after=reference.update), reference)


def _config(engine: str, build: str) -> TrainConfig:
    flags = {
        **CHECK_MODEL,
        "training.steps": CHECK_STEPS,
        "engine.name": engine,
        "engine.cpp_build": build,
    }
    return load_config(flags=flags)


def _text() -> Corpus:
    """A text made on the spot: the check of an engine does not need the right one."""
    text = np.frombuffer(
        b"the engine is asked for two steps of training, and no more. " * 40, np.uint8
    )
    return Corpus(
        name="a check",
        sources=(),
        sha256="0" * 64,
        n_bytes=len(text),
        train=text,
        val=text[:0],
        train_text=text,
        val_text=text[:0],
        val_fraction=0.0,
        notices=(),
    )
