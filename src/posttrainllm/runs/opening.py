"""Reading a model that somebody names by a path: a folder of ours, of transformers, or one file.

    folder            a run, a checkpoint, or a model folder of transformers
    .zip              a run as `posttrainllm export --to zip` and the browser pack it, or one of these folders
    .tinygpt          see formats/tinygpt.py

What a file is, its first bytes say, never its name. The tokenizer comes along, fitted to the model.
Names of runs and of the gallery's models are found in ``training/models.py``.
"""

from __future__ import annotations

import os
import re
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from posttrainllm.errors import CheckpointError
from posttrainllm.formats import archive
from posttrainllm.formats.archive import Extracted, extract_archive
from posttrainllm.formats.shards import PICKLES
from posttrainllm.formats.tinygpt import TinyGPT, read_tinygpt
from posttrainllm.formats.tinygpt_layout import MAGIC as TINYGPT_MAGIC
from posttrainllm.formats.untrusted import plain_file
from posttrainllm.runs.checkpoint import Checkpoint, read_checkpoint
from posttrainllm.runs.folder import CONFIG_FILE, CORPUS_FILE
from posttrainllm.settings import show
from posttrainllm.storage import read_error, reason
from posttrainllm.text.tokenizer import ByteTokenizer, Tokenizer
from posttrainllm.text.tokenizer_files import FILES as TOKENIZER_FILES
from posttrainllm.text.tokenizer_files import load

KNOWN = "give a model folder, a .zip of a run, or a .tinygpt file"

_RUN_FILES = re.compile(
    rf"{re.escape(CONFIG_FILE)}|{re.escape(CORPUS_FILE)}|(metrics|samples)\.jsonl"
    r"|checkpoints/step-\d{6,12}/[^/]+"
)
_MODEL_FILES = re.compile(r"[^/]+\.(json|safetensors)|merges\.txt")


@dataclass(frozen=True)
class Opened:
    """A model and its tokenizer; ``file`` is what else a .tinygpt file says."""

    checkpoint: Checkpoint
    tokenizer: Tokenizer
    file: TinyGPT | None = None


def read_folder(
    folder: Path, *, moments: bool = False, tokenizer: Tokenizer | None = None
) -> Opened:
    """Read a run's newest checkpoint, a checkpoint, or a model folder of transformers.

    ``tokenizer`` goes before the folder's own.

    Raises: CheckpointError.
    """
    checkpoint = read_checkpoint(folder, moments=moments)
    found = tokenizer or folder_tokenizer(checkpoint.path, checkpoint.config.n_vocab)
    if found.n_vocab != checkpoint.config.n_vocab:
        raise CheckpointError(
            f"{folder} has a vocabulary of {checkpoint.config.n_vocab:,}, and the tokenizer given "
            f"{found.n_vocab:,}",
            "give the model's own tokenizer",
        )
    return Opened(checkpoint, found)


def folder_tokenizer(folder: Path, n_vocab: int) -> Tokenizer:
    """Return the tokenizer of a model folder, fitted to the model; its files must be plain ones.

    Raises: CheckpointError.
    """
    for name in TOKENIZER_FILES:
        if os.path.lexists(folder / name):
            plain_file(folder, name)
    return load(folder, n_vocab)


def read_file(path: Path, *, moments: bool = False) -> Opened:
    """Read a model from one file, a .tinygpt or a .zip.

    A zip is unpacked into a temporary folder, which is gone when this returns.

    Raises: CheckpointError.
    """
    if kind_of(path) == "tinygpt":
        file = read_tinygpt(path)
        m, v = (file.m, file.v) if moments else (None, None)
        checkpoint = Checkpoint(path, file.config, file.params, m, v, None)
        return Opened(checkpoint, ByteTokenizer(), file)
    with _temporary(path) as folder:
        try:
            extract_model(path, folder)
            opened = read_folder(folder, moments=moments)
        except CheckpointError as error:  # nobody can look into a folder that is gone
            message = error.message.replace(str(folder), str(path))
            raise CheckpointError(message, error.hint) from None
    return replace(opened, checkpoint=replace(opened.checkpoint, path=path))


def extract_model(path: Path, folder: Path) -> Extracted:
    """Unpack what belongs to a run, or to a model folder, into an empty folder.

    Raises: CheckpointError, also for an archive of neither.
    """
    extracted = extract_archive(path, folder, is_wanted)
    if not any(name.endswith(".safetensors") for name in extracted.names):
        pickles = [name for name in extracted.left if name.endswith(PICKLES)]
        if pickles:
            raise CheckpointError(
                f"{path}: {show(pickles[0])} is a pickle, which can run any program and is never loaded",
                "save the model as safetensors, with transformers' save_pretrained",
            )
        deep = [name for name in extracted.left if name.endswith(".safetensors")]
        if deep:
            raise CheckpointError(
                f"{path}: {show(deep[0])} does not lie where a run or a model folder has its weights",
                "pack the run or the model folder itself",
            )
        raise CheckpointError(
            f"{path} holds neither a run nor a model: it has no .safetensors file", KNOWN
        )
    return extracted


def is_wanted(name: str) -> bool:
    """Tell whether a name inside an archive is that of a run's file or of a model folder's."""
    return bool(_RUN_FILES.fullmatch(name) or _MODEL_FILES.fullmatch(name))


def is_run(folder: Path) -> bool:
    """Tell whether a folder is a run, with or without checkpoints so far."""
    return os.path.isfile(folder / CONFIG_FILE) and os.path.isdir(folder / "checkpoints")


def kind_of(path: Path) -> str:
    """Return "tinygpt" or "zip" for a file, by its first bytes.

    Raises: CheckpointError for anything else, saying what it seems to be.
    """
    if not os.path.isfile(path):
        what = "does not exist"
        if os.path.exists(path):
            what = "is not a regular file"
        elif os.path.islink(path):
            what = "is a link that leads nowhere"
        raise CheckpointError(f"{path} {what}", KNOWN)
    try:
        with path.open("rb") as stream:
            start = stream.read(8)
    except OSError as error:
        raise read_error(path, error) from None
    if start.startswith(TINYGPT_MAGIC):
        return "tinygpt"
    if start.startswith((archive.MAGIC, b"PK\x05\x06")):
        return "zip"
    if start[:1] == b"\x80" or path.name.endswith(PICKLES):
        raise CheckpointError(
            f"{path} is a pickle, which can run any program and is never loaded",
            "save the model as safetensors, with transformers' save_pretrained",
        )
    if path.name.endswith((".safetensors", ".json")):
        raise CheckpointError(
            f"{path} is one file of a model, and its folder is wanted", f"give {path.parent}"
        )
    raise CheckpointError(f"{path} is no model: it begins with {show(start)}", KNOWN)


@contextmanager
def _temporary(path: Path) -> Iterator[Path]:
    try:
        with tempfile.TemporaryDirectory(prefix="posttrainllm-") as name:
            inside = Path(name) / "model"
            inside.mkdir()
            yield inside
    except OSError as error:
        raise CheckpointError(
            f"{path} cannot be unpacked: {reason(error)}", archive.UNPACK_ELSEWHERE
        ) from None
