"""Timing of writing: tokens one after another, ours with and without the cache beside transformers, in turns, in one process.

What this is: every writer writes the same number of greedy tokens after a prompt of one byte, from the same weights; a round is one text
of each. And, for the shell: how long a command takes to its first words.
What this is not: a test; speeds are compared with speeds of the same run alone.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

import posttrainllm
from posttrainllm.config import EngineConfig, GPTConfig, SamplingConfig, load_config
from posttrainllm.errors import EngineError
from posttrainllm.figures import Progress, untold
from posttrainllm.formats.huggingface import config_document, stored_name
from posttrainllm.gallery import catalogue
from posttrainllm.lab.bench import check_repeats
from posttrainllm.lab.benchmark_record import Record, make_record
from posttrainllm.machine import available_threads
from posttrainllm.training.engine_choice import inference_engine, initial_parameters
from posttrainllm.training.generate import write_tokens

TOKENS = 255  # after a prompt of one: what fits into a context of 256
PROMPT = [10]  # a line feed
GREEDY = SamplingConfig(temperature=0)
TRANSFORMERS = "transformers"
RECOMPUTING = "-recomputing"
"""After an engine's name: writing without the cache."""
INT8 = "-int8"
"""After an engine's name: writing from int8 weights."""

Write = Callable[[], list[int]]


@dataclass(frozen=True)
class Row:
    """One writer at one number of threads; ``same_tokens`` are those it agrees on with the first writer, from the beginning on."""

    preset: str
    writer: str
    threads: int
    tokens: int
    median_ms_per_token: float
    min_ms_per_token: float
    max_ms_per_token: float
    tokens_per_second: float
    same_tokens: int
    repeats: int


@dataclass(frozen=True)
class DecodeBench:
    """All rows of a run, and what they come to."""

    rows: list[Row]
    figures: dict[str, float]
    """``times_transformers``, ``times_recomputing``: that writer's best time over the first writer's. ``times_int8``: the first writer's
    over its own from int8 weights; ``times_transformers_int8``: transformers' over that. ``first_words_s``."""
    record: Record


def decode_bench(
    case: str,
    preset: str,
    writers: Sequence[str],
    threads: Sequence[int],
    *,
    tokens: int = TOKENS,
    repeats: int = 10,
    progress: Progress = untold,
) -> DecodeBench:
    """Time writers (engines, one with ``-int8`` or ``-recomputing`` behind it, ``transformers``) at numbers of threads (0: all).

    The weights are those of the gallery's model of the preset's shape where there is one.

    Raises: ConfigError, EngineError.
    """
    check_repeats(repeats)
    config = load_config(preset)
    weights, params = _weights(config.model)
    tokens = min(tokens, config.model.n_ctx - len(PROMPT))
    info: dict[str, str | int] = {}
    cells: dict[tuple[str, int], Write] = {}
    for count in dict.fromkeys(number or available_threads() for number in threads):
        for writer in writers:
            progress(f"setting up {writer}", len(cells), len(writers) * len(threads))
            cells[writer, count] = _writer(writer, config.model, params, count, tokens, info)
    texts = {cell: write() for cell, write in cells.items()}  # also the warm-up
    times: dict[tuple[str, int], list[float]] = {cell: [] for cell in cells}
    for number in range(repeats):
        progress("writing", number, repeats)
        for cell, write in cells.items():
            began = time.perf_counter()
            write()
            times[cell].append(1e3 * (time.perf_counter() - began) / tokens)
    first = texts[writers[0], next(iter(cells))[1]]
    rows = [
        Row(
            preset=preset,
            writer=writer,
            threads=count,
            tokens=tokens,
            median_ms_per_token=statistics.median(found),
            min_ms_per_token=min(found),
            max_ms_per_token=max(found),
            tokens_per_second=1e3 / statistics.median(found),
            same_tokens=_same(first, texts[writer, count]),
            repeats=repeats,
        )
        for (writer, count), found in times.items()
    ]
    figures = _figures(rows, writers)
    if weights.startswith(catalogue.PREFIX):
        progress("first words of a command", 0, 1)
        figures["first_words_s"] = statistics.median(first_words_s(weights) for _ in range(5))
    record = make_record(
        "decode",
        case,
        engine=writers[0],
        info=info,
        config=config,
        rows=[asdict(row) for row in rows],
        method={
            "warmup": 1,
            "repeats": repeats,
            "interleaved_writers": list(writers),
            "prompt_tokens": len(PROMPT),
            "weights": weights,
            "sampling": "the likeliest token",
        },
        results=figures,
    )
    return DecodeBench(rows, figures, record)


def first_words_s(model: str) -> float:
    """Seconds from starting ``posttrainllm generate`` in a process of its own to the first character that the model wrote."""
    prompt = "ROMEO:"
    command = [sys.executable, "-m", "posttrainllm", "generate", model, "--prompt", prompt]
    source = str(Path(posttrainllm.__file__).parents[1])
    path = os.pathsep.join([source, os.environ.get("PYTHONPATH", "")])
    began = time.perf_counter()
    with subprocess.Popen(
        [*command, "--max-tokens", "20"],
        stdout=subprocess.PIPE,
        env=os.environ | {"PYTHONPATH": path},
    ) as process:
        assert process.stdout is not None
        process.stdout.read(len(prompt) + 1)
        seconds = time.perf_counter() - began
        process.stdout.read()
    if process.returncode:
        raise EngineError(f"{' '.join(command[2:])} ended with {process.returncode}")
    return seconds


def _weights(model: GPTConfig) -> tuple[str, dict[str, Any]]:
    """Where the weights come from, and they."""
    for card in catalogue.cards():
        found = catalogue.load(card)
        if found.config == model:
            return catalogue.PREFIX + card.name, found.params
    return "initial values of seed 1", dict(initial_parameters(model, 1))


def _writer(
    name: str,
    model: GPTConfig,
    params: Mapping[str, Any],
    threads: int,
    tokens: int,
    info: dict[str, str | int],
) -> Write:
    if name == TRANSFORMERS:
        return _transformers(model, params, threads, tokens)
    cached = not name.endswith(RECOMPUTING)
    settings = EngineConfig.model_validate(
        {
            "name": name.removesuffix(RECOMPUTING).removesuffix(INT8),
            "threads": threads,
            "weights": "int8" if name.endswith(INT8) else "float32",
        }
    )
    engine = inference_engine(model, settings, logits=not cached)
    engine.load(params)
    if not info:
        info.update({key: value for key, value in engine.info.items() if key != "threads"})

    def write() -> list[int]:
        found = write_tokens(
            engine, model.n_ctx, PROMPT, GREEDY, seed=1, max_tokens=tokens, cached=cached
        )
        return [written.token for written in found]

    return write


def _transformers(model: GPTConfig, params: Mapping[str, Any], threads: int, tokens: int) -> Write:
    try:
        import torch
        import transformers
    except ModuleNotFoundError as error:
        raise EngineError(
            f"{error.name} is not installed", "pip install 'posttrainllm[dev]'"
        ) from None
    settings: Any = transformers.GPT2Config(**config_document(model))
    other: Any = transformers.GPT2LMHeadModel(settings)
    other.eval()
    stored = {stored_name(name): torch.from_numpy(np.array(v)) for name, v in params.items()}
    other.load_state_dict(stored, strict=False)
    other.tie_weights()
    prompt = torch.tensor([PROMPT])
    options: dict[str, Any] = {"do_sample": False, "use_cache": True, "pad_token_id": 0}

    def write() -> list[int]:
        torch.set_num_threads(threads)
        with torch.inference_mode():
            ids = other.generate(
                prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=tokens, **options
            )
        found: list[int] = ids[0, len(PROMPT) :].tolist()
        return found

    return write


def _same(first: Sequence[int], other: Sequence[int]) -> int:
    """How many tokens two texts share from the beginning on."""
    pairs = zip(first, other, strict=True)
    return next((number for number, (a, b) in enumerate(pairs) if a != b), len(first))


def _figures(rows: Sequence[Row], writers: Sequence[str]) -> dict[str, float]:
    """Each writer at its best number of threads, over the first one at its own."""

    def best(writer: str) -> float:
        return min(row.median_ms_per_token for row in rows if row.writer == writer)

    names = {TRANSFORMERS: "times_transformers", writers[0] + RECOMPUTING: "times_recomputing"}
    found = {
        name: best(writer) / best(writers[0]) for writer, name in names.items() if writer in writers
    }
    int8 = writers[0] + INT8
    if int8 in writers:
        found["times_int8"] = best(writers[0]) / best(int8)
        if TRANSFORMERS in writers:
            found["times_transformers_int8"] = best(TRANSFORMERS) / best(int8)
    return found
