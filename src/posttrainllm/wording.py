"""What is said to every kind of user, once: a text whose commands and settings each face writes in its own way.

    worded("use a smaller {data.batch_size}, or {engine.name=cpp}")

    Python     use a smaller batch_size, or engine="cpp"
    terminal   use a smaller --batch-size, or --engine cpp
    browser    use a smaller batch_size, or engine cpp

What this is: ``Wording``, a ``str`` in the words of Python, since a program that catches an error is one in Python, with the other
two beside it. The command line shows ``in_terminal``, the server of the pages ``in_tab``, and nobody else has to know.
What this is not: what the tab says about its own engines and files; that is TypeScript's. A wording that is put into an f-string
is Python's from there on: put it into another one by ``worded("{what}; {then}", what=..., then=...)``.
"""

from __future__ import annotations

import ast
import json
import shlex
from string import Formatter
from typing import Final, Self

FLAGS: Final = {
    "preset": "--preset",
    "data.batch_size": "--batch-size",
    "data.tokenizer": "--tokenizer",
    "data.val_fraction": "--val-fraction",
    "engine.cpp_build": "--cpp-build",
    "engine.name": "--engine",
    "engine.parallel": "--parallel",
    "engine.threads": "--threads",
    "model.n_ctx": "--n-ctx",
    "schedule.learning_rate": "--learning-rate",
    "training.seed": "--seed",
    "training.start_from": "--from",
    "training.steps": "--steps",
    "allow_change": "--allow-change",
    "approximate": "--approximate",
    "dtype": "--dtype",
    "form": "--to",
    "name": "--name",
    "resume": "--resume",
    "runs_dir": "--runs-dir",
}
"""What ``posttrainllm train`` or ``export`` calls a setting, and what functions call so and is no setting; any other is set by --set."""

SPELLED: Final = {
    "engine.name": "engine",
    "optimizer.kind": "optimizer__kind",
    "resume": "posttrainllm.resume",
    "schedule.kind": "schedule__kind",
}
"""Settings whose name in Python is not the last part of their key."""

LABELS: Final = {
    "engine.name": "engine",
    "runs_dir": "folder of runs",
}
"""What the pages call a thing where it is not the last part of its key."""


class Wording(str):
    """A text in the words of Python that is also there for a terminal and for a page."""

    __slots__ = ("tab", "terminal")

    terminal: str
    tab: str

    def __new__(cls, python: str, *, terminal: str, tab: str | None = None) -> Self:
        """Say the same in three ways; what no page ever shows needs none of its own."""
        self = super().__new__(cls, python)
        self.terminal, self.tab = terminal, python if tab is None else tab
        return self

    def __getnewargs_ex__(self) -> tuple[tuple[str], dict[str, str]]:
        """Copies and pickles have all faces."""
        return (str(self),), {"terminal": self.terminal, "tab": self.tab}


def worded(text: str, **values: object) -> Wording:
    """A text for every face.

    In its braces stands a setting ("data.batch_size") or an argument of a function of ours ("runs_dir"), with a value
    ("engine.name=cpp") or without; or the name of one of ``values``: a wording, or anything else as it is, whatever braces are in it.
    """
    parts: list[object] = []
    for literal, field, form, _ in Formatter().parse(text):
        parts.append(literal)
        if field is None:
            continue
        value = values[field] if field in values else _setting_in(field)
        parts.append(value if isinstance(value, Wording) else format(value, form or ""))
    return Wording(
        "".join(map(str, parts)),
        terminal="".join(map(in_terminal, parts)),
        tab="".join(map(in_tab, parts)),
    )


def setting(key: str, value: object = None) -> Wording:
    """A setting or an argument, with or without a value."""
    name, flag = key.rpartition(".")[2], FLAGS.get(key)
    python, label = SPELLED.get(key, name), LABELS.get(key, name)
    if value is None:
        return Wording(python, terminal=flag or key, tab=label)
    if value is True and flag:  # a switch
        return Wording(f"{python}=True", terminal=flag, tab=label)
    literal = str(value) if isinstance(value, bool | int | float) else python_text(str(value))
    quoted = shlex.quote(str(value) if flag else f"{key}={value}")
    terminal = f"{flag or '--set'} {quoted}"
    return Wording(f"{python}={literal}", terminal=terminal, tab=f"{label} {value}")


def python_text(text: str) -> str:
    """A text as Python reads it, in the quotes of this package's pages."""
    return json.dumps(text, ensure_ascii=False)


def in_terminal(text: object) -> str:
    """The words for a terminal."""
    return text.terminal if isinstance(text, Wording) else str(text)


def in_tab(text: object) -> str:
    """The words for a page."""
    return text.tab if isinstance(text, Wording) else str(text)


def _setting_in(field: str) -> Wording:
    """The setting that stands in braces, its value a number, True, False or a text without quotes."""
    key, equals, text = field.partition("=")
    try:
        value: object = ast.literal_eval(text) if equals else None
    except (ValueError, SyntaxError):
        value = text
    return setting(key, value)
