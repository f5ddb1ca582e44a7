"""A rank that holds a part of the model: parameters, gradients and moments divided among all ranks (FSDP2).

What this is: ``ShardedEngine``. Every parameter is cut along its first dimension; a layer's whole weights exist only while it computes,
gathered on the way in and, in backward, once more. Memory of a rank for parameters, gradients and moments is 1/n of the whole, for more
traffic than replicas have: two all-gathers and a reduce-scatter against one all-reduce, 3 against 2 times the weights.
What this is not: the optimizer's formula (``sharded_optim.py``) or the files (``sharded_files.py``).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.nn.attention import sdpa_kernel

from posttrainllm.config import TrainConfig
from posttrainllm.engines.base import F32, I32, Batch, State, StepResult, StepScalars, check_memory
from posttrainllm.errors import EngineError
from posttrainllm.pytorch.check import check_loss
from posttrainllm.pytorch.choices import Device, choose, engine_info
from posttrainllm.pytorch.device import attention_kernels, logits_limit, matrix_precision
from posttrainllm.pytorch.distributed_group import Group
from posttrainllm.pytorch.engine import saved_numbers
from posttrainllm.pytorch.gpt import GPT, IGNORED_TARGET, Cache
from posttrainllm.pytorch.loss import CrossEntropy, chunk_rows, cross_entropy
from posttrainllm.pytorch.sharded_files import write_shards
from posttrainllm.pytorch.sharded_model import Head, Work
from posttrainllm.pytorch.sharded_optim import ShardedAdamW
from posttrainllm.wording import setting, worded

PREFIX = "model."


class ShardedEngine:
    """One of several engines that hold a model together; see ``RankEngine``."""

    name = "torch"
    every_rank_infers = True

    def __init__(self, config: TrainConfig, group: Group) -> None:
        """Allocate this rank's part; ``config`` is that of one rank: its rows, its threads.

        Raises: EngineError where memory is short, or for what a sharded model does not have: dropout, Muon.
        """
        _check_settings(config)
        torch.set_num_threads(config.engine.threads)
        self.config = config
        self._group = group
        self._device = group.device
        kind: Device = "cuda" if group.device.type == "cuda" else "cpu"
        self.choices = choose(config, kind, training=True, divided=True)
        self._dtype = torch.bfloat16 if self.choices.precision == "bf16" else torch.float32
        if kind == "cpu":
            check_memory(self.name, self.nbytes)
        self._work, self._shards = self._sharded()
        names = {name.removeprefix(PREFIX): p for name, p in self._work.named_parameters()}
        self._optimizer = ShardedAdamW(names, config.optimizer)
        self._loss = torch.zeros((), device=self._device)
        self._micro_batches = 0
        self._nonfinite = False
        self._results: list[StepResult] = []
        self._cache: Cache | None = None

    def _sharded(self) -> tuple[Work, FSDPModule]:
        """The model and what FSDP made of it, the same object: made without values, cut, and then allocated."""
        n_vocab = self.config.model.n_vocab
        kernel: CrossEntropy = cross_entropy
        if self.choices.triton:
            from posttrainllm.pytorch.kernels import cross_entropy as kernel

            if fault := check_loss(kernel, self.choices, self._device, self._dtype, n_vocab):
                self.choices, kernel = self.choices.refused(fault), cross_entropy
        rows = chunk_rows(n_vocab, self._dtype.itemsize, logits_limit(self._device))
        with torch.device("meta"):
            head = Head(rows, kernel, self.choices.vocabulary_multiple)
            work = Work(GPT(self.config.model), head).eval()
        mesh = init_device_mesh(self._device.type, (self._group.ranks.count,))
        half = self._dtype == torch.bfloat16
        precision = MixedPrecisionPolicy(
            param_dtype=torch.bfloat16 if half else None,
            reduce_dtype=torch.float32 if half else None,
            cast_forward_inputs=False,  # the loss's scale stays float32
        )
        for block in work.model.h:
            if self.choices.compiled:  # inside of what FSDP does before and after a layer
                block.forward = torch.compile(block.forward, dynamic=False)
            fully_shard(block, mesh=mesh, mp_policy=precision)
        shards = fully_shard(work, mesh=mesh, mp_policy=precision, reshard_after_forward=False)
        for module in work.modules():
            if isinstance(module, FSDPModule):  # the loss is divided once, by all tokens: sums
                module.set_gradient_divide_factor(1.0)
                module.set_force_sum_reduction_for_comms(True)
        work.to_empty(device=self._device)
        return work, shards

    @property
    def info(self) -> dict[str, str | int]:
        """See ``Engine.info``."""
        return {**engine_info(self.choices, self._device), "step": "call by call"}

    @property
    def nbytes(self) -> int:
        """Memory of a training step: this rank's part of four times the parameters, two layers and what autograd keeps."""
        model, count = self.config.model, self._group.ranks.count
        rows = self.config.data.batch_size * model.n_ctx
        width, inner = model.n_embd, model.inner
        layer = 4 * width * width + 2 * width * inner
        ends = (model.n_vocab + model.n_ctx) * width
        own = 4 * model.parameters() // count
        return 4 * (own + 2 * layer + 2 * ends + saved_numbers(model, rows))

    def load(
        self,
        params: Mapping[str, F32],
        m: Mapping[str, F32] | None = None,
        v: Mapping[str, F32] | None = None,
    ) -> None:
        """See ``Engine.load``; of each tensor, whole on every rank for a moment, this rank's part is kept."""
        self._optimizer.load(params, m, v)
        self._shards.reshard()
        self._nonfinite = False
        self._results.clear()
        self._cache = None

    def gradients(self, batch: Batch, *, inv_count: float, first: bool) -> None:
        """See ``Engine.gradients``: gradients are summed over ranks at the last micro-batch of a step."""
        if first:
            self._optimizer.zero_grad()
            self._loss.zero_()
            self._micro_batches = 0
        self._micro_batches += 1
        last = self._micro_batches >= self.config.data.accumulation
        self._shards.set_is_last_backward(last)
        scale = torch.tensor(inv_count, device=self._device)
        with self._around():
            loss = self._work(self._ids(batch.tokens), self._ids(batch.targets), scale)
            torch.autograd.backward(loss)
        self._loss += loss.detach()

    def update(self, scalars: StepScalars) -> None:
        """See ``Engine.update``; the decisions rest on sums over all ranks, so that every rank takes the same."""
        squares = self._optimizer.sum_of_squares()
        sums = torch.stack([self._loss.double(), squares.double()])
        torch.distributed.all_reduce(sums)
        loss, total = sums.tolist()
        norm = math.sqrt(total) if total >= 0 else math.nan
        self._nonfinite = self._nonfinite or not math.isfinite(norm)
        if not self._nonfinite:
            self._optimizer.step(norm, scalars.lr, scalars.correction1, scalars.correction2)
        self._results.append(StepResult(loss, norm, not self._nonfinite and math.isfinite(loss)))

    def results(self, wait: bool = True) -> list[StepResult]:
        """See ``Engine.results``."""
        taken, self._results = self._results, []
        return taken

    def gradient_tensors(self) -> dict[str, F32]:
        """See ``Engine.gradient_tensors``."""
        return self._optimizer.whole(self._optimizer.grads())

    @torch.no_grad()
    def loss_sum(self, batch: Batch) -> float:
        """Add up the loss of this rank's rows, in nats."""
        one = torch.ones((), device=self._device)
        with self._around(), torch.compiler.set_stance("force_eager"):
            total = self._work(self._ids(batch.tokens), self._ids(batch.targets), one)
        self._shards.reshard()
        return float(total)

    @torch.no_grad()
    def logits(self, tokens: I32) -> F32:
        """See ``Engine.logits``; the same tokens on every rank."""
        return _array(self._infer(tokens, None))

    @torch.no_grad()
    def prefill(self, tokens: I32, lengths: I32 | None = None) -> F32:
        """See ``Engine.prefill``; the same tokens on every rank."""
        batch, time = tokens.shape
        filled = torch.from_numpy(np.full(batch, time) if lengths is None else lengths)
        filled = filled.to(self._device, torch.int64)
        self._cache = Cache(self.config.model, batch, device=self._device, dtype=self._dtype)
        logits = self._infer(tokens, self._cache)
        self._cache.advance(filled)
        last = logits[torch.arange(batch, device=self._device), filled - 1]
        return _array(last)

    @torch.no_grad()
    def decode(self, tokens: I32) -> F32:
        """See ``Engine.decode``; the same tokens on every rank."""
        cache, capacity = self._cache, self.config.model.n_ctx
        if cache is None or len(cache.lengths) != len(tokens) or cache.longest >= capacity:
            raise EngineError(
                f"decode needs a prefill of {len(tokens)} prompts and room in the cache of {capacity} tokens"
            )
        logits = self._infer(tokens[:, None], cache)
        cache.advance(1)
        return _array(logits[:, 0])

    def state(self) -> State:
        """The parameters, whole, on rank 0; every rank takes part. The moments: ``write_moments``."""
        return State(self._optimizer.whole(self._optimizer.params, self._group.ranks.leads), {}, {})

    def write_moments(self, folder: Path) -> None:
        """Write this rank's part of AdamW's moments; every rank takes part. Raises: OSError."""
        write_shards(folder, self._optimizer.moments(), self._group)

    def close(self) -> None:
        """Free the cache; the rest goes with the engine."""
        self._cache = None

    def _infer(self, tokens: I32, cache: Cache | None) -> Tensor:
        with self._around(), torch.compiler.set_stance("force_eager"):
            logits: Tensor = self._work(self._ids(tokens), cache=cache)
        self._shards.reshard()  # or the next step would compute with these weights
        return logits

    def _ids(self, ids: I32) -> Tensor:
        return torch.from_numpy(np.maximum(ids, IGNORED_TARGET).astype(np.int64)).to(self._device)

    @contextmanager
    def _around(self) -> Iterator[None]:
        """Matrix precision and kernels of attention, as in a ``TorchEngine``; a full device is our error."""
        with ExitStack() as stack:
            if self._device.type == "cuda":
                stack.enter_context(matrix_precision(self.choices.precision != "float32"))
                if self._dtype == torch.bfloat16:
                    kernels = attention_kernels(self.config.model)
                    stack.enter_context(sdpa_kernel(kernels, set_priority=True))
            try:
                yield
            except torch.OutOfMemoryError as error:
                raise EngineError(
                    f"the {self._device.type} device has no memory left: {str(error).splitlines()[0]}",
                    worded(
                        "use a smaller {data.batch_size}, with {data.accumulation} raised as much"
                    ),
                ) from None


def _array(values: Tensor) -> F32:
    found: F32 = values.float().cpu().numpy()
    return found


def _check_settings(config: TrainConfig) -> None:
    """Refuse what a sharded model does not have. Raises: EngineError."""
    settings = {
        "model.dropout": (config.model.dropout, 0.0),
        "optimizer.kind": (config.optimizer.kind, "adamw"),
    }
    for key, (value, usual) in settings.items():
        if value != usual:
            raise EngineError(
                f"a model that is divided among processes has no {key}={value}",
                worded("use {it}, or {engine.parallel=ddp}", it=setting(key, usual)),
            )
