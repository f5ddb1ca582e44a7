"""The samples of a run: what its model writes along the way and for its verdict, from which prompt and seeds.

What this is: one place that says so for training and for ``posttrainllm eval``, so that both judge a model by the same texts.
What this is not: the loop that writes (``training/generate.py``) or the judgement (``training/writing.py``).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from posttrainllm.config import TrainConfig
from posttrainllm.control import stream_id
from posttrainllm.engines.base import Engine
from posttrainllm.text.corpus import Corpus
from posttrainllm.text.tokenizer import Tokenizer
from posttrainllm.training.generate import write_tokens

PROMPT_DIVISOR = 4
"""Where no prompt is set, samples go on from this part of a context of the validation text."""


@dataclass(frozen=True)
class Samples:
    """How a run lets its model write."""

    engine: Engine
    config: TrainConfig
    corpus: Corpus
    tokenizer: Tokenizer

    @property
    def prompt(self) -> list[int]:
        """Tokens that samples go on from: the setting, else the beginning of the validation text."""
        given = self.config.training.sample_prompt
        if given:
            return [int(token) for token in self.tokenizer.encode(given)]
        text = self.corpus.val if len(self.corpus.val) else self.corpus.train
        return [int(token) for token in text[: max(1, self.config.model.n_ctx // PROMPT_DIVISOR)]]

    def seed(self, purpose: str, number: int) -> int:
        """A seed of its own for every sample of every run: neighbouring seeds of runs share none."""
        return stream_id(f"{purpose} {self.config.training.seed} {number}")

    def write(self, seed: int, check: Callable[[], None] = lambda: None) -> str:
        """One sample, without its prompt. ``check`` is called before each token, and may raise."""
        written = write_tokens(
            self.engine,
            self.config.model.n_ctx,
            self.prompt,
            self.config.sampling,
            seed=seed,
            max_tokens=self.config.training.sample_tokens,
        )
        tokens: list[int] = []
        for token in written:
            check()
            tokens.append(token.token)
        return self.tokenizer.decode(tokens)

    def for_verdict(self, check: Callable[[], None] = lambda: None) -> list[str]:
        """The texts that a verdict reads; ``check`` as in ``write``."""
        loop = self.config.training
        count = loop.verdict_samples if loop.sample_tokens else 0
        return [self.write(self.seed("verdict", number), check) for number in range(count)]
