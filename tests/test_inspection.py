"""Looking inside: the probabilities that the kernels give are those of the definition, softmax(q k / sqrt(D)) below the diagonal."""

from __future__ import annotations

import numpy as np
import pytest

from posttrainllm.config import load_config
from posttrainllm.engines.cpp_engine import CppEngine
from posttrainllm.engines.numpy_engine import NumpyEngine
from posttrainllm.inspection import inspection_programs
from posttrainllm.plan import Place
from posttrainllm.training.engine_choice import initial_parameters

TIME = 29  # no multiple of anything


def softmax_below_the_diagonal(q: np.ndarray, k: np.ndarray) -> np.ndarray:
    """Attention probabilities (H, T, T) of queries and keys (T, H, D), in float64."""
    scores = np.einsum("thd,shd->hts", q.astype(float), k.astype(float)) / np.sqrt(q.shape[2])
    scores[:, ~np.tri(len(q), dtype=bool)] = -np.inf
    weights = np.exp(scores - scores.max(axis=2, keepdims=True))
    return weights / weights.sum(axis=2, keepdims=True)


@pytest.mark.parametrize("engine", [NumpyEngine, CppEngine])
def test_rows_of_the_identity_as_values_give_the_probabilities(engine: type) -> None:
    config = load_config("tiny").model
    width, heads = config.n_embd, config.n_head
    size = width // heads
    opened = engine(*inspection_programs(config))
    opened.load({name: 3 * values for name, values in initial_parameters(config, 1).items()})
    tokens = np.random.default_rng(1).integers(0, 256, TIME).astype(np.int32)
    for name, values in (
        ("tokens", tokens),
        ("positions", np.arange(TIME)),
        ("segment_start", np.zeros(TIME)),
    ):
        opened.write(Place(f"in.{name}", 0, (TIME,)), values.astype(np.int32))
    opened.run_program("inspect", B=1, T=TIME)
    for layer in range(config.n_layer):
        qkv = opened.read(Place(f"out.h.{layer}.attn.qkv", 0, (TIME, 3 * width))).copy()
        q, k = (
            qkv[:, part * width : (part + 1) * width].reshape(TIME, heads, size) for part in (0, 1)
        )
        wanted = softmax_below_the_diagonal(q, k)
        got = np.zeros((heads, TIME, TIME))
        for first in range(0, TIME, size):
            qkv[:, 2 * width :] = np.arange(TIME)[:, None] == first + np.arange(width) % size
            opened.write(Place("in.given.qkv", 0, (TIME, 3 * width)), qkv)
            opened.run_program("attention", B=1, T=TIME)
            out = opened.read(Place("out.given.out", 0, (TIME, width))).reshape(TIME, heads, size)
            got[:, :, first : first + size] = out.transpose(1, 0, 2)[:, :, : TIME - first]
        assert 0.1 < wanted[:, -1].max() < 0.99  # neither flat nor one-hot
        assert np.abs(got - wanted).max() <= 1e-6
    opened.close()
