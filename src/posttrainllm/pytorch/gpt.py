"""GPT-2 as a PyTorch module: the model of this package a second time, independently.

What this is: an ``nn.Module`` whose backward is autograd's. It shares no line with ``model.py`` and
the kernels, so tests hold those to it in float64, and the torch engine trains it. Parameters have
GPT-2's names, shapes and meaning: ``h.0.attn.c_attn.weight`` is (C, 3C) in y = x W + b, and the head
is x wte^T, or x lm_head^T with ``lm_head.weight`` (V, C) where it is not tied.
What this is not: a trainer, or a home of initial values. Every parameter but the weights of the
LayerNorms, which are one, starts at zero and is meant to be loaded.
Read next: ``pytorch/engine.py``, which trains it.

Letters of shapes: B batch, T time, C n_embd, H n_head, D = C / H, F width of the MLP, V n_vocab,
L n_layer, S positions seen.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from posttrainllm.config import GPTConfig

IGNORED_TARGET = -1


class Cache:
    """Keys and values of the positions that each row of a batch has been through.

    Rows may have different lengths: prompts are right-padded, and what the padding left behind is
    overwritten by later tokens before anything can see it.

    Shapes: keys, values (L, B, H, n_ctx, D); lengths (B,), filled positions; ``longest`` is their
    maximum on the host.
    """

    def __init__(
        self,
        config: GPTConfig,
        batch: int,
        *,
        device: torch.device,
        dtype: torch.dtype,
        whole: bool = False,
    ) -> None:
        """Allocate room for n_ctx positions of ``batch`` rows.

        ``whole``: a token looks at all of them, seen or not, so that its calls are always the same.
        """
        self._whole = whole
        shape = (config.n_layer, batch, config.n_head, config.n_ctx, config.head_size)
        self.keys = torch.zeros(shape, device=device, dtype=dtype)
        self.values = torch.zeros(shape, device=device, dtype=dtype)
        self.lengths = torch.zeros(batch, device=device, dtype=torch.int64)
        self.longest = 0

    def restart(self) -> None:
        """Be empty again."""
        self.lengths.zero_()
        self.longest = 0

    def start(self, layer: int, key: Tensor, value: Tensor) -> None:
        """Write one layer's prompts. Shapes: key, value (B, H, T, D)."""
        self.keys[layer, :, :, : key.shape[2]] = key
        self.values[layer, :, :, : key.shape[2]] = value

    def extend(self, layer: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Write one layer's next position of each row, and return what the new tokens see.

        Shapes: key, value (B, H, 1, D); returned keys and values (B, H, S, D), views, and which
        of their positions each row may read (B, 1, 1, S), boolean.
        """
        rows = torch.arange(len(self.lengths), device=self.lengths.device)
        self.keys[layer, rows, :, self.lengths] = key[:, :, 0]
        self.values[layer, rows, :, self.lengths] = value[:, :, 0]
        seen = self.keys.shape[3] if self._whole else self.longest + 1
        visible = torch.arange(seen, device=self.lengths.device) <= self.lengths[:, None]
        keys, values = self.keys[layer, :, :, :seen], self.values[layer, :, :, :seen]
        return keys, values, visible[:, None, None]

    def advance(self, count: int | Tensor) -> None:
        """Count positions as filled, once every layer has written them.

        Shapes: count () or (B,).
        """
        self.lengths += count
        added = count if isinstance(count, int) else int(count.max())
        self.longest += added  # a tensor comes with the prompts, into an empty cache


class Linear(nn.Module):
    """y = x W + b with W stored (I, O), as published; ``nn.Linear`` stores the transpose."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(inputs, outputs))
        self.bias = nn.Parameter(torch.zeros(outputs))

    def forward(self, x: Tensor) -> Tensor:
        """Shapes: x (B, T, I); returned (B, T, O)."""
        return torch.addmm(self.bias, x.flatten(0, 1), self.weight).unflatten(0, x.shape[:2])


class Attention(nn.Module):
    """Causal self-attention of H heads: softmax(q k^T / sqrt(D)) v, then a projection."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.n_head = config.n_head
        self.dropout = config.dropout
        self.c_attn = Linear(config.n_embd, 3 * config.n_embd)
        self.c_proj = Linear(config.n_embd, config.n_embd)

    def forward(self, x: Tensor, layer: int, cache: Cache | None) -> Tensor:
        """Let each position read itself and the ones before it, those in the cache included.

        Shapes: x, returned (B, T, C); T is 1 once the cache has been started.
        """
        query, key, value = (
            part.unflatten(2, (self.n_head, -1)).transpose(1, 2)  # (B, H, T, D)
            for part in self.c_attn(x).chunk(3, dim=2)
        )
        if cache is not None and cache.longest > 0:
            keys, values, visible = cache.extend(layer, key, value)
            out = F.scaled_dot_product_attention(query, keys, values, attn_mask=visible)
        else:
            if cache is not None:
                cache.start(layer, key, value)
            rate = self.dropout if self.training else 0.0
            out = F.scaled_dot_product_attention(query, key, value, dropout_p=rate, is_causal=True)
        projected: Tensor = self.c_proj(out.transpose(1, 2).flatten(2))
        return F.dropout(projected, self.dropout, self.training)


class MLP(nn.Module):
    """Two linear layers with a GELU between them."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.gelu = nn.GELU(approximate="tanh" if config.activation == "gelu_new" else "none")
        self.dropout = config.dropout
        self.c_fc = Linear(config.n_embd, config.inner)
        self.c_proj = Linear(config.inner, config.n_embd)

    def forward(self, x: Tensor) -> Tensor:
        """Shapes: x, returned (B, T, C)."""
        return F.dropout(self.c_proj(self.gelu(self.c_fc(x))), self.dropout, self.training)


class Block(nn.Module):
    """One layer: x + attention(layernorm(x)), then the same with the MLP."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.ln_1 = nn.LayerNorm(config.n_embd, eps=config.layer_norm_epsilon)
        self.attn = Attention(config)
        self.ln_2 = nn.LayerNorm(config.n_embd, eps=config.layer_norm_epsilon)
        self.mlp = MLP(config)

    def forward(self, x: Tensor, layer: int, cache: Cache | None) -> Tensor:
        """Shapes: x, returned (B, T, C)."""
        x = x + self.attn(self.ln_1(x), layer, cache)
        x = x + self.mlp(self.ln_2(x))
        return x


def run_block(block: nn.Module, x: Tensor) -> Tensor:
    """One layer without a cache, as in training: what torch.compile translates, once for all layers.

    Shapes: x, returned (B, T, C).
    """
    out: Tensor = block(x, 0, None)
    return out


class GPT(nn.Module):
    """The whole model, tokens in, logits out; ``run_block`` may be replaced by a compiled one."""

    def __init__(self, config: GPTConfig) -> None:
        """Build it on the current default device and in the default dtype."""
        super().__init__()
        self.config = config
        self.run_block: Callable[[nn.Module, Tensor], Tensor] = run_block
        self.wte = _embedding(config.n_vocab, config.n_embd)
        self.wpe = _embedding(config.n_ctx, config.n_embd)
        self.h = nn.ModuleList(Block(config) for _ in range(config.n_layer))
        self.ln_f = nn.LayerNorm(config.n_embd, eps=config.layer_norm_epsilon)
        if not config.tied:
            self.lm_head = nn.Linear(config.n_embd, config.n_vocab, bias=False)
            nn.init.zeros_(self.lm_head.weight)

    def hidden(self, tokens: Tensor, cache: Cache | None = None) -> Tensor:
        """Compute the last layer's normalized output, which the head turns into logits.

        A cache that is empty takes prompts, later one token a row; the caller then advances it.

        Shapes: tokens (B, T) integers below V, T at most n_ctx; returned (B, T, C).
        """
        if cache is not None and cache.longest > 0:
            assert tokens.shape[1] == 1, "a started cache takes one token a row"
            positions = self.wpe(cache.lengths[:, None])
        else:
            positions = self.wpe.weight[: tokens.shape[1]]
        x = F.dropout(self.wte(tokens) + positions, self.config.dropout, self.training)
        for layer, block in enumerate(self.h):
            x = self.run_block(block, x) if cache is None else block(x, layer, cache)
        normalized: Tensor = self.ln_f(x)
        return normalized

    def head(self, x: Tensor) -> Tensor:
        """Shapes: x (..., C); returned (..., V)."""
        return F.linear(x, self.wte.weight if self.config.tied else self.lm_head.weight)

    def forward(self, tokens: Tensor) -> Tensor:
        """Shapes: tokens (B, T); returned logits (B, T, V)."""
        return self.head(self.hidden(tokens))

    def loss_sum(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """Add up -log p(target) over all positions, leaving out those whose target is -1.

        Shapes: tokens, targets (B, T) int64; returned ().
        """
        logits = self(tokens).flatten(0, 1)
        return F.cross_entropy(
            logits, targets.flatten(), ignore_index=IGNORED_TARGET, reduction="sum"
        )


def _embedding(rows: int, width: int) -> nn.Embedding:
    return nn.Embedding.from_pretrained(torch.zeros(rows, width), freeze=False)
