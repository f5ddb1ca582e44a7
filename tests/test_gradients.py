"""Backward ops against two witnesses that share nothing with them: finite differences and autograd, both in float64.

The same for the whole training step is in ``test_step.py``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from needs import require
from op_cases import cases_of
from op_inputs import Array, operands
from posttrainllm.control import token_index
from posttrainllm.engines.numpy_ops import NUMPY_OPS
from posttrainllm.ops import ADD, BETA, OPS, WRITE
from tolerances import AUTOGRAD, FINITE_DIFFERENCES, assert_close

Tensors = dict[str, Array]


def call(
    op: str, outputs: list[tuple[int, ...]], *inputs: Array | None, **attrs: float
) -> list[Array]:
    """Run an op of the numpy engine in float64 with fresh outputs."""
    made = [np.full(shape, np.nan) for shape in outputs]
    full = {name: float(attrs.get(name, default or 0.0)) for name, default in OPS[op].attrs.items()}
    NUMPY_OPS[op](*made, *inputs, **full)
    return made


# A link is a forward op with the backward ops that belong to it, as functions of named arrays: ``forward(x)`` is what later calls
# depend on, ``backward(x, d)`` the gradient of sum(d * forward(x)) by every array of x, and ``torch`` says forward a second time.
INV_COUNT = 1 / 7
SCALARS = np.array([INV_COUNT, 0.0, 0, 0, 0, 0, 0, 0])
LINKS: dict[str, type[Any]] = {}


def link(cls: type[Any]) -> type[Any]:
    LINKS[cls.__name__] = cls
    return cls


@link
class Embedding:
    covers = ("embedding_backward_weight",)
    ids = np.array([3, 0, 3, 3, 5, 0], np.int32)
    positions = np.array([0, 1, 2, 0, 1, 2], np.int32)

    def inputs(self, random: np.random.Generator) -> Tensors:
        return {"tokens": random.normal(size=(7, 4)), "positions": random.normal(size=(3, 4))}

    def forward(self, x: Tensors) -> Array:
        return call(
            "embedding_forward", [(6, 4)], self.ids, self.positions, x["tokens"], x["positions"]
        )[0]

    def backward(self, x: Tensors, d: Array) -> Tensors:
        op = "embedding_backward_weight"
        return {
            name: call(op, [x[name].shape], d, *token_index(ids), SCALARS)[0]
            for name, ids in (("tokens", self.ids), ("positions", self.positions))
        }

    def torch(self, torch: Any, x: dict[str, Any]) -> Any:
        return x["tokens"][self.ids.astype(int)] + x["positions"][self.positions.astype(int)]


@link
class Layernorm:
    covers = ("layernorm_backward_input", "layernorm_backward_weight")

    def inputs(self, random: np.random.Generator) -> Tensors:
        return {
            name: random.normal(1, 2, shape)
            for name, shape in (("x", (5, 7)), ("weight", 7), ("bias", 7))
        }

    def saved(self, x: Tensors) -> list[Array]:
        shapes: list[tuple[int, ...]] = [(5, 7), (5,), (5,)]
        return call("layernorm_forward", shapes, x["x"], x["weight"], x["bias"], eps=1e-5)

    def forward(self, x: Tensors) -> Array:
        return self.saved(x)[0]

    def backward(self, x: Tensors, d: Array) -> Tensors:
        _, mean, rstd = self.saved(x)
        dx = call("layernorm_backward_input", [(5, 7)], d, x["x"], x["weight"], mean, rstd)[0]
        weight, bias = call(
            "layernorm_backward_weight", [(7,), (7,)], d, x["x"], mean, rstd, SCALARS
        )
        return {"x": dx, "weight": weight, "bias": bias}

    def torch(self, torch: Any, x: dict[str, Any]) -> Any:
        return torch.nn.functional.layer_norm(x["x"], (7,), x["weight"], x["bias"], 1e-5)


class _Linear:
    covers = ("linear_backward_input", "linear_backward_weight", "linear_backward_bias")
    transposed = 0.0

    def inputs(self, random: np.random.Generator) -> Tensors:
        weight = (3, 5) if self.transposed else (5, 3)
        return {
            name: random.normal(size=shape)
            for name, shape in (("x", (4, 5)), ("weight", weight), ("bias", 3))
        }

    def forward(self, x: Tensors) -> Array:
        return call(
            "linear_forward", [(4, 3)], x["x"], x["weight"], x["bias"], transposed=self.transposed
        )[0]

    def backward(self, x: Tensors, d: Array) -> Tensors:
        turned = {"transposed": self.transposed}
        return {
            "x": call("linear_backward_input", [(4, 5)], d, x["weight"], **turned)[0],
            "weight": call(
                "linear_backward_weight", [x["weight"].shape], x["x"], d, SCALARS, **turned
            )[0],
            "bias": call("linear_backward_bias", [(3,)], d, SCALARS)[0],
        }

    def torch(self, torch: Any, x: dict[str, Any]) -> Any:
        return x["x"] @ (x["weight"].T if self.transposed else x["weight"]) + x["bias"]


@link
class Linear(_Linear):
    pass


@link
class LinearTransposed(_Linear):
    transposed = 1.0


@link
class LinearJoined(_Linear):
    covers = ("linear_backward_weight_bias",)

    def backward(self, x: Tensors, d: Array) -> Tensors:
        shapes: list[tuple[int, ...]] = [(5, 3), (3,)]
        weight, bias = call("linear_backward_weight_bias", shapes, x["x"], d, SCALARS)
        return {**super().backward(x, d), "weight": weight, "bias": bias}


@link
class LayernormJoined(Layernorm):
    covers = ("layernorm_backward",)

    def backward(self, x: Tensors, d: Array) -> Tensors:
        _, mean, rstd = self.saved(x)
        dx, weight, bias = np.zeros((5, 7)), np.empty(7), np.empty(7)  # dx is added to
        inputs = (d, x["x"], x["weight"], mean, rstd, SCALARS)
        NUMPY_OPS["layernorm_backward"](dx, weight, bias, *inputs, accumulate=WRITE)
        return {"x": dx, "weight": weight, "bias": bias}


class _GeluLinear:
    """out = gelu(fc) W, the second half of the MLP."""

    covers = ("gelu_linear_backward_input",)
    erf = 0.0

    def inputs(self, random: np.random.Generator) -> Tensors:
        return {"fc": random.normal(size=(4, 5)), "weight": random.normal(size=(5, 3))}

    def forward(self, x: Tensors) -> Array:
        act = call("gelu_forward", [(4, 5)], x["fc"], erf=self.erf)[0]
        return call("linear_forward", [(4, 3)], act, x["weight"], None)[0]

    def backward(self, x: Tensors, d: Array) -> Tensors:
        shapes: list[tuple[int, ...]] = [(4, 5), (4, 5)]
        op = "gelu_linear_backward_input"
        dfc, act = call(op, shapes, d, x["weight"], x["fc"], erf=self.erf)
        weight = call("linear_backward_weight", [(5, 3)], act, d, SCALARS)[0]
        return {"fc": dfc, "weight": weight}

    def torch(self, torch: Any, x: dict[str, Any]) -> Any:
        form = "none" if self.erf else "tanh"
        return torch.nn.functional.gelu(x["fc"], approximate=form) @ x["weight"]


@link
class GeluLinear(_GeluLinear):
    pass


@link
class GeluLinearErf(_GeluLinear):
    erf = 1.0


class _Gelu:
    covers = ("gelu_backward",)
    erf = 0.0

    def inputs(self, random: np.random.Generator) -> Tensors:
        return {"x": np.linspace(-6, 6, 91).reshape(7, 13)}

    def forward(self, x: Tensors) -> Array:
        return call("gelu_forward", [(7, 13)], x["x"], erf=self.erf)[0]

    def backward(self, x: Tensors, d: Array) -> Tensors:
        return {"x": call("gelu_backward", [(7, 13)], d, x["x"], erf=self.erf)[0]}

    def torch(self, torch: Any, x: dict[str, Any]) -> Any:
        return torch.nn.functional.gelu(x["x"], approximate="none" if self.erf else "tanh")


@link
class GeluNew(_Gelu):
    pass


@link
class GeluErf(_Gelu):
    erf = 1.0


class _Attention:
    covers = ("attention_backward",)
    batch, time, heads, size = 2, 6, 2, 3
    starts = np.zeros((2, 6), np.int32)

    def inputs(self, random: np.random.Generator) -> Tensors:
        return {"qkv": random.normal(size=(12, 18))}

    def saved(self, x: Tensors) -> list[Array]:
        return call("attention_forward", [(12, 6), (2, 2, 6)], x["qkv"], self.starts.ravel())

    def forward(self, x: Tensors) -> Array:
        return self.saved(x)[0]

    def backward(self, x: Tensors, d: Array) -> Tensors:
        out, lse = self.saved(x)
        return {
            "qkv": call(
                "attention_backward", [(12, 18)], d, x["qkv"], out, lse, self.starts.ravel()
            )[0]
        }

    def torch(self, torch: Any, x: dict[str, Any]) -> Any:
        q, k, v = (part.view(2, 6, 2, 3).transpose(1, 2) for part in x["qkv"].split(6, dim=1))
        at = torch.arange(6)
        seen = (at[None, :] <= at[:, None]) & (
            at >= torch.from_numpy(self.starts).long()[:, :, None]
        )
        out = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=seen[:, None])
        return out.transpose(1, 2).reshape(12, 6)


@link
class Attention(_Attention):
    pass


@link
class AttentionInSegments(_Attention):
    starts = np.array([[0, 0, 2, 2, 2, 5], [0, 1, 1, 1, 1, 1]], np.int32)


@link
class CrossEntropy:
    covers = ("cross_entropy_backward",)
    targets = np.array([3, -1, 0, 8, -1], np.int32)

    def inputs(self, random: np.random.Generator) -> Tensors:
        return {"logits": random.normal(0, 3, (5, 9))}

    def forward(self, x: Tensors) -> Array:
        row_loss, _ = call("cross_entropy_forward", [(5,), (5,)], x["logits"], self.targets)
        return call("loss_sum", [(1,)], row_loss, SCALARS)[0]

    def backward(self, x: Tensors, d: Array) -> Tensors:
        _, lse = call("cross_entropy_forward", [(5,), (5,)], x["logits"], self.targets)
        new = call("cross_entropy_backward", [(5, 9)], x["logits"], self.targets, lse, SCALARS)[0]
        return {"logits": d * new}

    def torch(self, torch: Any, x: dict[str, Any]) -> Any:
        total = torch.nn.functional.cross_entropy(
            x["logits"], torch.from_numpy(self.targets).long(), ignore_index=-1, reduction="sum"
        )
        return (total * INV_COUNT).view(1)


def by_differences(f: Callable[[Tensors], float], x: Tensors, step: float = 1e-5) -> Tensors:
    """Central differences of f by every number of x."""
    found = {}
    for name, array in x.items():
        slopes = np.empty(array.size)
        for at in range(array.size):
            both = []
            for sign in (1, -1):
                moved = array.copy()
                moved.flat[at] += sign * step
                both.append(f({**x, name: moved}))
            slopes[at] = (both[0] - both[1]) / (2 * step)
        found[name] = slopes.reshape(array.shape)
    return found


def drawn(name: str) -> tuple[Any, Tensors, Array]:
    """A link, its inputs, and a random direction for its output."""
    one = LINKS[name]()
    random = np.random.default_rng(len(name))
    x = one.inputs(random)
    return one, x, random.normal(size=one.forward(x).shape)


@pytest.mark.parametrize("name", LINKS)
def test_backward_op_agrees_with_finite_differences(name: str) -> None:
    one, x, d = drawn(name)
    wanted = by_differences(lambda moved: float((d * one.forward(moved)).sum()), x)
    assert_close(one.backward(x, d), wanted, FINITE_DIFFERENCES)


@pytest.mark.parametrize("name", LINKS)
def test_backward_op_agrees_with_autograd(name: str) -> None:
    torch = require("torch")
    one, x, d = drawn(name)
    leaves = {key: torch.tensor(value, requires_grad=True) for key, value in x.items()}
    out = one.torch(torch, leaves)
    assert np.abs(out.detach().numpy() - one.forward(x)).max() <= AUTOGRAD
    out.backward(torch.from_numpy(d))
    assert_close(one.backward(x, d), {k: leaf.grad.numpy() for k, leaf in leaves.items()}, AUTOGRAD)


def test_every_backward_op_has_its_witnesses() -> None:
    covered = {op for cls in LINKS.values() for op in cls.covers}
    assert covered == {op for op in OPS if "_backward" in op}


@pytest.mark.parametrize("op", [op for op in OPS if "accumulate" in OPS[op].attrs])
def test_an_op_adds_under_add_and_under_beta_one_and_starts_afresh_otherwise(op: str) -> None:
    case = next(c for c in cases_of(op) if c.mode == "add" and not c.slow)
    given = operands(case)
    names = [operand.name for operand in OPS[op].outputs if operand.mode == "accumulate"]

    def run(mode: int, beta: float) -> Tensors:
        used: Any = {
            k: v if v is None or v.dtype == np.int32 else v.astype(float) for k, v in given.items()
        }
        if "scalars" in used:
            used["scalars"][1] = beta
        NUMPY_OPS[op](*used.values(), **{**case.attributes(), "accumulate": mode})
        return {name: used[name] for name in names}

    new = run(WRITE, 1.0)
    added = {name: new[name] + given[name] for name in names}  # type: ignore[operator]
    assert_close(run(ADD, 0.0), added, 1e-14)
    if "scalars" in given:
        assert_close(run(BETA, 0.0), new, 0)
        assert_close(run(BETA, 1.0), added, 1e-14)
