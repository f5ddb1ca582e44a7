"""Reading and writing ``.tinygpt`` files, versions 1 and 2; ``tinygpt_layout.py`` says what stands where.

Read are fp32 (with AdamW's moments), fp16 and int4; written are fp32 with moments and fp16. Before memory
is taken, the header's sizes are held against each other and against the size of the file.
What this is not: the way from such a file to a run, which is ``training/importing.py``.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from io import BufferedReader
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from posttrainllm.config import GPTConfig
from posttrainllm.errors import CheckpointError, ConfigError
from posttrainllm.formats.huggingface import parameter_shapes
from posttrainllm.formats.shards import check_memory
from posttrainllm.formats.tensor_file import PIECE, Floats
from posttrainllm.formats.tinygpt_layout import (
    BLOCK,
    DTYPES,
    FIXED,
    MAGIC,
    PREFIX_BYTES,
    STEP_BYTES,
    VERSIONS,
    Tensor,
    block_count,
    check_manifest,
    manifest,
    state_bytes,
    tensors,
)
from posttrainllm.formats.untrusted import DAMAGED, MAX_JSON_BYTES, parse_object
from posttrainllm.settings import show
from posttrainllm.storage import Chunk, FileHash, read_error, show_bytes, write_file

SUFFIX = ".tinygpt"

# The header's name of a size -> ours.
SIZES = {"layers": "n_layer", "heads": "n_head", "dModel": "n_embd", "ctx": "n_ctx"}

_PLACES = ("weight", "mean", "mean square")  # what stands of a tensor, in this order


@dataclass(frozen=True)
class TinyGPT:
    """A model and what stands about its training.

    ``params`` and the moments ``m`` and ``v`` are {our name: float32 array}; moments are None where
    the file has none. ``training`` is the header's config without the sizes, and ``history`` its
    losses, as they stand there: what is no part of the model is not checked here.
    """

    config: GPTConfig
    params: dict[str, Floats]
    m: dict[str, Floats] | None
    v: dict[str, Floats] | None
    step: int = 0
    dtype: str = "fp32"
    training: dict[str, Any] = field(default_factory=dict)
    history: list[Any] = field(default_factory=list)


# --- reading ---------------------------------------------------------------------------------


def read_tinygpt(path: Path) -> TinyGPT:
    """Read a file; every size is checked before memory is taken, every value is finite.

    Raises: CheckpointError, in one line that names the file, the field and the value.
    """
    try:
        with path.open("rb") as stream:
            size = os.fstat(stream.fileno()).st_size
            header, start = _read_header(stream, path, size)
            config = _config(header, path)
            dtype, block = _storage(header, path)
            _check_sizes(header, config, dtype, block, path, size - start)
            check_memory(path, 4 * config.parameters() * (3 if dtype == "fp32" else 1))
            step = int.from_bytes(stream.read(STEP_BYTES), "little", signed=True)
            if step < 0:
                raise CheckpointError(f"{path}: step is {step}, wanted 0 or more", DAMAGED)
            values = _read_state(stream, path, config, dtype, block)
    except OSError as error:
        raise read_error(path, error) from None
    except MemoryError:
        raise CheckpointError(
            f"{path} needs more memory than there is", "close other programs"
        ) from None
    sizes = {*SIZES, "dMlp"}
    training = {key: value for key, value in header["config"].items() if key not in sizes}
    history = header.get("lossHistory")
    return TinyGPT(
        config,
        *values,
        step=step,
        dtype=dtype,
        training=training,
        history=history if isinstance(history, list) else [],
    )


def _read_header(stream: BufferedReader, path: Path, size: int) -> tuple[dict[str, Any], int]:
    """Return the header, and where the state behind it begins."""
    prefix = stream.read(PREFIX_BYTES)
    if len(prefix) < PREFIX_BYTES or prefix[:4] != MAGIC:
        raise CheckpointError(
            f"{path} is no .tinygpt file: it begins with {show(prefix[:4])}, wanted {MAGIC!r}",
            DAMAGED,
        )
    version, length = (int.from_bytes(prefix[at : at + 4], "little") for at in (4, 8))
    if version not in VERSIONS:
        raise CheckpointError(
            f"{path} has version {version}; this package reads {VERSIONS[0]} and {VERSIONS[1]}",
            "update posttrainllm",
        )
    if length > size - PREFIX_BYTES:
        raise CheckpointError(
            f"{path} is cut off: it has {size} bytes and its header alone should have {length}",
            DAMAGED,
        )
    if length > MAX_JSON_BYTES:
        raise CheckpointError(
            f"{path}: a header of {show_bytes(length)} is over the limit of {show_bytes(MAX_JSON_BYTES)}",
            DAMAGED,
        )
    return parse_object(stream.read(length), f"the header of {path}"), PREFIX_BYTES + length


def _config(header: Mapping[str, Any], path: Path) -> GPTConfig:
    sizes = header.get("config")
    if not isinstance(sizes, dict):
        raise CheckpointError(f"{path}: config must be an object, got {show(sizes)}", DAMAGED)
    for name, value in sizes.items():  # later builds of the original have variants of the model
        if value and (name.startswith("use") or name == "slidingWindow"):
            raise CheckpointError(
                f"{path}: config.{show(name)[1:-1]} is {show(value)}, and this package computes "
                "plain GPT-2 only",
                "this variant of the format cannot be loaded",
            )
    shape: dict[str, Any] = {ours: sizes.get(theirs) for theirs, ours in SIZES.items()}
    for theirs, ours in SIZES.items():
        if type(shape[ours]) is not int:
            raise CheckpointError(
                f"{path}: config.{theirs} must be a whole number, got {show(shape[ours])}", DAMAGED
            )
    if sizes.get("dMlp") not in (None, 4 * shape["n_embd"]):
        shape["n_inner"] = sizes["dMlp"]
    try:
        return GPTConfig.model_validate({**shape, **FIXED})
    except ConfigError as error:
        raise CheckpointError(f"{path}: {error.message}", "the model cannot be loaded") from None


def _storage(header: Mapping[str, Any], path: Path) -> tuple[str, int]:
    """Return how the weights are stored, and the block size of int4."""
    moments = header.get("includesOptimizerState", header.get("weightDtype") in (None, "fp32"))
    dtype = header.get("weightDtype") or ("fp32" if moments else "fp16")
    if dtype not in DTYPES:
        raise CheckpointError(
            f"{path}: weightDtype is {show(dtype)}, wanted one of {', '.join(DTYPES)}",
            "this variant of the format cannot be loaded",
        )
    if moments is not (dtype == "fp32"):
        raise CheckpointError(
            f"{path}: includesOptimizerState is {show(moments)}, and weightDtype is {dtype!r}",
            DAMAGED,
        )
    block = header.get("int4BlockSize", BLOCK)
    if type(block) is not int or block % 2 or not 2 <= block <= 65_536:
        raise CheckpointError(
            f"{path}: int4BlockSize must be an even number from 2 to 65,536, got {show(block)}",
            DAMAGED,
        )
    return dtype, block


def _check_sizes(
    header: Mapping[str, Any], config: GPTConfig, dtype: str, block: int, path: Path, left: int
) -> None:
    """Hold what the header says about sizes against its config and against the file."""
    wanted = state_bytes(config, dtype, block)
    if header.get("stateByteLength", wanted) != wanted:
        raise CheckpointError(
            f"{path}: stateByteLength is {show(header['stateByteLength'])}, and its config as "
            f"{dtype} takes {wanted}",
            DAMAGED,
        )
    if left != wanted:
        what = "is cut off" if left < wanted else "has bytes that belong to no tensor"
        raise CheckpointError(
            f"{path} {what}: {left} bytes follow its header, and its config as {dtype} takes {wanted}",
            DAMAGED,
        )
    if dtype == "int4":
        blocks = block_count(config, block)
        for name, size in (("int4ScalesBytes", 2), ("int4PackedBytes", block // 2)):
            if header.get(name, blocks * size) != blocks * size:
                raise CheckpointError(
                    f"{path}: {name} is {show(header[name])}, and its config takes {blocks * size}",
                    DAMAGED,
                )
    if "manifest" in header:
        check_manifest(header["manifest"], config, str(path))


Values = tuple[dict[str, Floats], dict[str, Floats] | None, dict[str, Floats] | None]


def _read_state(
    stream: BufferedReader, path: Path, config: GPTConfig, dtype: str, block: int
) -> Values:
    """Read all tensors behind the step into arrays of our shapes: weights, means and squares."""
    shapes = parameter_shapes(config)
    sets = [
        {name: np.empty(shape, np.float32) for name, shape in shapes.items()}
        for _ in range(len(_PLACES) if dtype == "fp32" else 1)
    ]
    everything = list(tensors(config))
    scales: list[Floats] = []
    if dtype == "int4":
        counts = [-(-tensor.size // block) for tensor in everything]
        scales = [_read(stream, path, "<f2", count).astype(np.float32) for count in counts]
    for number, tensor in enumerate(everything):
        for place, values in enumerate(sets):
            if dtype == "int4":
                read = _int4(stream, path, tensor, scales[number], block)
            else:
                read = _read(stream, path, "<f4" if dtype == "fp32" else "<f2", tensor.size)
            _check_finite(read, tensor, place, path)
            _columns(values, tensor)[...] = read.reshape(tensor.shape)
    return (sets[0], sets[1], sets[2]) if dtype == "fp32" else (sets[0], None, None)


def _int4(
    stream: BufferedReader, path: Path, tensor: Tensor, scales: Floats, block: int
) -> npt.NDArray[Any]:
    packed = _read(stream, path, "u1", len(scales) * (block // 2))
    nibbles = np.empty((len(packed), 2), np.float32)
    nibbles[:, 0] = packed & 15
    nibbles[:, 1] = packed >> 4
    with np.errstate(invalid="ignore"):  # an infinite scale: refused by whoever asked
        values: Floats = (nibbles.reshape(len(scales), block) - np.float32(8)) * scales[:, None]
    return values.reshape(-1)[: tensor.size]


def _read(stream: BufferedReader, path: Path, kind: str, count: int) -> npt.NDArray[Any]:
    values = np.empty(count, kind)
    view = values.view(np.uint8).data
    if stream.readinto(view) != values.nbytes:
        raise CheckpointError(f"{path} ended while it was read", "something else is writing to it")
    return values


def _check_finite(values: npt.NDArray[Any], tensor: Tensor, place: int, path: Path) -> None:
    what = _PLACES[place]
    if not np.isfinite(values).all():
        kind = "NaN" if np.isnan(values).any() else "infinite"
        raise CheckpointError(
            f"{path}: tensor {tensor.name!r} holds {kind} values ({what})",
            "the model cannot be used: take an earlier file",
        )
    if what == "mean square" and (values < 0).any():
        raise CheckpointError(f"{path}: tensor {tensor.name!r} has a negative {what}", DAMAGED)


def _columns(values: Mapping[str, Floats], tensor: Tensor) -> Floats:
    """Return the view of our array that a tensor of the file fills."""
    array = values[tensor.ours]
    if tensor.part is None:
        return array
    width = array.shape[-1] // 3
    return array[..., tensor.part * width : (tensor.part + 1) * width]


# --- writing ---------------------------------------------------------------------------------


def differences(config: GPTConfig) -> list[str]:
    """List what a .tinygpt file cannot say about a model: "activation is 'gelu_new', wanted 'gelu'"."""
    return [
        f"{name} is {show(getattr(config, name))}, and a .tinygpt model has {show(wanted)}"
        for name, wanted in FIXED.items()
        if getattr(config, name) != wanted
    ]


def write_tinygpt(path: Path, model: TinyGPT, about: Mapping[str, Any] | None = None) -> FileHash:
    """Write a new file of version 2 as ``model.dtype``: fp32 with moments, zeros where there are none, or fp16.

    ``about`` gives more fields of the header, such as finalLoss and sample. The activation is not
    stored: that it is erf, the caller has made sure or wants otherwise.

    Raises: OSError; CheckpointError for a weight that float16 has no number for.
    """
    assert model.dtype in ("fp32", "fp16")
    moments = model.dtype == "fp32"
    config = model.config
    header: dict[str, Any] = {
        "version": VERSIONS[-1],
        "savedAt": datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.000Z"),
        "config": {
            **{theirs: getattr(config, ours) for theirs, ours in SIZES.items()},
            "dMlp": config.inner,
            **model.training,
        },
        "manifest": manifest(config),
        "includesOptimizerState": moments,
        "stateByteLength": state_bytes(config, model.dtype),
        "lossHistory": model.history,
        "finalLoss": None,
        "sample": "",
        "bestVal": None,
        **(about or {}),
    }
    if not moments:
        header["weightDtype"] = model.dtype
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
    return write_file(path, _chunks(text.encode("utf-8", "replace"), model))


def _chunks(header: bytes, model: TinyGPT) -> Iterator[Chunk]:
    yield MAGIC + VERSIONS[-1].to_bytes(4, "little") + len(header).to_bytes(4, "little")
    yield header
    yield model.step.to_bytes(STEP_BYTES, "little", signed=True)
    for tensor in tensors(model.config):
        weights = _columns(model.params, tensor)
        if model.dtype == "fp16":
            yield from _halves(weights, tensor)
            continue
        for values in (model.params, model.m, model.v):
            if values is None:
                yield bytes(4 * tensor.size)
            else:
                array = np.ascontiguousarray(_columns(values, tensor), "<f4")
                yield array.reshape(-1).view(np.uint8).data


def _halves(weights: Floats, tensor: Tensor) -> Iterator[Chunk]:
    flat = np.ascontiguousarray(weights).reshape(-1)
    for start in range(0, flat.size, PIECE):
        with np.errstate(over="ignore"):
            half = flat[start : start + PIECE].astype("<f2")
        if not np.isfinite(half).all():
            largest = float(np.abs(flat).max())
            raise CheckpointError(
                f"tensor {tensor.name!r} holds {largest:g}, and the largest float16 is 65504",
                "export it as float32",
            )
        yield half.view(np.uint8).data
