"""Which tokenizer a model folder holds: bytes, a tokenizer.json, or GPT-2's older pair of files.

    tokenizer.json                 the form of the tokenizers library; goes before the others
    vocab.json and merges.txt      {token: id}, and one pair to merge a line, the first merged first;
                                   beside them perhaps added_tokens.json, {token: id}

Read next: ``bpe.py``, which says what may stand in them.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from posttrainllm.errors import CheckpointError
from posttrainllm.settings import show
from posttrainllm.storage import read_error, show_bytes
from posttrainllm.text.bpe import END_OF_TEXT, ONLY_THESE, BPETokenizer
from posttrainllm.text.tokenizer import (
    TOKENIZER_CONFIG_FILE,
    TOKENIZER_FILE,
    ByteTokenizer,
    Tokenizer,
    bpe_model,
    byte_level,
    document,
    is_byte_level,
    special_token,
)
from posttrainllm.wording import worded

VOCABULARY_FILE = "vocab.json"
MERGES_FILE = "merges.txt"
ADDED_FILE = "added_tokens.json"

FILES = (TOKENIZER_FILE, TOKENIZER_CONFIG_FILE, VOCABULARY_FILE, MERGES_FILE, ADDED_FILE)

MAX_BYTES = 32 * 2**20  # GPT-2's has 2 or 4 MB
# Lists and objects, which take twenty times their two characters; a merge is one.
MAX_CONTAINERS = 1_000_000
MOST_UNMADE = 32  # tokens that no merge makes: <pad> and the like, in the vocabulary alone
DAMAGED = "the file is damaged: take another checkpoint, or export the model again"


def load(folder: Path, n_vocab: int | None = None) -> Tokenizer:
    """Return the tokenizer that a model folder holds.

    ``n_vocab`` is the vocabulary of the model beside it. A larger one than the tokenizer's is taken
    for padding; a smaller one is refused, as ids of a text would reach beyond it.

    Raises: CheckpointError when there is none, or it is damaged, or of a kind that cannot be used.
    """
    if not os.path.isdir(folder):
        what = "is no folder" if os.path.lexists(folder) else "does not exist"
        raise CheckpointError(
            f"{folder} {what}, wanted the folder of a tokenizer",
            f"give a folder that holds {TOKENIZER_FILE}, or {VOCABULARY_FILE} and {MERGES_FILE}",
        )
    path = folder / TOKENIZER_FILE
    if not os.path.exists(path) and os.path.exists(folder / VOCABULARY_FILE):
        text = json.dumps(_from_pair(folder), ensure_ascii=False)
    else:
        text = _read(path)
    description = _parse(text, path)
    if is_byte_level(description):
        if n_vocab is not None and n_vocab != ByteTokenizer.n_vocab:
            raise CheckpointError(
                f"{path} is the byte tokenizer, of {ByteTokenizer.n_vocab} tokens, and the model has "
                f"a vocabulary of {n_vocab:,}",
                "copy the model's own tokenizer into the folder",
            )
        return ByteTokenizer()
    try:
        return BPETokenizer(text, n_vocab)
    except CheckpointError as error:
        raise CheckpointError(f"{folder}: {error.message}", error.hint) from None


def _from_pair(folder: Path) -> dict[str, Any]:
    """Describe the tokenizer of vocab.json and merges.txt as a tokenizer.json would."""
    vocabulary = _object(folder / VOCABULARY_FILE)
    lines = _read(folder / MERGES_FILE).split("\n")
    if lines[0].startswith("#version"):
        del lines[0]
    merges = [line.rstrip("\r") for line in lines if line.strip()]
    added = {END_OF_TEXT: vocabulary[END_OF_TEXT]} if END_OF_TEXT in vocabulary else {}
    if (folder / ADDED_FILE).exists():
        added |= _object(folder / ADDED_FILE)
    for content, index in added.items():
        if type(index) is not int:
            raise CheckpointError(
                f"{folder}: the id of {show(content)} is {show(index)}, wanted a whole number",
                ONLY_THESE,
            )
    _check_merges(folder, vocabulary, merges, added)
    config = folder / TOKENIZER_CONFIG_FILE
    settings = _object(config) if config.exists() else {}
    level = byte_level(use_regex=True, add_prefix_space=settings.get("add_prefix_space") is True)
    tokens = [
        special_token(index, content)
        for content, index in sorted(added.items(), key=lambda item: item[1])
    ]
    return document(bpe_model(vocabulary, merges), level, added=tokens, decoder=level)


def _check_merges(
    folder: Path, vocabulary: Mapping[str, Any], merges: Sequence[str], added: Mapping[str, Any]
) -> None:
    """Refuse merges that end early: texts would be read as bytes, with no error and a much higher loss."""
    made = {merge.replace(" ", "") for merge in merges}
    longer = [token for token in vocabulary if len(token) > 1 and token not in added]
    lacking = sum(token not in made for token in longer)
    if lacking > max(MOST_UNMADE, len(longer) // 10):
        raise CheckpointError(
            f"{folder / MERGES_FILE} makes {len(longer) - lacking:,} of the {len(longer):,} tokens of "
            f"{VOCABULARY_FILE} that are longer than a byte",
            "it is cut off: copy it again from where the model came",
        )


def _object(path: Path) -> dict[str, Any]:
    document = _parse(_read(path), path)
    if not isinstance(document, dict):
        raise CheckpointError(f"{path} must hold a JSON object, got {show(document)}", DAMAGED)
    return document


def _parse(text: str, path: Path) -> Any:
    if text.count("[") + text.count("{") > MAX_CONTAINERS:
        raise CheckpointError(
            f"{path} has more than {MAX_CONTAINERS:,} lists and objects, too many for its kind",
            DAMAGED,
        )
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        line = " ".join(str(error).split())
        raise CheckpointError(f"{path} is not valid JSON: {line}", DAMAGED) from None


def _read(path: Path) -> str:
    try:
        with path.open("rb") as stream:
            content = stream.read(MAX_BYTES + 1)
    except FileNotFoundError:
        raise CheckpointError(
            f"{path.parent} has no {path.name}",
            worded(
                "copy the model's tokenizer into the folder: tokenizer.json, or vocab.json and merges.txt; or name "
                "a folder that has it: {data.tokenizer}"
            ),
        ) from None
    except OSError as error:
        raise read_error(path, error) from None
    if len(content) > MAX_BYTES:
        raise CheckpointError(
            f"{path} is larger than {show_bytes(MAX_BYTES)}, too large for its kind", DAMAGED
        )
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise CheckpointError(
            f"{path} is not valid JSON: byte {error.start} is not UTF-8", DAMAGED
        ) from None
