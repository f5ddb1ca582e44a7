"""The command line: exit codes, one-line errors, what goes to which stream, and every everyday command."""

from __future__ import annotations

import io
import json
import re
import shutil
import sys

import pytest

from posttrainllm import __version__
from posttrainllm.cli import main
from posttrainllm.cli.failures import exit_code
from posttrainllm.config import PRESETS

# A model of 3,808 parameters on the engine that needs nothing built: a run takes a tenth of a second.
SIZES = [
    "--preset=tiny",
    "--engine=numpy",
    "--n-ctx=16",
    "--batch-size=4",
    "--set=model.n_layer=1",
    "--set=model.n_head=2",
    "--set=model.n_embd=8",
    "--set=training.eval_every=4",
    "--set=training.sample_every=4",
    "--set=training.sample_tokens=12",
    "--set=training.verdict_samples=2",
    "--set=training.final_windows=8",
    "--set=training.eval_windows=4",
    "--set=training.checkpoint_every=3",
]
TEXT = "".join(f"{number} bottles of beer on the wall.\n" for number in range(400))


class Result:
    """What a command gave back."""

    def __init__(self, code: int, out: str, err: str) -> None:
        self.code, self.out, self.err = code, out, err

    @property
    def json(self):
        return json.loads(self.out)

    @property
    def events(self):
        return [json.loads(line) for line in self.out.splitlines()]


@pytest.fixture
def cli(capsys):
    """Run a command line in this process."""

    def run(*arguments: object) -> Result:
        code = main([str(argument) for argument in arguments])
        captured = capsys.readouterr()
        return Result(code, captured.out, captured.err)

    return run


def run_quietly(*arguments: object) -> int:
    before = sys.stdout
    sys.stdout = io.StringIO()
    try:
        return main([str(argument) for argument in arguments])
    finally:
        sys.stdout = before


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    path = tmp_path_factory.mktemp("text") / "beer.txt"
    path.write_text(TEXT)
    return path


@pytest.fixture(scope="module")
def trained(tmp_path_factory, text):
    """A folder with the run "one", of six steps; tests only read it."""
    folder = tmp_path_factory.mktemp("runs")
    code = run_quietly(
        "train", text, *SIZES, "--steps=6", "--name=one", "--runs-dir", folder, "--quiet"
    )
    assert code == 0
    return folder


@pytest.fixture
def runs(tmp_path, trained):
    """A copy of it, to change."""
    return shutil.copytree(trained, tmp_path / "runs")


def check_error(result: Result, *words: str, code: int = 2) -> None:
    """One line that begins with "error: ", perhaps a hint on a second one, and nothing else."""
    assert result.code == code, result.err
    assert result.out == ""
    lines = result.err.splitlines()
    assert 1 <= len(lines) <= 2, result.err
    assert lines[0].startswith("error: ")
    assert len(lines) == 1 or lines[1].startswith("  ")
    for word in words:
        assert word in result.err


# ---- help and wrong use ---------------------------------------------------------------------------


def test_no_command_shows_the_help(cli):
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
def test_help_of_every_command_ends_well(cli, command):
    result = cli(*command)
    assert result.code == 0
    assert "Usage" in result.out
    assert result.err == ""


def test_version(cli):
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
def test_wrong_use_is_two_short_lines(cli, arguments, words):
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
def test_a_setting_that_cannot_be_used_is_named(cli, tmp_path, text, arguments, words):
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
def test_a_bad_corpus_is_refused_by_name_and_leaves_no_run(cli, tmp_path, content, words):
    path = tmp_path / "text.txt"
    if content is not None:
        path.write_bytes(content)
    for command in (["train", "--runs-dir", tmp_path / "runs"], ["corpus"]):
        check_error(cli(*command, path), *words)
    assert not (tmp_path / "runs").exists()


def test_a_folder_without_text_is_refused(cli, tmp_path):
    check_error(cli("train", tmp_path, "--runs-dir", tmp_path / "runs"), "no .txt file")


def test_corpus_shows_size_split_and_counting_lines(cli, text):
    out = cli("corpus", text).out
    assert f"{len(TEXT):,}" in out
    assert "guessing (5.55)" in out
    assert "warning" in out  # small can memorise this text
    facts = cli("corpus", text, "--json", "--val-fraction", "0.25").json
    assert facts["bytes"] == len(TEXT)
    assert facts["val_bytes"] == pytest.approx(len(TEXT) / 4, abs=4)
    assert list(facts["counting"])[:2] == ["guessing", "letter frequencies"]


# ---- train ----------------------------------------------------------------------------------------


def test_train_prints_what_it_knows_then_lines_then_a_verdict_and_commands(cli, tmp_path, text):
    folder = tmp_path / "runs"
    result = cli("train", text, *SIZES, "--steps=8", "--runs-dir", folder)
    assert result.code == 0
    assert result.err == ""
    assert "\x1b" not in result.out
    for words in (
        r"^model +tiny: 3,\d\d\d parameters",
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
        r"^  posttrainllm train --resume tiny-001 --runs-dir .* --steps 16 --allow-change$",
    ):
        assert re.search(words, result.out, re.MULTILINE), (words, result.out)
    assert (folder / "tiny-001" / "metrics.jsonl").read_text().count("\n") == 8


def test_train_json_is_one_event_a_line_and_nothing_else(cli, tmp_path, text):
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


def test_train_quiet_says_only_what_is_wrong(cli, tmp_path, text):
    arguments = ["train", text, *SIZES, "--runs-dir", tmp_path, "--quiet"]
    result = cli(*arguments, "--steps=6")
    assert (result.code, result.out, result.err) == (0, "", "")
    short = tmp_path / "short.txt"
    short.write_text(TEXT[:600])
    result = cli("train", short, *arguments[2:], "--steps=60")
    assert result.out == ""
    assert result.err.startswith("warning: ")


def test_train_verbose_adds_rate_and_checkpoints(cli, tmp_path, text):
    out = cli("train", text, *SIZES, "--steps=6", "--runs-dir", tmp_path, "--verbose").out
    assert re.search(r"lr \d\.\d\de-\d\d  gradient norm \d", out)
    assert "step-000003" in out
    assert "sample at step 4" in out


def test_train_from_standard_input(cli, tmp_path, monkeypatch):
    stdin = io.TextIOWrapper(io.BytesIO(TEXT.encode()))
    monkeypatch.setattr(sys, "stdin", stdin)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    result = cli("train", "-", *SIZES, "--steps=2", "--runs-dir", tmp_path / "runs", "--json")
    assert result.code == 0
    assert result.events[0]["corpus"]["bytes"] == len(TEXT)


def test_train_without_validation_text(cli, tmp_path, text):
    result = cli("train", text, *SIZES, "--steps=2", "--val-fraction=0", "--runs-dir", tmp_path)
    assert result.code == 0
    assert "and 0 for validation" in result.out
    check_error(cli("eval", "--runs-dir", tmp_path), "no text for validation", "--corpus")


def test_a_name_that_is_taken_or_no_name_is_refused(cli, trained, text):
    arguments = ["train", text, *SIZES, "--steps=2", "--runs-dir", trained]
    check_error(cli(*arguments, "--name=one"), "'one'", "--resume one")
    check_error(cli(*arguments, "--name=../two"), "path separators")
    assert [path.name for path in trained.iterdir()] == ["one"]


def test_a_config_file_of_a_run_trains_the_same_again(cli, tmp_path, trained):
    settings = ["--config", trained / "one" / "config.toml", "--runs-dir", tmp_path, "--json"]
    again = [event["loss"] for event in cli("train", *settings).events if event["event"] == "step"]
    lines = (trained / "one" / "metrics.jsonl").read_text().splitlines()
    assert again == [json.loads(line)["loss"] for line in lines]


# ---- resume ---------------------------------------------------------------------------------------


def test_resume_of_a_finished_run_says_how_to_give_it_more_steps(cli, runs):
    check_error(cli("train", "--resume", "one", "--runs-dir", runs), "--steps 12 --allow-change")


def test_resume_refuses_changed_settings_unless_allowed(cli, runs):
    arguments = ["train", "--resume", "one", "--runs-dir", runs, "--steps", "9"]
    check_error(cli(*arguments), "training.steps 6 -> 9", "--allow-change")
    check_error(cli(*arguments, "--learning-rate=0.5"), "schedule.learning_rate", "training.steps")
    result = cli(*arguments, "--allow-change", "--json")
    assert result.code == 0
    events = result.events
    assert any("training.steps 6 -> 9" in e["message"] for e in events if e["event"] == "notice")
    assert [event["step"] for event in events if event["event"] == "step"] == [7, 8, 9]
    lines = (runs / "one" / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == list(range(1, 10))


def test_resume_shows_where_it_goes_on(cli, runs):
    arguments = ["train", "--resume", "one", "--runs-dir", runs, "--steps", "9", "--allow-change"]
    result = cli(*arguments, "--set", "training.sample_tokens=5")
    assert "after step 6" in result.out
    assert result.err.startswith("notice: changed settings: ")


def test_resume_never_changes_the_model_the_preset_or_the_name(cli, runs):
    arguments = ["train", "--resume", "one", "--runs-dir", runs, "--steps", "9", "--allow-change"]
    check_error(cli(*arguments, "--n-ctx=8"), "model.n_ctx 16 -> 8")
    check_error(cli(*arguments, "--preset=small"), "preset tiny")
    check_error(cli(*arguments, "--name=two"), "--name")


def test_resume_takes_the_same_text_by_a_relative_path_and_no_other(cli, runs, text, monkeypatch):
    monkeypatch.chdir(text.parent)
    arguments = ["--resume", "one", "--runs-dir", runs, "--steps", "7", "--allow-change", "--quiet"]
    assert cli("train", text.name, *arguments).code == 0
    (text.parent / "wine.txt").write_text(TEXT.replace("beer", "wine"))
    result = cli("train", "wine.txt", *arguments, "--steps", "8")
    assert result.code == 2
    assert "error: wine.txt is not the text of this run" in result.err


def test_resume_of_an_unknown_run_suggests_one(cli, runs):
    check_error(cli("train", "--resume", "onee", "--runs-dir", runs), "did you mean 'one'?")


# ---- generate -------------------------------------------------------------------------------------


def test_generate_is_reproducible_by_its_seed(cli, trained):
    arguments = ["generate", "one", "--runs-dir", trained, "--prompt", "10 bottles", "--max-tokens"]
    first = cli(*arguments, 60, "--seed", 3)
    assert first.code == 0
    assert first.out.startswith("10 bottles")
    assert cli(*arguments, 60, "--seed", 3).out == first.out
    assert cli(*arguments, 60, "--seed", 4).out != first.out
    assert first.out.startswith(cli(*arguments, 20, "--seed", 3).out[:-2])


def test_generate_takes_the_newest_run_and_every_way_to_name_a_model(cli, trained):
    arguments = ["--runs-dir", trained, "--max-tokens", 20]
    unnamed = cli("generate", *arguments)
    assert unnamed.out == cli("generate", "one", *arguments).out
    assert "step-000006" in unnamed.err
    folder = trained / "one" / "checkpoints" / "step-000006"
    assert cli("generate", folder, *arguments).out == unnamed.out


def test_generate_ends_before_a_stop_string(cli, trained):
    arguments = ["generate", "--runs-dir", trained, "--max-tokens", 300, "--prompt", "1"]
    whole = cli(*arguments).out
    stop = whole[100:102]
    cut = whole[: whole.index(stop, 1)]
    out = cli(*arguments, "--stop", "never written", "--stop", stop).out
    assert out == cut + ("" if cut.endswith("\n") else "\n")


def test_generate_reads_a_prompt_from_standard_input(cli, trained, monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"99 bottles")))
    out = cli("generate", "--runs-dir", trained, "--prompt", "-", "--max-tokens", 5).out
    assert out.startswith("99 bottles")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["nothing"], ["'nothing'", "runs: one"]),
        (["one", "--prompt", ""], ["the prompt is empty"]),
        (["one", "--temperature", "-1"], ["sampling.temperature", "got -1"]),
        (["one", "--top-p", "2"], ["sampling.top_p"]),
        (["one", "--top-k", "-1"], ["sampling.top_k"]),
        (["one", "--max-tokens", "0"], ["sampling.max_tokens"]),
        (["one", "--engine", "abacus"], ["engine.name", "'abacus'"]),
    ],
)
def test_generate_refuses_what_it_cannot_use(cli, trained, arguments, words):
    check_error(cli("generate", *arguments, "--runs-dir", trained), *words)


def test_generate_without_any_run_says_how_to_train_one(cli, tmp_path):
    check_error(cli("generate", "--runs-dir", tmp_path), "posttrainllm train")
    check_error(cli("generate", "small-001", "--runs-dir", tmp_path), "posttrainllm train")


def test_a_damaged_checkpoint_is_passed_over_and_without_another_refused(cli, runs):
    arguments = ["generate", "one", "--runs-dir", runs, "--max-tokens", 5]
    for step in (6, 3):
        path = runs / "one" / "checkpoints" / f"step-00000{step}" / "model.safetensors"
        path.write_bytes(path.read_bytes()[:-7])
        result = cli(*arguments)
        if step == 6:
            assert result.code == 0
            assert "step-000006" in result.err
    check_error(result, "step-00000")
    check_error(cli("train", "--resume", "one", "--runs-dir", runs), "step-00000")


# ---- eval -----------------------------------------------------------------------------------------


def test_eval_finds_the_loss_that_training_ended_with(cli, trained):
    last = json.loads((trained / "one" / "metrics.jsonl").read_text().splitlines()[-1])
    found = cli("eval", "one", "--runs-dir", trained, "--json").json
    assert found["loss"] == pytest.approx(last["val_loss"], rel=1e-6)
    assert found["bits_per_byte"] == pytest.approx(found["loss"] / 0.693147, rel=1e-5)
    assert found["windows"] == 8
    assert found["n_words"] >= 0
    out = cli("eval", "--runs-dir", trained).out
    for label in ("loss", "bits a byte", "perplexity", "counting reaches", "real words"):
        assert re.search(f"^{label} ", out, re.MULTILINE)


def test_eval_on_another_text_and_on_all_windows(cli, trained, tmp_path):
    other = tmp_path / "other.txt"
    other.write_text("The quick brown fox jumps over the lazy dog.\n" * 100)
    arguments = ["eval", "one", "--runs-dir", trained, "--json", "--samples", 0]
    found = cli(*arguments, "--corpus", other, "--windows", 0).json
    assert found["corpus"] == "other.txt"
    assert found["windows"] == 450 // 16
    assert found["word_share"] is None


# ---- runs and presets -----------------------------------------------------------------------------


def test_runs_list_shows_every_run(cli, trained, tmp_path):
    out = cli("runs", "list", "--runs-dir", trained).out.splitlines()
    assert out[0].split()[:3] == ["run", "preset", "state"]
    assert out[1].split()[:4] == ["one", "tiny", "finished", "6/6"]
    rows = cli("runs", "list", "--runs-dir", trained, "--json").json
    assert [(row["name"], row["step"]) for row in rows] == [("one", 6)]
    result = cli("runs", "list", "--runs-dir", tmp_path / "none")
    assert result.code == 0
    assert "posttrainllm train" in result.out


def test_runs_show_has_settings_losses_checkpoints_and_a_curve(cli, trained):
    out = cli("runs", "show", "one", "--runs-dir", trained).out
    for words in ("model.n_layer 1 (preset: 2)", "step-000003", "step-000006", "a training loss"):
        assert words in out
    assert re.search(r"^ *\d\.\d\d \|a", out, re.MULTILINE)
    found = cli("runs", "show", "one", "--runs-dir", trained, "--json").json
    assert {"key": "model.n_layer", "value": 1, "preset": 2} in found["changed"]
    assert found["last"]["step"] == 6
    assert len(found["checkpoints"]) == 2
    check_error(cli("runs", "show", "on", "--runs-dir", trained), "did you mean 'one'?")


def test_runs_show_of_a_run_without_a_line_of_metrics(cli, runs):
    (runs / "one" / "metrics.jsonl").unlink()
    assert cli("runs", "show", "one", "--runs-dir", runs).code == 0


def test_runs_compare_draws_all_and_names_what_differs(cli, runs, text):
    arguments = ["train", text, *SIZES, "--steps=6", "--runs-dir", runs, "--quiet"]
    assert cli(*arguments, "--name=two", "--learning-rate=0.01").code == 0
    out = cli("runs", "compare", "one", "two", "--runs-dir", runs).out
    assert "a one   b two" in out
    titles, *rows = out.splitlines()[-3:]
    assert titles.split()[-1] == "learning_rate"
    assert [row.split()[0] for row in rows] == ["one", "two"]
    assert rows[1].split()[-1] == "0.01"
    found = cli("runs", "compare", "one", "two", "--runs-dir", runs, "--json").json
    assert [each["differs"] for each in found] == [
        {"schedule.learning_rate": 0.003},
        {"schedule.learning_rate": 0.01},
    ]
    check_error(cli("runs", "compare", "one", "--runs-dir", runs), "two runs")


def test_presets_lists_all_with_their_parameters(cli):
    out = cli("presets").out
    assert all(f"\n{name} " in out for name in PRESETS)
    assert "366,432" in out
    rows = {row["preset"]: row for row in cli("presets", "--json").json}
    assert list(rows) == list(PRESETS)
    assert rows["small"]["bytes"] > 16 * rows["small"]["parameters"]


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
        (ZeroDivisionError("division by zero"), 1, "error: ZeroDivisionError: division by zero"),
    ],
)
def test_an_exception_becomes_a_line_and_an_exit_code(capsys, error, code, words):
    assert exit_code(raising(error)) == code
    captured = capsys.readouterr()
    assert words in captured.err
    assert "Traceback" not in captured.err
    assert captured.out == ""


def test_the_traceback_is_shown_when_it_is_asked_for(capsys, monkeypatch):
    monkeypatch.setenv("POSTTRAINLLM_TRACEBACK", "1")
    assert exit_code(raising(ZeroDivisionError())) == 1
    assert "Traceback" in capsys.readouterr().err


def test_an_error_does_not_send_control_characters_to_the_terminal(cli, tmp_path):
    result = cli("generate", "\x1b[31m", "--runs-dir", tmp_path)
    check_error(result)
    assert "\x1b" not in result.err
    assert "\x1b" not in cli("corpus", tmp_path / "\x1b[31m").err
