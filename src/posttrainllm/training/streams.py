"""Text as it is written: whole characters out of tokens, ends at stop strings, several texts side by side.

What this is: the way from ``training/generate.py``'s tokens to what a person reads.
What this is not: the tokens. A character of several tokens is held back until it is whole, and so is text that may be the start of a stop
string until it is known not to be.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from posttrainllm.config import SamplingConfig
from posttrainllm.engines.base import Engine
from posttrainllm.text.tokenizer import StreamDecoder, Tokenizer
from posttrainllm.training.generate import Writers


@dataclass(frozen=True)
class Piece:
    """A part of one of the texts; ``last`` when nothing follows it."""

    row: int
    text: str
    last: bool = False


class _Text:
    """One text under way."""

    def __init__(self, tokenizer: Tokenizer, stop: Sequence[str]) -> None:
        self._decoder = StreamDecoder(tokenizer)
        self._stop = [text for text in stop if text]
        self._held = ""

    def push(self, token: int) -> tuple[str, bool]:
        """Take a token; returns what can be shown now, and whether a stop string ended the text before its own beginning."""
        self._held += self._decoder.push(token)
        if self._stopped():
            return self._held, True
        keep = max((_overlap(self._held, text) for text in self._stop), default=0)
        shown, self._held = (
            self._held[: len(self._held) - keep],
            self._held[len(self._held) - keep :],
        )
        return shown, False

    def finish(self) -> str:
        """The rest, when no more tokens come."""
        self._held += self._decoder.finish()
        self._stopped()
        return self._held

    def _stopped(self) -> bool:
        """Cut what is held before the first stop string in it."""
        found = [self._held.find(text) for text in self._stop if text in self._held]
        self._held = self._held[: min(found)] if found else self._held
        return bool(found)


def write_texts(
    engine: Engine,
    n_ctx: int,
    tokenizer: Tokenizer,
    prompts: Sequence[str],
    sampling: SamplingConfig,
    *,
    seeds: Sequence[int],
    stop: Sequence[str] = (),
) -> Iterator[Piece]:
    """Continue prompts side by side and give the texts in pieces, without the prompts.

    The pieces of one row come in order, those of several rows in turns; every row ends with one that is its ``last``. A text ends
    before the first of the ``stop`` strings.

    Raises: ConfigError for an empty prompt.
    """
    writers = Writers(
        engine, n_ctx, [tokenizer.encode(prompt) for prompt in prompts], sampling, seeds=seeds
    )
    texts = [_Text(tokenizer, stop) for _ in prompts]
    for _ in range(sampling.max_tokens):
        for row, written in writers.step().items():
            shown, ended = texts[row].push(written.token)
            if ended:
                writers.finish(row)
            if shown or ended:
                yield Piece(row, shown, ended)
    for row in writers.writing:
        yield Piece(row, texts[row].finish(), True)


def _overlap(text: str, stop: str) -> int:
    """How many of the last characters of ``text`` are the beginning of ``stop``."""
    return next(
        (n for n in range(min(len(text), len(stop) - 1), 0, -1) if text.endswith(stop[:n])), 0
    )
