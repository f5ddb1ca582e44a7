"""The model from tokens to the head's input, for training: twice, with one interface.

``AutogradTrunk``  runs the module and lets autograd differentiate it; dropout and torch.compile are here
``FusedTrunk``     writes a layer's backward out, with operations that are joined with their neighbours

Both leave their gradients in the arenas. Tests hold the second to the first in float64.
What this is not: the head and the loss (``loss.py``) or the step around it (``step.py``).

Letters of shapes: B batch, T time, N = B*T, C n_embd, H n_head, D = C / H, F width of the MLP.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from posttrainllm.pytorch.arena import Arenas
from posttrainllm.pytorch.gpt import GPT
from posttrainllm.pytorch.products import add_product

SMALL: Final = 1 << 22
"""Activations, B T C, up to which products leave a card idle.

A second stream wins 4 % at 8 x 128 x 256 and costs 0.8 % at 32 x 1024 x 768, on one H200."""

LINEAR: Final = ("attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj")
"""The linear layers of a layer."""

Take = Callable[[Sequence[str], Sequence[Tensor] | None], None]
"""Is given gradients by name as they come, to put into their places; None where they are there already."""


class Trunk(Protocol):
    """What a step needs of it; ``backward`` follows the ``forward`` of the same micro-batch."""

    def forward(self, tokens: Tensor) -> Tensor:
        """Shapes: tokens (B, T); returned (N, C), the last LayerNorm's output."""
        ...

    def backward(self, grad: Tensor, first: bool, take: Take | None = None) -> None:
        """Write (``first``) or add the gradients of all parameters but the head's. Shapes: grad (N, C).

        ``take`` does it instead, from the last layer on, each as soon as it is there.
        """
        ...


class AutogradTrunk:
    """The module as it is, differentiated by autograd."""

    def __init__(self, module: GPT, arenas: Arenas) -> None:
        """The module's parameters are views of the working arena."""
        self._module = module
        self._views = arenas.padded_views(arenas.flat_grads)
        self._added = "wte.weight" if module.config.tied else ""  # the head wrote it first
        named = {n: p for n, p in module.named_parameters() if n != "lm_head.weight"}
        self._names, self._parameters = list(named), list(named.values())
        self._hidden: Tensor | None = None
        self._take: Take | None = None
        for name, parameter in named.items():
            parameter.register_hook(partial(self._came, name))

    def forward(self, tokens: Tensor) -> Tensor:
        """See ``Trunk``."""
        with torch.enable_grad():
            self._hidden = self._module.hidden(tokens)
        return self._hidden.detach().flatten(0, 1)

    def backward(self, grad: Tensor, first: bool, take: Take | None = None) -> None:
        """See ``Trunk``."""
        hidden, self._hidden = self._hidden, None
        assert hidden is not None
        self._take = take
        try:
            grads = torch.autograd.grad(hidden, self._parameters, grad.view_as(hidden))
        finally:
            self._take = None
        if take is None:
            self._put(grads, first)

    def _put(self, grads: Sequence[Tensor], first: bool) -> None:
        places = [self._views[name] for name in self._names if name != self._added]
        values = [g for name, g in zip(self._names, grads, strict=True) if name != self._added]
        (torch._foreach_copy_ if first else torch._foreach_add_)(places, values)
        if self._added:
            self._views[self._added].add_(grads[self._names.index(self._added)])

    def _came(self, name: str, grad: Tensor) -> None:
        if self._take is not None:
            self._take([name], [grad])


@dataclass
class _Layer:
    """What a layer keeps for its backward, in the order in which it was made."""

    y1: Tensor
    norm1: tuple[Tensor, Tensor]
    a: Tensor
    qkv: tuple[Tensor, Tensor, Tensor]
    out: Tensor
    y2: Tensor
    norm2: tuple[Tensor, Tensor]
    f: Tensor
    h: Tensor
    g: Tensor


class _Beside:
    """A second stream for work that nothing waits for; without ``small``, and on other devices than CUDA, work is done in turn."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device, priority=-1) if device.type == "cuda" else None
        self._in_use = False
        self._reads: list[tuple[Tensor, ...]] = []
        self._going: list[tuple[Any, list[tuple[Tensor, ...]]]] = []

    def begin(self, small: bool) -> None:
        """Say whether the micro-batch that begins is small. What one left behind that was broken off is waited for."""
        if self._stream is not None and (self._reads or self._going):
            torch.cuda.current_stream().wait_stream(self._stream)
            self._reads, self._going = [], []
        self._in_use = small and self._stream is not None

    @contextmanager
    def __call__(self, *reads: Tensor) -> Iterator[None]:
        """Run the block there, after what was started so far; ``reads`` is what it reads, which is kept until ``meet``."""
        if self._stream is None or not self._in_use:
            yield
            return
        self._stream.wait_stream(torch.cuda.current_stream())
        self._reads.append(reads)
        with torch.cuda.stream(self._stream):
            yield

    def meet(self, behind: int) -> None:
        """Let what follows wait for all blocks but those since the last ``behind`` calls."""
        if self._stream is None or not self._in_use:
            return
        self._going.append((self._stream.record_event(), self._reads))
        self._reads = []
        while len(self._going) > behind:
            torch.cuda.current_stream().wait_event(self._going[0][0])
            del self._going[0]  # not before: others may take what it read


class FusedTrunk:
    """Forward and backward of every layer, call by call; attention alone is left to autograd.

    A residual addition and the LayerNorm after it are one operation, in both directions, and biases' gradients are sums
    that the operations next to them take along. The sums of all vectors' gradients stand in one table of partial sums,
    in the order of the arena, and are added up once.

    On CUDA the gradients of weights, which nothing waits for, run on a stream of their own beside what follows where products are small
    and leave most of a card idle. What they read is kept until they are done.
    """

    def __init__(self, module: GPT, arenas: Arenas, operations: Any) -> None:
        """``operations`` is the module ``calls`` or ``trunk_kernels``."""
        self._module, self._ops = module, operations
        self._p = {name: p.detach() for name, p in module.named_parameters()}
        self._views = arenas.padded_views(arenas.flat_grads)
        self._tanh = module.config.activation == "gelu_new"
        self._eps = module.config.layer_norm_epsilon
        self._tables: dict[int, Tensor] = {}
        self._vectors = arenas.flat_grads[arenas.decayed :]
        self._first = True
        self._beside = _Beside(self._vectors.device)
        self._layers: list[_Layer] = []
        self._order: Any = None
        self._time = 0
        self._last: tuple[Tensor, Tensor, Tensor] | None = None

    def forward(self, tokens: Tensor) -> Tensor:
        """See ``Trunk``."""
        module, (batch, time) = self._module, tokens.shape
        self._beside.begin(tokens.numel() * module.config.n_embd <= SMALL)
        with self._beside(tokens):
            self._order = self._ops.token_order(tokens)
        embedded = F.embedding(tokens, self._p["wte.weight"]) + self._p["wpe.weight"][:time]
        x, delta = embedded.flatten(0, 1), None
        self._layers, self._time = [], time
        for i in range(module.config.n_layer):
            x, delta = self._layer(f"h.{i}.", x, delta, (batch, time))
        y, hidden, *norm = self._norm("ln_f", x, delta)
        self._last = (y, norm[0], norm[1])
        self._beside.meet(0)
        return hidden

    def backward(self, grad: Tensor, first: bool, take: Take | None = None) -> None:
        """See ``Trunk``."""
        assert self._last is not None
        table = self._table(len(grad))
        self._first = first
        count = len(self._layers)
        before = f"h.{count - 1}.mlp.c_proj.bias"
        grad = self._norm_backward("ln_f", grad, None, *self._last, before, table)
        for i in reversed(range(count)):
            before = f"h.{i - 1}.mlp.c_proj.bias" if i else ""
            grad = self._layer_backward(f"h.{i}.", self._layers.pop(), grad, before, table)
            self._beside.meet(0 if take is not None else 1)
            if take is not None:
                take([f"h.{i}.{part}.weight" for part in LINEAR], None)
        with self._beside(table):
            (torch.sum(table, 0, out=self._vectors) if first else self._vectors.add_(table.sum(0)))
        if take is not None:
            self._beside.meet(0)
            take([name for name, p in self._p.items() if p.ndim < 2], None)
        self._embedding_backward(grad)
        self._beside.meet(0)
        self._order = self._last = None
        if take is not None:
            take(["wte.weight", "wpe.weight"], None)

    def _embedding_backward(self, grad: Tensor) -> None:
        """Shapes: grad (B T, C)."""
        tokens, positions = self._views["wte.weight"], self._views["wpe.weight"]
        if self._first and not self._module.config.tied:  # else the head wrote it
            tokens.zero_()
        self._ops.embedding_backward(grad, self._order, tokens)
        each = grad.view(-1, self._time, grad.shape[1])
        used = positions[: self._time]
        if self._first:
            torch.sum(each, 0, dtype=used.dtype, out=used)
            positions[self._time :].zero_()
        else:
            used.add_(each.sum(0, dtype=used.dtype))

    # ---- a layer ------------------------------------------------------------------------------

    def _layer(
        self, name: str, x: Tensor, delta: Tensor | None, shape: tuple[int, int]
    ) -> tuple[Tensor, Tensor]:
        """One layer; returns the residual stream and what is still to be added to it."""
        y1, a, *norm1 = self._norm(name + "ln_1", x, delta)
        width = y1.shape[1]
        qkv = self._linear(name + "attn.c_attn", a)
        q, k, v = (
            part.view(*shape, self._module.config.n_head, -1).transpose(1, 2).requires_grad_()
            for part in qkv.split(width, 1)
        )
        with torch.enable_grad():
            out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        o = out.detach().transpose(1, 2).reshape(-1, width)
        y2, f, *norm2 = self._norm(name + "ln_2", y1, self._linear(name + "attn.c_proj", o))
        h = self._linear(name + "mlp.c_fc", f)
        g = self._ops.gelu(h, self._tanh)
        kept = _Layer(
            y1, (norm1[0], norm1[1]), a, (q, k, v), out, y2, (norm2[0], norm2[1]), f, h, g
        )
        self._layers.append(kept)
        return y2, self._linear(name + "mlp.c_proj", g)

    def _layer_backward(
        self, name: str, kept: _Layer, grad: Tensor, before: str, table: Tensor
    ) -> Tensor:
        """From the gradient of a layer's end to that of its beginning; both of the residual stream, (N, C)."""
        # m = g W + b;  g = gelu(h);  h = f W + b;  f = layernorm(y2);  next y1 = y2 + m
        dg = self._linear_backward(name + "mlp.c_proj", grad, kept.g)
        dh = self._ops.gelu_backward(
            dg, kept.h, self._tanh, self._cols(table, name + "mlp.c_fc.bias")
        )
        df = self._linear_backward(name + "mlp.c_fc", dh, kept.f)
        bias = name + "attn.c_proj.bias"
        grad = self._norm_backward(name + "ln_2", df, grad, kept.y2, *kept.norm2, bias, table)
        # y2 = y1 + o W + b;  o = attention(q, k, v);  q k v = a W + b;  a = layernorm(y1)
        o = kept.out.detach().transpose(1, 2).reshape(grad.shape)
        do = self._linear_backward(name + "attn.c_proj", grad, o)
        batch, _, time, _ = kept.out.shape
        do = do.view(batch, time, self._module.config.n_head, -1).transpose(1, 2)
        parts = torch.autograd.grad(kept.out, kept.qkv, do)
        q, k, v = (part.transpose(1, 2).reshape(grad.shape) for part in parts)
        dqkv = self._ops.join(q, k, v, self._cols(table, name + "attn.c_attn.bias"))
        da = self._linear_backward(name + "attn.c_attn", dqkv, kept.a)
        return self._norm_backward(name + "ln_1", da, grad, kept.y1, *kept.norm1, before, table)

    # ---- its parts ----------------------------------------------------------------------------

    def _norm(
        self, name: str, x: Tensor, delta: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        weight, bias = self._p[name + ".weight"], self._p[name + ".bias"]
        found: tuple[Tensor, Tensor, Tensor, Tensor] = self._ops.layernorm(
            x, delta, weight, bias, self._eps
        )
        return found

    def _norm_backward(
        self, name: str, grad: Tensor, residual: Tensor | None, y: Tensor, mean: Tensor, rstd: Tensor,
        before: str, table: Tensor,
    ) -> Tensor:  # fmt: skip
        """``before`` is the bias that was added into y last, or "" for none."""
        weight, bias = name + ".weight", name + ".bias"
        found: Tensor = self._ops.layernorm_backward(
            grad, residual, y, mean, rstd, self._p[weight],
            self._cols(table, weight), self._cols(table, bias),
            self._cols(table, before) if before else None,
        )  # fmt: skip
        return found

    def _linear(self, name: str, x: Tensor) -> Tensor:
        return torch.addmm(self._p[name + ".bias"], x, self._p[name + ".weight"])

    def _linear_backward(self, name: str, grad: Tensor, x: Tensor) -> Tensor:
        """dx = dy W^T;  dW = x^T dy, into its place. The bias's gradient comes from who made dy."""
        weight = name + ".weight"
        with self._beside(x, grad):
            add_product(self._views[weight], x.T, grad, self._first)
        return grad @ self._p[weight].T

    # ---- partial sums of the gradients of vectors ---------------------------------------------

    def _table(self, rows: int) -> Tensor:
        """Partial sums (P, vectors), zero between tensors for good."""
        count = self._ops.parts(rows)
        if count not in self._tables:
            self._tables[count] = self._vectors.new_zeros(count, len(self._vectors))
        return self._tables[count]

    def _cols(self, table: Tensor, name: str) -> Tensor:
        view = self._views[name]
        start = view.storage_offset() - self._vectors.storage_offset()
        return table[:, start : start + view.numel()]
