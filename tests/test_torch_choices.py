"""The torch engine's optimizers, and what it decides to run with: each choice, its reason, what a resumed run keeps."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from needs import require
from posttrainllm.config import TrainConfig, load_config, replace
from posttrainllm.errors import EngineError
from posttrainllm.training.engine_choice import differences

torch = require("torch")

from posttrainllm.pytorch import calls, check  # noqa: E402
from posttrainllm.pytorch import engine as engine_module  # noqa: E402
from posttrainllm.pytorch.arena import Arenas  # noqa: E402
from posttrainllm.pytorch.choices import as_before, choose, step_seconds  # noqa: E402
from posttrainllm.pytorch.engine import TorchEngine  # noqa: E402
from posttrainllm.pytorch.loss import cross_entropy  # noqa: E402
from posttrainllm.pytorch.optim import Optimizer, finish_step, muon_names, orthogonalized  # noqa: E402
from posttrainllm.pytorch.trunk import AutogradTrunk, FusedTrunk  # noqa: E402
from torch_cases import (  # noqa: E402
    config_of,
    engine_of,
    largest_difference,
    parts,
    random_batch,
    scalars_of,
    train,
)

# ---- Muon -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(5, 5), (4, 9), (9, 4)])
def test_orthogonalized_matrices_have_singular_values_near_one(shape: tuple[int, int]) -> None:
    torch.manual_seed(0)
    found = orthogonalized(torch.randn(3, *shape, dtype=torch.float64))
    values = torch.linalg.svdvals(found)
    assert values.min() >= 0.6
    assert values.max() <= 1.3


def test_muon_updates_the_blocks_matrices_and_adamw_the_rest() -> None:
    config = config_of(
        optimizer__kind="muon", optimizer__weight_decay=0.0, optimizer__clip_norm=1e6
    )
    plain = config_of(optimizer__weight_decay=0.0, optimizer__clip_norm=1e6)
    engines = [engine_of(one) for one in (config, plain)]
    start = engines[0].state().params
    for engine in engines:
        train(engine, 1)
    muon, adamw = (engine.state() for engine in engines)
    names = muon_names(config.model)
    assert len(names) == 4 * config.model.n_layer
    for name, value in muon.params.items():
        if name not in names:
            assert np.array_equal(value, adamw.params[name]), name
            continue
        moved = start[name] - value
        cut = np.split(moved, 3, axis=1) if name.endswith("c_attn.weight") else [moved]
        for part in cut:
            singular = np.linalg.svd(part / (1e-2 * 0.2 * max(part.shape) ** 0.5), compute_uv=False)
            assert singular.max() <= 1.3, name
            assert singular[0] >= 0.6, name
        assert not muon.v[name].any(), "Muon keeps no squares"
        assert muon.m[name].any()


def test_muon_learns_and_resumes_bit_by_bit() -> None:
    config = config_of(optimizer__kind="muon")
    whole = engine_of(config, "float32")
    wanted = train(whole, 6)
    engine = engine_of(config, "float32")
    train(engine, 3)
    state = engine.state()
    again = TorchEngine(config, "cpu")
    again.load(state.params, state.m, state.v)
    assert train(again, 3, start=3) == wanted[3:]


def test_a_bad_gradient_leaves_muons_momentum_alone() -> None:
    config = config_of(optimizer__kind="muon")
    engine = engine_of(config, "float32")
    train(engine, 2)
    before = engine.state()
    engine.gradients(random_batch(config), inv_count=np.inf, first=True)
    engine.update(scalars_of(config, 3, lr=1e-2))
    assert not engine.results()[0].finite
    for got, wanted in zip(parts(engine.state()), parts(before), strict=True):
        assert largest_difference(got, wanted) == 0


def test_the_optimizer_reports_what_it_saw() -> None:
    config = config_of()
    arenas = Arenas(config.model, device=torch.device("cpu"))
    arenas.flat_grads.fill_(0.5)
    optimizer = Optimizer(arenas, config.optimizer)
    optimizer.step(torch.tensor([1.0, 0.1, 0.1, 0.05]), torch.tensor(2.5))
    norm = 0.5 * arenas.flat_grads.numel() ** 0.5
    assert optimizer.ring[0].tolist() == pytest.approx([2.5, norm, 0.0])
    assert optimizer.counter.item() == 1


# ---- choices ----------------------------------------------------------------------------------------


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine that says it has an NVIDIA card; enough to choose, not to compute."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))
    monkeypatch.setattr("importlib.util.find_spec", lambda name: name)


def torch_config(preset: str = "small", **settings: object) -> TrainConfig:
    given = {name.replace("__", "."): value for name, value in settings.items()}
    return replace(load_config(preset), {"engine.name": "torch", **given})


def test_a_short_run_is_not_compiled_and_a_long_one_is(card: None) -> None:
    short = choose(torch_config(model__dropout=0.1, engine__triton="on"), None, training=True)
    assert (short.device, short.precision, short.compiled) == ("cuda", "bf16", False)
    assert "would win back" in short.compile_reason
    long = choose(torch_config(model__dropout=0.1, training__steps=1_000_000), None, training=True)
    assert long.compiled
    for asked in ("on", "off"):
        chosen = choose(torch_config(engine__compile=asked), None, training=True)
        assert (chosen.compiled, chosen.compile_reason) == (asked == "on", "asked for")


def test_a_long_run_through_fused_kernels_is_not_compiled(card: None) -> None:
    chosen = choose(torch_config(training__steps=1_000_000), None, training=True)
    assert (chosen.fused, chosen.compiled) == (True, False)
    assert chosen.compile_reason == "the fused kernels are faster"


def test_a_short_run_starts_at_once_without_triton(card: None) -> None:
    for preset in ("tiny", "small", "medium", "large", "xl"):
        short = choose(torch_config(preset), None, training=True)
        assert (short.triton, short.fused, short.compiled) == (False, False, False)
        assert "would win back" in short.kernels_reason
        long = choose(torch_config(preset, training__steps=1_000_000), None, training=True)
        assert (long.triton, long.fused) == (True, True)
    given = choose(torch_config(engine__triton="on"), None, training=True)
    assert (given.triton, given.fused) == (True, True)
    refused = choose(torch_config(engine__triton="off", training__steps=10**6), None, training=True)
    assert (refused.triton, refused.kernels_reason) == (False, "engine.triton is off")


def test_triton_is_refused_where_it_cannot_run() -> None:
    with pytest.raises(EngineError, match="Triton is for CUDA, and the device is cpu") as caught:
        choose(torch_config(engine__triton="on"), "cpu", training=True)
    assert caught.value.hint == "leave triton out"


def test_a_machine_without_triton_goes_on_with_a_run_that_had_it(
    card: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    before = {"device": "cuda", "precision": "tf32", "compile": "on", "triton": "on"}
    config = as_before(torch_config(training__steps=10**6), before)
    chosen = choose(config, None, training=True)
    assert (chosen.precision, chosen.triton, chosen.compiled) == ("tf32", False, False)
    assert "is not installed" in chosen.kernels_reason
    for key in ("triton", "compile"):
        with pytest.raises(
            EngineError, match="triton, part of PyTorch for Linux, is not installed"
        ):
            choose(torch_config(**{f"engine__{key}": "on"}), None, training=True)


def test_layers_that_are_divided_are_autograds(card: None) -> None:
    config = torch_config("large", training__steps=10**6)
    chosen = choose(config, None, training=True, divided=True)
    assert (chosen.triton, chosen.fused, chosen.compiled) == (True, False, False)
    assert "divided" in chosen.kernels_reason
    assert "divided" in chosen.compile_reason
    assert choose(config, None, training=True).fused
    asked = choose(replace(config, {"engine.compile": "on"}), None, training=True, divided=True)
    assert asked.compiled


def test_who_only_writes_is_not_asked_for_triton() -> None:
    chosen = choose(torch_config(engine__triton="on"), "cpu", training=False)
    assert (chosen.triton, chosen.kernels_reason) == (False, "nothing is trained here")


def test_float64_never_runs_through_float32_kernels(
    card: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken = []

    def choosing(config: TrainConfig, *given: Any, **named: Any) -> Any:
        taken.append(choose(config, *given, **named))
        return dataclasses.replace(taken[0], device="cpu")

    monkeypatch.setattr(engine_module, "choose", choosing)
    config = config_of(training__steps=10**8)
    TorchEngine(config, dtype="float64")
    assert (taken[0].device, taken[0].triton, taken[0].fused) == ("cuda", False, False)
    assert choose(config, None, training=True).fused


def test_every_choice_has_its_reason(card: None) -> None:
    info = choose(torch_config(), None, training=True).info()
    for key in ("precision", "kernels", "compile"):
        assert info[f"{key}_reason"], key
    assert info["step"] == "one CUDA graph"


def test_layers_with_dropout_or_compiled_are_autograds(card: None) -> None:
    assert choose(torch_config(engine__triton="on"), None, training=True).fused
    for settings in (
        {"model__dropout": 0.1}, {"engine__compile": "on"}, {"engine__fuse": False},
        {"model__n_embd": 8192, "model__n_head": 8},
    ):  # fmt: skip
        chosen = choose(torch_config(engine__triton="on", **settings), None, training=True)
        assert not chosen.fused
        assert chosen.kernels_reason


class _Wrong:
    """The operations of a layer, one of them wrong."""

    def __init__(self, fault: str) -> None:
        self.fault = fault

    def __getattr__(self, name: str) -> Any:
        return getattr(calls, name)

    def gelu_backward(self, grad: Any, x: Any, tanh: bool, sum_cols: Any) -> Any:
        if self.fault == "raises":
            raise RuntimeError("no such card\nand more")
        right = calls.gelu_backward(grad, x, tanh, sum_cols)
        return right * float("nan") if self.fault == "nan" else right * 1.5


def _doubled(*given: Any) -> tuple[Any, Any]:
    loss, grad = cross_entropy(*given)
    return loss, 2 * grad


@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        ("", ""),
        ("wrong", "on this device wte.weight is off by 0."),
        ("nan", "on this device wte.weight is off by nan of its size"),
        ("raises", "they do not run here: RuntimeError: no such card"),
        ("loss", "on this device the gradient of logits is off by 1 of its size"),
        ("update", "on this device the first moment is off by 1 of its size"),
    ],
)
def test_kernels_that_fail_on_a_device_are_replaced_and_that_is_said(
    fault: str, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = config_of(data__accumulation=2)
    engine = engine_of(config, "float32")
    step = engine._step
    operations = _Wrong(fault) if fault else calls
    if fault == "loss":
        step.cross_entropy = _doubled
    if fault == "update":  # one that does nothing
        step.optimizer.kernels = SimpleNamespace(finish_step=finish_step, adamw=lambda *_, **__: 0)
    step.trunk = FusedTrunk(engine.trained, engine._arenas, operations)
    chosen = dataclasses.replace(engine.choices, fused=True)
    monkeypatch.setattr(engine, "choices", dataclasses.replace(chosen, triton=True))
    monkeypatch.setattr(step, "capture", lambda config: None)
    engine._record()
    found = engine.info["kernels_reason"]
    assert reason in found
    assert bool(reason) == ("refused" in found)
    assert engine.info["triton"] == ("off" if reason else "on")
    assert isinstance(step.trunk, AutogradTrunk if fault else FusedTrunk)
    whole = engine_of(config, "float32")
    got, wanted = train(engine, 5), train(whole, 5)
    assert max(abs(a.loss - b.loss) for a, b in zip(got, wanted, strict=True)) <= 1e-6


@pytest.mark.parametrize("dead", [False, True])
def test_a_device_that_a_kernel_broke_is_named_with_what_to_do(
    dead: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def raises(*_: object) -> str:
        raise RuntimeError("an illegal memory access")

    monkeypatch.setattr(torch.cuda, "synchronize", raises if dead else lambda device: None)
    if not dead:
        assert "illegal memory access" in check._fault(raises, torch.device("cuda"))
        return
    with pytest.raises(EngineError, match="broke the connection to the device") as caught:
        check._fault(raises, torch.device("cuda"))
    assert caught.value.hint == 'add triton="off"'


def test_tf32_is_refused_where_there_is_none() -> None:
    with pytest.raises(
        EngineError, match="tf32 is a form of arithmetic of NVIDIA's cards"
    ) as caught:
        TorchEngine(torch_config(engine__precision="tf32", engine__device="cpu"))
    assert caught.value.hint == "leave precision out, or ask for float32"


def test_a_resumed_run_keeps_what_was_chosen(card: None) -> None:
    before = {
        "engine": "torch",
        "device": "cuda",
        "threads": 3,
        "precision": "tf32",
        "compile": "on",
        "triton": "off",
    }
    config = as_before(torch_config(), before).engine
    assert (config.threads, config.precision, config.compile) == (3, "tf32", "on")
    assert config.triton == "off"
    elsewhere = as_before(torch_config(), {**before, "device": "mps"}).engine
    assert (elsewhere.threads, elsewhere.precision, elsewhere.compile) == (3, "auto", "auto")
    given = as_before(torch_config(engine__precision="bf16"), before).engine
    assert given.precision == "bf16"


def test_reasons_are_no_difference_between_engines() -> None:
    one = {"engine": "torch", "precision": "bf16", "precision_reason": "asked for"}
    assert differences({**one, "precision_reason": "fast"}, one) == []
    assert differences({**one, "precision": "tf32"}, one) == ["precision: bf16 -> tf32"]


def test_the_estimate_of_a_step_grows_with_the_work() -> None:
    small, large = (sum(step_seconds(torch_config(name), "bf16")) for name in ("small", "large"))
    assert small < large
    twice = sum(step_seconds(torch_config(data__accumulation=2), "bf16"))
    assert abs(twice - 2 * small) <= 1e-12
