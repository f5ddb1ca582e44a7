"""Importing single files, .tinygpt and .zip: what comes out of them, and that training goes on as if nothing had happened."""

from __future__ import annotations

import io
import json
import zipfile
from pathlib import Path

import numpy as np
import pytest

import posttrainllm
import tinygpt_files
from cli_cases import cli, write_text
from hostile_zips import pack, run_folder
from import_cases import apart, logits_of, model_folder, tinygpt, tokens_for
from posttrainllm.errors import CheckpointError
from posttrainllm.runs.checkpoint import read_checkpoint
from posttrainllm.runs.folder import Run
from posttrainllm.training.exporting import export_model
from posttrainllm.training.importing import import_model
from tinygpt_files import Sizes

QUICK = [
    "--set=training.sample_tokens=8",
    "--set=training.verdict_samples=1",
    "--set=training.final_windows=4",
]
TRAIN = [
    "--preset=tiny",
    "--engine=numpy",
    "--quiet",
    "--set=model.activation=gelu",
    "--set=schedule.kind=constant",
    "--set=schedule.warmup_steps=0",
    "--set=training.eval_windows=4",
    "--set=training.eval_every=2",
    *QUICK,
    "--n-ctx=8",
    "--batch-size=2",
    "--learning-rate=0.003",
]


def forward(sizes: Sizes, weights: dict[str, np.ndarray], tokens: np.ndarray) -> np.ndarray:
    """The model of a .tinygpt file in float64, from its own names: pre-LayerNorm, separate q, k, v, exact erf GELU, tied head."""
    from math import erf

    w = {name: array.astype(np.float64) for name, array in weights.items()}
    rows, length = tokens.shape
    width, heads = sizes.dModel, sizes.heads

    def norm(x, name):
        centred = x - x.mean(-1, keepdims=True)
        scaled = centred / np.sqrt((centred**2).mean(-1, keepdims=True) + 1e-5)
        return scaled * w[f"{name}.weight"] + w[f"{name}.bias"]

    def linear(x, name):
        return x @ w[f"{name}.weight"] + w[f"{name}.bias"]

    gelu = np.vectorize(lambda x: 0.5 * x * (1 + erf(x / 2**0.5)))
    x = w["token_embedding.weight"][tokens] + w["position_embedding.weight"][:length]
    for i in range(sizes.layers):
        block = f"blocks.{i}"
        n = norm(x, f"{block}.ln1")
        q, k, v = (
            linear(n, f"{block}.attn.{part}_proj").reshape(rows, length, heads, -1).swapaxes(1, 2)
            for part in "qkv"
        )
        scores = q @ k.swapaxes(-1, -2) / np.sqrt(width // heads)
        scores = np.where(np.tril(np.ones((length, length), bool)), scores, -np.inf)
        weight = np.exp(scores - scores.max(-1, keepdims=True))
        weight /= weight.sum(-1, keepdims=True)
        mixed = (weight @ v).swapaxes(1, 2).reshape(rows, length, width)
        x = x + linear(mixed, f"{block}.attn.o_proj")
        inner = gelu(linear(norm(x, f"{block}.ln2"), f"{block}.mlp.fc_in"))
        x = x + linear(inner, f"{block}.mlp.fc_out")
    return norm(x, "ln_final") @ w["token_embedding.weight"].T


# --- .tinygpt --------------------------------------------------------------------------------


def test_a_tinygpt_file_computes_what_its_layout_means(tmp_path):
    sizes = Sizes(dModel=8, dMlp=32)
    made = import_model(tinygpt(tmp_path, sizes), runs_dir=tmp_path / "runs")
    config, params = made.checkpoint.config, made.checkpoint.params
    tokens = tokens_for(config)
    wanted = forward(sizes, tinygpt_files.random_weights(sizes), tokens)
    assert apart(logits_of("numpy", config, params, tokens), wanted) <= 1e-4
    transposed = {
        name: array.T.copy() if name.endswith("attn.c_proj.weight") else array
        for name, array in params.items()
    }
    assert apart(logits_of("numpy", config, transposed, tokens), wanted) > 0.1, "it would show"


def test_an_fp32_file_becomes_a_run_at_its_step_with_its_settings_and_losses(tmp_path):
    made = import_model(tinygpt(tmp_path), runs_dir=tmp_path / "runs")
    assert made.path.name == "model"
    assert made.kind == ".tinygpt, fp32"
    state = made.checkpoint.state
    assert (state.step, state.corpus, made.checkpoint.path.name) == (200, None, "step-000200")
    config = state.config
    assert (config.data.batch_size, config.training.steps) == (4, 3000)
    assert (config.schedule.kind, config.schedule.learning_rate) == ("constant", 0.003)
    assert (config.optimizer.clip_norm, config.training.seed) == (1.5, 42)
    assert config.training.eval_every == 100
    assert made.checkpoint.m is not None
    lines = Run(made.path).metrics.read()
    assert [(line["step"], line["loss"], line["val_loss"]) for line in lines] == [
        (100, 3.5, 3.25),
        (200, 2.5, None),
    ]
    shown = cli("runs", "show", "model", "--runs-dir", tmp_path / "runs")
    assert shown.code == 0, shown.err


@pytest.mark.parametrize("dtype", ["fp16", "int4"])
def test_a_file_without_moments_becomes_a_run_at_step_0(tmp_path, dtype):
    made = import_model(tinygpt(tmp_path, dtype=dtype), runs_dir=tmp_path / "runs")
    assert (made.kind, made.checkpoint.state.step, made.checkpoint.m) == (
        f".tinygpt, {dtype}",
        0,
        None,
    )
    assert Run(made.path).metrics.read() == []


def test_settings_that_do_not_fit_are_left_to_the_preset(tmp_path):
    sizes = Sizes()
    weights = tinygpt_files.random_weights(sizes)
    odd = {**sizes.config(), "batchSize": -1, "learningRate": "fast", "seed": 2**60, "gradClip": 2}
    content = tinygpt_files.fp16(sizes, weights, config=odd)
    (tmp_path / "a.tinygpt").write_bytes(content)
    config = import_model(tmp_path / "a.tinygpt", runs_dir=tmp_path).checkpoint.state.config
    assert (config.data.batch_size, config.training.seed) == (16, 1)
    assert (config.optimizer.clip_norm, config.training.steps) == (2.0, 3000)


def test_training_goes_on_through_a_tinygpt_file_bit_for_bit(tmp_path):
    """Moments, step, seed, rate and batch all come through: the next steps are those that would have been."""
    text, runs = write_text(tmp_path), tmp_path / "runs"
    where = ["--runs-dir", runs]
    assert cli("train", text, *TRAIN, "--steps=6", "--name=a", *where).code == 0
    export_model("a", "tinygpt", tmp_path / "a.tinygpt", runs_dir=runs)
    import_model(tmp_path / "a.tinygpt", runs_dir=runs, name="b")
    before, after = read_checkpoint(runs / "a"), read_checkpoint(runs / "b")
    for part in ("params", "m", "v"):
        for name, array in getattr(before, part).items():
            assert getattr(after, part)[name].tobytes() == array.tobytes(), (part, name)
    assert cli("train", "--resume=a", "--steps=9", "--quiet", *where).code == 0
    on = ["--steps=9", "--quiet", "--engine=numpy", "--allow-change", *QUICK, *where]
    result = cli("train", text, "--resume=b", *on)
    assert result.code == 0, result.err
    for name, array in read_checkpoint(runs / "a").params.items():
        assert read_checkpoint(runs / "b").params[name].tobytes() == array.tobytes(), name


# --- .zip ------------------------------------------------------------------------------------


def repacked(content: bytes, path: Path, *, top: str, compression: int) -> Path:
    """The same files under another top folder, or none, and packed otherwise."""
    with (
        zipfile.ZipFile(io.BytesIO(content)) as old,
        zipfile.ZipFile(path, "w", compression) as new,
    ):
        for name in old.namelist():
            new.writestr(top + name.partition("/")[2], old.read(name))
    return path


@pytest.mark.parametrize("top", ["", "another name/"])
@pytest.mark.parametrize("compression", [zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED])
def test_a_run_comes_out_of_a_zip_unchanged_however_it_is_packed(tmp_path, top, compression):
    run = run_folder(tmp_path)
    path = repacked(pack(run), tmp_path / "beer.zip", top=top, compression=compression)
    made = import_model(path, runs_dir=tmp_path / "runs")
    assert (made.kind, made.path.name, made.notices) == ("run", "beer", ())
    files = {p.relative_to(run): p.read_bytes() for p in run.rglob("*") if p.is_file()}
    got = {p.relative_to(made.path): p.read_bytes() for p in made.path.rglob("*") if p.is_file()}
    assert got == files


def test_a_zip_of_a_model_folder_is_taken_too(tmp_path):
    model = model_folder(tmp_path, n_vocab=300)
    path = tmp_path / "gpt.zip"
    with zipfile.ZipFile(path, "w") as archive:
        for file in model.iterdir():
            archive.write(file, f"gpt/{file.name}")
        archive.writestr("gpt/README.md", "words")
    made = import_model(path, runs_dir=tmp_path / "runs")
    assert (made.kind, made.path.name) == ("model folder", "gpt")
    assert made.notices == ("left out a file that is no part of a run: 'README.md'",)
    assert {p.name for p in made.path.iterdir()} == {"config.toml", "checkpoints"}


def test_what_macos_puts_beside_the_files_of_a_zip_is_no_part_of_it(tmp_path):
    model = model_folder(tmp_path)
    path = tmp_path / "gpt.zip"
    with zipfile.ZipFile(path, "w") as archive:
        for file in model.iterdir():
            archive.write(file, f"gpt/{file.name}")
            archive.writestr(f"__MACOSX/gpt/._{file.name}", "resource fork")
        archive.writestr("gpt/._model.safetensors", "resource fork")
        archive.writestr("gpt/.DS_Store", "icons")
    made = import_model(path, runs_dir=tmp_path / "runs")
    assert (made.kind, made.notices) == ("model folder", ())


def test_a_model_folder_deep_inside_a_zip_is_named(tmp_path):
    path = tmp_path / "deep.zip"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("backup/README.md", "words")
        archive.writestr("backup/models/gpt/model.safetensors", b"")
    with pytest.raises(CheckpointError, match=r"'models/gpt/model\.safetensors' does not lie wh"):
        import_model(path, runs_dir=tmp_path / "runs")


def test_a_damaged_newest_checkpoint_in_a_zip_is_told_and_the_older_one_used(tmp_path):
    run = run_folder(tmp_path)
    newest = run / "checkpoints" / "step-000009"
    newest.mkdir()
    for file in (run / "checkpoints" / "step-000005").iterdir():
        (newest / file.name).write_bytes(file.read_bytes()[:-1])
    (tmp_path / "beer.zip").write_bytes(pack(run))
    made = import_model(tmp_path / "beer.zip", runs_dir=tmp_path / "runs")
    assert made.checkpoint.path.name == "step-000005"
    assert "using step-000005" in made.notices[0]


# --- opening without importing ---------------------------------------------------------------


def test_load_takes_every_kind_of_model(tmp_path):
    run, other = run_folder(tmp_path), tmp_path / "other"
    other.mkdir()
    (tmp_path / "beer.zip").write_bytes(pack(run))
    sources = {
        "run": run,
        "checkpoint": run / "checkpoints" / "step-000005",
        "zip": tmp_path / "beer.zip",
        "tinygpt": tinygpt(tmp_path),
        "folder": model_folder(other, n_vocab=300),
    }
    written = {}
    for kind, source in sources.items():
        model = posttrainllm.load(str(source), runs_dir=tmp_path / "none", engine="numpy")
        written[kind] = model.generate("the ", max_tokens=6, seed=2)
        assert written[kind]
    assert written["run"] == written["checkpoint"] == written["zip"]
    assert not (tmp_path / "none").exists()


def test_generate_takes_a_file_as_it_is(tmp_path):
    result = cli("generate", tinygpt(tmp_path), "--prompt=a", "--max-tokens=3", "--engine=numpy")
    assert result.code == 0, result.err
    assert json.dumps(result.out)
