"""Configuration: the preset table, what wins over what, what is refused and how, TOML and JSON."""

from __future__ import annotations

import json
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from posttrainllm import config
from posttrainllm.config import (
    PRESETS,
    SETTINGS,
    GPTConfig,
    changed_settings,
    from_toml,
    given_settings,
    load_config,
    replace,
    schema_json,
    settings_of,
    to_toml,
)
from posttrainllm.errors import ConfigError

# The table of the design document, written out a second time on purpose.
TABLE = {
    "tiny": (16, 32, 2, 3, 48, 2000, 70_464),
    "small": (16, 64, 3, 3, 96, 1500, 366_432),
    "medium": (16, 96, 4, 4, 128, 1000, 838_400),
    "large": (12, 128, 6, 6, 192, 600, 2_743_296),
    "xl": (8, 128, 8, 8, 256, 400, 6_416_896),
    "huge": (8, 256, 12, 8, 256, 1500, 9_608_704),
    "massive": (4, 256, 14, 12, 384, 1000, 25_039_872),
    "mega": (2, 512, 14, 12, 384, 800, 25_138_176),
    "behemoth": (1, 512, 24, 20, 1280, 50, 473_244_160),
    "gpt2": (8, 1024, 12, 12, 768, None, 124_439_808),
}


# -- presets -------------------------------------------------------------------------------------


def test_presets_are_those_of_the_table() -> None:
    assert list(PRESETS) == list(TABLE)


@pytest.mark.parametrize("name", TABLE)
def test_preset_has_the_shape_and_the_parameters_of_the_table(name: str) -> None:
    got = load_config(name)
    batch, context, layers, heads, width, steps, parameters = TABLE[name]
    model = got.model
    assert (got.data.batch_size, model.n_ctx) == (batch, context)
    assert (model.n_layer, model.n_head, model.n_embd) == (layers, heads, width)
    assert steps is None or got.training.steps == steps
    assert model.parameters() == parameters
    assert model.n_vocab == (50_257 if name == "gpt2" else 256)
    assert got.schedule.warmup_steps <= got.training.steps // 2
    assert got.preset == name
    assert changed_settings(got) == []


def test_the_numbers_that_decide_how_a_run_learns() -> None:
    """Also written twice on purpose: with a wrong one a run trains as well, and learns less."""
    got = load_config("small")
    wanted = ("adamw", 0.95, 0.9, 0.95, 1e-8, 0.1, 1.0)
    assert tuple(got.optimizer.model_dump().values()) == wanted
    schedule = {"kind": "cosine", "final_ratio": 0.1, "decay_fraction": 0.2}
    assert schedule.items() <= got.schedule.model_dump().items()
    assert (got.data.val_fraction, got.model.layer_norm_epsilon) == (0.1, 1e-5)
    rates = [6e-3, 6e-3, 6e-3, 3e-3, 2e-3, 2e-3, 1e-3, 3e-4, 3e-4, 6e-4]
    warmups = [100, 100, 100, 60, 40, 100, 100, 80, 5, 250]
    rows = [(row.learning_rate, row.warmup_steps) for row in PRESETS.values()]
    assert rows == list(zip(rates, warmups, strict=True))


def test_default_preset_is_small() -> None:
    assert load_config() == load_config("small")


def test_parameters_count_a_free_head_and_a_free_mlp_width() -> None:
    tied = GPTConfig(n_layer=2, n_head=2, n_embd=8, n_ctx=4, n_vocab=10)
    free = GPTConfig(n_layer=2, n_head=2, n_embd=8, n_ctx=4, n_vocab=10, tied=False, n_inner=5)
    assert (tied.inner, free.inner, tied.head_size) == (32, 5, 4)
    mlp = 2 * (8 * 5 + 5 + 5 * 8 + 8) - 2 * (8 * 32 + 32 + 32 * 8 + 8)
    assert free.parameters() - tied.parameters() == 10 * 8 + mlp


# -- settings as data ----------------------------------------------------------------------------


def test_every_setting_has_help_and_a_default_inside_its_range() -> None:
    for key, setting in SETTINGS.items():
        assert setting.key == key
        assert setting.help
        assert setting.wanted
        if setting.kind in ("integer", "number"):
            assert setting.low is not None
            assert setting.high is not None
            assert float(f"{setting.low:g}") == setting.low or setting.kind == "integer"
            assert float(f"{setting.high:g}") == setting.high or setting.kind == "integer"
            if setting.default is not None:
                assert setting.low <= setting.default <= setting.high


def test_settings_without_a_default_are_those_that_a_preset_gives() -> None:
    needed = {key for key, setting in SETTINGS.items() if setting.from_preset}
    for row in PRESETS.values():
        assert needed <= set(row.settings()) <= set(SETTINGS)


def test_schema_is_plain_json_with_presets_defaults_limits_and_help() -> None:
    schema = json.loads(schema_json())
    assert schema["format"] == config.FORMAT
    assert schema["default_preset"] == "small"
    assert list(schema["settings"]) == list(SETTINGS)
    assert schema["settings"]["optimizer.beta2"]["default"] == 0.95
    assert schema["settings"]["engine.name"]["choices"][0] == "auto"
    assert schema["settings"]["training.seed"]["high"] == 2**53 - 1
    assert {name: row["parameters"] for name, row in schema["presets"].items()} == {
        name: row[-1] for name, row in TABLE.items()
    }
    # a reader needs nothing else: defaults and the preset's settings make the configuration
    for name, row in schema["presets"].items():
        values = {key: part["default"] for key, part in schema["settings"].items()}
        values |= row["settings"]
        expected = json.loads(json.dumps(settings_of(load_config(name))))
        assert values == expected


def test_import_needs_no_numpy() -> None:
    code = "import sys, posttrainllm.config; sys.exit('numpy' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


# -- precedence ----------------------------------------------------------------------------------


def test_later_sources_win(tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text(
        'preset = "tiny"\n[training]\nsteps = 10\nseed = 20\nlog_every = 30\neval_every = 40\n'
    )
    got = load_config(
        file=file,
        overrides=["training.seed=21", "training.log_every=31", "training.log_every=32"],
        flags={"training.log_every": 33, "training.eval_windows": None},
    )
    assert got.preset == "tiny"
    assert got.model.n_embd == 48  # preset over nothing
    assert got.optimizer.beta2 == 0.95  # default
    assert got.training.eval_windows == 256  # a flag that was not given
    assert got.training.steps == 10  # file over preset
    assert got.training.eval_every == 40  # file over default
    assert got.training.seed == 21  # --set over file
    assert got.training.log_every == 33  # flag over --set


@pytest.mark.parametrize(
    ("argument", "override", "flag", "expected"),
    [
        (None, None, None, "tiny"),
        ("medium", None, None, "medium"),
        ("medium", "large", None, "large"),
        ("medium", "large", "xl", "xl"),
    ],
)
def test_preset_comes_from_the_most_explicit_source(
    tmp_path: Path, argument: str | None, override: str | None, flag: str | None, expected: str
) -> None:
    file = tmp_path / "run.toml"
    file.write_text('preset = "tiny"\n')
    overrides = [f"preset={override}"] if override else []
    got = load_config(argument, file, overrides, {"preset": flag})
    assert got.preset == expected
    assert got.model.n_embd == PRESETS[expected].n_embd


def test_warmup_of_a_short_run_is_half_of_it_unless_asked_for() -> None:
    assert load_config(flags={"training.steps": 20}).schedule.warmup_steps == 10
    assert load_config(flags={"training.steps": 5}).schedule.warmup_steps == 2
    assert load_config(flags={"training.steps": 100_000}).schedule.warmup_steps == 100
    asked = {"training.steps": 20, "schedule.warmup_steps": 15}
    assert load_config(flags=asked).schedule.warmup_steps == 15


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("training.sample_prompt=ROMEO:", "ROMEO:"),
        ('training.sample_prompt="two\\nlines"', "two\nlines"),
        ("training.sample_prompt=123", "123"),
        ("training.sample_prompt=1979-05-27", "1979-05-27"),
        ("training.sample_prompt=a=b", "a=b"),
        ("training.sample_prompt=", ""),
        ("training.sample_prompt=x\ny = 2", "x\ny = 2"),
        ("data.corpus=a.txt", ("a.txt",)),
        ('data.corpus=["a.txt", "-"]', ("a.txt", "-")),
        ("data.corpus=[]", ()),
        ("engine.name=torch", "torch"),
        ('engine.name="torch"', "torch"),
        ("engine.cpp_build=", ""),
        ("model.tied=false", False),
        (" optimizer.eps = 1 ", 1.0),
        ("optimizer.eps=1e-6", 1e-6),
        ("training.seed=0x10", 16),
        ("training.steps=1_000", 1000),
        ("model.n_inner=77", 77),
    ],
)
def test_override_is_read_as_its_setting_wants_it(text: str, expected: object) -> None:
    got = settings_of(load_config(overrides=[text]))[text.partition("=")[0].strip()]
    assert got == expected
    assert type(got) is type(expected)


def test_given_settings_are_only_what_the_sources_say(tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text('preset = "tiny"\n[training]\nsteps = 10\nseed = 20\n')
    got = given_settings(file, ["training.seed=21"], {"data.batch_size": 3, "model.n_ctx": None})
    assert got == {
        "preset": "tiny",
        "training.steps": 10,
        "training.seed": 21,
        "data.batch_size": 3,
    }
    assert given_settings() == {}
    with pytest.raises(ConfigError, match="unknown setting 'training.sed'; did"):
        given_settings(flags={"training.sed": 1})


# -- changing ----------------------------------------------------------------------------------


def test_configuration_is_frozen_and_hashable() -> None:
    got = load_config()
    with pytest.raises(Exception, match=r"frozen"):
        got.training.steps = 3
    assert hash(got) == hash(load_config())


def test_replace_checks_the_result() -> None:
    small = load_config()
    longer = replace(small, {"training.steps": 5000, "data.corpus": ["a"]})
    assert longer.training.steps == 5000
    assert small.training.steps == 1500
    assert [key for key, _, _ in changed_settings(longer)] == ["data.corpus", "training.steps"]
    with pytest.raises(ConfigError, match=r"longer than the run"):
        replace(small, {"training.steps": 5})


# -- TOML ----------------------------------------------------------------------------------------

TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=30)


def values_of(key: str) -> st.SearchStrategy[Any]:
    """Draw a value that the setting accepts."""
    one = SETTINGS[key]
    if one.kind == "choice":  # float16 is webgpu's, and drawn by hand
        return st.sampled_from([choice for choice in one.choices if choice != "float16"])
    if one.kind == "integer":
        assert one.low is not None
        assert one.high is not None
        return st.integers(int(one.low), int(one.high))
    if one.kind == "number":
        return st.floats(one.low, one.high)
    return {"boolean": st.booleans(), "text": TEXTS, "texts": st.lists(TEXTS, max_size=3)}[one.kind]


# Settings with conditions across sections are drawn by hand.
FREE = [key for key in SETTINGS if key not in {
    "model.n_layer", "model.n_head", "model.n_embd", "model.n_ctx", "model.n_vocab",
    "model.dropout", "schedule.warmup_steps", "data.batch_size", "training.steps",
    "optimizer.kind", "engine.device", "engine.precision", "engine.compile", "engine.triton",
    "engine.parallel",
}]  # fmt: skip
TORCH_ALONE = [
    "optimizer.kind", "engine.device", "engine.precision", "engine.compile", "engine.triton",
    "engine.parallel",
]  # fmt: skip


@settings(max_examples=300, deadline=None)
@given(st.data(), st.sampled_from(list(PRESETS)))
def test_toml_round_trip_is_exact(data: st.DataObject, preset: str) -> None:
    chosen = data.draw(st.lists(st.sampled_from(FREE), unique=True))
    flags = {key: data.draw(values_of(key), label=key) for key in chosen}
    flags |= data.draw(st.sampled_from([{}, {"training.steps": 7}, {"model.n_ctx": 77}]))
    if flags.get("engine.name") == "torch":
        flags["model.dropout"] = data.draw(st.floats(0, 0.9))
        flags |= {key: data.draw(values_of(key), label=key) for key in TORCH_ALONE}
    before = load_config(preset, flags=flags)
    text = to_toml(before)
    after = from_toml(text)
    assert after == before
    assert to_toml(after) == text
    assert repr(after) == repr(before)  # also the sign of zero and the types
    flat = {f"{a}.{b}": v for a, t in tomllib.loads(text).items() if isinstance(t, dict) for b, v in t.items()}  # fmt: skip
    assert set(SETTINGS) - set(flat) <= {"model.n_inner"}


def test_toml_marks_what_differs_from_the_preset() -> None:
    text = to_toml(load_config(flags={"training.steps": 20, "model.n_inner": 7}))
    assert text.startswith('format = 1\npreset = "small"\n')
    assert "steps = 20  # preset: 1500\n" in text
    assert "warmup_steps = 10  # preset: 100\n" in text
    assert "n_inner = 7  # preset: unset\n" in text
    assert text.count("#") == 3


def test_toml_with_a_newer_format_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match=r"old.toml has configuration format 99") as caught:
        from_toml("format = 99\n[future]\nx = 1\n", "old.toml")
    assert caught.value.hint == "update posttrainllm"
