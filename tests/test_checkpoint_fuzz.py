"""Checkpoints with random damage: refused in one line or read whole, never a traceback."""

from __future__ import annotations

import json
import shutil

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from posttrainllm.errors import CheckpointError
from posttrainllm.formats.huggingface import parse_config
from posttrainllm.formats.tensor_file import byte_count, read_header
from posttrainllm.runs.checkpoint import read_checkpoint
from saved import rehash, save, write_tensor_file


@pytest.fixture(scope="module")
def original(tmp_path_factory):
    return save(tmp_path_factory.mktemp("original"))


def attempt(function, *arguments):
    """Return (result, None), or (None, line) when the checkpoint was refused."""
    try:
        return function(*arguments), None
    except CheckpointError as error:
        return None, error.message


FILES = ["config.json", "model.safetensors", "optimizer.safetensors", "trainer_state.json"]


@settings(max_examples=100)
@given(
    name=st.sampled_from([*FILES, "hashes.json", "tokenizer.json"]),
    position=st.floats(0, 1, exclude_max=True),
    flip=st.integers(1, 255),
)
def test_any_changed_byte_is_noticed(original, tmp_path_factory, name, position, flip):
    folder = shutil.copytree(original, tmp_path_factory.mktemp("changed") / "c")
    content = bytearray((folder / name).read_bytes())
    content[int(position * len(content))] ^= flip
    (folder / name).write_bytes(content)
    _, line = attempt(read_checkpoint, folder)
    if line is None:  # only white space of hashes.json may change without being noticed
        assert name == "hashes.json"
        assert json.loads(content) == json.loads((original / name).read_text())
    assert "\n" not in (line or "")


@settings(max_examples=200)
@given(
    name=st.sampled_from(FILES),
    edits=st.lists(
        st.tuples(st.floats(0, 1), st.binary(max_size=6), st.integers(0, 6)), max_size=4
    ),
    at_start=st.booleans(),
)
def test_foreign_bytes_never_give_a_traceback(original, tmp_path_factory, name, edits, at_start):
    """The hashes are made to agree, so that the checks behind them are the ones at work."""
    folder = shutil.copytree(original, tmp_path_factory.mktemp("foreign") / "c")
    content = (folder / name).read_bytes()
    for position, new, removed in edits:
        reach = min(len(content), 3000) if at_start else len(content)
        start = int(position * reach)
        content = content[:start] + new + content[start + removed :]
    (folder / name).write_bytes(content)
    rehash(folder)
    back, line = attempt(read_checkpoint, folder)
    assert "\n" not in (line or "")
    assert back is None or all(np.isfinite(array).all() for array in back.params.values())


JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=5,
)


@settings(max_examples=200)
@given(data=st.data())
def test_any_value_in_any_field_is_read_or_refused(original, data):
    document = json.loads((original / "config.json").read_text())
    field = data.draw(st.sampled_from(sorted(document)))
    document[field] = data.draw(JSON_VALUES)
    _, line = attempt(parse_config, document, original / "config.json")
    assert "\n" not in (line or "")


@settings(max_examples=200)
@given(
    header=st.dictionaries(
        st.sampled_from(["a", "b", "__metadata__"]),
        st.one_of(
            JSON_VALUES,
            st.fixed_dictionaries(
                {
                    "dtype": st.sampled_from(["F32", "I64", "F16", "U8", "?"]),
                    "shape": st.lists(st.integers(-1, 4) | st.integers(), max_size=3),
                    "data_offsets": st.lists(st.integers(-1, 64) | st.integers(), max_size=3),
                }
            ),
        ),
    ),
    size=st.integers(0, 64),
)
def test_tensors_of_any_header_lie_inside_the_file(tmp_path_factory, header, size):
    path = tmp_path_factory.mktemp("header") / "t.safetensors"
    write_tensor_file(path, header, bytes(size))
    entries, line = attempt(read_header, path)
    assert "\n" not in (line or "")
    end = path.stat().st_size
    assert all(0 < e.start <= e.start + byte_count(e) <= end for e in (entries or {}).values())
