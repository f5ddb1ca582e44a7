"""Checkpoints: one folder that stock transformers loads and that training goes on from.

    checkpoints/step-000500/
      config.json  generation_config.json  model.safetensors  tokenizer.json  tokenizer_config.json
      optimizer.safetensors  trainer_state.json      what resume needs; no moments before the first step
      (optimizer-00001-of-00002.safetensors ...      instead of it, where several processes had a part each)
      hashes.json                                    written last: SHA-256 and size of the others

A checkpoint is written under another name, flushed to the disk file by file, and renamed. So a
process killed anywhere leaves every checkpoint whole that it had finished, and a folder without a
matching hashes.json is never used.
What single files may say is checked in ``formats/``, names and hashes in ``runs/checkpoint_folder.py``.
Read next: ``runs/folder.py``, which holds the run around the checkpoints.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from posttrainllm.config import GPTConfig
from posttrainllm.errors import CheckpointError
from posttrainllm.formats.huggingface import (
    CONFIG_FILE,
    GENERATION_FILE,
    HEAD,
    WEIGHTS_FILE,
    config_document,
    generation_document,
    parameter_shapes,
    parse_config,
    pick_parameters,
    stored_name,
)
from posttrainllm.formats.parts import part_files, read_parts
from posttrainllm.formats.shards import read_shards, read_values
from posttrainllm.formats.tensor_file import Floats, read_header, read_integer, write_tensors
from posttrainllm.formats.untrusted import DAMAGED, plain_file, read_object
from posttrainllm.runs.checkpoint_folder import (
    HASHES_FILE,
    HASHES_FORMAT,
    OPTIMIZER_FILE,
    STATE_FILE,
    check_space,
    checkpoint_bytes,
    clean_up,
    discard_after,
    list_checkpoints,
    move_into_place,
    newest_checkpoint,
    remove,
    remove_oldest,
    step_of,
    temporary_folder,
    verify_hashes,
)
from posttrainllm.runs.trainer_state import CorpusIdentity, TrainerState
from posttrainllm.settings import show
from posttrainllm.storage import sync_file, sync_folder, write_error, write_file
from posttrainllm.text.tokenizer import Tokenizer
from posttrainllm.wording import Wording

__all__ = [
    "Checkpoint",
    "CorpusIdentity",
    "TrainerState",
    "check_space",
    "checkpoint_bytes",
    "clean_up",
    "discard_after",
    "list_checkpoints",
    "newest_checkpoint",
    "read_checkpoint",
    "step_of",
    "write_checkpoint",
]

MEAN = "adam.m."  # the names of the program's buffers too
SQUARE = "adam.v."


@dataclass(frozen=True)
class Checkpoint:
    """A model read back from a folder, and what training needs if it was trained here.

    ``params`` and AdamW's moments ``m`` and ``v`` are {parameter name: float32 array}, as
    ``Engine.load`` takes them; moments are None where there are none, or when they were not asked
    for. ``notices`` are lines the user should see: a damaged checkpoint was passed
    over.
    """

    path: Path
    config: GPTConfig
    params: dict[str, Floats]
    m: dict[str, Floats] | None
    v: dict[str, Floats] | None
    state: TrainerState | None
    notices: tuple[str, ...] = ()


def write_checkpoint(
    checkpoints: Path,
    *,
    state: TrainerState,
    params: Mapping[str, Floats],
    m: Mapping[str, Floats] | None,
    v: Mapping[str, Floats] | None,
    tokenizer: Tokenizer,
    keep: int,
    keep_best: bool = False,
    write_moments: Callable[[Path], None] | None = None,
) -> Path:
    """Save the model and all that resume needs as ``checkpoints/step-<state.step>``.

    Moments that are None are zero, and no file is written for them. The run's lock must be held.
    Afterwards the ``keep`` newest checkpoints stay, and with
    ``keep_best`` the one of the lowest validation loss too; older ones are removed.

    ``write_moments`` puts the moments into the folder it is given, where no process has them all: then m and v are empty.

    Shapes: params and the moments m and v as in ``formats.huggingface.parameter_shapes``.
    Raises: CheckpointError when there is no room, the folder cannot be written, or a value is not
    finite. Nothing is lost then: earlier checkpoints are whole, and the call can be repeated.
    """
    config = state.config.model
    moments = {MEAN + name: array for name, array in (m or {}).items()}
    moments |= {SQUARE + name: array for name, array in (v or {}).items()}
    _check_values(config, params, moments)
    check_space(checkpoints, config, saves=1, keep=keep, keep_best=keep_best)
    temporary = temporary_folder(checkpoints, state.step)
    try:
        checkpoints.mkdir(exist_ok=True)
        remove(temporary)
        temporary.mkdir()
        if write_moments is not None:
            write_moments(temporary)
        _write_files(temporary, state, params, moments, tokenizer)
        final = move_into_place(temporary, state.step)
    except OSError as error:
        action = f"save the checkpoint of step {state.step}"
        raise write_error(action, checkpoints, error, need=checkpoint_bytes(config)) from None
    finally:
        remove(temporary)  # after success there is none
    remove_oldest(checkpoints, keep=keep, keep_best=keep_best)
    return final


def read_checkpoint(
    path: str | os.PathLike[str], *, verify: bool = True, moments: bool = True
) -> Checkpoint:
    """Read a checkpoint, the newest valid one of a run, or a Hugging Face GPT-2 folder.

    ``verify=False`` compares only sizes; the checkpoints of a run are always verified.
    ``moments=False`` leaves the optimizer's numbers on the disk, two thirds of a checkpoint.

    Raises: CheckpointError, in one line that names the file, the field and the value.
    """
    folder, notices = _locate(Path(path), verify=verify)
    config = parse_config(read_object(plain_file(folder, CONFIG_FILE)), folder / CONFIG_FILE)
    params = _read_params(folder, config)
    if not (folder / HASHES_FILE).exists():
        return Checkpoint(folder, config, params, None, None, None, notices)
    source = folder / STATE_FILE
    state = TrainerState.parse(read_object(plain_file(folder, STATE_FILE)), str(source))
    trained = state.config.model
    if parse_config(config_document(trained), source) != config:
        raise CheckpointError(
            f"{folder}: {STATE_FILE} and {CONFIG_FILE} describe different models", DAMAGED
        )
    there = os.path.lexists(folder / OPTIMIZER_FILE) or part_files(folder)
    m, v = _read_moments(folder, state) if moments and there else (None, None)
    return Checkpoint(folder, trained, params, m, v, state, notices)


def moment_shapes(config: GPTConfig) -> dict[str, tuple[int, ...]]:
    """Return {name: shape} of AdamW's two moments of every parameter."""
    shapes = parameter_shapes(config)
    return {prefix + name: shapes[name] for prefix in (MEAN, SQUARE) for name in shapes}


def _check_values(
    config: GPTConfig, params: Mapping[str, Floats], moments: Mapping[str, Floats]
) -> None:
    """Refuse to save what would be refused when it is read."""
    given = {**params, **moments}
    wanted = parameter_shapes(config) | (moment_shapes(config) if moments else {})
    assert {name: array.shape for name, array in given.items()} == wanted
    for name, array in given.items():
        assert array.dtype == np.float32, name
        if not np.isfinite(array).all():
            raise CheckpointError(
                f"{name} holds values that are not finite, so no checkpoint was written",
                "go on from the last checkpoint, with a lower learning rate",
            )


def _write_files(
    folder: Path,
    state: TrainerState,
    params: Mapping[str, Floats],
    moments: Mapping[str, Floats],
    tokenizer: Tokenizer,
) -> None:
    """Write every file of a checkpoint, each on the disk before the hashes are."""
    config = state.config.model
    tokenizer.save(folder, n_ctx=config.n_ctx)
    hashes = {path.name: sync_file(path) for path in sorted(folder.iterdir())}
    for name, content in {
        CONFIG_FILE: _json(config_document(config, tokenizer.end)),
        GENERATION_FILE: _json(generation_document(tokenizer.end)),
        STATE_FILE: state.to_json(),
    }.items():
        hashes[name] = write_file(folder / name, [content])
    weights = {stored_name(name): params[name] for name in sorted(params)}
    hashes[WEIGHTS_FILE] = write_tensors(folder / WEIGHTS_FILE, weights)
    if moments:
        optimizer: dict[str, NDArray[Any]] = {"step": np.array([state.step], np.int64)}
        optimizer |= {name: moments[name] for name in sorted(moments)}
        hashes[OPTIMIZER_FILE] = write_tensors(folder / OPTIMIZER_FILE, optimizer)
    sync_folder(folder)
    files = {name: {"sha256": hash.sha256, "bytes": hash.bytes} for name, hash in hashes.items()}
    document = {"format_version": HASHES_FORMAT, "files": files}
    write_file(folder / HASHES_FILE, [_json(document)])
    sync_folder(folder)


def _json(document: object) -> bytes:
    return (json.dumps(document, indent=2, allow_nan=False) + "\n").encode()


def _locate(path: Path, *, verify: bool) -> tuple[Path, tuple[str, ...]]:
    """Find the model folder that a path stands for, and check its hashes if it has any."""
    if not os.path.isdir(path):
        if not os.path.lexists(path):
            raise CheckpointError(
                f"{path} does not exist",
                Wording(
                    "give a run, a checkpoint folder or a Hugging Face model folder",
                    terminal="see posttrainllm runs list",
                ),
            )
        raise CheckpointError(
            f"{path} is a file, wanted a folder",
            "give a run, a checkpoint folder or a Hugging Face model folder",
        )
    for checkpoints in (path / "checkpoints", path):
        if list_checkpoints(checkpoints):
            return newest_checkpoint(checkpoints)
    if os.path.isdir(path / "checkpoints"):
        return newest_checkpoint(path / "checkpoints")  # raises: there is none yet
    if os.path.lexists(path / HASHES_FILE) or os.path.lexists(path / STATE_FILE):
        verify_hashes(path, contents=verify)
    return path, ()


def _read_params(folder: Path, config: GPTConfig) -> dict[str, Floats]:
    path, stored = read_shards(folder)
    values = read_values(pick_parameters(stored, config, path))
    if config.tied and HEAD in values:
        head = values.pop(HEAD)
        if not np.array_equal(head, values["wte.weight"]):
            raise CheckpointError(
                f"{path}: tensor '{HEAD}' differs from the token embedding, and {CONFIG_FILE} says "
                "that they are tied",
                f"set tie_word_embeddings to false in its {CONFIG_FILE}",
            )
    return values


def _read_moments(folder: Path, state: TrainerState) -> tuple[dict[str, Floats], dict[str, Floats]]:
    wanted = moment_shapes(state.config.model)
    if os.path.lexists(folder / OPTIMIZER_FILE):
        path = plain_file(folder, OPTIMIZER_FILE)
        values = _read_one_file(path, wanted, state.step)
    else:
        path, values = folder, read_parts(folder, wanted)
    m = {name.removeprefix(MEAN): values[name] for name in values if name.startswith(MEAN)}
    v = {name.removeprefix(SQUARE): values[name] for name in values if name.startswith(SQUARE)}
    for name, array in v.items():
        if (array < 0).any():
            raise CheckpointError(
                f"{path}: tensor {SQUARE + name!r} holds negative values", DAMAGED
            )
    return m, v


def _read_one_file(
    path: Path, wanted: Mapping[str, tuple[int, ...]], step: int
) -> dict[str, Floats]:
    """All moments from the file that one process wrote."""
    entries = read_header(path)
    for name in {*entries, *wanted, "step"}:
        if name not in entries:
            raise CheckpointError(f"{path} lacks the tensor {name!r}", DAMAGED)
        if name != "step" and name not in wanted:
            raise CheckpointError(f"{path} holds the unknown tensor {show(name)}", DAMAGED)
    for name, shape in wanted.items():
        if entries[name].shape != shape:
            got = show(list(entries[name].shape))
            raise CheckpointError(
                f"{path}: tensor {name!r} is {got}, wanted {list(shape)}", DAMAGED
            )
    found = read_integer(entries["step"])
    if found != step:
        raise CheckpointError(
            f"{path} is of step {found}, and {STATE_FILE} of step {step}", DAMAGED
        )
    return read_values({name: entries[name] for name in wanted})
