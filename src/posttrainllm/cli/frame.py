"""One frame of the live display: from the progress of a run to a few lines of text.

A pure function of the progress and the size of the terminal, so that every width can be tested:

    step 612/1,500 ━━━━━━━━━━━━╸━━━━━━━━━━━━━━━━━ 41 %  0:38 left
    loss   1.932  ▇▆▅▄▃▃▂▂▂▁▁▁▁▁▁▁▁▁▁▁▁▁▁▁▁
    val    1.951  at step 500, below triples (2.05)
    speed  41,230 tokens/s, 25 ms a step
    sample at step 500
      ROMEO:
      What say you to the ...
"""

from __future__ import annotations

from rich.cells import chop_cells
from rich.text import Text

from posttrainllm.cli.plot import sparkline
from posttrainllm.figures import brief, clock, printable
from posttrainllm.machine import process_memory
from posttrainllm.storage import show_bytes
from posttrainllm.training.progress import Progress

SAMPLE_LINES = 6
WIDEST = 72  # columns used, so that most changes of a terminal's width break no line
WIDEST_CURVE = 40


def frame(progress: Progress, *, width: int, height: int, verbose: bool = False) -> list[Text]:
    """Return the lines of a frame for a terminal of ``width`` columns and ``height`` lines."""
    room = max(20, min(WIDEST, width - 1))
    lines = [_bar(progress, room), _loss(progress, room), _val(progress), _speed(progress)]
    if verbose:
        lines += _rest(progress)
    if progress.stopping:
        lines.append(Text("stopping after this step; Ctrl-C again stops at once", "yellow"))
    return lines + _sample(progress, room, min(SAMPLE_LINES, height - len(lines) - 2))


def _bar(progress: Progress, room: int) -> Text:
    step, steps = progress.step, progress.steps
    left = f"{clock(progress.seconds_left)} left" if step < steps else "finishing"
    before, after = f"step {step:,}/{steps:,} ", f" {100 * step // steps} %  {left}"
    length = room - len(before) - len(after)
    if length < 4:
        return Text.assemble(before, after.strip())
    halves = 2 * length * step // steps
    filled = "━" * (halves // 2) + ("╸" if halves % 2 else "")
    rest = "━" * (length - len(filled))
    return Text.assemble(before, (filled, "green"), (rest, "dim"), after)


def _loss(progress: Progress, room: int) -> Text:
    loss = progress.loss
    if loss is None:
        return _row("loss", "-")
    # The counting lines are of the validation text: as soon as its loss is known, only that is compared.
    stands = progress.stands(loss) if progress.val_loss is None else ""
    curve = sparkline(progress.curve.y, min(WIDEST_CURVE, room - 16 - len(stands)))
    return _row("loss", f"{loss:.3f}", (f"  {curve}" if curve else "", "cyan"), (f"  {stands}", ""))


def _val(progress: Progress) -> Text:
    if not len(progress.start.corpus.val):
        return _row("val", "-", ("  no text was kept for validation", "dim"))
    if progress.val_loss is None:
        return _row("val", "-", (f"  first at step {progress.next_evaluation:,}", "dim"))
    where = f"  at step {progress.val_step:,}, {progress.stands(progress.val_loss)}".rstrip(", ")
    return _row("val", f"{progress.val_loss:.3f}", (where, ""))


def _speed(progress: Progress) -> Text:
    if progress.last is None:
        return _row("speed", "-")
    pace = f"{progress.tokens_per_second:,.0f} tokens/s"
    return _row("speed", pace, (f", {brief(progress.seconds_per_step)} a step", ""))


def _rest(progress: Progress) -> list[Text]:
    """What only ``--verbose`` shows."""
    last = progress.last
    memory = f"{show_bytes(progress.start.nbytes)} planned"
    if process := process_memory():
        memory += f", {show_bytes(process)} in the whole process"
    saved = f"step {progress.saved:,}" if progress.saved else "nothing yet"
    best = "-" if progress.best is None else f"{progress.best:.3f} validation loss"
    return [
        _row("lr", f"{last.lr:.3e}, gradient norm {last.grad_norm:.3f}" if last else "-"),
        _row("best", best),
        _row("memory", memory),
        _row("time", f"{clock(progress.elapsed)} so far, saved: {saved}"),
    ]


def _sample(progress: Progress, room: int, most: int) -> list[Text]:
    if progress.sample is None or most < 1:
        return []
    step, prompt, text = progress.sample
    lines = [Text(f"sample at step {step:,}", "dim")]
    for line in wrapped(prompt, text, room - 2)[:most]:
        lines.append(Text("  ").append_text(line))
    return lines


def wrapped(prompt: str, text: str, room: int) -> list[Text]:
    """Return a sample as lines of at most ``room`` cells, the last line of its prompt dim."""
    begun = printable(prompt).replace("\t", "    ").split("\n")[-1]
    whole = Text.assemble((begun, "dim"), printable(text).replace("\t", "    "))
    lines = []
    for line in whole.split("\n", allow_blank=True):
        start = 0
        for piece in chop_cells(line.plain, room) or [""]:
            lines.append(line[start : start + len(piece)])
            start += len(piece)
    return lines


def _row(label: str, value: str, *more: tuple[str, str]) -> Text:
    return Text.assemble((f"{label:<7}", "dim"), value, *more)
