"""Importing model folders: names, tokenizers, and what can be done with the run that comes out."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from cli_cases import check_error, cli, write_text
from hostile_folders import whole_shards
from import_cases import as_pair, bpe, logits_of, model_folder, tokens_for, write_bpe
from needs import require
from posttrainllm.config import EngineConfig, SamplingConfig, load_config
from posttrainllm.errors import CheckpointError, ConfigError, PosttrainError
from posttrainllm.runs.checkpoint import read_checkpoint
from posttrainllm.runs.folder import list_runs
from posttrainllm.runs.staging import HIDDEN, fit_name, stage_run
from posttrainllm.text.bpe import BPETokenizer
from posttrainllm.text.tokenizer import ByteTokenizer
from posttrainllm.text.tokenizer_files import load as load_tokenizer
from posttrainllm.training.importing import import_model
from posttrainllm.training.models import find_model, open_model
from posttrainllm.training.session import new_trainer, resumed_trainer
from posttrainllm.training.starting import load_settings, nearest_preset
from posttrainllm.training.trainer import training_batches
from test_tokenizer import TORTURE

require("tokenizers")

SMALL = ["--steps=4", "--batch-size=2", "--engine=numpy", "--quiet"]
QUICK = [
    "--set=training.sample_tokens=4",
    "--set=training.verdict_samples=1",
    "--set=training.final_windows=4",
]


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


def test_a_folder_that_somebody_is_filling_is_left_alone(tmp_path):
    inner: list[Path] = []

    def outer(folder: Path) -> None:
        inner.append(stage_run(tmp_path, None, "two", lambda other: (other / "x").touch()))
        assert folder.is_dir()

    assert stage_run(tmp_path, None, "one", outer).name == "one"
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


def test_a_tokenizer_of_another_vocabulary_is_refused(tmp_path):
    source = model_folder(tmp_path, n_vocab=300)
    with pytest.raises(CheckpointError, match="vocabulary of 300, and the tokenizer given 256"):
        import_model(source, runs_dir=tmp_path / "runs", tokenizer="bytes")
    ByteTokenizer().save(source)
    with pytest.raises(
        CheckpointError, match="the byte tokenizer, of 256 tokens, and the model has"
    ):
        import_model(source, runs_dir=tmp_path / "runs")


# --- what the run can do ---------------------------------------------------------------------


@pytest.fixture(scope="module")
def imported(tmp_path_factory) -> Path:
    """A folder of runs with one imported BPE model in it, "gpt"."""
    base = tmp_path_factory.mktemp("imported")
    import_model(model_folder(base, n_vocab=300), runs_dir=base / "runs", name="gpt")
    return base / "runs"


def test_an_imported_bpe_model_writes_and_is_measured(imported, tmp_path):
    runs = ["--runs-dir", imported, "--engine=numpy"]
    written = cli("generate", "gpt", "--prompt=the ", "--max-tokens=8", "--seed=3", *runs)
    assert written.code == 0, written.err
    assert written.out.startswith("the ")
    text = write_text(tmp_path)
    found = cli("eval", "gpt", f"--corpus={text}", "--windows=4", "--samples=1", "--json", *runs)
    assert found.code == 0, found.err
    tokens = load_tokenizer(imported / "gpt" / "checkpoints" / "step-000000", 300)
    lengths = [len(tokens.encode(line)) for line in text.read_text().splitlines(True)]
    assert sum(lengths) < text.stat().st_size, "pairs are merged"
    assert found.json["tokens"] == 4 * 12
    assert found.json["bits_per_byte"] < found.json["loss"] / np.log(2)


def test_writing_ends_where_the_model_says_so(imported):
    model = find_model("gpt", imported)
    assert model.tokenizer.end == 299
    opened = open_model("gpt", runs_dir=imported, engine=EngineConfig(name="numpy"))
    params = dict(opened.checkpoint.params)
    params["ln_f.weight"] = np.zeros(8, np.float32)  # every position says the same:
    params["ln_f.bias"] = np.ones(8, np.float32)
    params["wte.weight"][299] = 10  # the end
    opened.engine.load(params)
    greedy = SamplingConfig(temperature=0.0)
    assert opened.generate("the", max_tokens=8, sampling=greedy) == ""


def test_training_starts_from_an_imported_bpe_model_and_is_resumed(imported, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    text, runs = write_text(tmp_path), ["--runs-dir", imported]
    result = cli("train", text, "--from=gpt", "--name=tuned", *SMALL, *QUICK, *runs)
    assert result.code == 0, result.err
    tuned = read_checkpoint(imported / "tuned")
    assert (tuned.config.n_vocab, tuned.state.step) == (300, 4)
    saved = load_tokenizer(tuned.path, 300)
    assert isinstance(saved, BPETokenizer)
    assert saved.fingerprint == tuned.state.tokenizer
    (cached, _) = sorted((tmp_path / "cache" / "posttrainllm" / "tokens").iterdir())
    assert cached.name.endswith(f"{saved.fingerprint}.uint16")
    base = read_checkpoint(imported / "gpt")
    moved = np.abs(tuned.params["wte.weight"] - base.params["wte.weight"]).max()
    assert 0 < moved < 0.1
    assert cli("train", "--resume=tuned", "--steps=6", "--quiet", *runs).code == 0
    assert read_checkpoint(imported / "tuned").state.step == 6


def test_a_new_model_is_trained_on_a_tokenizer_of_a_folder_and_resumed_without_it(
    tmp_path, monkeypatch
):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    folder, text, runs = tmp_path / "bpe", write_text(tmp_path), ["--runs-dir", tmp_path / "runs"]
    folder.mkdir()
    write_bpe(folder, 300)
    as_pair(folder)
    sizes = ["--preset=tiny", "--n-ctx=16", "--name=new"]
    result = cli("train", text, f"--tokenizer={folder}", *sizes, *SMALL, *QUICK, *runs)
    assert result.code == 0, result.err
    assert read_checkpoint(tmp_path / "runs" / "new").config.n_vocab == 300
    shutil.rmtree(folder)  # the checkpoint has its own copy
    assert cli("train", "--resume=new", "--steps=6", "--quiet", *runs).code == 0
    check_error(cli("train", text, f"--tokenizer={folder}", *SMALL, *runs), "has no tokenizer.json")


def test_a_tokenizer_and_a_vocabulary_that_do_not_fit_are_refused(imported, tmp_path):
    write_bpe(tmp_path, 300)
    text = write_text(tmp_path)
    for given, words in (
        (["--set=model.n_vocab=290"], "vocabulary ends at 289"),
        (["--from=gpt"], "has a tokenizer of its own"),
    ):
        where = [f"--tokenizer={tmp_path}", "--runs-dir", imported]
        check_error(cli("train", text, *where, *SMALL, *given), words)


def test_an_imported_run_may_change_everything_but_its_shape_until_it_is_trained(tmp_path):
    runs, text = tmp_path / "runs", write_text(tmp_path)
    import_model(model_folder(tmp_path), runs_dir=runs, name="gpt")
    with pytest.raises(ConfigError, match="a run cannot change its model"):
        resumed_trainer("gpt", runs_dir=runs, changes={"model.n_layer": 3})
    arguments = ["--runs-dir", runs, *SMALL, *QUICK, "--learning-rate=0.01"]
    assert cli("train", text, "--resume=gpt", *arguments).code == 0
    state = read_checkpoint(runs / "gpt").state
    assert (state.step, state.corpus.bytes) == (4, text.stat().st_size)
    assert state.config.schedule.warmup_steps == 2
    check_error(
        cli("train", "--resume=gpt", "--steps=8", "--learning-rate=0.02", "--runs-dir", runs),
        "schedule.learning_rate",
    )
    (row,) = list_runs(runs)
    assert row.state == "finished"


def test_the_same_weights_as_a_start_give_the_same_first_loss_as_the_model_has(imported, tmp_path):
    """Step 1's loss is measured before the first update: it must be that of the model imported."""
    text = write_text(tmp_path)
    config = load_settings(
        flags={
            "data.corpus": [str(text)],
            "training.start_from": "gpt",
            "training.steps": 1,
            "data.batch_size": 2,
            "engine.name": "numpy",
        },
        runs_dir=imported,
    )
    trainer = new_trainer(config, runs_dir=tmp_path / "runs")
    outcome = trainer.train()
    (batch,) = training_batches(trainer.corpus, config, 1)
    found = find_model("gpt", imported).checkpoint
    logits = logits_of("numpy", found.config, found.params, batch.tokens).astype(np.float64)
    shifted = logits - logits.max(-1, keepdims=True)
    logp = shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))
    wanted = -np.take_along_axis(logp, batch.targets[..., None], -1).mean()
    assert outcome.losses[0] == pytest.approx(wanted, rel=1e-5)


def test_training_may_start_with_a_shorter_context(imported, tmp_path):
    flags = {
        "training.start_from": "gpt",
        "model.n_ctx": 5,
        "data.corpus": [str(write_text(tmp_path))],
    }
    config = load_settings(flags=flags, runs_dir=imported)
    assert config.model.n_ctx == 5
    trainer = new_trainer(config, runs_dir=tmp_path / "runs")
    whole = find_model("gpt", imported).checkpoint
    assert trainer.start["wpe.weight"].tolist() == whole.params["wpe.weight"][:5].tolist()
    short = tokens_for(config.model)
    got = logits_of("numpy", config.model, dict(trainer.start), short)
    assert np.allclose(got, logits_of("numpy", whole.config, whole.params, short), atol=1e-6)
    with pytest.raises(ConfigError, match=r"model\.n_ctx is 12 in gpt and cannot become 13"):
        load_settings(flags={**flags, "model.n_ctx": 13}, runs_dir=imported)


@pytest.mark.parametrize(
    ("sizes", "preset"),
    [
        ({"n_layer": 12, "n_head": 12, "n_embd": 768, "n_ctx": 1024, "n_vocab": 50257}, "gpt2"),
        ({"n_layer": 6, "n_head": 12, "n_embd": 768, "n_ctx": 1024, "n_vocab": 50257}, "gpt2"),
        ({"n_layer": 1, "n_head": 1, "n_embd": 4, "n_ctx": 8}, "tiny"),
        ({"n_layer": 36, "n_head": 20, "n_embd": 1280, "n_ctx": 1024}, "behemoth"),
    ],
)
def test_the_settings_of_a_foreign_model_are_the_nearest_presets(sizes, preset):
    config = load_config("tiny", flags={f"model.{key}": value for key, value in sizes.items()})
    assert nearest_preset(config.model) == preset


def test_every_preset_is_the_nearest_to_its_own_model():
    for name in ("tiny", "small", "medium", "large", "xl", "huge", "massive", "mega", "gpt2"):
        assert nearest_preset(load_config(name).model) == name


def test_import_tells_what_it_made_and_what_to_do_next(tmp_path):
    source = model_folder(tmp_path, n_vocab=300)
    result = cli("import", source, "--name=gpt", "--runs-dir", tmp_path / "runs")
    assert result.code == 0, result.err
    assert "300 tokens" in result.out
    assert "model folder, step 0, without optimizer state" in result.out
    assert f"generate gpt --runs-dir {tmp_path / 'runs'}" in result.out
    assert "--from gpt" in result.out
    found = cli("import", source, "--json", "--runs-dir", tmp_path / "runs").json
    assert (found["kind"], found["step"], found["moments"]) == ("model folder", 0, False)
    assert found["model"]["n_vocab"] == 300
