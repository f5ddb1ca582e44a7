"""What can be done with an imported model: writing, measuring, training on it, on its tokenizer, from a shorter context."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest

from cli_cases import check_error, cli, write_text
from import_cases import QUICK, SMALL, as_pair, logits_of, model_folder, tokens_for, write_bpe
from needs import require
from posttrainllm.config import EngineConfig, load_config, replace
from posttrainllm.errors import ConfigError
from posttrainllm.lab import diagnose as lab
from posttrainllm.runs.checkpoint import read_checkpoint
from posttrainllm.runs.folder import Run, list_runs
from posttrainllm.text.bpe import BPETokenizer
from posttrainllm.text.tokenizer_files import load as load_tokenizer
from posttrainllm.training.importing import import_model
from posttrainllm.training.models import find_model, open_model
from posttrainllm.training.session import new_trainer, resumed_trainer
from posttrainllm.training.starting import load_settings, nearest_preset
from posttrainllm.training.step import training_batches

require("tokenizers")


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
    assert opened.generate("the", max_tokens=8, temperature=0) == ""


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
    check_error(cli("train", text, f"--tokenizer={folder}", *SMALL, *runs), "bpe does not exist")


def test_an_imported_model_is_diagnosed_from_its_own_weights(tmp_path, monkeypatch):
    import_model(model_folder(tmp_path, n_vocab=300), runs_dir=tmp_path / "runs", name="gpt")
    run = Run(tmp_path / "runs" / "gpt")
    small = {"data.batch_size": 1, "engine.name": "numpy", "schedule.warmup_steps": 0}
    run.write_config(replace(run.config(), small))

    def drawn(*_: object) -> None:
        raise AssertionError("its weights are in its checkpoint")

    monkeypatch.setattr(lab, "initial_parameters", drawn)
    found = lab.diagnose(run, steps=2)
    assert all(probe.loss is not None for probe in found.probes)
    assert found.counting[0].loss == pytest.approx(np.log(300))


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
            "training.sample_tokens": 0,
            "training.final_windows": 4,
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


def test_a_large_model_that_is_taught_a_small_text_once_is_no_mistake(imported, tmp_path):
    text = write_text(tmp_path)
    where = [
        "--runs-dir",
        tmp_path / "runs",
        "--steps=2",
        "--batch-size=1",
        "--engine=numpy",
        *QUICK,
    ]
    sizes = ["--preset=tiny", "--set=model.n_embd=96", "--n-ctx=12"]
    drawn = cli("train", text, *sizes, *where, "--name=drawn")
    assert "far too large for the text" in drawn.out
    again = cli("train", text, f"--from={tmp_path / 'runs' / 'drawn'}", *where)
    assert again.code == 0, again.err
    assert "far too large" not in again.out
