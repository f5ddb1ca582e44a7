"""Training that starts from a model: its shape, its weights, and gentler settings than from nothing.

What this is: what ``training.start_from`` (``posttrainllm train --from NAME``) does to a configuration, and the weights it names.
What this is not: going on with a run; that is ``--resume``, with the optimizer's state and the same text.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Mapping
from pathlib import Path

from posttrainllm.config import (
    PRESETS,
    GPTConfig,
    TrainConfig,
    given_settings,
    load_config,
    replace,
)
from posttrainllm.errors import ConfigError
from posttrainllm.text.tokenizer_files import load as load_tokenizer
from posttrainllm.training.models import Found, find_model
from posttrainllm.wording import worded

GENTLER = 10
"""What divides the preset's learning rate: enough is left to learn a new text, too little to forget at once what is there."""


def load_settings(
    preset: str | None = None,
    file: str | os.PathLike[str] | None = None,
    overrides: Iterable[str] = (),
    flags: Mapping[str, object] | None = None,
    *,
    runs_dir: Path,
) -> TrainConfig:
    """``config.load_config``, and what follows from the model that training starts from, or from a tokenizer, if one is named.

    The model's shape is that model's, whatever the preset; the preset is the nearest in size, and the learning rate a tenth of the
    preset's, where these are not given. The context alone may be shorter: the positions beyond it are then left out.
    With a tokenizer and no model, the vocabulary is the tokenizer's unless it is given.

    Raises: ConfigError, also for a size that was given and is not the model's; CheckpointError when there is no such model.
    """
    overrides = list(overrides)
    config = load_config(preset, file, overrides, flags)
    if not config.training.start_from:
        return _with_vocabulary(config, given_settings(file, overrides, flags))
    if config.data.tokenizer:
        raise ConfigError(
            f"{config.training.start_from} has a tokenizer of its own, and data.tokenizer is "
            f"{config.data.tokenizer}",
            worded("leave out one of {training.start_from} and {data.tokenizer}"),
        )
    found = find_model(config.training.start_from, runs_dir)
    model = found.checkpoint.config
    given = given_settings(file, overrides, flags)
    if preset is None and "preset" not in given:
        config = load_config(nearest_preset(model), file, overrides, flags)
    sizes = {f"model.{key}": value for key, value in model.model_dump().items() if key != "dropout"}
    shorter = given.get("model.n_ctx")
    if isinstance(shorter, int) and 0 < shorter < model.n_ctx:
        sizes["model.n_ctx"] = shorter
    for key, value in sizes.items():
        if key in given and given[key] != value:
            raise ConfigError(
                f"{key} is {value} in {config.training.start_from} and cannot become {given[key]}",
                worded("leave it out, or train from nothing: without {training.start_from}"),
            )
    changes: dict[str, object] = {**sizes, "training.start_from": found.name}
    if "schedule.learning_rate" not in given:
        changes["schedule.learning_rate"] = config.schedule.learning_rate / GENTLER
    return replace(config, changes)


def _with_vocabulary(config: TrainConfig, given: Mapping[str, object]) -> TrainConfig:
    """A new model's configuration with the vocabulary of its tokenizer, whose folder is named from the root on."""
    if not config.data.tokenizer:
        return config
    folder = Path(config.data.tokenizer).resolve()
    changes: dict[str, object] = {"data.tokenizer": str(folder)}
    if "model.n_vocab" not in given:
        changes["model.n_vocab"] = load_tokenizer(folder).n_vocab
    return replace(config, changes)


def starting_model(config: TrainConfig, runs_dir: Path) -> Found | None:
    """The model that a configuration starts from, its context cut to the configuration's; None when weights are drawn.

    Raises: CheckpointError; ConfigError when that model has another shape.
    """
    name = config.training.start_from
    if not name:
        return None
    found = find_model(name, runs_dir)
    params = found.checkpoint.params
    there, wanted = found.checkpoint.config.model_dump(), config.model.model_dump()
    if wanted["n_ctx"] < there["n_ctx"]:
        params["wpe.weight"] = params["wpe.weight"][: wanted["n_ctx"]].copy()
        there["n_ctx"] = wanted["n_ctx"]
    for key in wanted:
        if key != "dropout" and there[key] != wanted[key]:
            raise ConfigError(
                f"model.{key} is {wanted[key]}, and {name}, which training starts from, has {there[key]}",
                "leave the sizes of the model out",
            )
    return found


def nearest_preset(model: GPTConfig) -> str:
    """The preset whose settings suit a model best: that with its layers, heads and width, else the nearest in size."""

    def distance(name: str) -> tuple[bool, float, int]:
        row, of_preset = PRESETS[name], load_config(name).model.parameters()
        other = (row.n_layer, row.n_head, row.n_embd) != (model.n_layer, model.n_head, model.n_embd)
        return other, abs(math.log(of_preset / model.parameters())), abs(row.n_ctx - model.n_ctx)

    return min(PRESETS, key=distance)
