"""Tensors that several processes wrote, put together without torch: whole again, or refused by file, tensor and row."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from posttrainllm.errors import CheckpointError
from posttrainllm.formats.parts import part_files, part_name, read_parts
from posttrainllm.formats.tensor_file import write_tensors

SHAPES = {"adam.m.wte.weight": (5, 3), "adam.v.wte.weight": (5, 3), "adam.m.ln_f.bias": (1,)}


def whole() -> dict[str, np.ndarray]:
    random = np.random.default_rng(1)
    return {name: random.random(shape, np.float32) for name, shape in SHAPES.items()}


def write(
    folder: Path, number: int, count: int, rows: dict[str, tuple[int, int]], **more: object
) -> None:
    """Part ``number`` of ``count``: of each tensor the rows from first to last, exclusive."""
    values = whole()
    parts = {name: values[name][first:last] for name, (first, last) in rows.items()}
    places = {
        name: {"saved_offsets": [first] + [0] * (len(SHAPES[name]) - 1)}
        for name, (first, _) in rows.items()
    }
    places.update(more)
    metadata = {"DCP_SHARDING_INFO": json.dumps(places)}
    write_tensors(folder / part_name(number, count), parts, metadata)


def write_both(folder: Path, cut: int = 3) -> None:
    names = list(SHAPES)
    write(folder, 1, 2, {names[0]: (0, cut), names[1]: (0, cut), names[2]: (0, 1)})
    write(folder, 2, 2, {names[0]: (cut, 5), names[1]: (cut, 5)})


@pytest.mark.parametrize("cut", [1, 3, 4])
def test_parts_become_whole_tensors_bit_by_bit(tmp_path, cut):
    write_both(tmp_path, cut)
    assert [path.name for path in part_files(tmp_path)] == [part_name(1, 2), part_name(2, 2)]
    found = read_parts(tmp_path, SHAPES)
    assert found.keys() == SHAPES.keys()
    for name, value in whole().items():
        assert np.array_equal(found[name], value)


def refused(folder: Path, *words: str) -> None:
    with pytest.raises(CheckpointError) as error:
        read_parts(folder, SHAPES)
    assert "\n" not in error.value.message
    for word in words:
        assert word in error.value.message


def test_a_part_that_is_missing_or_of_another_set_is_named(tmp_path):
    write_both(tmp_path)
    (tmp_path / part_name(1, 2)).rename(tmp_path / part_name(1, 3))
    refused(tmp_path, part_name(2, 2), "does not belong to the others")
    (tmp_path / part_name(1, 3)).rename(tmp_path / part_name(1, 2))
    (tmp_path / part_name(2, 2)).unlink()
    refused(tmp_path, part_name(2, 2), "is missing")


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        ((2, 5), "rows from 2 on"),  # row 2 is there twice
        ((4, 5), "rows from 4 on"),  # row 3 is nowhere
        ((3, 4), "has 4 rows, wanted 5"),
    ],
)
def test_rows_that_are_missing_or_there_twice_are_named(tmp_path, rows, words):
    names = list(SHAPES)
    write(tmp_path, 1, 2, {names[0]: (0, 3), names[1]: (0, 5), names[2]: (0, 1)})
    write(tmp_path, 2, 2, {names[0]: rows})
    refused(tmp_path, repr(names[0]), words)


def test_a_tensor_that_the_model_does_not_have_is_named(tmp_path):
    write_both(tmp_path)
    values = {"other": np.zeros((2, 3), np.float32)}
    places = {"DCP_SHARDING_INFO": json.dumps({"other": {"saved_offsets": [0, 0]}})}
    (tmp_path / part_name(2, 2)).unlink()
    write_tensors(tmp_path / part_name(2, 2), values, places)
    refused(tmp_path, part_name(2, 2), "unknown tensor 'other'")


@pytest.mark.parametrize(
    "place",
    [None, 3, {}, {"saved_offsets": [0]}, {"saved_offsets": [-1, 0]}, {"saved_offsets": [0, 1]}],
)
def test_a_part_that_does_not_say_where_it_begins_is_refused(tmp_path, place):
    names = list(SHAPES)
    write(tmp_path, 1, 1, {name: (0, SHAPES[name][0]) for name in names}, **{names[0]: place})
    refused(tmp_path, repr(names[0]), "must begin at one row")


def test_a_part_without_its_places_is_refused(tmp_path):
    write_tensors(tmp_path / part_name(1, 1), whole())
    refused(tmp_path, "DCP_SHARDING_INFO")
