"""Training that starts from a model: its shape, its weights, and gentler settings than from nothing.

What this is: what ``training.start_from`` (``posttrainllm train --from NAME``) does to a configuration, and the weights it names.
What this is not: going on with a run; that is ``--resume``, with the optimizer's state and the same text.
"""

from __future__ import annotations

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
from posttrainllm.engines.base import F32
from posttrainllm.errors import ConfigError
from posttrainllm.training.models import find_model

GENTLER = 0.1
"""Share of the preset's learning rate: enough to learn a new text, too little to forget at once what is there."""


def load_settings(
    preset: str | None = None,
    file: str | os.PathLike[str] | None = None,
    overrides: Iterable[str] = (),
    flags: Mapping[str, object] | None = None,
    *,
    runs_dir: Path,
) -> TrainConfig:
    """``config.load_config``, and what follows from the model that training starts from, if one is named.

    The model's shape is that model's, whatever the preset; the preset is the one of its shape, and the learning rate a tenth of the
    preset's, where these are not given.

    Raises: ConfigError, also for a size that was given and is not the model's; CheckpointError when there is no such model.
    """
    overrides = list(overrides)
    config = load_config(preset, file, overrides, flags)
    if not config.training.start_from:
        return config
    found = find_model(config.training.start_from, runs_dir)
    model = found.checkpoint.config
    given = given_settings(file, overrides, flags)
    if preset is None and "preset" not in given and (same := _preset_of(model)):
        config = load_config(same, file, overrides, flags)
    sizes = {f"model.{key}": value for key, value in model.model_dump().items() if key != "dropout"}
    for key, value in sizes.items():
        if key in given and given[key] != value:
            raise ConfigError(
                f"{key} is {value} in {config.training.start_from} and cannot become {given[key]}",
                "leave it out, or train from nothing: without --from",
            )
    changes: dict[str, object] = {**sizes, "training.start_from": found.name}
    if "schedule.learning_rate" not in given:
        changes["schedule.learning_rate"] = GENTLER * config.schedule.learning_rate
    return replace(config, changes)


def starting_weights(config: TrainConfig, runs_dir: Path) -> Mapping[str, F32] | None:
    """The weights that a configuration starts from; None when they are drawn.

    Raises: CheckpointError; ConfigError when that model has another shape.
    """
    name = config.training.start_from
    if not name:
        return None
    checkpoint = find_model(name, runs_dir).checkpoint
    there, wanted = checkpoint.config.model_dump(), config.model.model_dump()
    for key in wanted:
        if key != "dropout" and there[key] != wanted[key]:
            raise ConfigError(
                f"model.{key} is {wanted[key]}, and {name}, which training starts from, has {there[key]}",
                "leave the sizes of the model out",
            )
    return checkpoint.params


def _preset_of(model: GPTConfig) -> str | None:
    """The preset with a model's layers, heads and width, the one with its context first."""
    names = [
        name
        for name, row in PRESETS.items()
        if (row.n_layer, row.n_head, row.n_embd) == (model.n_layer, model.n_head, model.n_embd)
    ]
    return min(names, key=lambda name: abs(PRESETS[name].n_ctx - model.n_ctx), default=None)
