"""Checkpoints: what is written comes back bit for bit, and other libraries read it the same."""

from __future__ import annotations

import dataclasses
import json
import logging
import math
import shutil

import numpy as np
import pytest

from posttrainllm.config import PRESETS, load_config
from posttrainllm.errors import CheckpointError
from posttrainllm.formats.huggingface import parameter_shapes
from posttrainllm.formats.tensor_file import write_tensors
from posttrainllm.model import gradients_program, model_dims
from posttrainllm.runs import checkpoint
from posttrainllm.runs.checkpoint import (
    TrainerState,
    read_checkpoint,
    write_checkpoint,
)
from posttrainllm.text.tokenizer import ByteTokenizer
from saved import (
    edit_json,
    make_state,
    make_values,
    read_tensor_file,
    save,
    small_config,
    write_tensor_file,
)


def assert_same(got, wanted):
    assert list(got) == list(wanted)
    for name in wanted:
        assert got[name].dtype == np.float32
        assert got[name].tobytes() == wanted[name].tobytes(), name


def plain_model(folder, **model):
    """A folder as transformers would save it: no training state, no hashes."""
    saved = save(folder / "checkpoints", **model)
    for name in ("hashes.json", "trainer_state.json", "optimizer.safetensors"):
        (saved / name).unlink()
    return saved.rename(folder / "model")


# --- round trips -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "model",
    [
        {},
        {"tied": False},
        {"activation": "gelu"},
        {"n_inner": 20},
        {"n_layer": 11, "n_vocab": 7},
        {"n_layer": 1, "n_head": 1, "n_embd": 1, "n_ctx": 1, "n_vocab": 2},
    ],
    ids=str,
)
def test_checkpoint_comes_back_bit_for_bit(tmp_path, model):
    config = small_config(**model)
    values, state = make_values(config), make_state(123_456, config)
    path = write_checkpoint(tmp_path, state=state, **values, tokenizer=ByteTokenizer(), keep=1)
    assert path == tmp_path / "step-123456"
    back = read_checkpoint(path)
    assert back.config == config.model
    assert back.state == state
    assert back.notices == ()
    for part, wanted in values.items():
        assert_same(getattr(back, part), wanted)


def test_checkpoint_holds_the_files_that_the_layout_names(tmp_path):
    assert {path.name for path in save(tmp_path).iterdir()} == {
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
        "optimizer.safetensors",
        "trainer_state.json",
        "hashes.json",
    }
    assert [path.name for path in tmp_path.iterdir()] == ["step-000500"]


@pytest.mark.parametrize("tied", [True, False])
def test_parameter_shapes_are_those_of_the_program(tied):
    config = small_config(tied=tied, n_inner=20).model
    dims = model_dims(config, batch=1)
    wanted = {
        name: tuple(extent.bind(dims) for extent in buffer.shape)
        for name, buffer in gradients_program(config).instances(config.n_layer).items()
        if buffer.role == "param"
    }
    assert parameter_shapes(config) == wanted


def test_parameter_shapes_add_up_for_every_preset():
    for name in PRESETS:
        config = load_config(name).model
        counts = [math.prod(shape) for shape in parameter_shapes(config).values()]
        assert sum(counts) == config.parameters()


def test_moments_stay_on_the_disk_when_they_are_not_asked_for(tmp_path):
    back = read_checkpoint(save(tmp_path), moments=False)
    assert back.m is None
    assert back.v is None
    assert back.state == make_state().model_copy(update={"saved_at": back.state.saved_at})


def test_state_keeps_extreme_numbers_and_text(tmp_path):
    numbers = {"small": 5e-324, "large": 1.7e308, "pi": math.pi, "whole": 2**53 - 1, "none": None}
    name = "caf\N{LATIN SMALL LETTER E WITH ACUTE}\n\x00\udc80\"'"
    corpus = {"name": name, "sha256": "f" * 64, "bytes": 0}
    state = make_state(numbers=numbers, corpus=corpus)
    back = TrainerState.parse(json.loads(state.to_json()), "here")
    assert back == state


def test_state_writes_numbers_that_json_lacks_as_null():
    state = make_state(numbers={"a": math.nan, "b": [math.inf, 1.0], "c": {"d": -math.inf}})
    numbers = json.loads(state.to_json())["numbers"]
    assert numbers == {"a": None, "b": [None, 1.0], "c": {"d": None}}


def test_values_that_are_not_finite_are_not_saved(tmp_path):
    save(tmp_path, 100)
    config = small_config()
    values = make_values(config)
    values["params"]["h.1.mlp.c_fc.bias"][3] = np.nan
    with pytest.raises(CheckpointError, match=r"h\.1\.mlp\.c_fc\.bias holds values"):
        write_checkpoint(tmp_path, state=make_state(), **values, tokenizer=ByteTokenizer(), keep=1)
    assert [path.name for path in tmp_path.iterdir()] == ["step-000100"]


def test_safetensors_library_reads_what_was_written(tmp_path):
    library = pytest.importorskip("safetensors")
    path, values = save(tmp_path, tied=False), make_values(small_config(tied=False))
    with library.safe_open(path / "model.safetensors", "numpy") as file:
        assert file.metadata() == {"format": "pt"}
        stored = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (no mapping)
    names = {name: f"transformer.{name}" for name in values["params"]}
    names["lm_head.weight"] = "lm_head.weight"
    assert set(stored) == set(names.values())
    assert_same({name: stored[names[name]] for name in names}, values["params"])
    with library.safe_open(path / "optimizer.safetensors", "numpy") as file:
        assert file.get_tensor("step").tolist() == [500]
        for name, array in values["v"].items():
            assert file.get_tensor(f"adam.v.{name}").tobytes() == array.tobytes()


# --- transformers ----------------------------------------------------------------------------


@pytest.mark.parametrize("model", [{}, {"tied": False}, {"activation": "gelu"}], ids=str)
def test_transformers_loads_a_checkpoint_without_a_warning(tmp_path, require, model):
    torch, transformers = require("torch"), require("transformers")
    from posttrainllm.pytorch.gpt import GPT

    records = []
    handler = logging.Handler()
    handler.emit = records.append
    logging.getLogger("transformers").addHandler(handler)
    path = save(tmp_path, **model)
    try:
        theirs = transformers.AutoModelForCausalLM.from_pretrained(path)
        tokenizer = transformers.AutoTokenizer.from_pretrained(path)
    finally:
        logging.getLogger("transformers").removeHandler(handler)
    assert [r.getMessage() for r in records if r.levelno >= logging.WARNING] == []
    assert type(theirs).__name__ == "GPT2LMHeadModel"
    assert tokenizer("ROMEO: \N{SNOWMAN}")["input_ids"] == list("ROMEO: \N{SNOWMAN}".encode())

    saved = read_checkpoint(path)
    ours = GPT(saved.config)
    ours.load_state_dict({name: torch.from_numpy(array) for name, array in saved.params.items()})
    tokens = torch.arange(24).reshape(2, 12) * 7 % 256
    with torch.no_grad():
        difference = (theirs.eval()(tokens).logits - ours.eval()(tokens)).abs().max()
    assert difference <= 1e-4


def test_folder_that_transformers_saved_is_read(tmp_path, require):
    torch, transformers = require("torch"), require("transformers")
    config = transformers.GPT2Config(n_layer=1, n_head=2, n_embd=8, n_positions=6, vocab_size=9)
    theirs = transformers.GPT2LMHeadModel(config)
    theirs.save_pretrained(tmp_path / "lm")
    theirs.transformer.save_pretrained(tmp_path / "bare")  # keys without "transformer."
    theirs.to(torch.bfloat16).save_pretrained(tmp_path / "half")
    back = read_checkpoint(tmp_path / "lm")
    assert back.state is None
    assert back.m is None
    assert back.config.dropout == 0
    assert (back.config.n_vocab, back.config.n_ctx) == (9, 6)
    assert_same(read_checkpoint(tmp_path / "bare").params, back.params)
    rounded = {name: torch.from_numpy(a).bfloat16().float() for name, a in back.params.items()}
    half = read_checkpoint(tmp_path / "half")
    assert_same(half.params, {name: tensor.numpy() for name, tensor in rounded.items()})


# --- other folders ---------------------------------------------------------------------------


@pytest.mark.parametrize(("dtype", "size"), [("F16", "<f2"), ("BF16", "<u2")])
def test_half_precision_is_widened_exactly(tmp_path, dtype, size):
    folder = plain_model(tmp_path)
    header, data = read_tensor_file(folder / "model.safetensors")
    del header["__metadata__"]
    values = np.frombuffer(data, "<f4")
    half = values.astype("<f2") if dtype == "F16" else (values.view("<u4") >> 16).astype("<u2")
    for entry in header.values():
        entry["dtype"] = dtype
        entry["data_offsets"] = [offset // 2 for offset in entry["data_offsets"]]
    write_tensor_file(folder / "model.safetensors", header, half.tobytes())
    wide = half.astype("<f4") if dtype == "F16" else (half.astype("<u4") << 16).view("<f4")
    begin, end = (o // 2 for o in header["transformer.wpe.weight"]["data_offsets"])
    got = read_checkpoint(folder).params["wpe.weight"]
    assert got.ravel().tobytes() == wide[begin:end].tobytes()


def test_mask_buffers_and_a_stored_copy_of_the_head_are_left_aside(tmp_path):
    folder = plain_model(tmp_path)
    params = make_values(small_config())["params"]
    extra = {
        "h.0.attn.bias": np.zeros((1, 1, 12, 12), np.float32),
        "h.1.attn.masked_bias": np.zeros((), np.float32),
        "lm_head.weight": params["wte.weight"],
    }
    (folder / "model.safetensors").unlink()
    write_tensors(folder / "weights.safetensors", params | extra)  # any one name will do
    assert_same(read_checkpoint(folder).params, params)
    (folder / "weights.safetensors").unlink()
    extra["lm_head.weight"] = params["wte.weight"] + 1
    write_tensors(folder / "model.safetensors", params | extra)
    with pytest.raises(CheckpointError, match="differs from the token embedding"):
        read_checkpoint(folder)


@pytest.mark.parametrize("name", ["gelu_pytorch_tanh", "gelu_fast"])
def test_other_names_of_the_tanh_form_are_read(tmp_path, name):
    folder = plain_model(tmp_path)
    edit_json(folder / "config.json", activation_function=name)
    assert read_checkpoint(folder).config.activation == "gelu_new"


def test_cache_of_the_hub_is_read_through_its_links(tmp_path):
    model = plain_model(tmp_path)
    snapshot, blobs = tmp_path / "hub" / "snapshots" / "0a1b", tmp_path / "hub" / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    for number, path in enumerate(model.iterdir()):
        shutil.copy(path, blobs / str(number))
        (snapshot / path.name).symlink_to(f"../../blobs/{number}")
    assert_same(read_checkpoint(snapshot).params, read_checkpoint(model).params)


def test_checkpoint_can_be_copied_and_renamed(tmp_path):
    shutil.copytree(save(tmp_path / "a"), tmp_path / "mine")
    assert read_checkpoint(tmp_path / "mine").state.step == 500


def test_public_names_exist():
    assert all(hasattr(checkpoint, name) for name in checkpoint.__all__)
    assert dataclasses.is_dataclass(checkpoint.Checkpoint)
