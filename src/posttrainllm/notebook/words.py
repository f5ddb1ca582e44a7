"""What to do after a run, in Python: the verdict's advice as code to copy into the next cell."""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from pathlib import Path

from posttrainllm.config import TrainConfig, changed_settings
from posttrainllm.runs.folder import resuming
from posttrainllm.training.observer import Outcome
from posttrainllm.training.writing import Advice
from posttrainllm.wording import python_text


@dataclass(frozen=True)
class Next:
    """Something to do: why, and the code for it; advice without code has none."""

    why: str
    code: str = ""


def next_steps(config: TrainConfig, outcome: Outcome) -> list[Next]:
    """What to do after a run that ended."""
    write = Next("let it write", writing(config))
    if not outcome.finished:
        return [Next("go on", going_on(outcome.run)), write]
    advice = outcome.verdict.advice(config) if outcome.verdict else ()
    return [write, *(_next(config, outcome.run, each) for each in advice)]


def _next(config: TrainConfig, run: Path, advice: Advice) -> Next:
    match advice.name:
        case "more_steps":
            return Next(advice.why, going_on(run, advice.values["total"]))
        case "larger":
            return Next(advice.why, _train(*_corpus(config), _preset(advice.values["preset"])))
        case "diagnose":
            return _other_rate(config, run, advice)
        case "own_text":
            return Next(advice.why, _train(python_text("my.txt")))
        case _:
            return Next(advice.why)


def _other_rate(config: TrainConfig, run: Path, advice: Advice) -> Next:
    """What to do about a loss that counting still beats: the preset's learning rate, or finding out why."""
    reason = f"counting {advice.values['line']} is still ahead"
    usual = {key: value for key, _, value in changed_settings(config)}.get("schedule.learning_rate")
    if usual is None:
        command = f"posttrainllm diagnose {shlex.quote(str(run))}"
        return Next(f"{command}, in a terminal, looks for the reason: {reason}")
    code = _train(*_corpus(config), _preset(config.preset))
    return Next(f"the preset's learning rate ({usual:g}): {reason}", code)


def going_on(run: Path, steps: int | None = None) -> str:
    """The call that goes on with a run."""
    return f"run = {resuming(run, steps)}"


def writing(config: TrainConfig) -> str:
    """The call that lets a run write; a prompt of the default text fits only that."""
    return "run.generate()" if config.data.corpus else 'run.generate("ROMEO:")'


def _corpus(config: TrainConfig) -> list[str]:
    sources = list(config.data.corpus)
    quoted = ", ".join(map(python_text, sources))
    return [quoted if len(sources) == 1 else f"[{quoted}]"] if sources else []


def _preset(name: str) -> str:
    return f"preset={python_text(name)}"


def _train(*arguments: str) -> str:
    return f"run = posttrainllm.train({', '.join(arguments)})"
