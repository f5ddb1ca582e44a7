"""What there is to say about a run before its first step and after its last one, as labels with values.

What this is: words and numbers, the same in a terminal, a pipe and a notebook.
What this is not: a display, or what to do next, which every place says in its own words (``cli/report.py``, ``notebook/words.py``).
"""

from __future__ import annotations

from collections.abc import Mapping

from posttrainllm.config import TrainConfig, changed_settings
from posttrainllm.figures import about, brief, clock, counted, one_line, printable
from posttrainllm.storage import show_bytes
from posttrainllm.training.evaluate import bits_per_byte
from posttrainllm.training.observer import Outcome, Record, Start
from posttrainllm.training.progress import Progress
from posttrainllm.training.writing import EPOCHS_TO_MEMORISE, memorisation_warning, show_ratio

LINES = 20  # of progress, about: what a log can bear

SIZES = {f"model.{name}" for name in ("n_layer", "n_head", "n_embd", "n_inner", "n_vocab")}
"""Settings that make another model of a preset's; with a shorter context it is still that one."""

Rows = list[tuple[str, str]]


def start_rows(start: Start) -> Rows:
    """What is known before the first step: model, memory, text, length, engine, time and place."""
    config, corpus = start.config, start.corpus
    train, val = len(corpus.train_text), len(corpus.val_text)
    steps = f"{counted(config.training.steps, 'step')} of {start.tokens_per_step:,} tokens"
    rows = [
        ("model", model_words(config)),
        ("memory", f"{start.nbytes:,} bytes ({show_bytes(start.nbytes)}), taken once"),
        (
            "corpus",
            f"{one_line(corpus.name)}: {corpus.n_bytes:,} bytes, {train:,} to train on and "
            f"{val:,} for validation",
        ),
        (
            "run",
            f"{steps}: {start.tokens:,} tokens, {show_ratio(start.epochs)} epochs; "
            f"{show_ratio(train / start.parameters)} bytes of text a parameter",
        ),
        ("counting", ", ".join(map(str, start.counting)) or "nothing to compare with"),
        ("engine", engine_words(start.engine, config.engine.name)),
        ("time", f"about {about(start.seconds_left)} ({brief(start.seconds_per_step)} a step)"),
        ("folder", one_line(str(start.run))),
    ]
    if corpus.bytes_per_token != 1.0:
        rows.insert(
            3,
            (
                "tokens",
                f"{len(corpus.train):,} to train on, {corpus.bytes_per_token:.2f} bytes each",
            ),
        )
    if start.first_step > 1:
        rows.insert(-2, ("resumed", f"after step {start.first_step - 1:,}"))
    if not start.counting:
        rows = [row for row in rows if row[0] != "counting"]
    return rows


def model_words(config: TrainConfig) -> str:
    """A model in words: its preset's name, unless it has other sizes than that one, its parameters and its shape."""
    model = config.model
    resized = any(key in SIZES for key, _, _ in changed_settings(config))
    shape = (
        f"{model.parameters():,} parameters ({counted(model.n_layer, 'layer')}, {counted(model.n_head, 'head')}, "
        f"width {model.n_embd}, context {model.n_ctx})"
    )
    return f"{shape}, trained as preset {config.preset}" if resized else f"{config.preset}: {shape}"


def engine_words(info: Mapping[str, object], name: str) -> str:
    """An engine in words: its name and what its results depend on, each with the reason where there is one."""
    engine = dict(info)
    name = str(engine.pop("engine", name))
    hidden = ("build_id", "choices")  # for the record, not for a reader
    reasons = {
        key: f" ({engine.pop(f'{key}_reason')})"
        for key in list(engine)
        if f"{key}_reason" in engine
    }
    details = [
        f"{key} {value}{reasons.get(key, '')}" for key, value in engine.items() if key not in hidden
    ]
    return ", ".join([name, *details])


def start_warnings(start: Start) -> list[str]:
    """What the user should know about this text and this model before time is spent."""
    warning = memorisation_warning(start.parameters, len(start.corpus.train_text), start.epochs)
    if start.config.training.start_from and start.epochs <= EPOCHS_TO_MEMORISE:
        warning = None  # its size fits the text that it learnt first, not the one it is now taught
    return [*start.corpus.notices, *([warning] if warning else [])]


def step_line(progress: Progress, record: Record, *, verbose: bool = False) -> str | None:
    """One line about a step, if it is one that a log should have: one every so many, and each evaluation."""
    measured = record.val_loss is not None
    every = max(1, progress.steps // LINES)
    if record.step % every and record.step != progress.steps and not measured:
        return None
    val = "-" if progress.val_loss is None else f"{progress.val_loss:.3f}"
    line = (
        f"step {record.step:>{len(str(progress.steps))}}/{progress.steps}  "
        f"loss {progress.loss:.3f}  val {val:>5}  "
        f"{progress.tokens_per_second:>9,.0f} tokens/s  {clock(progress.seconds_left):>5} left"
    )
    if verbose:
        line += f"  lr {record.lr:.2e}  gradient norm {record.grad_norm:.3f}"
    if record.val_loss is not None:
        line += f"  {progress.stands(record.val_loss)}"
    return line.rstrip()


def ending(outcome: Outcome) -> str:
    """How a run ended, and after how many steps."""
    word = "finished" if outcome.finished else "stopped after"
    return f"{word} {counted(outcome.step, 'step')}"


def end_rows(progress: Progress, outcome: Outcome) -> Rows:
    """What a run came to, and where it is."""
    rows = []
    if outcome.verdict is None and progress.val_loss is not None:
        stands = progress.stands(progress.val_loss)
        when = "" if progress.val_step == outcome.step else f" at step {progress.val_step:,}"
        value = f"{progress.val_loss:.3f} nats a token{when}, {stands}".rstrip(", ")
        rows.append(("validation loss", value))
    for line in outcome.verdict.lines() if outcome.verdict else []:
        label, _, value = line.partition(": ")
        rows.append((label, printable(value)))
    density = progress.start.corpus.bytes_per_token
    if outcome.val_loss is not None and density != 1.0:
        bits = bits_per_byte(outcome.val_loss, density)
        rows.append(("bits a byte", f"{bits:.3f}, to compare with models of other tokenizers"))
    rows.append(("run", one_line(str(outcome.run))))
    if outcome.checkpoint:
        rows.append(("saved", one_line(str(outcome.checkpoint))))
    return rows
