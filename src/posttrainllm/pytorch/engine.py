"""The torch engine: PyTorch's kernels and autograd behind the same protocol as the other engines.

What this is: ``TorchEngine``, which trains and runs ``pytorch.gpt.GPT`` on the CPU, CUDA or MPS. It
alone offers dropout.
What this is not: an engine that runs programs; it has a model of its own, and therefore is the
witness that the tests hold the programs to. Read next: ``pytorch/gpt.py``, ``pytorch/optim.py``.

The same seed gives bit-identical losses on the same machine with the same PyTorch on the CPU, for
one number of threads; with another number PyTorch may sum in another order. On CUDA and MPS nothing
of the kind is promised.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Literal

import numpy as np

from posttrainllm.config import GPTConfig, TrainConfig
from posttrainllm.engines.base import (
    F32,
    I32,
    Batch,
    State,
    StepResult,
    StepScalars,
    Tensors,
    check_memory,
)
from posttrainllm.errors import EngineError
from posttrainllm.machine import available_threads, processor_name

try:
    import torch
except ModuleNotFoundError as error:
    if error.name != "torch":
        raise
    raise EngineError(
        "the torch engine needs PyTorch, which is not installed",
        hint="pip install 'posttrainllm[torch]'",
    ) from None
from posttrainllm.pytorch.gpt import GPT, IGNORED_TARGET, Cache
from posttrainllm.pytorch.optim import ArenaAdamW

Device = Literal["cpu", "cuda", "mps"]


class TorchEngine:
    """Trains and runs the model of a configuration with PyTorch.

    ``device`` None takes CUDA, else MPS, else the CPU. ``dtype`` float64 is for tests; arrays are
    then given back in float64, too.

    The number of threads is PyTorch's, so it holds for the whole process and the engine that was
    made last decides it.
    """

    name = "torch"

    def __init__(
        self,
        config: TrainConfig,
        device: Device | None = None,
        dtype: Literal["float32", "float64"] = "float32",
    ) -> None:
        """Allocate the model; its values come with ``load``.

        Raises: EngineError where the device is not there or cannot do the dtype, TooLarge where
        memory is short.
        """
        chosen, reason = _choose_device(device)
        if chosen == "mps" and dtype == "float64":
            raise EngineError("device mps has no float64", hint="use the CPU for float64")
        torch.set_num_threads(config.engine.threads or available_threads())
        self.config = config
        self._device = torch.device(chosen)
        self._dtype, self._itemsize = {
            "float32": (torch.float32, 4),
            "float64": (torch.float64, 8),
        }[dtype]
        if (
            chosen == "cpu"
        ):  # CUDA and MPS have memory of their own and say themselves when it is used up
            check_memory(self.name, self._needed())
        with torch.device("meta"):
            self.module = GPT(config.model).eval()
        self._optimizer = ArenaAdamW(
            self.module, config.optimizer, device=self._device, dtype=self._dtype
        )
        self._loss = torch.zeros((), device=self._device, dtype=self._dtype)
        self._nonfinite = False
        self._results: list[StepResult] = []
        self._cache: Cache | None = None
        self._reason = reason

    @property
    def info(self) -> dict[str, str | int]:
        """See ``Engine.info``."""
        return {
            "engine": self.name,
            "torch": torch.__version__,
            "device": self._device.type,
            "device_name": _device_name(self._device),
            "device_reason": self._reason,
            "threads": torch.get_num_threads(),
            "dtype": str(self._dtype).removeprefix("torch."),
        }

    @property
    def nbytes(self) -> int:
        """Memory of a training step: four arenas exactly, what autograd keeps by a formula."""
        rows = self.config.data.batch_size * self.config.model.n_ctx
        return self._optimizer.nbytes + saved_numbers(self.config.model, rows) * self._itemsize

    def _needed(self) -> int:
        """What is taken here and while training, with the copies of the state of a checkpoint."""
        rows = self.config.data.batch_size * self.config.model.n_ctx
        arenas = (4 + 3) * self.config.model.parameters()
        return (arenas + saved_numbers(self.config.model, rows)) * self._itemsize

    def load(self, params: Tensors, m: Tensors | None = None, v: Tensors | None = None) -> None:
        """See ``Engine.load``; arrays of any float type are taken.

        Raises: EngineError for a missing, unexpected or misshapen tensor; nothing is changed then.
        """
        optimizer = self._optimizer
        arenas = ((optimizer.params, params), (optimizer.m, m), (optimizer.v, v))
        for views, values in arenas:
            if values is not None:
                _check(views, values)
        for views, values in arenas:
            for name, view in views.items():
                if values is None:
                    view.zero_()
                else:
                    view.copy_(torch.from_numpy(np.ascontiguousarray(values[name])))
        self._nonfinite = False
        self._results.clear()
        self._cache = None

    def state(self) -> State:
        """See ``Engine.state``."""
        optimizer = self._optimizer
        return State(*(_copies(views) for views in (optimizer.params, optimizer.m, optimizer.v)))

    def gradients(self, batch: Batch, *, inv_count: float, first: bool) -> None:
        """See ``Engine.gradients``. B is free from call to call, and so is T up to n_ctx."""
        if first:
            self._optimizer.zero_grad()
            self._loss.zero_()
        tokens, targets = self._tokens(batch.tokens), self._targets(batch.targets)
        with self._dropout(batch.tokens):
            loss = self.module.loss_sum(tokens, targets) * inv_count
        torch.autograd.backward(loss)
        self._loss += loss.detach()

    def update(self, scalars: StepScalars) -> None:
        """See ``Engine.update``; from the first norm that is not finite on, nothing changes."""
        # One wait for the device a step, for both numbers.
        loss, norm = torch.stack([self._loss, self._optimizer.grad_norm()]).tolist()
        self._nonfinite = self._nonfinite or not math.isfinite(norm)
        if not self._nonfinite:
            self._optimizer.clip(norm)
            self._optimizer.step(scalars.lr, scalars.correction1, scalars.correction2)
        finite = not self._nonfinite and math.isfinite(loss)
        self._results.append(StepResult(loss, norm, finite))

    def results(self, wait: bool = True) -> list[StepResult]:
        """See ``Engine.results``."""
        taken, self._results = self._results, []
        return taken

    def gradient_tensors(self) -> dict[str, F32]:
        """See ``Engine.gradient_tensors``; ``update`` overwrites them."""
        return _copies(self._optimizer.grads)

    @torch.inference_mode()
    def loss(self, batch: Batch) -> float:
        """See ``Engine.loss``; without dropout."""
        total = self.module.loss_sum(self._tokens(batch.tokens), self._targets(batch.targets))
        return float(total) / max(1, batch.trained)

    @torch.inference_mode()
    def logits(self, tokens: I32) -> F32:
        """See ``Engine.logits``."""
        logits: F32 = self.module(self._tokens(tokens)).cpu().numpy()
        return logits

    @torch.inference_mode()
    def prefill(self, tokens: I32, lengths: I32 | None = None) -> F32:
        """See ``Engine.prefill``."""
        batch, time = tokens.shape
        ids = self._tokens(tokens)
        filled = torch.from_numpy(np.full(batch, time) if lengths is None else lengths)
        filled = filled.to(self._device, torch.int64)
        self._cache = Cache(self.config.model, batch, device=self._device, dtype=self._dtype)
        hidden = self.module.hidden(ids, self._cache)
        self._cache.advance(filled)
        return self._next_logits(hidden[torch.arange(batch, device=self._device), filled - 1])

    @torch.inference_mode()
    def decode(self, tokens: I32) -> F32:
        """See ``Engine.decode``. Raises: EngineError when the cache is full."""
        batch, capacity = len(tokens), self.config.model.n_ctx
        cache = self._cache
        if cache is None or len(cache.lengths) != batch or cache.longest >= capacity:
            raise EngineError(
                f"decode needs a prefill of {batch} prompts and room in the cache of "
                f"{capacity} tokens"
            )
        hidden = self.module.hidden(self._tokens(tokens[:, None]), cache)
        cache.advance(1)
        return self._next_logits(hidden[:, 0])

    def close(self) -> None:
        """Free the cache; the rest goes with the engine."""
        self._cache = None

    def _next_logits(self, hidden: torch.Tensor) -> F32:
        """Shapes: hidden (B, C); returned (B, V)."""
        logits: F32 = self.module.head(hidden).cpu().numpy()
        return logits

    def _tokens(self, tokens: I32) -> torch.Tensor:
        """Check token ids, since a wrong one kills the whole CUDA context, and move them over."""
        model = self.config.model
        if tokens.shape[1] > model.n_ctx:
            raise EngineError(
                f"{tokens.shape[1]} tokens do not fit into the context: model.n_ctx is {model.n_ctx}"
            )
        if tokens.size and not 0 <= int(tokens.min()) <= int(tokens.max()) < model.n_vocab:
            raise EngineError(
                f"token ids must lie in 0 .. {model.n_vocab - 1}, "
                f"got {tokens.min()} .. {tokens.max()}"
            )
        return torch.from_numpy(tokens.astype(np.int64)).to(self._device)

    def _targets(self, targets: I32) -> torch.Tensor:
        """Take any negative target for an ignored one, as the op does, and move them over."""
        n_vocab = self.config.model.n_vocab
        if targets.size and targets.max() >= n_vocab:
            raise EngineError(
                f"targets must lie in 0 .. {n_vocab - 1}, or be -1; got {targets.max()}"
            )
        ids = np.maximum(targets, IGNORED_TARGET).astype(np.int64)
        return torch.from_numpy(ids).to(self._device)

    @contextmanager
    def _dropout(self, tokens: I32) -> Iterator[None]:
        """Run the model in training mode with masks that depend on the seed and the batch alone.

        So a resumed run draws the masks that it would have drawn, with no generator state in any
        checkpoint, and the caller's generators stay where they are (on MPS torch cannot say that).
        """
        if self.config.model.dropout == 0:
            yield
            return
        seed = self.config.training.seed.to_bytes(8, "little")
        digest = hashlib.blake2b(tokens.astype("<i4").tobytes(), digest_size=8, key=seed).digest()
        on_cuda = [torch.cuda.current_device()] if self._device.type == "cuda" else []
        self.module.train()
        try:
            with torch.random.fork_rng(devices=on_cuda):
                torch.manual_seed(int.from_bytes(digest, "little"))
                yield
        finally:
            self.module.eval()


def saved_numbers(model: GPTConfig, rows: int) -> int:
    """Estimate how many numbers autograd keeps between forward and backward for B*T rows.

    A layer keeps, a row: both LayerNorms' inputs (2 C) and outputs (2 C), q k v (3 C), what
    attention gives (C), the log-sum-exp (H), the MLP before and after GELU (2 F) and the
    statistics (4). The end keeps its LayerNorm's input and output (2 C), the log-probabilities (V)
    and, while it lasts, their gradient and the logits' (2 V).
    """
    layer = 8 * model.n_embd + 2 * model.inner + model.n_head + 4
    end = 2 * model.n_embd + 3 * model.n_vocab
    return rows * (model.n_layer * layer + end)


def _choose_device(device: Device | None) -> tuple[Device, str]:
    """Return the device and why it was taken."""
    there: dict[Device, bool] = {
        "cuda": torch.cuda.is_available(),
        "mps": torch.backends.mps.is_available(),
        "cpu": True,
    }
    if device is None:
        best = next(name for name, is_there in there.items() if is_there)
        return best, "the fastest that PyTorch finds here"
    if not there[device]:
        raise EngineError(
            f"PyTorch {torch.__version__} finds no device {device}",
            hint="devices here: " + ", ".join(name for name, is_there in there.items() if is_there),
        )
    return device, "asked for"


def _device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    if (
        device.type == "cpu"
    ):  # with the vector instructions that PyTorch chose, which decide rounding
        return f"{processor_name()}, {torch.backends.cpu.get_cpu_capability()}"
    return processor_name()


def _check(views: Mapping[str, torch.Tensor], values: Tensors) -> None:
    """Raise EngineError for the first array that is missing, unknown or of another shape."""
    for name in sorted(views.keys() ^ values.keys()):
        what = "is missing" if name in views else "is not part of this model"
        raise EngineError(f"tensor {name!r} {what}")
    for name, view in views.items():
        if values[name].shape != tuple(view.shape):
            raise EngineError(
                f"tensor {name!r} is {values[name].shape} but the model has {tuple(view.shape)}"
            )


def _copies(views: Mapping[str, torch.Tensor]) -> dict[str, F32]:
    return {name: np.array(view.cpu().numpy()) for name, view in views.items()}
