"""Damaged and foreign checkpoints: each is refused in one line that names file, field and value."""

from __future__ import annotations

import json
import os
import pickle
import shutil

import numpy as np
import pytest

from posttrainllm.errors import CheckpointError
from posttrainllm.formats.tensor_file import MAX_HEADER_BYTES
from posttrainllm.runs.checkpoint import read_checkpoint
from saved import edit_json, read_tensor_file, rehash, save, write_tensor_file

WTE = "transformer.wte.weight"
BIAS = "transformer.h.0.attn.c_attn.bias"
LAST = "transformer.wte.weight"  # sorts last, so its data ends the file


@pytest.fixture(scope="module")
def original(tmp_path_factory):
    return save(tmp_path_factory.mktemp("original"))


@pytest.fixture
def folder(original, tmp_path):
    """A whole checkpoint, to be damaged."""
    return shutil.copytree(original, tmp_path / "step-000500")


def refusal(folder):
    with pytest.raises(CheckpointError) as caught:
        read_checkpoint(folder)
    assert "\n" not in caught.value.message
    assert len(caught.value.message) < 500
    assert caught.value.hint
    return caught.value.message


# --- config.json -----------------------------------------------------------------------------

CONFIGS = {
    "model_type": ("llama", "model_type is 'llama', wanted 'gpt2'"),
    "scale_attn_by_inverse_layer_idx": (True, "scale_attn_by_inverse_layer_idx is True"),
    "scale_attn_weights": (False, "scale_attn_weights is False"),
    "add_cross_attention": (True, "add_cross_attention is True"),
    "quantization_config": ({"bits": 4}, "quantization_config is {'bits': 4}"),
    "pruned_heads": ({"0": [1]}, "pruned_heads is"),
    "activation_function": ("relu", "activation_function is 'relu'"),
    "tie_word_embeddings": ("yes", "tie_word_embeddings must be true or false, got 'yes'"),
    "layer_norm_epsilon": (0.5, "layer_norm_epsilon must be a number from"),
    "n_layer": (10**18, "n_layer must be a whole number from 1 to 1,024, got 1000000000000000000"),
    "n_head": (3, "n_embd 8 is not divisible by model.n_head 3"),
    "n_embd": (0, "n_embd must be a whole number from 1 on, got 0"),
    "n_positions": (True, "n_positions must be a whole number from 1 on, got True"),
    "vocab_size": (..., "vocab_size is missing"),
    "n_inner": (-1, "n_inner must be a whole number from 1 on, got -1"),
}


@pytest.mark.parametrize("field", CONFIGS)
def test_config_that_means_something_else_is_refused_by_field(folder, field):
    value, message = CONFIGS[field]
    edit_json(folder / "config.json", **{field: value})
    rehash(folder)
    got = refusal(folder)
    assert f"{folder}/config.json: " in got
    assert message in got


@pytest.mark.parametrize(
    ("field", "value"),
    [("n_layer", 3), ("n_layer", 1), ("n_positions", 13), ("vocab_size", 255), ("n_inner", 8)],
)
def test_config_of_another_size_than_the_weights_is_refused(folder, field, value):
    edit_json(folder / "config.json", **{field: value})
    rehash(folder)
    assert "model.safetensors" in refusal(folder)


def test_largest_sizes_that_a_config_may_name_are_refused_quickly(folder):
    edit_json(
        folder / "config.json", n_layer=1024, n_embd=16384, n_positions=10**6, vocab_size=4 * 10**6
    )
    rehash(folder)
    assert "over the limit" in refusal(folder)


# --- weights ---------------------------------------------------------------------------------


def entry(name=WTE, **changes):
    """A change of one tensor's entry in the header."""

    def change(header, data):
        header[name].update(changes)
        return header, data

    return change


def values(name, *numbers):
    """A change of the first values of a tensor."""

    def change(header, data):
        start = header[name]["data_offsets"][0]
        new = np.array(numbers, "<f4").tobytes()
        return header, data[:start] + new + data[start + len(new) :]

    return change


def rename(old, new):
    def change(header, data):
        header[new] = header.pop(old)
        return header, data

    return change


def twice(header, data):
    size = header[BIAS]["data_offsets"][1] - header[BIAS]["data_offsets"][0]
    copied = {**header[BIAS], "data_offsets": [len(data), len(data) + size]}
    return {**header, BIAS.removeprefix("transformer."): copied}, data + bytes(size)


def overlap(header, data):
    begin, end = header[LAST]["data_offsets"]
    header[LAST]["data_offsets"] = [begin - 4, end - 4]
    return header, data[:-4]


def hole(header, data):
    begin, end = header[LAST]["data_offsets"]
    header[LAST]["data_offsets"] = [begin + 4, end + 4]
    return header, data + bytes(4)


WEIGHTS = {
    "nan": (values(BIAS, 1, np.nan), f"tensor '{BIAS}' holds NaN values"),
    "infinite": (values(BIAS, np.inf), f"tensor '{BIAS}' holds infinite values"),
    "missing": (rename(BIAS, "h.0.attn.masked_bias"), f"lacks the tensor '{BIAS}'"),
    "unexpected": (rename(BIAS, "h.9.attn.c_attn.bias"), "'h.9.attn.c_attn.bias', which no GPT-2"),
    "of another layer": (rename(BIAS, "h.02.attn.bias"), "'h.02.attn.bias', which no GPT-2"),
    "lines in a name": (rename(BIAS, "a\nb" * 99), r"'a\nba\nb"),
    "twice": (twice, "'h.0.attn.c_attn.bias' twice"),
    "overlap": (overlap, "overlaps the one before it"),
    "hole": (hole, "follows a hole"),
    "more bytes": (lambda h, d: (h, d + b"\0"), "has bytes that belong to no tensor"),
    "fewer bytes": (lambda h, d: (h, d[:-1]), "is cut off"),
    "no data": (lambda h, d: (h, b""), "is cut off"),
    "transposed": (entry(shape=[8, 256]), f"'{WTE}' is [8, 256], and config.json says [256, 8]"),
    "three dims": (entry(shape=[256, 8, 1]), "is [256, 8, 1], and config.json says [256, 8]"),
    "absurd shape": (entry(shape=[10**18, 10**18]), "does not fill data_offsets"),
    "absurd offsets": (entry(shape=[10**18], data_offsets=[0, 4 * 10**18]), "overlaps"),
    "long shape": (entry(shape=[1] * 10**5), "shape must be a list of at most 8 sizes"),
    "negative shape": (entry(shape=[-256, -8]), "shape must be a list"),
    "shape of booleans": (entry(shape=[True, 2048]), "shape must be a list"),
    "shape of text": (entry(shape="256"), "shape must be a list"),
    "offsets reversed": (entry(data_offsets=[8192, 0]), "does not fill data_offsets"),
    "three offsets": (entry(data_offsets=[0, 1, 2]), "data_offsets must be two positions"),
    "integers": (entry(dtype="I32"), f"'{WTE}' is I32, wanted F32, F16 or BF16"),
    "half as many": (entry(dtype="F16"), "F16 of shape [256, 8] does not fill"),
    "unknown dtype": (entry(dtype="F128"), "unknown dtype 'F128'"),
    "dtype of numbers": (entry(dtype=[32]), "unknown dtype [32]"),
    "extra field": (entry(stride=[1]), "must have dtype, shape and data_offsets"),
    "not an object": (lambda h, d: ({**h, WTE: 7}, d), "must have dtype, shape and data_offsets"),
    "no tensors": (lambda h, d: ({}, b""), "lacks the tensor 'transformer.wte.weight'"),
}


@pytest.mark.parametrize("case", WEIGHTS)
def test_weights_file_that_is_wrong_is_refused(folder, case):
    change, message = WEIGHTS[case]
    path = folder / "model.safetensors"
    write_tensor_file(path, *change(*read_tensor_file(path)))
    rehash(folder)
    assert message in refusal(folder)


HEADERS = {
    "empty": (b"", "is cut off: it has 0 bytes"),
    "short": (b"\x01\x02", "is cut off: it has 2 bytes"),
    "length only": ((100).to_bytes(8, "little"), "its header alone should have 100"),
    "endless": (b"\xff" * 8 + b"{}", "its header alone should have 18446744073709551615"),
    "text": (b"\x04" + bytes(7) + b"abcd", "is not JSON"),
    "not UTF-8": (b"\x04" + bytes(7) + b"\xff\xff\xff\xff", "is not UTF-8 at byte 0"),
    "a list": (b"\x02" + bytes(7) + b"[]", "must hold a JSON object"),
    "a name twice": (
        (17).to_bytes(8, "little") + b'{"a": 1, "a": 2} ',
        "the name 'a' stands there twice",
    ),
    "NaN": ((10).to_bytes(8, "little") + b'{"a": NaN}', "NaN is not a JSON number"),
    "deep": ((10**5).to_bytes(8, "little") + b"[" * 10**5, "is nested too deeply"),
    "digits": (
        (10**4 + 7).to_bytes(8, "little") + b'{"a": ' + b"9" * 10**4 + b"}",
        "Exceeds the limit",
    ),
    "header too large": (
        (MAX_HEADER_BYTES + 1).to_bytes(8, "little") + b" " * (MAX_HEADER_BYTES + 1),
        "over the limit of 8.4 MB",
    ),
}


@pytest.mark.parametrize("case", HEADERS)
def test_header_that_is_wrong_is_refused(folder, case):
    content, message = HEADERS[case]
    (folder / "model.safetensors").write_bytes(content)
    rehash(folder)
    assert message in refusal(folder)


# --- optimizer and trainer state -------------------------------------------------------------

OPTIMIZER = {
    "missing moment": (rename("adam.m.ln_f.bias", "adam.x"), "'adam."),
    "missing step": (rename("step", "steps"), "step"),
    "wrong shape": (entry("adam.m.wte.weight", shape=[2048]), "is [2048], wanted [256, 8]"),
    "nan": (values("adam.v.ln_f.bias", np.nan), "'adam.v.ln_f.bias' holds NaN values"),
    "negative": (values("adam.v.ln_f.bias", -1), "'adam.v.ln_f.bias' holds negative values"),
    "step type": (entry("step", dtype="F64"), "'step' is F64 of shape [1], wanted one I64"),
}


@pytest.mark.parametrize("case", OPTIMIZER)
def test_optimizer_file_that_is_wrong_is_refused(folder, case):
    change, message = OPTIMIZER[case]
    path = folder / "optimizer.safetensors"
    write_tensor_file(path, *change(*read_tensor_file(path)))
    rehash(folder)
    got = refusal(folder)
    assert got.startswith(str(path))
    assert message in got


STATES = {
    "format_version": (99, "has format_version 99; this version reads up to 1"),
    "step": (-1, "'step': Input should be greater than or equal to 0, got -1"),
    "seed": ("1", "'seed': Input should be a valid integer, got '1'"),
    "threads": (..., "'threads': Field required"),
    "corpus": ({"name": "a", "sha256": "b", "bytes": 1}, "'corpus.sha256': String should match"),
    "elapsed_s": (None, "'elapsed_s': Input should be a valid number, got None"),
    "surprise": (1, "'surprise': Extra inputs are not permitted, got 1"),
    "config": ({"preset": "tiny"}, "field required"),
}


@pytest.mark.parametrize("field", STATES)
def test_trainer_state_that_is_wrong_is_refused_by_field(folder, field):
    value, message = STATES[field]
    edit_json(folder / "trainer_state.json", **{field: value})
    rehash(folder)
    got = refusal(folder)
    assert "trainer_state.json" in got
    assert message in got


def test_optimizer_of_another_step_is_refused(folder):
    edit_json(folder / "trainer_state.json", step=501)
    rehash(folder)
    assert "is of step 500, and trainer_state.json of step 501" in refusal(folder)


def test_trainer_state_of_another_model_is_refused(folder):
    document = json.loads((folder / "trainer_state.json").read_text())
    document["config"]["model"]["n_head"] = 4
    edit_json(folder / "trainer_state.json", **document)
    rehash(folder)
    assert "describe different models" in refusal(folder)


def test_unknown_setting_in_the_state_is_refused_by_name(folder):
    document = json.loads((folder / "trainer_state.json").read_text())
    document["config"]["training"]["stepz"] = 4
    edit_json(folder / "trainer_state.json", **document)
    rehash(folder)
    assert "unknown setting 'training.stepz'; did you mean 'training.steps'?" in refusal(folder)


# --- hashes and files ------------------------------------------------------------------------


def test_changed_file_is_refused_by_its_hash(folder):
    edit_json(folder / "config.json", surprise=1)
    assert "config.json has" in refusal(folder)
    content = bytearray((folder / "tokenizer.json").read_bytes())
    content[100] ^= 1
    rehash(folder)
    (folder / "tokenizer.json").write_bytes(content)
    assert "tokenizer.json has changed since it was written" in refusal(folder)


def test_newer_format_is_an_error_and_no_reason_to_take_an_older_checkpoint(tmp_path):
    save(tmp_path / "checkpoints", 100)
    edit_json(save(tmp_path / "checkpoints", 200) / "hashes.json", format_version=2)
    with pytest.raises(CheckpointError, match="has format_version 2; this version reads") as caught:
        read_checkpoint(tmp_path)
    assert caught.value.hint == "update posttrainllm"


HASHES = {
    "not JSON": (b"\0" * 500, "is not complete"),
    "no files": (b'{"format_version": 1}', "files must be an object, got None"),
    "no version": (b"{}", "format_version must be a whole number from 1 on, got None"),
    "true version": (b'{"format_version": true}', "got True"),
    "few files": (b'{"format_version": 1, "files": {}}', "does not list config.json"),
}


@pytest.mark.parametrize("case", HASHES)
def test_hashes_that_are_wrong_are_refused(folder, case):
    content, message = HASHES[case]
    (folder / "hashes.json").write_bytes(content)
    assert message in refusal(folder)


@pytest.mark.parametrize(
    "name", ["../secret", "/etc/passwd", "..", "", "a\\b", "a\0b", "a\nb", "c:d", "x" * 10_000]
)
def test_hashes_that_name_files_elsewhere_are_refused(folder, name):
    document = json.loads((folder / "hashes.json").read_text())
    document["files"][name] = {"sha256": "0" * 64, "bytes": 1}
    (folder / "hashes.json").write_text(json.dumps(document))
    assert "is not the name of a file" in refusal(folder)


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "trainer_state.json"])
def test_link_that_leaves_the_folder_is_refused(folder, tmp_path, name):
    (folder / name).rename(tmp_path / "elsewhere")
    (folder / name).symlink_to(tmp_path / "elsewhere")
    assert f"{name} is a link that leaves its folder" in refusal(folder)


@pytest.mark.parametrize("name", ["hashes.json", "config.json", "optimizer.safetensors"])
def test_file_that_is_missing_a_pipe_a_folder_or_a_loop_is_refused(folder, name):
    path = folder / name
    path.unlink()
    assert name in refusal(folder)
    os.mkfifo(path)
    assert "is not a regular file" in refusal(folder)
    path.unlink()
    path.mkdir()
    assert "is not a regular file" in refusal(folder)
    path.rmdir()
    path.symlink_to(name)
    assert name in refusal(folder)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "weights.ckpt", "x.pkl"])
def test_pickle_is_refused_by_name_and_never_loaded(folder, name):
    for stale in ("hashes.json", "trainer_state.json", "model.safetensors"):
        (folder / stale).unlink()
    (folder / "optimizer.safetensors").unlink()
    (folder / name).write_bytes(pickle.dumps({"wte.weight": 1}))
    assert f"{name} is a pickle" in refusal(folder)


def test_weights_in_several_files_without_an_index_are_refused(folder):
    for stale in ("hashes.json", "trainer_state.json", "optimizer.safetensors"):
        (folder / stale).unlink()
    for number in (1, 2):
        shutil.copy(
            folder / "model.safetensors", folder / f"model-0000{number}-of-00002.safetensors"
        )
    (folder / "model.safetensors").unlink()
    assert "holds 2 safetensors files, and no model.safetensors.index.json" in refusal(folder)
    for number in (1, 2):
        (folder / f"model-0000{number}-of-00002.safetensors").unlink()
    assert "has no model.safetensors" in refusal(folder)


@pytest.mark.parametrize("name", ["nothing", "file.safetensors", "empty", "x" * 5000, "a\0b"])
def test_path_that_is_no_model_folder_is_refused(tmp_path, name):
    (tmp_path / "file.safetensors").write_bytes(b"")
    (tmp_path / "empty").mkdir()
    with pytest.raises(CheckpointError) as caught:
        read_checkpoint(tmp_path / name)
    assert "\n" not in caught.value.message
