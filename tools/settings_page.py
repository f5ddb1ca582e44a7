#!/usr/bin/env python3
"""Every setting, preset and environment variable as a page: docs/settings.md.

    python tools/settings_page.py            # writes it; tests/test_docs_references.py says when that is due

Types, ranges, defaults and texts come from the sections of the configuration and from the preset table.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from posttrainllm.config import Setting

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "settings.md"

HEAD = """# Settings

Made by `python tools/settings_page.py` from the code; not edited by hand.

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


def page() -> str:
    """The whole page."""
    sys.path.insert(0, str(ROOT / "src"))
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


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
