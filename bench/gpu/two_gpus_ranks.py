"""What ``two_gpus.py`` runs under torchrun, a process a card: losses against one card's, and the time and memory of steps.

    torchrun --standalone --nproc-per-node 2 bench/gpu/two_gpus_ranks.py --job parity|speed --preset NAME --out FILE

Rank 0 measures and writes the file; the other one follows, as in a training.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).parents[2] / "src"))

from posttrainllm.config import TrainConfig, load_config
from posttrainllm.engines.base import Batch, Engine, StepScalars
from posttrainllm.formats.huggingface import parameter_shapes
from posttrainllm.pytorch import distributed_reducer
from posttrainllm.pytorch.distributed_engine import LeadingEngine, follow
from posttrainllm.pytorch.distributed_group import Group, join
from posttrainllm.pytorch.engine import TorchEngine
from posttrainllm.pytorch.ranks import ranks_here

PARITY_STEPS, REPEATS, STEPS = 50, 10, 20
ROWS = {"gpt2": 32, "behemoth": 16, "tiny": 4}  # a GPU
CUDA = torch.cuda.is_available()
TRITON = {"engine.triton": "on"} if CUDA else {}  # however few the steps
LAYERS = ["one", "ddp", "ddp-one-bucket"]  # written out with fused kernels
ONLY = os.environ.get("VARIANTS", "").split(",")  # for a shorter call: some of the following
VARIANTS = {
    "gpt2": [*LAYERS, "fsdp", "one-compiled", "ddp-compiled", "fsdp-compiled"],
    "behemoth": [*LAYERS, "fsdp", "fsdp-compiled"],
    "tiny": [*LAYERS, "fsdp"],
}


@cache
def initial(preset: str) -> dict[str, Any]:
    """Initial values, quickly."""
    random, found = np.random.default_rng(1), {}
    for name, shape in parameter_shapes(load_config(preset).model).items():
        center = np.float32("ln_" in name and name.endswith("weight"))
        scale = np.float32(0.02 if len(shape) > 1 else 0.0)
        found[name] = center + scale * random.standard_normal(shape, np.float32)
    return found


def batches(config: TrainConfig) -> Iterator[Batch]:
    """Endless batches: parity learns a text of few letters, speed needs none."""
    random = np.random.default_rng(2)
    shape = (config.data.batch_size, config.model.n_ctx + 1)
    while True:
        ids = random.zipf(1.3, shape) % config.model.n_vocab
        ids = ids.astype(np.int32)
        yield Batch(np.ascontiguousarray(ids[:, :-1]), np.ascontiguousarray(ids[:, 1:]))


def step(engine: Engine, config: TrainConfig, batch: Batch, number: int) -> None:
    engine.gradients(batch, inv_count=1 / config.tokens_per_step, first=True)
    rate = 3e-4 * min(1.0, number / 20)
    engine.update(StepScalars(rate, 1 - 0.9**number, 1 - 0.95**number))


def losses(engine: Engine, config: TrainConfig, steps: int) -> list[float]:
    engine.load(initial(config.preset))
    source, found = batches(config), []
    for number in range(1, steps + 1):
        step(engine, config, next(source), number)
        found += [result.loss for result in engine.results(wait=False)]
    return found + [result.loss for result in engine.results()]


def timed(engine: Engine, config: TrainConfig) -> dict[str, Any]:
    """Seconds of groups of steps, and memory of this card: what stays, and the most during a step."""
    began = time.perf_counter()
    engine.load(initial(config.preset))
    batch = next(batches(config))
    for number in range(1, 6):
        step(engine, config, batch, number)
    engine.results()
    started = time.perf_counter() - began
    standing = torch.cuda.memory_allocated() if CUDA else 0
    if CUDA:
        torch.cuda.reset_peak_memory_stats()
    seconds = []
    for repeat in range(REPEATS):
        began = time.perf_counter()
        for number in range(STEPS):
            step(engine, config, batch, 6 + repeat * STEPS + number)
        results = engine.results()
        seconds.append((time.perf_counter() - began) / STEPS)
    assert all(result.finite for result in results)
    median = statistics.median(seconds)
    return {
        "median_ms": 1e3 * median,
        "min_ms": 1e3 * min(seconds),
        "max_ms": 1e3 * max(seconds),
        "tokens_per_second": config.tokens_per_step / median,
        "tokens_per_step": config.tokens_per_step,
        "memory_standing": standing,
        "memory_peak": torch.cuda.max_memory_allocated() if CUDA else 0,
        "memory_reserved": torch.cuda.max_memory_reserved() if CUDA else 0,
        "seconds_before_timing": started,
        "last_loss": results[-1].loss,
        "info": dict(engine.info),
    }


def forget() -> None:
    """Let go of an engine's memory, its graphs' too."""
    gc.collect()
    if CUDA:
        torch.cuda.empty_cache()


def parity(preset: str, group: Group, found: dict[str, Any]) -> None:
    """50 float32 steps of both kinds of two processes against one."""
    flags: dict[str, Any] = {"engine.name": "torch", "engine.precision": "float32", **TRITON}
    rows = load_config(preset).data.batch_size
    flags["data.batch_size"] = rows + rows % 2
    config = load_config(preset, flags=flags)
    one = TorchEngine(config)
    reference = np.array(losses(one, config, PARITY_STEPS))
    del one
    forget()
    for parallel in ("ddp", "fsdp"):
        config = load_config(preset, flags=flags | {"engine.parallel": parallel})
        two = LeadingEngine(config, group)
        ours = np.array(losses(two, config, PARITY_STEPS))
        apart = np.abs(ours - reference) / np.abs(reference)
        found[parallel] = {
            "worst": float(apart.max()), "at_step": int(apart.argmax()) + 1,
            "first": [float(reference[0]), float(ours[0])],
            "last": [float(reference[-1]), float(ours[-1])], "info": dict(two.info),
        }  # fmt: skip
        two.close()
        del two
        forget()


def speed(preset: str, group: Group, found: dict[str, Any], save: Callable[[], None]) -> None:
    """Steps of one card, of two replicas, of two shards: as many rows on every card."""
    for name in VARIANTS[preset]:
        if any(ONLY) and name not in ONLY:
            continue
        count = 1 if name.startswith("one") else 2
        flags = {
            "engine.name": "torch", "engine.precision": "bf16" if CUDA else "auto",
            "engine.compile": "on" if CUDA and "compiled" in name else "off", **TRITON,
            "training.steps": 100_000, "data.batch_size": ROWS.get(preset, 4) * count,
            "engine.parallel": "fsdp" if name.startswith("fsdp") else "ddp",
        }  # fmt: skip
        config = load_config(preset, flags=flags)
        began = time.perf_counter()
        engine: Engine = TorchEngine(config) if count == 1 else LeadingEngine(config, group)
        found[name] = timed(engine, config)
        found[name]["seconds"] = time.perf_counter() - began
        print(preset, name, json.dumps(found[name]), flush=True)
        save()
        engine.close()
        del engine
        forget()


def all_reduce(found: dict[str, Any]) -> None:
    """The sum of half a gigabyte alone. Called on every rank."""
    values = torch.zeros(1 << 27, device="cuda" if CUDA else "cpu")
    times = []
    for _ in range(12):
        if CUDA:
            torch.cuda.synchronize()
        began = time.perf_counter()
        torch.distributed.all_reduce(values)
        if CUDA:
            torch.cuda.synchronize()
        times.append(time.perf_counter() - began)
    seconds = statistics.median(times[2:])
    found["all_reduce"] = {
        "bytes": values.nbytes,
        "ms": 1e3 * seconds,
        "bytes_per_second": values.nbytes / seconds,
    }


def by_schedule(sizes: list[int]) -> None:
    """Let the reducers of this process have buckets of these sizes, one after the other, as on the other rank."""
    given, original = iter(sizes), distributed_reducer.Reducer.__init__

    def made(self: distributed_reducer.Reducer) -> None:
        original(self, next(given, distributed_reducer.BUCKET_BYTES))

    distributed_reducer.Reducer.__init__ = made  # type: ignore[method-assign]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--job", required=True)
    parser.add_argument("--preset", required=True)
    parser.add_argument("--out", type=Path, required=True)
    given = parser.parse_args()
    if given.job == "speed":
        names = [name for name in VARIANTS[given.preset] if name.startswith("ddp")]
        usual = distributed_reducer.BUCKET_BYTES
        by_schedule([sys.maxsize if "one-bucket" in name else usual for name in names])
    ranks = ranks_here()
    assert ranks is not None
    found: dict[str, Any] = {"nccl": list(torch.cuda.nccl.version()) if CUDA else None}

    def save() -> None:
        given.out.write_text(json.dumps(found, indent=1))

    with join(ranks) as group:
        all_reduce(found)
        if not ranks.leads:
            return follow(group)
        try:
            if given.job == "parity":
                parity(given.preset, group, found)
            else:
                speed(given.preset, group, found, save)
        except BaseException:
            found["error"] = traceback.format_exc()
            raise
        finally:
            save()


if __name__ == "__main__":
    try:
        main()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
