"""The end of the model in training: head, cross-entropy and their gradients, in one go.

What this is: ``head_loss``, which computes the loss and, since nothing comes after it, at once the
gradients that it sends back. Logits exist for a chunk of rows at a time and become their own gradient
in place, so the largest tensor of the step is held once, in the precision of the products.
What this is not: the definition of the loss, ``GPT.loss_sum``, which the tests hold this to.

    forward    z = x W^T;  lse[r] = log(sum_v exp(z[r,v]));  loss = scale * sum_r (lse[r] - z[r,y[r]])  over y[r] >= 0
    backward   dz[r,v] = scale * (exp(z[r,v] - lse[r]) - [v == y[r]]), 0 where y[r] < 0;  dx = dz W;  dW = dz^T x

Letters of shapes: R rows (B*T), C n_embd, V n_vocab, P the padded vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from posttrainllm.pytorch.products import add_product

CrossEntropy = Callable[[Tensor, Tensor, Tensor, int], tuple[Tensor, Tensor]]
"""(logits (R, P), targets (R,), scale (), V) -> loss (), gradient (R, P); the logits may be overwritten."""


def head_loss(
    x: Tensor,
    weight: Tensor,
    targets: Tensor,
    scale: Tensor,
    grad_weight: Tensor,
    *,
    n_vocab: int,
    chunk: int,
    cross_entropy: CrossEntropy,
    first: bool,
) -> tuple[Tensor, Tensor]:
    """Compute the loss and the gradient of ``x``; the gradient of the weight goes into its arena.

    Shapes: x (R, C); weight, grad_weight (P, C); targets (R,) integers, negative ones are ignored;
    scale (); returned loss () and gradient (R, C).
    Accumulates: grad_weight, which is written when ``first``, else added to.
    """
    grad_x = torch.empty_like(x)
    losses = []
    for start in range(0, len(x), chunk):
        rows = slice(start, start + chunk)
        logits = x[rows] @ weight.T
        loss, grad = cross_entropy(logits, targets[rows], scale, n_vocab)
        del logits
        losses.append(loss)
        torch.mm(grad, weight, out=grad_x[rows])
        add_product(grad_weight, grad.T, x[rows], first and start == 0)
    return losses[0] if len(losses) == 1 else torch.stack(losses).sum(), grad_x


def cross_entropy(
    logits: Tensor, targets: Tensor, scale: Tensor, n_vocab: int
) -> tuple[Tensor, Tensor]:
    """The loss and the gradient of the logits in PyTorch's own calls; float32 inside, or wider.

    Shapes: logits, returned gradient (R, P); targets (R,); scale, returned loss ().
    """
    z = logits.float() if logits.dtype in (torch.bfloat16, torch.float16) else logits
    z[:, n_vocab:] = -torch.inf
    kept = (targets >= 0)[:, None]
    index = targets.clamp(min=0).long()[:, None]
    lse = z.logsumexp(1, keepdim=True)
    loss = torch.where(kept, lse - z.gather(1, index), 0).sum().to(scale.dtype) * scale
    z.sub_(lse).exp_().scatter_add_(1, index, torch.full_like(lse, -1.0))
    z.mul_(torch.where(kept, scale.to(z.dtype), 0))
    return loss, z.to(logits.dtype)


def chunk_rows(n_vocab: int, itemsize: int, limit: int) -> int:
    """How many rows of logits fit into ``limit`` bytes; a multiple of 256 where that is possible."""
    rows = max(1, limit // (n_vocab * itemsize))
    return rows // 256 * 256 or rows
