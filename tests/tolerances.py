"""Every limit that the tests hold numbers to, each with its reason. No test has a limit of its own.

An op's error is ``max |got - ref| / (eps * s)`` with ref from the numpy engine in float64 on the same float32 inputs, eps = 2^-23 and
s the scale that rounding really has: for a sum, the same sum over absolute values. The error must be at most ``c``. One correctly
rounded operation is half an eps, so a ``c`` of 8 is room for about sixteen roundings that all fall badly the same way.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

from op_inputs import Array, Case, Operands, run_numpy
from posttrainllm.lab.limits import gradient_limit, loss_limit
from posttrainllm.ops import CLIP, SCALARS

EPS = 2.0**-23

# ---- whole steps and runs -----------------------------------------------------------------------

# Central differences in float64 lose half of the digits; what is left is better than this.
FINITE_DIFFERENCES = 1e-6
# Two float64 computations of one gradient differ by rounding alone, about 1e-13 here.
AUTOGRAD = 1e-9
# float32 gradients of one step, largest error of a tensor over its largest number (measured: 6e-7), and losses along a run in
# float32 against float64 (measured: 7e-8 to step 10, 3e-7 to step 200). ``parity`` shows users the same limits: their home is there.
STEP_0_GRADIENTS = {"native": gradient_limit("cpp"), "webgpu": gradient_limit("webgpu")}
LOSS_TO_STEP_10 = {"native": loss_limit("cpp", 10), "webgpu": loss_limit("webgpu", 10)}
LOSS_TO_STEP_200 = {"native": loss_limit("cpp", 200), "webgpu": loss_limit("webgpu", 200)}
# Attention block by block against all at once, in float64: the same sums in another order.
BLOCKS = 1e-13
# A fused program against the plain one in float64: the same sums, some of them in another order.
FUSED_IN_FLOAT64 = 1e-12
# One AdamW step written a second time in float64.
ADAMW = 1e-13
# A model that is large enough learns one batch by heart; not doing so means a wrong gradient somewhere.
OVERFIT_STEPS, OVERFIT_LOSS = 400, 0.05
# Logits by the cache and without it differ by the order of sums alone: absolute, for logits of size 1 to 10.
CACHED_LOGITS = 2e-5

# ---- ops ----------------------------------------------------------------------------------------

Scale = Callable[[Case, Operands, dict[str, Array]], dict[str, Array]]


@dataclass(frozen=True)
class Limit:
    """``c`` for numpy, cpp and wasm (``native``) and for webgpu; ``exact`` wants the float32 that is nearest to ref."""

    native: float
    webgpu: float
    scale: Scale
    reason: str
    exact: bool = False

    def of(self, engine: str) -> float:
        """The limit of an engine by its name."""
        return self.webgpu if engine == "webgpu" else self.native


def _float64(given: Operands) -> dict[str, Array]:
    return {name: value.astype(np.float64) for name, value in given.items() if value is not None}


def _result(case: Case, given: Operands, ref: dict[str, Array]) -> dict[str, Array]:
    return {name: np.abs(value) for name, value in ref.items()}


def _absolute(case: Case, given: Operands, ref: dict[str, Array]) -> dict[str, Array]:
    """The op itself on absolute values, old content included."""
    magnitudes = {
        name: value
        if value is None or value.dtype == np.int32 or name == "scalars"
        else np.abs(value)
        for name, value in given.items()
    }
    after = run_numpy(case, magnitudes, np.float64)
    return {name: np.abs(after[name]) for name in ref}  # type: ignore[arg-type]


def _layernorm_forward(case: Case, given: Operands, ref: dict[str, Array]) -> dict[str, Array]:
    o = _float64(given)
    mean, rstd = ref["mean"][:, None], ref["rstd"][:, None]
    xhat = (o["x"] - mean) * rstd
    out = (1 + np.abs(xhat) + np.abs(mean) * rstd) * np.abs(o["weight"]) + np.abs(o["bias"])
    return {"out": out, "mean": np.abs(o["x"]).mean(axis=1), "rstd": ref["rstd"]}


def _old(case: Case, o: dict[str, Array], name: str) -> Array | float:
    return np.abs(o[name]) if case.accumulates else 0.0


def _layernorm_backward_input(
    case: Case, given: Operands, ref: dict[str, Array]
) -> dict[str, Array]:
    o = _float64(given)
    rstd = o["rstd"][:, None]
    xhat, g = (o["x"] - o["mean"][:, None]) * rstd, o["dout"] * o["weight"]
    means = np.abs(g).mean(axis=1, keepdims=True), np.abs(g * xhat).mean(axis=1, keepdims=True)
    return {"dx": rstd * (np.abs(g) + means[0] + np.abs(xhat) * means[1]) + _old(case, o, "dx")}


def _layernorm_backward_weight(
    case: Case, given: Operands, ref: dict[str, Array]
) -> dict[str, Array]:
    o = _float64(given)
    xhat = (o["x"] - o["mean"][:, None]) * o["rstd"][:, None]
    return {
        "dweight": np.abs(o["dout"] * xhat).sum(axis=0) + _old(case, o, "dweight"),
        "dbias": np.abs(o["dout"]).sum(axis=0) + _old(case, o, "dbias"),
    }


def _gelu_forward(case: Case, given: Operands, ref: dict[str, Array]) -> dict[str, Array]:
    return {"out": np.abs(_float64(given)["x"])}


def _gelu_backward(case: Case, given: Operands, ref: dict[str, Array]) -> dict[str, Array]:
    return {"dx": np.abs(_float64(given)["dout"])}


def _linear_gelu_forward(case: Case, given: Operands, ref: dict[str, Array]) -> dict[str, Array]:
    """gelu has a slope of at most 1.13, and a quarter of the limit is gelu's own."""
    fc = _absolute(case, given, ref)["fc"]
    return {"out": 1.2 * fc + np.abs(ref["fc"]) / 4, "fc": fc}


def _gelu_linear_backward_input(
    case: Case, given: Operands, ref: dict[str, Array]
) -> dict[str, Array]:
    o = _float64(given)
    product = np.abs(o["dout"]) @ np.abs(o["weight"].T)
    return {
        "dfc": 1.2 * product + np.abs(o["dout"] @ o["weight"].T) / 2,
        "act": np.abs(o["fc"]) / 4,
    }


def _int8_forward(case: Case, given: Operands, ref: dict[str, Array]) -> dict[str, Array]:
    o = _float64(given)
    weight = given["weight"]
    assert weight is not None
    q = np.abs(np.ascontiguousarray(weight, "<i4").view(np.int8).astype(np.float64))
    product = np.abs(o["x"]) @ (q.T if case.attrs.get("transposed") else q)
    return {"out": product * np.abs(o["scale"]) + np.abs(o.get("bias", np.zeros(1)))}


def _layernorm_backward(case: Case, given: Operands, ref: dict[str, Array]) -> dict[str, Array]:
    dx = _layernorm_backward_input(case, {**given, "dx": np.zeros(1)}, ref)["dx"]
    old = np.abs(_float64(given)["dx"])
    return {"dx": dx + old, **_layernorm_backward_weight(case, given, ref)}


def _largest_scores(case: Case, o: dict[str, Array]) -> Array:
    """The largest |score| that each row may look at: (B, H, T)."""
    batch, time, heads = case.sizes["B"], case.sizes["T"], case.sizes["H"]
    q, k, _ = (
        part.reshape(batch, time, heads, -1).transpose(0, 2, 1, 3)
        for part in np.split(o["qkv"], 3, axis=1)
    )
    scores = np.abs(q @ k.transpose(0, 1, 3, 2)) / np.sqrt(q.shape[3])
    at = np.arange(time)
    starts = o["segment_start"].reshape(batch, 1, time, 1)
    return np.where((at[None, :] > at[:, None]) | (at < starts), 0, scores).max(axis=3)


def _with_absolute_values(case: Case, given: Operands) -> dict[str, Array]:
    """The op's result with |v| for v: P abs(V)."""
    changed = dict(given)
    for name in ("qkv", "cache"):
        value = changed.get(name)
        if value is not None:
            changed[name] = value.copy()
            if name == "cache":
                changed[name][1] = np.abs(value[1])  # type: ignore[index]
            else:
                changed[name][:, 2 * case.sizes["C"] :] = np.abs(value[:, 2 * case.sizes["C"] :])  # type: ignore[index]
    return run_numpy(case, changed, np.float64)  # type: ignore[return-value]


def _spread(case: Case, rows: Array) -> Array:
    """(B, H, T) -> (B*T, C): one number for all of a head's elements."""
    size = case.sizes["C"] // case.sizes["H"]
    return np.repeat(rows.transpose(0, 2, 1).reshape(-1, case.sizes["H"]), size, axis=1)


def _attention_forward(case: Case, given: Operands, ref: dict[str, Array]) -> dict[str, Array]:
    largest = _largest_scores(case, _float64(given))
    out = (1 + _spread(case, largest)) * _with_absolute_values(case, given)["out"]
    return {"out": out, "lse": 1 + largest}


def _attention_backward(case: Case, given: Operands, ref: dict[str, Array]) -> dict[str, Array]:
    largest = _largest_scores(case, _float64(given)).max()
    return {"dqkv": np.full_like(ref["dqkv"], (1 + largest) * np.abs(ref["dqkv"]).max())}


def _attention_decode(case: Case, given: Operands, ref: dict[str, Array]) -> dict[str, Array]:
    o, heads = _float64(given), int(case.attrs["n_head"])
    batch, width = case.sizes["B"], case.sizes["C"]
    scale = _with_absolute_values(case, given)["out"]
    for n, position in enumerate(given["positions"]):  # type: ignore[arg-type]
        q = o["qkv"][n, :width].reshape(heads, -1)
        k = o["cache"][0, n // (len(o["qkv"]) // batch), : position + 1].reshape(
            -1, heads, q.shape[1]
        )
        largest = np.abs(np.einsum("hd,shd->hs", q, k)).max(axis=1) / np.sqrt(q.shape[1])
        scale[n] *= 1 + np.repeat(largest, q.shape[1])
    return {"out": scale}


def _cross_entropy_forward(case: Case, given: Operands, ref: dict[str, Array]) -> dict[str, Array]:
    largest = np.abs(_float64(given)["logits"]).max(axis=1)
    return {name: np.abs(value) + largest for name, value in ref.items()}


def _cross_entropy_backward(case: Case, given: Operands, ref: dict[str, Array]) -> dict[str, Array]:
    o = _float64(given)
    largest = np.abs(o["logits"]).max(axis=1, keepdims=True)
    trained = (o["targets"] >= 0)[:, None]  # the gradient of an ignored row is zero, exactly
    scale = (1 + largest) * o["scalars"][SCALARS.index("inv_count")] * trained
    return {"dlogits": np.broadcast_to(scale, ref["dlogits"].shape)}


def _adamw_step(case: Case, given: Operands, ref: dict[str, Array]) -> dict[str, Array]:
    o, a = _float64(given), case.attributes()
    if o["clip"][CLIP.index("nonfinite")]:
        return {name: np.zeros_like(value) for name, value in ref.items()}  # nothing may move
    g = np.abs(o["grad"] * o["clip"][CLIP.index("scale")])
    lr, correction1, correction2 = (
        o["scalars"][SCALARS.index(s)] for s in ("lr", "correction1", "correction2")
    )
    m = a["beta1"] * np.abs(o["m"]) + (1 - a["beta1"]) * g
    step = lr * (m / correction1) / (np.sqrt(ref["v"] / correction2) + a["eps"])
    return {"param": np.abs(o["param"]) + step, "m": m, "v": ref["v"]}


_EXACT = "moves numbers or rounds once"
_SUM = "one rounding a term; blocks and vector lanes keep the partial sums short"
_SOFTMAX = "a score is off by eps times its size, and so is its exponential, relatively"

LIMITS: dict[str, Limit] = {
    "embedding_forward": Limit(0, 1, _result, _EXACT, exact=True),
    "embedding_backward_weight": Limit(16, 32, _absolute, _SUM),
    "layernorm_forward": Limit(
        16, 32, _layernorm_forward, "two sums over a row, then x - mean cancels"
    ),
    "layernorm_backward_input": Limit(8, 32, _layernorm_backward_input, "three terms that cancel"),
    "layernorm_backward_weight": Limit(8, 32, _layernorm_backward_weight, _SUM),
    "linear_forward": Limit(16, 32, _absolute, _SUM),
    "linear_backward_input": Limit(16, 32, _absolute, _SUM),
    "linear_backward_weight": Limit(16, 32, _absolute, _SUM),
    "linear_backward_bias": Limit(16, 32, _absolute, _SUM),
    "gelu_forward": Limit(4, 16, _gelu_forward, "one exponential between 0 and 1, times x"),
    "gelu_backward": Limit(8, 32, _gelu_backward, "as forward, with a slope between -0.2 and 1.2"),
    "attention_forward": Limit(16, 64, _attention_forward, _SOFTMAX),
    "attention_backward": Limit(
        16, 64, _attention_backward, _SOFTMAX + ", and dP - rowsum cancels"
    ),
    "attention_append": Limit(0, 0, _result, _EXACT, exact=True),
    "attention_decode": Limit(16, 64, _attention_decode, _SOFTMAX),
    "add_forward": Limit(0, 1, _result, _EXACT, exact=True),
    "gather_forward": Limit(0, 0, _result, _EXACT, exact=True),
    "cross_entropy_forward": Limit(8, 32, _cross_entropy_forward, _SOFTMAX),
    "cross_entropy_backward": Limit(8, 32, _cross_entropy_backward, _SOFTMAX),
    "loss_sum": Limit(16, 32, _absolute, _SUM),
    "sum_squares": Limit(16, 32, _absolute, _SUM),
    "gradient_clip": Limit(2, 4, _result, "a sum, a root and a quotient, each rounded once"),
    "adamw_step": Limit(8, 16, _adamw_step, "about ten roundings, a root and two quotients"),
    "linear_gelu_forward": Limit(16, 32, _linear_gelu_forward, _SUM + ", then gelu"),
    "linear_residual_forward": Limit(16, 32, _absolute, _SUM),
    "gelu_linear_backward_input": Limit(
        16, 64, _gelu_linear_backward_input, _SUM + ", times gelu's slope"
    ),
    "linear_backward_weight_bias": Limit(16, 32, _absolute, _SUM),
    "layernorm_backward": Limit(8, 32, _layernorm_backward, "as the two ops it joins"),
    "int8_forward": Limit(16, 32, _int8_forward, _SUM),
}


def errors(
    case: Case, given: Operands, ref: dict[str, Array], got: dict[str, Array]
) -> dict[str, float]:
    """The largest error of each output in units of eps * s; NaN counts as infinite.

    Where ref itself is not finite (the clip op's norm of a bad gradient), got must be the same infinity or a NaN as well.
    """
    limit = LIMITS[case.op]
    scales = limit.scale(case, given, ref)
    assert set(scales) == set(ref)
    found = {}
    for name, wanted in ref.items():
        have = got[name].astype(np.float64)
        target = wanted.astype(np.float32).astype(np.float64) if limit.exact else wanted
        same = (have == target) | (np.isnan(have) & np.isnan(target))
        with np.errstate(all="ignore"):
            error = np.where(same, 0, np.abs(have - target) / (EPS * scales[name]))
        found[name] = float(np.where(np.isnan(error), np.inf, error).max())
    return found


def assert_close(
    got: Mapping[str, Array], wanted: Mapping[str, Array], limit: float, *, zero: float = 0.0
) -> None:
    """The largest error of each tensor, relative to its largest number, is within the limit.

    ``zero``: a tensor whose numbers are all smaller is zero in exact arithmetic, and what it holds is rounding noise.
    """
    assert set(got) == set(wanted)
    for name in wanted:
        size, error = np.abs(wanted[name]).max(), np.abs(got[name] - wanted[name]).max()
        assert np.isfinite(error), f"{name} is not finite"
        assert error <= limit * max(size, zero), f"{name} is off by {error:.3g} of {size:.3g}"
