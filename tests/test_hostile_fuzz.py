"""Model files with random damage: taken whole, with finite weights, or refused in one line that leaves nothing behind."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import tinygpt_files
from hostile_folders import whole_shards
from hostile_zips import zipped
from import_cases import model_folder, tinygpt
from needs import require
from posttrainllm.errors import CheckpointError
from posttrainllm.training.importing import import_model

require("tokenizers")


def examples(count: int):
    """How many examples of a property; the fast suite takes a few, the slow one many."""
    quiet = [HealthCheck.too_slow, HealthCheck.function_scoped_fixture]
    return settings(max_examples=count, suppress_health_check=quiet)


@pytest.fixture(scope="module")
def originals(tmp_path_factory) -> dict[str, Path]:
    """One whole model of every kind."""
    made = {}
    for kind, make in {
        "folder": lambda folder: model_folder(folder, n_vocab=300),
        "shards": whole_shards,
        "fp32": tinygpt,
        "fp16": lambda folder: tinygpt(folder, dtype="fp16"),
        "int4": lambda folder: tinygpt(folder, dtype="int4"),
        "zip": zipped(),
    }.items():
        made[kind] = make(tmp_path_factory.mktemp(kind))
    return made


def check(source: Path, runs: Path) -> bool:
    """Import; True when it was taken. Nothing but a CheckpointError of one line may come out."""
    refusal = None
    try:
        made = import_model(source, runs_dir=runs)
    except CheckpointError as error:
        refusal = error.message
    if refusal is not None:
        assert "\n" not in refusal
        assert len(refusal) < 600
        assert not runs.exists() or not list(runs.iterdir())
        return False
    assert all(np.isfinite(array).all() for array in made.checkpoint.params.values())
    assert made.tokenizer.n_vocab == made.checkpoint.config.n_vocab
    assert list(runs.iterdir()) == [made.path]
    return True


EDITS = st.lists(
    st.tuples(st.floats(0, 1), st.binary(max_size=6), st.integers(0, 6)), min_size=1, max_size=4
)


def damaged(content: bytes, edits, at_start: bool) -> bytes:
    """Bytes with pieces replaced, in the first 3,000 or anywhere."""
    for position, new, removed in edits:
        reach = min(len(content), 3000) if at_start else len(content)
        start = int(position * reach)
        content = content[:start] + new + content[start + removed :]
    return content


def damage_and_check(originals, tmp_path_factory, kind, edits, at_start, file) -> None:
    base = tmp_path_factory.mktemp("damaged")
    original = originals[kind]
    if original.is_dir():
        source = shutil.copytree(original, base / "model")
        files = sorted(
            path for path in source.iterdir() if path.suffix in (".json", ".safetensors")
        )
        target = files[file % len(files)]
    else:
        source = target = base / original.name
        shutil.copy(original, source)
    target.write_bytes(damaged(target.read_bytes(), edits, at_start))
    check(source, base / "runs")
    shutil.rmtree(base)


DAMAGE = {
    "kind": st.sampled_from(["folder", "shards", "fp32", "fp16", "int4", "zip"]),
    "edits": EDITS,
    "at_start": st.booleans(),
    "file": st.integers(0, 9),
}


@examples(60)
@given(**DAMAGE)
def test_random_damage_is_refused_or_harmless(
    originals, tmp_path_factory, kind, edits, at_start, file
):
    damage_and_check(originals, tmp_path_factory, kind, edits, at_start, file)


@pytest.mark.slow
@examples(600)
@given(**DAMAGE)
def test_much_random_damage_is_refused_or_harmless(
    originals, tmp_path_factory, kind, edits, at_start, file
):
    damage_and_check(originals, tmp_path_factory, kind, edits, at_start, file)


JSON_VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-2, 300)
    | st.integers()
    | st.floats(allow_nan=False)
    | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=5,
)

FIELDS = {
    "fp32": [("config", "layers"), ("config", "dModel"), ("config", "ctx"), ("config", "heads")],
    "int4": [("int4BlockSize",), ("int4ScalesBytes",), ("weightDtype",), ("stateByteLength",)],
    "fp16": [
        ("includesOptimizerState",),
        ("manifest",),
        ("config",),
        ("manifest", 3),
        ("manifest", 5, "shape"),
        ("manifest", 5, "floatOffset"),
        ("lossHistory",),
        ("config", "learningRate"),
    ],
    "config.json": [
        ("n_layer",),
        ("n_embd",),
        ("n_head",),
        ("n_positions",),
        ("vocab_size",),
        ("n_inner",),
        ("activation_function",),
        ("tie_word_embeddings",),
        ("layer_norm_epsilon",),
        ("scale_attn_weights",),
        ("pruned_heads",),
    ],
    "tokenizer.json": [
        ("model",),
        ("model", "vocab"),
        ("model", "merges"),
        ("model", "merges", 0),
        ("model", "vocab", "A"),
        ("model", "dropout"),
        ("model", "ignore_merges"),
        ("pre_tokenizer",),
        ("pre_tokenizer", "add_prefix_space"),
        ("normalizer",),
        ("added_tokens",),
        ("added_tokens", 0),
        ("added_tokens", 0, "id"),
        ("truncation",),
        ("post_processor",),
    ],
    "model.safetensors.index.json": [("weight_map",), ("metadata",)],
}
PLACES = [(file, place) for file, places in FIELDS.items() for place in places]


def put(document, place, value) -> None:
    """Set what stands at a place inside a JSON document."""
    for key in place[:-1]:
        document = document[key]
    document[place[-1]] = value


def write_and_check(originals, tmp_path_factory, where, value) -> None:
    file, place = where
    base = tmp_path_factory.mktemp("value")
    if file in ("fp32", "fp16", "int4"):
        source = base / "model.tinygpt"
        _, header, state = tinygpt_files.take_apart(originals[file].read_bytes())
        put(header, place, value)
        source.write_bytes(tinygpt_files.file_bytes(header, state))
    else:
        original = originals["shards" if "index" in file else "folder"]
        source = shutil.copytree(original, base / "model")
        document = json.loads((source / file).read_text("utf-8"))
        put(document, place, value)
        (source / file).write_text(json.dumps(document), encoding="utf-8")
    check(source, base / "runs")
    shutil.rmtree(base)


VALUES = {"where": st.sampled_from(PLACES), "value": JSON_VALUES}


@examples(60)
@given(**VALUES)
def test_any_value_in_any_field_is_read_or_refused(originals, tmp_path_factory, where, value):
    write_and_check(originals, tmp_path_factory, where, value)


@pytest.mark.slow
@examples(600)
@given(**VALUES)
def test_many_values_in_any_field_are_read_or_refused(originals, tmp_path_factory, where, value):
    write_and_check(originals, tmp_path_factory, where, value)


def test_the_originals_are_taken(originals, tmp_path):
    for kind, source in originals.items():
        assert check(source, tmp_path / kind), kind
