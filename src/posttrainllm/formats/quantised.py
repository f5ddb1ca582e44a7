"""A whole model in one small file: weights as int8 with a scale for each output, everything else float32.

The file is an ordinary safetensors file, so any reader of that format can list it:

    8 bytes     length N of the header, little endian
    N bytes     the header, JSON, padded with spaces so that N is a multiple of 8; its ``__metadata__`` holds
                  format_version  "1"
                  config          the text of a GPT-2's config.json
                  tokenizer       "bytes": token i is byte i
    the rest    the tensors, where ``data_offsets`` (counted from 8 + N) say: all F32 ones, then all I8 ones, so that
                every float lies on a multiple of four bytes of the file

A parameter of one dimension (biases, LayerNorm) stands there as it is, F32, under its own name (``h.0.ln_1.bias``). A matrix
``NAME`` is I8 in its own shape, and ``NAME.scale`` is F32 in the same shape with the shared dimension set to 1. A reader computes

    weight = float32(int8) * scale          one multiplication, broadcast; the same bits everywhere

The scale belongs to an *output* of the product that reads the matrix: x @ W with W (I, O) has scales (1, O), the tables wte and
wpe (V, C) have (V, 1), one for each token or position; with a tied head that is one for each logit. So a kernel can sum
x[i] * int8[i, o] and multiply once at the end, and a row of the text table is rounded by its own largest value.

What this is not: training state, or a format to go on from without loss. Read next: ``gallery/``, which bundles such files.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from posttrainllm.config import GPTConfig
from posttrainllm.errors import CheckpointError
from posttrainllm.formats.huggingface import (
    config_document,
    parameter_shapes,
    parse_config,
)
from posttrainllm.formats.tensor_file import (
    Entry,
    Floats,
    read_description,
    read_floats,
    write_tensors,
)
from posttrainllm.formats.untrusted import DAMAGED, parse_object
from posttrainllm.rounding import Bytes, dequantise, quantise, shared_axis
from posttrainllm.settings import show
from posttrainllm.storage import FileHash, read_error

FORMAT = 1
SCALE = ".scale"


@dataclass(frozen=True)
class Quantised:
    """What a file holds, the weights already widened to float32 as every engine takes them."""

    config: GPTConfig
    params: dict[str, Floats]
    tokenizer: str


def rounded(config: GPTConfig, params: Mapping[str, Floats]) -> dict[str, Floats]:
    """Return the weights as they come back from a file: what quantising does to a model, without a file."""
    values = {}
    for name, shape in parameter_shapes(config).items():
        matrix = len(shape) == 2
        values[name] = (
            dequantise(*quantise(params[name], shared_axis(name))) if matrix else params[name]
        )
    return values


def write_quantised(
    path: Path, config: GPTConfig, params: Mapping[str, Floats], *, tokenizer: str = "bytes"
) -> FileHash:
    """Write a model to a new file, and return the hash of what was written.

    Raises: CheckpointError for a weight that is not finite; OSError.
    """
    odd = next((name for name in params if not np.isfinite(params[name]).all()), None)
    if odd is not None:
        raise CheckpointError(
            f"{odd} holds values that are not finite, so {path} was not written",
            "take an earlier checkpoint",
        )
    floats: dict[str, Floats] = {}
    bytes_: dict[str, Bytes] = {}
    for name, shape in parameter_shapes(config).items():
        if len(shape) == 2:
            bytes_[name], floats[name + SCALE] = quantise(params[name], shared_axis(name))
        else:
            floats[name] = params[name]
    metadata = {
        "format_version": str(FORMAT),
        "config": json.dumps(config_document(config), separators=(",", ":")),
        "tokenizer": tokenizer,
    }
    return write_tensors(path, {**floats, **bytes_}, metadata)


def read_quantised(path: Path) -> Quantised:
    """Read a model back. Every name, dtype, shape and offset is checked before memory is taken.

    Raises: CheckpointError, in one line that names the file, the tensor and the value.
    """
    entries, metadata = read_description(path)
    if "config" not in metadata or "format_version" not in metadata:
        raise CheckpointError(
            f"{path} is no quantised model: its header says neither config nor format_version",
            "a model folder is given by its folder",
        )
    if metadata["format_version"] != str(FORMAT):
        raise CheckpointError(
            f"{path} has format_version {show(metadata['format_version'])}; this version reads {FORMAT}",
            "update posttrainllm",
        )
    document = parse_object(metadata["config"].encode("utf-8", "replace"), f"the config of {path}")
    config = parse_config(document, path)
    _check_entries(path, entries, config)
    shapes = parameter_shapes(config)
    floats = [name for name in entries if entries[name].dtype == "F32"]
    values = dict(zip(floats, read_floats(entries[name] for name in floats), strict=True))
    matrices = [entries[name] for name in shapes if name not in values]
    for entry, steps in zip(matrices, _read_bytes(path, matrices), strict=True):
        values[entry.name] = dequantise(steps, values.pop(entry.name + SCALE))
        if not np.isfinite(values[entry.name]).all():
            raise CheckpointError(
                f"{path}: tensor {entry.name!r} is too large for float32", DAMAGED
            )
    params = {name: values[name] for name in shapes}
    return Quantised(config, params, metadata.get("tokenizer", "bytes"))


def _check_entries(path: Path, entries: Mapping[str, Entry], config: GPTConfig) -> None:
    """Hold the tensors of a file against those of the model that its config describes."""
    if config.parameters() > sum(math.prod(entry.shape) for entry in entries.values()):
        raise CheckpointError(
            f"{path}: its config describes {config.parameters():,} numbers, more than it holds",
            DAMAGED,
        )
    wanted: dict[str, tuple[str, tuple[int, ...]]] = {}
    for name, shape in parameter_shapes(config).items():
        wanted[name] = ("F32", shape)
        if len(shape) == 2:
            wanted[name] = ("I8", shape)
            axis = shared_axis(name)
            wanted[name + SCALE] = ("F32", (1, shape[1]) if axis == 0 else (shape[0], 1))
    for name in {**entries, **wanted}:
        if name not in entries:
            raise CheckpointError(f"{path} lacks the tensor {name!r}", DAMAGED)
        if name not in wanted:
            raise CheckpointError(f"{path} holds the unknown tensor {show(name)}", DAMAGED)
        got = (entries[name].dtype, entries[name].shape)
        if got != wanted[name]:
            raise CheckpointError(
                f"{path}: tensor {name!r} is {got[0]} of shape {show(list(got[1]))}, wanted "
                f"{wanted[name][0]} of shape {list(wanted[name][1])}",
                DAMAGED,
            )


def _read_bytes(path: Path, entries: list[Entry]) -> Iterator[Bytes]:
    try:
        with path.open("rb") as stream:
            for entry in entries:
                stream.seek(entry.start)
                values: Bytes = np.empty(entry.shape, np.int8)
                view: Any = values.reshape(-1).view(np.uint8).data
                if stream.readinto(view) != values.nbytes:
                    raise CheckpointError(
                        f"{path} ended while tensor {entry.name!r} was read",
                        "something else is writing to this file",
                    )
                yield values
    except OSError as error:
        raise read_error(path, error) from None
