"""Triton's kernels against PyTorch's calls: on a CUDA card where there is one, else on the CPU in Triton's interpreter (``conftest.py``).

The interpreter runs a kernel's program line by line, so it says whether the program is right, not whether a card's compiler keeps it so.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from needs import require

torch = require("torch")
require("triton")

from posttrainllm.pytorch import calls, embedding_kernels, kernels, optim, trunk_kernels  # noqa: E402
from posttrainllm.pytorch import loss as by_calls  # noqa: E402
from posttrainllm.pytorch.arena import Arenas  # noqa: E402
from posttrainllm.pytorch.check import check_kernels, check_loss  # noqa: E402
from posttrainllm.pytorch.trunk import FusedTrunk  # noqa: E402
from torch_cases import config_of, engine_of, random_batch, scalars_of  # noqa: E402

PLACE = torch.device("cpu"), torch.float32
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
LARGE = (
    [(301, 48, 100), (512, 48, 192), (3001, 96, 300), (4096, 768, 3072)] if DEVICE == "cuda" else []
)

# Interpreted exponentials overflow to infinity with a word of numpy's, as they do on a card without one.
pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("n_vocab", "padded"),
    [
        (1, 64), (19, 64), (64, 64), (256, 256), (1000, 1024), (16384, 16384), (16385, 16448),
        (16000, 40000), (50257, 50304),
    ],
)  # fmt: skip
def test_cross_entropy_kernel_is_that_of_the_calls(dtype: Any, n_vocab: int, padded: int) -> None:
    torch.manual_seed(0)
    logits = (3 * torch.randn(37, padded, device=DEVICE)).to(dtype)
    targets = torch.randint(0, n_vocab, (37,), device=DEVICE, dtype=torch.int32)
    targets[5:9] = torch.tensor([-1, -1, -100, -(2**31)], device=DEVICE, dtype=torch.int32)
    targets[9:11] = torch.tensor([0, n_vocab - 1], device=DEVICE, dtype=torch.int32)
    scale = torch.tensor(0.25, device=DEVICE)
    wanted, grads = by_calls.cross_entropy(logits.double(), targets, scale.double(), n_vocab)
    got, found = kernels.cross_entropy(logits.clone(), targets, scale, n_vocab)
    assert abs(got.item() - wanted.item()) <= 1e-6 * wanted.item()
    limit = 2**-8 if dtype == torch.bfloat16 else 1e-6
    assert (found.double() - grads).abs().max() <= limit * 0.25
    assert not found[:, n_vocab:].any()
    assert not found[5:9].any()
    logits[0, n_vocab // 2] = torch.nan
    assert kernels.cross_entropy(logits, targets, scale, n_vocab)[0].isnan()


@pytest.mark.parametrize("kind", ["adamw", "muon"])
@pytest.mark.parametrize("bad", [False, True])
def test_update_kernels_are_those_of_the_calls(kind: str, bad: bool) -> None:
    config = config_of(optimizer__kind=kind)
    muon = optim.muon_names(config.model) if kind == "muon" else frozenset()
    found = []
    for module in (None, kernels):
        torch.manual_seed(1)
        arenas = Arenas(
            config.model, device=torch.device(DEVICE), working=torch.bfloat16, apart=muon
        )
        for arena in (arenas.flat_params, arenas.flat_grads, arenas.flat_m):
            arena.normal_()
        arenas.flat_v.uniform_()
        arenas.refresh_working()
        if bad:
            arenas.flat_grads[100] = torch.inf
        optimizer = optim.Optimizer(arenas, config.optimizer, module)
        scalars = torch.tensor([1.0, 1e-2, 0.1, 0.05], device=DEVICE)
        before = arenas.flat_params.clone()
        optimizer.step(scalars, torch.tensor(2.5, device=DEVICE))
        flat = (arenas.flat_params, arenas.flat_m, arenas.flat_v)
        found.append([*flat, optimizer.ring[0], arenas.flat_working.float()])
        assert torch.equal(before, arenas.flat_params) == bad
        rounded = arenas.flat_params.bfloat16()
        if DEVICE == "cuda" or module is None:
            assert torch.equal(arenas.flat_working, rounded)
        else:  # the interpreter cuts bits off
            assert torch.allclose(arenas.flat_working, rounded, rtol=2**-7, atol=0)
    for one, two in zip(*found, strict=True):
        assert torch.allclose(
            one, two, rtol=1e-2 if one is found[0][-1] else 1e-5, atol=1e-6, equal_nan=True
        )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("rows", "width", "inner"),
    [(1, 1, 4), (7, 20, 36), (21, 8, 33), (61, 48, 100), *LARGE],
)
def test_fused_kernels_are_those_of_the_calls(
    dtype: Any, rows: int, width: int, inner: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    if rows < 100:  # several turns, tiles of several rows, the last ones not full
        monkeypatch.setattr(trunk_kernels, "PARTS", 8)
    limit = 2e-5 if dtype == torch.float32 else 2**-7

    def draw(*shape: int) -> Any:
        return torch.randn(*shape, device=DEVICE).to(dtype)

    def check(got: Any, wanted: Any, limit: float = limit, scale: Any = None) -> None:
        """Within ``limit`` of the largest value, or of ``scale`` where large terms cancel out."""
        scale = wanted.abs().max() if scale is None else scale
        assert got.isfinite().all()
        assert (got.double() - wanted.double()).abs().max() <= limit * scale

    def table(columns: int) -> tuple[Any, Any]:
        count = trunk_kernels.parts(rows)
        return (
            torch.full((count, columns), 7.0, device=DEVICE),
            torch.zeros(1, columns, device=DEVICE, dtype=torch.float64),
        )

    weight, bias = draw(width), draw(width)
    for delta in (None, draw(rows, width)):
        x, grad, residual = draw(rows, width) + 1, draw(rows, width), draw(rows, width)
        y, out, mean, rstd = trunk_kernels.layernorm(x, delta, weight, bias, 1e-5)
        double = [None if one is None else one.double() for one in (x, delta, weight, bias)]
        for got, wanted in zip((y, out, mean, rstd), calls.layernorm(*double, 1e-5), strict=True):
            check(got, wanted)
        for along in (None, residual):
            ours, theirs = table(3 * width)
            results = []
            for module, cols, kind in (
                (trunk_kernels, ours, lambda one: one),
                (calls, theirs, lambda one: None if one is None else one.double()),
            ):
                cut = cols[:, :width], cols[:, width : 2 * width], cols[:, 2 * width :]
                given = (grad, along, y, mean, rstd, weight)
                results.append(module.layernorm_backward(*map(kind, given), *cut))
            terms = (grad.double() * weight * rstd[:, None]).abs().max()
            check(*results, scale=max(terms, results[1].abs().max()))
            check(ours.sum(0), theirs[0], 4 * limit)
    for tanh in (True, False):
        h, grad = 3 * draw(rows, inner), draw(rows, inner)
        check(trunk_kernels.gelu(h, tanh), calls.gelu(h.double(), tanh))
        ours, theirs = table(inner)
        got = trunk_kernels.gelu_backward(grad, h, tanh, ours)
        check(got, calls.gelu_backward(grad.double(), h.double(), tanh, theirs))
        check(ours.sum(0), theirs[0], 4 * limit)
    ours, theirs = table(3 * width)
    parts = [draw(rows, width) for _ in range(3)]
    wanted = calls.join(*(one.double() for one in parts), theirs)
    assert torch.equal(trunk_kernels.join(*parts, ours).double(), wanted)
    check(ours.sum(0), theirs[0], 4e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("rows", "n_vocab", "width"),
    [(1, 5, 20), (32, 3, 16), (33, 1, 48), (31, 2, 8), (700, 2, 300), (1024, 256, 96), (900, 900, 64)],
)  # fmt: skip
@pytest.mark.parametrize("common", [0.0, 0.5])
def test_embedding_kernel_adds_every_row_to_its_token(
    dtype: Any, rows: int, n_vocab: int, width: int, common: float
) -> None:
    torch.manual_seed(rows)
    grad = torch.randn(rows, width, device=DEVICE).to(dtype)
    tokens = torch.randint(0, n_vocab, (rows,), device=DEVICE, dtype=torch.int32)
    tokens[torch.rand(rows, device=DEVICE) < common] = n_vocab // 2
    table = torch.randn(n_vocab + 3, width, device=DEVICE)
    wanted, size = table.double(), table.double().abs()
    calls.embedding_backward(grad.double(), calls.token_order(tokens), wanted)
    calls.embedding_backward(grad.double().abs(), calls.token_order(tokens), size)
    found = []
    for _ in range(2):
        got = table.clone()
        order = embedding_kernels.token_order(tokens[None])
        embedding_kernels.embedding_backward(grad, order, got)
        found.append(got)
    assert torch.equal(*found)
    assert ((found[0].double() - wanted).abs() / size.clamp(min=1e-30)).max() <= 16 * 2**-23


@pytest.mark.parametrize(
    "runs",
    [[32, 32, 64], [31, 2, 31], [1, 63, 1], [33, 31], [40, 17 * 32, 8], [16 * 32 + 32], [33 * 32, 1], [5, 16 * 32 + 27, 32]],
)  # fmt: skip
def test_embedding_kernel_adds_runs_that_end_where_pieces_do(runs: list[int]) -> None:
    tokens = torch.repeat_interleave(torch.arange(len(runs)), torch.tensor(runs)).int().to(DEVICE)
    tokens = tokens[torch.randperm(len(tokens), generator=torch.Generator().manual_seed(1))]
    grad = torch.ones(len(tokens), 17, device=DEVICE)
    table = torch.zeros(len(runs) + 1, 17, device=DEVICE)
    order = embedding_kernels.token_order(tokens[None])
    embedding_kernels.embedding_backward(grad, order, table)
    assert table[:, 3].tolist() == [*runs, 0]
    assert table.min(1).values.equal(table.max(1).values)


if DEVICE == "cpu":  # on a card tests/test_cuda.py runs whole steps

    @pytest.mark.parametrize(
        ("tied", "accumulation", "kind"),
        [(True, 1, "adamw"), (False, 2, "adamw"), (True, 2, "muon")],
    )
    def test_steps_through_kernels_pass_their_check_and_have_the_losses_of_the_calls(
        tied: bool, accumulation: int, kind: str
    ) -> None:
        config = config_of(
            model__tied=tied, data__accumulation=accumulation, data__batch_size=2,
            optimizer__kind=kind,
        )  # fmt: skip
        found = []
        for through in (True, False):
            engine = engine_of(config, "float32")
            arenas, step = engine._arenas, engine._step
            if through:
                step.cross_entropy = kernels.cross_entropy
                step.trunk = FusedTrunk(engine.trained, arenas, trunk_kernels)
                step.optimizer = optim.Optimizer(arenas, config.optimizer, kernels)
                step.reset()
                chosen = dataclasses.replace(engine.choices, triton=True, fused=True)
                assert check_kernels(config, chosen, step, engine.trained, arenas) == ""
                assert check_loss(kernels.cross_entropy, chosen, *PLACE, 19) == ""
            for number in range(1, 4):
                for part in range(accumulation):
                    batch = random_batch(config, rows=2, seed=10 * number + part)
                    scale = 1 / (accumulation * batch.targets.size)
                    engine.gradients(batch, inv_count=scale, first=part == 0)
                engine.update(scalars_of(config, number, lr=1e-2))
            results = engine.results()
            found.append([one.loss for one in results] + [one.grad_norm for one in results])
        assert found[0] == pytest.approx(found[1], rel=1e-5)
