"""What stands on the screen before the first step and after the last one."""

from __future__ import annotations

import os
import shlex
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path

from posttrainllm.api import RUNS_DIR
from posttrainllm.cli.figures import about, brief, clock, counted, one_line, printable
from posttrainllm.cli.progress import Progress
from posttrainllm.cli.terminal import WARNINGS, fields, say
from posttrainllm.storage import show_bytes
from posttrainllm.training.observer import Outcome, Start
from posttrainllm.training.writing import EPOCHS_TO_MEMORISE, memorisation_warning, show_ratio

Rows = list[tuple[str, str]]


def start_rows(start: Start) -> Rows:
    """What is known before the first step: model, memory, text, length, engine, time and place."""
    config, corpus = start.config, start.corpus
    model = config.model
    train, val = len(corpus.train_text), len(corpus.val_text)
    tokens_per_byte = len(corpus.train) / max(1, train)
    engine = dict(start.engine)
    name = engine.pop("engine", config.engine.name)
    hidden = ("build_id", "choices")  # for the record, not for a reader
    reasons = {
        key: f" ({engine.pop(f'{key}_reason')})"
        for key in list(engine)
        if f"{key}_reason" in engine
    }
    details = [
        f"{key} {value}{reasons.get(key, '')}" for key, value in engine.items() if key not in hidden
    ]
    steps = f"{counted(config.training.steps, 'step')} of {start.tokens_per_step:,} tokens"
    rows = [
        (
            "model",
            f"{config.preset}: {start.parameters:,} parameters ({model.n_layer} layers, "
            f"{model.n_head} heads, width {model.n_embd}, context {model.n_ctx})",
        ),
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
        ("engine", ", ".join([str(name), *details])),
        ("time", f"about {about(start.seconds_left)} ({brief(start.seconds_per_step)} a step)"),
        ("folder", one_line(str(start.run))),
    ]
    if tokens_per_byte != 1.0:
        rows.insert(3, ("tokens", f"{len(corpus.train):,} to train on"))
    if start.first_step > 1:
        rows.insert(-2, ("resumed", f"after step {start.first_step - 1:,}"))
    if not start.counting:
        rows = [row for row in rows if row[0] != "counting"]
    return rows


def start_warnings(start: Start) -> list[str]:
    """What the user should know about this text and this model before time is spent."""
    warning = memorisation_warning(start.parameters, len(start.corpus.train_text), start.epochs)
    if start.config.training.start_from and start.epochs <= EPOCHS_TO_MEMORISE:
        warning = None  # its size fits the text that it learnt first, not the one it is now taught
    return [*start.corpus.notices, *([warning] if warning else [])]


@dataclass(frozen=True)
class Suggestion:
    """Something to do next: why, and the command to copy."""

    why: str
    command: str = ""


def suggestions(start: Start, outcome: Outcome) -> list[Suggestion]:
    """What to do after a run: the verdict's advice as commands, and letting the model write."""
    place = where(outcome.run)
    corpus = "".join(f" {shlex.quote(source)}" for source in start.config.data.corpus)
    resume = f"{command()} train --resume {place}"
    if not outcome.finished:
        return [Suggestion("go on", resume), Suggestion("let it write", _generate(start, place))]
    found = [Suggestion("let it write", _generate(start, place))]
    for action in outcome.verdict.actions if outcome.verdict else ():
        why, _, rest = action.partition(": ")
        if rest.startswith("--steps "):
            found.append(Suggestion(why, f"{resume} {rest}"))
        elif rest.startswith("--preset "):
            found.append(Suggestion(why, f"{command()} train{corpus} {rest}"))
        elif why == "posttrainllm diagnose":
            found.append(Suggestion(rest, f"{command()} diagnose {place}"))
        elif rest.startswith("posttrainllm "):
            found.append(Suggestion(why, rest.replace("posttrainllm", command(), 1)))
        else:
            found.append(Suggestion(action))
    return found


def command() -> str:
    """How this program is called from here: by its name where a shell finds it, else by its path."""
    called = Path(sys.argv[0])
    if shutil.which("posttrainllm") or called.name != "posttrainllm":
        return "posttrainllm"
    return shlex.quote(os.path.relpath(called))


def where(run: Path) -> str:
    """How a command names a run: by its name, with the folder of runs when that is not the usual one."""
    name = shlex.quote(run.name)
    if os.path.abspath(run.parent) == os.path.abspath(RUNS_DIR):
        return name
    return f"{name} --runs-dir {shlex.quote(str(run.parent))}"


def _generate(start: Start, place: str) -> str:
    prompt = "" if start.config.data.corpus else ' --prompt "ROMEO:"'
    return f"{command()} generate {place}{prompt}"


def show_start(start: Start) -> None:
    """Print what is known before the first step."""
    warnings = [("warning", one_line(warning)) for warning in start_warnings(start)]
    fields([*start_rows(start), *warnings], WARNINGS)
    say()


def show_sample(step: int, prompt: str, text: str) -> None:
    """Print what the model wrote, its prompt dim."""
    say((f"sample at step {step:,}", "dim"))
    say((printable(prompt), "dim"), printable(text))
    say()


def show_end(progress: Progress, outcome: Outcome) -> None:
    """Print how a run ended: the newest sample, the verdict, where it is and what to do next."""
    took = f"in {clock(progress.elapsed)}"
    if outcome.finished and progress.sample:
        show_sample(*progress.sample)
    word = "finished" if outcome.finished else "stopped after"
    say((f"{word} {counted(outcome.step, 'step')} {took}", "bold"))
    rows = []
    if outcome.verdict is None and progress.val_loss is not None:
        stands = progress.stands(progress.val_loss)
        rows.append(("validation loss", f"{progress.val_loss:.3f} nats a token, {stands}"))
    for line in outcome.verdict.lines() if outcome.verdict else []:
        label, _, value = line.partition(": ")
        if label != "next":
            rows.append((label, printable(value)))
    rows.append(("run", one_line(str(outcome.run))))
    if outcome.checkpoint:
        rows.append(("saved", one_line(str(outcome.checkpoint))))
    fields(rows)
    say()
    for suggestion in suggestions(progress.start, outcome):
        say((f"{suggestion.why}:" if suggestion.command else suggestion.why, "dim"))
        if suggestion.command:
            say("  ", (suggestion.command, "bold"))
