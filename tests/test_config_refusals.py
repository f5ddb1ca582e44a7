"""What a configuration refuses, and how: one line that names the setting, its range and a next step."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from posttrainllm.config import (
    PRESETS,
    SETTINGS,
    GPTConfig,
    TrainConfig,
    from_toml,
    load_config,
    replace,
)
from posttrainllm.errors import ConfigError
from posttrainllm.wording import in_terminal


def refused(**sources: Any) -> ConfigError:
    """Load a configuration that must be refused; the message is checked to be one short line."""
    with pytest.raises(ConfigError) as caught:
        load_config(**sources)
    assert "\n" not in caught.value.message
    assert len(caught.value.message) < 300
    assert "\n" not in caught.value.hint
    return caught.value


# -- refusals ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("key", "near", "hint"),
    [
        ("optimizer.beta3", "optimizer.beta2", "beta1, beta2, eps"),
        ("optimiser.beta1", "optimizer.beta1", "sections: model, optimizer"),
        ("steps", "training.steps", "sections: "),
        ("training.step", "training.steps", "steps, seed"),
        ("presets", "preset", "sections: "),
        ("qqqq", None, "sections: "),
    ],
)
def test_unknown_setting_is_refused_with_the_nearest_name(
    tmp_path: Path, key: str, near: str | None, hint: str
) -> None:
    file = tmp_path / "run.toml"
    section, _, name = key.rpartition(".")
    file.write_text(f"[{section}]\n{name} = 1\n" if section else f"{name} = 1\n")
    for sources in ({"overrides": [f"{key}=1"]}, {"flags": {key: 1}}, {"file": file}):
        error = refused(**sources)
        assert f"unknown setting '{key}'" in error.message
        assert hint in error.hint
        assert ("did you mean" in error.message) == (near is not None)
        assert near is None or f"did you mean '{near}'?" in error.message
    with pytest.raises(ConfigError, match=r"unknown setting"):
        replace(load_config(), {key: 1})


def test_unknown_preset_is_refused_with_the_list() -> None:
    for sources in (
        {"preset": "smal"},
        {"overrides": ["preset=smal"]},
        {"flags": {"preset": "smal"}},
    ):
        error = refused(**sources)
        assert error.message == "unknown preset 'smal'; did you mean 'small'?"
        assert all(name in error.hint for name in PRESETS)
    assert "unknown preset 7" in refused(flags={"preset": 7}).message


@pytest.mark.parametrize("key", [key for key, one in SETTINGS.items() if one.kind == "integer"])
@pytest.mark.parametrize("value", ["-1", "nan", "inf", "1.5", "1e3", "true", "abc", "9" * 30, ""])
def test_whole_number_is_refused_with_its_range(key: str, value: str) -> None:
    error = refused(overrides=[f"{key}={value}"])
    setting = SETTINGS[key]
    assert error.message.startswith(f"{key} must be a whole number from {setting.low:,} to ")
    assert "(from --set)" in error.message


@pytest.mark.parametrize("key", [key for key, one in SETTINGS.items() if one.kind == "number"])
@pytest.mark.parametrize(
    "value", ["-1e-3", "nan", "-nan", "inf", "-inf", "1e30", "1e999", "true", "abc", "9" * 400]
)
def test_number_is_refused_with_its_range(key: str, value: str) -> None:
    assert refused(overrides=[f"{key}={value}"]).message.startswith(f"{key} must be a number from ")


@pytest.mark.parametrize(
    "key",
    [
        "model.n_layer",
        "model.n_head",
        "model.n_embd",
        "model.n_ctx",
        "model.n_vocab",
        "data.batch_size",
        "data.accumulation",
        "training.steps",
        "training.log_every",
        "training.keep_checkpoints",
        "optimizer.eps",
        "optimizer.clip_norm",
        "schedule.learning_rate",
    ],
)
def test_zero_is_refused_where_it_has_no_meaning(key: str) -> None:
    assert f"{key} must be" in refused(flags={key: 0}).message


@pytest.mark.parametrize(
    ("sources", "message", "hint"),
    [
        ({"overrides": ["data.val_fraction=0.6"]}, "data.val_fraction must be a number from 0 to 0.5, got 0.6", ""),
        ({"overrides": ["model.n_embd=100"]}, "model.n_embd 100 is not divisible by model.n_head 3", "99 and 102"),
        ({"overrides": ["model.n_embd=2"]}, "model.n_embd 2 is not divisible by model.n_head 3", "work: 3"),
        ({"overrides": ["schedule.warmup_steps=1501"]}, "warmup_steps 1501 is longer than the run, training.steps 1500", ""),
        ({"overrides": ["model.dropout=0.1"]}, "engine cpp has no dropout", "--engine torch"),
        ({"overrides": ["optimizer.kind=muon"]}, "engine cpp has no optimizer muon", "optimizer.kind=adamw"),
        ({"overrides": ["engine.precision=bf16"]}, "engine cpp computes in float32, and engine.precision is bf16", "--engine torch"),
        ({"overrides": ["engine.device=cuda"]}, "engine.device is cuda, which engine cpp does not look at", "--engine torch"),
        ({"overrides": ["engine.compile=on"]}, "engine.compile is on, which engine cpp does not look at", "--engine torch"),
        ({"overrides": ["engine.triton=off"]}, "engine.triton is off, which engine cpp does not look at", "--engine torch"),
        ({"overrides": ["data.batch_size=1000000", "model.n_ctx=10000"]}, "10,000,000,000 tokens a micro-batch", "accumulation"),
        ({"overrides": ["model.n_layer=1024", "model.n_embd=60000"]}, "parameters is over the limit", "n_layer"),
        ({"overrides": ["engine.name=cuda"]}, "engine.name must be one of auto, numpy, cpp, wasm, webgpu, torch, got 'cuda'", ""),
        ({"overrides": ["engine.cpp_build=sse"]}, "engine.cpp_build must be one of '', plain, avx2, avx512", ""),
        ({"overrides": ["model.tied=1"]}, "model.tied must be true or false, got 1", ""),
        ({"overrides": ["data.corpus=[1]"]}, "data.corpus must be a list of texts", ""),
        ({"overrides": ["training.steps"]}, "'training.steps' has no value", "section.key=value"),
        ({"overrides": ["=3"]}, "has no value", "section.key=value"),
        ({"flags": {"training.sample_prompt": "\ud800"}}, "training.sample_prompt must be text", ""),
        ({"flags": {"training.sample_prompt": "x" * 70_000}}, "training.sample_prompt: string should have at most 65536", ""),
        ({"file": "/no/such/file.toml"}, "cannot read the configuration /no/such/file.toml: No such file", ""),
        ({"file": "/"}, "cannot read the configuration /", ""),
        ({"file": "a\0b"}, "is not the name of a file", ""),
    ],
)  # fmt: skip
def test_refusal_names_the_setting_and_what_was_given(
    sources: dict[str, Any], message: str, hint: str
) -> None:
    error = refused(**sources)
    assert message in error.message
    assert hint in in_terminal(error.hint)


@pytest.mark.parametrize("engine", ["auto", "numpy", "cpp", "wasm", "webgpu"])
def test_dropout_is_refused_by_every_engine_but_torch(engine: str) -> None:
    flags = {"model.dropout": 0.1, "engine.name": engine}
    assert f"engine {engine} has no dropout" in refused(flags=flags).message
    assert load_config(flags={**flags, "engine.name": "torch"}).model.dropout == 0.1


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"[training]\nsteps = = 3\n", "line 2: Invalid value"),
        (b"a\nb", "line 1: "),
        (b'[training]\n\nsample_prompt = "', "line 3: "),
        (b"[training]\nsteps = 1\nsteps = 2\n", "line 3: "),
        (b"[training]\nsteps = '''\n\n", "line 4: "),
        (b"\xff\xfe", "is not UTF-8 text: byte 0 is 0xff"),
        (b"training = 3", "training must be a table, got 3"),
        (b"format = 2", "has configuration format 2; this version reads up to 1"),
        (b"format = 0", "format must be a whole number"),
        (b"format = true", "format must be a whole number"),
        (b"[training]\nsteps = " + b"9" * 5000, "a number is too long"),
        (b"[training]\nsteps = " + b"[" * 5000, "a list too deep"),
        (b"[training]\nsteps = [1]\n", "training.steps must be a whole number"),
        (b"[training]\nsteps.x = 1\n", "training.steps must be a whole number"),
        (b"[[training]]\nsteps = 1\n", "training must be a table"),
        (b"[training]\nseed = 2020-01-01\n", "training.seed must be a whole number"),
    ],
)
def test_bad_file_is_refused_in_one_line_with_its_name(
    tmp_path: Path, content: bytes, message: str
) -> None:
    file = tmp_path / "run.toml"
    file.write_bytes(content)
    error = refused(file=file)
    assert message in error.message
    assert "run.toml" in error.message


def test_file_with_a_byte_order_mark_and_windows_lines_is_read(tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_bytes(b"\xef\xbb\xbf[training]\r\nsteps = 7\r\n")
    assert load_config(file=file).training.steps == 7


def test_sections_refuse_in_the_same_way_when_built_directly() -> None:
    with pytest.raises(ConfigError, match=r"model.n_layer must be a whole number from 1 to 1,024"):
        GPTConfig(n_layer=0, n_head=1, n_embd=8, n_ctx=8)
    with pytest.raises(ConfigError, match=r"model.n_layers'; did you mean 'model.n_layer'"):
        GPTConfig.model_validate({"n_layers": 1, "n_head": 1, "n_embd": 8, "n_ctx": 8})
    with pytest.raises(ConfigError, match=r"model.n_ctx is missing: a whole number"):
        GPTConfig.model_validate({"n_layer": 1, "n_head": 1, "n_embd": 8})
    with pytest.raises(ConfigError, match=r"got 0 \(and 1 more\)"):
        GPTConfig(n_layer=0, n_head=0, n_embd=8, n_ctx=8)
    with pytest.raises(ConfigError, match=r"configuration: .* got 5"):
        TrainConfig.model_validate(5)
    with pytest.raises(ConfigError, match=r"^model: "):
        TrainConfig.model_validate({**load_config().model_dump(), "model": 5})


# -- whatever comes in, only ConfigError comes out -----------------------------------------------

JUNK = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.sampled_from([10**400, 2**31, 2**53, 2**63, 2**64, math.nan, math.inf, -0.0]),
    st.floats(),
    st.text(),
    st.binary(),
    st.lists(st.one_of(st.integers(), st.text()), max_size=3),
    st.dictionaries(st.text(), st.integers(), max_size=2),
    st.builds(object),
)
BEYOND_PRINTING = st.integers(4301, 5000).map(lambda digits: 10**digits)
KEYS = st.one_of(
    st.sampled_from([*SETTINGS, "preset", "model", "model.", ".steps", "training.steps.x", ""]),
    st.text(max_size=20),
)


def only_config_error(**sources: Any) -> None:
    """Load; a configuration or a one-line ConfigError are the only results."""
    message = "none"
    try:
        load_config(**sources)
    except ConfigError as error:
        message = error.message
    assert message
    assert "\n" not in message
    assert len(message) < 400


@settings(max_examples=500, deadline=None)
@given(st.dictionaries(KEYS, st.one_of(JUNK, BEYOND_PRINTING), max_size=4))
def test_junk_in_flags_never_escapes_as_another_error(flags: dict[str, Any]) -> None:
    only_config_error(flags=flags)


@settings(max_examples=500, deadline=None)
@given(
    st.lists(
        st.one_of(st.text(), st.builds("{}={}".format, KEYS, st.one_of(st.text(), JUNK))),
        max_size=3,
    )
)
def test_junk_in_overrides_never_escapes_as_another_error(overrides: list[str]) -> None:
    only_config_error(overrides=overrides)


@settings(max_examples=300, deadline=None)
@given(st.one_of(st.text(), st.lists(st.sampled_from(
    ["[training]", "steps", "=", "1", '"', "'''", "[", "]", "\n", "{", "}", "format", ".", "1e9", "\0"]
)).map("".join)))  # fmt: skip
def test_junk_in_toml_never_escapes_as_another_error(text: str) -> None:
    message = "none"
    try:
        from_toml(text)
    except ConfigError as error:
        message = error.message
    assert message
    assert "\n" not in message


@settings(max_examples=300, deadline=None)
@given(st.binary())
def test_junk_in_a_file_never_escapes_as_another_error(
    tmp_path_factory: pytest.TempPathFactory, content: bytes
) -> None:
    file = tmp_path_factory.getbasetemp() / "junk.toml"
    file.write_bytes(content)
    only_config_error(file=file)
