#!/usr/bin/env python3
"""The state of the project as a page: what there is, what was measured, what the tests cover, what is missing.

    python -m pytest -q --junitxml=build/report.xml
    python tools/status.py build/report.xml            # writes docs/status.md

Everything is read from the code, from the records in bench/results and from the report, except for ``OPEN``, the known gaps.
"""

from __future__ import annotations

import argparse
import ast
import json
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "src" / "posttrainllm"
RESULTS = ROOT / "bench" / "results"
PAGE = ROOT / "docs" / "status.md"
sys.path.insert(0, str(ROOT / "src"))

OUTCOMES = ("passed", "failed", "skipped")
MOST_FIGURES = 4  # of checks on a GPU; the record holds the rest

OPEN = (
    "Never run: training on several hosts (two cards of one host were), on a Mac's GPU (MPS, Metal), and in a browser on a real GPU "
    "(its runtime was, in node through Dawn).",
    "In Dawn, with its run-time checks of shaders, a step at huge and mega takes about 30 % longer than through wgpu.",
    "Two cards train behemoth at 0.90 of twice one card's speed: summing 1.9 GB of gradients is hardly hidden.",
    "Sharded training (fsdp) has no fused layers and no graph of the step; it is for models that do not fit otherwise.",
    "Imported models are GPT-2's form alone; weights are written in 32, 16 or 8 bits, not in 4.",
    "Dropout, Muon, bf16 and several cards are the torch engine's alone.",
)


def table(columns: Sequence[str], rows: Iterable[Sequence[object]]) -> list[str]:
    """A Markdown table, with an empty line after it."""
    lines = [columns, ["---"] * len(columns), *rows]
    cells = [[" ".join(str(cell).replace("|", "\\|").split()) for cell in line] for line in lines]
    return [*("| " + " | ".join(line) + " |" for line in cells), ""]


def first_line(path: Path) -> str:
    """The first line of a module's docstring."""
    text = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8")))
    return (text or "").partition("\n")[0]


def shipped() -> list[str]:
    """Engines, commands and presets."""
    from typer.main import get_command

    from posttrainllm.cli import app
    from posttrainllm.config import PRESETS, load_config
    from posttrainllm.engine_settings import ENGINES

    packages = {"webgpu": "engines/webgpu/engine.py", "torch": "pytorch/engine.py"}
    engines = [
        (f"`{name}`", first_line(PACKAGE / packages.get(name, f"engines/{name}_engine.py")))
        for name in ENGINES
    ]
    commands = []
    for name, command in get_command(app).commands.items():  # type: ignore[attr-defined]
        parts = getattr(command, "commands", None) or {"": command}
        commands += [
            (f"`{f'{name} {p}'.strip()}`", c.get_short_help_str(140)) for p, c in parts.items()
        ]
    presets = [
        (f"`{name}`", f"{load_config(name).model.parameters():,}", preset.summary)
        for name, preset in PRESETS.items()
    ]
    return [
        "## Shipped",
        "",
        *table(("engine", "what it is"), engines),
        *table(("command", "what it does"), commands),
        *table(("preset", "parameters", "what it is for"), presets),
    ]


def milliseconds(value: float) -> str:
    """Three digits, never an exponent."""
    return f"{value:,.0f}" if value >= 100 else f"{value:#.3g}"


def figures(record: dict[str, Any]) -> str:
    """What a record comes to, in a line."""
    rows, results = record["rows"], record["results"]
    if record["kind"] in ("step", "ladder"):
        by_preset: dict[str, list[str]] = {}
        for row in rows:
            label = f" ({row['threads']} thr.)" if "threads" in row else ""
            if "rung" in row:
                label = f" ({'/'.join(setting.partition('=')[2] for setting in row['rung'])})"
            by_preset.setdefault(row["preset"], []).append(milliseconds(row["median_ms"]) + label)
        keys = [setting.partition("=")[0] for setting in rows[0].get("rung", ())]
        of = f" by {'/'.join(keys)}" if keys else ""
        return f"ms a step{of}: " + "; ".join(f"{k} {', '.join(v)}" for k, v in by_preset.items())
    if record["kind"] == "training":
        loss, seconds = results["val_loss"], results["seconds"]
        held = "as expected" if results["passed"] else "NOT as expected"
        spread = f"{loss['median']:.3f} ({loss['min']:.3f} to {loss['max']:.3f})"
        return f"validation loss {spread}, {seconds['median']:.3g} s, seeds: {len(rows)}, {held}"
    if record["kind"] == "sweep":
        settings = ", ".join(f"{k} {v:g}" for k, v in results["best"]["settings"].items())
        return (
            f"best of {len(results['points'])}: {settings}, loss {results['best']['val_loss']:.3f}"
        )
    numbers = {k: v for k, v in results.items() if isinstance(v, float)}
    shown = [f"{k}: {v:.3g}" for k, v in list(numbers.items())[:MOST_FIGURES]]
    return "; ".join([f"{len(rows)} rows", *shown])


def measured() -> list[str]:
    """The newest record of each case on each engine and machine."""
    from posttrainllm.lab.benchmark_record import adapter

    newest: dict[tuple[str, ...], tuple[Path, dict[str, Any]]] = {}
    records = [
        (path, json.loads(path.read_text(encoding="utf-8"))) for path in RESULTS.glob("*.json")
    ]
    for path, record in sorted(records, key=lambda pair: (pair[1]["date"], pair[0].name)):
        card = record["adapter"] or adapter(record["engine_info"] or {})
        machine = card or record["machine"]["processor"]
        newest[record["kind"], record["case"], record["engine"], machine] = path, record
    rows = [
        (
            kind,
            case,
            engine,
            machine,
            figures(record),
            f"[{record['date'][:10]}](../bench/results/{path.name})",
        )
        for (kind, case, engine, machine), (path, record) in sorted(newest.items())
    ]
    columns = ("kind", "case", "engine", "machine", "figures", "record")
    return ["## Measured", "", "The newest record of each case.", "", *table(columns, rows)]


def outcomes(report: Path) -> Iterator[tuple[str, str, str, str]]:
    """(test file, test, outcome, reason) of every test of a report."""
    for case in ElementTree.parse(report).getroot().iter("testcase"):
        dotted = f"{case.get('classname', '')}.{case.get('name', '')}"  # a whole file's skip has no class
        file = next((part for part in dotted.split(".") if part.startswith("test_")), dotted)
        skip = case.find("skipped")
        broken = case.find("failure") is not None or case.find("error") is not None
        reason = "" if skip is None else (skip.get("message") or "").replace(f"{ROOT}/", "")
        yield (
            file,
            case.get("name", ""),
            OUTCOMES[1 if broken else 2 if skip is not None else 0],
            reason,
        )


def verified(tests: Sequence[tuple[str, str, str, str]]) -> list[str]:
    """One row a test file, and the tests that failed."""
    counts = Counter((file, outcome) for file, _, outcome, _ in tests)
    rows = []
    for path in sorted((ROOT / "tests").glob("test_*.py")):
        ran = [counts[path.stem, outcome] for outcome in OUTCOMES]
        rows.append((f"`{path.stem}`", first_line(path), *(ran if any(ran) else ("not run",) * 3)))
    totals = [sum(1 for test in tests if test[2] == outcome) for outcome in OUTCOMES]
    failed = [
        f"- FAILED: `{file}`, {name}" for file, name, outcome, _ in tests if outcome == "failed"
    ]
    summary = ", ".join(f"{n:,} {outcome}" for n, outcome in zip(totals, OUTCOMES, strict=True))
    columns = ("tests", "what they cover", *OUTCOMES)
    return [
        "## Verified",
        "",
        f"{summary}.",
        "",
        *table(columns, rows),
        *failed,
        *[""] * bool(failed),
    ]


def skipped(tests: Sequence[tuple[str, str, str, str]]) -> list[str]:
    """The tests that were skipped, by file and reason."""
    reasons = Counter((file, reason) for file, _, outcome, reason in tests if outcome == "skipped")
    if not reasons:
        return ["## Skipped", "", "Nothing."]
    rows = [
        (f"`{file}`", n, reason or "no reason given")
        for (file, reason), n in sorted(reasons.items())
    ]
    return ["## Skipped", "", *table(("tests", "how many", "why"), rows)]


def page(report: Path) -> str:
    """The whole page."""
    tests = list(outcomes(report))
    lines = [
        "# Status",
        "",
        "Made by `make status` from the code, the records in `bench/results` and a report of the tests; not edited by hand.",
        "",
        *shipped(),
        *measured(),
        *verified(tests),
        *["## Open", "", *(f"- {gap}" for gap in OPEN), ""],
        *skipped(tests),
    ]
    return "\n".join(lines).rstrip() + "\n"


def main() -> None:
    """Write the page."""
    parser = argparse.ArgumentParser(description="Write docs/status.md.")
    parser.add_argument("report", type=Path, help="of pytest --junitxml")
    parser.add_argument("--output", type=Path, default=PAGE)
    wanted = parser.parse_args()
    wanted.output.write_text(page(wanted.report), encoding="utf-8")


if __name__ == "__main__":
    main()
