"""Making a tokenizer of a text: what it learns, what it leaves unread, what it writes, and what is said about it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import posttrainllm
from needs import require
from posttrainllm.cli import main
from posttrainllm.errors import ConfigError, PosttrainError
from posttrainllm.text import cache
from posttrainllm.text.bpe import BPETokenizer
from posttrainllm.text.bpe_training import train_bpe
from posttrainllm.text.cache import TextCache
from posttrainllm.text.corpus import default_corpus_path
from posttrainllm.text.tokenizer_files import load
from posttrainllm.training.comparison import TEXTS, transformers_ids
from posttrainllm.training.vocabulary import USUAL

SHAKESPEARE = default_corpus_path().read_bytes()


def as_array(text: bytes) -> Any:
    return np.frombuffer(text, np.uint8)


@pytest.fixture(scope="module")
def tokenizer() -> BPETokenizer:
    return train_bpe(as_array(SHAKESPEARE), 1000)


@pytest.fixture(autouse=True)
def _in_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_frequent_words_become_tokens_and_any_bytes_come_back(tokenizer):
    assert tokenizer.n_vocab == 1000
    assert tokenizer.end == 999
    pieces = [tokenizer.token_bytes(token) for token in range(1000)]
    assert {bytes([value]) for value in range(256)} <= set(pieces)
    assert {b" the", b" and", b"KING"} <= set(pieces)
    assert len(SHAKESPEARE) / len(tokenizer.encode(SHAKESPEARE)) > 2.2
    for text in (SHAKESPEARE.decode(), "\0 caf\u00e9 \U0001f600\r\n\tx" * 3, ""):
        assert tokenizer.decode(tokenizer.encode(text)) == text


def test_a_token_never_reaches_from_one_word_into_the_next(tokenizer):
    learnt = [tokenizer.token_bytes(token) for token in range(999)]
    assert not [token for token in learnt if b" " in token.strip(b" ") or b"\n" in token.strip()]


def test_the_same_text_gives_the_same_vocabulary(tokenizer):
    again = train_bpe(as_array(SHAKESPEARE), 1000)
    assert again.fingerprint == tokenizer.fingerprint


def test_a_smaller_vocabulary_is_the_beginning_of_a_larger_one(tokenizer):
    smaller = train_bpe(as_array(SHAKESPEARE), 400)
    assert [smaller.token_bytes(t) for t in range(399)] == [
        tokenizer.token_bytes(t) for t in range(399)
    ]


def test_the_end_of_a_text_is_one_token_and_no_joined_one_knows_it():
    found = train_bpe(as_array(b"once<|endoftext|>twice" * 50), 300)
    assert found.encode("once<|endoftext|>").tolist()[-1] == found.end == found.n_vocab - 1
    learnt = [found.token_bytes(token) for token in range(found.n_vocab - 1)]
    assert not any(b"<|" in token or b"|>" in token for token in learnt)


def test_a_text_with_few_pairs_gives_a_smaller_vocabulary():
    assert train_bpe(as_array(b"abababab"), 500).n_vocab == 259  # ab and abab
    assert train_bpe(as_array(b""), 500).n_vocab == 257
    assert train_bpe(as_array(b"\xff\xfe\x80 \xff"), 300).n_vocab >= 257


@pytest.mark.parametrize("size", [-1, 0, 256, 4_194_305])
def test_sizes_that_no_vocabulary_has_are_refused(size):
    with pytest.raises(ConfigError, match="257 to 4,194,304"):
        train_bpe(as_array(b"text"), size)


def test_progress_counts_the_bytes_that_were_read():
    told: list[tuple[str, int, int]] = []
    train_bpe(as_array(SHAKESPEARE * 8), 300, lambda *what: told.append(what))
    assert told
    assert all(0 <= done <= (total or done) for _, done, total in told)


def test_ids_of_many_pieces_are_those_of_the_whole(tokenizer, tmp_path, monkeypatch):
    monkeypatch.setattr(cache, "ENCODED_AT_ONCE", 10_000)
    told: list[tuple[str, int, int]] = []
    text = as_array(SHAKESPEARE[:200_000])
    ids = TextCache(tmp_path / "cache").tokens(
        text, tokenizer, "a", lambda *what: told.append(what)
    )
    assert ids.tolist() == tokenizer.encode(text.tobytes()).tolist()
    assert told[-1][1:] == (200_000, 200_000)
    assert [done for _, done, _ in told] == sorted({done for _, done, _ in told})


def test_only_the_training_part_is_read():
    Path("text.txt").write_text("common words " * 200 + "zyzzyva zyzzyva " * 12)
    made = posttrainllm.train_tokenizer("text.txt", "made", n_vocab=400, val_fraction=0.1)
    tokens = [made.tokenizer.token_bytes(token) for token in range(made.n_vocab)]
    assert b" words" in tokens
    assert not any(b"zy" in token for token in tokens)
    assert made.n_vocab < 400
    assert "give more text" in made.notices[-1]


def test_the_folder_is_read_by_training_and_by_transformers():
    require("transformers")
    made = posttrainllm.train_tokenizer(folder="made", n_vocab=600)
    assert sorted(path.name for path in Path("made").iterdir()) == [
        "tokenizer.json",
        "tokenizer_config.json",
    ]
    ours = load(Path("made"))
    assert ours.fingerprint == made.tokenizer.fingerprint
    assert transformers_ids(Path("made"), TEXTS) == [ours.encode(text).tolist() for text in TEXTS]


def test_a_model_is_trained_on_it_and_says_bits_a_byte(capsys):
    assert main(["tokenizer", "--n-vocab", "500", "--to", "made"]) == 0
    said = capsys.readouterr().out
    assert "500 tokens" in said
    assert "train --tokenizer made" in said
    assert main(["train", "--tokenizer", "made", "--preset", "tiny", "--steps", "3"]) == 0
    said = capsys.readouterr().out
    assert "bits a byte" in said
    assert "bytes each" in said
    assert posttrainllm.open_run("tiny-001").config.model.n_vocab == 500


def test_json_and_the_example(capsys):
    assert main(["tokenizer", "--n-vocab", "500", "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["path"] == "tokenizer-500"
    assert facts["n_vocab"] == 500
    assert facts["bytes_per_token"] > 1.5
    assert "".join(facts["example"]) in SHAKESPEARE.decode()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--n-vocab", "100"], "257 to 4,194,304 tokens, got 100"),
        (["nothing.txt"], "nothing.txt"),
        (["--to", "."], "is the folder you are in"),
        (["--to", "full"], "exists and is not empty"),
        (["--to", "/proc/nowhere"], "/proc"),
        (["--val-fraction", "2"], "val"),
    ],
)
def test_what_cannot_be_is_one_line_and_leaves_nothing(arguments, said, capsys, tmp_path):
    Path("full").mkdir()
    Path("full/file").touch()
    assert main(["tokenizer", *arguments]) == 2
    told = capsys.readouterr()
    assert said in told.err
    assert not told.out
    assert [path.name for path in tmp_path.iterdir()] == ["full"]


def test_a_failing_library_is_one_line(monkeypatch):
    def fail(pieces: Any, n_vocab: int) -> str:
        raise BaseException("a panic")

    monkeypatch.setattr("posttrainllm.text.bpe_training._learnt", fail)
    with pytest.raises(PosttrainError, match="no vocabulary came of this text: a panic"):
        train_bpe(as_array(b"text"), 300)


def test_the_usual_size_is_the_one_that_help_and_docstring_name(capsys):
    assert main(["tokenizer", "--help"]) == 0
    told = capsys.readouterr().out
    assert f"{USUAL:,}" in told
    assert f"tokenizer-{USUAL}" in told
    assert f"tokenizer-{USUAL}" in (posttrainllm.train_tokenizer.__doc__ or "")
    assert posttrainllm.train_tokenizer().path == Path(f"tokenizer-{USUAL}")
