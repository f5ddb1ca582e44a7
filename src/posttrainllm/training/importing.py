"""From a model of somewhere else to a run here: what `posttrainllm import` does.

A model folder of transformers and a .tinygpt file become a run with one checkpoint: of step 0 where
there are no moments, as training then starts anew; of its step where a .tinygpt file has them. A run, in a folder or in a .zip,
is taken over file by file, unchanged. Either way everything was read and checked before the run
appears under its name.

What a run says that a foreign model does not (batch, schedule, text) comes from the preset nearest in
size; until something is trained in it, ``train --resume`` may change all of that.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable
from dataclasses import dataclass
from dataclasses import replace as fields
from functools import partial
from pathlib import Path
from typing import Any

from posttrainllm.config import GPTConfig, TrainConfig, load_config, replace
from posttrainllm.errors import CheckpointError, ConfigError
from posttrainllm.formats.tinygpt import TinyGPT
from posttrainllm.formats.untrusted import DAMAGED
from posttrainllm.gallery import catalogue
from posttrainllm.runs.checkpoint import Checkpoint, list_checkpoints, write_checkpoint
from posttrainllm.runs.checkpoint_folder import newest_checkpoint
from posttrainllm.runs.folder import CONFIG_FILE, Run
from posttrainllm.runs.lock import is_locked
from posttrainllm.runs.opening import (
    Opened,
    extract_model,
    is_run,
    is_wanted,
    kind_of,
    read_file,
    read_folder,
)
from posttrainllm.runs.staging import stage_run
from posttrainllm.runs.trainer_state import TrainerState
from posttrainllm.settings import show
from posttrainllm.storage import read_error, show_bytes, write_error, write_file
from posttrainllm.text.tokenizer import ByteTokenizer, Tokenizer
from posttrainllm.text.tokenizer_files import load as load_tokenizer
from posttrainllm.training.starting import GENTLER, nearest_preset
from posttrainllm.wording import Wording, python_text, worded

BYTES = "bytes"
UNPACKED = "unpacked"

# What a run's files may have when they come from elsewhere: they are read whole.
MOST_BYTES = {CONFIG_FILE: 2**20, "metrics.jsonl": 2**28, "samples.jsonl": 2**28}
MOST_LINES = 2_000_000

# What a .tinygpt header says about training -> our settings; what does not fit them is left out.
TRAINING = {
    "batchSize": "data.batch_size",
    "learningRate": "schedule.learning_rate",
    "gradClip": "optimizer.clip_norm",
    "maxSteps": "training.steps",
    "evalEvery": "training.eval_every",
    "seed": "training.seed",
}


@dataclass(frozen=True)
class Imported:
    """A run that was made from a model of somewhere else."""

    path: Path
    checkpoint: Checkpoint
    tokenizer: Tokenizer
    kind: str
    """What it was: "run", "model folder" or ".tinygpt, fp32"."""
    notices: tuple[str, ...] = ()


def import_model(
    source: Path, *, runs_dir: Path, name: str | None = None, tokenizer: str | None = None
) -> Imported:
    """Make a run of a model folder, a run, a .zip of either, or a .tinygpt file.

    Without ``name`` it is called as the source is, with a number when that is taken. ``tokenizer``
    is "bytes" or a folder with the tokenizer, for a model folder that has none.

    Raises: CheckpointError, in one line that names the file, the field and the value; nothing is
    left then.
    """
    if not os.path.lexists(source):
        hint = (
            "give a model folder, a .zip or a .tinygpt file; to fetch one: hf download "
            "openai-community/gpt2 --local-dir gpt2"
        )
        if str(source) in catalogue.names():
            hint = worded(
                "the gallery's model needs no import: {use}",
                use=Wording(
                    f"posttrainllm.load({python_text(str(source))})",
                    terminal=f"posttrainllm generate {source}",
                ),
            )
        raise CheckpointError(f"{source} does not exist", hint)
    given = None if tokenizer is None else _tokenizer(tokenizer)
    path, made = stage_run(
        runs_dir, name, _base(source), lambda folder: _fill(source, folder, given)
    )
    inside = path / "checkpoints" / made.checkpoint.path.name
    return fields(made, path=path, checkpoint=fields(made.checkpoint, path=inside))


def _fill(source: Path, folder: Path, tokenizer: Tokenizer | None) -> Imported:
    """Make the run in an empty folder; what is wrong is said of the source, as the folder will be gone."""
    try:
        if os.path.isdir(source):
            return _from_folder(source, folder, tokenizer)
        if kind_of(source) == "tinygpt":
            return _from_tinygpt(source, folder, tokenizer)
        return _from_archive(source, folder, tokenizer)
    except (CheckpointError, ConfigError) as error:
        message = error.message.replace(str(folder / UNPACKED), str(source))
        raise CheckpointError(message.replace(str(folder), str(source)), error.hint) from None
    except OSError as error:
        raise write_error(f"import {source.name}", folder.parent, error) from None


def _base(source: Path) -> str:
    """What a run is called after: the folder or file, or the model's name in the cache of huggingface_hub."""
    if not os.path.isdir(source):
        return source.name.removesuffix(".zip").removesuffix(".tinygpt")
    folder = source.resolve()
    if folder.parent.name == "snapshots":  # models--openai-community--gpt2/snapshots/<revision>
        return folder.parent.parent.name.rpartition("--")[2]
    return folder.name


def _tokenizer(place: str) -> Tokenizer:
    return ByteTokenizer() if place == BYTES else load_tokenizer(Path(place))


def _from_folder(source: Path, folder: Path, tokenizer: Tokenizer | None) -> Imported:
    if is_run(source):
        _check_own_tokenizer(source, "a run", tokenizer)
        _copy_run(source, folder)
        return _check_run(folder)
    opened = read_folder(source, moments=True, tokenizer=tokenizer)
    state = opened.checkpoint.state
    if state is not None:
        _check_own_tokenizer(source, "a checkpoint", tokenizer)
    config = _config(opened.checkpoint.config) if state is None else state.config
    _write(opened, folder, config)
    del opened  # what was written is read back, and both together may be too much
    return _read_back(folder, "model folder" if state is None else "checkpoint")


def _from_tinygpt(source: Path, folder: Path, tokenizer: Tokenizer | None) -> Imported:
    _check_own_tokenizer(source, "a .tinygpt file", tokenizer)
    opened = read_file(source, moments=True)
    assert opened.file is not None
    kind = f".tinygpt, {opened.file.dtype}"
    _write(opened, folder, _tinygpt_config(opened.file))
    del opened
    return _read_back(folder, kind)


def _from_archive(source: Path, folder: Path, tokenizer: Tokenizer | None) -> Imported:
    inside = folder / UNPACKED
    inside.mkdir()
    left = extract_model(source, inside).left
    if is_run(inside):
        _check_own_tokenizer(source, "a run", tokenizer)
        for path in sorted(inside.iterdir()):
            path.rename(folder / path.name)
        imported = _check_run(folder)
    else:
        imported = _from_folder(inside, folder, tokenizer)
    shutil.rmtree(inside)
    notices = imported.notices
    if left:
        shown = ", ".join(show(name) for name in left[:3]) + (", ..." if len(left) > 3 else "")
        count = "a file that is" if len(left) == 1 else f"{len(left):,} files that are"
        notices += (f"left out {count} no part of a run: {shown}",)
    return fields(imported, notices=notices)


def _check_own_tokenizer(source: Path, kind: str, tokenizer: Tokenizer | None) -> None:
    """Refuse another tokenizer than the one that a model was trained with."""
    if tokenizer is not None:
        raise CheckpointError(
            f"{source} is {kind}, which has a tokenizer of its own",
            worded("leave out {data.tokenizer}"),
        )


def _copy_run(source: Path, folder: Path) -> None:
    """Copy the files of a run that a zip of it would hold."""
    if is_locked(source):
        raise CheckpointError(f"run {source.name} is being trained", "wait for it, or stop it")
    for parent, folders, names in os.walk(source, onerror=_refuse_unreadable):
        folders.sort()
        for name in sorted(names):
            path = Path(parent) / name
            relative = path.relative_to(source).as_posix()
            if not is_wanted(relative):
                continue
            if path.is_symlink() or not path.is_file():
                raise CheckpointError(f"{path} is not a regular file", "copy the file itself there")
            try:
                stream = path.open("rb")
            except OSError as error:
                raise read_error(path, error) from None
            target = folder / relative
            try:
                with stream:
                    target.parent.mkdir(parents=True, exist_ok=True)
                    write_file(target, iter(partial(stream.read, 2**20), b""))
            except OSError as error:
                raise write_error(f"copy {relative}", folder.parent, error) from None


def _refuse_unreadable(error: OSError) -> None:
    raise read_error(Path(error.filename), error) from None


def _check_run(folder: Path) -> Imported:
    """Read everything that a run holds, as training and ``runs`` would."""
    run = Run(folder)
    for name, most in MOST_BYTES.items():
        path = folder / name
        if path.exists() and path.stat().st_size > most:
            raise CheckpointError(
                f"{path} is larger than {show_bytes(most)}, too large for its kind", DAMAGED
            )
        if path.exists() and _lines(path) > MOST_LINES:
            raise CheckpointError(f"{path} has more than {MOST_LINES:,} lines", DAMAGED)
    config = run.config()
    if not list_checkpoints(run.checkpoints):
        raise CheckpointError("the run has no checkpoint", "let it train to its first one")
    run.metrics.read()
    run.samples.read()
    imported = _read_back(folder, "run")
    if imported.checkpoint.config != config.model:
        raise CheckpointError(
            f"config.toml and {imported.checkpoint.path.name} describe different models",
            "the run is damaged: take it again from where it came",
        )
    return imported


def _lines(path: Path) -> int:
    with path.open("rb") as stream:
        return sum(piece.count(b"\n") for piece in iter(lambda: stream.read(2**20), b""))


def _read_back(folder: Path, kind: str) -> Imported:
    """What stands in the run, read from the disk."""
    path, notices = newest_checkpoint(folder / "checkpoints")
    opened = read_folder(path, moments=True)
    return Imported(folder, opened.checkpoint, opened.tokenizer, kind, notices)


def _write(opened: Opened, folder: Path, config: TrainConfig) -> None:
    """Write a run of one checkpoint into an empty folder."""
    checkpoint, run = opened.checkpoint, Run(folder)
    file = opened.file
    state = checkpoint.state or TrainerState(
        step=file.step if file is not None and file.m is not None else 0,
        seed=config.training.seed,
        engine=config.engine.name,
        threads=0,
        tokenizer=opened.tokenizer.fingerprint,
        elapsed_s=0.0,
        config=config,
    )
    try:
        run.write_config(config)
        for line in _history(file) if file is not None and state.step else []:
            run.metrics.append(line)
        write_checkpoint(
            run.checkpoints,
            state=state,
            params=checkpoint.params,
            m=checkpoint.m,
            v=checkpoint.v,
            tokenizer=opened.tokenizer,
            keep=1,
        )
    except CheckpointError as error:  # that of the disk, and no fault of the source
        message = error.message.replace(str(run.checkpoints), str(folder.parent))
        raise CheckpointError(
            message.replace(str(folder), str(folder.parent)), error.hint
        ) from None


def _config(model: GPTConfig) -> TrainConfig:
    """The configuration of a run for a foreign model: the nearest preset's, at a gentler rate."""
    base = load_config(nearest_preset(model))
    sizes: dict[str, object] = {f"model.{key}": value for key, value in model.model_dump().items()}
    return replace(base, {**sizes, "schedule.learning_rate": base.schedule.learning_rate / GENTLER})


def _tinygpt_config(file: TinyGPT) -> TrainConfig:
    """The configuration of a run for a .tinygpt file: what its header says about training, at a constant rate."""
    config = replace(
        _config(file.config), {"schedule.kind": "constant", "schedule.warmup_steps": 0}
    )
    for theirs, ours in TRAINING.items():
        value: Any = file.training.get(theirs)
        if ours in ("schedule.learning_rate", "optimizer.clip_norm") and type(value) is int:
            value = float(value)
        try:
            config = replace(config, {ours: value})
        except ConfigError:
            continue
    steps = max(file.step, config.training.steps)
    return replace(config, {"training.steps": steps})


def _history(file: TinyGPT) -> Iterable[dict[str, Any]]:
    """The losses of a header as lines of metrics.jsonl, as far as they are what they should be."""
    last = 0
    for entry in file.history:
        if not isinstance(entry, dict):
            continue
        step, loss, val = (entry.get(key) for key in ("step", "train", "val"))
        if type(step) is not int or not last < step <= file.step or not is_number(loss):
            continue
        last = step
        yield {
            "step": step,
            "loss": loss,
            "val_loss": val if is_number(val) else None,
            "lr": None,
            "grad_norm": None,
            "tokens_per_second": None,
            "elapsed_s": None,
        }


def is_number(value: object) -> bool:
    """Tell whether a JSON value is a number; true and false are none."""
    return isinstance(value, int | float) and not isinstance(value, bool)
