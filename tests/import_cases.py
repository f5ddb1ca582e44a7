"""What the tests of import and export share: foreign models as files, and the largest difference of logits."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np

import tinygpt_files
from posttrainllm.config import EngineConfig, GPTConfig
from posttrainllm.engines.base import Engine
from posttrainllm.text.tokenizer import byte_characters
from posttrainllm.training.engine_choice import inference_engine
from saved import save
from tinygpt_files import Sizes

# Options of a short training.
SMALL = ["--steps=4", "--batch-size=2", "--engine=numpy", "--quiet"]
QUICK = [
    "--set=training.sample_tokens=4",
    "--set=training.verdict_samples=1",
    "--set=training.final_windows=4",
]
ENGINES = ("numpy", "cpp", "wasm", "webgpu", "torch")


def bpe(n_vocab: int, *, special: bool = True) -> dict[str, Any]:
    """A byte-level BPE tokenizer.json of ``n_vocab`` tokens: 256 bytes, merges of English pairs, and <|endoftext|>."""
    vocab = {character: index for index, character in enumerate(byte_characters())}
    merges: list[list[str]] = []
    letters = "etaoinshrdlu\u0120"
    pairs = [(a, b) for a in letters for b in letters]
    triples = [(a + b, c) for a, b in pairs[:40] for c in "etao"]
    for left, right in pairs + triples:
        if len(vocab) >= n_vocab - special:
            break
        if left + right not in vocab:
            vocab[left + right] = len(vocab)
            merges.append([left, right])
    added = []
    if special and n_vocab > 256:
        vocab["<|endoftext|>"] = n_vocab - 1
        flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
        added = [{"id": n_vocab - 1, "content": "<|endoftext|>", **flags, "special": True}]
    assert n_vocab == 256 or len(vocab) == n_vocab
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
    byte_level["use_regex"] = n_vocab > 256
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": added,
        "normalizer": None,
        "pre_tokenizer": byte_level,
        "post_processor": None,
        "decoder": byte_level,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": vocab,
            "merges": merges,
        },
    }


def write_bpe(folder: Path, n_vocab: int) -> None:
    """Put a tokenizer.json into a folder."""
    text = json.dumps(bpe(n_vocab), ensure_ascii=False)
    (folder / "tokenizer.json").write_text(text, encoding="utf-8")


def as_pair(folder: Path) -> None:
    """Make vocab.json and merges.txt of a folder's tokenizer.json, as GPT-2 was first published."""
    model = json.loads((folder / "tokenizer.json").read_text("utf-8"))["model"]
    (folder / "vocab.json").write_text(json.dumps(model["vocab"]), encoding="utf-8")
    lines = ["#version: 0.2", *(" ".join(pair) for pair in model["merges"]), ""]
    (folder / "merges.txt").write_text("\n".join(lines), encoding="utf-8")
    (folder / "tokenizer.json").unlink()


def model_folder(parent: Path, n_vocab: int = 256, **model: Any) -> Path:
    """A small model folder as transformers would leave it: no training state, no hashes."""
    saved = save(parent / "made" / "checkpoints", n_vocab=n_vocab, **model)
    for name in ("hashes.json", "trainer_state.json", "optimizer.safetensors"):
        (saved / name).unlink()
    if n_vocab > 256:
        write_bpe(saved, n_vocab)
    folder = saved.rename(parent / "model")
    shutil.rmtree(parent / "made")
    return folder


def tinygpt(parent: Path, sizes: Sizes | None = None, dtype: str = "fp32") -> Path:
    """A .tinygpt file of random weights."""
    sizes = sizes or Sizes()
    weights = tinygpt_files.random_weights(sizes)
    if dtype == "fp16":
        content = tinygpt_files.fp16(sizes, weights)
    elif dtype == "int4":
        content, _ = tinygpt_files.int4(sizes, weights)
    else:
        m = tinygpt_files.random_weights(sizes, 1)
        v = {name: np.square(array) for name, array in weights.items()}
        content = tinygpt_files.fp32(sizes, weights, m, v)
    path = parent / "model.tinygpt"
    path.write_bytes(content)
    return path


def engine_for(name: str, config: GPTConfig, params: dict[str, np.ndarray], batch: int) -> Engine:
    """An engine that holds a model."""
    engine = inference_engine(config, EngineConfig(name=name), batch=batch, logits=True)  # type: ignore[arg-type]
    engine.load(params)
    return engine


def logits_of(
    name: str, config: GPTConfig, params: dict[str, np.ndarray], tokens: np.ndarray
) -> np.ndarray:
    """The logits (B, T, V) of a model on an engine."""
    engine = engine_for(name, config, params, len(tokens))
    try:
        return engine.logits(tokens.astype(np.int32))
    finally:
        engine.close()


def tokens_for(config: GPTConfig, rows: int = 2, seed: int = 0) -> np.ndarray:
    """Random tokens (rows, T), the whole context long."""
    return np.random.default_rng(seed).integers(0, config.n_vocab, (rows, config.n_ctx))


def apart(got: np.ndarray, wanted: np.ndarray) -> float:
    """The largest difference; NaN is larger than any."""
    difference = np.abs(np.asarray(got, np.float64) - np.asarray(wanted, np.float64)).max()
    return float(np.inf if np.isnan(difference) else difference)
