"""Whether the ids of a batch are ids: one that is none kills a whole CUDA context, and every process of a run with it."""

from __future__ import annotations

from posttrainllm.config import GPTConfig
from posttrainllm.engines.base import I32
from posttrainllm.errors import EngineError


def check_tokens(model: GPTConfig, tokens: I32) -> None:
    """Raise EngineError for ids that are none, or too many for the context. Shapes: tokens (B, T)."""
    if tokens.shape[1] > model.n_ctx:
        raise EngineError(
            f"{tokens.shape[1]} tokens do not fit into the context: model.n_ctx is {model.n_ctx}"
        )
    if tokens.size and not 0 <= int(tokens.min()) <= int(tokens.max()) < model.n_vocab:
        raise EngineError(
            f"token ids must lie in 0 .. {model.n_vocab - 1}, got {tokens.min()} .. {tokens.max()}"
        )


def check_targets(model: GPTConfig, targets: I32) -> None:
    """Raise EngineError for targets beyond the vocabulary. Shapes: targets (B, T)."""
    if targets.size and targets.max() >= model.n_vocab:
        raise EngineError(
            f"targets must lie in 0 .. {model.n_vocab - 1}, or be -1; got {targets.max()}"
        )
