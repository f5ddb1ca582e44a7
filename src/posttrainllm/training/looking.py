"""Looking inside a model: what it expects after every token of a text, how surprised it was, and what every head looked at.

What this is: ``look`` and ``Inspection``, numbers from the programs of ``inspection.py``, on the cpp engine or numpy.
What this is not: a picture; those are ``cli/inspect.py`` and ``notebook/inspection.py``.
Read next: ``docs/decisions/0011-attention-by-identity.md``.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import SupportsIndex

import numpy as np
from numpy.typing import NDArray

from posttrainllm.config import GPTConfig
from posttrainllm.engines.base import (
    F32,
    I32,
    Array,
    ProgramEngine,
    Tensors,
    TooLargeError,
    check_memory,
)
from posttrainllm.errors import CheckpointError, ConfigError, EngineError
from posttrainllm.figures import counted
from posttrainllm.inspection import inspection_programs
from posttrainllm.plan import Place
from posttrainllm.program import Program
from posttrainllm.settings import show
from posttrainllm.text.tokenizer import Tokenizer
from posttrainllm.training.engine_choice import looking_engine

F64 = NDArray[np.float64]

RARER = (2, 10, 100, 1000)
"""Of how many, one: where a picture shades a token darker."""
PLACES = {"itself": "the token itself", "before": "the token before", "first": "the first token"}
"""What ``habit`` tells apart, in words."""


@dataclass(frozen=True)
class Span:
    """The smallest part of a text that can be read: tokens ``first`` up to ``last`` (left out), together whole characters.

    ``surprise`` is that of its tokens together, in nats; None when it holds the first token, which nothing comes before.
    """

    text: str
    first: int
    last: int
    surprise: float | None


@dataclass(frozen=True, eq=False, repr=False)
class Inspection:
    """What a model makes of a text, T tokens long, of V that it knows. Attention is computed when it is asked for.

    Shapes: tokens (T,); pieces, the text of each token, T of them: bytes that are no whole character are shown as ``\\\\xe2``;
    probabilities (T, V) of what comes after each token; surprise (T-1,), entry t in nats: -log of the probability that token t+1 had
    after those before it; their mean is the loss of the text.
    ``cut`` tokens at the beginning were left out, since the model looks at no more than ``n_ctx``.
    """

    tokens: I32
    pieces: list[str]
    probabilities: F32
    surprise: F64
    cut: int
    n_layer: int
    n_head: int
    _keys: F32  # (L, T, 2*C), queries beside keys
    _tokenizer: Tokenizer
    _beside: Mapping[str, str | int]  # the ``info`` of the engine that the model is on
    _config: GPTConfig

    def __repr__(self) -> str:
        """One line: how long the text is, how surprising, and what comes next."""
        piece, probability = self.candidates(count=1)[0]
        loss = "" if self.loss is None else f", {self.loss:.2f} nats a token"
        cut = f" (and {self.cut:,} left out)" if self.cut else ""
        return f"Inspection({counted(len(self.tokens), 'token')}{cut}{loss}, next {piece!r} {probability:.0%})"

    @property
    def loss(self) -> float | None:
        """The mean surprise, in nats per token; None for a text of one token."""
        return float(self.surprise.mean()) if len(self.surprise) else None

    def likeliest(self, position: int = -1, count: int = 5) -> I32:
        """Ids (count,) of the likeliest tokens after the one at ``position``, the likeliest first.

        Raises: ConfigError when there is no such position, or for a count below 1.
        """
        time = len(self.tokens)
        position, count = _whole("position", position), _whole("count", count)
        if not -time <= position < time:
            raise ConfigError(
                f"position {position} is not one of the {time:,} tokens",
                f"give one of 0 .. {time - 1}; -1 is the last",
            )
        if count < 1:
            raise ConfigError(f"count is {count}, wanted 1 or more")
        return np.argsort(-self.probabilities[position], kind="stable")[:count].astype(np.int32)

    def candidates(self, position: int = -1, count: int = 5) -> list[tuple[str, float]]:
        """The likeliest tokens after the one at ``position``, with their probabilities; raises as ``likeliest``."""
        return [
            (piece_of(self._tokenizer, int(token)), float(self.probabilities[position, token]))
            for token in self.likeliest(position, count)
        ]

    def spans(self) -> list[Span]:
        """The text in parts that can be read: a token each, or as many as a character takes."""
        chunks = [self._tokenizer.token_bytes(int(token)) for token in self.tokens]
        return [
            Span(
                "".join(self.pieces[first:last])
                if last - first == 1
                else b"".join(chunks[first:last]).decode("utf-8", "backslashreplace"),
                first,
                last,
                None if first == 0 else float(self.surprise[first - 1 : last - 1].sum()),
            )
            for first, last in _whole_characters(chunks)
        ]

    def attention(self, layer: int) -> F32:
        """What every head of a layer looked at, (H, T, T): a row for each token, its sum 1, nothing ahead of it.

        It is computed anew at each call and not kept: all layers of a GPT-2 at 1,024 tokens would be 600 MB.

        Raises: ConfigError when there is no such layer; EngineError when this machine does not have the memory.
        """
        layer = _whole("layer", layer)
        if not 0 <= layer < self.n_layer:
            raise ConfigError(
                f"there is no layer {layer}", f"the layers are 0 .. {self.n_layer - 1}"
            )
        time, (heads, width) = len(self.tokens), (self.n_head, self._config.n_embd)
        size = width // heads
        programs, dims = inspection_programs(self._config, time)
        _check_room(4 * heads * time * time)
        qkv = np.zeros((time, 3 * width), np.float32)
        qkv[:, : 2 * width] = self._keys[layer]
        found = np.empty((heads, time, time), np.float32)
        alone = {"attention": programs["attention"]}, {"attention": dims["attention"]}
        with closing(_engine(self._beside, *alone)) as engine:
            _give(engine, "attention", segment_start=np.zeros(time, np.int32))
            # rows of the identity as values: the outputs are the probabilities
            for first in range(0, time, size):
                qkv[:, 2 * width :] = np.arange(time)[:, None] == first + np.arange(width) % size
                _give(engine, "attention", **{"given.qkv": qkv})
                engine.run_program("attention")
                out = engine.read(Place("out.given.out", 0, (time, heads, size)))
                found[:, :, first : first + size] = out.transpose(1, 0, 2)[:, :, : time - first]
        return found


def look(
    text: str,
    *,
    config: GPTConfig,
    params: Tensors,
    tokenizer: Tokenizer,
    beside: Mapping[str, str | int],
) -> Inspection:
    """Read a text with a model and keep what it computed on the way; ``beside`` is the ``info`` of the engine that the model is on.

    Of a text longer than the context the last ``n_ctx`` tokens are taken.

    Raises: ConfigError for no text; EngineError when this machine does not have the memory; CheckpointError for weights that give
    infinite numbers or none.
    """
    if not isinstance(text, str) or not text:
        got = "an empty one" if text == "" else type(text).__name__
        raise ConfigError(
            f"looking inside takes a text, got {got}", 'give one of a character or more: "ROMEO:"'
        )
    whole = tokenizer.encode(text)
    if not len(whole):
        raise ConfigError("this text has no tokens", "give another text")
    tokens = whole[-config.n_ctx :]
    time, width = len(tokens), config.n_embd
    # The weights, queries and keys twice (in the engine and here), and logits with what a softmax takes.
    _check_room(
        4 * (config.parameters() + time * (6 * width * config.n_layer + 3 * config.n_vocab))
    )
    programs, dims = inspection_programs(config, time)
    keys = np.empty((config.n_layer, time, 2 * width), np.float32)
    alone = {"inspect": programs["inspect"]}, {"inspect": dims["inspect"]}
    with closing(_engine(beside, *alone)) as engine:
        engine.load(params)
        _give(
            engine,
            "inspect",
            tokens=tokens,
            positions=np.arange(time, dtype=np.int32),
            segment_start=np.zeros(time, np.int32),
        )
        engine.run_program("inspect")
        for layer in range(config.n_layer):
            qkv = engine.read(Place(f"out.h.{layer}.attn.qkv", 0, (time, 3 * width)))
            keys[layer] = qkv[:, : 2 * width]
        logits = engine.read(Place("out.logits", 0, (time, config.n_vocab)))
    if not np.isfinite(logits).all():
        raise CheckpointError(
            "this model's weights give numbers that are not finite",
            "it diverged in training, or its file is damaged; take an earlier checkpoint",
        )
    probabilities, surprise = _softmax(logits, tokens)
    return Inspection(
        tokens=tokens,
        pieces=[piece_of(tokenizer, int(token)) for token in tokens],
        probabilities=probabilities,
        surprise=surprise,
        cut=len(whole) - time,
        n_layer=config.n_layer,
        n_head=config.n_head,
        _keys=keys,
        _tokenizer=tokenizer,
        _beside=beside,
        _config=config,
    )


def piece_of(tokenizer: Tokenizer, token: int) -> str:
    """The text of one token: bytes that are no whole character as ``\\\\xe2``, and an id that stands for no text as ``[50300]``."""
    content = tokenizer.token_bytes(token)
    return content.decode("utf-8", "backslashreplace") if content else f"[{token}]"


def level(surprise: float | None) -> int | None:
    """How dark a surprise in nats is shown: how many of ``RARER`` the token was rarer than; None for what nothing came before."""
    return None if surprise is None else sum(surprise > math.log(limit) for limit in RARER)


def habit(weights: F32) -> tuple[str, float]:
    """Which of three places most of a head's attention goes to, and its mean share: "itself", "before" or "first"."""
    if len(weights) == 1:
        return "itself", 1.0
    shares = {
        "itself": float(weights.diagonal()[1:].mean()),
        "before": float(weights.diagonal(-1).mean()),
        "first": float(weights[1:, 0].mean()),
    }
    place = max(shares, key=shares.__getitem__)
    return place, shares[place]


def largest(weights: F32, size: int) -> F32:
    """Weights (T, T) as ``size`` x ``size`` blocks of neighbouring tokens, the largest of each; ``size`` is T at most."""
    starts = np.arange(size) * len(weights) // size
    rows = np.maximum.reduceat(weights, starts, axis=0)
    return np.asarray(np.maximum.reduceat(rows, starts, axis=1))


def _whole(name: str, value: object) -> int:
    if not isinstance(value, SupportsIndex):
        raise ConfigError(f"{name} is a whole number, got {show(value)}")
    return operator.index(value)


def _softmax(logits: F32, tokens: I32) -> tuple[F32, F64]:
    """Turn logits (T, V) into probabilities in place; and the surprise (T-1,) of the tokens, in float64."""
    logits -= logits.max(axis=1, keepdims=True)
    chosen = logits[np.arange(len(tokens) - 1), tokens[1:]].astype(np.float64)
    np.exp(logits, out=logits)
    total = logits.sum(axis=1, dtype=np.float64)
    logits /= total[:, None].astype(np.float32)
    return logits, np.log(total[:-1]) - chosen


def _whole_characters(chunks: Sequence[bytes]) -> Iterator[tuple[int, int]]:
    """Ranges of tokens, the smallest that hold whole characters; a token whose bytes are no UTF-8 stands alone."""
    first, held = 0, b""
    for at, chunk in enumerate(chunks):
        held += chunk
        while first <= at:
            try:
                held.decode()
                last = at + 1
            except UnicodeDecodeError as error:
                if error.reason == "unexpected end of data":
                    break  # the next tokens may complete it
                last = first + 1
            yield first, last
            first, held = last, b"".join(chunks[last : at + 1])
    yield from ((at, at + 1) for at in range(first, len(chunks)))


def _engine(
    beside: Mapping[str, str | int],
    programs: Mapping[str, Program],
    dims: Mapping[str, Mapping[str, int]],
) -> ProgramEngine:
    try:
        return looking_engine(beside, programs, dims)
    except TooLargeError as error:
        raise _too_large(error) from None


def _check_room(nbytes: int) -> None:
    try:
        check_memory("looking inside", nbytes)
    except TooLargeError as error:
        raise _too_large(error) from None


def _too_large(error: TooLargeError) -> EngineError:
    return EngineError(error.message, "a shorter text needs less")


def _give(engine: ProgramEngine, program: str, **inputs: Array) -> None:
    """Write inputs of a program, of the planned size."""
    for name, values in inputs.items():
        place = engine.plan.places[program][name]
        engine.write(Place(place.region, place.offset, values.shape), values)
