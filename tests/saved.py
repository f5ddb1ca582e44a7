"""Checkpoints to test with: small models with random weights, saved where a test wants them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from posttrainllm.config import TrainConfig, load_config
from posttrainllm.formats.huggingface import parameter_shapes
from posttrainllm.runs.checkpoint import CorpusIdentity, TrainerState, write_checkpoint
from posttrainllm.storage import hash_file
from posttrainllm.text.tokenizer import ByteTokenizer

SIZES = {"n_layer": 2, "n_head": 2, "n_embd": 8, "n_ctx": 12}


def small_config(**model: Any) -> TrainConfig:
    return load_config(
        "tiny", flags={f"model.{name}": value for name, value in {**SIZES, **model}.items()}
    )


def make_state(step: int = 500, config: TrainConfig | None = None, **changes: Any) -> TrainerState:
    fields = {
        "step": step,
        "seed": 1,
        "engine": "numpy",
        "engine_info": {"build": "abc123", "tiles": [8, 48]},
        "threads": 2,
        "corpus": CorpusIdentity(name="input.txt", sha256="0" * 64, bytes=1_115_394),
        "tokenizer": "bytes",
        "best_val_loss": 1.875,
        "numbers": {"best_step": 400, "ema": 2.0625, "samples": ["ROMEO:\n"]},
        "elapsed_s": 12.5,
        "config": config or small_config(),
    }
    return TrainerState(**{**fields, **changes})


def make_values(config: TrainConfig, seed: int = 0) -> dict[str, dict[str, np.ndarray]]:
    """Arguments ``params``, ``m`` and ``v``: normal weights and moments, squares not negative."""
    generator = np.random.default_rng(seed)
    shapes = parameter_shapes(config.model)
    values = {
        part: {
            name: generator.standard_normal(shape, np.float32) * np.float32(0.3)
            for name, shape in shapes.items()
        }
        for part in ("params", "m", "v")
    }
    values["v"] = {name: np.square(array) for name, array in values["v"].items()}
    return values


def save(
    checkpoints: Path, step: int = 500, *, seed: int = 0, keep: int = 100, **model: Any
) -> Path:
    """Write a checkpoint of a small model; ``seed`` decides its numbers."""
    config = small_config(**model)
    checkpoints.mkdir(parents=True, exist_ok=True)
    return write_checkpoint(
        checkpoints,
        state=make_state(step, config),
        **make_values(config, seed),
        tokenizer=ByteTokenizer(),
        keep=keep,
    )


def rehash(folder: Path) -> None:
    """Make hashes.json say that the files are as they should be, whatever they now hold."""
    hashes = {
        path.name: {"sha256": (found := hash_file(path)).sha256, "bytes": found.bytes}
        for path in folder.iterdir()
        if path.name != "hashes.json" and path.is_file()
    }
    document = {"format_version": 1, "files": hashes}
    (folder / "hashes.json").write_text(json.dumps(document))


def edit_json(path: Path, **changes: Any) -> None:
    """Change fields of a JSON file; None for a value that is ``...`` removes the field."""
    document = json.loads(path.read_text())
    document.update(changes)
    document = {name: value for name, value in document.items() if value is not ...}
    path.write_text(json.dumps(document))


def read_tensor_file(path: Path) -> tuple[dict[str, Any], bytes]:
    """Split a safetensors file into its header and the tensors' bytes."""
    content = path.read_bytes()
    length = int.from_bytes(content[:8], "little")
    return json.loads(content[8 : 8 + length]), content[8 + length :]


def write_tensor_file(path: Path, header: dict[str, Any] | bytes, data: bytes) -> None:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)
