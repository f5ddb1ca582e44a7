"""What the tests of the lab share: a text and a model so small that a training is a matter of milliseconds."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from posttrainllm.config import TrainConfig, load_config
from posttrainllm.text.corpus import Corpus
from posttrainllm.training.session import corpus_of

SIZES = (
    "model.n_layer=1",
    "model.n_head=2",
    "model.n_embd=12",
    "model.n_ctx=10",
    "data.batch_size=3",
    "engine.threads=1",
)
SENTENCE = "the cat sat on a mat and the dog ran after it in vain while they all looked on"


def write_text(folder: Path) -> Path:
    """A text of 20 kB with words in random order."""
    chosen = np.random.default_rng(1).choice(SENTENCE.split(), 5000)
    path = folder / "words.txt"
    path.write_text(" ".join(chosen) + "\n", encoding="utf-8")
    return path


def settings(folder: Path) -> list[str]:
    """The small model on its text, as after --set."""
    return [*SIZES, f"data.corpus={write_text(folder)}"]


def small(folder: Path, *more: str, engine: str = "cpp", steps: int = 20) -> TrainConfig:
    """Its configuration."""
    flags = {"engine.name": engine, "training.steps": steps}
    return load_config("tiny", overrides=[*settings(folder), *more], flags=flags)


def text_of(config: TrainConfig) -> Corpus:
    """Its corpus."""
    return corpus_of(config)


def as_arguments(folder: Path) -> list[str]:
    """The small model as arguments of a command."""
    return [part for setting in settings(folder) for part in ("--set", setting)]
