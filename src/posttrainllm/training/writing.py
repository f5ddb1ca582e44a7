"""What a run came to: can this model do more than memorise, how does it write, and what next.

Before the first step, ``memorisation_warning`` compares the size of the model with the text and the
passes over it. After the last, ``verdict`` puts the validation loss beside what counting reaches
(text/counting.py) and the model's samples beside unseen text of the same kind (text/likeness.py), and names
the next actions. Nothing here prints: a verdict has ``lines`` for a person and ``figures`` for a
file.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from posttrainllm.config import TrainConfig
from posttrainllm.presets import PRESETS
from posttrainllm.storage import show_bytes
from posttrainllm.text.corpus import Corpus
from posttrainllm.text.counting import CountingLine, standing
from posttrainllm.text.likeness import (
    Copy,
    WordShare,
    corpus_words,
    longest_copy,
    unseen_texts,
    word_share,
)

# A GPT can store about 3.6 bits a parameter (Morris and others, 2025, "How much do language models
# memorize?"), and text costs such models about 2 bits a byte: at 3.6 / 2 bytes a parameter or less,
# the whole text fits into the weights.
BYTES_TO_MEMORISE = 1.8
# Up to four passes over a text teach nearly as much as new text; after that a repetition is worth
# less and less (Muennighoff and others, 2023, "Scaling Data-Constrained Language Models").
EPOCHS_TO_MEMORISE = 4.0
# Here the text fits in twenty times over: a smaller model learns as much from it in less time.
BYTES_TO_WASTE = BYTES_TO_MEMORISE / 20

# Unseen pieces of TinyShakespeare, 20 of 200 bytes, share at most 31 bytes with the training part.
COPY_IS_LONG = 60

# Nats above the best validation loss that mean overfitting; the last evaluation may be made on more
# windows than the earlier ones, and then differs by a little without any reason in the model.
RISE = 0.1

MOST_SHOWN = 70  # characters of a copy in a line


def memorisation_warning(n_parameters: int, train_bytes: int, epochs: float) -> str | None:
    """Say that a model can only memorise its text, or is far too large for it, and what to do.

    ``epochs`` are the passes over the training part that the run will make. Returns None when the
    sizes fit.
    """
    ratio = train_bytes / n_parameters
    enough = show_bytes(math.ceil(n_parameters * BYTES_TO_MEMORISE))
    if ratio < BYTES_TO_MEMORISE and epochs > EPOCHS_TO_MEMORISE:
        return (
            f"{show_ratio(ratio)} bytes of text a parameter, read {epochs:,.1f} times: this model "
            f"can memorise the text. Take a text of {enough} or more, or a smaller preset, and watch "
            "whether the validation loss rises"
        )
    if ratio < BYTES_TO_WASTE:
        return (
            f"{show_ratio(ratio)} bytes of text a parameter: this model is far too large for the "
            f"text. Take a text of {enough} or more, or a smaller preset"
        )
    return None


def show_ratio(value: float) -> str:
    """Write a positive number for people, with two digits that count: 2.7, 0.012, 1,234."""
    if value >= 10:
        return f"{value:,.0f}"
    digits = 1 if value >= 1 or value <= 0 else 1 - math.floor(math.log10(value))
    return f"{value:.{digits}f}"


@dataclass(frozen=True)
class Verdict:
    """The figures at the end of a run, and what to do next."""

    val_loss: float | None
    """Nats a token; None when no text was kept for validation."""
    counting: tuple[CountingLine, ...]
    words: WordShare
    copy: Copy
    unseen_words: WordShare | None
    """The share that the validation text has, in pieces as long as the samples."""
    unseen_copy: Copy | None
    """The longest piece that the validation text shares with the training part."""
    actions: tuple[str, ...]
    """What to try next, the most useful first; each a phrase."""

    @property
    def standing(self) -> str:
        """Where the validation loss stands among the counting lines."""
        return "not measured" if self.val_loss is None else standing(self.val_loss, self.counting)

    def lines(self) -> list[str]:
        """Return the verdict as lines of text for a person."""
        lines = ["validation loss: not measured (no text was kept for it)"]
        if self.val_loss is not None:
            lines = [f"validation loss: {self.val_loss:.3f} nats a token, {self.standing}"]
        lines.append("counting reaches: " + ", ".join(map(str, self.counting)))
        words = "real words: none written"
        if self.words.n_words:
            words = (
                f"real words: {_percent(self.words.share)} of {self.words.n_words:,} written "
                "are in the corpus"
            )
        if self.unseen_words is not None and self.unseen_words.n_words:
            words += f" (of unseen text: {_percent(self.unseen_words.share)})"
        lines.append(words)
        copied = "longest copy: none"
        if self.copy.piece:
            piece = self.copy.piece.decode("utf-8", "replace")
            shown = repr(piece if len(piece) <= MOST_SHOWN else piece[: MOST_SHOWN - 3] + "...")
            copied = f"longest copy: {self.copy.n_bytes:,} bytes, {shown}"
        if self.unseen_copy is not None:
            copied += f" (of unseen text: {self.unseen_copy.n_bytes:,} bytes)"
        lines.append(copied)
        lines.extend(f"next: {action}" for action in self.actions)
        return lines

    def figures(self) -> dict[str, Any]:
        """Return the verdict as JSON takes it; what was not measured is None."""
        unseen_words = None if self.unseen_words is None else _or_none(self.unseen_words.share)
        return {
            "val_loss": None if self.val_loss is None else _or_none(self.val_loss),
            "standing": self.standing,
            "counting": {line.name: line.loss for line in self.counting},
            "n_words": self.words.n_words,
            "word_share": _or_none(self.words.share),
            "word_share_unseen": unseen_words,
            "longest_copy": self.copy.n_bytes,
            "longest_copy_text": self.copy.piece.decode("utf-8", "replace"),
            "longest_copy_unseen": None if self.unseen_copy is None else self.unseen_copy.n_bytes,
            "next": list(self.actions),
        }


def verdict(
    *,
    texts: Sequence[str | bytes],
    corpus: Corpus,
    val_loss: float | None,
    counting: Sequence[CountingLine],
    config: TrainConfig,
    best_val_loss: float | None = None,
) -> Verdict:
    """Judge a model that was trained on ``corpus``, and what it wrote.

    ``texts`` are its samples, without their prompts. ``val_loss`` is that of the final model and
    ``best_val_loss`` the lowest on the way, in nats a token. Real words are those of the whole
    corpus, and copies are of its training part, as the model saw nothing else; unseen text is
    pieces of the validation part of the samples' sizes.
    """
    train_words = corpus_words(corpus.train_text)
    words = word_share(texts, train_words | corpus_words(corpus.val_text))
    copy = longest_copy(texts, corpus.train_text)
    unseen = unseen_texts(corpus.val_text, texts)
    unseen_copy = longest_copy(unseen, corpus.train_text) if unseen else None
    return Verdict(
        val_loss=val_loss,
        counting=tuple(counting),
        words=words,
        copy=copy,
        unseen_words=word_share(unseen, train_words) if unseen else None,
        unseen_copy=unseen_copy,
        actions=tuple(
            _actions(val_loss, best_val_loss, counting, copy, unseen_copy, corpus, config)
        ),
    )


def _actions(
    loss: float | None,
    best: float | None,
    counting: Sequence[CountingLine],
    copy: Copy,
    unseen_copy: Copy | None,
    corpus: Corpus,
    config: TrainConfig,
) -> list[str]:
    """Return what to try next, each with its reason."""
    if loss is not None and not math.isfinite(loss):
        return ["a lower learning rate: the loss is not a number"]
    usual = 0 if unseen_copy is None else unseen_copy.n_bytes
    too_long = []
    if loss is not None and best is not None and loss > best + RISE:
        too_long.append(
            "fewer steps or a larger text: the validation loss was "
            f"{best:.3f} on the way and rose to {loss:.3f}"
        )
    if copy.n_bytes > max(COPY_IS_LONG, 2 * usual):
        too_long.append(
            f"a larger text or a smaller preset: it recites, {copy.n_bytes:,} bytes in a row"
        )
    if too_long:
        return too_long
    actions = [f"more steps: --steps {2 * config.training.steps}"]
    ahead = [line for line in counting[:4] if loss is not None and loss >= line.loss]
    if ahead:
        first = max(ahead, key=lambda line: line.loss)
        actions.append(
            f"posttrainllm diagnose: counting {first} is still ahead; "
            "the learning rate may be far off"
        )
        return actions
    larger = _larger_preset(config, len(corpus.train_text))
    if larger is not None:
        actions.append(f"a larger model: --preset {larger}")
    actions.append("a text of your own: posttrainllm train FILE")
    return actions


def _larger_preset(config: TrainConfig, train_bytes: int) -> str | None:
    """Return the next preset in size, unless it is far too large for the text."""
    if config.preset not in PRESETS:
        return None
    vocabulary = PRESETS[config.preset].n_vocab
    names = [name for name, row in PRESETS.items() if row.n_vocab == vocabulary]
    if config.preset == names[-1]:
        return None
    larger = names[names.index(config.preset) + 1]
    width, layers = PRESETS[larger].n_embd, PRESETS[larger].n_layer
    n_parameters = 12 * layers * width**2  # without embeddings and biases: near enough
    return larger if train_bytes > n_parameters * BYTES_TO_WASTE else None


def _or_none(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %"
