"""The safetensors format: eight bytes of header length, a JSON header, then the tensors' bytes.

Written here rather than with the safetensors library for three reasons: that copies each tensor
before it writes, reports a full disk as text, and reads bfloat16 only with torch. Tests hold what
is written here against the library. Nothing is allocated before the whole header has been checked
against the size of the file.
Read next: ``huggingface.py``, which says which tensors a GPT-2 has.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from io import BufferedReader
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from posttrainllm.errors import CheckpointError
from posttrainllm.formats.untrusted import DAMAGED, parse_object
from posttrainllm.settings import show
from posttrainllm.storage import Chunk, FileHash, read_error, show_bytes, write_file

Floats = npt.NDArray[np.float32]

MAX_HEADER_BYTES = 8 * 2**20  # a GPT-2 of 1,024 layers needs 2
MAX_DIMS = 8
PIECE = 2**20  # values converted at a time

SIZES = {
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E4M3", "F8_E5M2"), 1),
    **dict.fromkeys(("U16", "I16", "F16", "BF16"), 2),
    **dict.fromkeys(("U32", "I32", "F32"), 4),
    **dict.fromkeys(("U64", "I64", "F64"), 8),
}
"""Bytes a value, for each dtype that a header may name."""

_WRITTEN = {np.dtype("<f4"): "F32", np.dtype("<i8"): "I64", np.dtype("i1"): "I8"}


@dataclass(frozen=True)
class Entry:
    """Where one tensor lies in a file: ``start`` counts from the beginning of the file."""

    path: Path
    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int


def write_tensors(
    path: Path, tensors: Mapping[str, npt.NDArray[Any]], metadata: Mapping[str, str] | None = None
) -> FileHash:
    """Write float32, int64 and int8 arrays, in the order given, to a new file, and flush it to the disk.

    Raises: OSError.
    """
    # transformers insists on "pt"
    header: dict[str, Any] = {"__metadata__": {"format": "pt", **(metadata or {})}}
    end = 0
    for name, array in tensors.items():
        begin, end = end, end + array.nbytes
        header[name] = {
            "dtype": _WRITTEN[array.dtype.newbyteorder("<")],
            "shape": list(array.shape),
            "data_offsets": [begin, end],
        }
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode("utf-8")
    text += b" " * (-len(text) % 8)  # the tensors begin aligned
    return write_file(path, _chunks(text, tensors))


def _chunks(header: bytes, tensors: Mapping[str, npt.NDArray[Any]]) -> Iterator[Chunk]:
    yield len(header).to_bytes(8, "little")
    yield header
    for array in tensors.values():
        little = np.ascontiguousarray(array, array.dtype.newbyteorder("<"))
        yield little.reshape(-1).view(np.uint8).data


def read_header(path: Path) -> dict[str, Entry]:
    """Read what tensors a file holds; each name, dtype, shape and offset has been checked.

    Raises: CheckpointError, naming the file, the tensor and the value.
    """
    return read_description(path)[0]


def read_description(path: Path) -> tuple[dict[str, Entry], dict[str, str]]:
    """Read what tensors a file holds, and what stands about them under ``__metadata__``.

    Raises: CheckpointError, naming the file, the tensor and the value.
    """
    try:
        with path.open("rb") as stream:
            size = stream.seek(0, 2)
            stream.seek(0)
            length = int.from_bytes(stream.read(8), "little")
            if size < 8 or length > size - 8:
                raise CheckpointError(
                    f"{path} is cut off: it has {size} bytes and its header alone should have "
                    f"{length if size >= 8 else 8}",
                    DAMAGED,
                )
            if length > MAX_HEADER_BYTES:
                raise CheckpointError(
                    f"{path}: a header of {show_bytes(length)} is over the limit of "
                    f"{show_bytes(MAX_HEADER_BYTES)}",
                    DAMAGED,
                )
            content = stream.read(length)
    except OSError as error:
        raise read_error(path, error) from None
    header = parse_object(content, f"the header of {path}")
    found = header.pop("__metadata__", {})
    metadata = found if isinstance(found, dict) else {}
    entries = {name: _entry(path, name, value, 8 + length) for name, value in header.items()}
    _check_layout(path, entries, 8 + length, size)
    return entries, {key: text for key, text in metadata.items() if isinstance(text, str)}


def _entry(path: Path, name: str, value: Any, data: int) -> Entry:
    """Check one entry of a header on its own; ``data`` is where the tensors' bytes begin."""
    place = f"{path}: tensor {show(name)}"
    if not isinstance(value, dict) or set(value) != {"dtype", "shape", "data_offsets"}:
        raise CheckpointError(
            f"{place} must have dtype, shape and data_offsets, got {show(value)}", DAMAGED
        )
    dtype, shape, offsets = value["dtype"], value["shape"], value["data_offsets"]
    if not isinstance(dtype, str) or dtype not in SIZES:
        raise CheckpointError(
            f"{place} has the unknown dtype {show(dtype)}", "known are: " + ", ".join(SIZES)
        )
    if not _is_sizes(shape) or len(shape) > MAX_DIMS:
        raise CheckpointError(
            f"{place}: shape must be a list of at most {MAX_DIMS} sizes, got {show(shape)}", DAMAGED
        )
    if not _is_sizes(offsets) or len(offsets) != 2:
        raise CheckpointError(
            f"{place}: data_offsets must be two positions, got {show(offsets)}", DAMAGED
        )
    if math.prod(shape) * SIZES[dtype] != offsets[1] - offsets[0]:
        raise CheckpointError(
            f"{place}: {dtype} of shape {show(shape)} does not fill data_offsets {show(offsets)}",
            DAMAGED,
        )
    return Entry(path, name, dtype, tuple(shape), data + offsets[0])


def _is_sizes(value: Any) -> bool:
    return isinstance(value, list) and all(type(size) is int and size >= 0 for size in value)


def _check_layout(path: Path, entries: Mapping[str, Entry], data: int, size: int) -> None:
    """Refuse tensors that overlap, leave holes, or do not end where the file ends."""
    position = data
    for entry in sorted(entries.values(), key=lambda entry: (entry.start, byte_count(entry))):
        if entry.start != position:
            what = "overlaps the one before it" if entry.start < position else "follows a hole"
            raise CheckpointError(
                f"{path}: tensor {show(entry.name)} at byte {show(entry.start)} {what}", DAMAGED
            )
        position += byte_count(entry)
    if position != size:
        what = "is cut off" if size < position else "has bytes that belong to no tensor"
        raise CheckpointError(
            f"{path} {what}: {size} bytes, and its tensors end at {show(position)}", DAMAGED
        )


def byte_count(entry: Entry) -> int:
    """Return how many bytes a tensor takes in its file."""
    return math.prod(entry.shape) * SIZES[entry.dtype]


def read_floats(entries: Iterable[Entry]) -> Iterator[Floats]:
    """Read tensors of one file as float32, in the order given; half precision is widened exactly.

    Raises: CheckpointError for another dtype and for NaN or infinite values, by tensor name.
    """
    wanted = list(entries)
    for entry in wanted:
        if entry.dtype not in ("F32", "F16", "BF16"):
            raise CheckpointError(
                f"{entry.path}: tensor {show(entry.name)} is {entry.dtype}, wanted F32, F16 or BF16",
                "convert the model to float32 and save it again",
            )
    if not wanted:
        return
    path = wanted[0].path
    try:
        with path.open("rb") as stream:
            for entry in wanted:
                values = _read_floats(stream, entry)
                if not np.isfinite(values).all():
                    kind = "NaN" if np.isnan(values).any() else "infinite"
                    raise CheckpointError(
                        f"{path}: tensor {show(entry.name)} holds {kind} values",
                        "the model cannot be used: take an earlier checkpoint",
                    )
                yield values
    except OSError as error:
        raise read_error(path, error) from None
    except MemoryError:
        need = 4 * sum(math.prod(entry.shape) for entry in wanted)
        raise CheckpointError(
            f"{path} needs {show_bytes(need)} of memory, more than there is"
        ) from None


def read_integer(entry: Entry) -> int:
    """Read a tensor of one I64 value.

    Raises: CheckpointError.
    """
    if entry.dtype != "I64" or math.prod(entry.shape) != 1:
        raise CheckpointError(
            f"{entry.path}: tensor {show(entry.name)} is {entry.dtype} of shape "
            f"{show(list(entry.shape))}, wanted one I64",
            DAMAGED,
        )
    try:
        with entry.path.open("rb") as stream:
            stream.seek(entry.start)
            return int.from_bytes(stream.read(8), "little", signed=True)
    except OSError as error:
        raise read_error(entry.path, error) from None


def _read_floats(stream: BufferedReader, entry: Entry) -> Floats:
    stream.seek(entry.start)
    values: Floats = np.empty(math.prod(entry.shape), np.float32)
    if entry.dtype == "F32":
        _fill(stream, values, entry)
        if values.dtype.newbyteorder("<") != values.dtype:
            values.byteswap(inplace=True)
        return values.reshape(entry.shape)
    half = np.empty(min(PIECE, values.size), "<u2")
    for start in range(0, values.size, PIECE):
        piece = half[: min(PIECE, values.size - start)]
        _fill(stream, piece, entry)
        into = values[start : start + piece.size]
        if entry.dtype == "F16":
            into[:] = piece.view("<f2")
        else:  # bfloat16 is the upper half of a float32
            into.view(np.uint32)[:] = piece.astype(np.uint32) << 16
    return values.reshape(entry.shape)


def _fill(stream: BufferedReader, array: npt.NDArray[Any], entry: Entry) -> None:
    if stream.readinto(array.view(np.uint8).data) != array.nbytes:
        raise CheckpointError(
            f"{entry.path} ended while tensor {show(entry.name)} was read",
            "something else is writing to this file",
        )
