"""What every op computes: the definition, in numpy, in any float type, as slow as it is plain.

Every function takes its operands in the op table's order (outputs, inputs), then the attributes by name. Shapes and letters are those of
``ops.py``; outputs are written in place. No function here is fast, and none should become so: the kernels of the other engines are proven
against these in float64. The derivations of the backward ops stand in ``docs/ops/``.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from posttrainllm.engines.numpy_attention import (
    attention_append,
    attention_backward,
    attention_decode,
    attention_forward,
)
from posttrainllm.ops import ADD, BETA, CLIP, SCALARS

Array = NDArray[Any]
GELU_SCALE = math.sqrt(2 / math.pi)
GELU_CUBIC = 0.044715


def _put(out: Array, new: Array, accumulate: float, beta: float = 0.0) -> None:
    """Write or add, as the attribute ``accumulate`` says; the old value is not looked at where it is overwritten."""
    if accumulate == ADD or (accumulate == BETA and beta != 0):
        out += new
    else:
        out[...] = new


def _scalar(scalars: Array, name: str) -> float:
    return float(scalars[SCALARS.index(name)])


# ---- embedding ------------------------------------------------------------------------------------------------------------------------


def embedding_forward(
    out: Array, tokens: Array, positions: Array, token_table: Array, position_table: Array
) -> None:
    """out[n] = token_table[tokens[n]] + position_table[positions[n]]."""
    out[...] = token_table[tokens] + position_table[positions]


def embedding_backward_weight(
    dtable: Array,
    dout: Array,
    rows: Array,
    starts: Array,
    order: Array,
    scalars: Array,
    *,
    accumulate: float,
) -> None:
    """dtable[rows[j]] (+)= sum of dout[order[s]] for s in starts[j] .. starts[j+1]; rows that nobody used get nothing."""
    new = np.zeros_like(dtable)
    for j, row in enumerate(rows):
        if row >= 0:
            end = starts[j + 1] if j + 1 < len(starts) else len(order)
            new[row] = dout[order[starts[j] : end]].sum(axis=0)
    _put(dtable, new, accumulate, _scalar(scalars, "beta"))


# ---- layernorm ------------------------------------------------------------------------------------------------------------------------


def layernorm_forward(
    out: Array, mean: Array, rstd: Array, x: Array, weight: Array, bias: Array, *, eps: float
) -> None:
    """Normalize each row of x to zero mean and unit variance, then scale and shift.

    Saves: mean, rstd, so that backward recomputes xhat instead of keeping an (N, C) copy.
    """
    mean[...] = x.mean(axis=1)
    centred = x - mean[:, None]
    rstd[...] = 1 / np.sqrt((centred * centred).mean(axis=1) + eps)
    out[...] = centred * rstd[:, None] * weight + bias


def layernorm_backward_input(
    dx: Array, dout: Array, x: Array, weight: Array, mean: Array, rstd: Array, *, accumulate: float
) -> None:
    """dx (+)= rstd (g - mean(g) - xhat mean(g xhat)) with g = dout weight, means over a row."""
    xhat = (x - mean[:, None]) * rstd[:, None]
    g = dout * weight
    new = g - g.mean(axis=1, keepdims=True) - xhat * (g * xhat).mean(axis=1, keepdims=True)
    _put(dx, new * rstd[:, None], accumulate)


def layernorm_backward_weight(
    dweight: Array,
    dbias: Array,
    dout: Array,
    x: Array,
    mean: Array,
    rstd: Array,
    scalars: Array,
    *,
    accumulate: float,
) -> None:
    """dweight (+)= sum_n dout xhat;  dbias (+)= sum_n dout."""
    xhat = (x - mean[:, None]) * rstd[:, None]
    beta = _scalar(scalars, "beta")
    _put(dweight, (dout * xhat).sum(axis=0), accumulate, beta)
    _put(dbias, dout.sum(axis=0), accumulate, beta)


# ---- linear ---------------------------------------------------------------------------------------------------------------------------


def linear_forward(
    out: Array, x: Array, weight: Array, bias: Array | None, *, transposed: float
) -> None:
    """out = x W + bias; with ``transposed`` W is stored as (O, I)."""
    out[...] = x @ (weight.T if transposed else weight)
    if bias is not None:
        out += bias


def int8_forward(
    out: Array, x: Array, weight: Array, scale: Array, bias: Array | None, *, transposed: float
) -> None:
    """out = scale * (x q) + bias; weight holds int8 q (I, O), or (O, I) with ``transposed``, four to a word, the first one lowest."""
    q = np.ascontiguousarray(weight, "<i4").view(np.int8).astype(x.dtype)
    linear_forward(out, x, q, None, transposed=transposed)
    out *= scale
    if bias is not None:
        out += bias


def linear_backward_input(
    dx: Array, dout: Array, weight: Array, *, transposed: float, accumulate: float
) -> None:
    """dx (+)= dout W^T."""
    _put(dx, dout @ (weight if transposed else weight.T), accumulate)


def linear_backward_weight(
    dweight: Array, x: Array, dout: Array, scalars: Array, *, transposed: float, accumulate: float
) -> None:
    """dW (+)= x^T dout."""
    _put(dweight, dout.T @ x if transposed else x.T @ dout, accumulate, _scalar(scalars, "beta"))


def linear_backward_bias(dbias: Array, dout: Array, scalars: Array, *, accumulate: float) -> None:
    """dbias (+)= column sums of dout."""
    _put(dbias, dout.sum(axis=0), accumulate, _scalar(scalars, "beta"))


# ---- gelu -----------------------------------------------------------------------------------------------------------------------------


def _erf(x: Array) -> Array:
    result: Array = np.vectorize(math.erf, otypes=[x.dtype])(x)
    return result


def _sigmoid(z: Array) -> Array:
    """1 / (1 + exp(-z)), without overflow and with small results as exact as large ones."""
    e = np.exp(-np.abs(z))
    result: Array = np.where(z < 0, e, 1) / (1 + e)
    return result


def gelu_forward(out: Array, x: Array, *, erf: float) -> None:
    """x Phi(x), Phi by erf, or GPT-2's tanh form: 0.5 (1 + tanh u) = sigmoid(2u), u = sqrt(2/pi) (x + 0.044715 x^3)."""
    if erf:
        out[...] = 0.5 * x * (1 + _erf(x / math.sqrt(2)))
    else:
        out[...] = x * _sigmoid(2 * GELU_SCALE * (x + GELU_CUBIC * x**3))


def gelu_backward(dx: Array, dout: Array, x: Array, *, erf: float) -> None:
    """dx = dout d gelu(x) / dx; with s = sigmoid(2u) that is s + x s (1 - s) 2u', and 1 - s is sigmoid(-2u), which does not cancel."""
    if erf:
        slope = 0.5 * (1 + _erf(x / math.sqrt(2))) + x * np.exp(-0.5 * x * x) / math.sqrt(
            2 * math.pi
        )
    else:
        z = 2 * GELU_SCALE * (x + GELU_CUBIC * x**3)
        s = _sigmoid(z)
        slope = s + x * s * _sigmoid(-z) * 2 * GELU_SCALE * (1 + 3 * GELU_CUBIC * x * x)
    dx[...] = dout * slope


# ---- add, gather ----------------------------------------------------------------------------------------------------------------------


def add_forward(out: Array, a: Array, b: Array) -> None:
    """out = a + b."""
    np.add(a, b, out=out)


def gather_forward(out: Array, x: Array, rows: Array) -> None:
    """out[b] = x[rows[b]]."""
    out[...] = x[rows]


# ---- cross entropy --------------------------------------------------------------------------------------------------------------------


def cross_entropy_forward(row_loss: Array, lse: Array, logits: Array, targets: Array) -> None:
    """row_loss[n] = lse[n] - logits[n, targets[n]], 0 where targets[n] < 0. Saves: lse."""
    top = logits.max(axis=1)
    lse[...] = top + np.log(np.exp(logits - top[:, None]).sum(axis=1))
    picked = logits[np.arange(len(targets)), np.maximum(targets, 0)]
    row_loss[...] = np.where(targets >= 0, lse - picked, 0)


def cross_entropy_backward(
    dlogits: Array, logits: Array, targets: Array, lse: Array, scalars: Array
) -> None:
    """dlogits = inv_count (softmax(logits) - onehot(targets)), 0 where targets[n] < 0."""
    new = np.exp(logits - lse[:, None])
    new[np.arange(len(targets)), np.maximum(targets, 0)] -= 1
    dlogits[...] = np.where((targets >= 0)[:, None], new * _scalar(scalars, "inv_count"), 0)


def loss_sum(loss: Array, row_loss: Array, scalars: Array, *, accumulate: float) -> None:
    """loss (+)= inv_count sum_n row_loss[n]."""
    _put(
        loss,
        row_loss.sum(keepdims=True) * _scalar(scalars, "inv_count"),
        accumulate,
        _scalar(scalars, "beta"),
    )


# ---- optimizer ------------------------------------------------------------------------------------------------------------------------


def sum_squares(out: Array, x: Array) -> None:
    """out = sum_p x[p]^2."""
    out[...] = (x * x).sum()


def gradient_clip(clip: Array, decayed: Array, plain: Array, *, clip_norm: float) -> None:
    """Norm of all gradients, the factor that brings it down to ``clip_norm`` (0: never), and the sticky non-finite flag."""
    norm = np.sqrt(decayed[0] + plain[0])
    clip[CLIP.index("norm")] = norm
    clip[CLIP.index("scale")] = clip_norm / norm if norm > clip_norm > 0 else 1
    if not np.isfinite(norm):
        clip[CLIP.index("nonfinite")] = 1


def adamw_step(
    param: Array,
    m: Array,
    v: Array,
    grad: Array,
    clip: Array,
    scalars: Array,
    *,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
) -> None:
    """One AdamW step with decoupled decay; nothing at all once a gradient was not finite."""
    if clip[CLIP.index("nonfinite")]:
        return
    number = param.dtype.type
    g = grad * clip[CLIP.index("scale")]
    m[...] = number(beta1) * m + number(1 - beta1) * g
    v[...] = number(beta2) * v + number(1 - beta2) * g * g
    mhat = m / number(_scalar(scalars, "correction1"))
    vhat = v / number(_scalar(scalars, "correction2"))
    param -= number(_scalar(scalars, "lr")) * (
        mhat / (np.sqrt(vhat) + number(eps)) + number(weight_decay) * param
    )


# ---- fused ----------------------------------------------------------------------------------------------------------------------------


def linear_gelu_forward(
    out: Array, fc: Array, x: Array, weight: Array, bias: Array | None, *, erf: float
) -> None:
    """fc = x W + bias;  out = gelu(fc). Saves: fc."""
    linear_forward(fc, x, weight, bias, transposed=0)
    gelu_forward(out, fc, erf=erf)


def linear_residual_forward(
    out: Array, residual: Array, x: Array, weight: Array, bias: Array | None
) -> None:
    """out = residual + (x W + bias)."""
    linear_forward(out, x, weight, bias, transposed=0)
    out += residual


def gelu_linear_backward_input(
    dfc: Array, act: Array, dout: Array, weight: Array, fc: Array, *, erf: float
) -> None:
    """Of out = gelu(fc) W + bias: dfc = (dout W^T) gelu'(fc), and act = gelu(fc), which the weight's gradient reads."""
    gelu_backward(dfc, dout @ weight.T, fc, erf=erf)
    gelu_forward(act, fc, erf=erf)


def linear_backward_weight_bias(
    dweight: Array, dbias: Array, x: Array, dout: Array, scalars: Array, *, accumulate: float
) -> None:
    """dW (+)= x^T dout;  dbias (+)= column sums of dout."""
    linear_backward_weight(dweight, x, dout, scalars, transposed=0, accumulate=accumulate)
    linear_backward_bias(dbias, dout, scalars, accumulate=accumulate)


def layernorm_backward(
    dx: Array,
    dweight: Array,
    dbias: Array,
    dout: Array,
    x: Array,
    weight: Array,
    mean: Array,
    rstd: Array,
    scalars: Array,
    *,
    accumulate: float,
) -> None:
    """All gradients of a layernorm; dx is added to."""
    layernorm_backward_input(dx, dout, x, weight, mean, rstd, accumulate=ADD)
    layernorm_backward_weight(dweight, dbias, dout, x, mean, rstd, scalars, accumulate=accumulate)


NUMPY_OPS: dict[str, Callable[..., None]] = {
    function.__name__: function
    for function in (
        embedding_forward,
        embedding_backward_weight,
        layernorm_forward,
        layernorm_backward_input,
        layernorm_backward_weight,
        linear_forward,
        linear_backward_input,
        linear_backward_weight,
        linear_backward_bias,
        gelu_forward,
        gelu_backward,
        attention_forward,
        attention_backward,
        attention_append,
        attention_decode,
        add_forward,
        gather_forward,
        cross_entropy_forward,
        cross_entropy_backward,
        loss_sum,
        sum_squares,
        gradient_clip,
        adamw_step,
        linear_gelu_forward,
        linear_residual_forward,
        gelu_linear_backward_input,
        linear_backward_weight_bias,
        layernorm_backward,
        int8_forward,
    )
}
