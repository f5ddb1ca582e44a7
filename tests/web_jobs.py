"""Training jobs for the web runtime, and the same runs in Python to compare with."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np
from tests.golden.make_golden import golden_config

from model_cases import train_config
from posttrainllm.config import TrainConfig, replace, settings_of
from posttrainllm.control import sample
from posttrainllm.text.corpus import Corpus, open_corpus
from posttrainllm.training.engine_choice import initial_parameters, training_engine
from posttrainllm.training.step import train_step

GOLDEN = json.loads((Path(__file__).parent / "golden" / "golden.json").read_text())
PROMPT = 5  # tokens that the writing starts from


def corpus() -> Corpus:
    """TinyShakespeare, split as every preset splits it."""
    return open_corpus([], val_fraction=train_config().data.val_fraction)


def training_text(path: Path) -> None:
    """Write the training part, one byte a token."""
    path.write_bytes(np.asarray(corpus().train, np.uint8).tobytes())


def golden_job(preset: str, *, steps: int, threads: int) -> dict[str, Any]:
    """The run of the golden curve of a preset, or its beginning."""
    return _job(golden_config(preset, "wasm"), steps=steps, threads=threads)


def job(preset: str, **work: Any) -> dict[str, Any]:
    """A job of ``web/test/training_job.ts``; names with ``__`` are settings."""
    settings = {name: work.pop(name) for name in list(work) if "__" in name}
    return _job(train_config(preset, **settings), **work)


def _job(
    config: TrainConfig,
    *,
    steps: int,
    threads: int = 1,
    build: str = "",
    write: int = 0,
    overfit: bool = False,
    bare: bool = False,
) -> dict[str, Any]:
    work = {
        "settings": settings_of(config),
        "steps": steps,
        "threads": threads,
        "write": write,
        "overfit": overfit,
        "bare": bare,
    }
    return work | ({"build": build} if build else {})


def python_run(preset: str, *, steps: int, write: int = 0, engine: str = "wasm") -> dict[str, Any]:
    """The same job on an engine in Python."""
    config, text = replace(train_config(preset), {"engine.name": engine}), corpus()
    trained = training_engine(config)
    trained.load(initial_parameters(config.model, config.training.seed))
    for step in range(1, steps + 1):
        train_step(trained, text, config, step)
    results = trained.results()
    written: list[int] = []
    if write:
        logits = trained.prefill(np.asarray(text.train[:PROMPT], np.int32).reshape(1, -1))
        for position in range(write):
            token, _ = sample(logits[0], config.training.seed, position, 0.8, 0, 1.0)
            written.append(token)
            logits = trained.decode(np.array([token], np.int32))
    digest = hashlib.sha256(b"".join(v.tobytes() for v in trained.state().params.values()))
    trained.close()
    return {
        "losses": [result.loss for result in results],
        "grad_norms": [result.grad_norm for result in results],
        "weights": digest.hexdigest(),
        "written": written,
    }
