"""Random GPT2LMHeadModels of transformers become runs whose logits are the same on every engine, and ours go back."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from import_cases import ENGINES, apart, as_pair, logits_of, tokens_for, write_bpe
from needs import require
from posttrainllm.formats.shards import INDEX_FILE
from posttrainllm.runs.checkpoint import write_checkpoint
from posttrainllm.runs.folder import create_run
from posttrainllm.text.tokenizer import ByteTokenizer
from posttrainllm.training.exporting import export_model
from posttrainllm.training.importing import import_model
from posttrainllm.training.models import find_model
from saved import make_state, make_values, small_config

LIMIT = 1e-4

torch = require("torch")
transformers = require("transformers")
require("tokenizers")

require("wgpu")

from webgpu_cases import device  # noqa: E402

COUNT = 20
FEW = (6, 7, 11)  # of the twenty, in the fast suite: every activation, with and without shards


def random_folder(number: int, folder: Path) -> tuple[Any, dict[str, Any]]:
    """Save random configuration ``number``; return transformers' own reading of it, and what was drawn."""
    draw = random.Random(number)
    heads = draw.randint(1, 4)
    drawn = {
        "n_layer": draw.randint(1, 3),
        "n_head": heads,
        "n_embd": heads * draw.randint(2, 9),
        "n_positions": draw.randint(3, 24),
        "vocab_size": draw.randint(257, 400),
        "n_inner": draw.choice([None, draw.randint(5, 70)]),
        "activation_function": ("gelu_new", "gelu", "gelu_pytorch_tanh")[number % 3],
        "tie_word_embeddings": number % 2 == 0,
        "layer_norm_epsilon": draw.choice([1e-5, 1e-5, 1e-6, 1e-3]),
        "reorder_and_upcast_attn": draw.random() < 0.3,
    }
    config = transformers.GPT2Config(
        **drawn, initializer_range=0.15, bos_token_id=None, eos_token_id=None
    )
    torch.manual_seed(number)
    model = transformers.GPT2LMHeadModel(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if ".ln_" in f".{name}" or name.endswith("bias"):
                parameter.add_(torch.randn_like(parameter) * 0.1)
    dtype = (torch.float32, torch.float16, torch.bfloat16)[draw.randrange(3)]
    model.to(dtype)
    bare = drawn["tie_word_embeddings"] and draw.random() < 0.4
    size = draw.choice(["12KB", "6KB", "5GB"])
    (model.transformer if bare else model).save_pretrained(folder, max_shard_size=size)
    write_bpe(folder, drawn["vocab_size"])
    if draw.random() < 0.5:
        as_pair(folder)
    if draw.random() < 0.5:
        add_masks(folder, drawn)
    # read as a LM head model: the bare one has its head from the embedding
    way = "eager" if drawn["reorder_and_upcast_attn"] else "sdpa"  # only the first looks at it
    theirs = transformers.GPT2LMHeadModel.from_pretrained(
        folder, dtype=torch.float32, attn_implementation=way
    ).eval()
    shards = (folder / INDEX_FILE).exists()
    return theirs, {**drawn, "dtype": str(dtype), "bare": bare, "shards": shards}


def add_masks(folder: Path, drawn: dict[str, Any]) -> None:
    """Store the causal mask as old versions did: buffers that are no parameters."""
    library = pytest.importorskip("safetensors.torch")
    path = folder / "model.safetensors"
    if not path.exists():
        return
    tensors = library.load_file(path)
    prefix = "transformer." if "transformer.wte.weight" in tensors else ""
    size = drawn["n_positions"]
    for i in range(drawn["n_layer"]):
        mask = torch.tril(torch.ones(size, size, dtype=torch.uint8)).view(1, 1, size, size)
        tensors[f"{prefix}h.{i}.attn.bias"] = mask
        tensors[f"{prefix}h.{i}.attn.masked_bias"] = torch.tensor(-1e4)
    library.save_file(tensors, path, metadata={"format": "pt"})


def check(number: int, tmp_path: Path, engines: tuple[str, ...]) -> None:
    theirs, drawn = random_folder(number, tmp_path / "theirs")
    made = import_model(tmp_path / "theirs", runs_dir=tmp_path / "runs")
    found = find_model(str(made.path), tmp_path / "runs")
    config, params = found.checkpoint.config, found.checkpoint.params
    assert config.inner == (drawn["n_inner"] or 4 * drawn["n_embd"])
    assert (config.tied, config.n_vocab) == (drawn["tie_word_embeddings"], drawn["vocab_size"])
    tokens = tokens_for(config)
    with torch.no_grad():
        wanted = theirs(torch.from_numpy(tokens)).logits.numpy()
    assert np.abs(wanted).max() > 0.3, "logits that are all alike prove nothing"
    for name in engines:
        error = apart(logits_of(name, config, params, tokens), wanted)
        assert error <= LIMIT, f"{name}: {error:.2e} for {drawn}"
    text = "the rain in Spain\n  falls on caf\u00e9s <|endoftext|> don't"
    tokenizer = transformers.AutoTokenizer.from_pretrained(made.checkpoint.path)
    assert found.tokenizer.encode(text).tolist() == tokenizer(text)["input_ids"]
    # and back: what we write is for transformers the model that it gave us
    export_model(str(made.path), "hf", tmp_path / "ours", runs_dir=tmp_path / "runs")
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "ours").eval()
    with torch.no_grad():
        back = again(torch.from_numpy(tokens)).logits.numpy()
    assert apart(back, wanted) <= LIMIT


@pytest.mark.parametrize("number", FEW)
def test_a_random_model_of_transformers_has_the_same_logits_on_every_engine(number, tmp_path):
    device()  # fails or is reported where webgpu has no adapter
    check(number, tmp_path, ENGINES)


@pytest.mark.slow
@pytest.mark.parametrize("number", [n for n in range(COUNT) if n not in FEW])
def test_all_random_models_of_transformers_have_the_same_logits(number, tmp_path):
    device()
    check(number, tmp_path, ENGINES)


def test_the_twenty_configurations_differ_where_it_matters(tmp_path):
    drawn = [random_folder(number, tmp_path / str(number))[1] for number in range(COUNT)]
    for key, least in {
        "activation_function": 3,
        "tie_word_embeddings": 2,
        "dtype": 3,
        "bare": 2,
        "shards": 2,
        "reorder_and_upcast_attn": 2,
        "layer_norm_epsilon": 3,
    }.items():
        assert len({each[key] for each in drawn}) == least, key
    assert {each["n_inner"] is None for each in drawn} == {True, False}
    few = [drawn[number] for number in FEW]
    assert len({each["activation_function"] for each in few}) == 3
    assert len({each["dtype"] for each in few}) > 1
    assert len({each["shards"] for each in few}) == 2


OURS = [
    {},
    {"tied": False},
    {"activation": "gelu", "n_inner": 20},
    {"layer_norm_epsilon": 1e-3},
    {"n_layer": 1, "n_head": 1, "n_embd": 3, "n_ctx": 2},
]


@pytest.mark.parametrize("model", OURS, ids=str)
def test_a_model_of_ours_goes_to_transformers_with_the_same_logits(tmp_path, model):
    config = small_config(**model)
    values = make_values(config)
    run = create_run(tmp_path / "runs", config, "ours")
    state = make_state(5, config)
    write_checkpoint(run.checkpoints, state=state, **values, tokenizer=ByteTokenizer(), keep=1)
    made = export_model("ours", "hf", tmp_path / "hf", runs_dir=tmp_path / "runs")
    assert made.comparison.reader == f"transformers {transformers.__version__}"
    assert made.comparison.difference <= LIMIT
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "hf").eval()
    tokens = tokens_for(config.model)
    with torch.no_grad():
        got = theirs(torch.from_numpy(tokens)).logits.numpy()
    assert apart(got, logits_of("numpy", config.model, values["params"], tokens)) <= LIMIT
    stored = json.loads((tmp_path / "hf" / "config.json").read_text())
    assert stored["layer_norm_epsilon"] == config.model.layer_norm_epsilon
