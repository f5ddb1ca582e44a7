"""The weights of a model folder: one safetensors file, or several that an index names.

    model.safetensors                      everything in one file
    model.safetensors.index.json           {"weight_map": {tensor: file}, "metadata": {...}}
    model-00001-of-00003.safetensors ...   the files that it names

The index must say exactly what the files hold: a tensor that is missing, there twice, or in another
file than the index says is refused by its name. Pickles are refused by theirs.
Read next: ``huggingface.py``, which says which tensors a GPT-2 has.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from itertools import groupby
from pathlib import Path

from posttrainllm.errors import CheckpointError
from posttrainllm.formats.tensor_file import Entry, Floats, read_floats, read_header
from posttrainllm.formats.untrusted import DAMAGED, plain_file, read_object
from posttrainllm.machine import available_memory
from posttrainllm.settings import show
from posttrainllm.storage import read_error, show_bytes

WEIGHTS_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"

MAX_SHARDS = 1000

_LFS = b"version https://git-lfs.github.com/"

# What a folder may hold instead of safetensors files.
PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle")


def read_shards(folder: Path) -> tuple[Path, dict[str, Entry]]:
    """Find every tensor of a model folder; also return the file that names them, for messages.

    Raises: CheckpointError when there are no weights, when it is unclear which files they are, and
    for pickles, which are never loaded: reading a pickle runs whatever program it holds.
    """
    names = _names(folder)
    weights = [name for name in names if name.endswith(".safetensors")]
    if INDEX_FILE in names and WEIGHTS_FILE not in names:
        path = plain_file(folder, INDEX_FILE)
        return path, _indexed(folder, path)
    if WEIGHTS_FILE in weights or len(weights) == 1:
        path = plain_file(folder, WEIGHTS_FILE if WEIGHTS_FILE in weights else weights[0])
        return path, _header(path)
    if weights:
        raise CheckpointError(
            f"{folder} holds {len(weights)} safetensors files, and no {INDEX_FILE} says what is in them",
            "copy the index file from where the model came, or save it again with save_pretrained",
        )
    pickles = [name for name in names if name.endswith(PICKLES)]
    if pickles:
        name = pickles[0] if pickles[0].isprintable() else show(pickles[0])
        raise CheckpointError(
            f"{folder}: {name} is a pickle, which can run any program and is never loaded",
            "save the model as safetensors, with transformers' save_pretrained",
        )
    raise CheckpointError(f"{folder} has no {WEIGHTS_FILE}", "is this the right folder?")


def _indexed(folder: Path, path: Path) -> dict[str, Entry]:
    """Read the headers of all files that an index names, and hold them against it."""
    places = read_object(path).get("weight_map")
    if not isinstance(places, dict) or not all(isinstance(file, str) for file in places.values()):
        raise CheckpointError(
            f"{path}: weight_map must name a file for each tensor, got {show(places)}", DAMAGED
        )
    files = sorted(set(places.values()))
    if len(files) > MAX_SHARDS:
        raise CheckpointError(
            f"{path}: weight_map names {len(files):,} files, over the limit of {MAX_SHARDS:,}",
            "save the model again with larger files (max_shard_size)",
        )
    for file in files:
        if not file.endswith(".safetensors"):
            raise CheckpointError(
                f"{path}: weight_map names {show(file)}, wanted a .safetensors file", DAMAGED
            )
    found: dict[str, Entry] = {}
    for file in files:
        for name, entry in _header(plain_file(folder, file)).items():
            if name in found:
                raise CheckpointError(
                    f"{folder}: tensor {show(name)} stands in both {found[name].path.name} and {file}",
                    DAMAGED,
                )
            if places.get(name) != file:
                raise CheckpointError(
                    f"{folder}: tensor {show(name)} stands in {file}, and {INDEX_FILE} says "
                    + (show(places[name]) if name in places else "nothing of it"),
                    DAMAGED,
                )
            found[name] = entry
    for name, file in places.items():
        if name not in found:
            raise CheckpointError(
                f"{path}: tensor {show(name)} should stand in {show(file)}, and is not there",
                DAMAGED,
            )
    return found


def _header(path: Path) -> dict[str, Entry]:
    """The tensors of one file, which may be what Git LFS leaves in its place."""
    try:
        with path.open("rb") as stream:
            pointer = stream.read(len(_LFS)) == _LFS
    except OSError as error:
        raise read_error(path, error) from None
    if pointer:
        raise CheckpointError(
            f"{path} is a pointer of Git LFS, not the file itself", "fetch the file: git lfs pull"
        )
    return read_header(path)


def read_values(entries: Mapping[str, Entry]) -> dict[str, Floats]:
    """Read tensors, perhaps of several files, as float32; the result keeps the names and their order.

    Raises: CheckpointError when the memory is not there, for a dtype that cannot be widened to
    float32, and for NaN or infinite values, by tensor name.
    """
    if entries:
        need = 4 * sum(math.prod(entry.shape) for entry in entries.values())
        check_memory(next(iter(entries.values())).path, need)
    values: dict[str, Floats] = {}
    by_file = sorted(entries.items(), key=lambda item: str(item[1].path))
    for _, group in groupby(by_file, key=lambda item: item[1].path):
        members = list(group)
        read = read_floats(entry for _, entry in members)
        values |= {name: array for (name, _), array in zip(members, read, strict=True)}
    return {name: values[name] for name in entries}


def check_memory(path: Path, need: int) -> None:
    """Refuse to read what does not fit: a file full of holes says little about its size on the disk.

    Raises: CheckpointError with both numbers.
    """
    free = available_memory()
    if 0 < free < need:
        raise CheckpointError(
            f"{path}: its tensors need {show_bytes(need)} of memory, and {show_bytes(free)} are free",
            "close other programs, or use a machine with more memory",
        )


def _names(folder: Path) -> list[str]:
    try:
        return sorted(path.name for path in folder.iterdir())
    except OSError as error:
        raise read_error(folder, error) from None
