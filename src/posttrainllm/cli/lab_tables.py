"""What the lab found, as tables and sentences on the terminal. Each function prints one result."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from posttrainllm.cli.table import Column, print_table
from posttrainllm.cli.terminal import fields, say
from posttrainllm.figures import clock, one_line

if TYPE_CHECKING:
    from posttrainllm.lab.bench import Bench
    from posttrainllm.lab.cases import CaseResult
    from posttrainllm.lab.decode_bench import Row as DecodeRow
    from posttrainllm.lab.diagnose import Diagnosis
    from posttrainllm.lab.doctor import Finding
    from posttrainllm.lab.measured_run import MeasuredRun
    from posttrainllm.lab.parity import Drift, Parity
    from posttrainllm.lab.sweep import Sweep
    from posttrainllm.lab.verify_resume import VerifyResume

SHOWN_STEPS = (1, 2, 3, 5, 10, 20, 50, 100, 150, 200)
SHOWN_TENSORS = 8
GOOD, BAD = "green", "bold red"
MFU = (
    "MFU: (6N + 12LCT) operations a token, over the peak of the device's data sheet, "
    "or of a measured matrix product where that is not known"
)


def show_bench(found: Bench) -> None:
    """Print the rows of a bench."""
    from posttrainllm.storage import show_bytes

    columns = [
        Column("preset"),
        Column("engine"),
        Column("threads", right=True),
        Column("median ms", right=True),
        Column("min", right=True, goes=3),
        Column("max", right=True, goes=4),
        Column("tokens/s", right=True),
        Column("GFLOP/s", right=True, goes=5),
        Column("MFU", right=True, goes=5),
        Column("memory", right=True, goes=2),
        Column("planned", right=True, goes=6),
        Column("speed", right=True),
        Column("against", goes=1),
    ]
    rows = [
        [
            row.preset,
            row.engine,
            str(row.threads),
            f"{row.median_ms:.2f}",
            f"{row.min_ms:.2f}",
            f"{row.max_ms:.2f}",
            f"{row.tokens_per_second:,.0f}",
            f"{row.gflops:.1f}",
            _share(row.mfu if row.mfu is not None else row.mfu_of_measured),
            "-" if row.peak_bytes is None else show_bytes(row.peak_bytes),
            show_bytes(row.planned_bytes),
            f"{row.ratio:.2f}x",
            row.baseline,
        ]
        for row in found.rows
    ]
    print_table(columns, rows)
    say((f"{found.repeats} timed steps each, in turns, after {found.warmup} to warm up", "dim"))
    if any(row.mfu_of_measured is not None for row in found.rows):
        say((MFU, "dim"))


def _share(value: float | None) -> str:
    return "n/a" if value is None else f"{value:.1%}"


def show_parity(found: Parity, *, verbose: bool) -> None:
    """Print losses, gradients and, last, the verdict."""
    say(f"reference: {found.reference.engine} ({found.why_reference})")
    names = [one.engine for one in found.comparisons]
    steps = [s for s in SHOWN_STEPS if s < found.steps] + [found.steps]
    if verbose:
        steps = list(range(1, found.steps + 1))
    print_table(
        [
            Column("step", right=True),
            Column(found.reference.engine, right=True),
            *(Column(name, right=True) for name in names),
            *(Column(f"{name} drift", right=True) for name in names),
        ],
        [
            [
                f"{step}",
                f"{found.reference.losses[step - 1]:.7f}",
                *(f"{one.losses[step - 1]:.7f}" for one in found.comparisons),
                *(f"{one.drifts[step - 1].error:.1e}" for one in found.comparisons),
            ]
            for step in steps
        ],
    )
    say()
    tensors = range(len(found.reference.gradients))
    worst = sorted(
        tensors, key=lambda t: -max(_sortable(c.gradients[t]) for c in found.comparisons)
    )
    shown = sorted(worst if verbose else worst[:SHOWN_TENSORS])
    rest = len(tensors) - len(shown)
    print_table(
        [Column("step-0 gradient"), *(Column(name, right=True) for name in names)],
        [
            [
                found.comparisons[0].gradients[tensor].tensor,
                *(f"{one.gradients[tensor].error:.1e}" for one in found.comparisons),
            ]
            for tensor in shown
        ],
    )
    if rest:
        say((f"{rest} more tensors are closer; --verbose shows them", "dim"))
    say()
    columns = ["engine", "gradient", "losses 1-10", "losses 11-200", "beyond", "update", "verdict"]
    print_table(
        [Column(title) for title in columns],
        [
            [
                one.engine,
                _held(one.worst_gradient),
                _held(one.worst_within(1, 10)),
                _held(one.worst_within(11, 200)),
                _held(one.worst_within(201, found.steps)),
                _held(one.worst_update),
                "pass" if one.first_failure is None else "FAIL",
            ]
            for one in found.comparisons
        ],
    )
    say((found.verdict, GOOD if found.passed else BAD))


def show_verify_resume(found: VerifyResume) -> None:
    """Print the kills and, last, the verdict."""
    print_table(
        [
            Column("kill", right=True),
            Column("where"),
            Column("last step logged", right=True),
            Column("resumed from", right=True),
        ],
        [
            [str(number), kill.where, str(kill.logged), str(kill.checkpoint)]
            for number, kill in enumerate(found.kills, start=1)
        ],
    )
    for problem in found.problems[1:6]:
        say(problem)
    say((found.verdict, GOOD if found.passed else BAD))


def show_sweep(found: Sweep) -> None:
    """Print the points of a sweep and the best one."""
    best = found.best
    print_table(
        [
            *(Column(key.rpartition(".")[2], right=True) for key in found.points[0].settings),
            Column("validation loss", right=True),
            Column("spread", right=True),
            Column("runs", right=True),
            Column(""),
        ],
        [
            [
                *(f"{value}" for value in point.settings.values()),
                "diverged" if point.val_loss is None else f"{point.val_loss:.4f}",
                f"{point.spread:.4f}",
                str(point.runs),
                _mark(point == best, point == found.usual),
            ]
            for point in found.points
        ],
    )
    say(found.sentence)


def show_case(found: CaseResult) -> None:
    """Print what a case measured and, last, whether it came out as expected."""
    say(f"{found.case.name}: {found.case.about}")
    if found.bench is not None:
        show_bench(found.bench)
    if found.sweep is not None:
        show_sweep(found.sweep)
    if found.decode is not None:
        show_decode(found.decode.rows)
    if found.runs:
        show_runs(found.runs)
    for check in found.checks:
        say(("pass  " if check.passed else "FAIL  ", GOOD if check.passed else BAD), check.text)


def show_decode(rows: Sequence[DecodeRow]) -> None:
    """Print what writing a token takes."""
    print_table(
        [
            Column("writer"),
            Column("threads", right=True),
            Column("ms a token", right=True),
            Column("fastest", right=True, goes=2),
            Column("tokens/s", right=True),
            Column("same tokens", right=True, goes=1),
        ],
        [
            [
                row.writer,
                str(row.threads),
                f"{row.median_ms_per_token:.3f}",
                f"{row.min_ms_per_token:.3f}",
                f"{row.tokens_per_second:,.0f}",
                f"{row.same_tokens} of {row.tokens}",
            ]
            for row in rows
        ],
    )


def show_runs(runs: Sequence[MeasuredRun]) -> None:
    """Print the figures of whole trainings."""
    print_table(
        [
            Column("seed", right=True),
            Column("steps", right=True),
            Column("validation loss", right=True),
            Column("training loss", right=True, goes=1),
            Column("real words", right=True),
            Column("time", right=True),
            Column("tokens/s", right=True, goes=2),
        ],
        [
            [
                str(run.seed),
                f"{run.steps:,}",
                "diverged" if run.diverged else _number(run.val_loss, ".4f"),
                _number(run.train_loss, ".4f"),
                "-" if run.word_share is None else f"{run.word_share:.0%}",
                clock(run.seconds),
                _number(run.tokens_per_second, ",.0f"),
            ]
            for run in runs
        ],
    )


def show_diagnosis(found: Diagnosis) -> None:
    """Print a diagnosis; the sentence that matters comes last."""
    from posttrainllm.runs.comparing import show_setting

    changed = [
        f"{key} {show_setting(key, value)} (preset: {show_setting(key, usual)})"
        for key, value, usual in found.changed
    ]
    rows = [
        ("run", f"{found.run}: preset {found.preset}, engine {found.engine}"),
        ("changed", "; ".join(changed) or "nothing: every setting is the preset's"),
        ("counting", ", ".join(map(str, found.counting))),
        ("loss", found.standing),
    ]
    fields((label, one_line(value)) for label, value in rows)
    say()
    own = next(one.loss for one in found.probes if one.factor == 1)
    print_table(
        [
            Column("rate", right=True),
            Column("learning rate", right=True),
            Column(f"loss after {found.probe_steps} steps", right=True),
            Column("difference", right=True),
        ],
        [
            [
                f"{one.factor:g}x",
                f"{one.learning_rate:.2g}",
                _number(one.loss, ".3f", "not finite"),
                "-" if one.loss is None or own is None else f"{one.loss - own:+.3f}",
            ]
            for one in found.probes
        ],
    )
    say(found.sentence)


def show_findings(findings: Iterable[Finding]) -> bool:
    """Print findings as they come; returns whether nothing that is needed is broken."""
    good = True
    styles = {"ok": GOOD, "note": "yellow", "problem": BAD}
    for finding in findings:
        good = good and finding.status != "problem"
        say((f"{finding.status:<8}", styles[finding.status]), f"{finding.name:<22}{finding.detail}")
        if finding.fix:
            say(f"{'':<30}{finding.fix}")
    say(
        ("doctor: all that training needs works", GOOD)
        if good
        else ("doctor: something that training needs does not work, see above", BAD)
    )
    return good


def _held(drift: Drift | None) -> str:
    if drift is None:
        return "-"
    if drift.limit is None:
        return f"{drift.error:.1e} (no limit)"
    return f"{drift.error:.1e} (limit {drift.limit:.0e})"


def _sortable(drift: Drift) -> float:
    return drift.error if drift.error == drift.error else float("inf")


def _mark(best: bool, usual: bool) -> str:
    return " ".join(word for word, true in (("best", best), ("configured", usual)) if true)


def _number(value: float | None, form: str, missing: str = "-") -> str:
    return missing if value is None else format(value, form)
