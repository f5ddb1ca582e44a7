"""The training step of the torch engine, piece by piece, on the CPU: the head, the layers, the update, the choices."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest

from needs import require
from posttrainllm.config import TrainConfig, load_config
from posttrainllm.engines.base import Batch
from posttrainllm.training.engine_choice import training_engine

torch = require("torch")

from posttrainllm.pytorch import calls  # noqa: E402
from posttrainllm.pytorch.arena import Arenas, padded_vocabulary  # noqa: E402
from posttrainllm.pytorch.engine import TorchEngine  # noqa: E402
from posttrainllm.pytorch.gpt import GPT, Cache  # noqa: E402
from posttrainllm.pytorch.loss import chunk_rows, cross_entropy, head_loss  # noqa: E402
from posttrainllm.pytorch.optim import RING  # noqa: E402
from posttrainllm.pytorch.sharded_model import Head, HeadLoss  # noqa: E402
from posttrainllm.pytorch.trunk import AutogradTrunk, FusedTrunk  # noqa: E402
from posttrainllm.pytorch.writer import Writer, _Recorded  # noqa: E402
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


def trunks_of(config: TrainConfig, kind: Any) -> tuple[Any, Arenas]:
    """A trunk over float64 arenas with random parameters."""
    arenas = Arenas(config.model, device=torch.device("cpu"), dtype=torch.float64)
    for name, value in random_params(config).items():
        arenas.params[name].copy_(torch.from_numpy(value))
    with torch.device("meta"):
        module = GPT(config.model).eval()
    module.load_state_dict(arenas.padded_views(arenas.flat_params), assign=True)
    extra = (calls,) if kind is FusedTrunk else ()
    return kind(module, arenas, *extra), arenas


# ---- layers -------------------------------------------------------------------------------------


@pytest.mark.parametrize("activation", ["gelu_new", "gelu"])
@pytest.mark.parametrize("tied", [True, False])
def test_layers_written_out_have_the_gradients_of_autograd(activation: str, tied: bool) -> None:
    config = config_of(model__activation=activation, model__tied=tied, model__n_layer=3)
    tokens = torch.from_numpy(random_batch(config).tokens)
    found = []
    for kind in (AutogradTrunk, FusedTrunk):
        trunk, arenas = trunks_of(config, kind)
        arenas.flat_grads.fill_(0.5)  # of the head, which wrote before, or of the step before
        torch.manual_seed(0)
        hidden = trunk.forward(tokens)
        for first in (True, False):  # then the same again, added
            if not first:
                trunk.forward(tokens)
            trunk.backward(torch.randn_like(hidden), first)
        grads = {name: view.numpy().copy() for name, view in arenas.grads.items()}
        found.append((hidden.numpy(), grads))
    assert np.abs(found[0][0] - found[1][0]).max() <= 1e-13
    assert largest_difference(found[1][1], found[0][1]) <= 1e-12


@pytest.mark.parametrize("kind", [AutogradTrunk, FusedTrunk])
def test_gradients_come_from_the_last_layer_on_and_are_those_that_are_put(kind: Any) -> None:
    config = config_of(model__n_layer=3)
    trunk, arenas = trunks_of(config, kind)
    tokens = torch.from_numpy(random_batch(config).tokens)
    grad = torch.randn_like(trunk.forward(tokens))
    trunk.backward(grad, True)
    wanted = {name: view.clone() for name, view in arenas.grads.items() if name != "wte.weight"}
    came: list[str] = []

    def take(names: Any, grads: Any) -> None:
        came.extend(names)
        for name, value in zip(names, grads or [], strict=grads is not None):
            if name != "wte.weight":
                assert torch.equal(value, wanted[name]), name

    trunk.forward(tokens)
    trunk.backward(grad, True, take)
    assert sorted(came) == sorted(arenas.grads)
    matrices = [name for name in came if name.endswith("c_fc.weight")]
    assert matrices == [f"h.{i}.mlp.c_fc.weight" for i in (2, 1, 0)]


def test_vectors_between_the_tensors_of_the_arena_stay_zero() -> None:
    config = config_of(model__n_embd=10, model__n_head=2)
    trunk, arenas = trunks_of(config, FusedTrunk)
    tokens = torch.from_numpy(random_batch(config).tokens)
    trunk.backward(torch.ones_like(trunk.forward(tokens)), True)
    used = sum(int(view.count_nonzero()) for view in arenas.grads.values())
    assert int(arenas.flat_grads.count_nonzero()) == used


# ---- head and loss ------------------------------------------------------------------------------


@pytest.mark.parametrize("chunk", [1000, 16, 5])
@pytest.mark.parametrize("padded", [19, 64])
def test_head_and_loss_are_those_of_the_module(chunk: int, padded: int) -> None:
    torch.manual_seed(0)
    rows, width, n_vocab = 48, 12, 19
    x = torch.randn(rows, width, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(n_vocab, width, dtype=torch.float64, requires_grad=True)
    targets = torch.randint(-1, n_vocab, (rows,))
    wanted = torch.nn.functional.cross_entropy(
        x @ weight.T, targets, ignore_index=-1, reduction="sum"
    )
    grads = torch.autograd.grad(wanted * 0.25, (x, weight))
    inside = torch.zeros(padded, width, dtype=torch.float64)
    inside[:n_vocab] = weight.detach()
    grad_weight = torch.full_like(inside, 7.0)
    for first in (True, False):
        loss, grad_x = head_loss(
            x.detach(),
            inside,
            targets.int(),
            torch.tensor(0.25, dtype=torch.float64),
            grad_weight,
            n_vocab=n_vocab,
            chunk=chunk,
            cross_entropy=cross_entropy,
            first=first,
        )
    assert abs(loss.item() - 0.25 * wanted.item()) <= 1e-13 * wanted.item()
    assert (grad_x - grads[0]).abs().max() <= 1e-14
    assert (grad_weight[:n_vocab] - 2 * grads[1]).abs().max() <= 1e-13
    assert not grad_weight[n_vocab:].any()


def test_a_chunk_of_logits_keeps_to_its_limit() -> None:
    assert chunk_rows(50304, 2, 1 << 30) * 50304 * 2 <= 1 << 30
    assert chunk_rows(50304, 2, 1 << 30) % 256 == 0
    assert chunk_rows(1 << 22, 4, 1 << 20) == 1


def test_bf16_logits_lose_no_more_than_their_rounding() -> None:
    torch.manual_seed(0)
    logits = torch.randn(64, 256).bfloat16()
    targets, scale = torch.randint(0, 256, (64,)), torch.tensor(1 / 64)
    loss, grad = cross_entropy(logits.clone(), targets, scale, 256)
    exact, exact_grad = cross_entropy(logits.double(), targets, scale.double(), 256)
    assert grad.dtype == torch.bfloat16
    assert abs(loss.item() - exact.item()) <= 1e-6 * exact.item()
    assert (grad.double() - exact_grad).abs().max() <= 2**-8 / 64


def test_gradients_of_a_divided_head_are_added_up_in_float32() -> None:
    torch.manual_seed(0)
    x = torch.randn(512, 12).bfloat16()
    weight = torch.randn(19, 12).bfloat16().requires_grad_()
    targets, scale = torch.randint(0, 19, (512,)), torch.tensor(1 / 512)
    found = []
    for chunk in (512, 4):
        how = Head(chunk, cross_entropy, 8)
        loss: Any = HeadLoss.apply(x, weight, targets, scale, how)
        (grad,) = torch.autograd.grad(loss, weight)
        assert grad.dtype == torch.bfloat16
        found.append(grad.double())
    assert (found[0] - found[1]).abs().max() <= 2**-7 * found[0].abs().max()


# ---- vocabulary, precision ----------------------------------------------------------------------


def test_a_padded_vocabulary_changes_nothing_that_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    config = config_of(model__tied=False)
    found = []
    for multiple in (1, 64):
        monkeypatch.setattr(
            "posttrainllm.pytorch.choices.Choices.vocabulary_multiple", property(lambda _, m=multiple: m)
        )  # fmt: skip
        engine = engine_of(config)
        results = train(engine, 3)
        found.append((results, engine.state(), engine.gradient_tensors()))
        assert engine.state().params["wte.weight"].shape == (19, 12)
        assert engine.trained.wte.weight.shape[0] == padded_vocabulary(19, multiple)
        assert not engine.trained.wte.weight[19:].any()
        assert engine.logits(random_batch(config).tokens).shape[-1] == 19
    (plain, one, grads), (padded, two, padded_grads) = found
    assert max(abs(a.loss - b.loss) for a, b in zip(plain, padded, strict=True)) <= 1e-13
    assert largest_difference(padded_grads, grads) <= 1e-11
    for a, b in zip(parts(two), parts(one), strict=True):
        assert largest_difference(a, b) <= 1e-10


def test_bf16_steps_keep_float32_weights_and_stay_near_float32() -> None:
    losses = {}
    for precision in ("float32", "bf16"):
        config = load_config("tiny", flags={"engine.name": "torch", "engine.device": "cpu",
                                            "engine.precision": precision, "engine.threads": 1})  # fmt: skip
        engine: Any = training_engine(config)
        engine.load(random_params(config))
        for step in range(1, 21):
            batch = random_batch(config, rows=16, seed=step)
            engine.gradients(batch, inv_count=1 / batch.targets.size, first=True)
            engine.update(scalars_of(config, step, lr=1e-5))
        losses[precision] = np.array([result.loss for result in engine.results()])
        assert engine.info["precision"] == precision
        moved = (
            engine.state().params["h.0.mlp.c_fc.weight"]
            - random_params(config)["h.0.mlp.c_fc.weight"]
        )
        # Steps of 1e-5 are far below what bfloat16 can add to weights of 0.3: the master weights took them.
        assert 1e-5 < np.abs(moved).max() < 1e-3
    assert np.abs(losses["bf16"] - losses["float32"]).max() <= 0.01 * losses["float32"].min()


# ---- steps ----------------------------------------------------------------------------------------


def test_micro_batches_one_by_one_and_late_are_the_whole_batch() -> None:
    config = config_of()
    batch = random_batch(config, rows=8)
    found = []
    for cuts in ([0, 8], [0, 2, 4, 6, 8], [0, 8]):
        engine = engine_of(config)
        for index, (low, high) in enumerate(itertools.pairwise(cuts)):
            part = Batch(batch.tokens[low:high], batch.targets[low:high])
            engine.gradients(part, inv_count=1 / batch.targets.size, first=index == 0)
        if len(found) == 2:
            engine.gradient_tensors()  # somebody looks: the step must not be taken twice
        engine.update(scalars_of(config, 1, lr=1e-2))
        found.append((engine.results()[0], engine.state().params))
    for result, params in found[1:]:
        assert abs(result.loss - found[0][0].loss) <= 1e-14 * result.loss
        assert abs(result.grad_norm - found[0][0].grad_norm) <= 1e-13 * result.grad_norm
        assert largest_difference(params, found[0][1]) <= 1e-11


def test_more_results_than_the_ring_holds_are_all_there_in_order() -> None:
    config = config_of()
    engine = engine_of(config)
    for step in range(1, RING + 50):
        batch = random_batch(config, seed=step)
        engine.gradients(batch, inv_count=1 / batch.targets.size, first=True)
        engine.update(scalars_of(config, step, lr=1e-3))
    other = engine_of(config)
    wanted = []
    for step in range(1, RING + 50):
        batch = random_batch(config, seed=step)
        other.gradients(batch, inv_count=1 / batch.targets.size, first=True)
        other.update(scalars_of(config, step, lr=1e-3))
        wanted += other.results(wait=False)
    assert engine.results() == wanted
    assert len(wanted) == RING + 49


class _Times:
    """As if so many ranks had the same batch."""

    def __init__(self, factor: int) -> None:
        self.factor = factor

    def bind(self, arena: Any, views: Any, head: str) -> None:
        self.views, self.head = views, head

    def expect(self, first: bool) -> None:
        self.first = first

    def take(self, names: Any, grads: Any) -> None:
        for name, grad in zip(names, grads, strict=True):
            view = self.views[name]
            view.copy_(view + grad if name == self.head or not self.first else grad)

    def __call__(self, gradients: Any, loss: Any) -> None:
        gradients.mul_(self.factor)
        loss.mul_(self.factor)


def test_sums_over_ranks_come_before_norm_and_clip() -> None:
    config = config_of(optimizer__clip_norm=1e-3)
    engines = []
    for factor in (1, 3):
        engine = TorchEngine(config, "cpu", "float64", reduce=_Times(factor))
        engine.load(random_params(config))
        engines.append(engine)
    results = [train(engine, 1)[0] for engine in engines]
    assert abs(results[1].loss - 3 * results[0].loss) <= 1e-12
    assert abs(results[1].grad_norm - 3 * results[0].grad_norm) <= 1e-12
    assert largest_difference(*(engine.state().params for engine in engines)) <= 1e-12


def test_an_engine_for_inference_has_no_room_for_gradients() -> None:
    config = config_of()
    engine = TorchEngine(config, "cpu", training=False)
    engine.load(random_params(config))
    whole = engine_of(config, "float32")
    tokens = random_batch(config).tokens
    assert np.array_equal(engine.logits(tokens), whole.logits(tokens))
    assert engine.nbytes * 4 < whole.nbytes
    assert engine.state().m == {}
    assert engine.info["compile_reason"] == "nothing is trained here"


def test_a_token_of_a_small_model_is_one_threads_work(monkeypatch: pytest.MonkeyPatch) -> None:
    config = config_of(engine__threads=2)
    engine, seen = engine_of(config, "float32"), []
    taken = Writer._next

    def seeing(writer: Writer, *given: Any) -> Any:
        seen.append(torch.get_num_threads())
        return taken(writer, *given)

    monkeypatch.setattr(Writer, "_next", seeing)
    prompt, token = np.zeros((2, 3), np.int32), np.zeros(2, np.int32)
    engine.prefill(prompt)
    few = engine.decode(token)
    monkeypatch.setattr("posttrainllm.pytorch.writer.LITTLE", 2 * config.model.parameters() - 1)
    engine.prefill(prompt)
    many = engine.decode(token)
    assert seen == [1, 2]
    assert torch.get_num_threads() == 2
    assert np.abs(few - many).max() <= 1e-5
    torch.set_num_threads(1)


def test_a_cache_that_is_looked_at_whole_gives_the_same_logits() -> None:
    config = config_of()
    module = engine_of(config).module
    tokens = torch.from_numpy(random_batch(config, rows=3).tokens).long()
    lengths, found = torch.tensor([1, 4, 2]), []
    for whole in (False, True):
        cache = Cache(config.model, 3, device=torch.device("cpu"), dtype=torch.float64, whole=whole)
        with torch.inference_mode():
            for _ in range(2):  # a second time over what the first one left
                cache.restart()
                steps = [module.hidden(tokens[:, :4], cache)[torch.arange(3), lengths - 1]]
                cache.advance(lengths)
                for step in range(3):
                    steps.append(module.hidden(tokens[:, 4 + step, None], cache)[:, 0])
                    cache.advance(1)
        found.append(torch.stack(steps))
    assert (found[0] - found[1]).abs().max() <= 1e-13


class _Graph:
    """Replays a token call by call, rightly or not."""

    def __init__(self, writer: Writer, factor: float) -> None:
        self.writer, self.factor = writer, factor
        self.tokens = torch.zeros((3, 1), dtype=torch.int64)
        self.logits = torch.zeros(3, 19, dtype=torch.float64)

    def replay(self) -> None:
        assert self.writer.cache is not None
        self.logits.copy_(self.factor * self.writer._next(self.tokens, self.writer.cache))
        self.writer.cache.lengths += 1


@pytest.mark.parametrize(
    ("factor", "trouble"), [(1.0, ""), (1.1, "a graph's logits are off by 0.1"), (0, "no graph: x")]
)
def test_a_recorded_token_is_held_to_its_calls(
    monkeypatch: pytest.MonkeyPatch, factor: float, trouble: str
) -> None:
    config = config_of()
    engine = engine_of(config)
    writer = engine._writer
    tokens = torch.from_numpy(random_batch(config, rows=3).tokens).long()

    def captured(batch: int, cache: Cache) -> _Recorded:
        cache.lengths += 5  # whatever a failing capture leaves behind
        if not factor:
            raise RuntimeError("x\ny")
        cache.lengths -= 5
        graph = _Graph(writer, factor)
        return _Recorded(graph, graph.tokens, graph.logits)

    monkeypatch.setattr(writer, "_captured", captured)
    with torch.inference_mode():
        writer.prefill(tokens[:, :2], torch.tensor([2, 1, 2]))
        writer._record(tokens[:, 2], writer.cache)
        assert writer.trouble == trouble
        assert (3 in writer._recorded) == (not trouble)
        assert writer.cache.lengths.tolist() == [2, 1, 2]
        assert writer.cache.longest == 2
        got = writer.decode(tokens[:, 2]).clone()
    assert ("writing" in engine.info) == bool(trouble)
    engine.prefill(tokens[:, :2].int().numpy(), np.array([2, 1, 2], np.int32))
    assert np.abs(engine.decode(tokens[:, 2].int().numpy()) - got.numpy()).max() <= 1e-13
