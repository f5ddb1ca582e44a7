"""What the tests let rank 0 of several processes do; run by ``distributed_cases.job_on_ranks``."""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from posttrainllm.cli.worker import leave_at_once
from posttrainllm.config import TrainConfig, load_config
from posttrainllm.engines.base import Batch, Engine
from posttrainllm.errors import PosttrainError
from posttrainllm.formats.parts import read_parts
from posttrainllm.pytorch import distributed_reducer
from posttrainllm.pytorch.distributed_engine import LeadingEngine, follow
from posttrainllm.pytorch.distributed_group import Group, join
from posttrainllm.pytorch.ranks import ranks_here
from posttrainllm.text.corpus import open_corpus
from posttrainllm.training.engine_choice import initial_parameters
from posttrainllm.training.step import train_step

STEPS = 50
SENTENCE = "the cat sat on a mat and the dog ran"
CASES = [(16, 1), (4, 4)]  # rows of a micro-batch, micro-batches a step


def config_of(rows: int, accumulation: int, parallel: str = "ddp", **more: Any) -> TrainConfig:
    """Odd sizes, so that no rank has as much of a tensor as the other."""
    flags = {
        "engine.name": "torch",
        "engine.threads": 1,
        "engine.parallel": parallel,
        "model.n_layer": 2,
        "model.n_head": 3,
        "model.n_embd": 15,
        "model.n_ctx": 12,
        "data.batch_size": rows,
        "data.accumulation": accumulation,
        "training.steps": STEPS,
        "schedule.learning_rate": 1e-3,
        "schedule.warmup_steps": 10,
    }
    return load_config("tiny", flags=flags | more)


def measured(engine: Engine, config: TrainConfig) -> dict[str, Any]:
    """50 steps, and one answer of every other method."""
    text = np.random.default_rng(1).choice(SENTENCE.split(), 3000)
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as file:
        file.write(" ".join(text))
        file.flush()
        corpus = open_corpus([file.name], val_fraction=0.1)
        engine.load(initial_parameters(config.model, 1))
        results = []
        for step in range(1, STEPS + 1):
            train_step(engine, corpus, config, step)
            results += engine.results(wait=step == STEPS)
        held_out = Batch(*corpus.windows(np.arange(5), config.model.n_ctx))
    prompts = np.array([[1, 2, 3], [4, 5, 0]], np.int32)
    gradients = engine.gradient_tensors()
    return {
        "losses": [result.loss for result in results],
        "norms": [result.grad_norm for result in results],
        "loss": engine.loss(held_out),
        "logits": engine.logits(prompts).ravel().tolist(),
        "prefill": engine.prefill(prompts, np.array([3, 2], np.int32)).ravel().tolist(),
        "decode": engine.decode(np.array([7, 8], np.int32)).ravel().tolist(),
        "gradients": {name: float(np.abs(value).sum()) for name, value in gradients.items()},
        "params": {
            name: float(np.abs(value).sum()) for name, value in engine.state().params.items()
        },
        "info": dict(engine.info),
    }


def steps(group: Group) -> Any:
    """Every kind of several processes, on whole batches and on micro-batches, in small buckets too."""
    found = {}
    for parallel in ("ddp", "fsdp"):
        for rows, accumulation in CASES:
            config = config_of(rows, accumulation, parallel)
            found[f"{parallel} {rows}x{accumulation}"] = measured(
                LeadingEngine(config, group), config
            )
    return found


def moments(group: Group) -> Any:
    """What a sharded engine writes, what comes back from it, and a folder that cannot be written."""
    config = config_of(16, 1, "fsdp")
    engine = LeadingEngine(config, group)
    random = np.random.default_rng(3)
    params = initial_parameters(config.model, 1)
    m, v = (
        {name: random.random(value.shape, np.float32) for name, value in params.items()}
        for _ in range(2)
    )
    engine.load(params, m, v)
    state = engine.state()
    assert state.m == {}
    assert state.v == {}
    assert state.write_moments is not None
    named = {f"adam.m.{name}": value for name, value in m.items()}
    named |= {f"adam.v.{name}": value for name, value in v.items()}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        state.write_moments(folder)
        files = sorted(path.name for path in folder.iterdir())
        back = read_parts(folder, {key: value.shape for key, value in named.items()})
        (folder / "file").write_text("no folder")
        try:
            state.write_moments(folder / "file")
            refused = ""
        except OSError as error:
            refused = str(error)
    return {
        "files": files,
        "moments": all(np.array_equal(back[key], value) for key, value in named.items()),
        "params": all(np.array_equal(state.params[name], params[name]) for name in params),
        "refused": refused,
        "no_ids": no_ids(engine),
        "still_answers": engine.loss(Batch(np.zeros((2, 4), np.int32), np.ones((2, 4), np.int32))),
    }


def no_ids(engine: Engine) -> list[str]:
    """What is said to tokens and targets beyond the vocabulary of 256."""
    high, low = np.full((2, 4), 256, np.int32), np.zeros((2, 4), np.int32)
    said = []
    for call in (
        lambda: engine.gradients(Batch(high, low), inv_count=1.0, first=True),
        lambda: engine.loss(Batch(low, high)),
        lambda: engine.logits(high),
        lambda: engine.prefill(-high),
        lambda: engine.decode(high[:, 0]),
    ):
        try:
            call()
        except PosttrainError as error:
            said.append(error.message)
    return said


def apart(group: Group) -> Any:
    """A replica whose parameters are changed behind its back is noticed at the next checkpoint."""
    engine = LeadingEngine(config_of(4, 1), group)
    engine.load(initial_parameters(config_of(4, 1).model, 1))
    engine.state()
    engine._local.module.wte.weight.data[3, 2] += 1e-7  # type: ignore[attr-defined]
    try:
        engine.state()
    except PosttrainError as error:
        return error.message
    return "nothing was noticed"


def main() -> None:
    job, out = sys.argv[1:]
    distributed_reducer.Reducer.__init__.__defaults__ = (1 << 12,)
    ranks = ranks_here()
    assert ranks is not None
    try:
        with join(ranks) as group:
            if ranks.leads:
                Path(out).write_text(json.dumps(globals()[job](group)))
            else:
                follow(group)
    except PosttrainError:
        if job != "apart":
            raise
    leave_at_once(0)


if __name__ == "__main__":
    main()
