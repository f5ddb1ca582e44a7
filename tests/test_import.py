"""Importing model folders: what they become, what it is called, and which tokenizer it has."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from cli_cases import cli, write_text
from hostile_folders import whole_shards
from hostile_zips import run_folder
from import_cases import QUICK, SMALL, as_pair, bpe, model_folder, tinygpt, write_bpe
from needs import require
from posttrainllm.errors import CheckpointError, PosttrainError
from posttrainllm.runs import checkpoint_folder
from posttrainllm.runs.checkpoint import read_checkpoint
from posttrainllm.runs.folder import Run, list_runs
from posttrainllm.runs.staging import HIDDEN, fit_name, stage_run
from posttrainllm.text.tokenizer import ByteTokenizer
from posttrainllm.text.tokenizer_files import load as load_tokenizer
from posttrainllm.training.importing import import_model
from saved import save
from test_tokenizer import TORTURE

require("tokenizers")


# --- what becomes of a folder ----------------------------------------------------------------


@pytest.mark.parametrize("make", [model_folder, whole_shards])
def test_a_model_folder_becomes_a_run_of_one_checkpoint(tmp_path, make):
    source = make(tmp_path)
    made = import_model(source, runs_dir=tmp_path / "runs", name="gpt")
    assert made.path == tmp_path / "runs" / "gpt"
    assert made.kind == "model folder"
    assert {path.name for path in made.path.iterdir()} == {"config.toml", "checkpoints"}
    assert made.checkpoint.path == made.path / "checkpoints" / "step-000000"
    assert {path.name for path in made.checkpoint.path.iterdir()} == {
        "config.json",
        "generation_config.json",
        "hashes.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
        "trainer_state.json",
    }
    theirs, ours = read_checkpoint(source), read_checkpoint(made.path)
    assert (ours.config, ours.m, ours.state.corpus) == (theirs.config, None, None)
    for name, array in theirs.params.items():
        assert ours.params[name].tobytes() == array.tobytes()
    (row,) = list_runs(tmp_path / "runs")
    assert (row.name, row.state, row.step) == ("gpt", "imported", 0)


def test_names_come_from_the_source_and_never_overwrite(tmp_path):
    source, runs = model_folder(tmp_path), tmp_path / "runs"
    names = [import_model(source, runs_dir=runs).path.name for _ in range(3)]
    assert names == ["model", "model-2", "model-3"]
    with pytest.raises(CheckpointError, match="already has a run 'model-2'"):
        import_model(source, runs_dir=runs, name="model-2")
    with pytest.raises(CheckpointError, match="must not hold path separators"):
        import_model(source, runs_dir=runs, name="../model")
    assert len(list(runs.iterdir())) == 3


def test_a_model_in_the_cache_of_the_hub_is_called_by_its_name(tmp_path):
    model = model_folder(tmp_path)
    hub = tmp_path / "hub" / "models--openai-community--gpt2"
    (hub / "snapshots" / "607a30d").mkdir(parents=True)
    (hub / "blobs").mkdir()
    for number, path in enumerate(model.iterdir()):
        path.rename(hub / "blobs" / str(number))
        (hub / "snapshots" / "607a30d" / path.name).symlink_to(f"../../blobs/{number}")
    made = import_model(hub / "snapshots" / "607a30d", runs_dir=tmp_path / "runs")
    assert made.path.name == "gpt2"


@pytest.mark.parametrize(
    ("base", "name"),
    [
        ("gpt2", "gpt2"),
        ("my model", "my model"),
        ("...", "imported"),
        ("a:b*c", "a-b-c"),
        ("-rf", "rf"),
        ("con", "imported"),
        ("x" * 300, "x" * 80),
        ("\u6f22" * 40, "\u6f22" * 26),
        ("x" * 79 + ". y", "x" * 79),
        ("bad\udcff", "bad"),
        ("\u00fcber", "\u00fcber"),
    ],
)
def test_any_name_of_a_file_is_made_fit_for_a_run(base, name):
    assert fit_name(base) == name


def test_a_run_and_a_checkpoint_are_taken_over_with_their_state(tmp_path):
    text, runs = write_text(tmp_path), tmp_path / "there"
    assert (
        cli("train", text, *SMALL, *QUICK, "--preset=tiny", "--runs-dir", runs, "--name=a").code
        == 0
    )
    whole = import_model(runs / "a", runs_dir=tmp_path / "here")
    assert whole.kind == "run"
    for path in (runs / "a").rglob("*"):
        if path.is_file() and path.name != ".lock":
            copied = whole.path / path.relative_to(runs / "a")
            assert copied.read_bytes() == path.read_bytes()
    one = import_model(runs / "a" / "checkpoints" / "step-000004", runs_dir=tmp_path / "here")
    assert one.checkpoint.state.step == 4
    assert one.checkpoint.m is not None


def test_a_run_that_is_being_trained_is_not_copied(tmp_path):
    run = Run(run_folder(tmp_path))
    with run.lock(), pytest.raises(CheckpointError, match="run beer is being trained"):
        import_model(run.path, runs_dir=tmp_path / "runs")
    assert import_model(run.path, runs_dir=tmp_path / "runs").kind == "run"


def test_a_full_disk_is_said_of_the_place_that_is_full(tmp_path, monkeypatch):
    source, runs = model_folder(tmp_path), tmp_path / "runs"
    monkeypatch.setattr(checkpoint_folder, "free_bytes", lambda _: 1000)
    with pytest.raises(CheckpointError) as caught:
        import_model(source, runs_dir=runs)
    assert caught.value.message.startswith(f"{runs} needs ")
    assert caught.value.hint == "free some space, or use another runs_dir"
    assert list(runs.iterdir()) == []


def test_a_model_of_the_gallery_needs_no_import(tmp_path):
    with pytest.raises(CheckpointError, match="shakespeare does not exist") as caught:
        import_model(Path("shakespeare"), runs_dir=tmp_path)
    assert caught.value.hint.endswith('needs no import: posttrainllm.load("shakespeare")')


def test_a_killed_import_leaves_nothing_that_is_listed_and_the_next_one_cleans_up(tmp_path):
    runs = tmp_path / "runs"
    program = (
        "import os, sys; from pathlib import Path; from posttrainllm.runs.staging import stage_run\n"
        "def fill(folder):\n"
        "    (folder / 'half').write_text('x'); os._exit(9)\n"
        "stage_run(Path(sys.argv[1]), None, 'gone', fill)"
    )
    done = subprocess.run([sys.executable, "-c", program, str(runs)], env=os.environ)
    assert done.returncode == 9
    assert [path.name.startswith(HIDDEN) for path in runs.iterdir()] == [True]
    assert list_runs(runs) == []
    import_model(model_folder(tmp_path), runs_dir=runs, name="next")
    assert [path.name for path in runs.iterdir()] == ["next"]


def test_a_name_that_cannot_be_taken_leaves_no_empty_run(tmp_path, monkeypatch):
    def fail(*_):
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(Path, "rename", fail)
    with pytest.raises(CheckpointError, match="cannot create a run in"):
        stage_run(tmp_path / "runs", None, "one", lambda folder: (folder / "x").touch())
    assert list((tmp_path / "runs").iterdir()) == []


def test_a_link_that_leads_nowhere_is_said_to_be_one(tmp_path):
    (tmp_path / "model").symlink_to("gone")
    with pytest.raises(CheckpointError, match="model is a link that leads nowhere"):
        import_model(tmp_path / "model", runs_dir=tmp_path / "runs")


def test_a_folder_that_somebody_is_filling_is_left_alone(tmp_path):
    inner: list[Path] = []

    def outer(folder: Path) -> None:
        inner.append(stage_run(tmp_path, None, "two", lambda other: (other / "x").touch())[0])
        assert folder.is_dir()

    assert stage_run(tmp_path, None, "one", outer)[0].name == "one"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["one", "two"]


# --- tokenizers ------------------------------------------------------------------------------


def test_vocab_and_merges_give_the_ids_of_transformers(tmp_path):
    transformers = require("transformers")
    write_bpe(tmp_path, 400)
    as_pair(tmp_path)
    ours = load_tokenizer(tmp_path, 400)
    theirs = transformers.GPT2Tokenizer(str(tmp_path / "vocab.json"), str(tmp_path / "merges.txt"))
    for text in TORTURE:
        assert ours.encode(text).tolist() == theirs(text)["input_ids"], text[:20]
        assert ours.decode(ours.encode(text)) == text
    assert ours.encode("the<|endoftext|>").tolist()[-1] == 399


def test_added_tokens_beside_the_pair_are_tokens(tmp_path):
    write_bpe(tmp_path, 400)
    as_pair(tmp_path)
    (tmp_path / "added_tokens.json").write_text('{"<pad>": 400}')
    assert load_tokenizer(tmp_path, 401).encode("a<pad>").tolist() == [97, 400]


def test_a_vocabulary_padded_for_speed_is_taken_and_its_ids_stand_for_nothing(tmp_path):
    write_bpe(tmp_path, 300)
    tokenizer = load_tokenizer(tmp_path, 320)
    assert tokenizer.n_vocab == 320
    assert tokenizer.decode([104, 310, 105, 319]) == "hi"


def test_an_added_token_that_the_model_has_no_number_for_is_refused_where_a_text_holds_it(tmp_path):
    document = bpe(300)
    document["added_tokens"].append({**document["added_tokens"][0], "id": 300, "content": "<pad>"})
    (tmp_path / "tokenizer.json").write_text(json.dumps(document))
    tokenizer = load_tokenizer(tmp_path, 300)
    assert tokenizer.n_vocab == 300
    assert tokenizer.encode("hello").size
    with pytest.raises(PosttrainError, match="the text holds '<pad>', token 300"):
        tokenizer.encode("hello <pad>")


def test_truncation_and_padding_of_a_file_have_no_effect(tmp_path):
    document = bpe(300)
    document["truncation"] = {
        "direction": "Right",
        "max_length": 4,
        "strategy": "LongestFirst",
        "stride": 0,
    }
    document["post_processor"] = {"type": "nonsense"}
    (tmp_path / "tokenizer.json").write_text(json.dumps(document))
    text = "the rain in Spain " * 50
    assert load_tokenizer(tmp_path).decode(load_tokenizer(tmp_path).encode(text)) == text


@pytest.mark.parametrize("given", ["bytes", "folder"])
def test_a_folder_without_a_tokenizer_takes_one_from_elsewhere(tmp_path, given):
    source = model_folder(tmp_path)
    (source / "tokenizer.json").unlink()
    with pytest.raises(CheckpointError, match=r"has no tokenizer\.json"):
        import_model(source, runs_dir=tmp_path / "runs")
    place = "bytes"
    if given == "folder":
        place = str(tmp_path / "tokenizer")
        os.mkdir(place)
        ByteTokenizer().save(Path(place))
    made = import_model(source, runs_dir=tmp_path / "runs", tokenizer=place)
    assert isinstance(made.tokenizer, ByteTokenizer)


@pytest.mark.parametrize("make", [run_folder, tinygpt, lambda path: save(path / "a")])
def test_a_model_with_a_tokenizer_of_its_own_takes_no_other(tmp_path, make):
    source = make(tmp_path)
    with pytest.raises(CheckpointError, match="which has a tokenizer of its own") as caught:
        import_model(source, runs_dir=tmp_path / "runs", tokenizer="bytes")
    assert caught.value.hint == "leave out tokenizer"
    assert list((tmp_path / "runs").iterdir()) == []


def test_a_tokenizer_is_given_by_its_folder(tmp_path):
    (tmp_path / "tokenizer.json").write_text("{}")
    for name, what in (("tokenizer.json", "is no folder"), ("byte", "does not exist")):
        with pytest.raises(CheckpointError, match=f"{name} {what}, wanted the folder of a tok"):
            load_tokenizer(tmp_path / name)


@pytest.mark.parametrize(("merges", "made"), [(0, 0), (5, 5), (9, 9)])
def test_merges_that_end_early_are_refused(tmp_path, merges, made):
    write_bpe(tmp_path, 300)  # 43 merges
    as_pair(tmp_path)
    lines = (tmp_path / "merges.txt").read_text("utf-8").split("\n")
    (tmp_path / "merges.txt").write_text("\n".join(lines[: 1 + merges]), encoding="utf-8")
    with pytest.raises(
        CheckpointError, match=rf"merges\.txt makes {made} of the 43 tokens"
    ) as caught:
        load_tokenizer(tmp_path, 300)
    assert caught.value.hint == "it is cut off: copy it again from where the model came"


def test_tokens_of_the_vocabulary_that_no_merge_makes_are_taken_when_they_are_few(tmp_path):
    write_bpe(tmp_path, 300)
    as_pair(tmp_path)
    vocabulary = json.loads((tmp_path / "vocab.json").read_text())
    (tmp_path / "vocab.json").write_text(json.dumps({**vocabulary, "<pad>": 300, "<s>": 301}))
    assert load_tokenizer(tmp_path, 302).encode("hi").size == 2


def test_a_tokenizer_of_another_vocabulary_is_refused(tmp_path):
    source = model_folder(tmp_path, n_vocab=300)
    with pytest.raises(CheckpointError, match="vocabulary of 300, and the tokenizer given 256"):
        import_model(source, runs_dir=tmp_path / "runs", tokenizer="bytes")
    ByteTokenizer().save(source)
    with pytest.raises(
        CheckpointError, match="the byte tokenizer, of 256 tokens, and the model has"
    ):
        import_model(source, runs_dir=tmp_path / "runs")
