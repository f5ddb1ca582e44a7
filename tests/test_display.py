"""The live display: the progress of a run, a frame of every width, and a terminal that changes its size."""

from __future__ import annotations

import io
import re
from dataclasses import replace

import pytest
from rich.text import Text

from display_cases import a_record, a_start
from posttrainllm.cli.area import LiveArea
from posttrainllm.cli.frame import frame, wrapped
from posttrainllm.training.progress import Progress


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
    assert progress.seconds_left == pytest.approx(990 * 0.05)


def test_speed_is_the_pace_of_the_newest_steps_in_both_its_units():
    progress = Progress(a_start())
    assert (progress.tokens_per_second, progress.seconds_per_step) == (0.0, 0.03)
    for step, pace in ((1, 10.0), *((step, 1000.0) for step in range(2, 22)), (22, 3000.0)):
        progress.add(replace(a_record(step), tokens_per_second=pace))
    assert progress.tokens_per_second == pytest.approx(20 / (19 / 1000 + 1 / 3000))
    assert progress.seconds_per_step == pytest.approx(1024 / progress.tokens_per_second)


@pytest.mark.parametrize(
    ("steps", "mean_of"), [(1500, 20), (400, 20), (200, 10), (40, 2), (20, 1), (1, 1)]
)
def test_the_loss_shown_is_of_the_newest_twentieth_of_a_run_at_most(steps, mean_of):
    progress = Progress(a_start(**{"training.steps": steps}))
    losses = [6.0 * 0.9**step for step in range(steps)]
    for step, loss in enumerate(losses, 1):
        progress.add(a_record(step, loss))
    assert progress.loss == pytest.approx(sum(losses[-mean_of:]) / mean_of)


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
    assert re.fullmatch(r"loss   1\.4\d\d  [▁-█]{40}  ", lines[1])
    assert lines[2] == "val    1.951  at step 750, below triples (2.05)"
    assert lines[3] == "speed  41,230 tokens/s, 25 ms a step"
    assert lines[4] == "sample at step 750"
    assert lines[5].startswith("  Good morrow, ")


def test_frame_compares_the_training_loss_only_until_there_is_a_validation_loss():
    progress = Progress(a_start())
    progress.add(a_record(1, 2.3))
    assert frame(progress, width=80, height=24)[1].plain.endswith("below pairs (2.48)")
    progress.add(a_record(2, 2.3, val_loss=2.4))
    assert "below" not in frame(progress, width=80, height=24)[1].plain
    assert frame(progress, width=80, height=24)[2].plain.endswith("below pairs (2.48)")


def test_progress_keeps_a_curve_of_bounded_length_over_the_whole_run():
    progress = Progress(a_start())
    for step in range(1, 10_001):
        progress.add(a_record(step, 10_000.0 - step))
    curve = progress.curve
    assert 512 <= len(curve.y) == len(curve.x) <= 1024
    assert curve.y == sorted(curve.y, reverse=True)
    assert curve.x == sorted(curve.x)
    assert curve.y[0] > 9_900
    assert curve.x[0] < 100
    assert progress.loss == pytest.approx(9.5)


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
