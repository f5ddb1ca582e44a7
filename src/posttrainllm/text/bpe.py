"""Byte-level BPE, GPT-2's kind of tokenizer, run by the tokenizers library.

What the library gets is not the file but a description made anew from the parts that decide ids,
each checked first: another program wrote the file, and it may name a pattern that takes for ever, cut
every text at 1,024 tokens, or leave tokens out at random. What decides no ids (post-processor, decoder,
truncation, padding) is left aside; the file itself is kept and saved unchanged.

    model            BPE: {token: id} and pairs to merge, tokens written in GPT-2's byte characters
    pre_tokenizer    ByteLevel, alone or behind Digits: where no merge may reach across
    normalizer       none, or one of Unicode's four forms
    added_tokens     texts that are one token wherever they stand, such as <|endoftext|>

Read next: ``tokenizer_files.py``, which finds a folder's tokenizer.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from posttrainllm.errors import CheckpointError, PosttrainError
from posttrainllm.settings import show
from posttrainllm.text.tokenizer import (
    TOKENIZER_CONFIG_FILE,
    TOKENIZER_FILE,
    Ids,
    bpe_model,
    byte_characters,
    byte_level,
    check_range,
    document,
    to_bytes,
    tokenizer_config,
    write_json,
)

MAX_TOKENS = 4_194_304  # as model.n_vocab
END_OF_TEXT = "<|endoftext|>"

ONLY_THESE = "only byte tokenizers and byte-level BPE (GPT-2's kind) can be used"

_NORMALIZERS = ("NFC", "NFD", "NFKC", "NFKD")
_FLAGS = ("single_word", "lstrip", "rstrip", "normalized", "special")


class BPETokenizer:
    """A byte-level BPE vocabulary such as GPT-2's."""

    def __init__(self, text: str, n_vocab: int | None = None) -> None:
        """Read the text of a ``tokenizer.json``, which is known to be JSON.

        ``n_vocab`` is the model's vocabulary when it is not the tokenizer's: ids that no token has
        (a vocabulary padded to a round number) stand for no bytes, and added tokens beyond it,
        which the model has no numbers for, are refused where a text holds one.

        Raises: CheckpointError when it cannot be used, by the field's name.
        """
        try:
            import tokenizers
        except ImportError:
            raise CheckpointError(
                f"this {TOKENIZER_FILE} is BPE, and the tokenizers library is not installed",
                "pip install tokenizers",
            ) from None
        self._text = text
        description = checked_description(json.loads(text))
        try:
            self._bpe = tokenizers.Tokenizer.from_str(json.dumps(description))
        except BaseException as error:  # the library raises the bare class, or panics
            if isinstance(error, KeyboardInterrupt | SystemExit):
                raise
            line = " ".join(str(error).split())
            raise CheckpointError(f"{TOKENIZER_FILE} is not a tokenizer: {line[:200]}") from None
        self._added: dict[str, int] = {
            token["content"]: token["id"] for token in description["added_tokens"]
        }
        for content, index in self._added.items():
            if self._bpe.token_to_id(content) != index:
                raise CheckpointError(
                    f"{TOKENIZER_FILE}: added token {show(content)} has id {index}, and the ids before "
                    f"it give it {self._bpe.token_to_id(content)}",
                    ONLY_THESE,
                )
        self._bytes = self._bytes_of_tokens(description["model"]["vocab"])
        if n_vocab is not None:
            self._fit(n_vocab)

    def _bytes_of_tokens(self, vocabulary: Mapping[str, int]) -> list[bytes]:
        """Return the bytes of each id; an id that no token has stands for none."""
        byte_of = {character: byte for byte, character in enumerate(byte_characters())}
        table = [b""] * (max([*vocabulary.values(), *self._added.values()], default=-1) + 1)
        for token, index in vocabulary.items():
            if token in self._added:
                continue
            try:
                table[index] = bytes(byte_of[character] for character in token)
            except KeyError:
                raise CheckpointError(
                    f"{TOKENIZER_FILE}: token {index}, {show(token)}, is not made of byte characters",
                    ONLY_THESE,
                ) from None
        lacking = set(range(256)) - {token[0] for token in table if len(token) == 1}
        if lacking:
            raise CheckpointError(
                f"{TOKENIZER_FILE} has no token for byte {min(lacking)}, so that texts could not be "
                "read whole",
                ONLY_THESE,
            )
        for content, index in self._added.items():
            table[index] = to_bytes(content)
        return table

    def _fit(self, n_vocab: int) -> None:
        beyond = [i for i in range(n_vocab, len(self._bytes)) if self._bytes[i]]
        wrong = set(beyond) - set(self._added.values())
        if wrong:
            raise CheckpointError(
                f"{TOKENIZER_FILE} has token {min(wrong)}, and the model's vocabulary ends at "
                f"{n_vocab - 1}",
                "is it the tokenizer of this model?",
            )
        self._bytes = self._bytes[:n_vocab] + [b""] * (n_vocab - len(self._bytes))

    @property
    def n_vocab(self) -> int:
        """The model's vocabulary: largest id plus one, unless it was given."""
        return len(self._bytes)

    @property
    def end(self) -> int | None:
        """Id of <|endoftext|>, if it is one token that the model has a number for."""
        index = self._added.get(END_OF_TEXT)
        return index if index is not None and index < len(self._bytes) else None

    @cached_property
    def fingerprint(self) -> str:
        """First 16 hexadecimal digits of the SHA-256 of tokenizer.json."""
        return hashlib.sha256(self._text.encode()).hexdigest()[:16]

    def encode(self, text: str | bytes) -> Ids:
        """Return the ids (n,) of a text, nothing added; what is no UTF-8 is read as U+FFFD.

        Raises: PosttrainError when the text holds an added token that the model has no number for.
        """
        clean = to_bytes(text).decode("utf-8", "replace")
        ids = np.array(self._bpe.encode(clean, add_special_tokens=False).ids, np.int32)
        if ids.size and ids.max() >= len(self._bytes):
            token = self._bpe.id_to_token(int(ids.max()))
            raise PosttrainError(
                f"the text holds {show(token)}, token {ids.max()}, and the model's vocabulary ends at "
                f"{len(self._bytes) - 1}",
                "take it out of the text",
            )
        return ids

    def token_bytes(self, token: int) -> bytes:
        """Return the bytes of one id.

        Raises: PosttrainError for an id outside the vocabulary.
        """
        check_range(token, len(self._bytes))
        return self._bytes[token]

    def decode(self, ids: Iterable[int] | npt.NDArray[Any]) -> str:
        """Return the text of ids, special tokens included; what is no UTF-8 is shown as U+FFFD.

        Raises: PosttrainError for an id outside the vocabulary.
        """
        return b"".join(self.token_bytes(int(token)) for token in ids).decode("utf-8", "replace")

    def save(self, folder: Path, *, n_ctx: int | None = None) -> None:
        """Write the tokenizer.json that was read, unchanged, and a tokenizer_config.json."""
        (folder / TOKENIZER_FILE).write_bytes(self._text.encode())
        end = None if self.end is None else END_OF_TEXT
        write_json(folder / TOKENIZER_CONFIG_FILE, {**tokenizer_config(n_ctx), "eos_token": end})


def checked_description(given: object) -> dict[str, Any]:
    """Return the parts of a tokenizer.json that decide ids, in the form that the library reads.

    Raises: CheckpointError, naming the field and its value.
    """
    whole = given if isinstance(given, dict) else {}
    model = _model(whole.get("model"))
    added = whole.get("added_tokens") or []
    if not isinstance(added, list):
        raise _refusal("added_tokens", added)
    return document(
        model,
        _pre_tokenizer(whole.get("pre_tokenizer")),
        added=[_added_token(token) for token in added],
        normalizer=_normalizer(whole.get("normalizer")),
    )


def _model(model: object) -> dict[str, Any]:
    if not isinstance(model, dict) or model.get("type") != "BPE":
        kind = model.get("type") if isinstance(model, dict) else model
        raise CheckpointError(
            f"{TOKENIZER_FILE}: model.type is {show(kind)}, wanted 'BPE'", ONLY_THESE
        )
    vocabulary, merges = model.get("vocab"), model.get("merges")
    if not isinstance(vocabulary, dict) or len(vocabulary) > MAX_TOKENS:
        raise _refusal("model.vocab", vocabulary)
    for token, index in vocabulary.items():
        if type(index) is not int or not 0 <= index < MAX_TOKENS:
            raise _refusal(f"model.vocab[{show(token)}]", index)
    if len(set(vocabulary.values())) < len(vocabulary):
        raise CheckpointError(
            f"{TOKENIZER_FILE}: model.vocab gives one id to two tokens", ONLY_THESE
        )
    if not isinstance(merges, list) or len(merges) > MAX_TOKENS:
        raise _refusal("model.merges", merges)
    for field in ("dropout", "continuing_subword_prefix", "end_of_word_suffix", "byte_fallback"):
        if model.get(field):
            raise _refusal(f"model.{field}", model[field])
    return bpe_model(
        vocabulary,
        [_merge(merge, vocabulary) for merge in merges],
        ignore_merges=model.get("ignore_merges") is True,
    )


def _merge(merge: object, vocabulary: Mapping[str, int]) -> list[str]:
    """Both parts of a merge, which old files write as one text with a space between."""
    pair = merge.split(" ") if isinstance(merge, str) else merge
    if (
        not isinstance(pair, list)
        or len(pair) != 2
        or not all(isinstance(part, str) and part in vocabulary for part in pair)
        or pair[0] + pair[1] not in vocabulary
    ):
        raise _refusal("model.merges", merge)
    return pair


def _normalizer(value: object) -> dict[str, Any] | None:
    if value is None:
        return None
    if isinstance(value, dict) and value.get("type") in _NORMALIZERS:
        return {"type": value["type"]}
    raise _refusal("normalizer", value)


def _pre_tokenizer(value: object) -> dict[str, Any]:
    parts: Any = [value]
    if isinstance(value, dict) and _is(value, "Sequence"):
        parts = value.get("pretokenizers")
    if not isinstance(parts, list) or not parts or not _is(parts[-1], "ByteLevel"):
        raise _refusal("pre_tokenizer", value)
    made: list[dict[str, Any]] = []
    for part in parts:
        if _is(part, "Digits"):
            made.append({"type": "Digits", "individual_digits": part["individual_digits"] is True})
        elif _is(part, "ByteLevel"):
            made.append(
                byte_level(
                    use_regex=part.get("use_regex", True) is True,
                    add_prefix_space=part.get("add_prefix_space") is True,
                )
            )
        else:
            raise _refusal("pre_tokenizer", value)
    return made[0] if len(made) == 1 else {"type": "Sequence", "pretokenizers": made}


def _is(value: object, kind: str) -> bool:
    if not isinstance(value, dict) or value.get("type") != kind:
        return False
    return kind != "Digits" or isinstance(value.get("individual_digits"), bool)


def _added_token(value: object) -> dict[str, Any]:
    if (
        not isinstance(value, dict)
        or type(value.get("id")) is not int
        or not 0 <= value["id"] < MAX_TOKENS
        or not isinstance(value.get("content"), str)
        or not value["content"]
    ):
        raise _refusal("added_tokens", value)
    flags = {flag: value.get(flag) is True for flag in _FLAGS}
    return {"id": value["id"], "content": value["content"], **flags}


def _refusal(field: str, value: object) -> CheckpointError:
    return CheckpointError(
        f"{TOKENIZER_FILE}: {field} is {show(value)}, which is not GPT-2's kind", ONLY_THESE
    )
