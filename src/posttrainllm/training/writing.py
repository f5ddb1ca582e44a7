"""What a run came to: can this model do more than memorise, how does it write, and what next.

Before the first step, ``memorisation_warning`` compares the size of the model with the text and the
passes over it. After the last, ``verdict`` puts the validation loss beside what counting reaches
(text/counting.py) and the model's samples beside unseen text of the same kind (text/likeness.py), and names
the next actions. Nothing here prints: a verdict has ``lines`` for a person and ``figures`` for a
file.

The words are tables (``SENTENCES``, ``ACTIONS``), which export_web.py hands to the browser; the rules
are here for Python and in kernels/cpp/writing.cpp, the same by test, for hosts without it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
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

SENTENCES = {
    "line": "{name} ({loss:.2f})",
    "below": "below {line}",
    "above": "above {line}",
    "not_a_number": "not a number",
    "val_loss": "validation loss: {loss:.3f} nats a token, {standing}",
    "no_val_loss": "validation loss: not measured (no text was kept for it)",
    "counting": "counting reaches: {lines}",
    "words": "real words: {percent:.0f} % of {n_words:,} written are in the corpus",
    "no_words": "real words: none written",
    "unseen_words": " (of unseen text: {percent:.0f} %)",
    "copy": "longest copy: {n_bytes:,} bytes, {piece}",
    "no_copy": "longest copy: none",
    "unseen_copy": " (of unseen text: {n_bytes:,} bytes)",
    "memorises": "{ratio} bytes of text a parameter, read {epochs:,.1f} times: this model can "
    "memorise the text. Take a text of {enough} or more, or a smaller preset, and watch whether the "
    "validation loss rises",
    "too_large": "{ratio} bytes of text a parameter: this model is far too large for the text. Take "
    "a text of {enough} or more, or a smaller preset",
}
"""What warnings and verdicts say, by what they are about; each in the form of ``str.format``."""

WARNINGS = (None, "memorises", "too_large")
"""Keys of SENTENCES in the order of writing.cpp's codes."""


@dataclass(frozen=True)
class Action:
    """Something to try next: why, the words of a terminal that follow it, and all of it in the words of a tab."""

    why: str
    tab: str
    terminal: str = ""


ACTIONS = {
    "lower_rate": Action(
        "a lower learning rate: the loss is not a number",
        "a lower learning rate: the loss is not a number",
    ),
    "overfits": Action(
        "fewer steps or a larger text: the validation loss was {best:.3f} on the way and rose to "
        "{loss:.3f}",
        "fewer steps or a larger text: the validation loss was {best:.3f} on the way and rose to "
        "{loss:.3f}",
    ),
    "recites": Action(
        "a larger text or a smaller preset: it recites, {n_bytes:,} bytes in a row",
        "a larger text or a smaller preset: it recites, {n_bytes:,} bytes in a row",
    ),
    "more_steps": Action("more steps", "{steps:,} more steps", terminal="--steps {total}"),
    "diagnose": Action(
        "find out why counting {line} is still ahead",
        "another learning rate: counting {line} is still ahead",
        terminal="posttrainllm diagnose",
    ),
    "larger": Action("a larger model", "a larger model: {preset}", terminal="--preset {preset}"),
    "own_text": Action(
        "a text of your own", "a text of your own", terminal="posttrainllm train FILE"
    ),
}
"""In the order of writing.cpp's codes."""


@dataclass(frozen=True)
class Advice:
    """One of the ACTIONS, with what it is about; who shows it writes the command or the call."""

    name: str
    values: Mapping[str, Any] = field(default_factory=dict)

    @property
    def why(self) -> str:
        """The reason, right everywhere."""
        return ACTIONS[self.name].why.format(**self.values)

    def fits(self, config: TrainConfig) -> bool:
        """Whether whoever trained like this was not doing so already, or wants what this starts anew."""
        match self.name:
            case "own_text":
                return not config.data.corpus
            case "larger":
                return not config.training.start_from
            case _:
                return True

    @property
    def terminal(self) -> str:
        """The reason and what to add to a command."""
        words = ACTIONS[self.name].terminal.format(**self.values)
        return f"{self.why}: {words}" if words else self.why


def say(key: str, **values: Any) -> str:
    """One of the SENTENCES with its values."""
    return SENTENCES[key].format(**values)


def memorisation_warning(n_parameters: int, train_bytes: int, epochs: float) -> str | None:
    """Say that a model can only memorise its text, or is far too large for it, and what to do.

    ``epochs`` are the passes over the training part that the run will make. Returns None when the
    sizes fit.
    """
    ratio = train_bytes / n_parameters
    enough = show_bytes(math.ceil(n_parameters * BYTES_TO_MEMORISE))
    if ratio < BYTES_TO_MEMORISE and epochs > EPOCHS_TO_MEMORISE:
        return say("memorises", ratio=show_ratio(ratio), epochs=epochs, enough=enough)
    if ratio < BYTES_TO_WASTE:
        return say("too_large", ratio=show_ratio(ratio), enough=enough)
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
    actions: tuple[Advice, ...]
    """What to try next, the most useful first; the rules are those of writing.cpp."""

    @property
    def standing(self) -> str:
        """Where the validation loss stands among the counting lines."""
        return "not measured" if self.val_loss is None else standing(self.val_loss, self.counting)

    def advice(self, config: TrainConfig) -> list[Advice]:
        """What of ``actions`` fits a run with these settings."""
        return [each for each in self.actions if each.fits(config)]

    def lines(self) -> list[str]:
        """Return the verdict as lines of text for a person."""
        lines = [say("no_val_loss")]
        if self.val_loss is not None:
            lines = [say("val_loss", loss=self.val_loss, standing=self.standing)]
        lines.append(say("counting", lines=", ".join(map(str, self.counting))))
        words = say("no_words")
        if self.words.n_words:
            words = say("words", percent=100 * self.words.share, n_words=self.words.n_words)
        if self.unseen_words is not None and self.unseen_words.n_words:
            words += say("unseen_words", percent=100 * self.unseen_words.share)
        lines.append(words)
        copied = say("no_copy")
        if self.copy.piece:
            piece = self.copy.piece.decode("utf-8", "replace")
            shown = repr(piece if len(piece) <= MOST_SHOWN else piece[: MOST_SHOWN - 3] + "...")
            copied = say("copy", n_bytes=self.copy.n_bytes, piece=shown)
        if self.unseen_copy is not None:
            copied += say("unseen_copy", n_bytes=self.unseen_copy.n_bytes)
        lines.append(copied)
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
            "next": [advice.terminal for advice in self.actions],
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
) -> list[Advice]:
    """Return what to try next."""
    if loss is not None and not math.isfinite(loss):
        return [Advice("lower_rate")]
    usual = 0 if unseen_copy is None else unseen_copy.n_bytes
    too_long = []
    if loss is not None and best is not None and loss > best + RISE:
        too_long.append(Advice("overfits", {"best": best, "loss": loss}))
    if copy.n_bytes > max(COPY_IS_LONG, 2 * usual):
        too_long.append(Advice("recites", {"n_bytes": copy.n_bytes}))
    if too_long:
        return too_long
    actions = [Advice("more_steps", {"total": 2 * config.training.steps})]
    ahead = [line for line in counting[:4] if loss is not None and loss >= line.loss]
    if ahead:
        actions.append(Advice("diagnose", {"line": max(ahead, key=lambda line: line.loss)}))
        return actions
    larger = _larger_preset(config, len(corpus.train_text))
    if larger is not None:
        actions.append(Advice("larger", {"preset": larger}))
    actions.append(Advice("own_text"))
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
