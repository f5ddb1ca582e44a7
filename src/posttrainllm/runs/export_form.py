"""What the files of a run folder look like, as data: for the browser, which writes the same folder.

What this is: the JSON documents of a checkpoint with ``{"setting": name}`` where a value of the configuration stands, the names of
files and tensors, and the versions of the formats. TypeScript (``web/src/storage``) fills them in and repeats none of it.
What this is not: the writing of files. Read next: ``runs/checkpoint.py``.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from posttrainllm import config
from posttrainllm.config import GPTConfig
from posttrainllm.formats.huggingface import (
    CONFIG_FILE,
    GENERATION_FILE,
    HEAD,
    PREFIX,
    WEIGHTS_FILE,
    config_document,
    generation_document,
)
from posttrainllm.formats.tinygpt import SIZES
from posttrainllm.formats.tinygpt_layout import BLOCK, FIXED, MAGIC, VERSIONS, tensors
from posttrainllm.runs.checkpoint import MEAN, SQUARE
from posttrainllm.runs.checkpoint_folder import (
    HASHES_FILE,
    HASHES_FORMAT,
    OPTIMIZER_FILE,
    STATE_FILE,
)
from posttrainllm.runs.folder import CONFIG_FILE as RUN_CONFIG_FILE
from posttrainllm.runs.folder import CORPUS_FILE, MAX_NAME_BYTES, METRICS
from posttrainllm.runs.trainer_state import TrainerState
from posttrainllm.text.corpus import DEFAULT_NAME
from posttrainllm.text.datasets import TINY_SHAKESPEARE
from posttrainllm.text.tokenizer import TOKENIZER_CONFIG_FILE, TOKENIZER_FILE, ByteTokenizer


def files() -> dict[str, Any]:
    """Names, documents and versions of a run folder."""
    setting = {name: {"setting": f"model.{name}"} for name in GPTConfig.model_fields}
    shape: Any = setting
    return {
        "formats": {
            "config": config.FORMAT,
            "trainer_state": TrainerState.FORMAT,
            "hashes": HASHES_FORMAT,
        },
        "names": {
            "run_config": RUN_CONFIG_FILE,
            "corpus": CORPUS_FILE,
            "config": CONFIG_FILE,
            "weights": WEIGHTS_FILE,
            "optimizer": OPTIMIZER_FILE,
            "state": STATE_FILE,
            "hashes": HASHES_FILE,
        },
        "documents": {
            CONFIG_FILE: config_document(GPTConfig.model_construct(**shape)),
            GENERATION_FILE: generation_document(),
            **_tokenizer(),
        },
        "tensors": {"prefix": PREFIX, "head": HEAD, "mean": MEAN, "square": SQUARE},
        "metrics": list(METRICS),
        "max_name_bytes": MAX_NAME_BYTES,
        "tokenizer": {"fingerprint": ByteTokenizer.fingerprint, "n_vocab": ByteTokenizer.n_vocab},
        "bundled_corpus": {
            "name": DEFAULT_NAME,
            "file": TINY_SHAKESPEARE.file_name,
            "sha256": TINY_SHAKESPEARE.sha256,
            "bytes": TINY_SHAKESPEARE.n_bytes,
        },
    }


def tinygpt_form(training: Mapping[str, str], gentler: float) -> dict[str, Any]:
    """What stands where in a .tinygpt file.

    ``training`` maps its settings to ours; ``gentler`` is the share of a preset's rate that a foreign model is trained on with.
    """
    sizes = dict.fromkeys(("n_layer", "n_head", "n_embd", "n_ctx"), 1)
    entries: list[list[Any]] = [
        [tensor.name, tensor.ours, tensor.part, tensor.declared == tensor.shape[::-1]]
        for tensor in tensors(GPTConfig.model_validate({**sizes, "n_embd": 3, "n_ctx": 2}))
    ]
    return {
        "magic": MAGIC.decode(),
        "versions": list(VERSIONS),
        "block": BLOCK,
        "fixed": {f"model.{name}": value for name, value in FIXED.items()},
        "sizes": {theirs: f"model.{ours}" for theirs, ours in SIZES.items()},
        "training": dict(training),
        "gentler": gentler,
        # name, ours, third of our columns or null, whether the manifest declares its shape the other way round
        "tensors": [entry for entry in entries if not entry[0].startswith("blocks.")],
        "block_tensors": [entry for entry in entries if entry[0].startswith("blocks.0.")],
    }


def _tokenizer() -> dict[str, Any]:
    """The two files of the byte tokenizer, as it writes them: one as text, whose keys JavaScript would bring into another order."""
    length: Any = {"setting": "model.n_ctx"}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        ByteTokenizer().save(folder, n_ctx=length)
        return {
            TOKENIZER_FILE: (folder / TOKENIZER_FILE).read_text(encoding="utf-8"),
            TOKENIZER_CONFIG_FILE: json.loads((folder / TOKENIZER_CONFIG_FILE).read_bytes()),
        }
