"""Write the golden values: loss curves, first weights and batches that every engine and host must reproduce.

They come from the numpy engine in float64, never from an engine that is tested against them. Run by ``make golden`` after a deliberate
change of numerics; the commit then carries a ``Numerics:`` trailer that says why.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import numpy as np

from posttrainllm.config import TrainConfig, load_config, replace
from posttrainllm.control import batch_offsets
from posttrainllm.text.corpus import open_corpus
from posttrainllm.training.engine_choice import initial_parameters, training_engine
from posttrainllm.training.step import train_step

CURVES = {"tiny": 200, "small": 200}  # preset: steps
# At the presets' own rate of 3e-3 training amplifies rounding: float32 drifts 6e-5 from float64 in 200 steps of tiny, and float64 itself
# answers a change of its weights by 3e-8 with 1e-6. At 1e-3 float32 drifts 8e-8, and a difference between engines is the engines' own.
LEARNING_RATE = 1e-3
FILE = Path(__file__).parent / "golden.json"


def golden_config(preset: str, engine: str, build: str = "") -> TrainConfig:
    """The configuration of a golden run, on any engine."""
    changes = {
        "engine.name": engine,
        "engine.cpp_build": build,
        "schedule.learning_rate": LEARNING_RATE,
    }
    return replace(load_config(preset), changes)


def golden_curve(preset: str, steps: int) -> dict[str, object]:
    """Losses and gradient norms of the first steps of a preset's default run, and what they start from."""
    config = golden_config(preset, "numpy")
    corpus = open_corpus([], val_fraction=config.data.val_fraction)
    first = initial_parameters(config.model, config.training.seed)
    engine = training_engine(config, dtype=np.float64)
    engine.load(first)
    for step in range(1, steps + 1):
        train_step(engine, corpus, config, step)
    results = engine.results()
    rows = config.data.batch_size
    offsets = batch_offsets(config.training.seed, 1, rows, 0, corpus.positions(config.model.n_ctx))
    return {
        "seed": config.training.seed,
        "corpus": corpus.sha256,
        "parameters": {
            name: hashlib.sha256(values.tobytes()).hexdigest() for name, values in first.items()
        },
        "first_offsets": offsets.tolist(),
        "losses": [result.loss for result in results],
        "grad_norms": [result.grad_norm for result in results],
    }


def main() -> None:
    """Compute everything anew and write the file."""
    curves = {preset: golden_curve(preset, steps) for preset, steps in CURVES.items()}
    FILE.write_text(json.dumps(curves, indent=1) + "\n")


if __name__ == "__main__":
    main()
