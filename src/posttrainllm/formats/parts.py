"""Tensors that several processes wrote, each its own rows: put together again.

    optimizer-00001-of-00002.safetensors    rows 0 to 49 of every moment
    optimizer-00002-of-00002.safetensors    rows 50 to 99

The files are those of torch.distributed.checkpoint in safetensors form; under ``__metadata__`` each says at which row its part of a tensor
begins. Read here without torch, so that any engine goes on with what a sharded run left.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from posttrainllm.errors import CheckpointError
from posttrainllm.formats.tensor_file import Entry, Floats, read_description, read_floats
from posttrainllm.formats.untrusted import DAMAGED, parse_object, plain_file
from posttrainllm.settings import show

_NAME = re.compile(r"optimizer-(\d{5})-of-(\d{5})\.safetensors")
_PLACES = "DCP_SHARDING_INFO"

Part = tuple[int, Entry]  # the first row, and where it is


def part_name(number: int, count: int) -> str:
    """Name of the file of process ``number``, from 1, of ``count``."""
    return f"optimizer-{number:05d}-of-{count:05d}.safetensors"


def part_files(folder: Path) -> list[Path]:
    """The files of parts in a folder, in order; none where the moments are in one file, or not there."""
    return sorted(path for path in folder.iterdir() if _NAME.fullmatch(path.name))


def read_parts(folder: Path, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Floats]:
    """Read the tensors of ``shapes``, float32, whole.

    Raises: CheckpointError for a file that is missing, a tensor that is unknown, and rows that are missing or there twice.
    """
    names = [path.name for path in part_files(folder)]
    match = _NAME.fullmatch(names[0])
    assert match is not None
    wanted = [
        part_name(number, int(match.group(2))) for number in range(1, int(match.group(2)) + 1)
    ]
    if names != wanted:
        odd = sorted(set(names) ^ set(wanted))[0]
        what = "is missing" if odd in wanted else "does not belong to the others"
        raise CheckpointError(f"{folder}: {odd} {what}", DAMAGED)
    parts: dict[str, list[Part]] = {name: [] for name in shapes}
    for name in names:
        for tensor, part in _parts(plain_file(folder, name)).items():
            if tensor not in shapes:
                raise CheckpointError(
                    f"{folder / name} holds the unknown tensor {show(tensor)}", DAMAGED
                )
            parts[tensor].append(part)
    for tensor, found in parts.items():
        _check_rows(folder, tensor, shapes[tensor], found)
    whole = {name: np.empty(shape, np.float32) for name, shape in shapes.items()}
    for path in (folder / name for name in names):
        here = [
            (name, first, entry)
            for name, found in parts.items()
            for first, entry in found
            if entry.path == path
        ]
        values = read_floats(entry for _, _, entry in here)
        for (name, first, entry), rows in zip(here, values, strict=True):
            whole[name][first : first + entry.shape[0]] = rows
    return whole


def _parts(path: Path) -> dict[str, Part]:
    """What one file holds of each tensor."""
    entries, metadata = read_description(path)
    places = parse_object(metadata.get(_PLACES, "").encode(), f"{_PLACES} of {path}")
    found = {}
    for name, entry in entries.items():
        place = places.get(name)
        offsets = place.get("saved_offsets") if isinstance(place, dict) else None
        if (
            not isinstance(offsets, list)
            or len(offsets) != len(entry.shape)
            or not offsets
            or any(type(offset) is not int or offset < 0 for offset in offsets)
            or any(offsets[1:])
        ):
            raise CheckpointError(
                f"{path}: tensor {show(name)} must begin at one row, got {show(place)}", DAMAGED
            )
        found[name] = (offsets[0], entry)
    return found


def _check_rows(folder: Path, name: str, shape: tuple[int, ...], parts: list[Part]) -> None:
    """Refuse rows that are missing, there twice, or too many."""
    parts.sort(key=lambda part: (part[0], part[1].shape[0]))
    row = 0
    for first, entry in parts:
        if first != row or entry.shape[1:] != shape[1:]:
            raise CheckpointError(
                f"{entry.path}: tensor {show(name)} has rows from {first} on of shape {show(list(entry.shape))}, "
                f"wanted rows from {row} on of {show(list(shape))}",
                DAMAGED,
            )
        row += entry.shape[0]
    if row != shape[0]:
        raise CheckpointError(
            f"{folder}: tensor {show(name)} has {row} rows, wanted {shape[0]}", DAMAGED
        )
