"""The displays of the command line: every width, a terminal that changes its size, and figures in words."""

from __future__ import annotations

import io
import math
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from rich.text import Text

from posttrainllm.cli.area import LiveArea
from posttrainllm.cli.figures import about, brief, clock, counted, one_line, printable
from posttrainllm.cli.frame import frame, wrapped
from posttrainllm.cli.plain import PlainLines
from posttrainllm.cli.plot import BLOCKS, Curve, plot, smooth, sparkline
from posttrainllm.cli.progress import Progress
from posttrainllm.cli.report import start_rows, start_warnings, suggestions
from posttrainllm.cli.table import Column, fitting
from posttrainllm.config import load_config
from posttrainllm.corpus import Corpus
from posttrainllm.counting import CountingLine
from posttrainllm.likeness import Copy, WordShare
from posttrainllm.observer import Outcome, Record, Start
from posttrainllm.writing import Verdict

COUNTING = [
    CountingLine(name, loss, 900)
    for name, loss in (
        ("guessing", 5.545),
        ("letter frequencies", 3.35),
        ("pairs", 2.48),
        ("triples", 2.05),
        ("quadruples", 1.78),
    )
]


def a_start(**flags: object) -> Start:
    text = np.frombuffer(b"To be, or not to be. " * 50, np.uint8)
    corpus = Corpus(
        "play.txt", ("/texts/play.txt",), "0" * 64, 1050, text[:945], text[945:], text[:945],
        text[945:], 0.1, (),
    )  # fmt: skip
    config = load_config("small", flags={"data.corpus": ["/texts/play.txt"], **flags})
    return Start(
        run=Path("runs/small-001"),
        config=config,
        corpus=corpus,
        engine={"engine": "cpp", "build": "avx2", "build_id": "abc", "threads": 2},
        parameters=config.model.parameters(),
        nbytes=29_249_599,
        tokens_per_step=1024,
        first_step=1,
        counting=COUNTING,
        seconds_per_step=0.03,
    )


def a_record(step: int, loss: float = 2.0, val_loss: float | None = None) -> Record:
    return Record(step, loss, val_loss, 3e-3, 0.7, 41_230.0, step * 0.03)


class Clock:
    """A clock that is set by hand."""

    def __init__(self) -> None:
        self.time = 100.0

    def __call__(self) -> float:
        return self.time


def halfway() -> Progress:
    progress = Progress(a_start(), now=Clock())
    for step in range(1, 751):
        progress.now.time += 0.05
        progress.add(a_record(step, 5.5 / step**0.2, 1.951 if step % 250 == 0 else None))
    progress.sample = (750, "KING HENRY:\nGood", " morrow, \u4e16\u754c lords\t\x1b[31m\r\n" * 8)
    return progress


# ---- progress -------------------------------------------------------------------------------------


def test_progress_estimates_from_what_was_measured_and_counts_down():
    progress = Progress(a_start(), now=Clock())
    assert progress.seconds_left == pytest.approx(1500 * 0.03)
    progress = halfway()
    assert progress.seconds_per_step == pytest.approx(0.05)
    assert progress.seconds_left == pytest.approx(750 * 0.05)
    progress.now.time += 1.0
    assert progress.seconds_left == pytest.approx(750 * 0.05 - 1.0)
    progress.now.time += 1e6
    assert progress.seconds_left == 0.0


def test_progress_of_a_resumed_run_counts_only_its_own_steps():
    progress = Progress(replace(a_start(), first_step=501), now=Clock())
    assert progress.step == 500
    progress.now.time += 0.5
    progress.add(a_record(510))
    assert progress.seconds_per_step == pytest.approx(0.05)


def test_progress_keeps_the_newest_and_the_best_validation_loss():
    progress = Progress(a_start())
    for step, val in ((1, None), (2, 2.5), (3, None), (4, 2.7), (5, None)):
        progress.add(a_record(step, val_loss=val))
    assert (progress.val_loss, progress.val_step, progress.best) == (2.7, 4, 2.5)


# ---- frame ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("width", [1, 10, 20, 40, 60, 80, 200])
@pytest.mark.parametrize("height", [1, 5, 24])
@pytest.mark.parametrize("verbose", [False, True])
def test_frame_has_no_line_break_and_fits_the_height(width, height, verbose):
    for progress in (Progress(a_start()), halfway()):
        progress.stopping = True
        lines = frame(progress, width=width, height=height, verbose=verbose)
        assert all("\n" not in line.plain and "\x1b" not in line.plain for line in lines)
        fixed = len([line for line in lines if not line.plain.startswith(("  ", "sample"))])
        assert len(lines) <= max(fixed, height - 1)


def test_frame_shows_at_60_columns_what_matters():
    lines = [line.plain for line in frame(halfway(), width=60, height=24)]
    assert all(Text(line).cell_len < 60 for line in lines)
    assert lines[0].startswith("step 750/1,500 ━")
    assert lines[0].endswith(" 50 %  0:38 left")
    assert re.fullmatch(r"loss   1\.4\d\d  [▁-█]+  below quadruples \(1\.78\)", lines[1])
    assert lines[2] == "val    1.951  at step 750, below triples (2.05)"
    assert lines[3] == "speed  41,230 tokens/s, 50 ms a step"
    assert lines[4] == "sample at step 750"
    assert lines[5].startswith("  Good morrow, ")


def test_frame_shows_the_rest_only_when_asked():
    plain = "\n".join(line.plain for line in frame(halfway(), width=80, height=30))
    verbose = "\n".join(line.plain for line in frame(halfway(), width=80, height=30, verbose=True))
    for word in ("lr     3.000e-03, gradient norm 0.700", "29.2 MB planned", "best   1.951"):
        assert word in verbose
        assert word not in plain


def test_frame_says_that_it_is_stopping_in_place_of_sample_lines_when_short():
    progress = halfway()
    progress.stopping = True
    lines = [line.plain for line in frame(progress, width=80, height=6)]
    assert lines[-1] == "stopping after this step; Ctrl-C again stops at once"
    assert len(lines) == 5


def test_frame_without_validation_text_says_so():
    start = a_start()
    progress = Progress(replace(start, corpus=replace(start.corpus, val=start.corpus.val[:0])))
    assert "no text was kept" in frame(progress, width=80, height=24)[2].plain


def test_sample_lines_are_cut_between_wide_characters():
    lines = wrapped("", "\u4e16\u754c" * 7, 9)
    assert [line.cell_len for line in lines] == [8, 8, 8, 4]


# ---- the live area, on a small terminal -------------------------------------------------------------


class Terminal(io.StringIO):
    """A terminal that knows what ``LiveArea`` sends, and breaks its lines anew when it gets narrower."""

    def __init__(self, columns: int, rows: int = 24) -> None:
        super().__init__()
        self.columns, self.rows = columns, rows
        self.lines: list[str] = [""]  # as they were written
        self.x = self.y = 0  # in rows of the screen, from the first line on

    def size(self) -> tuple[int, int]:
        return self.columns, self.rows

    def screen(self) -> list[str]:
        """All rows: lines broken at the width."""
        rows = []
        for line in self.lines:
            pieces = [line[at : at + self.columns] for at in range(0, len(line), self.columns)]
            rows += pieces or [""]
        return rows

    def resize(self, columns: int) -> None:
        """Break all lines anew; the cursor stays at the end of the last one, where it was."""
        assert self.y == len(self.screen()) - 1
        self.columns = columns
        self.y = len(self.screen()) - 1

    def write(self, text: str) -> int:
        for token in re.findall(r"\x1b\[\??\d*[A-Za-z]|\r|\n|[^\x1b\r\n]+", text):
            self._take(token)
        return len(text)

    def _take(self, token: str) -> None:
        rows = self.screen()
        if token == "\r":
            self.x = 0
        elif token == "\n":
            self.x, self.y = 0, self.y + 1
            rows += [""] * (self.y + 1 - len(rows))
        elif token.endswith("A"):
            self.y = max(0, self.y - int(token[2:-1]))
        elif token == "\x1b[K":
            rows[self.y] = rows[self.y][: self.x]
        elif token == "\x1b[J":
            rows = [*rows[: self.y], rows[self.y][: self.x]]
        elif token[0] != "\x1b":
            assert self.x + len(token) < self.columns, "a line fills the last column"
            rows[self.y] = (
                rows[self.y][: self.x].ljust(self.x) + token + rows[self.y][self.x + len(token) :]
            )
            self.x += len(token)
        self.lines = rows  # lines of the area are shorter than the width, so rows are lines


def test_live_area_draws_in_place_and_shrinks():
    terminal = Terminal(40)
    terminal.write("before\n")
    area = LiveArea(terminal, terminal.size)
    area.draw([Text("one"), Text("two is long"), Text("three")])
    area.draw([Text("1"), Text("2")])
    assert terminal.screen() == ["before", "1", "2"]
    area.draw([Text("1"), Text("2"), Text("3"), Text("4")])
    assert terminal.screen() == ["before", "1", "2", "3", "4"]
    area.erase()
    terminal.write("after")
    assert terminal.screen() == ["before", "after"]


def test_live_area_leaves_nothing_behind_when_the_terminal_gets_narrower_and_wider():
    terminal = Terminal(80)
    terminal.write("before\n")
    area = LiveArea(terminal, terminal.size)
    lines = [Text("a" * 70), Text("b" * 30), Text("c" * 79)]
    for columns in (80, 60, 25, 100, 11, 80):
        terminal.resize(columns)
        area.draw(lines)
        assert [row[:1] for row in terminal.screen()] == ["b", "a", "b", "c"]
        assert all(len(row) < columns for row in terminal.screen()[1:])


def test_live_area_never_draws_more_than_the_terminal_holds():
    terminal = Terminal(40, rows=5)
    area = LiveArea(terminal, terminal.size)
    area.draw([Text(str(number)) for number in range(20)])
    assert terminal.screen() == ["0", "1", "2", "3"]


def test_live_area_writes_a_frame_at_once_and_never_erases_a_line_before_writing_it():
    writes = []
    terminal = Terminal(40)
    area = LiveArea(terminal, terminal.size)
    area.draw([Text("one"), Text("two")])
    terminal.write = writes.append
    area.draw([Text("one"), Text("too")])
    assert writes == ["\x1b[?2026h\r\x1b[1Aone\x1b[K\ntoo\x1b[K\x1b[J\x1b[?2026l"]


# ---- curves -----------------------------------------------------------------------------------------


def test_sparkline_falls_with_the_loss_and_is_never_wider_than_asked():
    line = sparkline([5.0 - step / 100 for step in range(400)], 20)
    assert len(line) == 20
    assert list(line) == sorted(line, reverse=True)
    assert line[0] == BLOCKS[-1]
    assert line[-1] == BLOCKS[0]
    assert sparkline([1.0, 2.0], 20) == BLOCKS[0] + BLOCKS[-1]


def test_sparkline_takes_what_is_no_number_or_no_curve():
    assert sparkline([], 10) == ""
    assert sparkline([1.0], 0) == ""
    assert sparkline([math.nan, math.inf], 10) == ""
    assert sparkline([2.0, math.nan, 2.0], 10) == BLOCKS[0] * 2


def test_plot_has_axes_and_says_which_cell_is_whose():
    falling = Curve("down", [1, 2, 3, 4], [4.0, 3.0, 2.0, 1.0])
    rising = Curve("up", [1, 2, 3, 4], [1.0, 2.0, 3.0, 4.0])
    rows = plot([falling, rising], 30, 5, letters=True)
    text = ["".join(cell.character for cell in row) for row in rows]
    assert len(rows) == 7
    assert max(map(len, text)) <= 30
    assert text[0].startswith("4.00 |a")
    assert text[4].startswith("1.00 |b")
    assert text[0].endswith("b")
    assert text[-1].split() == ["1", "4"]
    curves = {cell.curve for row in rows for cell in row}
    assert curves == {-1, 0, 1}


def test_plot_of_nothing_is_empty_and_one_point_is_a_dot():
    assert plot([], 40, 5) == []
    assert plot([Curve("x", [1.0], [math.nan])], 40, 5) == []
    rows = plot([Curve("x", [1.0], [2.0])], 40, 5, letters=True)
    assert sum(cell.character == "a" for row in rows for cell in row) == 1


def test_smooth_keeps_the_mean():
    values = [float(value) for value in range(1000)]
    few = smooth(values, 10)
    assert len(few) == 10
    assert sum(few) / 10 == pytest.approx(sum(values) / 1000)
    assert smooth([], 10) == []


# ---- words and tables ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0:00"), (7.4, "0:07"), (750, "12:30"), (3723, "1:02:03"), (-1, "0:00")],
)
def test_clock(seconds, text):
    assert clock(seconds) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.1, "1 s"), (8.2, "8 s"), (52, "50 s"), (200, "3 min"), (9000, "2.5 h"), (4e5, "5 days")],
)
def test_about_has_the_digits_that_an_estimate_deserves(seconds, text):
    assert about(seconds) == text


def test_brief_and_counted():
    assert [brief(value) for value in (0.0008, 0.025, 3.14)] == ["0.8 ms", "25 ms", "3.1 s"]
    assert [counted(value, "step") for value in (1, 2000)] == ["1 step", "2,000 steps"]


def test_printable_shows_control_characters_and_keeps_the_rest():
    assert printable("a\x1b[31m\x00\x7f\x9b\r\nb\tc") == "a\u241b[31m\u2400\u2421\ufffd\nb\tc"
    assert printable("Größe 世界 🙂") == "Größe 世界 🙂"
    assert one_line("two\nlines  \x07") == "two lines \u2407"


def test_table_drops_the_least_important_columns_first():
    columns = [Column("name"), Column("one", goes=1), Column("two", goes=2)]
    rows = [["x" * 10, "y" * 10, "z" * 10]]
    assert fitting(columns, rows, 0) == [0, 1, 2]
    assert fitting(columns, rows, 34) == [0, 1, 2]
    assert fitting(columns, rows, 33) == [0, 1]
    assert fitting(columns, rows, 5) == [0]


# ---- before and after -----------------------------------------------------------------------------------


def test_start_rows_hold_every_figure_that_is_known_before_the_first_step():
    rows = dict(start_rows(a_start()))
    assert rows["model"].startswith("small: 366,432 parameters")
    assert rows["memory"] == "29,249,599 bytes (29.2 MB), taken once"
    assert rows["corpus"] == "play.txt: 1,050 bytes, 945 to train on and 105 for validation"
    assert "1,536,000 tokens, 1,625 epochs" in rows["run"]
    assert rows["run"].endswith("0.0026 bytes of text a parameter")
    assert rows["engine"] == "cpp, build avx2, threads 2"
    assert rows["time"] == "about 45 s (30 ms a step)"
    assert rows["folder"] == "runs/small-001"


def test_start_warns_when_the_model_can_only_memorise():
    assert "can memorise the text" in " ".join(start_warnings(a_start()))


def a_verdict(*actions: str) -> Verdict:
    words, copy = WordShare(10, 6), Copy(b"to be", 0)
    return Verdict(1.9, tuple(COUNTING), words, copy, None, None, actions)


def an_outcome(verdict: Verdict | None, *, finished: bool = True) -> Outcome:
    return Outcome(Path("runs/small-001"), finished, 1500, [2.0], 1.9, verdict, None)


def test_suggestions_are_commands_to_copy():
    verdict = a_verdict(
        "more steps: --steps 3000",
        "a larger model: --preset medium",
        "posttrainllm diagnose: counting pairs (2.48) is still ahead",
        "a text of your own: posttrainllm train FILE",
        "fewer steps or a larger text: the validation loss rose",
    )
    found = suggestions(a_start(), an_outcome(verdict))
    assert [(each.why, each.command) for each in found] == [
        ("let it write", "posttrainllm generate small-001"),
        ("more steps", "posttrainllm train --resume small-001 --steps 3000 --allow-change"),
        ("a larger model", "posttrainllm train /texts/play.txt --preset medium"),
        ("counting pairs (2.48) is still ahead", "posttrainllm diagnose small-001"),
        ("a text of your own", "posttrainllm train FILE"),
        ("fewer steps or a larger text: the validation loss rose", ""),
    ]


def test_suggestions_after_a_stop_begin_with_going_on():
    first = suggestions(a_start(), an_outcome(None, finished=False))[0]
    assert first.command == "posttrainllm train --resume small-001"


def test_suggestions_name_the_folder_of_runs_when_it_is_not_the_usual_one():
    outcome = replace(an_outcome(None), run=Path("/elsewhere/my runs/a run"))
    command = suggestions(a_start(), outcome)[0].command
    assert command == "posttrainllm generate 'a run' --runs-dir '/elsewhere/my runs'"


def test_plain_lines_are_about_twenty_and_one_for_each_evaluation(capsys):
    display = PlainLines()
    display.started(a_start())
    capsys.readouterr()
    for step in range(1, 1501):
        display.stepped(
            a_record(step, math.nan if step == 75 else 2.0, 1.9 if step % 400 == 0 else None)
        )
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 20 + 2  # step 1,200 is both
    assert lines[0].startswith("step   75/1500  loss nan  val     -     41,230 tokens/s")
    assert all(line.startswith("step ") for line in lines)
    assert [line for line in lines if line.endswith("below triples (2.05)")] == [
        line for line in lines if re.match(r"step +(400|800|1200)/", line)
    ]
