"""Models as int8 in one file: what rounding costs, what the bytes are, and that no file of another kind gets through."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors
from hypothesis import given, settings
from hypothesis import strategies as st

from model_cases import VARIANTS, model
from posttrainllm.config import GPTConfig
from posttrainllm.errors import CheckpointError
from posttrainllm.formats.huggingface import parameter_shapes
from posttrainllm.formats.quantised import (
    SCALE,
    dequantise,
    quantise,
    read_quantised,
    rounded,
    shared_axis,
    write_quantised,
)


def params_of(config: GPTConfig, seed: int = 0) -> dict[str, np.ndarray]:
    random = np.random.default_rng(seed)
    return {
        name: random.normal(0, 0.3, shape).astype(np.float32)
        for name, shape in parameter_shapes(config).items()
    }


def document(path: Path) -> tuple[dict[str, Any], bytes]:
    """The header of a file as a person reads it, and the bytes after it."""
    content = path.read_bytes()
    (length,) = struct.unpack("<Q", content[:8])
    return json.loads(content[8 : 8 + length]), content[8 + length :]


def rewrite(path: Path, header: dict[str, Any], data: bytes) -> None:
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)


@pytest.fixture
def written(tmp_path: Path) -> Path:
    path = tmp_path / "model.safetensors"
    write_quantised(path, model(), params_of(model()))
    return path


# ---- rounding -----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("axis", [0, 1])
def test_rounding_is_off_by_at_most_half_a_step(axis: int) -> None:
    random = np.random.default_rng(1)
    weights = (random.normal(size=(70, 50)) * 10 ** random.uniform(-6, 3, (70, 50))).astype("f4")
    values, scale = quantise(weights, axis)
    assert values.dtype == np.int8
    assert scale.dtype == np.float32
    assert scale.shape == ((1, 50) if axis == 0 else (70, 1))
    assert np.abs(values).max(axis=axis).tolist() == [127] * scale.size
    error = np.abs(dequantise(values, scale).astype("f8") - weights)
    assert (error <= 0.5 * scale * (1 + 1e-5)).all()


def test_nothing_but_zeros_stays_zero() -> None:
    weights = np.zeros((3, 4), np.float32)
    weights[1] = [1, -2, 0, 0.5]
    values, scale = quantise(weights, 1)
    assert scale.ravel().tolist() == [0, np.float32(2) / np.float32(127), 0]
    assert not dequantise(values, scale)[[0, 2]].any()


def test_the_smallest_numbers_are_no_problem() -> None:
    weights = np.full((2, 2), np.float32(1e-45))
    values, scale = quantise(weights, 0)
    assert np.isfinite(dequantise(values, scale)).all()


def test_a_scale_belongs_to_an_output_of_the_product() -> None:
    """x @ W sums over the first dimension of W; tables are looked up by row, and the head multiplies by rows of the same table."""
    for name in parameter_shapes(model(tied=False)):
        assert shared_axis(name) == (
            1 if name in ("wte.weight", "wpe.weight", "lm_head.weight") else 0
        )


# ---- files --------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_model_comes_back_as_rounding_left_it(tmp_path: Path, variant: str) -> None:
    config, path = VARIANTS[variant], tmp_path / "model.safetensors"
    params = params_of(config)
    hash_ = write_quantised(path, config, params)
    assert hash_.bytes == path.stat().st_size
    found = read_quantised(path)
    assert found.config == config
    assert found.tokenizer == "bytes"
    wanted = rounded(config, params)
    assert list(found.params) == list(wanted)
    for name, values in wanted.items():
        assert found.params[name].tobytes() == values.tobytes(), name
        assert values.tobytes() == params[name].tobytes() or values.ndim == 2


def test_a_file_is_what_its_description_says(written: Path) -> None:
    """Read by the safetensors library and by hand, as another reader would."""
    header, data = document(written)
    notes = header.pop("__metadata__")
    assert (notes["format_version"], notes["tokenizer"]) == ("1", "bytes")
    assert json.loads(notes["config"])["n_embd"] == model().n_embd
    params = params_of(model())
    floats_end = max(e["data_offsets"][1] for e in header.values() if e["dtype"] == "F32")
    with safetensors.safe_open(written, framework="np") as file:
        assert set(file.keys()) == set(header)
        for name, values in params.items():
            begin, end = header[name]["data_offsets"]
            if values.ndim == 1:
                assert header[name]["dtype"] == "F32"
                assert data[begin:end] == values.tobytes() == file.get_tensor(name).tobytes()
                continue
            assert header[name]["dtype"] == "I8"
            assert begin >= floats_end  # so that every float lies on a multiple of four
            stored, scale = file.get_tensor(name), file.get_tensor(name + SCALE)
            assert data[begin:end] == stored.tobytes()
            assert stored.tobytes() == quantise(values, shared_axis(name))[0].tobytes()
            assert scale.shape[shared_axis(name)] == 1
    matrices = sum(v.size for v in params.values() if v.ndim == 2)
    assert len(data) < 1.9 * matrices + 4 * sum(v.size for v in params.values() if v.ndim == 1)


def test_weights_that_are_not_finite_are_not_written(tmp_path: Path) -> None:
    params = params_of(model())
    params["h.1.mlp.c_fc.weight"][0, 0] = np.nan
    path = tmp_path / "model.safetensors"
    with pytest.raises(CheckpointError, match=r"h\.1\.mlp\.c_fc\.weight holds values that are not"):
        write_quantised(path, model(), params)
    assert not path.exists()


# ---- files that are no such file ----------------------------------------------------------------------------------------------


def change(header: dict[str, Any], key: str, value: Any) -> None:
    """Change a note, or a field of the configuration."""
    notes = header["__metadata__"]
    if key in notes:
        notes[key] = value
        return
    config = json.loads(notes["config"])
    config[key] = value
    notes["config"] = json.dumps(config)


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("format_version", "2", "has format_version '2'; this version reads 1"),
        ("format_version", "", "has format_version ''"),
        ("config", "{", "the config of .* is not JSON"),
        ("config", "[]", "must hold a JSON object"),
        ("config", "{}", "model_type is None, wanted 'gpt2'"),
        ("n_embd", 8, r"of shape .*10.*, wanted .* of shape .*8"),
        ("n_layer", 3, r"describes .* numbers, more than it holds|lacks the tensor 'h\.2"),
        ("n_layer", 1, r"holds the unknown tensor 'h\.1"),
        ("n_layer", 10**18, "n_layer"),
        ("vocab_size", 10**18, "vocab_size|n_vocab"),
        ("n_positions", 10**6, "numbers, more than it holds"),
        ("activation_function", "relu", "activation_function is 'relu'"),
    ],
)  # fmt: skip
def test_a_header_that_does_not_fit_is_refused_by_its_value(
    written: Path, key: str, value: Any, message: str
) -> None:
    header, data = document(written)
    change(header, key, value)
    rewrite(written, header, data)
    with pytest.raises(CheckpointError, match=message) as refused:
        read_quantised(written)
    assert "\n" not in refused.value.message


def test_a_plain_weights_file_is_told_apart(written: Path) -> None:
    header, data = document(written)
    header["__metadata__"] = {"format": "pt"}
    rewrite(written, header, data)
    with pytest.raises(CheckpointError, match="is no quantised model"):
        read_quantised(written)


def test_a_missing_or_foreign_tensor_is_named(written: Path) -> None:
    header, data = document(written)
    entry = header.pop("h.0.mlp.c_fc.weight.scale")
    header["h.0.mlp.c_fc.weight.scales"] = entry
    rewrite(written, header, data)
    with pytest.raises(CheckpointError, match=r"unknown tensor 'h\.0\.mlp\.c_fc\.weight\.scales'"):
        read_quantised(written)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf, 3e38])
def test_a_scale_that_makes_no_number_is_refused(written: Path, value: float) -> None:
    header, data = document(written)
    begin, _ = header["wte.weight.scale"]["data_offsets"]
    rewrite(written, header, data[:begin] + struct.pack("<f", value) + data[begin + 4 :])
    with pytest.raises(CheckpointError, match="wte.weight"):
        read_quantised(written)


def test_a_file_cut_anywhere_is_refused(written: Path) -> None:
    content = written.read_bytes()
    for size in [*range(0, len(content), 97), len(content) - 1]:
        written.write_bytes(content[:size])
        with pytest.raises(CheckpointError):
            read_quantised(written)
    written.write_bytes(content + b"\0")
    with pytest.raises(CheckpointError, match="bytes that belong to no tensor"):
        read_quantised(written)


SMALL = model(n_layer=1, n_embd=4, n_ctx=3, n_vocab=5)


@settings(max_examples=1000)
@given(data=st.data())
def test_any_changed_bytes_are_refused_or_a_model_of_numbers(
    data: st.DataObject, tmp_path_factory: Any
) -> None:
    path = tmp_path_factory.getbasetemp() / "changed.safetensors"
    path.unlink(missing_ok=True)
    write_quantised(path, SMALL, params_of(SMALL))
    content = bytearray(path.read_bytes())
    for _ in range(data.draw(st.integers(1, 4))):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    path.write_bytes(content)
    try:
        found = read_quantised(path)
    except CheckpointError:
        return
    assert all(np.isfinite(values).all() for values in found.params.values())
    assert {name: v.shape for name, v in found.params.items()} == parameter_shapes(found.config)
