"""What to do after a run, in Python: the verdict's advice as code to copy into the next cell."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from posttrainllm.config import TrainConfig
from posttrainllm.runs.folder import RUNS_DIR
from posttrainllm.training.observer import Outcome


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
    found = [write]
    for action in outcome.verdict.actions if outcome.verdict else ():
        why, _, rest = action.partition(": ")
        if rest.startswith("--steps "):
            found.append(Next(why, going_on(outcome.run, f"steps={rest.removeprefix('--steps ')}")))
        elif rest.startswith("--preset "):
            preset = f"preset={rest.removeprefix('--preset ')!r}"
            found.append(Next(why, _call("train", *_corpus(config), preset)))
        elif why == "posttrainllm diagnose":
            rate = f"learning_rate={config.schedule.learning_rate / 3:.1g}"
            preset = f"preset={config.preset!r}"
            found.append(
                Next(
                    f"compare with another: {rest}", _call("train", *_corpus(config), preset, rate)
                )
            )
        elif rest.startswith("posttrainllm train "):
            found.append(Next(why, _call("train", repr("my.txt"))))
        else:
            found.append(Next(action))
    return found


def going_on(run: Path, *more: str) -> str:
    """The call that goes on with a run."""
    return _call("resume", repr(run.name), *more, *_place(run))


def writing(config: TrainConfig) -> str:
    """The call that lets a run write; a prompt of the default text fits only that."""
    return "run.generate()" if config.data.corpus else 'run.generate("ROMEO:")'


def _corpus(config: TrainConfig) -> list[str]:
    sources = list(config.data.corpus)
    return [repr(sources[0] if len(sources) == 1 else sources)] if sources else []


def _place(run: Path) -> list[str]:
    if os.path.abspath(run.parent) == os.path.abspath(RUNS_DIR):
        return []
    return [f"runs_dir={str(run.parent)!r}"]


def _call(name: str, *arguments: str) -> str:
    return f"run = posttrainllm.{name}({', '.join(arguments)})"
