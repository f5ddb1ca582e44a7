"""Timing of whole training steps: engines, presets and thread counts in turns, in one process.

What this is: every combination is a cell; a round takes one step of every cell (A B C A B C ...), so that a processor that slows down
slows all of them down. Before each timed step the same cell takes one that is not timed, as in training, where the step before was its
own: caches are filled with its data, and the threads of the engine before have gone to sleep.
What this is not: a test. Nothing here passes or fails, and a speed is compared only with speeds of the same run.

A step is what the trainer takes: batches drawn, gradients, clip, AdamW, result read back.
"""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import cast

from posttrainllm.config import TrainConfig, load_config
from posttrainllm.config import replace as with_settings
from posttrainllm.engines.base import Engine
from posttrainllm.errors import ConfigError, EngineError, NonFiniteError, PosttrainError
from posttrainllm.figures import Progress, untold
from posttrainllm.lab import peak_memory
from posttrainllm.lab.benchmark_record import Record, make_record
from posttrainllm.lab.cost import planned_bytes, step_bytes
from posttrainllm.lab.peak import measured_flops, sheet_flops
from posttrainllm.machine import available_memory, available_threads, process_memory
from posttrainllm.text.corpus import Corpus
from posttrainllm.training.engine_choice import initial_parameters, training_engine
from posttrainllm.training.session import corpus_of
from posttrainllm.training.step import train_step

COMPILED = "torch-compile"
LONG = 1_000_000  # steps: torch is measured with all that pays in a long run
IN_NODE = "wasm-node"
VARIANTS = {COMPILED: "torch", IN_NODE: "wasm"}
"""Engines of the bench alone, and the engine whose settings they have."""

GRAPH = "one CUDA graph"
"""What ``info["step"]`` says of an engine whose results come late."""

LEAST_REPEATS = 10  # of a record
WARMUP = 3


@dataclass(frozen=True)
class Cell:
    """One combination that is timed."""

    preset: str
    engine: str
    threads: int
    config: TrainConfig


@dataclass(frozen=True)
class Row:
    """The result of a cell; ``ratio`` says how many times faster than the baseline it is."""

    preset: str
    engine: str
    threads: int
    median_ms: float
    min_ms: float
    max_ms: float
    tokens_per_second: float
    gflops: float
    flops_per_step: float
    bytes_per_step: float
    planned_bytes: int
    peak_bytes: int | None
    repeats: int
    steps_a_repeat: int = 1
    precision: str = "float32"
    mfu: float | None = None
    """Share of the peak on the device's data sheet; None where that is not known."""
    mfu_of_measured: float | None = None
    """Share of what one large matrix product reached just now; None where none was timed."""
    baseline: str = ""
    ratio: float = 1.0


@dataclass(frozen=True)
class Bench:
    """All rows of a run, and what is needed to keep them as a record."""

    rows: list[Row]
    cells: list[Cell]
    info: dict[str, dict[str, str | int]]
    warmup: int
    repeats: int

    def records(self) -> list[Record]:
        """One record an engine. Raises: ConfigError when there were too few repeats for one."""
        check_repeats(self.repeats)
        presets = list(dict.fromkeys(row.preset for row in self.rows))
        engines = list(dict.fromkeys(row.engine for row in self.rows))
        method = {
            "warmup": self.warmup,
            "repeats": self.repeats,
            "untimed_steps_before_each": 1,
            "interleaved_engines": engines,
        }
        return [
            make_record(
                "step",
                f"step-{'-'.join(presets)}",
                engine=engine,
                info=self.info[engine],
                config=[
                    next(c.config for c in self.cells if (c.preset, c.engine) == (preset, engine))
                    for preset in presets
                ],
                rows=[asdict(row) for row in self.rows if row.engine == engine],
                method=method,
            )
            for engine in engines
        ]


@dataclass
class _Running:
    """A cell with its engine, between its first step and its last."""

    cell: Cell
    corpus: Corpus
    engine: Engine
    growth: int | None = None
    at_once: int = 1
    taken: int = 0
    times: list[float] = field(default_factory=list)

    def step(self) -> float:
        """Take a step, or ``at_once`` of them before their results are read; returns the seconds of one."""
        config = self.cell.config
        self._set_threads()
        began = time.perf_counter()
        for _ in range(self.at_once):
            train_step(self.engine, self.corpus, config, 1 + self.taken % config.training.steps)
            self.taken += 1
        results = self.engine.results()
        seconds = (time.perf_counter() - began) / self.at_once
        if not all(result.finite for result in results):
            raise NonFiniteError(
                f"{self.cell.engine} at {self.cell.preset}: step {self.taken} is not finite",
                f"posttrainllm parity --preset {self.cell.preset} --engine numpy,{self.cell.engine}",
            )
        return seconds

    def _set_threads(self) -> None:
        if self.cell.engine.startswith("torch"):  # its number of threads belongs to the process
            import torch

            torch.set_num_threads(self.cell.threads)


def make_cells(
    presets: Iterable[str],
    engines: Iterable[str],
    threads: Iterable[int] = (0,),
    overrides: Sequence[str] = (),
) -> list[Cell]:
    """All combinations; threads 0 is all that this process may use.

    numpy's threads are its library's own, and wasm (in Python) and webgpu run on one, so they get one cell a preset.

    Raises: ConfigError and EngineError for what does not exist.
    """
    counts = list(dict.fromkeys(count or available_threads() for count in threads))
    cells = []
    for preset in dict.fromkeys(presets):
        for engine in dict.fromkeys(engines):
            name = VARIANTS.get(engine, engine)
            for count in _fixed_threads(engine) or counts:
                flags: dict[str, object] = {"engine.name": name, "engine.threads": count}
                if engine == COMPILED:
                    flags["engine.compile"] = "on"
                config = load_config(preset, overrides=overrides, flags=flags)
                shown = engine if engine in VARIANTS else config.engine.chosen
                cells.append(Cell(preset, shown, count, config))
    return list({(c.preset, c.engine, c.threads): c for c in cells}.values())


def _fixed_threads(engine: str) -> list[int]:
    """The one thread count of an engine that cannot be told another."""
    return {"numpy": [available_threads()], "wasm": [1], "webgpu": [1]}.get(engine, [])


def check_repeats(repeats: int) -> None:
    """Refuse a record of too few repeats, best before they are measured. Raises: ConfigError."""
    if repeats < LEAST_REPEATS:
        raise ConfigError(
            f"a record needs at least {LEAST_REPEATS} repeats, got {repeats}",
            "leave --repeats out or raise it",
        )


def bench(
    cells: Sequence[Cell],
    *,
    repeats: int = 20,
    warmup: int = WARMUP,
    progress: Progress = untold,
) -> Bench:
    """Time all cells in turns. Where they do not fit into memory together, one preset after the other.

    Raises: EngineError when one cannot run here, NonFiniteError when one computes nonsense.
    """
    rows, info = [], {}
    for group in _groups(cells):
        running: list[_Running] = []
        try:
            for cell in group:
                progress(f"setting up {cell.engine} at {cell.preset}", len(running), len(group))
                running.append(_start(cell, warmup))
                info[cell.engine] = {
                    key: value
                    for key, value in running[-1].engine.info.items()
                    if key != "threads"  # the rows have it
                }
            for number in range(repeats):
                progress("timing", number, repeats)
                for one in running:
                    one.step()
                    one.times.append(one.step())
            rows += [_row(one) for one in running]
        finally:
            for one in running:
                one.engine.close()
    return Bench(_with_ratios(rows), list(cells), info, warmup, repeats)


def _start(cell: Cell, warmup: int) -> _Running:
    """Make the engine and take the first steps, watching how far memory grows."""
    if cell.engine.startswith("torch"):
        # not part of any cell's memory; where it is missing, the engine says it better
        with contextlib.suppress(ModuleNotFoundError):
            import torch  # noqa: F401
    corpus = corpus_of(cell.config)
    peak_memory.forget_peak()
    before = process_memory()
    engine = _open(cell)
    running = _Running(cell, corpus, engine)
    seconds = 0.0
    try:
        engine.load(initial_parameters(cell.config.model, cell.config.training.seed))
        for _ in range(max(1, warmup)):
            seconds = running.step()
    except Exception as error:
        engine.close()
        if cell.engine == COMPILED and not isinstance(error, PosttrainError):
            reason = str(error).strip().splitlines()
            raise EngineError(
                f"torch.compile failed: {type(error).__name__}: {reason[0] if reason else ''}",
                "it needs a C++ compiler: apt-get install g++",
            ) from error
        raise
    if engine.info.get("step") == GRAPH:  # nobody waits for its steps one by one in training either
        running.at_once = max(1, min(50, int(0.1 / seconds)))
    peak = peak_memory.peak_bytes()
    running.growth = None if peak is None or not before else max(0, peak - before)
    return running


def _open(cell: Cell) -> Engine:
    if cell.engine != IN_NODE:
        config = cell.config
        if config.engine.name == "torch":
            config = with_settings(config, {"training.steps": LONG})
        return training_engine(config)
    from posttrainllm.lab.node_engine import NodeEngine

    return cast(Engine, NodeEngine(cell.config, threads=cell.threads))


def _groups(cells: Sequence[Cell]) -> list[list[Cell]]:
    """All cells together where that fits into half of the memory, else by preset."""
    plans = {cell.preset: 0 for cell in cells}
    for preset in plans:
        plans[preset] = planned_bytes(next(c.config for c in cells if c.preset == preset))
    available = available_memory()
    if not available or sum(plans[cell.preset] for cell in cells) <= available // 2:
        return [list(cells)]
    return [[cell for cell in cells if cell.preset == preset] for preset in plans]


def _row(running: _Running) -> Row:
    cell, times = running.cell, running.times
    median = statistics.median(times)
    flops = cell.config.flops_per_step
    info = running.engine.info
    precision = str(info.get("precision", "float32"))
    sheet = measured = None
    if cell.engine.startswith("torch"):
        device = str(info["device"])
        sheet = sheet_flops(str(info["device_name"]), precision)
        measured = measured_flops(device, precision)
    return Row(
        preset=cell.preset,
        engine=cell.engine,
        threads=cell.threads,
        median_ms=1e3 * median,
        min_ms=1e3 * min(times),
        max_ms=1e3 * max(times),
        tokens_per_second=cell.config.tokens_per_step / median,
        gflops=flops / median / 1e9,
        flops_per_step=flops,
        bytes_per_step=step_bytes(cell.config),
        planned_bytes=running.engine.nbytes,
        peak_bytes=running.growth,
        repeats=len(times),
        steps_a_repeat=running.at_once,
        precision=precision,
        mfu=None if sheet is None else flops / median / sheet,
        mfu_of_measured=None if measured is None else flops / median / measured,
    )


def _with_ratios(rows: Sequence[Row]) -> list[Row]:
    """Compare each row with the baseline of its preset: the faster of torch's, else the first engine.

    At the same number of threads where the baseline has it, else at the baseline's best.
    """
    found = []
    for row in rows:
        of_preset = [other for other in rows if other.preset == row.preset]
        torches = [other for other in of_preset if other.engine.startswith("torch")]
        candidates = torches or [o for o in of_preset if o.engine == of_preset[0].engine]
        same = [other for other in candidates if other.threads == row.threads]
        base = min(same or candidates, key=lambda other: other.median_ms)
        ratio = base.median_ms / row.median_ms
        found.append(replace(row, baseline=f"{base.engine} x{base.threads}", ratio=ratio))
    return found
