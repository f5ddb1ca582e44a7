"""Evaluation: the loss of a model on fixed windows of the validation part.

What this is: a mean over windows that never change, on any engine, in batches of the size the engine was planned for.
What this is not: a judgement of written text; that is ``training/writing.py``.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from posttrainllm.engines.base import Batch, Engine
from posttrainllm.text.corpus import Corpus


@dataclass(frozen=True)
class Evaluation:
    """A mean loss over ``windows`` windows of ``n_ctx`` tokens."""

    loss: float
    windows: int
    tokens: int
    bytes_per_token: float

    @property
    def bits_per_byte(self) -> float:
        """The loss in bits for each byte of text: comparable between tokenizers."""
        return bits_per_byte(self.loss, self.bytes_per_token)

    @property
    def perplexity(self) -> float:
        """exp(loss): among how many equally likely tokens the model hesitates."""
        return math.exp(min(self.loss, 700.0))


def bits_per_byte(loss: float, bytes_per_token: float) -> float:
    """A loss in nats a token as bits for each byte of text, in which tokenizers can be compared."""
    return loss / math.log(2) / bytes_per_token


def evaluate(
    engine: Engine,
    corpus: Corpus,
    *,
    n_ctx: int,
    batch: int,
    windows: int,
    check: Callable[[], None] = lambda: None,
) -> Evaluation:
    """Mean loss in nats per token over ``windows`` validation windows (0: all), evenly spaced.

    The last batch is filled up with rows whose targets do not count. ``check`` is called before each batch, and may raise.
    """
    tokens, targets = corpus.validation_windows(windows, n_ctx)
    total = 0.0
    for start in range(0, len(tokens), batch):
        check()
        rows = min(batch, len(tokens) - start)
        padded = np.zeros((batch, n_ctx), np.int32)
        wanted = np.full((batch, n_ctx), -1, np.int32)
        padded[:rows] = tokens[start : start + rows]
        wanted[:rows] = targets[start : start + rows]
        total += engine.loss(Batch(padded, wanted)) * rows
    count = len(tokens)
    return Evaluation(total / max(1, count), count, count * n_ctx, corpus.bytes_per_token)
