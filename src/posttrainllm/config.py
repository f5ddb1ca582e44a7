"""Configuration: from presets, files and flags to one frozen ``TrainConfig``, and back to TOML.

    defaults  <  preset  <  TOML file  <  --set section.key=value  <  flags

Every default number lives in ``sections.py`` or, where it depends on the size of the model, in
``presets.py``; nothing else in the package or in the web app may repeat one. What is refused is
refused here, before anything runs: a ``ConfigError`` of one line with a hint.
"""

from __future__ import annotations

import json
import os
import re
import tomllib
from collections.abc import Iterable, Mapping
from typing import Any

from posttrainllm.engine_settings import EngineConfig
from posttrainllm.errors import ConfigError
from posttrainllm.presets import DEFAULT_PRESET, PRESETS, Preset
from posttrainllm.sections import (
    SECTIONS,
    SETTINGS,
    DataConfig,
    LoopConfig,
    OptimizerConfig,
    SamplingConfig,
    ScheduleConfig,
    TrainConfig,
    known_preset,
    unknown_setting,
)
from posttrainllm.settings import Setting, show
from posttrainllm.shape import GPTConfig

__all__ = [
    "DEFAULT_PRESET",
    "FORMAT",
    "PRESETS",
    "SETTINGS",
    "DataConfig",
    "EngineConfig",
    "GPTConfig",
    "LoopConfig",
    "OptimizerConfig",
    "Preset",
    "SamplingConfig",
    "ScheduleConfig",
    "Setting",
    "TrainConfig",
    "changed_settings",
    "fitting_warmup",
    "from_toml",
    "given_settings",
    "load_config",
    "replace",
    "schema_json",
    "settings_of",
    "to_toml",
]

FORMAT = 1
"""Version of the TOML and JSON forms. A reader refuses a newer one and keeps reading older ones."""

WARMUP_DIVISOR = 2
"""The part of a short run that is warm-up."""

MAX_TOML = 1 << 20  # characters; /dev/zero and a text given by mistake have more


def load_config(
    preset: str | None = None,
    file: str | os.PathLike[str] | None = None,
    overrides: Iterable[str] = (),
    flags: Mapping[str, object] | None = None,
) -> TrainConfig:
    """Merge all sources into one configuration; a later source in the list above wins.

    ``overrides`` are the texts after ``--set``: "section.key=value", the value written as in TOML,
    where quotes around text may be left out. ``flags`` maps "section.key" to a value that the
    command line has already typed; None means that the flag was not given.
    The preset is the first that is named in: ``flags["preset"]``, ``--set preset=``, ``preset``,
    the file; else ``DEFAULT_PRESET``.

    A run shorter than twice its preset's warm-up warms up over half of its steps, unless a warm-up
    was asked for: ``--steps 20`` alone must work, and at the presets' rates a shorter warm-up costs
    more than it saves (tiny, 200 steps: 2.50 with 100 steps of warm-up, 2.95 with 20).

    Raises: ConfigError, whatever is wrong.
    """
    layers = _layers(file, overrides, flags)
    if preset is not None:
        layers.insert(0 if file is None else 1, ("from --preset", {"preset": preset}))
    return _merge(layers)


def given_settings(
    file: str | os.PathLike[str] | None = None,
    overrides: Iterable[str] = (),
    flags: Mapping[str, object] | None = None,
) -> dict[str, object]:
    """Return only what the sources say, as {"section.key": value}: what a resumed run is asked to change.

    Raises: ConfigError for a name that no setting has.
    """
    given: dict[str, object] = {}
    for origin, layer in _layers(file, overrides, flags):
        for key, value in layer.items():
            if key not in SETTINGS and key != "preset":
                raise unknown_setting(key, f" ({origin})" if origin else "")
            given[key] = value
    return given


def _layers(
    file: str | os.PathLike[str] | None,
    overrides: Iterable[str],
    flags: Mapping[str, object] | None,
) -> list[tuple[str, dict[str, object]]]:
    layers: list[tuple[str, dict[str, object]]] = []
    if file is not None:
        layers.append((f"from {os.fspath(file)}", _flatten(_read(file), os.fspath(file))))
    layers.append(("from --set", dict(_parse_override(text) for text in overrides)))
    given = {key: value for key, value in (flags or {}).items() if value is not None}
    layers.append(("", given))
    return layers


def from_toml(text: str, source: str = "TOML") -> TrainConfig:
    """Read a configuration that ``to_toml`` or a person wrote; its preset gives what it leaves out.

    Raises: ConfigError, naming ``source`` and the line; also for a newer format than ``FORMAT``.
    """
    return _merge([(f"from {source}", _flatten(_parse_toml(text, source), source))])


def replace(config: TrainConfig, changes: Mapping[str, object]) -> TrainConfig:
    """Return a copy with some settings changed, checked like a new one.

    ``changes`` maps "section.key" to values; a value that no longer fits is refused, not adapted.
    """
    for key in changes:
        if key not in SETTINGS and key != "preset":
            raise unknown_setting(key)
    return _build({"preset": config.preset, **settings_of(config), **changes}, {})


def settings_of(config: TrainConfig) -> dict[str, Any]:
    """Return all settings as {"section.key": value}, in the order of the sections."""
    return {
        key: getattr(getattr(config, key.partition(".")[0]), key.partition(".")[2])
        for key in SETTINGS
    }


def changed_settings(config: TrainConfig) -> list[tuple[str, Any, Any]]:
    """List (key, value, preset's value) of every setting that is not what its preset gives."""
    usual = settings_of(_merge([("", {"preset": config.preset})]))
    return [
        (key, value, usual[key])
        for key, value in settings_of(config).items()
        if value != usual[key]
    ]


def to_toml(config: TrainConfig) -> str:
    """Write the whole configuration; ``from_toml`` gives an equal one back.

    What differs from the preset is marked with the preset's value. A setting that is unset
    (``model.n_inner``) has no line, since TOML has no null.
    """
    usual = {key: default for key, _, default in changed_settings(config)}
    lines = [f"format = {FORMAT}", f"preset = {_toml_value(config.preset)}"]
    section = ""
    for key, value in settings_of(config).items():
        if key.partition(".")[0] != section:
            section = key.partition(".")[0]
            lines += ["", f"[{section}]"]
        if value is not None:
            note = f"  # preset: {_toml_value(usual[key])}" if key in usual else ""
            lines.append(f"{key.partition('.')[2]} = {_toml_value(value)}{note}")
    return "\n".join(lines) + "\n"


def schema_json() -> str:
    """Write presets, defaults, limits and help as JSON: all the web app knows about settings."""
    settings = {
        key: {
            "kind": setting.kind,
            "default": setting.default,
            "from_preset": setting.from_preset,
            "low": setting.low,
            "high": setting.high,
            "choices": list(setting.choices),
            "help": setting.help,
        }
        for key, setting in SETTINGS.items()
    }
    presets = {
        name: {
            "summary": row.summary,
            "parameters": load_config(name).model.parameters(),
            "settings": row.settings(),
        }
        for name, row in PRESETS.items()
    }
    document = {
        "format": FORMAT,
        "default_preset": DEFAULT_PRESET,
        "settings": settings,
        "presets": presets,
    }
    return json.dumps(document, indent=1, allow_nan=False) + "\n"


def fitting_warmup(warmup: int, steps: int) -> int:
    """The steps of warm-up in a run of ``steps``, where none were asked for: ``warmup``, but half of the run at the most."""
    return max(0, min(warmup, steps // WARMUP_DIVISOR))


def _merge(layers: list[tuple[str, dict[str, object]]]) -> TrainConfig:
    """Lay the sources over each other, the last on top, and keep where each value came from, if not straight from the user."""
    given: dict[str, object] = {"preset": DEFAULT_PRESET}
    origins: dict[str, str] = {}
    for origin, layer in layers:
        for key, value in layer.items():
            if key not in SETTINGS and key != "preset":
                raise unknown_setting(key, f" ({origin})" if origin else "")
            given[key] = value
            origins[key] = origin
    origins = {key: origin for key, origin in origins.items() if origin}
    name = known_preset(given["preset"])
    values: dict[str, object] = {**PRESETS[name].settings(), **given}
    steps, warmup = values["training.steps"], PRESETS[name].warmup_steps
    if "schedule.warmup_steps" not in given and isinstance(steps, int):
        values["schedule.warmup_steps"] = fitting_warmup(warmup, steps)
    return _build(values, origins)


def _build(values: Mapping[str, object], origins: dict[str, str]) -> TrainConfig:
    nested: dict[str, Any] = {name: {} for name in SECTIONS}
    for key, value in values.items():
        section, _, name = key.partition(".")
        if name:
            nested[section][name] = value
        else:
            nested[key] = value
    return TrainConfig.model_validate(nested, context=origins)


def _read(file: str | os.PathLike[str]) -> dict[str, Any]:
    name = os.fspath(file)
    try:
        with open(file, encoding="utf-8-sig", newline="") as stream:
            text = stream.read(MAX_TOML + 1)
    except OSError as error:
        raise ConfigError(f"cannot read the configuration {name}: {error.strerror}") from None
    except UnicodeDecodeError as error:
        byte = error.object[error.start]
        raise ConfigError(f"{name} is not UTF-8 text: byte {error.start} is {byte:#04x}") from None
    except ValueError:
        raise ConfigError(f"{show(name)} is not the name of a file") from None
    if len(text) > MAX_TOML:
        raise ConfigError(
            f"{name} has more than {MAX_TOML:,} characters, too many for a configuration",
            "a configuration is a small TOML file; the text to train on is given apart from it",
        )
    return _parse_toml(text, name)


def _parse_toml(text: str, source: str) -> dict[str, Any]:
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        # "Invalid value (at line 3, column 9)" or "... (at end of document)"
        message, _, place = str(error).rpartition(" (at ")
        line = re.match(r"line (\d+)", place)
        number = line.group(1) if line else text.count("\n") + 1
        raise ConfigError(
            f"{source}, line {number}: {' '.join(message.split()) or 'not TOML'}",
            "the format is TOML",
        ) from None
    except (ValueError, RecursionError):
        raise ConfigError(f"{source}: a number is too long or a list too deep") from None


def _flatten(document: Mapping[str, Any], source: str) -> dict[str, object]:
    """Turn the tables of a TOML document into {"section.key": value} and check its version."""
    version = document.get("format", FORMAT)
    if not isinstance(version, int) or isinstance(version, bool) or version < 1:
        raise ConfigError(
            f"{source}: format must be a whole number from 1 to {FORMAT}, got {show(version)}"
        )
    if version > FORMAT:
        raise ConfigError(
            f"{source} has configuration format {show(version)}; this version reads up to {FORMAT}",
            "update posttrainllm",
        )
    flat: dict[str, object] = {}
    for key, value in document.items():
        if key == "format":
            continue
        if isinstance(value, dict) and value:
            flat.update({f"{key}.{name}": part for name, part in value.items()})
        elif key in SECTIONS and value != {}:
            got = f"{source}: {key} must be a table, got {show(value)}"
            raise ConfigError(got, f"write it as [{key}]")
        elif key not in SECTIONS:
            flat[key] = value
    return flat


def _parse_override(text: str) -> tuple[str, object]:
    """Split "section.key=value" and read the value as its setting wants it."""
    key, equals, value = text.partition("=")
    key, value = key.strip(), value.strip()
    if not equals or not key:
        raise ConfigError(f"--set {show(text)} has no value", "write it as --set section.key=value")
    if key != "preset" and key not in SETTINGS:
        raise unknown_setting(key, " (from --set)")
    kind = SETTINGS[key].kind if key in SETTINGS else "text"
    try:
        document = tomllib.loads(f"value = {value}")
        parsed = document["value"] if len(document) == 1 else value
    except (ValueError, RecursionError):
        parsed = value
    if kind in ("text", "choice"):
        return key, parsed if isinstance(parsed, str) else value
    if kind == "texts" and not isinstance(parsed, list):
        return key, [parsed if isinstance(parsed, str) else value]
    return key, parsed


def _toml_value(value: object) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int | float):
        return repr(value)
    if isinstance(value, tuple):
        return "[" + ", ".join(_toml_value(part) for part in value) + "]"
    if value is None:  # in notes alone
        return "unset"
    text = str(value).replace("\\", "\\\\").replace('"', '\\"')
    text = re.sub(r"[\x00-\x1f\x7f]", lambda match: f"\\u{ord(match.group()):04x}", text)
    return f'"{text}"'
