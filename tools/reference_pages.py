#!/usr/bin/env python3
"""Pages that say what the code says: docs/settings.md (settings, presets, environment) and docs/python.md (the Python API).

    python tools/reference_pages.py            # writes both; tests/test_docs_references.py says when that is due

Types, ranges, defaults and texts come from the sections of the configuration, the preset table and the docstrings.
"""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from posttrainllm.config import Setting

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"
MADE = "Made by `python tools/reference_pages.py` from the code; not edited by hand."

HEAD = f"""# Settings

{MADE}

Everything that a run depends on has a name. `--set NAME=VALUE` gives it on the command line, a TOML file with `--config`, a keyword
in Python (`posttrainllm.train(learning_rate=1e-3)`). A later source wins: defaults, preset, file, `--set`, options of their own.
`config.toml` in a run's folder holds all of them, with a note where one is not the preset's.

    posttrainllm train --set optimizer.beta2=0.99 --set schedule.kind=wsd
"""

ENVIRONMENT = {
    "POSTTRAINLLM_TRACEBACK": "set to anything: a mistake in posttrainllm shows its traceback, too",
    "POSTTRAINLLM_TIMEOUT_S": "how long the processes of one run wait for each other, in seconds; unset is 600",
    "NO_COLOR": "set to anything: no colours in the terminal",
    "XDG_CACHE_HOME": "where joined texts, token ids and choices of GPU kernels are kept; unset is ~/.cache",
}


def table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """A Markdown table, with an empty line after it."""
    lines = [columns, ["---"] * len(columns), *rows]
    cells = [[cell.replace("|", "\\|") for cell in line] for line in lines]
    return [*("| " + " | ".join(line) + " |" for line in cells), ""]


def number(value: float | None) -> str:
    """As people write it."""
    return f"{value:,}" if isinstance(value, int) else f"{value:g}"


def takes(setting: Setting) -> str:
    """Values that a setting may have."""
    if setting.choices:
        return ", ".join(f"`{choice}`" if choice else "empty" for choice in setting.choices)
    if setting.kind in ("integer", "number"):
        return f"{number(setting.low)} to {number(setting.high)}"
    return "`true`, `false`" if setting.kind == "boolean" else setting.kind


def default(setting: Setting) -> str:
    """What holds where nothing is said."""
    if setting.from_preset:
        return "the preset's"
    if setting.default is None:
        return "unset"
    if isinstance(setting.default, bool):
        return f"`{str(setting.default).lower()}`"
    return "empty" if setting.default in ("", ()) else f"`{setting.default}`"


def settings() -> str:
    """The page of settings."""
    from posttrainllm.config import PRESETS, SETTINGS, load_config
    from posttrainllm.sections import SECTIONS

    lines = [HEAD]
    for name, section in SECTIONS.items():
        about = (section.__doc__ or "").strip().splitlines()[0].replace("``", "`")
        rows = [
            (f"`{key}`", takes(setting), default(setting), setting.help)
            for key, setting in SETTINGS.items()
            if key.partition(".")[0] == name
        ]
        columns = ("setting", "takes", "default", "what it is")
        lines += [f"## {name}", "", about, "", *table(columns, rows)]
    presets = [
        (
            f"`{name}`",
            f"{row.batch_size} x {row.n_ctx:,}",
            f"{row.n_layer} / {row.n_head} / {row.n_embd:,}",
            f"{row.steps:,}",
            f"{row.learning_rate:g}",
            f"{load_config(name).model.parameters():,}",
            row.summary,
        )
        for name, row in PRESETS.items()
    ]
    shape = ("preset", "batch x context", "layers / heads / width")
    columns = (*shape, "steps", "learning rate", "parameters", "what it is for")
    lines += ["## Presets", "", *table(columns, presets)]
    variables = [(f"`{name}`", does) for name, does in ENVIRONMENT.items()]
    lines += ["## Environment", "", *table(("variable", "what it does"), variables)]
    return "\n".join(lines).rstrip() + "\n"


PYTHON = f"""# From Python

{MADE}

```python
import posttrainllm

run = posttrainllm.train(preset="tiny", steps=20, name="from-python")
print(run.val_loss, repr(run.generate("ROMEO:", max_tokens=20)))
print(posttrainllm.load("shakespeare-small").inspect("ROMEO: But soft").candidates())
```

Every name below is public: it stays, or a release says what became of it. [In a notebook](notebook.md) shows what runs look like there,
[Settings](settings.md) what `**settings` may be. What is refused is a `posttrainllm.PosttrainError` with the next action.
"""


def prose(thing: object) -> str:
    """A docstring as Markdown; where its blocks of code are indented, they stay so."""
    text = re.sub(r"``([^`]+)``", r"`\1`", inspect.getdoc(thing) or "")
    return re.sub(r"(?m)^(Raises|Shapes|Returns):", r"**\1:**", text)


def signature(name: str, function: Any) -> str:
    """How to call it: names and defaults, and what comes back."""
    parts = []
    for parameter in inspect.signature(function).parameters.values():
        if parameter.name == "self":
            continue
        if parameter.kind is parameter.KEYWORD_ONLY and not {"*"} & {p[0] for p in parts}:
            parts.append("*")
        default = "..." if callable(parameter.default) else repr(parameter.default)
        given = "" if parameter.default is parameter.empty else f"={default}"
        stars = {parameter.VAR_POSITIONAL: "*", parameter.VAR_KEYWORD: "**"}
        parts.append(stars.get(parameter.kind, "") + parameter.name + given)
    gives = str(inspect.signature(function).return_annotation).strip("'")
    return f"{name}({', '.join(parts)}) -> {gives}"


def members(kind: type) -> Iterable[str]:
    """Properties and methods of a class that have a name and words for users."""
    fields = getattr(kind, "__dataclass_fields__", {})
    for name, member in vars(kind).items():
        inner = getattr(member, "fget", None) or getattr(member, "func", None)
        if name.startswith("_") or name in fields or not (inner or inspect.isfunction(member)):
            continue
        shown = name if inner else signature(name, member)
        yield f"- `{shown}`  \n  {prose(inner or member)}".replace("\n\n", "\n").replace(
            "\n", "\n  "
        )


def python() -> str:
    """The page of the Python API."""
    import posttrainllm
    from posttrainllm.training.looking import Inspection
    from posttrainllm.training.models import Model

    names = [
        name for name in posttrainllm.__all__ if inspect.isfunction(getattr(posttrainllm, name))
    ]
    lines = [PYTHON]
    for name in names:
        function = getattr(posttrainllm, name)
        shown = signature(f"posttrainllm.{name}", function)
        lines += [f"## {name}", "", f"`{shown}`", "", prose(function), ""]
    for kind in (posttrainllm.Run, Model, Inspection):
        lines += [f"## {kind.__name__}", "", prose(kind), "", *members(kind), ""]
    return "\n".join(lines).rstrip() + "\n"


def pages() -> dict[str, str]:
    """The pages by name."""
    sys.path.insert(0, str(ROOT / "src"))
    return {"settings.md": settings(), "python.md": python()}


if __name__ == "__main__":
    for name, text in pages().items():
        (DOCS / name).write_text(text, encoding="utf-8")
