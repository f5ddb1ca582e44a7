"""The PyTorch model: GPT-2's names, shapes and numbers, against the one of transformers."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from needs import require
from posttrainllm.config import PRESETS, TrainConfig, load_config, replace

torch = require("torch")

from posttrainllm.pytorch.gpt import GPT  # noqa: E402
from torch_cases import Tensors, config_of, engine_of, random_batch, scalars_of  # noqa: E402


@pytest.mark.parametrize("preset", PRESETS)
def test_model_has_as_many_parameters_as_the_preset_says(preset: str) -> None:
    config = load_config(preset).model
    with torch.device("meta"):
        assert sum(p.numel() for p in GPT(config).parameters()) == config.parameters()


@pytest.mark.parametrize("tied", [True, False])
def test_model_names_and_shapes_are_those_of_gpt2(tied: bool) -> None:
    config = config_of(model__n_layer=1, model__n_inner=20, model__tied=tied).model
    wanted = {
        "wte.weight": (19, 12),
        "wpe.weight": (8, 12),
        "h.0.ln_1.weight": (12,),
        "h.0.ln_1.bias": (12,),
        "h.0.attn.c_attn.weight": (12, 36),
        "h.0.attn.c_attn.bias": (36,),
        "h.0.attn.c_proj.weight": (12, 12),
        "h.0.attn.c_proj.bias": (12,),
        "h.0.ln_2.weight": (12,),
        "h.0.ln_2.bias": (12,),
        "h.0.mlp.c_fc.weight": (12, 20),
        "h.0.mlp.c_fc.bias": (20,),
        "h.0.mlp.c_proj.weight": (20, 12),
        "h.0.mlp.c_proj.bias": (12,),
        "ln_f.weight": (12,),
        "ln_f.bias": (12,),
    }
    if not tied:
        wanted["lm_head.weight"] = (19, 12)
    assert {name: tuple(p.shape) for name, p in GPT(config).named_parameters()} == wanted


def stock_gpt2(config: TrainConfig, params: Tensors) -> Any:
    """The same model from transformers, with the same parameters."""
    transformers = require("transformers")
    model = config.model
    stock = transformers.GPT2LMHeadModel(
        transformers.GPT2Config(
            vocab_size=model.n_vocab,
            n_positions=model.n_ctx,
            n_embd=model.n_embd,
            n_layer=model.n_layer,
            n_head=model.n_head,
            n_inner=model.n_inner,
            activation_function=model.activation,
            tie_word_embeddings=model.tied,
            embd_pdrop=model.dropout,
            attn_pdrop=model.dropout,
            resid_pdrop=model.dropout,
            bos_token_id=None,
            eos_token_id=None,
            attn_implementation="eager",
        )
    )
    named = {
        name if name == "lm_head.weight" else f"transformer.{name}": torch.tensor(value)
        for name, value in params.items()
    }
    left = stock.load_state_dict(named, strict=False)
    assert not left.unexpected_keys
    assert left.missing_keys == (["lm_head.weight"] if model.tied else [])
    return stock


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("activation", ["gelu_new", "gelu"])
@pytest.mark.parametrize("n_inner", [None, 20])
def test_logits_are_those_of_stock_gpt2(activation: str, tied: bool, n_inner: int | None) -> None:
    config = config_of(model__activation=activation, model__tied=tied, model__n_inner=n_inner)
    tokens = random_batch(config).tokens
    engine = engine_of(config, "float32")
    with torch.no_grad():
        stock = stock_gpt2(config, engine.state().params).eval()
        wanted = stock(torch.from_numpy(tokens).long()).logits.numpy()
    got = engine.logits(tokens)
    assert got.shape == (4, 8, 19)
    assert np.abs(got - wanted).max() <= 1e-5
    assert np.abs(wanted).max() >= 1, "logits this small would hide a difference"


def test_dropout_acts_where_stock_gpt2_has_it() -> None:
    config = config_of(model__dropout=0.2)
    batch = random_batch(config)
    tokens, targets = (torch.from_numpy(ids).long() for ids in (batch.tokens, batch.targets))
    engine = engine_of(config, "float32")
    stock = stock_gpt2(config, engine.state().params).train()
    torch.manual_seed(5)
    wanted = torch.nn.functional.cross_entropy(
        stock(tokens).logits.flatten(0, 1), targets.flatten(), reduction="sum"
    )
    torch.manual_seed(5)
    got = engine.module.train().loss_sum(tokens, targets)
    assert abs(got.item() - wanted.item()) <= 1e-5 * wanted.item()


def test_dropout_masks_depend_on_seed_and_batch_alone() -> None:
    config = config_of(model__dropout=0.2)

    def loss(config: TrainConfig, seed: int) -> float:
        engine = engine_of(config)
        engine.gradients(random_batch(config, seed=seed), inv_count=1.0, first=True)
        engine.update(scalars_of(config, 1, lr=0.0))
        return engine.results()[0].loss

    torch.manual_seed(1)
    state = torch.get_rng_state()
    first = loss(config, seed=0)
    torch.manual_seed(2)
    assert loss(config, seed=0) == first
    assert loss(replace(config, {"training.seed": 2}), seed=0) != first
    assert loss(replace(config, {"model.dropout": 0.0}), seed=0) != first
    torch.set_rng_state(state)
    loss(config, seed=0)
    assert torch.equal(torch.get_rng_state(), state), "the caller's generator has moved"


def test_dropout_is_off_outside_of_training() -> None:
    batch = random_batch(config_of())
    losses = [engine_of(config_of(model__dropout=rate)).loss(batch) for rate in (0.0, 0.5)]
    assert losses[0] == losses[1]
