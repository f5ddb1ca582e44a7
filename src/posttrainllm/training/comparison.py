"""Does a written model say the same? Its logits and token ids, held against those that were meant.

The logits come from our own engine for the model in memory, and for the files from transformers where it
is installed, a second opinion that shares no line with this package; else from our own reader and
engine, which at least proves that what stands on the disk is what was meant.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from posttrainllm.config import EngineConfig, GPTConfig
from posttrainllm.errors import CheckpointError, EngineError
from posttrainllm.formats.tensor_file import Floats
from posttrainllm.text.tokenizer import Tokenizer
from posttrainllm.training.engine_choice import inference_engine

ROWS, MOST_TOKENS = 2, 128

LIMIT = 1e-4
"""Largest difference of two logits, in units of the largest logit where that is above 1: what float32 costs."""

TEXTS = (
    "ROMEO:\nBut, soft! what light through yonder window breaks?",
    "  two spaces, don't, we'll, 3.14159,\ttabs\r\n\n\nand lines ",
    "caf\u00e9 \u6f22\u5b57 \u0645\u0631\u062d\u0628\u0627 \U0001f600 \U0001f1e9\U0001f1ea",
    "def f(x):\n    return x**2  # <|endoftext|>",
)
"""Texts whose ids are compared."""


@dataclass(frozen=True)
class Comparison:
    """How far apart two models are: the largest difference of a logit, and what read the files."""

    difference: float
    largest: float
    reader: str

    def check(self, path: Path) -> None:
        """Raise CheckpointError unless the difference is what rounding explains."""
        if not self.difference <= LIMIT * max(1.0, self.largest):
            raise CheckpointError(
                f"{path} was written, but {self.reader} reads another model from it: logits differ by "
                f"up to {self.difference:.2e}",
                "nothing was kept; please report this with the model's config.json",
            )


def sample_tokens(config: GPTConfig) -> npt.NDArray[np.int32]:
    """Return ids (ROWS, T) to compare on: drawn evenly from the vocabulary, the same every time."""
    length = min(config.n_ctx, MOST_TOKENS)
    generator = np.random.default_rng(0)
    return generator.integers(0, config.n_vocab, (ROWS, length), dtype=np.int32)


def our_logits(
    config: GPTConfig, params: dict[str, Floats], tokens: npt.NDArray[np.int32]
) -> npt.NDArray[Any]:
    """Return logits (B, T, V) of a model on the fastest engine that is built.

    Raises: EngineError.
    """
    try:
        engine = inference_engine(config, EngineConfig(name="cpp"), batch=len(tokens), logits=True)
    except EngineError:
        engine = inference_engine(
            config, EngineConfig(name="numpy"), batch=len(tokens), logits=True
        )
    try:
        engine.load(params)
        return engine.logits(tokens)
    finally:
        engine.close()


def compare(got: npt.NDArray[Any], wanted: npt.NDArray[Any], reader: str) -> Comparison:
    """Compare logits of one shape."""
    difference = float(np.abs(np.asarray(got, np.float64) - wanted).max())
    return Comparison(difference, float(np.abs(wanted).max()), reader)


def has_transformers() -> bool:
    """Whether transformers can read a model here."""
    return all(find_spec(name) is not None for name in ("transformers", "torch"))


@contextmanager
def _libraries(folder: Path) -> Iterator[tuple[Any, Any, str]]:
    """torch and transformers, imported when they are needed (that takes seconds) and silent, and the latter's name and version.

    Raises: CheckpointError for whatever they raise on a folder, or on being imported.
    """
    reader = "transformers"
    try:
        torch, transformers = import_module("torch"), import_module("transformers")
        reader = f"transformers {transformers.__version__}"
        logging = transformers.utils.logging
        before = logging.get_verbosity()
        logging.disable_progress_bar()
        logging.set_verbosity_error()
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                yield torch, transformers, reader
        finally:
            logging.set_verbosity(before)
    except Exception as error:
        line = " ".join(str(error).split())
        raise CheckpointError(
            f"{folder}: {reader} cannot load it: {line[:200]}",
            "nothing was kept; does another version read it? pip install -U transformers",
        ) from None


def transformers_logits(
    folder: Path, tokens: npt.NDArray[np.int32]
) -> tuple[npt.NDArray[Any], str]:
    """Return the logits (B, T, V) that transformers computes for a folder, and its name and version.

    Raises: CheckpointError when it cannot load the folder.
    """
    with _libraries(folder) as (torch, transformers, reader):
        model = transformers.AutoModelForCausalLM.from_pretrained(folder, local_files_only=True)
        with torch.no_grad():
            logits = model.float().eval()(torch.from_numpy(tokens.astype(np.int64))).logits
        return np.asarray(logits), reader


def transformers_ids(folder: Path, texts: Sequence[str]) -> list[list[int]]:
    """Return the ids that transformers' tokenizer gives each text.

    Raises: CheckpointError when it cannot load the folder.
    """
    with _libraries(folder) as (_, transformers, _):
        tokenizer = transformers.AutoTokenizer.from_pretrained(folder, local_files_only=True)
        return [list(tokenizer(text)["input_ids"]) for text in texts]


def check_ids(got: Sequence[Sequence[int]], tokenizer: Tokenizer, path: Path, reader: str) -> None:
    """Refuse a tokenizer whose ids are not ours.

    Raises: CheckpointError naming the text.
    """
    for ids, text in zip(got, TEXTS, strict=True):
        wanted = tokenizer.encode(text).tolist()
        if list(ids) != wanted:
            raise CheckpointError(
                f"{path} was written, but {reader} reads {text[:20]!r} as {list(ids)[:8]}, wanted {wanted[:8]}",
                "nothing was kept; please report this with the model's tokenizer.json",
            )
