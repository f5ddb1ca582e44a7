"""Writing with the cache is writing without it, token for token, on every engine, for one text and several, beyond the context too."""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import pytest

from guarded import ENGINES as OP_ENGINES
from guarded import obtain
from model_cases import train_config
from needs import require
from posttrainllm.config import EngineConfig, SamplingConfig
from posttrainllm.control import penalize, sample
from posttrainllm.engines.base import Engine
from posttrainllm.errors import ConfigError, EngineError
from posttrainllm.text.tokenizer import ByteTokenizer
from posttrainllm.training.engine_choice import inference_engine, initial_parameters
from posttrainllm.training.generate import Writers, write_tokens
from posttrainllm.training.streams import write_texts

CPP = tuple(name for name in OP_ENGINES if name.startswith("cpp-"))
ENGINES = ("numpy", *CPP, "wasm", "webgpu", "torch")
TOKENS = 500  # of a greedy text: fifteen times the context
MODEL = train_config("tiny").model  # a context of 32
GREEDY = SamplingConfig(temperature=0)
TOKENIZER = ByteTokenizer()


def opened(name: str, batch: int = 1, **sizes: Any) -> Engine:
    """An engine with weights of a trained model's size: initial ones, ten times as large."""
    family, _, build = name.partition("-")
    settings: dict[str, Any] = {"name": family, "cpp_build": build, "threads": 1}
    if name == "webgpu":
        require("wgpu")
        from webgpu_cases import device

        device()  # or a skip
        settings["adapter"] = os.environ.get("POSTTRAINLLM_ADAPTER", "")
    elif name == "torch":
        require("torch")
    else:
        obtain("wasm32" if name == "wasm" else name, pytest.skip)
    model = MODEL.model_copy(update=sizes)
    engine = inference_engine(model, EngineConfig(**settings), batch=batch, logits=True)
    drawn = initial_parameters(model, seed=3)
    engine.load({key: value * 10 if value.ndim > 1 else value for key, value in drawn.items()})
    return engine


@pytest.fixture(params=ENGINES)
def name(request: pytest.FixtureRequest, tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))  # of webgpu's self-check
    return request.param


@pytest.fixture
def numpy_engine() -> Engine:
    return opened("numpy", batch=4)


def tokens_of(engine: Engine, prompt: bytes, sampling: SamplingConfig = GREEDY, **options: Any):
    given = {"seed": 1, "max_tokens": TOKENS, **options}
    written = write_tokens(engine, MODEL.n_ctx, list(prompt), sampling, **given)
    return [one.token for one in written]


def together(engine: Engine, prompts: list[bytes], steps: int, **options: Any) -> list[list[int]]:
    """What several prompts go on with, written side by side."""
    given = {"seeds": list(range(1, 1 + len(prompts))), **options}
    writers = Writers(engine, MODEL.n_ctx, [list(p) for p in prompts], GREEDY, **given)
    texts: list[list[int]] = [[] for _ in prompts]
    for _ in range(steps):
        for row, written in writers.step().items():
            texts[row].append(written.token)
    return texts


# ---- the cache ----------------------------------------------------------------------------------------------------------------


def test_writing_with_the_cache_is_writing_without_it_and_the_same_on_every_engine(
    name: str,
) -> None:
    engine = opened(name)
    cached = tokens_of(engine, b"ROMEO:")
    uncached = tokens_of(engine, b"ROMEO:", cached=False)
    engine.close()
    assert cached == uncached
    assert cached == tokens_of(opened("numpy"), b"ROMEO:")
    assert len(set(cached)) > 20  # a text that went round in a small circle would prove little


PROMPTS = [
    b"R",
    b"What say you to the",
    b"x" * 32,
    b"a prompt that is longer than the whole context of it",
]


def test_texts_side_by_side_are_the_texts_alone_on_every_engine(name: str) -> None:
    """Prompts of any lengths: a row whose window is full has all rows read again, and none may change by that."""
    engine = opened(name, batch=4)
    alone = [tokens_of(engine, prompt, max_tokens=100, cached=False) for prompt in PROMPTS]
    assert together(engine, PROMPTS, 100) == alone
    engine.close()


def test_a_finished_text_leaves_the_others_as_they_are(numpy_engine: Engine) -> None:
    alone = together(numpy_engine, PROMPTS, 80)
    writers = Writers(
        numpy_engine, MODEL.n_ctx, [list(p) for p in PROMPTS], GREEDY, seeds=[1, 1, 1, 1]
    )
    texts: list[list[int]] = [[], [], [], []]
    for step in range(80):
        for row, written in writers.step().items():
            texts[row].append(written.token)
        if step == 3:
            writers.finish(1)
        if step == 50:  # after the cache began again without it
            writers.finish(3)
    assert writers.writing == [0, 2]
    assert [len(text) for text in texts] == [80, 4, 80, 51]
    assert all(text == whole[: len(text)] for text, whole in zip(texts, alone, strict=True))
    writers.finish(0)
    writers.finish(2)
    assert writers.step() == {}


def test_a_context_of_one_token_has_a_cache_too() -> None:
    engine = opened("numpy", n_ctx=1)
    given: dict[str, Any] = {"seed": 1, "max_tokens": 20}
    texts = [
        [t.token for t in write_tokens(engine, 1, [82], GREEDY, cached=cached, **given)]
        for cached in (True, False)
    ]
    assert texts[0] == texts[1]


def test_more_prompts_than_were_planned_for_are_refused(numpy_engine: Engine) -> None:
    with pytest.raises(EngineError, match=r"do not fit the planned \(4, 32\)"):
        together(numpy_engine, [b"a"] * 5, 1)


# ---- choosing -----------------------------------------------------------------------------------------------------------------


def test_seeds_are_the_texts_own(numpy_engine: Engine) -> None:
    """The same seed gives the same text, whatever is written beside it; another one another."""
    sampling = SamplingConfig(temperature=1.0)
    alone = [tokens_of(numpy_engine, b"R", sampling, seed=s, max_tokens=60) for s in (5, 6, 7)]
    writers = Writers(numpy_engine, MODEL.n_ctx, [[82]] * 4, sampling, seeds=[7, 5, 6, 5])
    texts = [[written.token for written in step.values()] for step in steps_of(writers, 60)]
    assert [list(text) for text in zip(*texts, strict=True)] == [
        alone[2],
        alone[0],
        alone[1],
        alone[0],
    ]
    assert len({tuple(text) for text in alone}) == 3


def steps_of(writers: Writers, count: int) -> list[Any]:
    return [writers.step() for _ in range(count)]


@pytest.mark.parametrize(("penalty", "window"), [(1.3, 4), (2.0, 64), (1.0, 64)])
def test_a_repetition_penalty_looks_at_the_last_tokens_of_prompt_and_text(
    numpy_engine: Engine, penalty: float, window: int
) -> None:
    """Against the rule written out: the window of the model may have been cut, the penalty's may not."""
    sampling = SamplingConfig(temperature=0.9, repetition_penalty=penalty, repetition_window=window)
    got = tokens_of(numpy_engine, b"ROMEO:", sampling, seed=9, max_tokens=80)
    text, seen = list(b"ROMEO:"), list(b"ROMEO:")
    for position, token in enumerate(got):
        logits = numpy_engine.logits(np.array([seen], np.int32))[0, -1]
        recent = np.array(text[-window:], np.int32)
        wanted, _ = sample(penalize(logits, recent, penalty), 9, position, 0.9, 0, 1.0)
        assert token == wanted, position
        text.append(token)
        seen.append(token)
        if len(seen) > MODEL.n_ctx:
            seen = seen[-MODEL.n_ctx // 2 :]


def test_a_strong_penalty_ends_repetition(numpy_engine: Engine) -> None:
    sampling = SamplingConfig(temperature=0, repetition_penalty=100.0, repetition_window=30)
    text = tokens_of(numpy_engine, b"R", sampling, max_tokens=100)
    assert all(token not in text[max(0, at - 29) : at] for at, token in enumerate(text))


def test_an_empty_prompt_is_refused(numpy_engine: Engine) -> None:
    with pytest.raises(ConfigError, match="the prompt is empty"):
        tokens_of(numpy_engine, b"")


# ---- text ---------------------------------------------------------------------------------------------------------------------


class Reciter:
    """An engine that says a text, whatever it is told: the token after n tokens is the text's n-th."""

    def __init__(self, *texts: bytes) -> None:
        self.texts, self.at = texts, 0

    def logits(self) -> np.ndarray:
        found = np.zeros((len(self.texts), 256), np.float32)
        for row, text in zip(found, self.texts, strict=True):
            row[text[self.at % len(text)]] = 1.0
        self.at += 1
        return found

    def prefill(self, tokens: np.ndarray, lengths: np.ndarray | None = None) -> np.ndarray:
        return self.logits()

    def decode(self, tokens: np.ndarray) -> np.ndarray:
        return self.logits()


def recited(*texts: str, stop: tuple[str, ...] = (), tokens: int = 0) -> list[list[str]]:
    """The pieces of each text."""
    engine: Any = Reciter(*(text.encode() for text in texts))
    count = tokens or max(len(text.encode()) for text in texts)
    pieces = write_texts(
        engine, 1000, TOKENIZER, ["\n"] * len(texts), GREEDY.model_copy(update={"max_tokens": count}),
        seeds=[1] * len(texts), stop=stop,
    )  # fmt: skip
    found: list[list[str]] = [[] for _ in texts]
    ended = set()
    for piece in pieces:
        assert piece.row not in ended, "a piece after the last one"
        found[piece.row].append(piece.text)
        if piece.last:
            ended.add(piece.row)
    assert ended == set(range(len(texts)))
    return found


def test_characters_come_whole() -> None:
    [pieces] = recited("né 𝄞!")
    assert "".join(pieces) == "né 𝄞!"
    assert "\ufffd" not in "".join(pieces)
    assert [piece for piece in pieces if piece] == ["n", "é", " ", "𝄞", "!"]
    [cut] = recited("é", tokens=1)  # half a character at the end is shown as what it is
    assert "".join(cut) == "\ufffd"


def test_a_text_ends_before_a_stop_string_that_comes_in_pieces() -> None:
    [pieces] = recited("To be.\n\nJULIET:", stop=("\n\n",))
    assert "".join(pieces) == "To be."
    [pieces] = recited("a--b---c", stop=("---",))
    assert "".join(pieces) == "a--b"
    [pieces] = recited("one two", stop=("two", "one two three", "e t"))
    assert "".join(pieces) == "on"
    [pieces] = recited("ab", stop=("abc", ""))  # the beginning of one that never came whole
    assert "".join(pieces) == "ab"


def test_each_of_several_texts_ends_at_its_own_stop() -> None:
    found = recited("one. two. three.", "nothing ends us.", "three.", stop=(".",))
    assert ["".join(pieces) for pieces in found] == ["one", "nothing ends us", "three"]
