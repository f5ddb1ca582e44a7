"""Bad input through the command line: one clear line, exit code 2, nothing half-written, no more memory than planned.

What single refusals say is tested beside what refuses (``test_config_refusals.py``, ``test_textfiles.py``, ``test_checkpoint_damage.py``);
here the whole way from the command to the disk is, for cases picked by hand and by hypothesis.
"""

from __future__ import annotations

import pickle
import shutil
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cli_cases import SIZES, Result, check_error, cli, train_one, write_text
from posttrainllm.config import SETTINGS
from posttrainllm.engines import base
from posttrainllm.lab.peak_memory import forget_peak, peak_bytes
from posttrainllm.machine import process_memory
from saved import edit_json, rehash

MEMORY = 64 << 20  # what a machine of these tests has
SPARE = 48 << 20  # resident beside the plan: modules that are loaded, the text, the allocator's own


def examples(count: int):
    """How many examples of a property; the fast suite takes a few, the slow one many."""
    quiet = [HealthCheck.too_slow, HealthCheck.function_scoped_fixture]
    return settings(max_examples=count, suppress_health_check=quiet)


def check_outcome(result: Result, runs: Path) -> None:
    """It worked, or one line says why not and nothing was written."""
    assert "mistake in posttrainllm" not in result.err, result.err
    assert "Traceback" not in result.err
    if result.code == 0:
        return
    errors = [line for line in result.err.splitlines() if not line.startswith("notice: ")]
    assert errors[0].startswith("error: "), result.err
    assert len(errors) == 1 or (len(errors) == 2 and errors[1].startswith("  ")), result.err
    if result.code == 2:
        assert not runs.exists() or list(runs.iterdir()) == []
    else:
        assert result.code == 1  # training that cannot go on: a learning rate of 10
        assert "not a finite number" in result.err


# ---- configurations -----------------------------------------------------------------------------

# Settings that a run may have as large as it likes, at its own cost in time.
TIME = ("training.steps", "training.sample_tokens", "training.verdict_samples", "data.accumulation")
FIXED = ("engine.name", "engine.adapter", "data.corpus", "training.sample_prompt", "model.dropout")


def values_of(key: str) -> st.SearchStrategy[object]:
    """Values of a setting: its ends, beyond them, in between, and what is no value of it."""
    one = SETTINGS[key]
    odd = st.sampled_from(["", "nan", "inf", "-inf", "-1", "abc", "1e400", "9" * 40, "[]", "true"])
    if one.kind not in ("integer", "number"):
        return st.one_of(st.sampled_from(one.choices or ("x",)), odd)
    assert one.low is not None
    assert one.high is not None
    ends = [one.low, one.low - 1, one.high + 1] + ([] if key in TIME else [one.high])
    near = st.integers(int(one.low), int(min(one.high, one.low + (3 if key in TIME else 200))))
    numbers = near if one.kind == "integer" else st.floats(one.low, one.high)
    return st.one_of(numbers, numbers, st.sampled_from(ends), odd)


def configurations() -> st.SearchStrategy[dict[str, object]]:
    """One to four settings of a small run, changed."""
    keys = [key for key in SETTINGS if key not in FIXED]
    chosen = st.lists(st.sampled_from(keys), min_size=1, max_size=4, unique=True)
    return chosen.flatmap(lambda keys: st.fixed_dictionaries({k: values_of(k) for k in keys}))


def check_configuration(tmp_path_factory, monkeypatch, changes, engine):
    monkeypatch.setattr(base, "available_memory", lambda: MEMORY)
    folder = tmp_path_factory.mktemp("any")
    text, runs = write_text(folder), folder / "runs"
    given_settings = [f"--set={key}={value}" for key, value in changes.items()]
    before = process_memory()
    forget_peak()
    result = cli(
        *["train", text, *SIZES, f"--engine={engine}", "--set=training.steps=2", "--json"],
        *["--runs-dir", runs, *given_settings],
    )
    check_outcome(result, runs)
    if result.code == 0 and before:
        planned = result.events[0]["bytes"]
        assert peak_bytes() - before <= 2 * planned + SPARE
    shutil.rmtree(folder)


RUNS = {"changes": configurations(), "engine": st.sampled_from(["numpy", "cpp"])}


@examples(60)
@given(**RUNS)
def test_any_configuration_trains_or_is_refused_in_one_line(
    tmp_path_factory, monkeypatch, changes, engine
):
    check_configuration(tmp_path_factory, monkeypatch, changes, engine)


@pytest.mark.slow
@examples(500)
@given(**RUNS)
def test_many_configurations_train_or_are_refused_in_one_line(
    tmp_path_factory, monkeypatch, changes, engine
):
    check_configuration(tmp_path_factory, monkeypatch, changes, engine)


# ---- texts --------------------------------------------------------------------------------------


TEXTS = {
    "content": st.one_of(
        st.binary(max_size=600),
        st.text(max_size=400).map(lambda text: text.encode("utf-8", "surrogatepass")),
        st.builds(lambda piece, times: piece * times, st.binary(max_size=30), st.integers(1, 90)),
        st.text().map(lambda text: text.encode("utf-16", "replace")),
    ),
    "n_ctx": st.integers(1, 40),
    "val_fraction": st.sampled_from(["0", "0.001", "0.1", "0.5"]),
}


def check_text(tmp_path_factory, content, n_ctx, val_fraction):
    folder = tmp_path_factory.mktemp("text")
    text, runs = folder / "text.txt", folder / "runs"
    text.write_bytes(content)
    sizes = [f"--n-ctx={n_ctx}", f"--val-fraction={val_fraction}"]
    result = cli("train", text, *SIZES, *sizes, "--steps=1", "--runs-dir", runs, "--quiet")
    check_outcome(result, runs)
    shutil.rmtree(folder)


@examples(60)
@given(**TEXTS)
def test_any_text_is_trained_on_or_refused_in_one_line(
    tmp_path_factory, content, n_ctx, val_fraction
):
    check_text(tmp_path_factory, content, n_ctx, val_fraction)


@pytest.mark.slow
@examples(500)
@given(**TEXTS)
def test_many_texts_are_trained_on_or_refused_in_one_line(
    tmp_path_factory, content, n_ctx, val_fraction
):
    check_text(tmp_path_factory, content, n_ctx, val_fraction)


# ---- models -------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def original(tmp_path_factory):
    """The runs folder with a run "one" of six steps."""
    folder = tmp_path_factory.mktemp("original")
    return train_one(folder / "runs", write_text(folder))


def check_model(runs: Path, *, quiet: bool = False) -> list[Result]:
    """Every command that opens a model either works or says in one line why not."""
    commands = [
        ["generate", "one", "--max-tokens=2"],
        ["train", "--resume=one", "--steps=7", "--allow-change", "--quiet"],
        ["runs", "show", "one"],
        ["runs", "list"],
    ]
    results = [cli(*command, "--runs-dir", runs) for command in commands]
    for result in results:
        assert "mistake in posttrainllm" not in result.err, result.err
        errors = [line for line in result.err.splitlines() if not line.startswith("notice: ")]
        assert result.code in (0, 2)
        assert len(errors) <= (0 if result.code == 0 else 2), result.err
    return results


def refused(runs: Path, *words: str) -> None:
    """Generating and resuming are refused, and neither wrote anything."""
    before = {path: path.stat().st_size for path in runs.rglob("*") if path.is_file()}
    for result in check_model(runs)[:2]:
        check_error(result, *words)
    after = {path: path.stat().st_size for path in runs.rglob("*") if path.is_file()}
    assert after == before


@pytest.fixture
def runs(original, tmp_path):
    """A copy with one checkpoint, to be damaged."""
    copy = tmp_path / "runs"
    shutil.copytree(original, copy)
    checkpoints = sorted((copy / "one" / "checkpoints").iterdir())
    for older in checkpoints[:-1]:
        shutil.rmtree(older)
    return copy


def newest(runs: Path) -> Path:
    return max((runs / "one" / "checkpoints").iterdir())


def test_newer_checkpoint_is_refused(runs):
    folder = newest(runs)
    edit_json(folder / "trainer_state.json", format_version=99)
    rehash(folder)
    refused(runs, "has format_version 99; this version reads up to 1", "update posttrainllm")


def test_foreign_checkpoint_is_refused_by_its_field(runs):
    folder = newest(runs)
    edit_json(folder / "config.json", model_type="llama")
    rehash(folder)
    refused(runs, "model_type", "llama")


def test_pickle_is_refused_and_never_loaded(runs, tmp_path):
    class Trap:
        def __reduce__(self):
            return Path.touch, (tmp_path / "sprung",)

    folder = newest(runs)
    (folder / "model.safetensors").unlink()
    (folder / "pytorch_model.bin").write_bytes(pickle.dumps(Trap()))
    for path in ("hashes.json", "trainer_state.json", "optimizer.safetensors"):
        (folder / path).unlink()
    check_error(cli("generate", folder), "pickle")
    assert not (tmp_path / "sprung").exists()


def test_copied_checkpoint_is_not_trained_into_the_folder_around_it(runs, tmp_path):
    shutil.copytree(newest(runs), tmp_path / "elsewhere" / "copy")
    result = cli("train", "--resume", tmp_path / "elsewhere" / "copy")
    check_error(result, "is a checkpoint outside of a run")
    assert [path.name for path in (tmp_path / "elsewhere").iterdir()] == ["copy"]


def test_run_that_lost_its_checkpoints_is_not_begun_again(runs):
    shutil.rmtree(runs / "one" / "checkpoints")
    before = (runs / "one" / "metrics.jsonl").read_bytes()
    check_error(cli("train", "--resume=one", "--runs-dir", runs), "has lost its folder")
    assert (runs / "one" / "metrics.jsonl").read_bytes() == before


DAMAGES = ("flip", "cut", "remove", "grow", "empty", "folder", "text")


def check_damage(original, tmp_path_factory, data):
    copy = tmp_path_factory.mktemp("damaged") / "runs"
    shutil.copytree(original, copy)
    for _ in range(data.draw(st.integers(1, 3))):
        files = sorted(path for path in copy.rglob("*") if path.is_file())
        path = data.draw(st.sampled_from(files))
        damage(path, data.draw(st.sampled_from(DAMAGES)), data)
        in_checkpoint = path.parent.name.startswith("step-") and path.name != "hashes.json"
        if (
            data.draw(st.booleans())
            and in_checkpoint
            and not (path.parent / "hashes.json").is_dir()
        ):
            rehash(path.parent)  # as if it had been written so
    check_model(copy)
    shutil.rmtree(copy.parent)


def damage(path: Path, how: str, data: st.DataObject) -> None:
    content = bytearray(path.read_bytes())
    at = data.draw(st.integers(0, max(0, len(content) - 1)))
    if how == "flip" and content:
        content[at] ^= data.draw(st.integers(1, 255))
        path.write_bytes(content)
    elif how == "cut":
        path.write_bytes(content[:at])
    elif how == "grow":
        path.write_bytes(content + data.draw(st.binary(min_size=1, max_size=40)))
    elif how == "empty":
        path.write_bytes(b"")
    elif how == "text":
        path.write_text(data.draw(st.sampled_from(["{}", "[]", "null", '{"step": 1}\n', "a = 1"])))
    else:
        path.unlink()
        if how == "folder":
            path.mkdir()


@examples(40)
@given(data=st.data())
def test_any_damage_of_a_run_is_passed_over_or_refused_in_one_line(
    original, tmp_path_factory, data
):
    check_damage(original, tmp_path_factory, data)


@pytest.mark.slow
@examples(500)
@given(data=st.data())
def test_much_damage_of_a_run_is_passed_over_or_refused_in_one_line(
    original, tmp_path_factory, data
):
    check_damage(original, tmp_path_factory, data)


# ---- odd ways to say it -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--steps=0"], "training.steps"),
        (["--steps=99999999999999999999"], "training.steps"),
        (["--learning-rate=nan"], "schedule.learning_rate"),
        (["--learning-rate=-inf"], "schedule.learning_rate"),
        (["--set=model.n_embd=9", "--set=model.n_head=2"], "not divisible"),
        (["--seed=-1"], "training.seed"),
        (["--threads=-1"], "engine.threads"),
        (["--config=/dev/zero"], "too many for a configuration"),
        (["--name=../up"], "the run name"),
        (["--runs-dir=/dev/null"], "something that is no folder has that name"),
        (["--set=optimizer.clip_norm=0"], "optimizer.clip_norm"),
        (["--set=a=b=c"], "unknown setting"),
    ],
)
def test_a_wrong_argument_is_one_line(tmp_path, arguments, words):
    runs = tmp_path / "runs"
    result = cli("train", write_text(tmp_path), *SIZES, "--runs-dir", runs, *arguments)
    check_error(result, words)
    assert not runs.exists()


def test_numbers_below_zero_are_refused_by_eval_and_generate(original):
    check_error(cli("eval", "one", "--windows=-3", "--runs-dir", original), "got -3")
    check_error(cli("eval", "one", "--samples=-3", "--runs-dir", original), "got -3")
    result = cli("generate", "one", "--seed=-1", "--runs-dir", original)
    check_error(result, "training.seed must be a whole number from 0")


def test_a_file_name_that_is_no_text_is_refused(tmp_path):
    path = tmp_path / "caf\udce9.txt"
    try:
        path.write_text("text " * 100)
    except (OSError, UnicodeEncodeError):
        pytest.skip("this file system has names of text alone")
    for source in (path, tmp_path):
        result = cli("train", source, *SIZES, "--runs-dir", tmp_path / "runs")
        check_error(result, "is not text in this locale", "LC_ALL")
    assert not (tmp_path / "runs").exists()
