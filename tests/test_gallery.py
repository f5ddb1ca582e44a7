"""The models that come along: their cards are true, they write at once, and training goes on from them."""

from __future__ import annotations

import json
import shlex
import shutil
import tomllib
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cli_cases import check_error, cli
from posttrainllm.config import EngineConfig, load_config, settings_of
from posttrainllm.engines.cpp_engine import runnable_builds
from posttrainllm.errors import CheckpointError, CorpusError
from posttrainllm.gallery import catalogue
from posttrainllm.gallery.python_text import modules, python_text, write_python_text
from posttrainllm.text.corpus import open_corpus
from posttrainllm.text.datasets import TINY_SHAKESPEARE
from posttrainllm.training.engine_choice import inference_engine
from posttrainllm.training.evaluate import evaluate
from posttrainllm.training.models import open_model
from posttrainllm.training.starting import GENTLER, load_settings, starting_model

NAMES = catalogue.names()
SMALL = "shakespeare-small"
ON_SHAKESPEARE = [name for name in NAMES if name.startswith("shakespeare")]
# From the gallery's small model, so that the shape is that of preset large; three steps of two windows.
SHORT = ["--steps=3", "--batch-size=2", "--quiet"]
SHORT += [f"--set=training.{key}" for key in ("sample_tokens=0", "verdict_samples=0")]
SHORT += [f"--set=training.{key}" for key in ("eval_windows=4", "final_windows=4", "eval_every=0")]


@pytest.fixture
def empty(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder without runs, and the current one."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


# ---- cards and files ----------------------------------------------------------------------------------------------------------


def test_the_gallery_has_its_models() -> None:
    assert set(NAMES) == {"shakespeare", SMALL, "python"}


@pytest.mark.parametrize("name", NAMES)
def test_a_card_describes_the_file_beside_it(name: str) -> None:
    card = catalogue.card(name)
    assert card.name == name
    assert card.bytes <= catalogue.MOST_BYTES
    found = catalogue.load(card)  # the hash is checked here
    assert found.config.parameters() == card.parameters
    assert found.config.n_ctx == card.losses.n_ctx
    assert found.config.dropout == 0
    assert card.data.train_bytes + card.data.val_bytes == card.data.bytes
    assert card.bits_per_byte == pytest.approx(card.losses.int8 / np.log(2), abs=1e-3)
    assert card.bad_at
    assert 1 <= card.training.step <= card.training.steps


@pytest.mark.parametrize("name", NAMES)
def test_rounding_to_int8_costs_less_than_a_hundredth_of_the_loss(name: str) -> None:
    losses = catalogue.card(name).losses
    assert abs(losses.int8 - losses.float32) < 0.01 * losses.float32


def test_shakespeare_is_as_good_as_it_has_to_be() -> None:
    """1.50 nats a byte is what the published model of this size and text stays below."""
    card = catalogue.card("shakespeare")
    assert card.losses.int8 <= 1.50
    assert card.training.steps >= 5000
    assert catalogue.card(SMALL).bytes < 3_000_000


@pytest.mark.parametrize("name", NAMES)
def test_the_recipe_is_that_of_the_model(name: str) -> None:
    card = catalogue.card(name)
    recipe = load_config(file=catalogue.RECIPES / f"{name}.toml")
    assert recipe.training.steps == card.training.steps
    assert recipe.tokens_per_step * recipe.training.steps == card.training.tokens
    trained = recipe.model.model_dump() | {"dropout": 0.0}
    assert catalogue.load(card).config.model_dump() == trained
    assert f"recipes/{name}.toml" in card.training.commands[-1]


@pytest.mark.parametrize("name", NAMES)
def test_the_words_of_a_card_are_those_that_it_is_made_from(name: str) -> None:
    said = tomllib.loads((Path(__file__).parent.parent / "tools/gallery_cards.toml").read_text())
    card, words = catalogue.card(name), said[name]
    shown = (card.title, card.data.about, card.data.licence, list(card.bad_at), card.sampling)
    assert shown == tuple(words[key] for key in ("title", "about", "licence", "bad_at", "sampling"))


@pytest.mark.parametrize("name", ON_SHAKESPEARE)
def test_the_card_names_the_text_that_everyone_has(name: str) -> None:
    data = catalogue.card(name).data
    assert (data.sha256, data.bytes) == (TINY_SHAKESPEARE.sha256, TINY_SHAKESPEARE.n_bytes)


def measured(name: str) -> float:
    """The loss over the whole validation part, on the cpp engine."""
    found = catalogue.load(catalogue.card(name))
    corpus = open_corpus([], val_fraction=0.1)
    engine = inference_engine(found.config, EngineConfig(), batch=16)
    engine.load(found.params)
    return evaluate(engine, corpus, n_ctx=found.config.n_ctx, batch=16, windows=0).loss


def test_the_loss_of_the_card_is_the_loss_of_the_file() -> None:
    assert measured(SMALL) == pytest.approx(catalogue.card(SMALL).losses.int8, abs=2e-4)


@pytest.mark.slow
def test_the_loss_of_the_largest_model_is_that_of_its_card() -> None:
    assert measured("shakespeare") == pytest.approx(
        catalogue.card("shakespeare").losses.int8, abs=2e-4
    )


# ---- writing ------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("build", runnable_builds())
def test_the_sample_of_a_card_is_written_again_on_every_build(name: str, build: str) -> None:
    card = catalogue.card(name)
    found = catalogue.load(card)
    model = open_model(
        name, runs_dir=Path("nowhere"), engine=EngineConfig.model_validate({"cpp_build": build})
    )
    text = model.generate(
        card.sample.prompt, seed=card.sample.seed, max_tokens=card.sample.max_tokens
    )
    assert text == card.sample.text
    assert model.sampling == card.writes_with
    assert found.config == model.config


@pytest.mark.parametrize("name", NAMES)
def test_the_command_of_a_card_writes_its_sample(name: str, empty: Path) -> None:
    card = catalogue.card(name)
    result = cli(*shlex.split(card.sample.command)[1:])
    assert result.code == 0, result.err
    assert result.out.rstrip("\n") == (card.sample.prompt + card.sample.text).rstrip("\n")
    assert result.err == ""


@pytest.mark.parametrize("engine", ["numpy", "wasm", "torch"])
def test_every_engine_writes_with_it(engine: str, empty: Path, require: Any) -> None:
    if engine in ("wasm", "torch"):
        require({"wasm": "wasmtime"}.get(engine, engine))
    card = catalogue.card(SMALL)
    arguments = ["generate", SMALL, "--prompt", card.sample.prompt, "--seed", card.sample.seed]
    result = cli(*arguments, "--max-tokens", 40, "--engine", engine)
    assert result.code == 0, result.err
    assert result.out.rstrip("\n") == (card.sample.prompt + card.sample.text[:40]).rstrip("\n")


def test_several_texts_are_written_side_by_side(empty: Path) -> None:
    given = ["--prompt", "ROMEO:", "--prompt", "A", "--n", 2, "--seed", 7, "--max-tokens", 30]
    several = [
        json.loads(line) for line in cli("generate", SMALL, *given, "--json").out.splitlines()
    ]
    assert [(one["prompt"], one["seed"]) for one in several] == [
        ("ROMEO:", 7), ("ROMEO:", 8), ("A", 7), ("A", 8),
    ]  # fmt: skip
    alone = cli("generate", SMALL, "--prompt", "A", "--seed", 8, "--max-tokens", 30, "--json")
    assert json.loads(alone.out) == several[3]
    shown = cli("generate", SMALL, *given).out
    for number, one in enumerate(several, 1):
        head = f"--- text {number} of 4, seed {one['seed']}\n"
        assert head + one["prompt"] + one["text"] in shown


def test_a_penalty_and_a_stop_are_obeyed_from_the_command_line(empty: Path) -> None:
    given = ["generate", SMALL, "--prompt", "ROMEO:", "--temperature", 0, "--max-tokens", 60]
    plain = cli(*given).out
    assert cli(*given, "--repetition-penalty", 5, "--repetition-window", 8).out != plain
    stop = plain[20:23]
    assert cli(*given, "--stop", stop).out.rstrip("\n") == plain[: plain.index(stop, 6)].rstrip(
        "\n"
    )
    check_error(cli(*given, "--repetition-penalty", 0.5), "sampling.repetition_penalty", "got 0.5")


# ---- names --------------------------------------------------------------------------------------------------------------------


def test_models_are_listed_and_shown(empty: Path) -> None:
    listed = cli("models")
    assert listed.code == 0
    for card in catalogue.cards():
        assert card.name in listed.out
        assert f"{card.parameters:,}" in listed.out
    card = catalogue.card(SMALL)
    shown = cli("models", SMALL).out
    for piece in (
        card.sha256,
        card.data.sha256,
        card.training.commands[-1],
        card.bad_at[0],
        card.sample.text[:40],
    ):
        assert piece in shown
    assert cli("models", SMALL, "--json").json["losses"]["int8"] == card.losses.int8
    assert [one["name"] for one in cli("models", "--json").json] == list(NAMES)
    check_error(cli("models", "hamlet"), "no model 'hamlet' in the gallery", SMALL)


def test_an_unknown_name_tells_what_comes_along(empty: Path) -> None:
    check_error(
        cli("generate", "shakespear"), "did you mean 'shakespeare'?", "models that come along"
    )
    check_error(cli("generate", "gallery:hamlet"), "no model 'hamlet' in the gallery")
    check_error(cli("generate"), "no trained model", "posttrainllm models")


def test_a_run_of_the_same_name_goes_first_with_a_note(empty: Path) -> None:
    arguments = ["--preset=tiny", "--engine=numpy", "--steps=1", "--set=model.n_layer=1"]
    arguments += ["--set=training.final_windows=2", "--set=training.verdict_samples=0", "--quiet"]
    assert cli("train", *arguments, "--name", SMALL).code == 0
    result = cli("generate", SMALL, "--max-tokens", 5)
    assert f"has the name of a model of the gallery, which is gallery:{SMALL}" in result.err
    own = cli("generate", f"gallery:{SMALL}", "--max-tokens", 5)
    assert own.err == ""
    assert own.out != result.out


def test_a_quantised_file_anywhere_is_a_model_too(empty: Path) -> None:
    shutil.copyfile(catalogue.card(SMALL).path, "mine.safetensors")
    result = cli(
        "generate", "mine.safetensors", "--prompt", "A", "--max-tokens", 20, "--temperature", 0
    )
    assert result.code == 0
    assert (
        result.out
        == cli("generate", SMALL, "--prompt", "A", "--max-tokens", 20, "--temperature", 0).out
    )
    Path("mine.safetensors").write_bytes(b"nothing of the kind")
    check_error(cli("generate", "mine.safetensors"), "mine.safetensors")


def test_a_file_that_is_not_the_cards_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    card = catalogue.card(SMALL)
    content = bytearray(card.path.read_bytes())
    content[-1] ^= 1
    (tmp_path / card.file).write_bytes(content)
    monkeypatch.setattr(catalogue, "FOLDER", tmp_path)
    with pytest.raises(CheckpointError, match="is not the file that its card describes"):
        catalogue.load(card)
    (tmp_path / card.file).unlink()
    with pytest.raises(CheckpointError, match="cannot be read"):
        catalogue.load(card)


def test_a_damaged_card_is_refused_by_its_field(tmp_path: Path) -> None:
    document = json.loads((catalogue.FOLDER / f"{SMALL}.json").read_text())
    document["losses"]["int8"] = "low"
    (tmp_path / "card.json").write_text(json.dumps(document))
    with pytest.raises(CheckpointError, match=r"card\.json: losses\.int8: "):
        catalogue.Card.read(tmp_path / "card.json")


# ---- training goes on ---------------------------------------------------------------------------------------------------------


def test_training_goes_on_from_a_model_of_the_gallery(empty: Path) -> None:
    Path("mine.txt").write_text("What say you to the bottles of beer on the wall?\n" * 100)
    result = cli("train", "mine.txt", "--from", SMALL, "--name", "mine", *SHORT)
    assert result.code == 0, result.err
    config = load_config(file="runs/mine/config.toml")
    usual = load_config("large")
    assert config.preset == "large"
    assert config.training.start_from == f"gallery:{SMALL}"
    assert config.schedule.learning_rate == usual.schedule.learning_rate / GENTLER
    first = json.loads(Path("runs/mine/metrics.jsonl").read_text().splitlines()[0])
    assert first["loss"] < 4.0  # from random weights it is above 5
    assert cli("generate", "mine", "--max-tokens", 5).code == 0


def test_a_run_can_be_what_training_starts_from(empty: Path) -> None:
    arguments = ["--preset=tiny", "--engine=numpy", "--set=model.n_layer=1", *SHORT]
    assert cli("train", *arguments, "--name", "first").code == 0
    again = ["--engine=numpy", "--learning-rate", "1e-9", "--seed", 5, *SHORT]
    assert cli("train", "--from", "first", "--name", "second", *again).code == 0
    config = load_config(file="runs/second/config.toml")
    assert config.model.n_layer == 1
    assert config.schedule.learning_rate == 1e-9
    first, second = (
        open_model(name, runs_dir=Path("runs")).checkpoint.params for name in ("first", "second")
    )
    for name, values in first.items():  # nothing but what three steps of that rate do
        assert np.abs(values - second[name]).max() < 1e-7


def test_a_size_of_another_model_is_refused(empty: Path) -> None:
    result = cli("train", "--from", SMALL, "--n-ctx", 256, *SHORT)
    check_error(result, f"model.n_ctx is 128 in {SMALL} and cannot become 256", "--from")
    check_error(cli("train", "--from", "nobody", *SHORT), "no run 'nobody'")
    assert not Path("runs").exists()
    config = load_config(flags={"training.start_from": SMALL})
    with pytest.raises(Exception, match=r"model\.n_layer is 3, and shakespeare-small, .* has 6"):
        starting_model(config, Path("runs"))


def test_settings_without_a_model_to_start_from_are_the_usual_ones() -> None:
    plain, same = load_config("tiny"), load_settings("tiny", runs_dir=Path("runs"))
    assert settings_of(plain) == settings_of(same)
    assert starting_model(plain, Path("runs")) is None


def test_a_model_of_the_gallery_is_measured_on_its_own_text(empty: Path) -> None:
    result = cli("eval", SMALL, "--windows", 40, "--samples", 1, "--json")
    assert result.code == 0, result.err
    assert result.json["loss"] == pytest.approx(catalogue.card(SMALL).losses.int8, abs=0.1)
    assert result.json["longest_copy"] < 200
    assert result.json["model"] == f"gallery:{SMALL}"  # not where the package lies


# ---- the text that Python brings ----------------------------------------------------------------------------------------------


def test_the_text_of_a_library_depends_on_nothing_but_its_files(tmp_path: Path) -> None:
    library = tmp_path / "lib"
    for name, text in {
        "a.py": b"a = 1\r\n", "json/b.py": b"b = 2\n", "json/c.py": b"", "test/d.py": b"d = 4\n",
        "email/tests/e.py": b"e = 5\n", "latin.py": b"# \xe9\n", "_sysconfigdata_x.py": b"f = 6\n",
        "site-packages/g.py": b"g = 7\n", "zoneinfo/h.py": b"h = 8\n", "data.txt": b"no module",
    }.items():  # fmt: skip
        (library / name).parent.mkdir(parents=True, exist_ok=True)
        (library / name).write_bytes(text)
    order = [name for name, _ in modules(library)]
    assert sorted(order) == ["a.py", "json/b.py", "json/c.py", "latin.py", "zoneinfo/h.py"]
    texts = {"a.py": b"a = 1\n", "json/b.py": b"b = 2\n", "zoneinfo/h.py": b"h = 8\n"}
    assert python_text(library) == b"\n".join(texts[name] for name in order if name in texts)
    assert len(python_text(library, most=14)) <= 14
    copy = tmp_path / "copy"
    shutil.copytree(library, copy)
    assert python_text(copy) == python_text(library)
    with pytest.raises(CorpusError, match="no Python files"):
        python_text(tmp_path / "nothing")


def test_the_running_pythons_text_is_large_enough_and_no_tests(tmp_path: Path) -> None:
    text = write_python_text(tmp_path / "new" / "python.txt").read_bytes()
    assert 4_000_000 < len(text) <= 12_000_000
    assert text.decode().count("def ") > 10_000
    with pytest.raises(CorpusError, match="cannot write"):
        write_python_text(tmp_path)
