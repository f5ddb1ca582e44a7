"""What the tests of the displays share: a run that is known from outside."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from posttrainllm.config import load_config
from posttrainllm.text.corpus import Corpus
from posttrainllm.text.counting import CountingLine
from posttrainllm.training.observer import Record, Start

COUNTING = [
    CountingLine(name, loss, 900)
    for name, loss in (
        ("guessing", 5.545),
        ("letter frequencies", 3.35),
        ("pairs", 2.48),
        ("triples", 2.05),
        ("quadruples", 1.78),
    )
]


def a_start(**flags: object) -> Start:
    text = np.frombuffer(b"To be, or not to be. " * 50, np.uint8)
    corpus = Corpus(
        "play.txt", ("/texts/play.txt",), "0" * 64, 1050, text[:945], text[945:], text[:945],
        text[945:], 0.1, (),
    )  # fmt: skip
    given = {"data.corpus": ["/texts/play.txt"], "training.steps": 1500, **flags}
    config = load_config("small", flags=given)
    return Start(
        run=Path("runs/small-001"),
        config=config,
        corpus=corpus,
        engine={"engine": "cpp", "build": "avx2", "build_id": "abc", "threads": 2},
        parameters=config.model.parameters(),
        nbytes=29_249_599,
        tokens_per_step=1024,
        first_step=1,
        counting=COUNTING,
        seconds_per_step=0.03,
    )


def a_record(step: int, loss: float = 2.0, val_loss: float | None = None) -> Record:
    return Record(step, loss, val_loss, 3e-3, 0.7, 41_230.0, step * 0.03)
