"""What the command line writes: curves, figures in words, tables, and the report before and after a run."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from pathlib import Path

import pytest

from display_cases import COUNTING, a_record, a_start
from posttrainllm.cli import table
from posttrainllm.cli.plain import PlainLines
from posttrainllm.cli.plot import BLOCKS, plot, sparkline
from posttrainllm.cli.report import suggestions
from posttrainllm.cli.table import Column, fitting, print_table
from posttrainllm.config import load_config
from posttrainllm.figures import about, brief, clock, counted, one_line, printable
from posttrainllm.runs.curves import Curve, smooth
from posttrainllm.text.likeness import Copy, WordShare
from posttrainllm.training.observer import Outcome
from posttrainllm.training.progress import Progress
from posttrainllm.training.report import end_rows, model_words, start_rows, start_warnings
from posttrainllm.training.writing import Advice, Verdict

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


def test_printable_lets_no_text_turn_what_follows_it_or_break_a_page():
    assert printable("a\u202eb\u2066c\u2069\u202c") == "a\ufffdb\ufffdc\ufffd\ufffd"
    assert printable("r\udcff/first").encode() == "r\ufffd/first".encode()
    assert (
        printable("\u05e9\u05dc\u05d5\u05dd \u200f x\u200dy")
        == "\u05e9\u05dc\u05d5\u05dd \u200f x\u200dy"
    )
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


def a_verdict(*actions: Advice) -> Verdict:
    words, copy = WordShare(10, 6), Copy(b"to be", 0)
    return Verdict(1.9, tuple(COUNTING), words, copy, None, None, actions)


def an_outcome(verdict: Verdict | None, *, finished: bool = True) -> Outcome:
    return Outcome(Path("runs/small-001"), finished, 1500, [2.0], 1.9, verdict, None)


def test_a_table_says_what_it_has_no_room_for(monkeypatch, capsys):
    columns, rows = (
        [Column("run"), Column("preset", goes=1), Column("size", goes=2)],
        [["first", "tiny", "1.9 MB"]],
    )
    for room, last in ((80, "first  tiny    1.9 MB"), (13, "a wider terminal also shows: size")):
        monkeypatch.setattr(table, "width", lambda stream, room=room: room)
        print_table(columns, rows)
        assert capsys.readouterr().out.splitlines()[-1] == last


def test_suggestions_are_commands_to_copy():
    verdict = a_verdict(
        Advice("more_steps", {"total": 3000}),
        Advice("larger", {"preset": "medium"}),
        Advice("diagnose", {"line": "pairs (2.48)"}),
        Advice("own_text"),
        Advice("overfits", {"best": 1.0, "loss": 2.0}),
    )
    found = suggestions(a_start(), an_outcome(verdict))
    assert [(each.why, each.command) for each in found] == [
        ("let it write", "posttrainllm generate small-001"),
        ("more steps", "posttrainllm train --resume small-001 --steps 3000"),
        ("a larger model", "posttrainllm train /texts/play.txt --preset medium"),
        (
            "find out why counting pairs (2.48) is still ahead",
            "posttrainllm diagnose small-001",
        ),
        (
            "fewer steps or a larger text: the validation loss was 1.000 on the way and rose to 2.000",
            "",
        ),
    ]


def test_suggestions_are_of_what_was_not_done_already():
    verdict = a_verdict(Advice("larger", {"preset": "medium"}), Advice("own_text"))
    default = a_start(**{"data.corpus": []})
    assert [each.why for each in suggestions(default, an_outcome(verdict))] == [
        "let it write", "a larger model", "a text of your own",
    ]  # fmt: skip
    taught = a_start(**{"training.start_from": "shakespeare"})
    assert [each.why for each in suggestions(taught, an_outcome(verdict))] == ["let it write"]


def test_a_run_that_was_stopped_says_of_which_step_its_validation_loss_is():
    progress = Progress(a_start())
    progress.add(a_record(250, val_loss=2.315))
    progress.add(a_record(470))
    stopped = replace(an_outcome(None, finished=False), step=470)
    assert end_rows(progress, stopped)[0] == (
        "validation loss", "2.315 nats a token at step 250, below pairs (2.48)",
    )  # fmt: skip
    assert end_rows(progress, replace(stopped, step=250))[0][1].startswith("2.315 nats a token, ")


def test_a_model_of_other_sizes_is_not_called_by_its_preset():
    assert model_words(load_config("tiny")).startswith("tiny: 70,464 parameters (2 layers, ")
    other = load_config("tiny", flags={"model.n_layer": 1})
    assert model_words(other).endswith(
        "(1 layer, 3 heads, width 48, context 32), trained as preset tiny"
    )


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
