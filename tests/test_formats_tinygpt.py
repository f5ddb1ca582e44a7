""".tinygpt: files built to the layout give the weights bit for bit, and what is written is what a reader of it expects."""

from __future__ import annotations

import struct

import numpy as np
import pytest

import tinygpt_files as files
from posttrainllm.config import GPTConfig
from posttrainllm.errors import CheckpointError
from posttrainllm.formats.huggingface import parameter_shapes
from posttrainllm.formats.tinygpt import TinyGPT, differences, read_tinygpt, write_tinygpt
from posttrainllm.formats.tinygpt_layout import state_bytes
from tinygpt_files import Sizes

SIZES = [
    Sizes(),
    Sizes(ctx=1, layers=1, heads=1, dModel=1, dMlp=1),
    Sizes(ctx=7, layers=3, heads=3, dModel=9, dMlp=36),
]


def moments(sizes):
    m = files.random_weights(sizes, 1)
    v = {name: np.square(array) for name, array in files.random_weights(sizes, 2).items()}
    return m, v


def write(tmp_path, content):
    path = tmp_path / "model.tinygpt"
    path.write_bytes(content)
    return path


def assert_bits(got, wanted):
    assert set(got) == set(wanted)
    for name, array in wanted.items():
        assert got[name].dtype == np.float32
        assert got[name].shape == array.shape, name
        assert got[name].tobytes() == array.tobytes(), name


def config_of(sizes):
    return GPTConfig(
        n_layer=sizes.layers,
        n_head=sizes.heads,
        n_embd=sizes.dModel,
        n_ctx=sizes.ctx,
        n_inner=None if sizes.dMlp == 4 * sizes.dModel else sizes.dMlp,
        activation="gelu",
    )


# --- reading ---------------------------------------------------------------------------------


@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_fp32_gives_weights_and_moments_bit_for_bit(tmp_path, sizes, version):
    weights, (m, v) = files.random_weights(sizes), moments(sizes)
    content = bytearray(files.fp32(sizes, weights, m, v))
    content[4:8] = struct.pack("<I", version)
    model = read_tinygpt(write(tmp_path, content))
    assert model.config == config_of(sizes)
    assert (model.step, model.dtype) == (200, "fp32")
    assert_bits(model.params, files.as_gpt2(sizes, weights))
    assert_bits(model.m, files.as_gpt2(sizes, m))
    assert_bits(model.v, files.as_gpt2(sizes, v))
    assert list(model.params) == list(parameter_shapes(model.config))
    assert model.training["learningRate"] == 0.003
    assert model.history[0] == {"step": 100, "train": 3.5, "val": 3.25}


@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_fp16_is_widened_exactly(tmp_path, sizes):
    weights = files.random_weights(sizes)
    model = read_tinygpt(write(tmp_path, files.fp16(sizes, weights)))
    wide = {name: array.astype("<f2").astype("<f4") for name, array in weights.items()}
    assert_bits(model.params, files.as_gpt2(sizes, wide))
    assert (model.m, model.v, model.step, model.dtype) == (None, None, 0, "fp16")


@pytest.mark.parametrize("block", [64, 2, 32])
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_int4_is_nibble_less_eight_times_scale(tmp_path, sizes, block):
    weights = files.random_weights(sizes)
    weights["ln_final.bias"][:] = 0  # a block of zeros has the scale 0
    content, values = files.int4(sizes, weights, block)
    model = read_tinygpt(write(tmp_path, content))
    assert_bits(model.params, files.as_gpt2(sizes, values))
    assert (model.m, model.dtype) == (None, "int4")


def test_the_data_is_in_out_whatever_the_manifest_declares(tmp_path):
    sizes = Sizes()
    weights, (m, v) = files.random_weights(sizes), moments(sizes)
    honest = files.manifest(sizes)
    for entry, (_, shape) in zip(honest, files.names(sizes), strict=True):
        entry["shape"] = list(shape)
    declared = read_tinygpt(write(tmp_path, files.fp32(sizes, weights, m, v)))
    stored = read_tinygpt(write(tmp_path, files.fp32(sizes, weights, m, v, manifest=honest)))
    assert_bits(declared.params, stored.params)
    square = weights["blocks.0.attn.o_proj.weight"]
    assert declared.params["h.0.attn.c_proj.weight"].tolist() == square.tolist()


@pytest.mark.parametrize(
    "left_out",
    [
        {"manifest": ...},
        {"stateByteLength": ...},
        {"includesOptimizerState": ...},
        {"lossHistory": ..., "finalLoss": ..., "sample": ..., "bestVal": ..., "savedAt": ...},
        {"weightDtype": "fp32"},
        {"project": "https://example.org", "published": True},
    ],
    ids=str,
)
def test_fields_that_older_and_other_writers_leave_out_or_add_are_not_missed(tmp_path, left_out):
    sizes = Sizes()
    weights, (m, v) = files.random_weights(sizes), moments(sizes)
    model = read_tinygpt(write(tmp_path, files.fp32(sizes, weights, m, v, **left_out)))
    assert_bits(model.params, files.as_gpt2(sizes, weights))


def test_a_weights_only_file_without_a_dtype_is_fp16(tmp_path):
    sizes = Sizes()
    weights = files.random_weights(sizes)
    content = files.fp16(sizes, weights, weightDtype=...)
    assert read_tinygpt(write(tmp_path, content)).dtype == "fp16"


# --- writing ---------------------------------------------------------------------------------


def model_of(sizes, *, dtype="fp32", with_moments=True, seed=0):
    m, v = moments(sizes)
    given = (files.as_gpt2(sizes, m), files.as_gpt2(sizes, v)) if with_moments else (None, None)
    params = files.as_gpt2(sizes, files.random_weights(sizes, seed))
    training = {key: value for key, value in sizes.config().items() if key not in vars(sizes)}
    return TinyGPT(config_of(sizes), params, *given, 200, dtype, training, [])


@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_fp32_is_written_as_a_reader_of_the_layout_expects(tmp_path, sizes):
    path = tmp_path / "out.tinygpt"
    found = write_tinygpt(path, model_of(sizes), {"sample": "caf\u00e9"})
    content = path.read_bytes()
    assert found.bytes == len(content)
    version, header, state = files.take_apart(content)
    assert version == header["version"] == 2
    assert header["config"] == sizes.config()
    assert header["manifest"] == files.manifest(sizes)
    assert header["includesOptimizerState"] is True
    assert "weightDtype" not in header
    assert header["stateByteLength"] == len(state) == state_bytes(config_of(sizes), "fp32")
    assert header["sample"] == "caf\u00e9"
    assert set(header) >= {"savedAt", "lossHistory", "finalLoss", "bestVal"}
    weights, (m, v) = files.random_weights(sizes), moments(sizes)
    assert content == files.file_bytes(
        content[12 : len(content) - len(state)],
        struct.pack("<i", 200)
        + b"".join(
            part[name].tobytes() for name, _ in files.names(sizes) for part in (weights, m, v)
        ),
    )


@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_fp16_is_written_as_a_reader_of_the_layout_expects(tmp_path, sizes):
    path = tmp_path / "out.tinygpt"
    write_tinygpt(path, model_of(sizes, dtype="fp16"))
    _, header, state = files.take_apart(path.read_bytes())
    assert (header["weightDtype"], header["includesOptimizerState"]) == ("fp16", False)
    assert header["stateByteLength"] == len(state)
    assert struct.unpack_from("<i", state) == (200,)
    halves = np.frombuffer(state, "<f2", offset=4)
    weights = files.random_weights(sizes)
    for entry, (name, shape) in zip(header["manifest"], files.names(sizes), strict=True):
        start = entry["floatOffset"]
        got = halves[start : start + int(np.prod(shape))]
        assert got.tobytes() == weights[name].astype("<f2").tobytes(), name
    assert halves.size == sum(int(np.prod(shape)) for _, shape in files.names(sizes))


def test_what_was_written_reads_back_bit_for_bit(tmp_path):
    model = model_of(SIZES[2])
    write_tinygpt(tmp_path / "a.tinygpt", model)
    back = read_tinygpt(tmp_path / "a.tinygpt")
    for part in ("params", "m", "v"):
        assert_bits(getattr(back, part), getattr(model, part))
    assert (back.step, back.config, back.training) == (200, model.config, model.training)


def test_moments_that_are_not_there_are_written_as_zeros(tmp_path):
    write_tinygpt(tmp_path / "a.tinygpt", model_of(Sizes(), with_moments=False))
    back = read_tinygpt(tmp_path / "a.tinygpt")
    assert not any(array.any() for array in [*back.m.values(), *back.v.values()])


def test_a_weight_that_float16_cannot_hold_is_refused_by_name(tmp_path):
    model = model_of(Sizes(), dtype="fp16")
    model.params["h.1.mlp.c_fc.bias"][3] = -70000
    with pytest.raises(
        CheckpointError, match=r"'blocks\.1\.mlp\.fc_in\.bias' holds 70000"
    ) as caught:
        write_tinygpt(tmp_path / "a.tinygpt", model)
    assert caught.value.hint == "export it as float32"


def test_what_the_format_cannot_say_is_listed_by_field():
    config = GPTConfig(n_layer=1, n_head=1, n_embd=8, n_ctx=4, n_vocab=300, tied=False)
    assert differences(config) == [
        "n_vocab is 300, and a .tinygpt model has 256",
        "tied is False, and a .tinygpt model has True",
        "activation is 'gelu_new', and a .tinygpt model has 'gelu'",
    ]
    assert differences(config_of(Sizes())) == []
