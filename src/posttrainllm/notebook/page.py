"""What stands in a notebook's output, as HTML: a run that trains, one that ended, one on the disk.

What this is: pure functions from what is known to text. Everything that a user, a file or a model wrote is escaped. Colours are the
page's own; there is no script and no style sheet.
What this is not: when it is shown (``live.py``), or the picture in it (``curve.py``).
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from posttrainllm.errors import PosttrainError
from posttrainllm.figures import about, brief, clock, counted, one_line, printable
from posttrainllm.formats.untrusted import read_object
from posttrainllm.notebook.curve import (
    BLUE,
    MOST_DOTS,
    MOST_POINTS,
    ORANGE,
    WIDEST_PX,
    Drawn,
    picture,
)
from posttrainllm.notebook.words import Next, going_on, next_steps
from posttrainllm.runs.checkpoint_folder import STATE_FILE, list_checkpoints
from posttrainllm.runs.curves import Curve, curve_of
from posttrainllm.runs.folder import Run, describe_run
from posttrainllm.runs.records import newest
from posttrainllm.storage import show_bytes
from posttrainllm.text.counting import CountingLine, standing
from posttrainllm.training.observer import Outcome
from posttrainllm.training.progress import Progress
from posttrainllm.training.report import (
    end_rows,
    ending,
    engine_words,
    model_words,
    start_rows,
    start_warnings,
)
from posttrainllm.training.writing import show_ratio

Rows = Sequence[tuple[str, str]]

NUMBERS = "font-variant-numeric:tabular-nums"
DIM = "opacity:0.7"
MARK = f"border-left:3px solid {ORANGE};padding-left:0.6em;margin:0.3em 0"
PRE = (  # a notebook's own style may break words anywhere, in letters of any width
    "font-family:ui-monospace,monospace;white-space:pre-wrap;word-break:normal;overflow-wrap:anywhere;"
    "margin:0.1em 0 0.4em;padding:0;max-height:26em;overflow:auto"
)
CODE = (
    "display:block;background:rgba(127,127,127,0.15);border-radius:3px;padding:0.1em 0.6em;margin:0 0 0.3em;"
    "white-space:pre-wrap;overflow-wrap:anywhere;color:inherit"
)


def block(*parts: str) -> str:
    """The whole output of a cell, as wide as the picture at most."""
    return f'<div style="max-width:{WIDEST_PX}px;line-height:1.5;{NUMBERS}">{"".join(parts)}</div>'


def heading(words: str, rest: str = "") -> str:
    """A line in bold, and what follows it."""
    return f"<div><b>{escape(one_line(words))}</b>{escape(rest)}</div>"


def facts(rows: Rows) -> str:
    """Labels and values in two columns."""
    cells = "".join(
        f'<span style="{DIM}">{escape(label)}</span>'
        f'<span style="overflow-wrap:anywhere">{escape(value)}</span>'
        for label, value in rows
    )
    columns = "display:grid;grid-template-columns:max-content minmax(0,1fr);gap:0 1em"
    return f'<div style="{columns};margin:0.3em 0">{cells}</div>'


def written(sample: tuple[int, str, str] | None) -> str:
    """What the model wrote at a step, its prompt dim."""
    if sample is None:
        return ""
    step, prompt, text = sample
    return (
        f'<div style="{DIM}">sample at step {step:,}</div><pre style="{PRE}">'
        f'<span style="{DIM}">{escape(printable(prompt))}</span>{escape(printable(text))}</pre>'
    )


def notices(messages: Sequence[str]) -> str:
    """What the user should know; it stays."""
    return "".join(f'<div style="{MARK}">{escape(one_line(each))}</div>' for each in messages)


def advice(steps: Sequence[Next]) -> str:
    """What to do next, as code to copy."""
    lines = []
    for step in steps:
        code = f'<code style="{CODE}">{escape(step.code)}</code>' if step.code else ""
        lines.append(f"<div>{escape(step.why)}{':' if code else ''}{code}</div>")
    return f'<div style="margin:0.4em 0">{"".join(lines)}</div>'


def curves(progress: Progress) -> str:
    """The picture of a run that trains: both losses so far, and what counting reaches."""
    start = progress.start
    title = f"Losses of {start.run.name} up to step {progress.step:,} of {progress.steps:,}"
    both = _both(progress.curve.x, progress.curve.y, progress.measured.x, progress.measured.y)
    return picture(both, title=title, counting=start.counting, last_step=progress.steps)


def live_html(progress: Progress, told: Sequence[str] = ()) -> str:
    """A run that trains: what it costs, how far it is, its losses, its curve and what it wrote last."""
    step, steps = progress.step, progress.steps
    left = "judging the model" if progress.saved >= steps else "saving"
    if step < steps:
        left = f"about {clock(progress.seconds_left)} left"
    if progress.stopping:
        left = "stopping after this step, then saving; interrupt again to stop at once"
    word = "Training" if progress.last else "Beginning with"
    return block(
        heading(
            f"{word} {progress.start.run.name}",
            f" · step {step:,} of {steps:,} · {100 * step // steps} % · {left}",
        ),
        _bar(step / steps),
        facts(_losses(progress)) if progress.last else "",
        curves(progress),
        written(progress.sample),
        notices([*start_warnings(progress.start), *told]),
        f'<div style="{DIM};font-size:0.9em">{escape(cost(progress))}</div>',
    )


def cost(progress: Progress) -> str:
    """What a run takes, in one line: parameters, memory, tokens, time, engine."""
    start = progress.start
    return " · ".join(
        [
            model_words(start.config),
            f"{show_bytes(start.nbytes)} of memory",
            f"{counted(start.config.training.steps, 'step')} of {start.tokens_per_step:,} tokens, {show_ratio(start.epochs)} epochs",
            f"about {about(start.seconds_left)} in all",
            f"engine {engine_words(start.engine, start.config.engine.name)}",
        ]
    )


def end_html(progress: Progress, outcome: Outcome, told: Sequence[str] = ()) -> str:
    """A run that ended: what it came to, its curve, what it wrote and what to do next."""
    took = f" in {clock(progress.elapsed)}"
    if not outcome.finished:
        took = f" of {progress.steps:,} in {clock(progress.elapsed)}, and saved"
    judged = [row for row in end_rows(progress, outcome) if row[0] != "counting reaches"]
    rows = [(label, value) for label, value in start_rows(progress.start) if label != "counting"]
    return block(
        heading(f"{outcome.run.name}: {ending(outcome)}", took),
        facts(judged),
        curves(progress),
        written(progress.sample),
        notices([*start_warnings(progress.start), *told]),
        advice(next_steps(progress.start.config, outcome)),
        f'<details><summary style="{DIM}">what it took</summary>{facts(rows)}</details>',
    )


def broken_html(progress: Progress, told: Sequence[str] = ()) -> str:
    """A run that was cut off by an error or a second interrupt: how far it came and what is safe."""
    run = progress.start.run
    safe = Next("nothing was saved")
    if progress.saved:
        safe = Next(f"step {progress.saved:,} is saved; go on from there", going_on(run))
    return block(
        heading(f"{run.name} was stopped", f" at step {progress.step:,} of {progress.steps:,}"),
        curves(progress),
        written(progress.sample),
        notices([*start_warnings(progress.start), *told]),
        advice([safe]),
    )


def run_html(path: Path, counting: Sequence[CountingLine] = ()) -> str:
    """A run on the disk: its curve, the facts and its newest sample. What cannot be read is said."""
    run = Run(path)
    try:
        config, lines, samples = run.config(), run.metrics.read(), run.samples.read()
    except PosttrainError as error:
        return block(heading(run.name), notices([error.message]), advice([Next(error.hint)]))
    row = describe_run(run)
    training = curve_of("", lines, "loss", MOST_POINTS)
    measured = curve_of("", lines, "val_loss", MOST_DOTS)
    val = newest(lines, "val_loss")
    rows = [("model", model_words(config))]
    if row.loss is not None:
        rows.append(("training loss", f"{row.loss:.3f} nats a token"))
    if val is not None:
        best = f", {row.best_val_loss:.3f} at best" if row.best_val_loss != val else ""
        stands = f", {standing(val, counting)}" if counting else ""
        rows.append(("validation loss", f"{val:.3f} nats a token{best}{stands}"))
    rows.append(("engine", _engine(run) or config.engine.name))
    took = newest(lines, "elapsed_s")
    if took is not None and row.step:
        rows.append(("time", f"{clock(took)}, {brief(took / row.step)} a step"))
    rows.append(("folder", one_line(str(path))))
    wrote = samples[-1] if samples else {}
    sample = None
    if isinstance(wrote.get("step"), int):
        sample = wrote["step"], str(wrote.get("prompt", "")), str(wrote.get("text", ""))
    steps = config.training.steps
    title = f"Losses of {run.name} up to step {row.step:,} of {steps:,}"
    return block(
        heading(run.name, f" · {row.state} · step {row.step:,} of {steps:,}"),
        facts(rows),
        picture(
            _both(training.x, training.y, measured.x, measured.y),
            title=title,
            counting=counting,
            last_step=steps,
        ),
        written(sample),
    )


def _engine(run: Run) -> str:
    """The engine that made the newest checkpoint, in words; nothing where that cannot be read."""
    for folder in reversed(list_checkpoints(run.checkpoints)):
        with contextlib.suppress(PosttrainError):
            state: Mapping[str, Any] = read_object(folder / STATE_FILE)
            info, name = state.get("engine_info"), state.get("engine")
            if isinstance(info, dict) and isinstance(name, str):
                return one_line(engine_words(info, name))
    return ""


def _both(
    x: Sequence[float], y: Sequence[float], val_x: Sequence[float], val_y: Sequence[float]
) -> list[Drawn]:
    """Training and validation loss as every picture of one run draws them."""
    return [
        Drawn(Curve("training loss", x, y), BLUE, noisy=True),
        Drawn(Curve("validation loss", val_x, val_y), ORANGE, dots=True),
    ]


def _losses(progress: Progress) -> Rows:
    if progress.loss is None:
        return []
    rows = [("training loss", f"{progress.loss:.3f}")]
    if progress.val_loss is not None:
        stands = progress.stands(progress.val_loss)
        where = f"{progress.val_loss:.3f} at step {progress.val_step:,}, {stands}".rstrip(", ")
        rows.append(("validation loss", where))
    elif len(progress.start.corpus.val):
        rows.append(("validation loss", f"first at step {progress.next_evaluation:,}"))
    pace = f"{progress.tokens_per_second:,.0f} tokens/s, {brief(progress.seconds_per_step)} a step"
    return [*rows, ("speed", pace)]


def _bar(share: float) -> str:
    """A bar that needs neither a style sheet nor a colour of the page."""
    percent = 100 * min(1.0, max(0.0, share))
    return (
        f'<div role="progressbar" aria-label="steps done, percent" aria-valuenow="{percent:.0f}" aria-valuemin="0" aria-valuemax="100" '
        'style="height:6px;border-radius:3px;margin:0.3em 0;background:rgba(127,127,127,0.25)">'
        f'<div style="height:100%;border-radius:3px;width:{percent:.1f}%;background:{BLUE}"></div></div>'
    )
