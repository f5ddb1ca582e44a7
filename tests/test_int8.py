"""Decoding from int8 weights: the rewrite, the copies an engine makes, and that it is the model that was rounded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings

from cli_cases import check_error, cli, train_one, write_text
from guarded import ENGINES as OP_ENGINES
from guarded import obtain
from model_cases import model, random_models, train_config
from posttrainllm.config import EngineConfig, GPTConfig, SamplingConfig, load_config
from posttrainllm.engines.base import Engine, ProgramEngine
from posttrainllm.errors import ConfigError
from posttrainllm.formats.quantised import rounded
from posttrainllm.gallery import catalogue
from posttrainllm.int8 import can_round, int8_dims, int8_program
from posttrainllm.model import decode_program, inference_programs
from posttrainllm.plan import make_plan
from posttrainllm.rounding import dequantise, quantise, words
from posttrainllm.training.engine_choice import inference_engine, initial_parameters
from posttrainllm.training.generate import write_tokens
from posttrainllm.training.models import open_model
from tolerances import CACHED_LOGITS

CPP = tuple(name for name in OP_ENGINES if name.startswith("cpp-"))
ENGINES = ("numpy", *CPP, "wasm")
MODEL = train_config("tiny").model
UNTIED = MODEL.model_copy(update={"tied": False, "n_inner": 100})


def opened(name: str, config: GPTConfig = MODEL, batch: int = 1, weights: str = "int8") -> Engine:
    """An engine with weights of a trained model's size."""
    family, _, build = name.partition("-")
    if name != "numpy":
        obtain("wasm32" if name == "wasm" else name, pytest.skip)
    chosen: dict[str, Any] = {"name": family, "cpp_build": build, "threads": 1, "weights": weights}
    engine = inference_engine(config, EngineConfig(**chosen), batch=batch)
    engine.load(params_of(config))
    return engine


def params_of(config: GPTConfig, seed: int = 3) -> dict[str, np.ndarray]:
    drawn = initial_parameters(config, seed=seed)
    return {key: value * 10 if value.ndim > 1 else value for key, value in drawn.items()}


def decoded(engine: Engine, rows: int = 1) -> np.ndarray:
    """Logits of a few tokens after a prompt."""
    tokens = np.random.default_rng(1).integers(0, 256, (6, rows), dtype=np.int32)
    engine.prefill(tokens[:1].T.copy())
    return np.stack([engine.decode(row) for row in tokens[1:]])


# ---- the rewrite --------------------------------------------------------------------------------------------------------------


def test_every_product_by_a_parameter_reads_int8() -> None:
    text = int8_program(decode_program(MODEL)).to_text()
    assert "linear_forward" not in text
    assert (
        "h.{i}.attn.qkv = int8_forward(h.{i}.ln_1.out, int8.h.{i}.attn.c_attn.weight, "
        "int8.h.{i}.attn.c_attn.weight.scale, h.{i}.attn.c_attn.bias) transposed=0"
    ) in text
    assert (
        "next_logits = int8_forward(ln_f.out, int8.wte.weight, int8.wte.weight.scale, -) transposed=1"
        in text
    )
    assert "embedding_forward(tokens, positions, wte.weight, wpe.weight)" in text
    assert "int8.wpe" not in text


def test_a_program_that_is_rewritten_is_left_alone() -> None:
    before = decode_program(MODEL)
    listing = before.to_text()
    int8_program(before)
    assert before.to_text() == listing


@settings(max_examples=40)
@given(config=random_models())
def test_any_model_of_whole_words_holds_together(config: GPTConfig) -> None:
    programs, dims = inference_programs(config)
    if not can_round(dims["decode"]):
        return
    programs["decode"], dims["decode"] = int8_program(programs["decode"]), int8_dims(dims["decode"])
    plan = make_plan(programs, dims)
    assert all(call.op != "linear_forward" for call in plan.bind("decode"))
    for name, region in plan.regions.items():
        if name.startswith("state.int8.") and not name.endswith(".scale"):
            shape = plan.layout[name.removeprefix("state.int8.")][1].shape
            assert region.nbytes - 256 < np.prod(shape) <= region.nbytes


def test_rows_that_are_no_whole_words_stay_as_they_are() -> None:
    config = model(n_embd=10, n_ctx=8)
    engine = inference_engine(config, EngineConfig(name="numpy", weights="int8"))
    assert isinstance(engine, ProgramEngine)
    assert not [name for name in engine.plan.regions if "int8" in name]


def test_words_are_the_bytes_as_they_lie() -> None:
    values = np.array([[1, -1, 127, -127], [0, 2, 3, 4]], np.int8)
    read = [int.from_bytes(row.tobytes(), "little", signed=True) for row in values]
    assert words(values).tolist() == [[word] for word in read]


# ---- engines ------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("config", [MODEL, UNTIED], ids=["tied", "untied"])
@pytest.mark.parametrize("name", ENGINES)
def test_decoding_from_int8_is_decoding_with_rounded_weights(name: str, config: GPTConfig) -> None:
    reference = opened("numpy", config, weights="float32")
    reference.load(rounded(config, params_of(config)))
    engine = opened(name, config)
    wanted = decoded(reference)
    # the prompt was read with the weights as they were given, the reference's with rounded ones
    engine.load(rounded(config, params_of(config)))
    assert np.abs(wanted).max() >= 1
    assert np.abs(decoded(engine) - wanted).max() <= CACHED_LOGITS


@pytest.mark.parametrize("name", ENGINES)
def test_several_rows_are_decoded_as_each_alone(name: str) -> None:
    engine, alone = opened(name, batch=6), opened(name)
    found = decoded(engine, rows=6)
    tokens = np.random.default_rng(1).integers(0, 256, (6, 6), dtype=np.int32)
    for row in range(6):
        alone.prefill(tokens[:1, row].reshape(1, 1).copy())
        one = np.stack([alone.decode(tokens[at, row : row + 1]) for at in range(1, 6)])[:, 0]
        assert np.abs(found[:, row] - one).max() <= CACHED_LOGITS


def test_loading_other_weights_makes_other_copies() -> None:
    engine, fresh = opened("numpy"), opened("numpy")
    fresh.load(params_of(MODEL, seed=9))
    wanted = decoded(fresh)
    assert np.abs(decoded(engine) - wanted).max() > 0.1
    engine.load(params_of(MODEL, seed=9))
    assert decoded(engine).tobytes() == wanted.tobytes()


def test_weights_from_an_int8_file_are_rounded_to_the_same_int8_again() -> None:
    for card in catalogue.cards():
        for name, values in catalogue.load(card).params.items():
            if values.ndim == 2:
                axis = int(name in ("wte.weight", "wpe.weight"))
                again = dequantise(*quantise(values, axis))
                assert np.abs(again - values).max() <= 1e-6 * np.abs(values).max(), name
                q, scale = quantise(values, axis)
                assert np.abs(values / np.where(scale > 0, scale, 1) - q).max() < 1e-3, name


@pytest.mark.parametrize("name", ENGINES)
def test_a_model_of_the_gallery_writes_the_same_from_int8(name: str) -> None:
    small = catalogue.load(catalogue.card("shakespeare-small"))
    texts = []
    for weights in ("int8", "float32"):
        engine = opened(name, small.config, weights=weights)
        engine.load(small.params)
        greedy = SamplingConfig(temperature=0)
        tokens = write_tokens(engine, 128, list(b"ROMEO:"), greedy, seed=1, max_tokens=200)
        texts.append(bytes(written.token for written in tokens))
    assert texts[0] == texts[1]


def test_models_of_the_gallery_are_opened_with_int8_weights_and_runs_are_not(
    tmp_path: Path,
) -> None:
    def has_copies(engine: Engine) -> bool:
        assert isinstance(engine, ProgramEngine)
        return any(name.startswith("state.int8.") for name in engine.plan.regions)

    name = "shakespeare-small"
    assert has_copies(open_model(name, runs_dir=tmp_path).engine)
    assert has_copies(open_model(name, runs_dir=tmp_path, engine=EngineConfig(name="numpy")).engine)
    assert not has_copies(open_model(name, runs_dir=tmp_path, weights="float32").engine)
    assert not has_copies(inference_engine(MODEL, EngineConfig()))


def test_a_run_writes_from_int8_where_that_is_asked_for(tmp_path: Path) -> None:
    runs = train_one(tmp_path / "runs", write_text(tmp_path))  # 8 wide: whole words
    arguments = ["generate", "one", "--runs-dir", runs, "--max-tokens", 20, "--seed", 3]
    plain, int8 = cli(*arguments), cli(*arguments, "--weights", "int8")
    assert (plain.code, int8.code) == (0, 0), int8.err
    check_error(cli(*arguments, "--weights", "int3"), "engine.weights", "got 'int3'")
    refused = cli(*arguments, "--weights", "int8", "--engine", "webgpu")
    check_error(refused, "engine webgpu has no int8 weights")


@pytest.mark.parametrize("name", ["torch", "webgpu"])
def test_an_engine_without_int8_says_so_by_the_setting(name: str) -> None:
    flags = {"engine.name": name, "engine.weights": "int8"}
    with pytest.raises(
        ConfigError, match=f"engine {name} has no int8 weights, and engine.weights asks"
    ):
        load_config(flags=flags)
