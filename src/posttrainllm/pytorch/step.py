"""The training step under PyTorch: forward, backward, clip and update over static memory.

What this is: ``TrainingStep``, which takes micro-batches and scalars from the host and leaves the
results of steps in a ring on the device. On CUDA a whole step is one graph: the host copies one
pinned buffer (tokens, targets, scalars), starts the graph and goes on. The same code runs
uncaptured on the CPU and on MPS.
What this is not: the protocol of engines (``engine.py``) or the update's formulas (``optim.py``).

A micro-batch waits until it is known what follows it: the last one of a step runs together with
the update, so a step of k micro-batches is k graphs, and a step of one is one.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from threading import RLock
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from posttrainllm.config import TrainConfig
from posttrainllm.engines.base import I32, StepResult, StepScalars
from posttrainllm.pytorch.arena import Arenas, Views
from posttrainllm.pytorch.gpt import GPT
from posttrainllm.pytorch.loss import CrossEntropy, head_loss
from posttrainllm.pytorch.optim import RING, SCALARS, Optimizer
from posttrainllm.pytorch.recording import recording
from posttrainllm.pytorch.trunk import Trunk

SLOTS = 8  # pinned buffers: how many steps the host may be ahead of the device
READ_EVERY_S = 0.1  # results are copied back this often, or every READ_EVERY steps
READ_EVERY = 64
SEEDING = RLock()


class Reduce(Protocol):
    """Sums the gradients and the loss of a step over ranks, in place, before the update."""

    def bind(self, arena: Tensor, views: Views, head: str) -> None:
        """Learn where gradients are in the arena (n,), and which parameter is the head."""
        ...

    def expect(self, first: bool) -> None:
        """The next backward is the step's last: its gradients come through ``take``, are written (``first``) or added, and sent."""
        ...

    def take(self, names: Sequence[str], grads: Sequence[Tensor] | None) -> None:
        """See ``trunk.Take``."""
        ...

    def __call__(self, gradients: Tensor, loss: Tensor) -> None:
        """Be done. Shapes: gradients (n,), the arena; loss ()."""
        ...


class Inputs:
    """What a micro-batch of one shape brings: on the device one buffer, on the host pinned ones.

    Shapes: tokens, targets (B, T) int32; scalars (4,) in the type of the optimizer.
    """

    def __init__(self, shape: tuple[int, int], device: torch.device, dtype: torch.dtype) -> None:
        """Allocate both sides."""
        count, head = shape[0] * shape[1], len(SCALARS) * dtype.itemsize // 4
        self._on_device = torch.zeros(head + 2 * count, device=device, dtype=torch.int32)
        self.scalars = self._on_device[:head].view(dtype)
        self.tokens = self._on_device[head:][:count].view(shape)
        self.targets = self._on_device[head + count :].view(shape)
        self._cuda = device.type == "cuda"
        size = self._on_device.shape
        self._slots = [
            torch.zeros(size, dtype=torch.int32, pin_memory=self._cuda)
            for _ in range(SLOTS if self._cuda else 1)
        ]
        self._copied = [torch.cuda.Event() for _ in self._slots] if self._cuda else []
        self._next = 0
        self._head, self._kind = head, {4: np.float32, 8: np.float64}[dtype.itemsize]

    def send(self, tokens: I32 | None, targets: I32 | None, scalars: list[float]) -> None:
        """Start the copy of a micro-batch; waits when the host is ``SLOTS`` copies ahead."""
        index, self._next = self._next, (self._next + 1) % len(self._slots)
        if self._cuda:
            self._copied[index].synchronize()
        slot = self._slots[index].numpy()
        slot[: self._head].view(self._kind)[:] = scalars
        if tokens is not None and targets is not None:
            count = tokens.size
            slot[self._head : self._head + count] = tokens.ravel()
            slot[self._head + count :] = targets.ravel()
            self._on_device.copy_(self._slots[index], non_blocking=True)
        else:
            part = slice(0, self._head)
            self._on_device[part].copy_(self._slots[index][part], non_blocking=True)
        if self._cuda:
            self._copied[index].record()


@dataclass(frozen=True)
class _Pending:
    """A micro-batch that the host has and the device has not."""

    tokens: I32
    targets: I32
    inv_count: float
    first: bool
    seed: int | None


Variant = tuple[bool | None, bool]
"""Whether the forward and backward pass writes (True) or adds (False) gradients, or does not run (None);
whether an update follows."""


class TrainingStep:
    """Runs steps on one device; see the module's text."""

    def __init__(
        self,
        trunk: Trunk,
        module: GPT,
        arenas: Arenas,
        optimizer: Optimizer,
        *,
        n_vocab: int,
        chunk: int,
        cross_entropy: CrossEntropy,
        around: Callable[[], Any],
        reduce: Reduce | None = None,
    ) -> None:
        """``trunk`` runs ``module``; ``around`` gives the context of passes: kernels of attention, matrix precision."""
        self.trunk, self._arenas, self.optimizer = trunk, arenas, optimizer
        self._n_vocab, self._chunk, self.cross_entropy = n_vocab, chunk, cross_entropy
        self.around, self._reduce = around, reduce
        self._device = arenas.flat_params.device
        self._dtype = arenas.flat_params.dtype
        self.loss = torch.zeros((), device=self._device, dtype=self._dtype)
        grads = arenas.padded_views(arenas.flat_grads)
        head = "wte.weight" if module.config.tied else "lm_head.weight"
        self._head = dict(module.named_parameters())[head].detach()
        self._head_grad = grads[head]
        self._inputs: dict[tuple[int, int], Inputs] = {}
        self._graphs: dict[tuple[tuple[int, int], Variant], torch.cuda.CUDAGraph] = {}
        self._pool: Any = None
        self._pending: _Pending | None = None
        self._shape = (0, 0)
        self._results = _Results(optimizer)
        if reduce is not None:
            reduce.bind(arenas.flat_grads, grads, head)

    # ---- what a step computes -----------------------------------------------------------------

    def _passes(self, inputs: Inputs, first: bool, reduce: Reduce | None) -> None:
        """Forward and backward of a micro-batch, into the gradients' arena and ``loss``; ``reduce`` is given in the last one."""
        with self.around(), torch.no_grad():
            hidden = self.trunk.forward(inputs.tokens)
            loss, grad = head_loss(
                hidden,
                self._head,
                inputs.targets.flatten(),
                inputs.scalars[0],
                self._head_grad,
                n_vocab=self._n_vocab,
                chunk=self._chunk,
                cross_entropy=self.cross_entropy,
                first=first,
            )
            if reduce is not None:
                reduce.expect(first)
            self.trunk.backward(grad, first, None if reduce is None else reduce.take)
        if first:
            self.loss.copy_(loss)
        else:
            self.loss.add_(loss)

    def _run(self, inputs: Inputs, variant: Variant) -> None:
        first, last = variant
        if first is not None:
            self._passes(inputs, first, self._reduce if last else None)
        if last:
            if self._reduce is not None:
                self._reduce(self._arenas.flat_grads, self.loss)
            self.optimizer.step(inputs.scalars, self.loss)

    # ---- graphs -------------------------------------------------------------------------------

    @property
    def captured(self) -> bool:
        """Whether there are graphs."""
        return bool(self._graphs)

    def capture(self, config: TrainConfig) -> None:
        """Record the graphs of a configuration's micro-batches. State stays as it is; gradients do not."""
        shape = (config.data.batch_size, config.model.n_ctx)
        seed = None if config.model.dropout == 0 else 0  # any will do
        inputs = self._buffers(shape)
        self.optimizer.nonfinite.fill_(1)  # so that no update in here changes anything,
        inputs.scalars.fill_(1)  # and none divides by zero
        variants: list[Variant] = [(True, False), (True, True)]
        if config.data.accumulation > 1:
            variants = [(True, False), (False, False), (False, True)]
        side = torch.cuda.Stream()
        for variant in variants:
            with seeded(self._device, seed):
                side.wait_stream(torch.cuda.current_stream())
                with torch.cuda.stream(side):
                    for _ in range(2):
                        self._run(inputs, variant)
                torch.cuda.current_stream().wait_stream(side)
                with recording(self._pool) as graph:
                    self._run(inputs, variant)
            self._pool = self._pool or graph.pool()
            self._graphs[shape, variant] = graph
        self.reset()

    def forget_graphs(self) -> None:
        """Free what was recorded; NCCL does not end while a graph has its calls."""
        self._graphs.clear()
        self._pool = None

    def _buffers(self, shape: tuple[int, int]) -> Inputs:
        if shape not in self._inputs:
            self._inputs[shape] = Inputs(shape, self._device, self._dtype)
        return self._inputs[shape]

    # ---- what the host calls ------------------------------------------------------------------

    def reset(self) -> None:
        """Forget what is pending, the flag and the results."""
        self._pending = None
        self.optimizer.reset()
        self._results = _Results(self.optimizer)

    def gradients(
        self, tokens: I32, targets: I32, inv_count: float, first: bool, seed: int | None
    ) -> None:
        """Take a micro-batch (B, T); ``seed`` decides its dropout masks."""
        self.flush()
        self._pending = _Pending(tokens, targets, inv_count, first, seed)

    def flush(self) -> None:
        """Run the micro-batch that waits, without an update."""
        if self._pending is not None:
            self._start(self._pending, None)

    def update(self, scalars: StepScalars) -> None:
        """Run the micro-batch that waits and the update."""
        self._start(self._pending, scalars)
        self._results.issued()

    def results(self, wait: bool) -> list[StepResult]:
        """The results since the last time; without ``wait`` those that are on the host already."""
        if wait:
            self.flush()
        return self._results.take(wait)

    def _start(self, batch: _Pending | None, scalars: StepScalars | None) -> None:
        self._pending = None
        numbers = (0.0, 0.0, 1.0, 1.0) if scalars is None else _numbers(scalars)
        if batch is None:
            inputs = self._buffers(self._shape)
            inputs.send(None, None, list(numbers))
            return self._run(inputs, (None, scalars is not None))
        shape = self._shape = batch.tokens.shape
        inputs = self._buffers(shape)
        inputs.send(batch.tokens, batch.targets, [batch.inv_count, *numbers[1:]])
        variant = (batch.first, scalars is not None)
        graph = self._graphs.get((shape, variant))
        with seeded(self._device, batch.seed):
            if graph is None:
                self._run(inputs, variant)
            else:
                graph.replay()


def _numbers(scalars: StepScalars) -> tuple[float, float, float, float]:
    return 0.0, scalars.lr, scalars.correction1, scalars.correction2


class _Results:
    """The way of results from the ring on the device to the trainer."""

    def __init__(self, optimizer: Optimizer) -> None:
        """Start at a ring without results."""
        self._ring = optimizer.ring
        self._cuda, self._cpu = self._ring.is_cuda, self._ring.device.type == "cpu"
        self._host = torch.zeros_like(self._ring, device="cpu", pin_memory=self._cuda)
        self._event = torch.cuda.Event() if self._cuda else None
        self._issued = self._copied = self._taken = 0
        self._waiting: list[StepResult] = []
        self._last_copy = time.monotonic()

    def issued(self) -> None:
        """A step was started."""
        self._issued += 1
        if self._issued - self._taken >= RING // 2:  # nobody asks: make room
            self._collect(wait=True)
            self._copy()
            self._collect(wait=True)
        elif self._cuda and self._copied == self._taken:
            now = time.monotonic()
            if self._issued - self._copied >= READ_EVERY or now - self._last_copy > READ_EVERY_S:
                self._copy()
                self._last_copy = now

    def _copy(self) -> None:
        """Start copying the ring as it is after all steps so far."""
        self._host.copy_(self._ring, non_blocking=self._cuda)
        self._copied = self._issued
        if self._event is not None:
            self._event.record()

    def _collect(self, wait: bool) -> None:
        """Turn copied rows into results, once they are there."""
        if self._event is not None and self._copied > self._taken:
            if wait:
                self._event.synchronize()
            elif not self._event.query():
                return
        for step in range(self._taken, self._copied):
            loss, norm, nonfinite = self._host[step % RING].tolist()
            finite = nonfinite == 0 and bool(np.isfinite(loss))
            self._waiting.append(StepResult(loss, norm, finite))
        self._taken = self._copied

    def take(self, wait: bool) -> list[StepResult]:
        """Results since the last time, in order."""
        due = wait or self._cpu or (not self._cuda and self._issued - self._taken >= READ_EVERY)
        if due and self._copied < self._issued:
            self._collect(wait=True)
            self._copy()
        self._collect(wait=due)
        taken, self._waiting = self._waiting, []
        return taken


@contextmanager
def seeded(device: torch.device, seed: int | None) -> Iterator[None]:
    """Draw from generators that start at ``seed``; the caller's stay where they are. One thread at a time: they are the process's.

    On MPS torch cannot put its generator back. Nothing is done without a seed.
    """
    if seed is None:
        yield
        return
    generators = [torch.default_generator]
    if device.type == "cuda":
        index = torch.cuda.current_device() if device.index is None else device.index
        generators = [torch.cuda.default_generators[index]]
    with SEEDING:
        states = [generator.get_state() for generator in generators]
        try:
            if device.type == "mps":
                torch.mps.manual_seed(seed)
            for generator in generators:
                generator.manual_seed(seed)
            yield
        finally:
            for generator, state in zip(generators, states, strict=True):
                generator.set_state(state)
