"""Writing with a model: token by token through the key/value cache, on any engine.

What this is: the loop around ``Engine.prefill`` and ``Engine.decode``, the rule for texts longer than the context, stop strings, and
text that streams without half characters.
What this is not: the choice of a token, which is ``control.sample``, bit-identical on every host.

The window rule: positions are learned, so a full cache cannot slide. When n_ctx tokens are in it, the newest n_ctx/2 are kept and read
again from position 0. Writing without a cache follows the same rule and gives the same tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from posttrainllm.config import SamplingConfig
from posttrainllm.control import sample
from posttrainllm.engines.base import Engine
from posttrainllm.errors import ConfigError
from posttrainllm.text.tokenizer import StreamDecoder, Tokenizer

Logits = NDArray[Any]
After = Callable[[list[int], bool], Logits]


@dataclass(frozen=True)
class Written:
    """One token that was written, and the probability it had after temperature, top-k and top-p."""

    token: int
    probability: float


def cached_logits(engine: Engine) -> After:
    """Logits after a window of tokens, reading only what is new: the cache already holds the rest unless ``restart``."""

    def after(window: list[int], restart: bool) -> Logits:
        if restart:
            first: Logits = engine.prefill(np.array([window], np.int32))[0]
            return first
        logits: Logits = engine.decode(np.array(window[-1:], np.int32))[0]
        return logits

    return after


def uncached_logits(engine: Engine) -> After:
    """The same from the whole window every time: the slow reference."""

    def after(window: list[int], restart: bool) -> Logits:
        logits: Logits = engine.logits(np.array([window], np.int32))[0, -1]
        return logits

    return after


def write_tokens(
    engine: Engine,
    n_ctx: int,
    prompt: Sequence[int] | NDArray[np.int32],
    sampling: SamplingConfig,
    *,
    seed: int,
    max_tokens: int | None = None,
    cached: bool = True,
) -> Iterator[Written]:
    """Continue a prompt of at least one token; endless tokens up to ``max_tokens`` (default: the setting).

    Raises: ConfigError for an empty prompt.
    """
    if not len(prompt):
        raise ConfigError(
            "the prompt is empty", "give at least one character, for example a line break"
        )
    after = (cached_logits if cached else uncached_logits)(engine)
    window, restart = [int(token) for token in prompt][-n_ctx:], True
    for position in range(sampling.max_tokens if max_tokens is None else max_tokens):
        logits = after(window, restart)
        token, probability = sample(
            logits, seed, position, sampling.temperature, sampling.top_k, sampling.top_p
        )
        yield Written(token, probability)
        restart = len(window) >= n_ctx
        window.append(token)
        if restart:
            window = window[-max(1, n_ctx // 2) :]


def write_text(
    engine: Engine,
    n_ctx: int,
    tokenizer: Tokenizer,
    prompt: str,
    sampling: SamplingConfig,
    *,
    seed: int,
    max_tokens: int | None = None,
    stop: Sequence[str] = (),
) -> Iterator[str]:
    """Continue a prompt and give the text in pieces, whole characters only, without the prompt.

    Writing ends before the first of the ``stop`` strings; text that may be the start of one is held back until it is known not to be.
    """
    decoder = StreamDecoder(tokenizer)
    held = ""
    tokens = write_tokens(
        engine, n_ctx, tokenizer.encode(prompt), sampling, seed=seed, max_tokens=max_tokens
    )
    for written in tokens:
        held += decoder.push(written.token)
        found = [held.find(text) for text in stop if text and text in held]
        if found:
            yield held[: min(found)]
            return
        keep = max((_overlap(held, text) for text in stop), default=0)
        if len(held) > keep:
            yield held[: len(held) - keep]
            held = held[len(held) - keep :]
    held += decoder.finish()
    found = [held.find(text) for text in stop if text and text in held]
    yield held[: min(found)] if found else held


def _overlap(text: str, stop: str) -> int:
    """How many of the last characters of ``text`` are the beginning of ``stop``."""
    return next(
        (n for n in range(min(len(text), len(stop) - 1), 0, -1) if text.endswith(stop[:n])), 0
    )
