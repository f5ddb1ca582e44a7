"""``posttrainllm inspect``: in a pipe, as JSON, on terminals with and without colours, wide and narrow, and what it refuses."""

from __future__ import annotations

import fcntl
import io
import math
import os
import pty
import re
import struct
import subprocess
import sys
import termios
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cli_cases import check_error, cli, write_text
from import_cases import model_folder
from needs import require
from posttrainllm.cli.grid import all_heads, one_head
from posttrainllm.cli.surprise import marked, shaded
from posttrainllm.cli.terminal import cells
from posttrainllm.training.looking import Span, habit, level

MODEL = "shakespeare-small"
TEXT = "ROMEO:\nBut soft, what light 世界 through yonder 🙂 window breaks?"
SOURCE = Path(__file__).parent.parent / "src"


@pytest.fixture(scope="module")
def bpe(tmp_path_factory) -> Path:
    require("tokenizers")
    return model_folder(tmp_path_factory.mktemp("bpe"), n_vocab=300, n_ctx=20)


# ---- a pipe ---------------------------------------------------------------------------------------


def test_a_pipe_gets_the_text_with_marks_the_surprises_and_what_comes_next():
    result = cli("inspect", MODEL, TEXT, "--top", 3)
    assert (result.code, result.err) == (0, "")
    assert "\x1b" not in result.out
    lines = result.out.splitlines()
    at = lines.index("ROMEO:⏎")
    assert lines[at + 2] == "But soft, what light 世界 through yonder 🙂 window breaks?"
    marks = lines[at + 3]
    assert marks[lines[at + 2].index("世") :].startswith("████")  # as wide as two characters are
    assert any(line.startswith("rarer than 1 in:") for line in lines)
    table = lines[next(i for i, line in enumerate(lines) if "most surprising" in line) + 1 :]
    assert [line[:3] for line in table[:3]] == ['"🙂"', '"世"', '"界"']
    bars = [line.count("█") for line in table[table.index("what comes next") + 1 :]]
    assert len(bars) == 3
    assert bars == sorted(bars, reverse=True)
    assert bars[-1] >= 1


def test_json_is_one_object_whose_numbers_fit_together():
    result = cli("inspect", MODEL, TEXT, "--json", "--top=4", "--layer=1")
    assert (result.code, result.err, result.out.count("\n")) == (0, "", 1)
    found = result.json
    assert set(found) == {"model", "cut", "loss", "tokens", "next", "attention"}
    assert bytes(token["id"] for token in found["tokens"]).decode() == TEXT
    surprise = [token["surprise"] for token in found["tokens"]]
    assert surprise[0] is None
    assert found["loss"] == pytest.approx(np.mean(surprise[1:]))
    shares = [each["probability"] for each in found["next"]]
    assert len(shares) == 4
    assert shares == sorted(shares, reverse=True)
    weights = np.array(found["attention"]["weights"])
    assert (found["attention"]["layer"], found["attention"]["head"]) == (1, None)
    assert weights.shape == (6, len(surprise), len(surprise))
    assert np.abs(weights.sum(axis=2) - 1).max() < 1e-5
    one = cli("inspect", MODEL, TEXT, "--json", "--layer=1", "--head=2").json["attention"]
    assert np.array_equal(one["weights"], weights[2])


def test_json_of_one_token_has_no_loss_and_no_attention_unless_asked_for():
    found = cli("inspect", MODEL, "R", "--json").json
    assert found["loss"] is None
    assert "attention" not in found


def test_a_bpe_model_is_looked_at_and_of_a_long_text_the_end(bpe):
    result = cli("inspect", bpe, "the sea and the sun " * 6, "--layer=1", "--head=0")
    assert result.code == 0
    assert result.err.startswith("notice: the model looks at 20 tokens at most; left out ")
    grid = result.out.splitlines()[-20:]
    assert all(re.match(r" *\S+ [·░▒▓█ ]+$", line) for line in grid), result.out
    found = cli("inspect", bpe, "the sea and the sun " * 6, "--json")
    assert found.json["cut"] > 0
    assert len(found.json["tokens"]) == 20
    assert any(len(token["piece"]) > 1 for token in found.json["tokens"])


def test_one_token_is_one_token_in_every_sentence(tmp_path):
    cli(
        "train",
        write_text(tmp_path),
        "--preset=tiny",
        "--set=model.n_ctx=1",
        "--steps=1",
        "--name=one",
    )
    result = cli("inspect", "one", "ab")
    assert result.err == (
        "notice: the model looks at 1 token at most; left out at the beginning: 1\n"
    )
    assert "text   1 token\n" in result.out


def test_a_text_that_turns_its_letters_around_is_shown_in_order():
    shown = cli("inspect", MODEL, "a\u202ebc", "--layer=0").out
    assert "\u202e" not in shown
    assert "a\ufffdbc" in shown


def test_the_attention_of_a_layer_shows_every_head_and_one_head_its_tokens():
    small = cli("inspect", MODEL, "ROMEO: But soft", "--layer=0").out
    assert re.findall(r"head \d", small) == [f"head {number}" for number in range(6)]
    large = cli("inspect", MODEL, "ROMEO:\tsoft", "--layer=0", "--head=1").out
    assert "  R O M E O : ⇥ s o f t\n" in large
    assert re.search(r"^R ██$", large, re.MULTILINE)


def test_both_engines_show_the_same():
    shown = [cli("inspect", MODEL, TEXT, "--engine", name).out for name in ("numpy", "cpp", "auto")]
    assert shown[0] == shown[1] == shown[2]


def test_a_text_comes_from_standard_input(monkeypatch):
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(TEXT.encode())))
    assert cli("inspect", MODEL, "-", "--json").json == cli("inspect", MODEL, TEXT, "--json").json


def test_a_closed_standard_input_is_no_terminal(monkeypatch):
    monkeypatch.setattr("sys.stdin", None)
    check_error(cli("inspect", MODEL, "-"), "TEXT - reads standard input, and that is closed")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([MODEL, ""], ["takes a text", "ROMEO"]),
        ([MODEL], ["missing argument 'TEXT'", "inspect --help"]),
        ([MODEL, "x", "--layer=6"], ["no layer 6", "0 .. 5"]),
        ([MODEL, "x", "--layer=-1"], ["no layer -1", "0 .. 5"]),
        ([MODEL, "x", "--layer=0", "--head=6"], ["no head 6", "0 .. 5"]),
        ([MODEL, "x", "--head=0"], ["--head needs --layer"]),
        ([MODEL, "x", "--layer=one"], ["'--layer'"]),
        ([MODEL, "x", "--top=0"], ["'--top'"]),
        ([MODEL, "x", "--engine=torch"], ["cpp or numpy", "--engine torch"]),
        (["no-such-model", "x"], ["no-such-model", MODEL]),
    ],
)
def test_what_cannot_be_shown_is_one_line_with_a_next_step(arguments, words):
    check_error(cli("inspect", *arguments), *words)


# ---- terminals ------------------------------------------------------------------------------------


def on_terminal(columns: int, *arguments: object, **environment: str) -> str:
    """What the command writes on a terminal of so many columns."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    kept = {k: v for k, v in os.environ.items() if k not in ("NO_COLOR", "COLUMNS", "COLORTERM")}
    path = os.pathsep.join([str(SOURCE), os.environ.get("PYTHONPATH", "")])
    process = subprocess.Popen(
        [sys.executable, "-m", "posttrainllm", "inspect", MODEL, TEXT, *map(str, arguments)],
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        env={**kept, "PYTHONPATH": path, "TERM": "xterm-256color", **environment},
    )
    os.close(theirs)
    shown = b""
    while True:
        try:
            piece = os.read(ours, 65536)
        except OSError:  # the process ended
            break
        if not piece:
            break
        shown += piece
    os.close(ours)
    assert process.wait(timeout=60) == 0, shown.decode()
    return shown.decode().replace("\r\n", "\n")


def plain(shown: str) -> list[str]:
    return re.sub(r"\x1b\[[\d;]*m", "", shown).splitlines()


def test_a_terminal_with_colours_shades_the_text_and_says_what_shades_mean():
    shown = on_terminal(80)
    assert "\x1b[30;48;5;203m世界" in shown
    assert "\x1b[30;48;5;203m 1,000 " in shown
    assert "▂" not in shown
    assert "But soft, what light 世界 through yonder 🙂 window breaks?" in plain(shown)


@pytest.mark.parametrize("environment", [{"NO_COLOR": "1"}, {"TERM": "dumb"}, {"TERM": "xterm"}])
def test_without_colours_there_are_marks(environment):
    shown = on_terminal(80, **environment)
    assert "48;5" not in shown
    assert "rarer than 1 in: ▂ 2 ▄ 10 ▆ 100 █ 1,000" in plain(shown)


@pytest.mark.parametrize("columns", [20, 40, 80, 200])
@pytest.mark.parametrize("options", [[], ["--layer=1"], ["--layer=1", "--head=2"]])
def test_no_line_is_wider_than_the_terminal(columns, options):
    for environment in ({}, {"NO_COLOR": "1"}):
        lines = plain(on_terminal(columns, *options, **environment))
        drawn = [
            line for line in lines if not re.search(r"[a-z]{3,}.*[:%]|^  +\S|nats|rarer", line)
        ]
        assert len(drawn) > 8
        if columns >= 40:
            assert max(map(cells, drawn)) <= columns, [
                line for line in drawn if cells(line) > columns
            ]


def test_an_encoding_without_blocks_gets_letters():
    path = os.pathsep.join([str(SOURCE), os.environ.get("PYTHONPATH", "")])
    for options in ([], ["--layer=1"], ["--layer=1", "--head=0"]):
        done = subprocess.run(
            [sys.executable, "-m", "posttrainllm", "inspect", MODEL, TEXT, *options],
            env={**os.environ, "PYTHONPATH": path, "PYTHONIOENCODING": "ascii"},
            capture_output=True,
            check=True,
        )
        assert done.stderr == b""
        assert b"rarer than 1 in: . 2 - 10 + 100 # 1,000" in done.stdout


# ---- drawing --------------------------------------------------------------------------------------


def test_levels_begin_where_the_legend_says():
    rarer = [1.5, 2.1, 9.9, 10.1, 99.0, 101.0, 999.0, 1001.0, 1e9]
    assert [level(math.log(each)) for each in rarer] == [0, 1, 1, 2, 2, 3, 3, 4, 4]
    assert level(None) is None


def spans_of(texts: list[str]) -> list[Span]:
    return [
        Span(text, at, at + 1, None if at == 0 else 1.7 * (at % 6)) for at, text in enumerate(texts)
    ]


@given(
    texts=st.lists(st.text(min_size=1, max_size=8), min_size=1, max_size=30),
    room=st.integers(4, 60),
    unicode=st.booleans(),
)
def test_any_text_is_shaded_in_lines_that_fit_and_nothing_is_lost(texts, room, unicode):
    lines = shaded(spans_of(texts), room, unicode=unicode)
    assert all(sum(cells(each.text) for each in line) <= max(room, 2) for line in lines)
    shown = [each for line in lines for each in line]
    assert len(shown) == sum(map(len, texts))
    for line in lines:
        text, marks = marked(line, unicode=unicode)
        assert cells(marks) <= cells(text)
        assert "\n" not in text
        assert "\x1b" not in text


def test_lines_end_between_words_where_one_is_near():
    lines = shaded(spans_of([*"to be or not to be", "-" * 9]), 8, unicode=True)
    assert ["".join(each.text for each in line) for line in lines] == [
        "to be ",
        "or not ",
        "to ",
        "be------",
        "---",
    ]


def causal(heads: int, time: int, seed: int = 1) -> np.ndarray:
    weights = np.tril(np.random.default_rng(seed).random((heads, time, time)) ** 4).astype(
        np.float32
    )
    return weights / weights.sum(axis=2, keepdims=True)


@given(
    names=st.lists(
        st.text(min_size=1, max_size=10).map(lambda t: "".join(t.split()) or "x"),
        min_size=1,
        max_size=40,
    ),
    room=st.integers(12, 90),
    unicode=st.booleans(),
)
def test_one_head_fits_with_its_last_tokens(names, room, unicode):
    lines, shown = one_head(causal(1, len(names))[0], names, room, unicode=unicode)
    assert 1 <= shown <= len(names)
    rows = lines[-shown:]
    assert all(cells(line) <= max(room, 12) for line in rows)
    assert all(len(line) for line in rows)
    if shown < len(names):
        assert max(map(cells, rows)) >= room - 2 - 8


@given(heads=st.integers(1, 9), time=st.integers(1, 70), room=st.integers(8, 120))
def test_all_heads_are_drawn_side_by_side(heads, time, room):
    lines, pooled = all_heads(causal(heads, time), room, unicode=True)
    assert sum(line.count("head ") for line in lines) == heads
    assert max(map(cells, lines)) <= max(room, 12)
    assert pooled == -(-time // min(time, 24, room))


def test_the_habit_of_a_head_is_where_most_goes():
    time = 8
    before = np.eye(time, k=-1, dtype=np.float32)
    before[0, 0] = 1
    assert habit(before) == ("before", 1.0)
    assert habit(np.eye(time, dtype=np.float32)) == ("itself", 1.0)
    first = np.zeros((time, time), np.float32)
    first[:, 0] = 1
    assert habit(first) == ("first", 1.0)
