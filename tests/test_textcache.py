"""Files beside a corpus: what large texts and other tokenizers leave in the cache."""

from __future__ import annotations

import hashlib
import json
import os
import time

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from posttrainllm.storage import default_cache_dir
from posttrainllm.text import cache as textcache
from posttrainllm.text import corpus as corpus_module
from posttrainllm.text.cache import encodable_pieces
from posttrainllm.text.tokenizer import ByteTokenizer, byte_characters
from posttrainllm.text.tokenizer_files import load
from text_fixtures import TEXT, refusal, whole

pytest_plugins = ("text_fixtures",)


# What is remembered


@pytest.mark.usefixtures("big_files")
@pytest.mark.parametrize("names", [["a.txt"], ["a.txt", "b.txt"]])
def test_large_files_are_read_through_once(open_text, write, monkeypatch, names):
    sources = [write(name, TEXT.replace(b"\n", b"\r\n")) for name in names]
    first = open_text(*sources)
    monkeypatch.setattr(corpus_module, "TextCheck", None)  # reading a file through would fail now
    again = open_text(*sources)
    assert (again.sha256, again.notices) == (first.sha256, first.notices)
    assert whole(again) == whole(first)


@pytest.mark.usefixtures("big_files")
@pytest.mark.parametrize("names", [["a.txt"], ["a.txt", "b.txt"]])
def test_a_changed_large_file_is_read_again(open_text, write, names):
    sources = [write(name) for name in names]
    first = open_text(*sources)
    write("a.txt", TEXT.swapcase())
    os.utime(sources[0], ns=(10**18, 10**18))
    again = open_text(*sources)
    assert whole(again).startswith(TEXT.swapcase())
    assert again.sha256 == hashlib.sha256(whole(again)).hexdigest() != first.sha256


def test_a_file_changed_a_moment_ago_is_not_remembered(open_text, write, cache, monkeypatch):
    monkeypatch.setattr(corpus_module, "READ_WHOLE", 0)
    path = write("a.txt")
    open_text(path)
    assert not (cache / "facts").exists()
    os.utime(path, (time.time() - 60,) * 2)
    open_text(path)
    assert len(list((cache / "facts").iterdir())) == 1


@pytest.mark.usefixtures("big_files")
def test_damaged_or_lost_cache_files_are_made_again(open_text, write, cache):
    sources = [write("a.txt"), write("b.txt")]
    first = open_text(*sources)
    [facts] = (cache / "facts").iterdir()
    facts.write_bytes(b'{"sha256": 3')
    assert open_text(*sources).sha256 == first.sha256
    (cache / "text" / f"{first.sha256}.txt").unlink()
    assert whole(open_text(*sources)) == whole(first)


@pytest.mark.usefixtures("big_files")
def test_a_file_that_grows_while_it_is_read_is_refused(open_text, write, monkeypatch):
    path = write("log.txt")
    pieces = corpus_module.TextCheck.pieces

    def growing(self, stream):
        yield from pieces(self, stream)
        with open(path, "ab") as log:
            log.write(b"more")

    monkeypatch.setattr(corpus_module.TextCheck, "pieces", growing)
    assert "changed while it was read" in refusal(open_text, path)


def test_the_cache_folder_is_the_users(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert default_cache_dir() == tmp_path / "posttrainllm"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("USERPROFILE", str(tmp_path / "home"))
    assert default_cache_dir() == tmp_path / "home" / ".cache" / "posttrainllm"


# Other tokenizers


@pytest.fixture
def bpe(require, tmp_path):
    require("tokenizers")
    vocab = {character: index for index, character in enumerate(byte_characters())}
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "use_regex": True}
    byte_level["trim_offsets"] = True
    model = {"type": "BPE", "vocab": {**vocab, "li": 256, "ne": 257, "line": 258}}
    model["merges"] = [["l", "i"], ["n", "e"], ["li", "ne"]]
    description = {"version": "1.0", "added_tokens": [], "normalizer": None, "model": model}
    description |= {"pre_tokenizer": byte_level, "decoder": byte_level, "post_processor": None}
    (tmp_path / "tokenizer.json").write_text(json.dumps(description), "utf-8")
    return load(tmp_path)


def test_bpe_parts_hold_the_same_text_as_byte_parts(open_text, write, bpe, cache, monkeypatch):
    path = write("a.txt", TEXT + "\u6f22\u5b57\n".encode() * 50)
    in_bytes = open_text(path)
    monkeypatch.setattr(textcache, "ENCODED_AT_ONCE", 500)
    text = open_text(path, tokenizer=bpe)
    assert text.train.dtype == np.uint16
    assert text.train.max() == 258
    assert bpe.decode(text.train).encode() == in_bytes.train.tobytes() == text.train_text.tobytes()
    assert bpe.decode(text.val).encode() == in_bytes.val.tobytes() == text.val_text.tobytes()
    assert np.array_equal(text.train, bpe.encode(text.train_text.tobytes()))
    monkeypatch.setattr(type(bpe), "encode", None)  # encoding again would fail now
    assert np.array_equal(open_text(path, tokenizer=bpe).val, text.val)


def test_a_byte_tokenizer_needs_no_cache(open_text, write, cache):
    open_text(write("a.txt"), tokenizer=ByteTokenizer())
    assert not cache.exists()


@given(st.text(), st.integers(4, 9))
def test_encodable_pieces_are_the_text_and_cut_no_character(text, size):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(textcache, "ENCODED_AT_ONCE", size)
        pieces = list(encodable_pieces(np.frombuffer(text.encode(), np.uint8)))
    assert "".join(piece.decode() for piece in pieces) == text
