"""What each lever of an engine gains inside a training step: one set of settings a rung, all rungs in turns in one process.

What this is: the cells of ``bench.py`` with settings in place of engines, and a record that compares each rung with the one before it.
What this is not: a comparison of engines (``bench.py``), or of settings that change what is learned (``sweep.py``).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Any

from posttrainllm.config import load_config
from posttrainllm.errors import ConfigError
from posttrainllm.figures import Progress
from posttrainllm.lab.bench import WARMUP, Bench, Cell, Row, bench, check_repeats
from posttrainllm.lab.benchmark_record import Record, make_record
from posttrainllm.machine import available_threads


def ladder(
    case: str,
    presets: Sequence[str],
    engine: str,
    rungs: Sequence[Sequence[str]],
    overrides: Sequence[str],
    repeats: int,
    progress: Progress,
) -> tuple[Bench, Record]:
    """Time every rung at every preset. Raises: ConfigError, EngineError, NonFiniteError."""
    check_repeats(repeats)
    if len(rungs) < 2:
        raise ConfigError(f"case {case}: a ladder has at least two rungs, got {len(rungs)}")
    cells = []
    for preset in presets:
        for rung in rungs:
            settings = [*overrides, *rung]
            config = load_config(preset, overrides=settings, flags={"engine.name": engine})
            threads = config.engine.threads or available_threads()
            cells.append(Cell(preset, config.engine.chosen, threads, config))
    timed = bench(cells, repeats=repeats, progress=progress)
    record = make_record(
        "ladder",
        case,
        engine=cells[0].engine,
        info={},  # each rung has its own build and threads
        config=[cell.config for cell in cells[:: len(rungs)]],
        rows=_rows(timed, rungs),
        method={"warmup": WARMUP, "repeats": repeats, "untimed_steps_before_each": 1},
        results={"rungs": [" ".join(rung) for rung in rungs]},
    )
    return replace(timed, rows=_shown(timed.rows, len(rungs))), record


def _shown(rows: Sequence[Row], rungs: int) -> list[Row]:
    """The rows as a table shows them: numbered, and compared with the first rung."""
    shown = []
    for number, row in enumerate(rows):
        at, first = number % rungs, rows[number - number % rungs]
        ratio = first.median_ms / row.median_ms
        name = f"{row.engine}, rung {at + 1}"
        shown.append(replace(row, engine=name, baseline="rung 1", ratio=ratio))
    return shown


def _rows(timed: Bench, rungs: Sequence[Sequence[str]]) -> list[dict[str, Any]]:
    """The rows of the bench with their rung's settings, compared with the rung before and with the first."""
    rows = []
    for number, row in enumerate(timed.rows):  # in the order of the cells: presets, then rungs
        at = number % len(rungs)
        before, first = timed.rows[number - min(at, 1)], timed.rows[number - at]
        figures = {k: v for k, v in asdict(row).items() if k not in ("baseline", "ratio")}
        gains = {
            "times_the_rung_before": before.median_ms / row.median_ms,
            "times_the_first": first.median_ms / row.median_ms,
        }
        rows.append({"rung": list(rungs[at]), **figures, **gains})
    return rows
