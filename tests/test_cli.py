"""The command line: exit codes, one-line errors, what goes to which stream, and training."""

from __future__ import annotations

import io
import json
import re
import sys

import pytest
from typer.main import get_command

from cli_cases import SIZES, TEXT, check_error, cli, train_one, write_text
from posttrainllm import __version__
from posttrainllm.cli import app
from posttrainllm.cli.failures import exit_code


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    return write_text(tmp_path_factory.mktemp("text"))


@pytest.fixture(scope="module")
def trained(tmp_path_factory, text):
    """A folder with the run "one"; tests only read it."""
    return train_one(tmp_path_factory.mktemp("runs"), text)


# ---- help and wrong use ---------------------------------------------------------------------------


def test_no_command_shows_the_help():
    result = cli()
    assert result.code == 0
    for name in ("Everyday", "Data", "train", "generate", "eval", "runs", "presets", "corpus"):
        assert name in result.out


@pytest.mark.parametrize(
    "command",
    [
        ["--help"],
        ["train", "--help"],
        ["generate", "-h"],
        ["eval", "--help"],
        ["runs", "--help"],
        ["runs", "show", "--help"],
        ["presets", "--help"],
        ["corpus", "--help"],
    ],
)
def test_help_of_every_command_ends_well(command):
    result = cli(*command)
    assert result.code == 0
    assert "Usage" in result.out
    assert result.err == ""


def every_command(command=None, path=()):
    """The paths of all commands, groups too."""
    command = get_command(app) if command is None else command
    yield list(path)
    for name, below in getattr(command, "commands", {}).items():
        yield from every_command(below, (*path, name))


@pytest.mark.parametrize("command", list(every_command()), ids=" ".join)
def test_help_names_a_value_where_one_is_wanted_and_no_type_of_python(command, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    out = cli(*command, "--help").out
    assert "Show this message and exit." in out
    assert not re.search(r"<(bool|int|float|str|path|list)|\.\.\.\}", out)
    rows = re.findall(r"(--[a-z-]+) +(?:-[a-z] +)?(\S*)  ", out)
    assert ("--help", "") in rows
    values = {option: word for option, word in rows if word}
    assert values.get("--steps", "N") == "N"
    assert values.get("--runs-dir", "PATH") == "PATH"
    assert not values.keys() & {"--json", "--quiet", "--no-open", "--allow-change", "--approximate"}


@pytest.mark.parametrize(
    ("command", "given"),
    [
        (["train", "--steps", "abc"], "'abc'"),
        (["train", "--learning-rate", "x"], "'x'"),
        (["generate", "--n", "0"], "'0'"),
    ],
)
def test_a_wrong_value_is_shown(command, given):
    check_error(cli(*command), command[1], given, f"see posttrainllm {command[0]} --help")


def test_version():
    assert cli("--version").out == f"posttrainllm {__version__}\n"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["trian"], ["no such command 'trian'", "did you mean 'train'", "posttrainllm --help"]),
        (["train", "--stpes", "3"], ["--stpes", "posttrainllm train --help"]),
        (["train", "--steps", "many"], ["--steps"]),
        (["train", "--steps"], ["--steps"]),
        (["runs", "show"], ["RUN", "posttrainllm runs show --help"]),
        (["generate", "a", "b"], ["b"]),
    ],
)
def test_wrong_use_is_two_short_lines(arguments, words):
    result = cli(*arguments)
    check_error(result)
    for word in words:
        assert word.lower() in result.err.lower()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--preset", "smal"], ["'smal'", "did you mean 'small'?"]),
        (["--set", "model.n_layr=2"], ["'model.n_layr'", "did you mean 'model.n_layer'?"]),
        (["--set", "steps=2"], ["did you mean 'training.steps'?"]),
        (["--set", "training.steps"], ["--set", "has no value"]),
        (["--set", "training.steps=0"], ["training.steps", "got 0", "--set"]),
        (["--set", "model.n_embd=100"], ["100", "not divisible", "99 and 102"]),
        (["--set", "model.n_layer=1000", "--set", "model.n_embd=60000"], ["over the limit"]),
        (["--batch-size", "1000000", "--n-ctx", "1000000"], ["data.batch_size"]),
        (["--steps", "-3"], ["training.steps", "got -3"]),
        (["--learning-rate", "nan"], ["schedule.learning_rate"]),
        (["--engine", "cuda"], ["engine.name", "'cuda'"]),
        (["--config", "missing.toml"], ["missing.toml"]),
        (["--set", "model.dropout=0.1"], ["dropout", "--engine torch"]),
    ],
)
def test_a_setting_that_cannot_be_used_is_named(tmp_path, text, arguments, words):
    result = cli("train", text, "--runs-dir", tmp_path / "runs", *arguments)
    check_error(result, *words)


# ---- corpus ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (None, ["does not exist"]),
        (b"", ["is empty"]),
        (b"\xef\xbb\xbf", []),
        (b"short", ["tokens", "--n-ctx"]),
        (b"text\0with nul" * 100, ["is binary"]),
        (b"\x1f\x8b\x08" + bytes(range(256)) * 4, ["gzip"]),
        ("To be\n".encode("utf-16"), ["UTF-16"]),
    ],
)
def test_a_bad_corpus_is_refused_by_name_and_leaves_no_run(tmp_path, content, words):
    path = tmp_path / "text.txt"
    if content is not None:
        path.write_bytes(content)
    for command in (["train", "--runs-dir", tmp_path / "runs"], ["corpus"]):
        check_error(cli(*command, path), *words)
    assert not (tmp_path / "runs").exists()


def test_a_folder_without_text_is_refused(tmp_path):
    check_error(cli("train", tmp_path, "--runs-dir", tmp_path / "runs"), "no .txt file")


def test_corpus_shows_size_split_and_counting_lines(text):
    out = cli("corpus", text).out
    assert f"{len(TEXT):,}" in out
    assert "guessing (5.55)" in out
    assert "warning" in out  # small can memorise this text
    facts = cli("corpus", text, "--json", "--val-fraction", "0.25").json
    assert facts["bytes"] == len(TEXT)
    assert facts["val_bytes"] == pytest.approx(len(TEXT) / 4, abs=4)
    assert list(facts["counting"])[:2] == ["guessing", "letter frequencies"]


# ---- train ----------------------------------------------------------------------------------------


def test_train_prints_what_it_knows_then_lines_then_a_verdict_and_commands(tmp_path, text):
    folder = tmp_path / "runs"
    result = cli("train", text, *SIZES, "--steps=8", "--runs-dir", folder)
    assert result.code == 0
    assert result.err == ""
    assert "\x1b" not in result.out
    for words in (
        r"^model +3,\d\d\d parameters \(1 layer",
        r"^memory +[\d,]+ bytes",
        rf"^corpus +beer.txt: {len(TEXT):,} bytes",
        r"^run +8 steps of 64 tokens: 512 tokens, 0.04\d epochs; 3.\d bytes of text a parameter",
        r"^counting +guessing \(5.55\), letter frequencies",
        r"^engine +numpy",
        r"^time +about ",
        r"^step 8/8  loss \d\.\d{3}  val \d\.\d{3} .* tokens/s",
        r"^sample at step 8$",
        r"^finished 8 steps in 0:0\d$",
        r"^validation loss +\d\.\d{3} nats a token, below ",
        r"^real words",
        r"^longest copy",
        r"^saved +.*step-000008$",
        r"^  posttrainllm generate tiny-001 --runs-dir ",
        r"^  posttrainllm train --resume tiny-001 --runs-dir .* --steps 16$",
    ):
        assert re.search(words, result.out, re.MULTILINE), (words, result.out)
    assert (folder / "tiny-001" / "metrics.jsonl").read_text().count("\n") == 8


def test_train_json_is_one_event_a_line_and_nothing_else(tmp_path, text):
    arguments = ["train", text, *SIZES, "--steps=6", "--runs-dir", tmp_path, "--json"]
    result = cli(*arguments)
    assert result.code == 0
    assert result.err == ""
    events = result.events
    kinds = [event["event"] for event in events]
    assert kinds[0] == "start"
    assert kinds[-1] == "end"
    assert set(kinds) <= {"start", "step", "sample", "checkpoint", "notice", "end"}
    steps = [event for event in events if event["event"] == "step"]
    assert [event["step"] for event in steps] == [1, 2, 3, 4, 5, 6]
    lines = (tmp_path / "tiny-001" / "metrics.jsonl").read_text().splitlines()
    assert [{"event": "step", **json.loads(line)} for line in lines] == steps
    assert [event["step"] for event in events if event["event"] == "checkpoint"] == [3, 6]
    start, end = events[0], events[-1]
    assert start["corpus"]["bytes"] == len(TEXT)
    assert start["settings"]["training.steps"] == 6
    assert start["bytes"] > 4 * 4 * start["parameters"]
    assert end["finished"]
    assert end["val_loss"] == steps[-1]["val_loss"]
    assert end["verdict"]["n_words"] >= 0


def test_train_quiet_says_only_what_is_wrong(tmp_path, text):
    arguments = ["train", text, *SIZES, "--runs-dir", tmp_path, "--quiet"]
    result = cli(*arguments, "--steps=6")
    assert (result.code, result.out, result.err) == (0, "", "")
    short = tmp_path / "short.txt"
    short.write_text(TEXT[:600])
    result = cli("train", short, *arguments[2:], "--steps=60")
    assert result.out == ""
    assert result.err.startswith("warning: ")


def test_train_verbose_adds_rate_and_checkpoints(tmp_path, text):
    out = cli("train", text, *SIZES, "--steps=6", "--runs-dir", tmp_path, "--verbose").out
    assert re.search(r"lr \d\.\d\de-\d\d  gradient norm \d", out)
    assert "step-000003" in out
    assert "sample at step 4" in out


def test_train_from_standard_input(tmp_path, monkeypatch):
    stdin = io.TextIOWrapper(io.BytesIO(TEXT.encode()))
    monkeypatch.setattr(sys, "stdin", stdin)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    result = cli("train", "-", *SIZES, "--steps=2", "--runs-dir", tmp_path / "runs", "--json")
    assert result.code == 0
    assert result.events[0]["corpus"]["bytes"] == len(TEXT)


def test_train_without_validation_text(tmp_path, text):
    result = cli("train", text, *SIZES, "--steps=2", "--val-fraction=0", "--runs-dir", tmp_path)
    assert result.code == 0
    assert "and 0 for validation" in result.out
    check_error(cli("eval", "--runs-dir", tmp_path), "no text for validation", "--corpus")


def test_a_name_that_is_taken_or_no_name_is_refused(trained, text):
    arguments = ["train", text, *SIZES, "--steps=2", "--runs-dir", trained]
    check_error(cli(*arguments, "--name=one"), "'one'", "--resume one")
    check_error(cli(*arguments, "--name=../two"), "path separators")
    assert [path.name for path in trained.iterdir()] == ["one"]


def test_a_config_file_of_a_run_trains_the_same_again(tmp_path, trained):
    settings = ["--config", trained / "one" / "config.toml", "--runs-dir", tmp_path, "--json"]
    again = [event["loss"] for event in cli("train", *settings).events if event["event"] == "step"]
    lines = (trained / "one" / "metrics.jsonl").read_text().splitlines()
    assert again == [json.loads(line)["loss"] for line in lines]


# ---- failures -------------------------------------------------------------------------------------


def raising(error: BaseException):
    def command() -> None:
        raise error

    return command


@pytest.mark.parametrize(
    ("error", "code", "words"),
    [
        (KeyboardInterrupt(), 130, "stopped"),
        (MemoryError(), 2, "not enough memory"),
        (OSError(28, "No space left on device", "runs/x"), 2, "No space left on device: runs/x"),
        (RuntimeError("alloc_cpu.cpp: can't allocate memory: tried 9 bytes"), 2, "enough memory"),
        (ImportError("libx.so: not found", name="torch"), 2, "a library cannot be loaded: libx.so"),
        (ImportError("no name x", name="posttrainllm.x"), 1, "error: ImportError: no name x"),
        (ZeroDivisionError("division by zero"), 1, "error: ZeroDivisionError: division by zero"),
    ],
)
def test_an_exception_becomes_a_line_and_an_exit_code(capsys, error, code, words):
    assert exit_code(raising(error)) == code
    captured = capsys.readouterr()
    assert words in captured.err
    assert "Traceback" not in captured.err
    assert captured.out == ""


def test_an_empty_name_stands_for_nothing(tmp_path):
    for name in ("generate", "eval"):
        check_error(cli(name, "", "--runs-dir", tmp_path), "there is no run ''")
        check_error(cli(name, "--engine", "", "--runs-dir", tmp_path), "engine.name")


def test_the_traceback_is_shown_when_it_is_asked_for(capsys, monkeypatch):
    monkeypatch.setenv("POSTTRAINLLM_TRACEBACK", "1")
    assert exit_code(raising(ZeroDivisionError())) == 1
    assert "Traceback" in capsys.readouterr().err


def test_an_error_does_not_send_control_characters_to_the_terminal(tmp_path):
    result = cli("generate", "\x1b[31m", "--runs-dir", tmp_path)
    check_error(result)
    assert "\x1b" not in result.err
    assert "\x1b" not in cli("corpus", tmp_path / "\x1b[31m").err
