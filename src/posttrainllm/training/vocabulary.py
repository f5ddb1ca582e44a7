"""A tokenizer made of somebody's text, as a folder that training and transformers read: what ``posttrainllm tokenizer`` does.

What this is: ``make_tokenizer``. The vocabulary is learnt from the training part alone, measured on the validation part, and written
whole or not at all.
What this is not: the learning (``text/bpe_training.py``).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from posttrainllm.figures import Progress, untold
from posttrainllm.storage import sync_folder
from posttrainllm.text.bpe import BPETokenizer
from posttrainllm.text.bpe_training import train_bpe
from posttrainllm.text.cache import encodable_pieces
from posttrainllm.text.corpus import Corpus, open_corpus
from posttrainllm.training.places import check_folder, hidden

USUAL = 4096
"""Tokens of a vocabulary that nobody gave a size: for texts of a few MB and models that train in minutes."""

BYTES_A_TOKEN = 64
"""Room on the disk that a token of a vocabulary takes at most, usually."""

EXAMPLE = 240  # characters


@dataclass(frozen=True, repr=False)
class NewTokenizer:
    """A tokenizer's folder, and how well its vocabulary fits the text."""

    path: Path
    tokenizer: BPETokenizer
    corpus: Corpus
    wanted: int
    """Tokens that were asked for."""
    bytes_per_token: float
    """On the first megabyte of the validation part; of the training part where there is no other."""
    example: tuple[str, ...]
    """The beginning of that part, token by token."""

    def __repr__(self) -> str:
        """One line: where it is, and how well it fits."""
        return f"NewTokenizer({str(self.path)!r}, {self.n_vocab:,} tokens of {self.bytes_per_token:.2f} bytes)"

    @property
    def n_vocab(self) -> int:
        """Tokens of the vocabulary."""
        return self.tokenizer.n_vocab

    @property
    def notices(self) -> tuple[str, ...]:
        """What the user should know about the text and the vocabulary."""
        if self.n_vocab == self.wanted:
            return self.corpus.notices
        short = (
            f"the text has frequent pairs for {self.n_vocab:,} tokens, and {self.wanted:,} were asked for: "
            "give more text for a larger vocabulary"
        )
        return (*self.corpus.notices, short)


def make_tokenizer(
    sources: Sequence[str],
    place: Path,
    *,
    n_vocab: int = USUAL,
    val_fraction: float,
    progress: Progress = untold,
) -> NewTokenizer:
    """Learn a byte-level BPE vocabulary from the training part of a text and write it into the new folder ``place``.

    ``sources`` and ``val_fraction`` as in ``open_corpus``: with those of a later training, its validation part stays unseen.

    Raises: CorpusError, ConfigError; CheckpointError when the folder cannot be written. Nothing is left behind then.
    """
    check_folder(place)
    corpus = open_corpus(sources, val_fraction=val_fraction, progress=progress)
    tokenizer = train_bpe(corpus.train_text, n_vocab, progress)
    with hidden(place, BYTES_A_TOKEN * n_vocab) as folder:
        folder.mkdir()
        tokenizer.save(folder)
        sync_folder(folder)
    measured = next(
        encodable_pieces(corpus.val_text if len(corpus.val_text) else corpus.train_text)
    )
    return NewTokenizer(
        path=place,
        tokenizer=tokenizer,
        corpus=corpus,
        wanted=n_vocab,
        bytes_per_token=len(measured) / len(tokenizer.encode(measured)),
        example=tuple(
            tokenizer.token_bytes(int(token)).decode("utf-8", "replace")
            for token in tokenizer.encode(_example(measured))
        ),
    )


def _example(text: bytes) -> str:
    """The first whole lines of a text; its beginning where lines are long."""
    beginning = text[: 2 * EXAMPLE].decode("utf-8", "ignore")
    lines = beginning[beginning.find("\n") + 1 : beginning.rfind("\n") + 1].strip()
    return lines[:EXAMPLE] or beginning[:EXAMPLE]
