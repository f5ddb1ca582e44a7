"""What a layer needs besides matrix products and attention, in PyTorch's own calls: the definitions.

What this is: five operations, each joined with what stands next to it in a layer, so that a tensor is read once, and the gradient of
an embedding table. ``trunk_kernels.py`` and ``embedding_kernels.py`` hold the same for CUDA, in Triton; tests hold those to these, and
these to autograd.
What this is not: a layer (``trunk.py``).

Gradients of vectors (biases, LayerNorms) come as partial sums: ``parts(n)`` rows of them for n rows of activations,
added up by the caller. A ``cols`` argument is where an operation writes its own, (parts, width).

Letters of shapes: N rows (B*T), C n_embd, F width of the MLP, P parts.
"""

from __future__ import annotations

from typing import Final

import torch
import torch.nn.functional as F
from torch import Tensor

PARTS: Final = 264
"""Most partial sums that operations for CUDA write: a program each, two for each multiprocessor of a large card."""


def parts(rows: int) -> int:
    """How many partial sums the operations write: one."""
    return 1


def layernorm(
    x: Tensor, delta: Tensor | None, weight: Tensor, bias: Tensor, eps: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """y = x + delta;  out = (y - mean) * rstd * weight + bias. Without delta, y is x.

    Shapes: x, delta, returned y and out (N, C); weight, bias (C,); returned mean and rstd (N,).
    """
    y = x if delta is None else x + delta
    out, mean, rstd = torch.native_layer_norm(y, y.shape[1:], weight, bias, eps)
    return y, out, mean.flatten(), rstd.flatten()


def layernorm_backward(
    grad: Tensor,
    residual: Tensor | None,
    y: Tensor,
    mean: Tensor,
    rstd: Tensor,
    weight: Tensor,
    weight_cols: Tensor,
    bias_cols: Tensor,
    sum_cols: Tensor | None,
) -> Tensor:
    """The gradient of y: what comes through the LayerNorm and what comes along the residual stream.

    Shapes: grad, residual, y, returned (N, C); mean, rstd (N,); weight (C,); cols (P, C): of the weight, of the bias,
    and of the bias of the linear layer whose output was added to make y: the sum of what is returned.
    """
    xhat = (y - mean[:, None]) * rstd[:, None]
    weighted = grad * weight
    through = weighted.mean(1, keepdim=True) + xhat * (weighted * xhat).mean(1, keepdim=True)
    out = (weighted - through) * rstd[:, None]
    if residual is not None:
        out = out + residual
    out = out.to(y.dtype)
    weight_cols.copy_((grad * xhat).sum(0, keepdim=True))
    bias_cols.copy_(grad.sum(0, keepdim=True))
    if sum_cols is not None:
        sum_cols.copy_(out.sum(0, keepdim=True))
    return out


def gelu(x: Tensor, tanh: bool) -> Tensor:
    """GELU, by tanh or by erf. Shapes: x, returned (N, F)."""
    return F.gelu(x, approximate="tanh" if tanh else "none")


def gelu_backward(grad: Tensor, x: Tensor, tanh: bool, sum_cols: Tensor) -> Tensor:
    """The gradient of GELU's input; its sums over rows are the gradient of the bias before.

    Shapes: grad, x, returned (N, F); sum_cols (P, F).
    """
    out = torch.ops.aten.gelu_backward(grad, x, approximate="tanh" if tanh else "none")
    sum_cols.copy_(out.sum(0, keepdim=True))
    joined: Tensor = out
    return joined


def join(query: Tensor, key: Tensor, value: Tensor, sum_cols: Tensor) -> Tensor:
    """The gradients of q, k and v side by side; their sums over rows are the gradient of the bias.

    Shapes: query, key, value (N, C); returned (N, 3 C); sum_cols (P, 3 C).
    """
    out = torch.cat((query, key, value), 1)
    sum_cols.copy_(out.sum(0, keepdim=True))
    return out


def token_order(tokens: Tensor) -> Tensor:
    """What ``embedding_backward`` wants to know of tokens (B, T): here the tokens themselves, (N,)."""
    return tokens.flatten()


def embedding_backward(grad: Tensor, order: Tensor, table: Tensor) -> None:
    """Add every row of the gradient to its token's row of the table's gradient.

    Shapes: grad (N, C); order, as ``token_order`` gave it; table (V, C), in the type of grad or a wider one.
    Accumulates: table.
    """
    table.index_add_(0, order, grad.to(table.dtype))
