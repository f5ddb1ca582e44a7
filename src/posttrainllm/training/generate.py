"""Writing with a model: token by token through the key/value cache, on any engine, one text or several side by side.

What this is: the loop around ``Engine.prefill`` and ``Engine.decode``, and the rule for texts longer than the context.
What this is not: the choice of a token, which is ``control.sample``, bit-identical on every host, or text: ``training/streams.py`` makes
whole characters of tokens and ends at stop strings.

The window rule: positions are learned, so a full cache cannot slide. When n_ctx tokens are in it, the newest n_ctx/2 are kept and read
again from position 0. Writing without a cache follows the same rule and gives the same tokens.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from posttrainllm.config import SamplingConfig
from posttrainllm.control import penalize, sample
from posttrainllm.engines.base import Engine
from posttrainllm.errors import ConfigError

KEPT_DIVISOR = 2
"""The part of a full context that is read again."""

Logits = NDArray[Any]
Prompt = Sequence[int] | NDArray[np.int32]


@dataclass(frozen=True)
class Written:
    """One token that was written, and the probability it had after penalty, temperature, top-k and top-p."""

    token: int
    probability: float


class _Row:
    """One text: what the model sees of it, and what decides its next token."""

    def __init__(self, prompt: Prompt, seed: int, n_ctx: int, recent: int) -> None:
        tokens = [int(token) for token in prompt]
        if not tokens:
            raise ConfigError(
                "the prompt is empty", "give at least one character, for example a line break"
            )
        self.n_ctx, self.seed = n_ctx, seed
        self.window = tokens[-n_ctx:]
        self.recent: deque[int] = deque(tokens, maxlen=recent)
        self.written = 0
        self.finished = False

    @property
    def full(self) -> bool:
        """Whether the window leaves no room in the cache for another token."""
        return len(self.window) >= self.n_ctx

    def choose(self, logits: Logits, sampling: SamplingConfig) -> Written:
        """Take the next token; a full window is cut to its newer half."""
        if sampling.repetition_penalty != 1:
            recent = np.array(self.recent, np.int32)
            logits = penalize(logits, recent, sampling.repetition_penalty)
        settings = (sampling.temperature, sampling.top_k, sampling.top_p)
        token, probability = sample(logits, self.seed, self.written, *settings)
        self.written += 1
        self.recent.append(token)
        self.window.append(token)
        if len(self.window) > self.n_ctx:
            self.window = self.window[-max(1, self.n_ctx // KEPT_DIVISOR) :]
        return Written(token, probability)


class Writers:
    """Several texts that are written side by side: every step takes each of them one token further.

    Each has a prompt and a seed of its own, so a text does not depend on those beside it, up to the last digits of the logits: kernels
    may sum in another order for another number of rows.
    """

    def __init__(
        self,
        engine: Engine,
        n_ctx: int,
        prompts: Sequence[Prompt],
        sampling: SamplingConfig,
        *,
        seeds: Sequence[int],
        cached: bool = True,
    ) -> None:
        """Take the prompts; the engine must be planned for as many rows. ``cached`` False reads every window whole, the slow reference.

        Raises: ConfigError for an empty prompt.
        """
        self._engine, self._sampling, self._cached = engine, sampling, cached
        self._rows = [
            _Row(prompt, seed, n_ctx, sampling.repetition_window)
            for prompt, seed in zip(prompts, seeds, strict=True)
        ]
        self._in_cache: list[int] = []  # which rows the cache holds, in its order
        self._restart = True

    @property
    def writing(self) -> list[int]:
        """The rows that are not finished."""
        return [number for number, row in enumerate(self._rows) if not row.finished]

    def finish(self, row: int) -> None:
        """Write no more of a row."""
        self._rows[row].finished = True

    def step(self) -> dict[int, Written]:
        """The next token of every row that is not finished, by row; none when all are."""
        found = {}
        for number, logits in self._logits().items():
            row = self._rows[number]
            if row.finished:  # still in the cache, and read by nobody
                row.window.append(0)
            else:
                found[number] = row.choose(logits, self._sampling)
        return found

    def _logits(self) -> dict[int, Logits]:
        """What follows each row's window."""
        if not self.writing:
            return {}
        if not self._cached:
            windows = {number: np.array([self._rows[number].window]) for number in self.writing}
            return {
                number: self._engine.logits(window.astype(np.int32))[0, -1]
                for number, window in windows.items()
            }
        if self._restart:
            self._in_cache = self.writing
            logits = self._prefill([self._rows[number].window for number in self._in_cache])
        else:
            newest = [self._rows[number].window[-1] for number in self._in_cache]
            logits = self._engine.decode(np.array(newest, np.int32))
        # every row of the cache takes one more token; where one has no room, all are read again
        self._restart = any(self._rows[number].full for number in self._in_cache)
        return dict(zip(self._in_cache, logits, strict=True))

    def _prefill(self, windows: list[list[int]]) -> Logits:
        """Read windows of any lengths into the cache, padded on the right. Shapes: returned (B, V)."""
        lengths = np.array([len(window) for window in windows], np.int32)
        tokens = np.zeros((len(windows), int(lengths.max())), np.int32)
        for row, window in zip(tokens, windows, strict=True):
            row[: len(window)] = window
        return self._engine.prefill(tokens, lengths)


def write_tokens(
    engine: Engine,
    n_ctx: int,
    prompt: Prompt,
    sampling: SamplingConfig,
    *,
    seed: int,
    max_tokens: int | None = None,
    cached: bool = True,
) -> Iterator[Written]:
    """Continue one prompt of at least one token, up to ``max_tokens`` (default: the setting).

    Raises: ConfigError for an empty prompt.
    """
    writers = Writers(engine, n_ctx, [prompt], sampling, seeds=[seed], cached=cached)
    for _ in range(sampling.max_tokens if max_tokens is None else max_tokens):
        yield writers.step()[0]
