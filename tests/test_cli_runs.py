"""The command line after training: resume, generate, eval, runs and presets."""

from __future__ import annotations

import io
import json
import re
import shutil
import sys

import pytest

from cli_cases import SIZES, TEXT, check_error, cli, train_one, write_text
from posttrainllm.config import PRESETS
from posttrainllm.runs.comparing import show_setting
from posttrainllm.training.models import open_model


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    return write_text(tmp_path_factory.mktemp("text"))


@pytest.fixture(scope="module")
def trained(tmp_path_factory, text):
    """A folder with the run "one"; tests only read it."""
    return train_one(tmp_path_factory.mktemp("runs"), text)


@pytest.fixture
def runs(tmp_path, trained):
    """A copy of it, to change."""
    return shutil.copytree(trained, tmp_path / "runs")


# ---- resume ---------------------------------------------------------------------------------------


def test_resume_of_a_finished_run_says_how_to_give_it_more_steps(runs):
    check_error(cli("train", "--resume", "one", "--runs-dir", runs), "--resume one --steps 12")
    fewer = cli("train", "--resume", "one", "--runs-dir", runs, "--steps", 4)
    assert "error: run one is at step 6, beyond the 4 that are wanted" in fewer.err
    assert "--resume one --steps 12" in fewer.err


def test_resume_refuses_changed_settings_unless_allowed(runs):
    arguments = ["train", "--resume", "one", "--runs-dir", runs, "--steps", "9"]
    check_error(cli(*arguments, "--learning-rate=0.5"), "schedule.learning_rate", "--allow-change")
    result = cli(*arguments, "--json")
    assert result.code == 0
    events = result.events
    assert any("training.steps 6 -> 9" in e["message"] for e in events if e["event"] == "notice")
    assert [event["step"] for event in events if event["event"] == "step"] == [7, 8, 9]
    lines = (runs / "one" / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == list(range(1, 10))


def test_resume_shows_where_it_goes_on(runs):
    arguments = ["train", "--resume", "one", "--runs-dir", runs, "--steps", "9", "--allow-change"]
    result = cli(*arguments, "--set", "training.sample_tokens=5")
    assert "after step 6" in result.out
    assert result.err.startswith("notice: changed settings: ")


def test_resume_never_changes_the_model_the_preset_or_the_name(runs):
    arguments = ["train", "--resume", "one", "--runs-dir", runs, "--steps", "9", "--allow-change"]
    check_error(cli(*arguments, "--n-ctx=8"), "model.n_ctx 16 -> 8")
    check_error(cli(*arguments, "--preset=small"), "preset tiny")
    check_error(cli(*arguments, "--name=two"), "--name")


def test_resume_takes_the_same_text_by_a_relative_path_and_no_other(runs, text, monkeypatch):
    monkeypatch.chdir(text.parent)
    arguments = ["--resume", "one", "--runs-dir", runs, "--steps", "7", "--allow-change", "--quiet"]
    assert cli("train", text.name, *arguments).code == 0
    (text.parent / "wine.txt").write_text(TEXT.replace("beer", "wine"))
    result = cli("train", "wine.txt", *arguments, "--steps", "8")
    assert result.code == 2
    assert "error: wine.txt is not the text of this run" in result.err


def test_resume_of_an_unknown_run_suggests_one(runs):
    check_error(cli("train", "--resume", "onee", "--runs-dir", runs), "did you mean 'one'?")


# ---- generate -------------------------------------------------------------------------------------


def test_generate_is_reproducible_by_its_seed(trained):
    arguments = ["generate", "one", "--runs-dir", trained, "--prompt", "10 bottles", "--max-tokens"]
    first = cli(*arguments, 60, "--seed", 3)
    assert first.code == 0
    assert first.out.startswith("10 bottles")
    assert cli(*arguments, 60, "--seed", 3).out == first.out
    assert cli(*arguments, 60, "--seed", 4).out != first.out
    assert first.out.startswith(cli(*arguments, 20, "--seed", 3).out[:-2])


def test_generate_takes_the_newest_run_and_every_way_to_name_a_model(trained):
    arguments = ["--runs-dir", trained, "--max-tokens", 20]
    unnamed = cli("generate", *arguments)
    assert unnamed.out == cli("generate", "one", *arguments).out
    assert "step-000006" in unnamed.err
    folder = trained / "one" / "checkpoints" / "step-000006"
    assert cli("generate", folder, *arguments).out == unnamed.out


def test_generate_ends_before_a_stop_string(trained):
    arguments = ["generate", "--runs-dir", trained, "--max-tokens", 300, "--prompt", "1"]
    whole = cli(*arguments).out
    stop = whole[100:102]
    cut = whole[: whole.index(stop, 1)]
    out = cli(*arguments, "--stop", "never written", "--stop", stop).out
    assert out == cut + ("" if cut.endswith("\n") else "\n")


def test_generate_reads_a_prompt_from_standard_input(trained, monkeypatch):
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
def test_generate_refuses_what_it_cannot_use(trained, arguments, words):
    check_error(cli("generate", *arguments, "--runs-dir", trained), *words)


def test_generate_without_any_run_says_how_to_train_one(tmp_path):
    check_error(cli("generate", "--runs-dir", tmp_path), "posttrainllm train")
    check_error(cli("generate", "small-001", "--runs-dir", tmp_path), "posttrainllm train")


def test_a_damaged_checkpoint_is_passed_over_and_without_another_refused(runs):
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


def test_eval_finds_the_loss_that_training_ended_with(trained):
    last = json.loads((trained / "one" / "metrics.jsonl").read_text().splitlines()[-1])
    found = cli("eval", "one", "--runs-dir", trained, "--json").json
    assert found["loss"] == pytest.approx(last["val_loss"], rel=1e-6)
    assert found["bits_per_byte"] == pytest.approx(found["loss"] / 0.693147, rel=1e-5)
    assert found["windows"] == 8
    assert found["n_words"] >= 0
    out = cli("eval", "--runs-dir", trained).out
    for label in ("loss", "bits a byte", "perplexity", "counting reaches", "real words"):
        assert re.search(f"^{label} ", out, re.MULTILINE)


def test_measuring_says_how_far_it_is(trained):
    said = []
    model = open_model("one", runs_dir=trained, batch=None)
    model.measure(samples=2, progress=lambda *far: said.append(far))
    batches = 8 // model.batch + bool(8 % model.batch)
    assert said[:batches] == [("windows measured", at * model.batch, 8) for at in range(batches)]
    tokens = [far for far in said if far[0] == "tokens written"]
    assert tokens == [("tokens written", at, len(tokens)) for at in range(len(tokens))]
    assert len(tokens) == 2 * model.checkpoint.state.config.training.sample_tokens


def test_eval_on_another_text_and_on_all_windows(trained, tmp_path):
    other = tmp_path / "other.txt"
    other.write_text("The quick brown fox jumps over the lazy dog.\n" * 100)
    arguments = ["eval", "one", "--runs-dir", trained, "--json", "--samples", 0]
    found = cli(*arguments, "--corpus", other, "--windows", 0).json
    assert found["corpus"] == "other.txt"
    assert found["windows"] == 450 // 16
    assert found["word_share"] is None


# ---- runs and presets -----------------------------------------------------------------------------


def test_runs_list_shows_every_run(trained, tmp_path):
    out = cli("runs", "list", "--runs-dir", trained).out.splitlines()
    assert out[0].split()[:3] == ["run", "preset", "state"]
    assert out[1].split()[:4] == ["one", "tiny", "finished", "6/6"]
    rows = cli("runs", "list", "--runs-dir", trained, "--json").json
    assert [(row["name"], row["step"]) for row in rows] == [("one", 6)]
    result = cli("runs", "list", "--runs-dir", tmp_path / "none")
    assert result.code == 0
    assert "posttrainllm train" in result.out


def test_runs_show_has_settings_losses_checkpoints_and_a_curve(trained):
    out = cli("runs", "show", "one", "--runs-dir", trained).out
    for words in ("model.n_layer 1 (preset: 2)", "step-000003", "step-000006", "a training loss"):
        assert words in out
    assert re.search(r"^ *\d\.\d\d \|a", out, re.MULTILINE)
    found = cli("runs", "show", "one", "--runs-dir", trained, "--json").json
    assert {"key": "model.n_layer", "value": 1, "preset": 2} in found["changed"]
    assert found["last"]["step"] == 6
    assert len(found["checkpoints"]) == 2
    check_error(cli("runs", "show", "on", "--runs-dir", trained), "did you mean 'one'?")


def test_the_speed_at_the_end_of_a_run_is_that_of_its_newest_steps(runs):
    path = runs / "one" / "metrics.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    for line, pace in zip(lines, [1000.0] * (len(lines) - 2) + [None, 3000.0], strict=True):
        line["tokens_per_second"] = pace
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    known = len(lines) - 1
    wanted = round(known / ((known - 1) / 1000 + 1 / 3000))
    assert f", {wanted:,} tokens/s at the end" in cli("runs", "show", "one", "--runs-dir", runs).out


def test_runs_show_of_a_run_without_a_line_of_metrics(runs):
    (runs / "one" / "metrics.jsonl").unlink()
    assert cli("runs", "show", "one", "--runs-dir", runs).code == 0


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("schedule.learning_rate", 0.006 / 10, "0.0006"),
        ("schedule.learning_rate", 1e-5, "1e-05"),
        ("data.corpus", (), "TinyShakespeare"),
        ("data.corpus", ("a.txt", "b.txt"), "a.txt b.txt"),
        ("training.start_from", "", "none"),
        ("model.n_inner", None, "unset"),
        ("model.tied", True, "True"),
    ],
)
def test_a_setting_is_shown_as_people_write_it(key, value, words):
    assert show_setting(key, value) == words


def test_a_name_that_is_no_run_is_told_how_many_there_are(tmp_path):
    for number in range(13):
        (tmp_path / f"run-{number:02}").mkdir()
        (tmp_path / f"run-{number:02}" / "config.toml").write_text("")
    hint = ", ".join(f"run-{number:02}" for number in range(3, 13)) + " and 3 more"
    assert f"runs: {hint}" in cli("runs", "show", "other", "--runs-dir", tmp_path).err


def test_runs_compare_draws_all_and_names_what_differs(runs, text):
    arguments = ["train", text, *SIZES, "--steps=6", "--runs-dir", runs, "--quiet"]
    assert cli(*arguments, "--name=two", "--learning-rate=0.02").code == 0
    out = cli("runs", "compare", "one", "two", "--runs-dir", runs).out
    assert "a one   b two" in out
    titles, *rows = out.splitlines()[-3:]
    assert titles.split()[-1] == "learning_rate"
    assert [row.split()[0] for row in rows] == ["one", "two"]
    assert rows[1].split()[-1] == "0.02"
    found = cli("runs", "compare", "one", "two", "--runs-dir", runs, "--json").json
    assert [each["differs"] for each in found] == [
        {"schedule.learning_rate": PRESETS["tiny"].learning_rate},
        {"schedule.learning_rate": 0.02},
    ]
    check_error(cli("runs", "compare", "one", "--runs-dir", runs), "two runs")


def test_presets_lists_all_with_their_parameters():
    out = cli("presets").out
    assert all(f"\n{name} " in out for name in PRESETS)
    assert "366,432" in out
    rows = {row["preset"]: row for row in cli("presets", "--json").json}
    assert list(rows) == list(PRESETS)
    assert rows["small"]["bytes"] > 16 * rows["small"]["parameters"]
