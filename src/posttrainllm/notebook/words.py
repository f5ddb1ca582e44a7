"""What to do after a run, in Python: the verdict's advice as code to copy into the next cell."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from posttrainllm.config import SETTINGS, TrainConfig, changed_settings
from posttrainllm.errors import PosttrainError
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
            preset = f"preset={_quoted(rest.removeprefix('--preset '))}"
            found.append(Next(why, _call("train", *_corpus(config), preset)))
        elif why == "posttrainllm diagnose":
            found.append(_other_rate(config, outcome.run, rest.partition(";")[0]))
        elif rest.startswith("posttrainllm train "):
            found.append(Next(why, _call("train", _quoted("my.txt"))))
        else:
            found.append(Next(action))
    return found


def _other_rate(config: TrainConfig, run: Path, reason: str) -> Next:
    """What to do about a loss that counting still beats: the preset's learning rate, or finding out why."""
    usual = {key: value for key, _, value in changed_settings(config)}.get("schedule.learning_rate")
    if usual is None:
        return Next(f"posttrainllm diagnose {run}, in a terminal, looks for the reason: {reason}")
    code = _call("train", *_corpus(config), f"preset={_quoted(config.preset)}")
    return Next(f"the preset's learning rate ({usual:g}): {reason}", code)


@contextmanager
def in_python() -> Iterator[None]:
    """Say what is wrong, and what to do, in the words of the Python API: a flag is an argument there."""
    try:
        yield
    except PosttrainError as error:
        error.reword(error.message.replace(" (from a flag)", ""), python_words(error.hint))
        raise


def python_words(text: str) -> str:
    """A text that names flags of the command line, with arguments and calls of the Python API in their place."""
    return _FLAG.sub(_argument, _RESUME.sub(_resuming, text))


_RESUME = re.compile(
    r"(?:posttrainllm train )?--resume(?: (\w.*?)(?=  | --|, |; |$))?(?: --steps (\d+))?"
)
_FLAG = re.compile(r"--([a-z][a-z-]+)(?: (\d[\d.e+-]*\b|cpp|numpy|torch|wasm|webgpu)\b)?")
_ARGUMENTS = {
    "from": "start_from",
    "allow-change": "allow_change=True",
    "name": "name",
    "runs-dir": "runs_dir",
    "engine": "engine",
}
"""Flags that are arguments of the API without being settings of that name."""


def _resuming(found: re.Match[str]) -> str:
    name, steps = found.groups()
    if name is None:
        return "posttrainllm.resume" + (f"(steps={steps})" if steps else "")
    return f"posttrainllm.resume({_quoted(name)}{f', steps={steps}' if steps else ''})"


def _argument(found: re.Match[str]) -> str:
    flag, value = found.groups()
    name = _ARGUMENTS.get(flag, flag.replace("-", "_"))
    if flag not in _ARGUMENTS and not any(key.endswith(f".{name}") for key in SETTINGS):
        return found.group()
    if value is None:
        return name
    return f"{name}={value if value[0].isdigit() else _quoted(value)}"


def going_on(run: Path, *more: str) -> str:
    """The call that goes on with a run."""
    return _call("resume", _quoted(run.name), *more, *_place(run))


def writing(config: TrainConfig) -> str:
    """The call that lets a run write; a prompt of the default text fits only that."""
    return "run.generate()" if config.data.corpus else 'run.generate("ROMEO:")'


def _corpus(config: TrainConfig) -> list[str]:
    sources = list(config.data.corpus)
    quoted = ", ".join(map(_quoted, sources))
    return [quoted if len(sources) == 1 else f"[{quoted}]"] if sources else []


def _place(run: Path) -> list[str]:
    if os.path.abspath(run.parent) == os.path.abspath(RUNS_DIR):
        return []
    return [f"runs_dir={_quoted(str(run.parent))}"]


def _quoted(text: str) -> str:
    """A string as Python reads it, in the quotes of this package's pages."""
    return json.dumps(text, ensure_ascii=False)


def _call(name: str, *arguments: str) -> str:
    return f"run = posttrainllm.{name}({', '.join(arguments)})"
