"""From a model here to files for others: what `posttrainllm export` does.

    hf        a folder that transformers loads as it is: GPT2LMHeadModel and its tokenizer
    tinygpt   one .tinygpt file, float32 with AdamW's moments or float16
    zip       the run as it stands, file by file; the browser and `posttrainllm import` open it

What was written is read again and compared before it gets its name: weights bit for bit, logits and
token ids by ``comparison.py``. What fails leaves nothing behind.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from dataclasses import replace as fields
from pathlib import Path
from typing import Any

import numpy as np

from posttrainllm.config import GPTConfig, TrainConfig, load_config, settings_of
from posttrainllm.errors import CheckpointError, ConfigError
from posttrainllm.formats import archive, tinygpt
from posttrainllm.formats.huggingface import (
    CONFIG_FILE,
    GENERATION_FILE,
    WEIGHTS_FILE,
    config_document,
    generation_document,
    stored_name,
)
from posttrainllm.formats.tensor_file import Floats, write_tensors
from posttrainllm.formats.tinygpt import TinyGPT, read_tinygpt, write_tinygpt
from posttrainllm.formats.tinygpt_layout import state_bytes
from posttrainllm.runs.checkpoint import Checkpoint, list_checkpoints
from posttrainllm.runs.checkpoint_folder import DamagedError, checkpoint_bytes, verify_hashes
from posttrainllm.runs.folder import CORPUS_FILE, Run
from posttrainllm.runs.lock import is_locked
from posttrainllm.runs.opening import extract_model, is_run, is_wanted, read_folder
from posttrainllm.settings import show
from posttrainllm.storage import hash_file, sync_folder, write_file
from posttrainllm.text.tokenizer import ByteTokenizer
from posttrainllm.training.carried_text import carried_text
from posttrainllm.training.comparison import (
    TEXTS,
    Comparison,
    check_ids,
    compare,
    has_transformers,
    our_logits,
    sample_tokens,
    transformers_ids,
    transformers_logits,
)
from posttrainllm.training.importing import TRAINING, is_number
from posttrainllm.training.models import Found, find_model
from posttrainllm.training.places import check_model_folder, hidden, new_file, remove
from posttrainllm.training.starting import nearest_preset
from posttrainllm.wording import Wording, worded

FORMS = ("hf", "tinygpt", "zip")
DTYPES = {"float32": "fp32", "float16": "fp16"}

OURS = "posttrainllm"
MOST_HISTORY = 512  # losses that a .tinygpt header takes
MOST_SAMPLE = 320  # characters


@dataclass(frozen=True)
class Exported:
    """Where a model went, how large it is there, and how far its logits are from those of the source."""

    path: Path
    bytes: int
    comparison: Comparison
    notices: tuple[str, ...] = ()


def export_model(
    name: str,
    form: str,
    place: Path,
    *,
    runs_dir: Path,
    dtype: str = "float32",
    approximate: bool = False,
) -> Exported:
    """Write a model that ``find_model`` knows as ``form``, read it again and compare.

    ``place`` is the new folder for hf; for the others the new file, or a folder to put it into.
    ``dtype`` float16 is for tinygpt alone. ``approximate`` lets a model of the tanh form of GELU become
    a .tinygpt, which has the erf form: the logits then differ a little, and by how much is returned.

    Raises: CheckpointError, ConfigError, with nothing left behind.
    """
    if form not in FORMS:
        raise ConfigError(
            f"form is {show(form)}, wanted one of {', '.join(FORMS)}",
            worded("for example {form=hf}"),
        )
    if dtype not in DTYPES or (dtype != "float32" and form != "tinygpt"):
        raise ConfigError(
            f"dtype is {show(dtype)}, wanted float32"
            + (" or float16" if form == "tinygpt" else f" for form {form}"),
            "float16 is a form of .tinygpt files" if form != "tinygpt" else "",
        )
    found = find_model(name, runs_dir, moments=form == "tinygpt")
    notices = found.checkpoint.notices
    if form == "hf":
        exported = _hf(found, place)
    elif form == "tinygpt":
        exported = _tinygpt(found, new_file(found, place, form), DTYPES[dtype], approximate)
    else:
        exported = _zip(found, new_file(found, place, form))
    return fields(exported, notices=(*notices, *exported.notices))


# --- hf --------------------------------------------------------------------------------------


def _hf(found: Found, place: Path) -> Exported:
    check_model_folder(place)
    config, params = found.checkpoint.config, found.checkpoint.params
    with hidden(place, checkpoint_bytes(config) // 3 + 2**20) as folder:
        folder.mkdir()
        found.tokenizer.save(folder, n_ctx=config.n_ctx)
        write_file(folder / CONFIG_FILE, [_json(config_document(config, found.tokenizer.end))])
        write_file(folder / GENERATION_FILE, [_json(generation_document(found.tokenizer.end))])
        weights = {stored_name(name): params[name] for name in sorted(params)}
        write_tensors(folder / WEIGHTS_FILE, weights)
        sync_folder(folder)
        back = read_folder(folder)
        _check_same(back.checkpoint.params, params, place)
        tokens = sample_tokens(config)
        wanted = our_logits(config, params, tokens)
        if has_transformers():
            got, reader = transformers_logits(folder, tokens)
            ids = transformers_ids(folder, TEXTS)
        else:
            got, reader = our_logits(back.checkpoint.config, back.checkpoint.params, tokens), OURS
            ids = [back.tokenizer.encode(text).tolist() for text in TEXTS]
        comparison = compare(got, wanted, reader)
        comparison.check(place)
        check_ids(ids, found.tokenizer, place, reader)
        size = sum(path.stat().st_size for path in folder.iterdir())
    return Exported(place, size, comparison)


def _check_same(got: Mapping[str, Floats], wanted: Mapping[str, Floats], path: Path) -> None:
    for name, array in wanted.items():
        if not np.array_equal(got[name], array):
            raise CheckpointError(
                f"{path} was written, but {name} reads back with other values",
                "nothing was kept: is the disk sound?",
            )


def _json(document: object) -> bytes:
    return (json.dumps(document, indent=2, allow_nan=False) + "\n").encode()


# --- tinygpt ---------------------------------------------------------------------------------


def _tinygpt(found: Found, path: Path, dtype: str, approximate: bool) -> Exported:
    checkpoint = found.checkpoint
    wrong = tinygpt.differences(checkpoint.config)
    if found.tokenizer.fingerprint != ByteTokenizer().fingerprint:
        wrong.append("its tokens are not the bytes, as a .tinygpt model's are")
    near = all(line.startswith("activation ") for line in wrong)
    if wrong and not (near and approximate):
        raise CheckpointError(
            f"{checkpoint.path} cannot become a .tinygpt file: {'; '.join(wrong)}",
            worded(
                "{approximate=True} writes it all the same and says how far the logits are apart"
            )
            if near
            else worded("export it with {form=hf}"),
        )
    there = checkpoint.config.model_dump()
    config = GPTConfig(**{**there, "activation": "gelu", "dropout": 0.0})
    settings, history, about = _training(checkpoint)
    step = 0 if checkpoint.state is None else checkpoint.state.step
    m, v = (checkpoint.m, checkpoint.v) if dtype == "fp32" else (None, None)
    file = TinyGPT(config, checkpoint.params, m, v, step, dtype, settings, history)
    with hidden(path, state_bytes(config, dtype) + 2**20) as temporary:
        write_tinygpt(temporary, file, about)
        back = read_tinygpt(temporary)
        wanted = checkpoint.params
        if dtype == "fp16":
            wanted = {n: a.astype(np.float16).astype(np.float32) for n, a in wanted.items()}
        _check_same(back.params, wanted, path)
        if m is not None and v is not None and back.m is not None and back.v is not None:
            _check_same(back.m, m, path)
            _check_same(back.v, v, path)
        tokens = sample_tokens(config)
        meant = our_logits(checkpoint.config, checkpoint.params, tokens)
        comparison = compare(our_logits(back.config, back.params, tokens), meant, OURS)
        if dtype == "fp32" and not wrong:
            comparison.check(path)
        size = temporary.stat().st_size
    note = "the file has the erf form of GELU, the model the tanh form"
    return Exported(path, size, comparison, (note,) if wrong else ())


def _training(
    checkpoint: Checkpoint,
) -> tuple[dict[str, Any], list[dict[str, Any]], dict[str, Any]]:
    """What a .tinygpt header says about training: settings, losses, and what stands beside them."""
    state = checkpoint.state
    config: TrainConfig = (
        load_config(nearest_preset(checkpoint.config)) if state is None else state.config
    )
    ours = settings_of(config)
    settings = {theirs: ours[key] for theirs, key in TRAINING.items()}
    settings["backend"] = "webgpu" if config.engine.name == "webgpu" else "wasm"
    folder = _run_of(checkpoint)
    if state is None or folder is None:
        return settings, [], {}
    run = Run(folder)
    lines = [
        line
        for line in run.metrics.read()
        if type(line.get("step")) is int
        and is_number(line.get("loss"))
        and line["step"] <= state.step
    ]
    measured = [
        {"step": line["step"], "train": line["loss"], "val": line.get("val_loss")}
        for line in lines
        if is_number(line.get("val_loss")) or line is lines[-1]
    ]
    best = min(
        (entry for entry in measured if is_number(entry["val"])),
        key=lambda entry: entry["val"],
        default=None,
    )
    samples = run.samples.read()
    about = {
        "finalLoss": measured[-1] if measured else None,
        "bestVal": best and {"loss": best["val"], "step": best["step"]},
        "sample": str(samples[-1].get("prompt", "")) + str(samples[-1].get("text", ""))
        if samples
        else "",
    }
    about["sample"] = str(about["sample"])[:MOST_SAMPLE]
    return settings, measured[-MOST_HISTORY:], about


# --- zip -------------------------------------------------------------------------------------


def _zip(found: Found, path: Path) -> Exported:
    source = _run_of(found.checkpoint)
    if source is None:
        raise CheckpointError(
            f"{found.checkpoint.path} is no run, and a .zip is a run as it stands",
            worded("export it with {form=hf}")
            if found.int8
            else Wording("import it first", terminal="make it one first: posttrainllm import"),
        )
    if is_locked(source):
        raise CheckpointError(f"run {source.name} is being trained", "wait for it, or stop it")
    files = _run_files(source)
    need = sum(file.stat().st_size for _, file in files)
    config, params, state = found.checkpoint.config, found.checkpoint.params, found.checkpoint.state
    assert state is not None
    with (
        hidden(path, 2 * need + 2**20) as temporary,
        carried_text(source, state, temporary) as (text, notice),
    ):
        if text is not None:
            files.append((CORPUS_FILE, text))
        archive.write_archive(temporary, [(f"{source.name}/{name}", file) for name, file in files])
        unpacked = temporary.with_name(temporary.name + "-check")
        remove(unpacked)
        try:
            unpacked.mkdir()
            extract_model(temporary, unpacked)
            for name, file in files:
                if hash_file(unpacked / name) != hash_file(file):
                    raise CheckpointError(
                        f"{path} was written, but {name} in it is not the run's",
                        "is the run being trained? try again",
                    )
            back = read_folder(unpacked)
            tokens = sample_tokens(config)
            got = our_logits(back.checkpoint.config, back.checkpoint.params, tokens)
            comparison = compare(got, our_logits(config, params, tokens), OURS)
            comparison.check(path)
            check_ids(
                [back.tokenizer.encode(t).tolist() for t in TEXTS], found.tokenizer, path, OURS
            )
        finally:
            remove(unpacked)
        size = temporary.stat().st_size
    return Exported(path, size, comparison, (notice,) if notice else ())


def _run_of(checkpoint: Checkpoint) -> Path | None:
    """The run that a checkpoint stands in, if it does."""
    folder = checkpoint.path.resolve()
    inside = checkpoint.state is not None and folder.is_dir() and is_run(folder.parent.parent)
    return folder.parent.parent if inside else None


def _run_files(run: Path) -> list[tuple[str, Path]]:
    """(name inside, file) of everything that makes a run: its checkpoints that are whole, and what lies beside them."""
    whole = {folder.name for folder in list_checkpoints(run / "checkpoints") if _is_whole(folder)}
    files = []
    for parent, folders, names in os.walk(run):
        folders.sort()
        for name in sorted(names):
            path = Path(parent) / name
            inside = path.relative_to(run).as_posix()
            part_of = inside.split("/")[1] if inside.startswith("checkpoints/") else None
            if is_wanted(inside) and (part_of is None or part_of in whole) and path.is_file():
                files.append((inside, path))
    return files


def _is_whole(folder: Path) -> bool:
    try:
        verify_hashes(folder)
    except DamagedError:
        return False
    return True
