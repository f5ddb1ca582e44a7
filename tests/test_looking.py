"""Looking inside from Python: the numbers are those of the model, held to its engines and to transformers as an independent witness."""

from __future__ import annotations

from dataclasses import replace as replace_fields
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import load_file, save_file

import cli_cases
import posttrainllm
from import_cases import model_folder
from needs import require
from posttrainllm.config import EngineConfig
from posttrainllm.engines.base import Batch
from posttrainllm.errors import CheckpointError, ConfigError, EngineError
from posttrainllm.text.tokenizer import ByteTokenizer
from posttrainllm.training import engine_choice
from posttrainllm.training.engine_choice import inference_engine
from posttrainllm.training.looking import Inspection, look
from posttrainllm.training.models import Model, open_model

TEXT = "the sea, 世界 and\nits 🙂 sights"
MODELS = {
    "bytes": {},
    "BPE": {"n_vocab": 300},
    "untied, erf": {"tied": False, "activation": "gelu", "n_layer": 3},
    "narrow heads": {"n_embd": 36, "n_head": 12, "n_ctx": 29},
}


@pytest.fixture(scope="module", params=MODELS)
def folder(request, tmp_path_factory) -> Path:
    """A model folder with random weights, as transformers leaves it."""
    if request.param == "BPE":
        require("tokenizers")
    sizes = {"n_ctx": 64, "n_embd": 32, "n_head": 4, **MODELS[request.param]}
    made = model_folder(tmp_path_factory.mktemp("looking"), **sizes)
    weights = load_file(made / "model.safetensors")
    for name in weights:  # so that attention is neither flat nor one-hot
        weights[name] *= np.float32(2.5 if "c_attn.weight" in name else 1)
    save_file(weights, made / "model.safetensors", {"format": "pt"})
    return made


def opened(folder: Path | str, engine: str = "numpy") -> Model:
    return open_model(str(folder), runs_dir=Path("runs"), engine=EngineConfig(name=engine))


# ---- the numbers ----------------------------------------------------------------------------------


@pytest.mark.parametrize("engine", ["numpy", "cpp"])
def test_probabilities_and_attention_are_those_that_transformers_computes(folder, engine):
    torch, transformers = require("torch"), require("transformers")
    inspection = opened(folder, engine).inspect(TEXT)
    witness = transformers.GPT2LMHeadModel.from_pretrained(
        folder, attn_implementation="eager", dtype=torch.float64
    ).eval()
    with torch.no_grad():
        out = witness(torch.tensor(inspection.tokens[None].astype(int)), output_attentions=True)
    probabilities = torch.softmax(out.logits[0], dim=-1).numpy()
    assert np.abs(inspection.probabilities - probabilities).max() <= 1e-6
    chosen = probabilities[np.arange(len(inspection.tokens) - 1), inspection.tokens[1:]]
    assert np.abs(inspection.surprise + np.log(chosen)).max() <= 1e-5
    assert len(out.attentions) == inspection.n_layer
    for layer, wanted in enumerate(out.attentions):
        assert 0.1 < wanted[0].amax(-1)[:, 8:].median() < 0.99
        assert np.abs(inspection.attention(layer) - wanted[0].numpy()).max() <= 1e-6


@pytest.mark.parametrize("engine", ["numpy", "cpp"])
def test_attention_sums_to_one_and_sees_nothing_ahead(folder, engine):
    inspection = opened(folder, engine).inspect(TEXT)
    time = len(inspection.tokens)
    for layer in range(inspection.n_layer):
        weights = inspection.attention(layer)
        assert weights.shape == (inspection.n_head, time, time)
        assert np.abs(weights.sum(axis=2) - 1).max() <= 1e-6
        assert not weights[:, ~np.tri(time, dtype=bool)].any()


@pytest.mark.parametrize("engine", ["numpy", "cpp", "torch"])
def test_probabilities_and_loss_are_those_of_the_models_engine(folder, engine):
    if engine == "torch":
        require("torch")
    model = opened(folder, engine)
    inspection = model.inspect(TEXT)
    time, n_ctx = len(inspection.tokens), model.config.n_ctx
    own = inference_engine(model.config, EngineConfig(name=engine), logits=True)
    own.load(model.checkpoint.params)
    logits = own.logits(inspection.tokens[None])[0].astype(float)
    wanted = np.exp(logits - logits.max(axis=1, keepdims=True))
    wanted /= wanted.sum(axis=1, keepdims=True)
    assert np.abs(inspection.probabilities - wanted).max() <= 1e-6
    tokens, targets = np.zeros((1, n_ctx), np.int32), np.full((1, n_ctx), -1, np.int32)
    tokens[0, :time], targets[0, : time - 1] = inspection.tokens, inspection.tokens[1:]
    assert abs(inspection.loss / own.loss(Batch(tokens, targets)) - 1) <= 1e-6
    own.close()


def test_numpy_and_cpp_see_the_same_in_a_model_of_the_gallery():
    numpy, cpp = (
        opened("shakespeare-small", name).inspect("JULIET:\nO ") for name in ("numpy", "cpp")
    )
    assert np.abs(numpy.probabilities - cpp.probabilities).max() <= 1e-5
    assert np.abs(numpy.surprise - cpp.surprise).max() <= 1e-5
    for layer in range(numpy.n_layer):
        assert np.abs(numpy.attention(layer) - cpp.attention(layer)).max() <= 1e-5
    assert cpp.loss < 3  # it knows Shakespeare


def test_a_model_is_looked_at_without_built_kernels(monkeypatch):
    wanted = opened("shakespeare-small", "cpp").inspect("ROMEO")
    monkeypatch.setattr("posttrainllm.engines.cpp_engine.available_builds", list)
    engine = engine_choice.looking_engine({"engine": "torch"}, {}, {})
    assert engine.name == "numpy"
    model = opened("shakespeare-small", "numpy")
    assert np.abs(model.inspect("ROMEO").surprise - wanted.surprise).max() <= 1e-5
    with pytest.raises(EngineError, match="not built"):
        engine_choice.looking_engine({"engine": "cpp"}, {}, {})


# ---- what is in it --------------------------------------------------------------------------------


def test_a_run_is_looked_at_as_its_model_is(tmp_path):
    cli_cases.train_one(tmp_path, cli_cases.write_text(tmp_path))
    run = posttrainllm.open_run("one", runs_dir=tmp_path)
    mine, model = run.inspect("ROMEO:"), posttrainllm.load("one", runs_dir=tmp_path)
    assert isinstance(mine, Inspection)
    assert np.array_equal(mine.probabilities, model.inspect("ROMEO:").probabilities)
    assert repr(mine).startswith("Inspection(6 tokens, ")
    assert "\n" not in repr(mine)


def test_candidates_are_the_likeliest_and_positions_count_from_either_end():
    inspection = opened("shakespeare-small").inspect("ROME")
    assert inspection.candidates()[0][0] == "O"
    shares = [share for _, share in inspection.candidates(count=300)]
    assert len(shares) == 256
    assert shares == sorted(shares, reverse=True)
    assert sum(shares) == pytest.approx(1, abs=1e-5)
    assert inspection.candidates(3, 2) == inspection.candidates(-1, 2)
    assert inspection.candidates(0) != inspection.candidates(1)
    for position in (4, -5):
        with pytest.raises(ConfigError, match=r"0 \.\. 3"):
            inspection.candidates(position)
    with pytest.raises(ConfigError, match="count is 0"):
        inspection.candidates(count=0)


def test_of_a_long_text_the_end_is_taken_and_what_was_left_out_is_counted(folder):
    model = opened(folder)
    n_ctx = model.config.n_ctx
    ids = model.tokenizer.encode(TEXT * 9)
    inspection = model.inspect(TEXT * 9)
    assert inspection.cut == len(ids) - n_ctx > 0
    assert np.array_equal(inspection.tokens, ids[-n_ctx:])
    assert f"and {inspection.cut} left out" in repr(inspection)
    assert inspection.attention(0).shape[1] == n_ctx


def test_one_token_has_candidates_and_no_surprise():
    inspection = opened("shakespeare-small").inspect("R")
    assert inspection.probabilities.shape == (1, 256)
    assert (len(inspection.surprise), inspection.loss) == (0, None)
    assert inspection.attention(0).ravel().tolist() == [1.0] * 6
    assert repr(inspection).startswith("Inspection(1 token, next ")


@pytest.mark.parametrize("text", ["", None, 5, b"bytes"])
def test_what_is_no_text_is_refused(text):
    with pytest.raises(ConfigError, match="takes a text") as caught:
        opened("shakespeare-small").inspect(text)
    assert caught.value.hint


@pytest.mark.parametrize("layer", [-1, 6, 99])
def test_a_layer_that_is_not_there_is_refused_with_the_range(layer):
    with pytest.raises(ConfigError, match=rf"layer {layer}\n.*0 \.\. 5"):
        opened("shakespeare-small").inspect("ROMEO").attention(layer)


def test_weights_that_are_no_numbers_are_refused():
    model = opened("shakespeare-small")
    params = {name: values.copy() for name, values in model.checkpoint.params.items()}
    params["ln_f.weight"][0] = np.nan
    model.checkpoint = replace_fields(model.checkpoint, params=params)
    with pytest.raises(CheckpointError, match="not finite"):
        model.inspect("ROMEO")


def test_memory_that_is_not_there_is_refused_before_it_is_taken(monkeypatch):
    model = opened("shakespeare-small", "cpp")
    inspection = model.inspect("ROMEO" * 12)
    for memory in (
        1000,
        15_000_000,
    ):  # for nothing at all; for the weights here and not for the engine's
        monkeypatch.setattr(
            "posttrainllm.engines.base.available_memory", lambda memory=memory: memory
        )
        with pytest.raises(EngineError, match="may take") as caught:
            model.inspect("ROMEO" * 12)
        assert "shorter text" in caught.value.hint
    monkeypatch.setattr("posttrainllm.engines.base.available_memory", lambda: 1000)
    with pytest.raises(EngineError, match="may take"):
        inspection.attention(0)


# ---- characters -----------------------------------------------------------------------------------


def seen(text: str, model: Model) -> Inspection:
    return look(
        text,
        config=model.config,
        params=model.checkpoint.params,
        tokenizer=model.tokenizer,
        beside={"engine": "numpy"},
    )


def test_a_character_of_several_tokens_is_one_part_with_their_surprise_together():
    inspection = opened("shakespeare-small").inspect("a世b")
    assert inspection.pieces == ["a", "\\xe4", "\\xb8", "\\x96", "b"]
    spans = inspection.spans()
    assert [(span.text, span.first, span.last) for span in spans] == [
        ("a", 0, 1),
        ("世", 1, 4),
        ("b", 4, 5),
    ]
    assert spans[0].surprise is None
    assert spans[1].surprise == pytest.approx(inspection.surprise[:3].sum())
    assert spans[2].surprise == pytest.approx(inspection.surprise[3])


def test_half_a_character_at_either_end_and_bytes_that_are_none_are_shown_as_bytes():
    model = opened("shakespeare-small")
    text = b"\x96 ok \xff \xe4\xb8A \xf0\x9f\x99".decode("utf-8", "surrogateescape")
    shown = [span.text for span in model.inspect(text).spans()]
    assert "".join(shown) == "\\x96 ok \\xff \\xe4\\xb8A \\xf0\\x9f\\x99"


@pytest.fixture(scope="module")
def tiny(tmp_path_factory) -> dict[str, Model]:
    require("tokenizers")
    base = tmp_path_factory.mktemp("tiny")
    for name in ("bytes", "bpe"):
        (base / name).mkdir()
    return {
        "bytes": opened(model_folder(base / "bytes", n_ctx=48)),
        "bpe": opened(model_folder(base / "bpe", n_vocab=300, n_ctx=48)),
    }


@pytest.mark.parametrize("kind", ["bytes", "bpe"])
@given(
    content=st.binary(min_size=1, max_size=40)
    | st.text(min_size=1, max_size=12).map(lambda t: t.encode("utf-8", "replace"))
)
def test_any_text_is_read_whole_and_every_number_is_finite(tiny, kind, content):
    model = tiny[kind]
    text = content.decode("utf-8", "surrogateescape")
    inspection = seen(text, model)
    spans = inspection.spans()
    assert [span.first for span in spans] == [0, *(span.last for span in spans)][:-1]
    assert spans[-1].last == len(inspection.tokens) == len(inspection.pieces)
    if not inspection.cut and isinstance(model.tokenizer, ByteTokenizer):
        assert "".join(span.text for span in spans) == content.decode("utf-8", "backslashreplace")
    assert np.isfinite(inspection.surprise).all()
    assert (inspection.surprise >= -1e-6).all()
    assert np.abs(inspection.probabilities.sum(axis=1) - 1).max() <= 1e-5
    assert all(span.surprise is not None for span in spans[1:])
    assert "\n" not in repr(inspection)
