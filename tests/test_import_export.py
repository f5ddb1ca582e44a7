"""Exporting: what is written, that it is compared before it is called done, and that a failure leaves nothing."""

from __future__ import annotations

import json
import zipfile
from pathlib import Path

import numpy as np
import pytest

import tinygpt_files
from cli_cases import check_error, cli
from hostile_zips import run_folder
from import_cases import bpe, model_folder
from needs import require
from posttrainllm.errors import CheckpointError, ConfigError
from posttrainllm.runs.checkpoint import read_checkpoint, write_checkpoint
from posttrainllm.runs.folder import Run, create_run
from posttrainllm.text.tokenizer import ByteTokenizer
from posttrainllm.text.tokenizer_files import load as load_tokenizer
from posttrainllm.training import exporting, places
from posttrainllm.training.exporting import export_model
from posttrainllm.training.importing import import_model
from saved import make_state, make_values, small_config

require("tokenizers")


def make_run(runs: Path, name: str = "beer", **model) -> Run:
    """A run of one checkpoint, with losses and a sample."""
    config = small_config(**model)
    run = create_run(runs, config, name)
    for step, val in ((100, 2.75), (300, 2.25), (400, None), (500, 2.5)):
        line = {"step": step, "loss": 3.0, "val_loss": val}
        run.metrics.append({**line, "lr": 1e-3, "grad_norm": 1.0})
    run.samples.append({"step": 500, "prompt": "ROMEO:", "text": " caf\u00e9" * 100})
    values = make_values(config)
    tokenizer = ByteTokenizer()
    state = make_state(500, config)
    write_checkpoint(run.checkpoints, state=state, **values, tokenizer=tokenizer, keep=1)
    return run


def nothing_but(folder: Path, *names: str) -> bool:
    """Whether a folder holds these and not even a hidden file more."""
    return {path.name for path in folder.iterdir()} == set(names)


# --- hf --------------------------------------------------------------------------------------


def test_a_model_folder_goes_out_as_it_came_in_bit_for_bit(tmp_path):
    source = model_folder(tmp_path, n_vocab=300)
    import_model(source, runs_dir=tmp_path / "runs", name="gpt")
    made = export_model("gpt", "hf", tmp_path / "out" / "gpt", runs_dir=tmp_path / "runs")
    assert nothing_but(tmp_path / "out", "gpt")
    theirs, ours = read_checkpoint(source), read_checkpoint(made.path)
    assert ours.config == theirs.config
    for name, array in theirs.params.items():
        assert ours.params[name].tobytes() == array.tobytes()
    same = (source / "tokenizer.json").read_bytes() == (made.path / "tokenizer.json").read_bytes()
    assert same
    assert made.bytes == sum(path.stat().st_size for path in made.path.iterdir())
    config = json.loads((made.path / "tokenizer_config.json").read_text())
    assert (config["eos_token"], config["model_max_length"]) == ("<|endoftext|>", 12)
    for name in ("config.json", "generation_config.json"):
        assert json.loads((made.path / name).read_text())["eos_token_id"] == 299


def test_without_transformers_our_own_reader_and_engine_compare(tmp_path, monkeypatch):
    monkeypatch.setattr(exporting, "has_transformers", lambda: False)
    make_run(tmp_path / "runs")
    made = export_model("beer", "hf", tmp_path / "out", runs_dir=tmp_path / "runs")
    assert (made.comparison.reader, made.comparison.difference) == ("posttrainllm", 0.0)
    assert load_tokenizer(made.path).n_vocab == 256


def test_an_empty_folder_is_filled_and_a_full_one_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(exporting, "has_transformers", lambda: False)
    make_run(tmp_path / "runs")
    (tmp_path / "out").mkdir()
    export_model("beer", "hf", tmp_path / "out", runs_dir=tmp_path / "runs")
    with pytest.raises(CheckpointError, match="exists and is not empty"):
        export_model("beer", "hf", tmp_path / "out", runs_dir=tmp_path / "runs")


WRONG = {
    "logits": ("transformers_logits", lambda *_: (np.full((2, 12, 256), 7.0), "transformers 9")),
    "not a number": (
        "transformers_logits",
        lambda *_: (np.full((2, 12, 256), np.nan), "transformers 9"),
    ),
    "ids": ("transformers_ids", lambda folder, texts: [[1, 2, 3] for _ in texts]),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_folder_that_is_read_as_another_model_is_not_kept(tmp_path, monkeypatch, case):
    require("transformers")
    name, wrong = WRONG[case]
    monkeypatch.setattr(exporting, name, wrong)
    make_run(tmp_path / "runs")
    words = "reads 'ROMEO:" if case == "ids" else "reads another model from it"
    with pytest.raises(CheckpointError, match=words) as caught:
        export_model("beer", "hf", tmp_path / "out", runs_dir=tmp_path / "runs")
    assert "\n" not in caught.value.message
    assert nothing_but(tmp_path, "runs")


@pytest.mark.parametrize("name", ["AutoModelForCausalLM", "AutoTokenizer"])
def test_a_folder_that_transformers_cannot_load_is_not_kept(tmp_path, monkeypatch, name):
    def fail(*_, **__):
        raise RuntimeError("no\nsuch thing")

    monkeypatch.setattr(getattr(require("transformers"), name), "from_pretrained", fail)
    make_run(tmp_path / "runs")
    with pytest.raises(CheckpointError, match="cannot load it: no such thing") as caught:
        export_model("beer", "hf", tmp_path / "out", runs_dir=tmp_path / "runs")
    assert caught.value.message.startswith(f"{tmp_path / 'out'}: transformers ")
    assert "pip install -U transformers" in caught.value.hint
    assert nothing_but(tmp_path, "runs")


def test_weights_that_read_back_differently_are_not_kept(tmp_path, monkeypatch):
    real = exporting.write_tensors
    spoil = {"transformer.ln_f.bias": np.full(8, 0.5, np.float32)}
    monkeypatch.setattr(exporting, "write_tensors", lambda path, t: real(path, {**t, **spoil}))
    make_run(tmp_path / "runs")
    with pytest.raises(CheckpointError, match=r"ln_f\.bias reads back with other values"):
        export_model("beer", "hf", tmp_path / "out", runs_dir=tmp_path / "runs")
    assert nothing_but(tmp_path, "runs")


# --- tinygpt ---------------------------------------------------------------------------------


def test_a_run_becomes_a_tinygpt_file_with_its_moments_losses_and_sample(tmp_path):
    run = make_run(tmp_path / "runs", activation="gelu", n_inner=20)
    made = export_model("beer", "tinygpt", tmp_path / "out", runs_dir=tmp_path / "runs")
    assert made.path == tmp_path / "out" / "beer.tinygpt"
    assert made.comparison.difference == 0.0
    version, header, state = tinygpt_files.take_apart(made.path.read_bytes())
    assert version == 2
    assert header["stateByteLength"] == len(state)
    assert header["config"] == {
        **{"layers": 2, "heads": 2, "dModel": 8, "ctx": 12, "dMlp": 20},
        **{"batchSize": 16, "learningRate": 0.006, "gradClip": 1.0, "maxSteps": 2000},
        **{"evalEvery": 250, "seed": 1, "backend": "wasm"},
    }
    assert header["lossHistory"] == [
        {"step": 100, "train": 3.0, "val": 2.75},
        {"step": 300, "train": 3.0, "val": 2.25},
        {"step": 500, "train": 3.0, "val": 2.5},
    ]
    assert header["finalLoss"] == {"step": 500, "train": 3.0, "val": 2.5}
    assert header["bestVal"] == {"loss": 2.25, "step": 300}
    assert header["sample"].startswith("ROMEO: caf\u00e9")
    assert len(header["sample"]) == 320
    values = make_values(run.config())
    wanted = b"".join(
        part[name].tobytes()
        for name in ("wte.weight", "wpe.weight")
        for part in (values["params"], values["m"], values["v"])
    )
    assert state[4 : 4 + len(wanted)] == wanted


def test_float16_says_how_far_it_is_off(tmp_path):
    make_run(tmp_path / "runs", activation="gelu")
    place = tmp_path / "small.tinygpt"
    made = export_model("beer", "tinygpt", place, runs_dir=tmp_path / "runs", dtype="float16")
    assert made.path == place
    assert 0 < made.comparison.difference < 0.1
    assert made.bytes < 3 * 2 * small_config().model.parameters()


def test_the_tanh_form_is_refused_unless_a_difference_is_accepted(tmp_path):
    make_run(tmp_path / "runs")
    arguments = [
        "export",
        "beer",
        tmp_path / "a.tinygpt",
        "--to=tinygpt",
        "--runs-dir",
        tmp_path / "runs",
    ]
    check_error(cli(*arguments), "activation is 'gelu_new'", "--approximate")
    assert nothing_but(tmp_path, "runs")
    result = cli(*arguments, "--approximate", "--json")
    assert result.code == 0, result.err
    assert 0 < result.json["largest_difference"] < 0.05
    assert result.json["notices"] == ["the file has the erf form of GELU, the model the tanh form"]


def test_what_a_tinygpt_file_cannot_say_is_refused_by_field(tmp_path):
    make_run(tmp_path / "runs", tied=False, activation="gelu")
    with pytest.raises(CheckpointError, match="tied is False, and a .tinygpt model has True"):
        export_model(
            "beer", "tinygpt", tmp_path / "o", runs_dir=tmp_path / "runs", approximate=True
        )
    import_model(model_folder(tmp_path, n_vocab=300), runs_dir=tmp_path / "runs", name="gpt")
    with pytest.raises(CheckpointError, match="n_vocab is 300") as caught:
        export_model("gpt", "tinygpt", tmp_path / "o", runs_dir=tmp_path / "runs")
    assert caught.value.hint == 'export it with form="hf"'


# --- zip -------------------------------------------------------------------------------------


def test_a_zip_holds_the_run_as_it_stands_and_comes_back_as_it_was(tmp_path):
    run = make_run(tmp_path / "runs")
    for name in (".lock", "notes.txt"):
        (run.path / name).write_text("x")
    made = export_model("beer", "zip", tmp_path / "out", runs_dir=tmp_path / "runs")
    assert made.path == tmp_path / "out" / "beer.zip"
    assert nothing_but(tmp_path / "out", "beer.zip")
    with zipfile.ZipFile(made.path) as archive:
        assert archive.testzip() is None
        names = archive.namelist()
        assert {entry.compress_type for entry in archive.infolist()} == {zipfile.ZIP_STORED}
    assert names[0].startswith("beer/")
    assert {name.split("/")[1] for name in names} == {
        "checkpoints",
        "config.toml",
        "metrics.jsonl",
        "samples.jsonl",
    }
    back = import_model(made.path, runs_dir=tmp_path / "back")
    for path in back.path.rglob("*"):
        if path.is_file():
            assert path.read_bytes() == (run.path / path.relative_to(back.path)).read_bytes()


def test_only_whole_checkpoints_go_into_a_zip(tmp_path):
    run = make_run(tmp_path / "runs")
    broken = run.checkpoints / "step-000900"
    broken.mkdir()
    (broken / "model.safetensors").write_bytes(b"half")
    made = export_model("beer", "zip", tmp_path / "beer.zip", runs_dir=tmp_path / "runs")
    assert "using step-000500" in made.notices[0]
    with zipfile.ZipFile(made.path) as archive:
        assert not any("step-000900" in name for name in archive.namelist())


def test_a_run_that_is_being_trained_and_what_is_no_run_are_not_zipped(tmp_path):
    run = make_run(tmp_path / "runs")
    with run.lock(), pytest.raises(CheckpointError, match="run beer is being trained"):
        export_model("beer", "zip", tmp_path / "a.zip", runs_dir=tmp_path / "runs")
    model = model_folder(tmp_path)
    with pytest.raises(CheckpointError, match="is no run, and a .zip is a run as it stands"):
        export_model(str(model), "zip", tmp_path / "a.zip", runs_dir=tmp_path / "runs")
    assert not (tmp_path / "a.zip").exists()


def test_a_zip_that_was_written_wrong_is_not_kept(tmp_path, monkeypatch):
    real = exporting.archive.write_archive

    def write(path, files):
        other = tmp_path / "other"
        other.write_text("format = 1\n")
        real(path, [(n, other if n.endswith("config.toml") else f) for n, f in files])

    monkeypatch.setattr(exporting.archive, "write_archive", write)
    run_folder(tmp_path)
    with pytest.raises(CheckpointError, match=r"config\.toml in it is not the run's"):
        export_model("beer", "zip", tmp_path / "out" / "a.zip", runs_dir=tmp_path / "made")
    assert nothing_but(tmp_path / "out")


# --- all -------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", ["tinygpt", "zip"])
def test_a_file_that_exists_is_not_overwritten(tmp_path, form):
    make_run(tmp_path / "runs", activation="gelu")
    path = tmp_path / f"a.{form}"
    path.write_text("mine")
    with pytest.raises(CheckpointError, match="exists"):
        export_model("beer", form, path, runs_dir=tmp_path / "runs")
    assert path.read_text() == "mine"


def test_a_model_is_not_written_over_the_folder_one_is_in(tmp_path, monkeypatch):
    make_run(tmp_path / "runs")
    (tmp_path / "empty").mkdir()
    monkeypatch.chdir(tmp_path / "empty")
    with pytest.raises(CheckpointError, match="is the folder you are in"):
        export_model("beer", "hf", Path("."), runs_dir=tmp_path / "runs")
    made = export_model("beer", "zip", Path("."), runs_dir=tmp_path / "runs")
    assert nothing_but(tmp_path / "empty", "beer.zip")
    back = export_model(str(made.path), "tinygpt", Path("a"), runs_dir=tmp_path, approximate=True)
    assert back.path == Path("a/beer.tinygpt")
    with pytest.raises(CheckpointError, match="is no run"):
        export_model(str(made.path), "zip", Path("b"), runs_dir=tmp_path)


def test_wrong_options_are_refused_before_anything_is_read(tmp_path):
    for options, words in (
        ({"form": "gguf"}, "form is 'gguf', wanted one of hf, tinygpt, zip"),
        ({"form": "hf", "dtype": "float16"}, "dtype is 'float16', wanted float32 for form hf"),
        ({"form": "tinygpt", "dtype": "int4"}, "wanted float32 or float16"),
    ):
        with pytest.raises(ConfigError, match=words):
            export_model("nothing", place=tmp_path / "o", runs_dir=tmp_path, **options)
    check_error(
        cli("export", "nothing", tmp_path / "o", "--runs-dir", tmp_path), "no run 'nothing'"
    )


@pytest.mark.parametrize(
    ("form", "place", "message", "hint"),
    [
        (
            "hf",
            "a.zip",
            "a.zip has the name of a file",
            'give a folder, or write the file: form="zip"',
        ),
        ("hf", "file", "file exists and is no folder", "give a new folder"),
        (
            "zip",
            "file",
            "file exists and is no folder",
            "give a folder, or a new name that ends with .zip",
        ),
    ],
)
def test_a_place_of_another_kind_is_refused_with_what_to_give(tmp_path, form, place, message, hint):
    make_run(tmp_path / "runs")
    (tmp_path / "file").write_text("mine")
    with pytest.raises(CheckpointError) as caught:
        export_model("beer", form, tmp_path / place, runs_dir=tmp_path / "runs")
    assert caught.value.message.startswith(str(tmp_path / message))
    assert caught.value.hint == hint
    assert nothing_but(tmp_path, "runs", "file")
    assert (tmp_path / "file").read_text() == "mine"


def test_a_vocabulary_of_256_tokens_that_are_not_the_bytes_becomes_no_tinygpt(tmp_path):
    model = model_folder(tmp_path, activation="gelu")
    document = bpe(256)
    document["model"]["vocab"] = {c: 255 - i for c, i in document["model"]["vocab"].items()}
    (model / "tokenizer.json").write_text(json.dumps(document))
    with pytest.raises(CheckpointError, match="its tokens are not the bytes") as caught:
        export_model(str(model), "tinygpt", tmp_path / "out", runs_dir=tmp_path)
    assert caught.value.hint == 'export it with form="hf"'


def test_what_cannot_be_read_back_is_named_as_the_user_named_it(tmp_path, monkeypatch):
    def refuse(folder):
        raise CheckpointError(f"{folder}: it cannot be read", "try again")

    monkeypatch.setattr(exporting, "read_folder", refuse)
    make_run(tmp_path / "runs")
    with pytest.raises(CheckpointError) as caught:
        export_model("beer", "hf", tmp_path / "out", runs_dir=tmp_path / "runs")
    assert caught.value.message == f"{tmp_path / 'out'}: it cannot be read"


def test_a_model_of_the_gallery_is_no_run_to_pack(tmp_path):
    with pytest.raises(CheckpointError, match="is no run") as caught:
        export_model("shakespeare-small", "zip", tmp_path / "a.zip", runs_dir=tmp_path)
    assert caught.value.hint == 'export it with form="hf"'


def test_a_place_that_cannot_be_written_is_one_line(tmp_path):
    make_run(tmp_path / "runs")
    (tmp_path / "file").write_text("x")
    for form in ("hf", "zip"):
        with pytest.raises(CheckpointError) as caught:
            export_model("beer", form, tmp_path / "file" / "out", runs_dir=tmp_path / "runs")
        assert "\n" not in caught.value.message
        assert caught.value.hint == "give another place"


def test_room_is_checked_before_anything_is_written(tmp_path, monkeypatch):
    monkeypatch.setattr(places, "free_bytes", lambda _: 1000)
    make_run(tmp_path / "runs", activation="gelu")
    for form in ("hf", "tinygpt", "zip"):
        with pytest.raises(CheckpointError, match="the disk has 1000 bytes|the disk has 1.0 kB"):
            export_model("beer", form, tmp_path / "out", runs_dir=tmp_path / "runs")


def test_export_tells_where_how_large_and_how_near(tmp_path):
    make_run(tmp_path / "runs")
    result = cli("export", "beer", tmp_path / "out", "--to=zip", "--runs-dir", tmp_path / "runs")
    assert result.code == 0, result.err
    assert str(tmp_path / "out" / "beer.zip") in result.out
    assert ": token ids and logits are the same" in result.out
