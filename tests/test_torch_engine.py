"""The PyTorch engine: gradients, stock AdamW, resume, cache, and what it refuses."""

from __future__ import annotations

import importlib
import sys
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import numpy as np
import pytest

from needs import require
from posttrainllm.engines.base import Batch, StepResult
from posttrainllm.errors import EngineError
from posttrainllm.machine import available_threads

torch = require("torch")

from posttrainllm.pytorch.arena import Arenas  # noqa: E402
from posttrainllm.pytorch.engine import TorchEngine, saved_numbers, vector_numbers  # noqa: E402
from posttrainllm.pytorch.optim import Optimizer  # noqa: E402
from torch_cases import (  # noqa: E402
    config_of,
    engine_of,
    largest_difference,
    parts,
    random_batch,
    random_params,
    scalars_of,
    train,
)

# ---- gradients ------------------------------------------------------------------------------


def test_gradients_of_two_micro_batches_add_up_to_those_of_one_batch() -> None:
    config = config_of()
    engine = engine_of(config)
    batch = random_batch(config, rows=6)
    inv_count = 1 / batch.targets.size
    engine.gradients(batch, inv_count=inv_count, first=True)
    wanted = engine.gradient_tensors()
    for rows, first in ((slice(0, 2), True), (slice(2, 6), False)):
        part = Batch(batch.tokens[rows], batch.targets[rows])
        engine.gradients(part, inv_count=inv_count, first=first)
    assert largest_difference(engine.gradient_tensors(), wanted) <= 1e-13
    engine.update(scalars_of(config, 1, lr=0.0))
    loss = engine.loss(batch)
    assert abs(engine.results()[0].loss - loss) <= 1e-14 * loss


def test_gradients_are_those_of_finite_differences() -> None:
    config = config_of(model__tied=False)
    engine = engine_of(config)
    batch = random_batch(config)
    engine.gradients(batch, inv_count=1 / batch.targets.size, first=True)
    grads = engine.gradient_tensors()
    state = engine.state().params
    random = np.random.default_rng(1)
    for name, value in state.items():
        direction = random.normal(size=value.shape)
        ends = []
        for distance in (-1e-5, 1e-5):
            engine.load({**state, name: value + distance * direction})
            ends.append(engine.loss(batch))
        slope = (ends[1] - ends[0]) / 2e-5
        assert abs(slope - (grads[name] * direction).sum()) <= 1e-7, name


def test_ignored_targets_count_for_nothing() -> None:
    config = config_of()
    engine = engine_of(config)
    batch = random_batch(config)
    targets = batch.targets.copy()
    targets[:2] = -1
    engine.gradients(Batch(batch.tokens, targets), inv_count=1 / 16, first=True)
    got = engine.gradient_tensors()
    engine.gradients(Batch(batch.tokens[2:], batch.targets[2:]), inv_count=1 / 16, first=True)
    assert largest_difference(got, engine.gradient_tensors()) <= 1e-13
    loss = engine.loss(Batch(batch.tokens[2:], batch.targets[2:]))
    assert abs(engine.loss(Batch(batch.tokens, targets)) - loss) <= 1e-14 * loss


def test_batch_without_targets_has_loss_and_gradients_of_zero() -> None:
    config = config_of()
    engine = engine_of(config)
    batch = random_batch(config)
    engine.gradients(
        Batch(batch.tokens, np.full_like(batch.targets, -1)), inv_count=1.0, first=True
    )
    assert not any(grad.any() for grad in engine.gradient_tensors().values())
    engine.update(scalars_of(config, 1, lr=1e-3))
    assert engine.results() == [StepResult(0.0, 0.0, finite=True)]


# ---- the optimizer --------------------------------------------------------------------------


@pytest.mark.parametrize("clip_norm", [1e-2, 1e6], ids=["clipped", "unclipped"])
def test_update_is_that_of_stock_clip_and_adamw(clip_norm: float) -> None:
    config = config_of(optimizer__clip_norm=clip_norm, optimizer__weight_decay=0.3)
    engine = engine_of(config)
    params = {name: torch.tensor(value) for name, value in engine.state().params.items()}
    stock = torch.optim.AdamW(
        [
            {"params": [p for p in params.values() if p.ndim >= 2], "weight_decay": 0.3},
            {"params": [p for p in params.values() if p.ndim < 2], "weight_decay": 0.0},
        ],
        betas=(config.optimizer.beta1, config.optimizer.beta2),
        eps=config.optimizer.eps,
    )
    for step, lr in enumerate((1e-3, 3e-2, 1e-2, 0.0, 2e-3), start=1):
        batch = random_batch(config, seed=step)
        engine.gradients(batch, inv_count=1 / batch.targets.size, first=True)
        for name, grad in engine.gradient_tensors().items():
            params[name].grad = torch.from_numpy(grad)
        engine.update(scalars_of(config, step, lr))

        norm = torch.nn.utils.get_total_norm([p.grad for p in params.values()])
        if norm > clip_norm:  # torch's own clip divides by norm + 1e-6
            for p in params.values():
                p.grad *= clip_norm / norm
        for group in stock.param_groups:
            group["lr"] = lr
        stock.step()
        assert abs(engine.results()[0].grad_norm - norm.item()) <= 1e-14 * norm.item()
        wanted = {name: p.numpy() for name, p in params.items()}
        assert largest_difference(engine.state().params, wanted) <= 1e-14
    for got, key in ((engine.state().m, "exp_avg"), (engine.state().v, "exp_avg_sq")):
        wanted = {name: stock.state[p][key].numpy() for name, p in params.items()}
        assert largest_difference(got, wanted) <= 1e-14


def test_update_leaves_the_space_between_tensors_zero() -> None:
    engine = engine_of(config_of())
    used = [sum(t.size for t in part.values()) for part in parts(engine.state())]
    train(engine, 3)
    arenas = engine._arenas
    for arena, part in (
        (arenas.flat_params, engine.state().params),
        (arenas.flat_m, engine.state().m),
        (arenas.flat_v, engine.state().v),
    ):
        inside = sum(np.count_nonzero(tensor) for tensor in part.values())
        assert int(arena.count_nonzero()) == inside
        assert used[0] < arena.numel()


def test_gradient_norm_of_a_large_model_is_accurate_in_float32() -> None:
    config = config_of(model__n_embd=1024, model__n_head=2, model__n_layer=1)
    arenas = Arenas(config.model, device=torch.device("cpu"))
    optimizer = Optimizer(arenas, config.optimizer)
    grad = np.random.default_rng(0).normal(0, 1e-3, arenas.flat_grads.shape).astype(np.float32)
    arenas.flat_grads.copy_(torch.from_numpy(grad))
    optimizer.step(torch.ones(4), torch.zeros(()))
    wanted = torch.from_numpy(grad).double().norm().item()
    assert abs(optimizer.norm.item() - wanted) <= 1e-6 * wanted


def test_non_finite_gradients_stop_all_further_updates_until_load() -> None:
    config = config_of()
    engine = engine_of(config, "float32")
    train(engine, 2)
    before = engine.state()
    batch = random_batch(config)
    engine.gradients(batch, inv_count=np.inf, first=True)
    engine.update(scalars_of(config, 3, lr=1e-2))
    engine.gradients(batch, inv_count=1 / 32, first=True)
    engine.update(scalars_of(config, 4, lr=1e-2))
    bad, good = engine.results()
    assert not bad.finite
    assert not np.isfinite(bad.grad_norm)
    assert not good.finite
    assert np.isfinite(good.grad_norm)
    assert np.isfinite(good.loss)
    for got, wanted in zip(parts(engine.state()), parts(before), strict=True):
        assert largest_difference(got, wanted) == 0
    engine.load(before.params, before.m, before.v)
    assert all(result.finite for result in train(engine, 2))


# ---- runs -----------------------------------------------------------------------------------


def test_same_seed_gives_bit_identical_losses() -> None:
    first, second = (train(engine_of(config_of(), "float32"), 20) for _ in range(2))
    assert first == second
    assert first[-1].loss < first[0].loss


@pytest.mark.parametrize("tied", [True, False])
def test_vectors_are_counted_as_the_model_has_them(tied: bool) -> None:
    config = config_of(model__n_inner=31, model__tied=tied)
    sizes = [np.size(value) for value in random_params(config).values() if np.ndim(value) < 2]
    assert vector_numbers(config.model) == sum(sizes)


def test_engines_in_threads_draw_the_masks_that_they_draw_alone() -> None:
    config = config_of(model__dropout=0.3)
    wanted = train(engine_of(config, "float32"), 30)
    engines = [engine_of(config, "float32") for _ in range(3)]
    with ThreadPoolExecutor(len(engines)) as pool:
        for found in pool.map(partial(train, steps=30), engines):
            assert found == wanted


@pytest.mark.parametrize("dropout", [0.0, 0.2])
def test_resumed_run_is_bit_identical(dropout: float) -> None:
    config = config_of(model__dropout=dropout)
    whole = engine_of(config, "float32")
    wanted = train(whole, 6)
    engine = engine_of(config, "float32")
    train(engine, 3)
    state = engine.state()
    resumed = TorchEngine(config, "cpu")
    resumed.load(state.params, state.m, state.v)
    assert train(resumed, 3, start=3) == wanted[3:]
    for got, end in zip(parts(resumed.state()), parts(whole.state()), strict=True):
        assert largest_difference(got, end) == 0


def test_state_is_a_copy() -> None:
    engine = engine_of(config_of())
    before = engine.state().params["wte.weight"]
    kept = before.copy()
    train(engine, 1)
    assert np.array_equal(before, kept)
    assert not np.array_equal(engine.state().params["wte.weight"], kept)


# ---- inference ------------------------------------------------------------------------------


@pytest.mark.parametrize("prompt", [1, 5, 8])
def test_cached_logits_equal_uncached_ones(prompt: int) -> None:
    config = config_of()
    engine = engine_of(config)
    tokens = random_batch(config, rows=3).tokens
    wanted = engine.logits(tokens)
    got = [engine.prefill(tokens[:, :prompt])]
    got += [engine.decode(tokens[:, position]) for position in range(prompt, 8)]
    assert np.abs(np.stack(got, axis=1) - wanted[:, prompt - 1 :]).max() <= 1e-13


def test_cached_logits_equal_uncached_ones_for_prompts_of_different_lengths() -> None:
    config = config_of()
    engine = engine_of(config)
    tokens = random_batch(config, rows=3).tokens
    lengths = np.array([1, 5, 3], np.int32)
    padded = np.where(np.arange(5) < lengths[:, None], tokens[:, :5], 0).astype(np.int32)
    wanted, rows = engine.logits(tokens), np.arange(3)
    got = engine.prefill(padded, lengths)
    for step in range(3):
        assert np.abs(got - wanted[rows, lengths + step - 1]).max() <= 1e-13
        got = engine.decode(tokens[rows, lengths + step])
    assert np.abs(got - wanted[rows, lengths + 2]).max() <= 1e-13


def test_decode_refuses_a_full_cache_and_prefill_starts_again() -> None:
    config = config_of()
    engine = engine_of(config)
    tokens = random_batch(config).tokens
    first = engine.prefill(tokens)
    with pytest.raises(EngineError, match="room in the cache of 8 tokens"):
        engine.decode(tokens[:, 0])
    assert np.array_equal(engine.prefill(tokens), first)


# ---- memory, threads and wrong use ----------------------------------------------------------


def test_memory_estimate_is_close_to_what_autograd_keeps() -> None:
    config = config_of(model__n_embd=48, model__n_ctx=32, model__n_vocab=64)
    engine = engine_of(config, "float32")
    owned = {p.untyped_storage().data_ptr() for p in engine.module.parameters()}
    kept: dict[int, int] = {}

    def keep(tensor: Any) -> Any:
        storage = tensor.untyped_storage()
        if tensor.is_floating_point() and storage.data_ptr() not in owned:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    batch = random_batch(config)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        hidden = engine.module.hidden(torch.from_numpy(batch.tokens).long())
    kept[hidden.untyped_storage().data_ptr()] = hidden.untyped_storage().nbytes()
    # The gradient of the last layer's output is as large, and no hook sees it.
    estimate = 4 * (saved_numbers(config.model, 4 * 32) - 4 * 32 * 48)
    assert 0.95 * estimate <= sum(kept.values()) <= 1.05 * estimate
    assert engine.nbytes >= 20 * config.model.parameters() + estimate


def test_threads_follow_the_configuration() -> None:
    before = torch.get_num_threads()
    try:
        assert TorchEngine(config_of(engine__threads=1), "cpu").info["threads"] == 1
        engine = TorchEngine(config_of(engine__threads=0), "cpu")
        assert engine.info["threads"] == available_threads() >= 1
    finally:
        torch.set_num_threads(before)


def test_info_says_what_runs() -> None:
    info = TorchEngine(config_of(), "cpu").info
    assert info.pop("device_name")
    assert info == {
        "engine": "torch",
        "torch": torch.__version__,
        "device": "cpu",
        "device_reason": "asked for",
        "threads": 1,
        "dtype": "float32",
        "precision": "float32",
        "precision_reason": "no fast bfloat16 is known on this cpu device",
        "step": "call by call",
        "kernels": "torch",
        "kernels_reason": "Triton is for CUDA, and the device is cpu",
        "triton": "off",
        "compile": "off",
        "compile_reason": "automatic on CUDA where Triton's kernels run",
    }


def test_missing_torch_is_an_engine_error_with_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    monkeypatch.delitem(sys.modules, "posttrainllm.pytorch.engine")
    with pytest.raises(EngineError) as caught:
        importlib.import_module("posttrainllm.pytorch.engine")
    assert caught.value.message == "the torch engine needs PyTorch, which is not installed"
    assert caught.value.hint == "pip install 'posttrainllm[torch]'"


def test_missing_device_is_an_engine_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)
    with pytest.raises(EngineError, match="finds no device cuda") as caught:
        TorchEngine(config_of(), "cuda")
    assert caught.value.hint == "devices here: cpu"
    assert TorchEngine(config_of()).info["device"] == "cpu"


def test_load_refuses_tensors_that_do_not_fit_and_changes_nothing() -> None:
    engine = engine_of(config_of())
    params = engine.state().params
    bias = params["ln_f.bias"]
    for change, message in (
        ({"lm_head.weight": params["wte.weight"]}, "'lm_head.weight' is not part of this model"),
        ({"ln_f.bias": bias[:5]}, r"'ln_f.bias' is \(5,\) but the model has \(12,\)"),
    ):
        with pytest.raises(EngineError, match=message):
            engine.load({name: value + 1 for name, value in params.items()} | change)
    without = {name: value for name, value in params.items() if name != "ln_f.bias"}
    with pytest.raises(EngineError, match=r"'ln_f.bias' is missing"):
        engine.load(params, params, without)
    assert largest_difference(engine.state().params, params) == 0


def test_tokens_outside_of_vocabulary_or_context_are_refused() -> None:
    config = config_of()
    engine = engine_of(config)
    tokens = random_batch(config).tokens
    with pytest.raises(EngineError, match=r"token ids must lie in 0 .. 18, got 0 .. 19"):
        engine.logits(tokens % 3 // 2 * 19)
    with pytest.raises(EngineError, match=r"targets must lie in 0 .. 18, or be -1; got 19"):
        engine.loss(Batch(tokens, np.full_like(tokens, 19)))
    with pytest.raises(EngineError, match=r"9 tokens do not fit .* model.n_ctx is 8"):
        engine.logits(np.zeros((1, 9), np.int32))
