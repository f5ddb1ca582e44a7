"""What the GPU benchmarks share: batches of the default text, engines, a plain training loop."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[2] / "src"))

from posttrainllm.config import TrainConfig
from posttrainllm.engines.base import Batch, ProgramEngine, StepScalars
from posttrainllm.engines.webgpu.engine import WebGpuEngine
from posttrainllm.model import training_programs
from posttrainllm.training.engine_choice import initial_parameters


def text() -> np.ndarray[Any, Any]:
    """TinyShakespeare's bytes, or something with its statistics where the file is missing."""
    path = Path(__file__).parents[2] / "src/posttrainllm/data/tinyshakespeare.txt"
    if path.is_file():
        return np.frombuffer(path.read_bytes(), np.uint8)
    words = np.random.default_rng(1).integers(97, 123, 1 << 20).astype(np.uint8)
    return words


def batches(config: TrainConfig, seed: int = 0) -> Any:
    """Endless batches of the text."""
    tokens, random = text(), np.random.default_rng(seed)
    batch, time_ = config.data.batch_size, config.model.n_ctx
    while True:
        at = random.integers(0, len(tokens) - time_ - 1, batch)
        rows = tokens[at[:, None] + np.arange(time_ + 1)].astype(np.int32)
        rows %= config.model.n_vocab
        yield Batch(rows[:, :-1], rows[:, 1:])


def engine(config: TrainConfig, **more: Any) -> WebGpuEngine:
    programs, dims = training_programs(config.model, config.optimizer, config.data.batch_size)
    return WebGpuEngine(programs, dims, **more)


def reference(config: TrainConfig) -> ProgramEngine:
    programs, dims = training_programs(config.model, config.optimizer, config.data.batch_size)
    try:
        from posttrainllm.engines.cpp_engine import CppEngine

        return CppEngine(programs, dims)
    except Exception as error:
        print(f"no cpp engine ({error}); numpy instead", flush=True)
        from posttrainllm.engines.numpy_engine import NumpyEngine

        return NumpyEngine(programs, dims)


def train(what: ProgramEngine, config: TrainConfig, steps: int) -> list[tuple[float, float]]:
    what.load(initial_parameters(config.model, 1))
    scale = 1.0 / (config.data.batch_size * config.model.n_ctx)
    source = batches(config)
    found = []
    for step in range(1, steps + 1):
        rate = 1e-3 * min(1.0, step / 20)
        what.gradients(next(source), inv_count=scale, first=True)
        what.update(StepScalars(rate, 1 - 0.9**step, 1 - 0.95**step))
        found += [(result.loss, result.grad_norm) for result in what.results(wait=False)]
    found += [(result.loss, result.grad_norm) for result in what.results()]
    return found


def fast_parameters(gpu: WebGpuEngine) -> dict[str, Any]:
    """Initial values of a large model, quickly."""
    random = np.random.default_rng(1)
    return {
        name: (0.02 * random.standard_normal(place.shape, np.float32)).astype(np.float32)
        for name, (_, place) in gpu.plan.layout.items()
    }
