"""Several runs in one picture, and a small table of what each came to."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path

from posttrainllm.errors import PosttrainError
from posttrainllm.figures import clock, one_line
from posttrainllm.notebook.curve import COLOURS, DASHES, Drawn, picture
from posttrainllm.notebook.page import DIM, advice, block, notices
from posttrainllm.notebook.words import Next
from posttrainllm.runs.comparing import Comparison as Read
from posttrainllm.runs.comparing import compare_runs, show_setting
from posttrainllm.runs.curves import curve_of
from posttrainllm.runs.folder import Run
from posttrainllm.text.counting import CountingLine

MOST_POINTS = 3000  # of all curves together
MOST_SETTINGS = 4  # columns of what differs; the rest is said below


@dataclass(frozen=True, repr=False)
class Comparison:
    """Runs beside each other, as they are on the disk now. Shows itself as a picture and a table, or as a table of text."""

    paths: tuple[Path, ...]
    counting: tuple[CountingLine, ...] = ()

    def __post_init__(self) -> None:
        """Read everything once, so that what cannot be compared is said here and not while it is shown."""
        self._read()

    def __repr__(self) -> str:
        """The table, with its columns aligned; or what is wrong with a run that can be read no more."""
        try:
            rows = _table(self._read())
        except PosttrainError as error:
            return f"Comparison of {', '.join(path.name for path in self.paths)}: {error.message}"
        sizes = [max(len(row[at]) for row in rows) for at in range(len(rows[0]))]
        lines = []
        for row in rows:
            cells = [row[0].ljust(sizes[0])]
            cells += [cell.rjust(size) for cell, size in zip(row[1:], sizes[1:], strict=True)]
            lines.append("  ".join(cells).rstrip())
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        """The curves over each other, with the table below; or what is wrong."""
        try:
            read = self._read()
        except PosttrainError as error:
            return block(notices([error.message]), advice([Next(error.hint)]))
        each = max(40, MOST_POINTS // len(read.runs))
        what = "validation loss" if read.key == "val_loss" else "training loss"
        drawn = [
            Drawn(
                curve_of(one_line(run.row.name), run.lines, read.key, each),
                *_style(number),
                noisy=read.key == "loss" and len(read.runs) <= len(COLOURS),
            )
            for number, run in enumerate(read.runs)
        ]
        title = f"{what} of {', '.join(run.row.name for run in read.runs)}"
        svg = picture(drawn, title=title, counting=self.counting)
        left_out = [key.rpartition(".")[2] for key in read.differ[MOST_SETTINGS:]]
        more = f"they also differ in {', '.join(left_out)}" if left_out else ""
        return block(
            f'<div style="{DIM}">{what}, nats a token</div>',
            svg,
            _html_table(_table(read)),
            f'<div style="{DIM}">{escape(more)}</div>' if more else "",
        )

    def _read(self) -> Read:
        return compare_runs([Run(path) for path in self.paths])


def _table(read: Read) -> list[list[str]]:
    """Titles, and a row for each run."""
    differ = read.differ[:MOST_SETTINGS]
    titles = [key.rpartition(".")[2].replace("_", " ") for key in differ]
    rows = [["run", *titles, "step", "loss", "val loss", "best val", "time"]]
    for run in read.runs:
        took = run.newest("elapsed_s")
        rows.append(
            [
                one_line(run.row.name),
                *(one_line(show_setting(key, run.settings[key])) for key in differ),
                f"{run.row.step:,}",
                _loss(run.row.loss),
                _loss(run.newest("val_loss")),
                _loss(run.row.best_val_loss),
                "-" if took is None else clock(took),
            ]
        )
    return rows


def _html_table(rows: Sequence[Sequence[str]]) -> str:
    titles, *body = rows
    cell = "text-align:{};padding:0.15em 0.6em;white-space:nowrap"
    head = "".join(
        f'<th scope="col" style="{cell.format("right" if at else "left")}">{escape(title)}</th>'
        for at, title in enumerate(titles)
    )
    lines = []
    for number, row in enumerate(body):
        colour, dash = _style(number)
        mark = (
            '<svg width="24" height="10" aria-hidden="true" style="display:inline-block;vertical-align:middle;margin-right:0.4em">'
            f'<path d="M1 5h22" stroke="{colour}" stroke-width="2.5" stroke-dasharray="{dash or "none"}"/></svg>'
        )
        cells = "".join(
            f'<td style="{cell.format("right")}">{escape(each)}</td>' for each in row[1:]
        )
        name = f'<th scope="row" style="{cell.format("left")};font-weight:normal">{mark}{escape(row[0])}</th>'
        lines.append(f"<tr>{name}{cells}</tr>")
    return (
        '<div style="overflow-x:auto"><table style="border-collapse:collapse;margin:0.4em 0">'
        f"<thead><tr>{head}</tr></thead><tbody>{''.join(lines)}</tbody></table></div>"
    )


def _style(number: int) -> tuple[str, str]:
    """Colour and dash of a curve by its number."""
    return COLOURS[number % len(COLOURS)], DASHES[number // len(COLOURS) % len(DASHES)]


def _loss(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"
