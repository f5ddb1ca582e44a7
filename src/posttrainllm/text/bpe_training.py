"""A byte-level BPE vocabulary made of a text: which pairs of tokens are worth a token of their own.

What this is: ``train_bpe``. It begins with the 256 bytes and joins the most frequent pair of
neighbours into a new token, over and over, never across the border of two words (Sennrich, Haddow and
Birch 2016; GPT-2's pattern cuts the words). The tokenizers library counts and joins.
What this is not: encoding with the result (``bpe.py``). Only the training part of a text belongs in
here: a vocabulary that knows the validation part would make it look easier than it is.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from posttrainllm.errors import ConfigError, PosttrainError
from posttrainllm.figures import Progress, untold
from posttrainllm.text.bpe import END_OF_TEXT, MAX_TOKENS, BPETokenizer
from posttrainllm.text.cache import encodable_pieces
from posttrainllm.text.tokenizer import bpe_model, byte_level, document, special_token

SMALLEST = 256 + 1
"""Tokens of the smallest vocabulary: the bytes and <|endoftext|>."""

RARE = 2
"""How often a pair must stand in the text, at least, to become a token."""

PERIOD_S = 0.1
FED_AT_ONCE = 1 << 16  # characters: the library takes 256 such pieces at a time


def train_bpe(
    text: npt.NDArray[np.uint8],
    n_vocab: int,
    progress: Progress = untold,
) -> BPETokenizer:
    """Return a tokenizer of ``n_vocab`` tokens; fewer when the text has not so many frequent pairs.

    Shapes: text (n,) bytes, perhaps mapped from a file; what is no UTF-8 is read as U+FFFD. Ids: first
    the bytes, then the joined tokens, most useful first, and <|endoftext|> last. The same text gives
    the same vocabulary.

    Raises: ConfigError for a size that no vocabulary can have; PosttrainError when the library fails.
    """
    if not SMALLEST <= n_vocab <= MAX_TOKENS:
        raise ConfigError(
            f"a vocabulary has {SMALLEST} to {MAX_TOKENS:,} tokens, got {n_vocab:,}",
            "4,096 suits a text of a few MB; GPT-2 has 50,257",
        )
    fed = 0

    def pieces() -> Iterator[str]:
        nonlocal fed
        for piece in encodable_pieces(text):
            for part in piece.decode("utf-8", "replace").split(END_OF_TEXT):
                for start in range(0, len(part), FED_AT_ONCE):
                    yield part[start : start + FED_AT_ONCE]
            fed += len(piece)

    failures: list[BaseException] = []
    found: list[str] = []

    def work() -> None:
        try:
            found.append(_learnt(pieces(), n_vocab - 1))
        except BaseException as error:  # the library panics with a class of its own
            failures.append(error)

    # In a thread of its own, which ends with the process: the library answers no interrupt.
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    joining = None
    while thread.is_alive():
        thread.join(PERIOD_S)
        if fed < len(text):
            progress("bytes read for the vocabulary", fed, len(text))
            continue
        joining = joining or time.monotonic()
        progress("seconds of joining pairs", int(time.monotonic() - joining), 0)
    if failures:
        line = " ".join(str(failures[0]).split())
        raise PosttrainError(f"no vocabulary came of this text: {line[:200]}")
    return BPETokenizer(_description(found[0]))


def _learnt(pieces: Iterator[str], n_vocab: int) -> str:
    """The library's description of a vocabulary without <|endoftext|>."""
    import tokenizers.models
    import tokenizers.pre_tokenizers
    import tokenizers.trainers

    learner = tokenizers.Tokenizer(tokenizers.models.BPE())
    learner.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    learner.train_from_iterator(
        pieces,
        tokenizers.trainers.BpeTrainer(
            vocab_size=n_vocab,
            min_frequency=RARE,
            initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        ),
    )
    return str(learner.to_str())


def _description(learnt: str) -> str:
    """The tokenizer.json, in the form that stock transformers reads."""
    model = json.loads(learnt)["model"]
    level = byte_level(use_regex=True)
    end = special_token(len(model["vocab"]), END_OF_TEXT)
    whole = document(bpe_model(model["vocab"], model["merges"]), level, added=[end], decoder=level)
    return json.dumps(whole, indent=2, ensure_ascii=False) + "\n"
