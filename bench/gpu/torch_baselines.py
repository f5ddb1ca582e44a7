"""The same training step in PyTorch on CUDA, three ways: what the webgpu engine is measured against.

eager    float32, fused AdamW, clip by global norm
graph    the same step, captured as a CUDA graph
tf32     the loss through torch.compile, products in TF32, captured as a CUDA graph

Nothing is read back between steps. The model is ``pytorch.gpt.GPT`` with ``torch.optim.AdamW``: no line of the engines.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import nn

from posttrainllm.config import TrainConfig
from posttrainllm.pytorch.gpt import GPT

KINDS = ("eager", "graph", "tf32")


class TorchStep:
    """One way to take a training step; ``step(tokens, targets)`` starts it, ``loss()`` waits for it."""

    def __init__(self, config: TrainConfig, kind: str) -> None:
        """Make model and optimizer, warm up, and capture."""
        torch.manual_seed(1)
        torch.set_float32_matmul_precision("high" if kind == "tf32" else "highest")
        with torch.device("cuda"):
            self.model = GPT(config.model).eval()  # no dropout
        for parameter in self.model.parameters():
            if parameter.ndim > 1:
                nn.init.normal_(parameter, std=0.02)
        self.clip = config.optimizer.clip_norm
        decayed = [p for p in self.model.parameters() if p.ndim > 1]
        plain = [p for p in self.model.parameters() if p.ndim < 2]
        groups: list[dict[str, Any]] = [
            {"params": decayed, "weight_decay": config.optimizer.weight_decay},
            {"params": plain, "weight_decay": 0.0},
        ]
        self.optimizer = torch.optim.AdamW(
            groups,
            lr=1e-4,
            betas=(config.optimizer.beta1, config.optimizer.beta2),
            fused=True,
            capturable=kind != "eager",
        )
        shape = (config.data.batch_size, config.model.n_ctx)
        self.tokens = torch.zeros(shape, dtype=torch.int64, device="cuda")
        self.targets = torch.zeros(shape, dtype=torch.int64, device="cuda")
        self.count = shape[0] * shape[1]
        loss_sum: Callable[..., Any] = self.model.loss_sum
        self.loss_sum = torch.compile(loss_sum) if kind == "tf32" else loss_sum
        self.graph: torch.cuda.CUDAGraph | None = None
        if kind != "eager":
            self._capture()
        torch.set_float32_matmul_precision("highest")

    def _step(self) -> torch.Tensor:
        self.optimizer.zero_grad(set_to_none=True)
        loss = self.loss_sum(self.tokens, self.targets) / self.count
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), self.clip)
        self.optimizer.step()
        return loss.detach()  # type: ignore[no-any-return]

    def _capture(self) -> None:
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(3):
                self._step()
        torch.cuda.current_stream().wait_stream(side)
        self.graph = torch.cuda.CUDAGraph()
        self.optimizer.zero_grad(set_to_none=True)
        with torch.cuda.graph(self.graph):
            self.captured = self._step()

    def pinned(self, *arrays: np.ndarray[Any, Any]) -> list[torch.Tensor]:
        """Batches where the copy to the GPU does not wait for them."""
        return [torch.from_numpy(array.astype(np.int64)).pin_memory() for array in arrays]

    def step(self, tokens: torch.Tensor, targets: torch.Tensor) -> None:
        """Start a step on a batch (B, T)."""
        self.tokens.copy_(tokens, non_blocking=True)
        self.targets.copy_(targets, non_blocking=True)
        if self.graph is not None:
            self.graph.replay()
        else:
            self.captured = self._step()

    def loss(self) -> float:
        """The last step's loss; waits."""
        return float(self.captured)
