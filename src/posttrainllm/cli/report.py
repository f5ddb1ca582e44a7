"""What stands on the screen before the first step and after the last one."""

from __future__ import annotations

import os
import shlex
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path

from posttrainllm.api import RUNS_DIR
from posttrainllm.cli.terminal import WARNINGS, fields, say
from posttrainllm.figures import clock, one_line, printable
from posttrainllm.training.observer import Outcome, Start
from posttrainllm.training.progress import Progress
from posttrainllm.training.report import end_rows, ending, start_rows, start_warnings


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
    for advice in outcome.verdict.advice(start.config) if outcome.verdict else ():
        match advice.name:
            case "more_steps":
                found.append(Suggestion(advice.why, f"{resume} --steps {advice.values['total']}"))
            case "larger":
                preset = advice.values["preset"]
                found.append(Suggestion(advice.why, f"{command()} train{corpus} --preset {preset}"))
            case "diagnose":
                found.append(Suggestion(advice.why, f"{command()} diagnose {place}"))
            case "own_text":
                found.append(Suggestion(advice.why, f"{command()} train FILE"))
            case _:
                found.append(Suggestion(advice.why))
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
    if outcome.finished and progress.sample:
        show_sample(*progress.sample)
    say((f"{ending(outcome)} in {clock(progress.elapsed)}", "bold"))
    fields(end_rows(progress, outcome))
    say()
    for suggestion in suggestions(progress.start, outcome):
        say((f"{suggestion.why}:" if suggestion.command else suggestion.why, "dim"))
        if suggestion.command:
            say("  ", (suggestion.command, "bold"))
