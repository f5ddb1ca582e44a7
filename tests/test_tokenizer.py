"""Bytes in, ids out, and back: in this package, in a stream, and in stock transformers."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from needs import require
from posttrainllm.errors import CheckpointError, PosttrainError
from posttrainllm.text.bpe import BPETokenizer
from posttrainllm.text.tokenizer import (
    ByteTokenizer,
    StreamDecoder,
    byte_characters,
    to_bytes,
)
from posttrainllm.text.tokenizer_files import load

TORTURE = [
    "",
    " ",
    "\n",
    "  leading and trailing  ",
    "ROMEO:\nBut, soft! what light through yonder window breaks?",
    "don't we'll I'm , . ! ?  n't 's",
    "tabs\tand\x0bvertical\x0cform feeds",
    "CR\rLF\nCRLF\r\n\r\n",
    "NUL\0inside\0\0",
    "\ufeffbyte order mark",
    "caf\u00e9 against cafe\u0301 (combining)",
    "Z\u0351\u036b\u0343\u036a\u0302\u036b\u033d\u034f\u0334\u0319\u0324\u031e",
    "\U0001f600 \U0001f469\u200d\U0001f52c \U0001f3f3\ufe0f\u200d\U0001f308 \U0001f1e9\U0001f1ea",
    "\u6f22\u5b57\u304b\u306a\u4ea4\u3058\u308a\u6587 \ud55c\uad6d\uc5b4 \u4e2d\u6587\u3002",
    "\u0645\u0631\u062d\u0628\u0627 \u05e9\u05dc\u05d5\u05dd \u202eright to left\u202c",
    "\u0939\u093f\u0928\u094d\u0926\u0940 \u0e44\u0e17\u0e22 \u1000\u103c\u1014\u103a\u1019\u102c",
    "\u00a0no-break\u2003em\u200bzero\u2028line\u2029paragraph\u0085next",
    "\U00010348 \U0010ffff \ufffd \ufffe \uffff",
    "<|endoftext|> <s> </s> [CLS] <pad> <0x41>",
    "\u0120\u010a\u0109 the byte characters themselves \u0100\u0143",
    "1234567890 3.14159 1e-5 0x7f",
    "line " * 20_000,
    "\u00fc" * 10_000,
    bytes(range(256)).decode("latin-1"),
]

READ_WITH_TRANSFORMERS = """
import json, sys
from transformers import AutoTokenizer
tokenizer = AutoTokenizer.from_pretrained(sys.argv[1])
texts = json.load(sys.stdin)
ids = [tokenizer(text)["input_ids"] for text in texts]
json.dump({
    "n_vocab": len(tokenizer),
    "special": tokenizer.special_tokens_map,
    "model_max_length": tokenizer.model_max_length,
    "ids": ids,
    "texts": [tokenizer.decode(each) for each in ids],
    "broken": tokenizer.decode([72, 195, 40, 226, 130, 33, 255]),
}, sys.stdout)
"""


def small_bpe() -> dict[str, Any]:
    """Return a byte-level BPE of 256 bytes, two merges and one special token, as GPT-2's is."""
    vocab = {character: index for index, character in enumerate(byte_characters())}
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "use_regex": True}
    byte_level["trim_offsets"] = True
    special = {"id": 258, "content": "<|endoftext|>", "special": True, "normalized": False}
    special |= {"single_word": False, "lstrip": False, "rstrip": False}
    return {
        "version": "1.0",
        "added_tokens": [special],
        "normalizer": None,
        "pre_tokenizer": byte_level,
        "post_processor": None,
        "decoder": byte_level,
        "model": {
            "type": "BPE",
            "vocab": {**vocab, "th": 256, "the": 257, "<|endoftext|>": 258},
            "merges": [["t", "h"], ["th", "e"]],
        },
    }


@pytest.mark.parametrize("text", TORTURE, ids=lambda text: ascii(text[:12]))
def test_byte_tokenizer_gives_the_utf8_bytes_and_the_text_back(text: str) -> None:
    ids = ByteTokenizer().encode(text)
    assert ids.dtype == np.int32
    assert bytes(ids.tolist()) == text.encode("utf-8")
    assert ByteTokenizer().decode(ids) == text


@given(st.text())
def test_byte_tokenizer_round_trips_any_text(text: str) -> None:
    assert ByteTokenizer().decode(ByteTokenizer().encode(text)) == text


@given(st.text(st.characters(categories=["Cs", "L"])))
def test_byte_tokenizer_takes_any_surrogate(text: str) -> None:
    ids = ByteTokenizer().encode(text)
    assert ByteTokenizer().encode(ByteTokenizer().decode(ids)).dtype == np.int32


def test_surrogates_become_the_bytes_that_python_hid_in_them_or_a_replacement() -> None:
    assert to_bytes(b"caf\xe9".decode("utf-8", "surrogateescape")) == b"caf\xe9"
    assert to_bytes("a\ud800b\udfffc") == b"a\xef\xbf\xbdb\xef\xbf\xbdc"
    assert to_bytes(b"\xff\x00") == b"\xff\x00"


def test_byte_tokenizer_decodes_lists_and_arrays_of_any_integer_type() -> None:
    for kind in (np.uint8, np.int32, np.int64):
        assert ByteTokenizer().decode(np.array([72, 105], kind)) == "Hi"
    assert ByteTokenizer().decode(iter((72, 105))) == "Hi"
    assert ByteTokenizer().decode([]) == ""
    assert ByteTokenizer().decode([72, 195, 40]) == "H\ufffd("


@pytest.mark.parametrize("token", [-1, 256, 50256])
def test_byte_tokenizer_refuses_ids_outside_its_vocabulary(token: int) -> None:
    with pytest.raises(PosttrainError, match=rf"token {token} is outside the vocabulary 0\.\.255"):
        ByteTokenizer().decode([1, token, 2])
    with pytest.raises(PosttrainError, match="outside the vocabulary"):
        ByteTokenizer().token_bytes(token)


@given(st.one_of(st.binary(), st.text().map(str.encode)))
def test_stream_decoder_pieces_join_to_the_decoded_text(raw: bytes) -> None:
    stream = StreamDecoder(ByteTokenizer())
    pieces = [*(stream.push(byte) for byte in raw), stream.finish()]
    assert "".join(pieces) == ByteTokenizer().decode(list(raw))


@given(st.text())
def test_stream_decoder_never_shows_half_a_character(text: str) -> None:
    stream = StreamDecoder(ByteTokenizer())
    pieces = [stream.push(byte) for byte in text.encode()]
    assert all(len(piece) <= 1 for piece in pieces)
    assert "".join(pieces) == text
    assert stream.finish() == ""


def test_byte_characters_are_those_of_gpt2() -> None:
    characters = byte_characters()
    assert len(set(characters)) == 256
    assert characters[0x41] == "A"
    assert (characters[0x20], characters[0x0A], characters[0x00]) == ("\u0120", "\u010a", "\u0100")
    assert (characters[0x7F], characters[0xA0], characters[0xAD]) == ("\u0121", "\u0142", "\u0143")


def test_saved_byte_tokenizer_loads_as_itself(tmp_path: Path) -> None:
    ByteTokenizer().save(tmp_path, n_ctx=64)
    assert isinstance(load(tmp_path), ByteTokenizer)
    config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    assert config["model_max_length"] == 64
    assert config["bos_token"] is None
    assert config["eos_token"] is None


def test_saved_byte_tokenizer_gives_the_same_ids_in_tokenizers(tmp_path: Path) -> None:
    tokenizers = require("tokenizers")
    ByteTokenizer().save(tmp_path)
    other = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    assert other.get_vocab_size() == 256
    for text in TORTURE:
        assert other.encode(text).ids == ByteTokenizer().encode(text).tolist()
    other.save(str(tmp_path / "tokenizer.json"))  # in the library's own hand it is still ours
    assert isinstance(load(tmp_path), ByteTokenizer)


def test_saved_byte_tokenizer_is_read_by_transformers_without_a_word(tmp_path: Path) -> None:
    require("transformers")
    ByteTokenizer().save(tmp_path, n_ctx=10**6)
    config = {"model_type": "gpt2", "vocab_size": 256, "bos_token_id": None, "eos_token_id": None}
    (tmp_path / "config.json").write_text(json.dumps(config))
    done = subprocess.run(
        [sys.executable, "-W", "always::UserWarning", "-c", READ_WITH_TRANSFORMERS, str(tmp_path)],
        input=json.dumps(TORTURE),
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, "HF_HUB_OFFLINE": "1", "PYTHONIOENCODING": "utf-8"},
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    read = json.loads(done.stdout)
    assert read["n_vocab"] == 256
    assert read["special"] == {}
    assert read["model_max_length"] == 10**6
    assert read["ids"] == [ByteTokenizer().encode(text).tolist() for text in TORTURE]
    assert read["texts"] == TORTURE
    assert read["broken"] == ByteTokenizer().decode([72, 195, 40, 226, 130, 33, 255])


def test_bpe_tokenizer_is_loaded_and_streams_bytes(tmp_path: Path) -> None:
    require("tokenizers")
    (tmp_path / "tokenizer.json").write_text(json.dumps(small_bpe()), encoding="utf-8")
    tokenizer = load(tmp_path)
    assert isinstance(tokenizer, BPETokenizer)
    assert tokenizer.n_vocab == 259
    assert tokenizer.encode("the\u00e9<|endoftext|>").tolist() == [257, 0xC3, 0xA9, 258]
    assert tokenizer.decode([257, 0xC3, 0xA9, 258]) == "the\u00e9<|endoftext|>"
    stream = StreamDecoder(tokenizer)
    assert [stream.push(token) for token in (257, 0xC3, 0xA9)] == ["the", "", "\u00e9"]
    for text in TORTURE:
        assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.encode("\ud800").tolist() == [0xEF, 0xBF, 0xBD]
    with pytest.raises(PosttrainError, match=r"token 259 is outside the vocabulary 0\.\.258"):
        tokenizer.decode([259])


def test_bpe_tokenizer_is_saved_unchanged(tmp_path: Path) -> None:
    require("tokenizers")
    first, second = tmp_path / "first", tmp_path / "second"
    first.mkdir()
    second.mkdir()
    (first / "tokenizer.json").write_text(json.dumps(small_bpe()), encoding="utf-8")
    load(first).save(second, n_ctx=1024)
    assert (second / "tokenizer.json").read_bytes() == (first / "tokenizer.json").read_bytes()
    assert load(second).fingerprint == load(first).fingerprint != ByteTokenizer().fingerprint


def permuted(description: dict[str, Any]) -> dict[str, Any]:
    """Swap two ids, so that it looks like ours and is not."""
    vocab = description["model"]["vocab"]
    vocab["A"], vocab["B"] = vocab["B"], vocab["A"]
    return description


def prefixed(description: dict[str, Any]) -> dict[str, Any]:
    """Add a space before every text, as RoBERTa's kin do."""
    description["pre_tokenizer"]["add_prefix_space"] = True
    return description


@pytest.mark.parametrize(("change", "ids"), [(permuted, [66, 65]), (prefixed, [32, 65, 66])])
def test_a_tokenizer_with_other_ids_is_not_taken_for_bytes(
    tmp_path: Path, change: Callable[[dict[str, Any]], dict[str, Any]], ids: list[int]
) -> None:
    require("tokenizers")
    ByteTokenizer().save(tmp_path)
    path = tmp_path / "tokenizer.json"
    path.write_text(json.dumps(change(json.loads(path.read_text("utf-8")))), encoding="utf-8")
    tokenizer = load(tmp_path)
    assert isinstance(tokenizer, BPETokenizer)
    assert tokenizer.encode("AB").tolist() == ids


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is not valid JSON"),
        (b"{", "is not valid JSON"),
        (b"\xff\xfe", "is not valid JSON"),
        (b"[" * 100_000, "is not valid JSON"),
        (b"[]", "model.type is None, wanted 'BPE'"),
        (b"null", "model.type is None, wanted 'BPE'"),
        (b'{"model": {"type": "WordPiece"}}', "model.type is 'WordPiece', wanted 'BPE'"),
        (b'{"model": {"type": "BPE"}}', "model.vocab is None"),
        (
            json.dumps(
                {
                    "model": {"type": "BPE", "vocab": {"\u2581a": 0}, "merges": []},
                    "pre_tokenizer": {"type": "ByteLevel"},
                }
            ).encode(),
            "is not made of byte characters",
        ),
    ],
)
def test_load_refuses_what_it_cannot_use(tmp_path: Path, content: bytes, message: str) -> None:
    require("tokenizers")
    (tmp_path / "tokenizer.json").write_bytes(content)
    with pytest.raises(CheckpointError) as caught:
        load(tmp_path)
    assert message in caught.value.message
    assert str(tmp_path) in caught.value.message


def test_load_names_the_folder_without_a_tokenizer(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"has no tokenizer\.json"):
        load(tmp_path)
    (tmp_path / "tokenizer.json").mkdir()
    with pytest.raises(CheckpointError, match="cannot be read"):
        load(tmp_path)
