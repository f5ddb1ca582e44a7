"""Text to token ids and back: what a tokenizer is, and the byte tokenizer, which is the default.

The byte tokenizer has no training and no files of its own: token ``i`` is the byte ``i`` of the
text's UTF-8 form. So every text has ids, every sequence of ids has a text, and sizes, limits and
splits are all counted in bytes. What it saves beside a checkpoint is a stock Hugging Face tokenizer
with the same ids, so that ``transformers.AutoTokenizer`` reads the folder.

A tokenizer is anything with the members of ``Tokenizer``; the other one is ``bpe.py``, and
``tokenizer_files.py`` finds the one that a folder holds. Decoding is always "join the tokens' bytes,
then read them as UTF-8", which is what lets ``StreamDecoder`` print token by token without ever
showing half a character.

Read text/corpus.py next.
"""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from posttrainllm.errors import PosttrainError

TOKENIZER_FILE = "tokenizer.json"
TOKENIZER_CONFIG_FILE = "tokenizer_config.json"

Ids = npt.NDArray[np.int32]

# Python carries an undecodable byte of a command line as one of U+DC80..U+DCFF.
# Every other surrogate stands for nothing.
_LONE_SURROGATE = re.compile("[\ud800-\udc7f\udd00-\udfff]")


class Tokenizer(Protocol):
    """What training, sampling and checkpoints ask of a tokenizer."""

    @property
    def n_vocab(self) -> int:
        """Number of ids; every id is in ``range(n_vocab)``."""

    @property
    def fingerprint(self) -> str:
        """Short text, equal exactly when the ids are; part of the names of cached token files."""

    @property
    def end(self) -> int | None:
        """Id that ends a text, where the vocabulary has one: a model writes it when it is done."""

    def encode(self, text: str | bytes) -> Ids:
        """Return the ids (n,) of a text."""

    def token_bytes(self, token: int) -> bytes:
        """Return the bytes that one id stands for."""

    def decode(self, ids: Iterable[int] | npt.NDArray[Any]) -> str:
        """Return the text of ids; bytes that are no UTF-8 are shown as U+FFFD."""

    def save(self, folder: Path, *, n_ctx: int | None = None) -> None:
        """Write the tokenizer's files into a folder; ``n_ctx`` becomes model_max_length."""


def to_bytes(text: str | bytes) -> bytes:
    """Return the UTF-8 form of a text; never fails.

    A str may hold surrogates, which have no UTF-8 form. Those by which Python carries undecodable
    bytes of a command line or a file name become these bytes again; any other becomes U+FFFD, as
    in a browser's TextEncoder.
    """
    if isinstance(text, bytes):
        return text
    try:
        return text.encode("utf-8")
    except UnicodeEncodeError:
        return _LONE_SURROGATE.sub("\ufffd", text).encode("utf-8", "surrogateescape")


def byte_characters() -> str:
    """Return GPT-2's printable stand-ins: character ``i`` of the result stands for byte ``i``.

    Printable Latin-1 stands for itself; the other 68 bytes take the code points from 256 on, in
    order. Source: bytes_to_unicode in ``src/encoder.py`` of openai/gpt-2; the ByteLevel parts of
    the tokenizers library use the same table.
    """
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(0x100, 0x200))
    return "".join(chr(byte if byte in printable else next(others)) for byte in range(256))


class ByteTokenizer:
    """The 256 bytes as vocabulary: id = byte value."""

    n_vocab = 256
    fingerprint = "bytes"
    end = None

    def encode(self, text: str | bytes) -> Ids:
        """Return the bytes of a text as ids (n,), n its length in bytes."""
        return np.frombuffer(to_bytes(text), np.uint8).astype(np.int32)

    def token_bytes(self, token: int) -> bytes:
        """Return the one byte of an id.

        Raises: PosttrainError for an id outside 0..255.
        """
        check_range(token, 256)
        return bytes((token,))

    def decode(self, ids: Iterable[int] | npt.NDArray[Any]) -> str:
        """Return the text of ids; bytes that are no UTF-8 are shown as U+FFFD.

        Raises: PosttrainError for an id outside 0..255.
        """
        tokens = ids.tolist() if isinstance(ids, np.ndarray) else [int(token) for token in ids]
        for token in (min(tokens, default=0), max(tokens, default=0)):
            check_range(token, 256)
        return bytes(tokens).decode("utf-8", "replace")

    def save(self, folder: Path, *, n_ctx: int | None = None) -> None:
        """Write the two files of a tokenizer that stock transformers reads without a warning."""
        write_json(folder / TOKENIZER_FILE, _byte_level_description())
        write_json(folder / TOKENIZER_CONFIG_FILE, tokenizer_config(n_ctx))


class StreamDecoder:
    """Text of tokens as they come, in pieces that never end inside a character.

    The pieces of ``push`` and the last one of ``finish``, joined, equal ``decode`` of all tokens.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        """Start a text of this tokenizer's tokens."""
        self._tokenizer = tokenizer
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token: int) -> str:
        """Take one token and return the text that it completes; inside a character, none."""
        return self._utf8.decode(self._tokenizer.token_bytes(token))

    def finish(self) -> str:
        """End the text; return U+FFFD for a character that was never completed, or nothing."""
        return self._utf8.decode(b"", final=True)


def check_range(token: int, n_vocab: int) -> None:
    """Refuse an id that is outside of the vocabulary, with PosttrainError."""
    if not 0 <= token < n_vocab:
        raise PosttrainError(f"token {token} is outside the vocabulary 0..{n_vocab - 1}")


def _byte_level_description() -> dict[str, Any]:
    """Return a tokenizer.json whose ids are byte values: BPE of 256 characters with no merges.

    The form is the one that the tokenizers library itself writes. No class of GPT-2's is named:
    GPT2Tokenizer would add a token 256.
    """
    vocabulary = {character: byte for byte, character in enumerate(byte_characters())}
    level = byte_level(use_regex=False)
    return document(bpe_model(vocabulary, []), level, decoder=level)


def document(
    model: Mapping[str, Any],
    pre_tokenizer: Mapping[str, Any],
    *,
    added: Sequence[Mapping[str, Any]] = (),
    normalizer: Mapping[str, Any] | None = None,
    decoder: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Return a tokenizer.json of these parts, with every other one explicitly null."""
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": list(added),
        "normalizer": normalizer,
        "pre_tokenizer": pre_tokenizer,
        "post_processor": None,
        "decoder": decoder,
        "model": model,
    }


def special_token(index: int, content: str) -> dict[str, Any]:
    """Return an entry of a tokenizer.json's ``added_tokens``: a text that is one token wherever it stands."""
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    return {"id": index, "content": content, **flags, "special": True}


def bpe_model(
    vocabulary: Mapping[str, int], merges: Sequence[object], *, ignore_merges: bool = False
) -> dict[str, Any]:
    """Return the model part of a tokenizer.json: plain BPE of byte characters."""
    return {
        "type": "BPE",
        "dropout": None,
        "unk_token": None,
        "continuing_subword_prefix": None,
        "end_of_word_suffix": None,
        "fuse_unk": False,
        "byte_fallback": False,
        "ignore_merges": ignore_merges,
        "vocab": vocabulary,
        "merges": merges,
    }


def byte_level(*, use_regex: bool, add_prefix_space: bool = False) -> dict[str, Any]:
    """Return the part of a tokenizer.json that turns bytes into characters; with the regex it also cuts texts into words."""
    return {
        "type": "ByteLevel",
        "add_prefix_space": add_prefix_space,
        "trim_offsets": True,
        "use_regex": use_regex,
    }


def is_byte_level(description: object) -> bool:
    """Tell whether a tokenizer.json gives byte values, in whatever form a library wrote it again.

    Only what decides ids is compared: not the decoder, nor the truncation and padding that
    transformers may have saved.
    """
    ours = _byte_level_description()
    if not isinstance(description, dict):
        return False
    same = all(description.get(key) == ours[key] for key in ("added_tokens", "normalizer", "model"))
    pre_tokenizer = description.get("pre_tokenizer")
    if not isinstance(pre_tokenizer, dict):
        return False
    return same and {**pre_tokenizer, "trim_offsets": True} == ours["pre_tokenizer"]


def tokenizer_config(n_ctx: int | None) -> dict[str, Any]:
    """Return a tokenizer_config.json in which no special token is left for a library to invent."""
    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": None,
        "eos_token": None,
        "unk_token": None,
        "pad_token": None,
        "clean_up_tokenization_spaces": False,
    }
    return config if n_ctx is None else {**config, "model_max_length": n_ctx}


def write_json(path: Path, value: Any) -> None:
    """Write a JSON file as the other files of a model folder are written."""
    path.write_bytes((json.dumps(value, indent=2, ensure_ascii=False) + "\n").encode("utf-8"))
