"""The torch engine: PyTorch's kernels and autograd behind the same protocol as the other engines.

What this is: ``TorchEngine``, which trains and runs ``pytorch.gpt.GPT`` on the CPU, CUDA or MPS. It
alone offers dropout, Muon and bfloat16.
What this is not: an engine that runs programs; it has a model of its own, and therefore is the
witness that the tests hold the programs to. Read next: ``pytorch/step.py``, the training step;
``pytorch/choices.py``, what it runs with.

Two modules share the arenas: ``trained`` is what steps run through, in the chosen precision and with the
padded vocabulary; ``module`` is float32 and writes, evaluates and answers: it computes what a
checkpoint of this moment would.

The same seed gives bit-identical losses on the same machine with the same PyTorch on the CPU, for
one number of threads; with another number PyTorch may sum in another order. On CUDA and MPS nothing
of the kind is promised.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Literal

import numpy as np

from posttrainllm.config import GPTConfig, TrainConfig
from posttrainllm.config import replace as with_settings
from posttrainllm.engines.base import (
    F32,
    I32,
    Batch,
    State,
    StepResult,
    StepScalars,
    Tensors,
    TooLargeError,
    check_memory,
)
from posttrainllm.errors import EngineError
from posttrainllm.machine import available_threads
from posttrainllm.pytorch.needed import torch_missing
from posttrainllm.wording import worded

try:
    import torch
except ModuleNotFoundError as error:
    if error.name != "torch":
        raise
    raise torch_missing() from None
from torch.nn.attention import sdpa_kernel

from posttrainllm.pytorch.arena import Arenas, padded_vocabulary
from posttrainllm.pytorch.batches import check_targets, check_tokens
from posttrainllm.pytorch.build import build_step
from posttrainllm.pytorch.calls import PARTS
from posttrainllm.pytorch.check import check_kernels, use_calls
from posttrainllm.pytorch.choices import Choices, Device, choose, engine_info
from posttrainllm.pytorch.device import attention_kernels, logits_limit, matrix_precision
from posttrainllm.pytorch.gpt import GPT
from posttrainllm.pytorch.loss import chunk_rows
from posttrainllm.pytorch.optim import muon_names
from posttrainllm.pytorch.step import Reduce
from posttrainllm.pytorch.writer import Writer


class TorchEngine:
    """Trains and runs the model of a configuration with PyTorch.

    ``device`` None takes the configuration's. ``dtype`` float64 is for tests; arrays are then given
    back in float64, too. ``reduce`` sums gradients and loss over ranks. Without ``training`` there
    is no room for gradients and moments.

    The number of threads is PyTorch's: it holds for the whole process, and the last engine made decides.
    """

    name = "torch"

    def __init__(
        self,
        config: TrainConfig,
        device: Device | None = None,
        dtype: Literal["float32", "float64"] = "float32",
        *,
        training: bool = True,
        reduce: Reduce | None = None,
    ) -> None:
        """Allocate the model; its values come with ``load``.

        Raises: EngineError where the device is not there or cannot do the dtype, TooLargeError where
        memory is short.
        """
        if dtype == "float64":
            config = with_settings(config, {"engine.precision": "float32", "engine.triton": "off"})
        self.choices: Choices = choose(config, device, training=training)
        chosen = self.choices.device
        if chosen == "mps" and dtype == "float64":
            raise EngineError("device mps has no float64", hint="use the CPU for float64")
        torch.set_num_threads(config.engine.threads or available_threads())
        self.config = config
        self._training = training
        self._device = torch.device(chosen)
        self._dtype = {"float32": torch.float32, "float64": torch.float64}[dtype]
        self._working = torch.bfloat16 if self.choices.precision == "bf16" else self._dtype
        self._check_memory()
        with self._out_of_memory():
            self._allocate(reduce)

    def _allocate(self, reduce: Reduce | None) -> None:
        model, muon = self.config.model, self.config.optimizer.kind == "muon"
        self._arenas = Arenas(
            model,
            device=self._device,
            dtype=self._dtype,
            working=self._working,
            n_vocab=padded_vocabulary(model.n_vocab, self.choices.vocabulary_multiple),
            apart=muon_names(model) if muon else frozenset(),
            training=self._training,
        )
        with torch.device("meta"):
            self.module = GPT(model).eval()
            self.trained = GPT(self._arenas.padded).train(model.dropout > 0)
        self.module.load_state_dict(self._arenas.params, assign=True)
        self._writer = Writer(self.module, self._device, self._dtype)
        if not self._training:
            return
        self._step = build_step(
            self.config, self.choices, self.trained, self._arenas, self._around, reduce
        )

    @property
    def info(self) -> dict[str, str | int]:
        """See ``Engine.info``."""
        info = engine_info(self.choices, self._device, self._dtype)
        return info | ({"writing": self._writer.trouble} if self._writer.trouble else {})

    @property
    def nbytes(self) -> int:
        """Memory of a training step: the arenas exactly, what lives during a step by a formula."""
        return self._arenas.nbytes + (self._transient() if self._training else 0)

    def _transient(self) -> int:
        """Bytes between the first kernel of a step and its last: what autograd keeps, gradients of parameters, partial sums."""
        model = self.config.model
        rows = self.config.data.batch_size * model.n_ctx
        chunk = min(
            rows, chunk_rows(model.n_vocab, self._working.itemsize, logits_limit(self._device))
        )
        numbers = saved_numbers(model, rows) + 2 * chunk * model.n_vocab + model.parameters()
        sums = PARTS * vector_numbers(model) * self._dtype.itemsize if self.choices.fused else 0
        return numbers * self._working.itemsize + sums

    def _check_memory(self) -> None:
        """Ask for what is taken here and while training, with the copies of the state of a checkpoint."""
        numbers = self.config.model.parameters()
        working = self._working.itemsize if self._working != self._dtype else 0
        needed = numbers * self._dtype.itemsize
        if self._training:
            needed = numbers * (4 * self._dtype.itemsize + working) + self._transient()
        copies = 3 * numbers * self._dtype.itemsize
        if self._device.type == "cpu":
            check_memory(self.name, needed + copies)
        elif self._device.type == "cuda":
            free = torch.cuda.mem_get_info(self._device)[0]
            if needed > free:
                raise TooLargeError(self.name, needed, free)

    @contextmanager
    def _out_of_memory(self) -> Iterator[None]:
        """Turn PyTorch's error into ours: the estimate was too low, or others take memory, too."""
        try:
            yield
        except torch.OutOfMemoryError as error:
            raise EngineError(
                f"the {self._device.type} device has no memory left: {str(error).splitlines()[0]}",
                worded(
                    "use a smaller {data.batch_size}, with {data.accumulation} raised as much, or a smaller model"
                ),
            ) from None

    @contextmanager
    def _around(self) -> Iterator[None]:
        """Matrix precision and kernels of attention of a training step."""
        with ExitStack() as stack:
            if self._device.type == "cuda":
                stack.enter_context(matrix_precision(self.choices.precision != "float32"))
                if self._working == torch.bfloat16:
                    stack.enter_context(
                        sdpa_kernel(attention_kernels(self.config.model), set_priority=True)
                    )
            yield

    @contextmanager
    def _inference(self) -> Iterator[None]:
        """No gradients; products in TF32 where the steps have less: its error is far below theirs."""
        with torch.inference_mode(), ExitStack() as stack:
            if self._device.type == "cuda":
                stack.enter_context(matrix_precision(self.choices.precision != "float32"))
            stack.enter_context(self._out_of_memory())
            yield

    def load(self, params: Tensors, m: Tensors | None = None, v: Tensors | None = None) -> None:
        """See ``Engine.load``; arrays of any float type are taken.

        Raises: EngineError for a missing, unexpected or misshapen tensor; nothing is changed then.
        """
        arenas = self._arenas
        given: list[tuple[Mapping[str, torch.Tensor], Tensors | None]] = [(arenas.params, params)]
        if self._training:
            given += [(arenas.m, m), (arenas.v, v)]
        for views, values in given:
            if values is not None:
                _check(views, values)
        for views, values in given:
            for name, view in views.items():
                if values is None:
                    view.zero_()
                else:
                    view.copy_(torch.from_numpy(np.ascontiguousarray(values[name])))
        arenas.refresh_working()
        self._writer.cache = None
        if self._training:
            self._step.reset()
            if self.choices.graph and not self._step.captured:
                with self._out_of_memory():
                    self._record()

    def _record(self) -> None:
        """Check the kernels on this device, and record the step, compiled where that is chosen."""
        fault = self._agreed(self._refusal())
        if fault and self.choices.triton:
            use_calls(self.config, self._step, self.trained, self._arenas)
            self.choices = self.choices.refused(fault)
        self._step.capture(self.config)

    def _refusal(self) -> str:
        """Why Triton's kernels do not run here, or ""."""
        if not self.choices.triton:
            return self.choices.kernels_reason
        return check_kernels(self.config, self.choices, self._step, self.trained, self._arenas)

    def _agreed(self, refusal: str) -> str:
        """Make one of the refusals of all that train together: here there is nobody else."""
        return refusal

    def state(self) -> State:
        """See ``Engine.state``."""
        arenas = self._arenas
        if not self._training:
            return State(_copies(arenas.params), {}, {})
        return State(_copies(arenas.params), _copies(arenas.m), _copies(arenas.v))

    def gradients(self, batch: Batch, *, inv_count: float, first: bool) -> None:
        """See ``Engine.gradients``. B is free from call to call, and so is T up to n_ctx."""
        check_tokens(self.config.model, batch.tokens)
        check_targets(self.config.model, batch.targets)
        with self._out_of_memory():
            self._step.gradients(
                batch.tokens, batch.targets, inv_count, first, self._dropout_seed(batch.tokens)
            )

    def update(self, scalars: StepScalars) -> None:
        """See ``Engine.update``; from the first norm that is not finite on, nothing changes."""
        with self._out_of_memory():
            self._step.update(scalars)

    def results(self, wait: bool = True) -> list[StepResult]:
        """See ``Engine.results``."""
        return self._step.results(wait)

    def gradient_tensors(self) -> dict[str, F32]:
        """See ``Engine.gradient_tensors``; as they were before the clip."""
        self._step.flush()
        return _copies(self._arenas.grads)

    def loss(self, batch: Batch) -> float:
        """See ``Engine.loss``; without dropout."""
        with self._inference():
            total = self.module.loss_sum(self._tokens(batch.tokens), self._targets(batch.targets))
            return float(total) / max(1, batch.trained)

    def logits(self, tokens: I32) -> F32:
        """See ``Engine.logits``."""
        with self._inference():
            return _array(self.module(self._tokens(tokens)))

    def prefill(self, tokens: I32, lengths: I32 | None = None) -> F32:
        """See ``Engine.prefill``."""
        batch, time = tokens.shape
        with self._inference():
            ids = self._tokens(tokens)
            filled = torch.from_numpy(np.full(batch, time) if lengths is None else lengths)
            filled = filled.to(self._device, torch.int64)
            return _array(self._writer.prefill(ids, filled))

    def decode(self, tokens: I32) -> F32:
        """See ``Engine.decode``. Raises: EngineError when the cache is full."""
        batch, capacity = len(tokens), self.config.model.n_ctx
        cache = self._writer.cache
        if cache is None or len(cache.lengths) != batch or cache.longest >= capacity:
            raise EngineError(
                f"decode needs a prefill of {batch} prompts and room in the cache of "
                f"{capacity} tokens"
            )
        with self._inference():
            return _array(self._writer.decode(self._tokens(tokens[:, None])[:, 0]))

    def close(self) -> None:
        """Free caches and graphs, without which a step runs call by call; the rest goes with the engine."""
        self._writer.forget()
        if self._training:
            self._step.forget_graphs()

    def _tokens(self, tokens: I32) -> torch.Tensor:
        check_tokens(self.config.model, tokens)
        return torch.from_numpy(tokens.astype(np.int64)).to(self._device)

    def _targets(self, targets: I32) -> torch.Tensor:
        """Take any negative target for an ignored one, as the op does, and move them over."""
        check_targets(self.config.model, targets)
        return torch.from_numpy(np.maximum(targets, -1).astype(np.int64)).to(self._device)

    def _dropout_seed(self, tokens: I32) -> int | None:
        """Seed the masks of a micro-batch by the run's seed and its tokens alone; None without dropout.

        So a resumed run draws the masks that it would have drawn, with no generator state in any
        checkpoint.
        """
        if self.config.model.dropout == 0:
            return None
        key = self.config.training.seed.to_bytes(8, "little")
        digest = hashlib.blake2b(tokens.astype("<i4").tobytes(), digest_size=8, key=key).digest()
        return int.from_bytes(digest, "little") >> 1


def saved_numbers(model: GPTConfig, rows: int) -> int:
    """Estimate how many numbers autograd keeps between forward and backward for B*T rows.

    A layer keeps, a row: both LayerNorms' inputs (2 C) and outputs (2 C), q k v (3 C), what
    attention gives (C), the log-sum-exp (H), the MLP before and after GELU (2 F) and the
    statistics (4). The end keeps its LayerNorm's input and output (2 C) and the gradient of that (C).
    """
    layer = 8 * model.n_embd + 2 * model.inner + model.n_head + 4
    return rows * (model.n_layer * layer + 3 * model.n_embd)


def vector_numbers(model: GPTConfig) -> int:
    """Count the numbers of biases and LayerNorms: two norms and four biases a layer, and the last norm."""
    return model.n_layer * (9 * model.n_embd + model.inner) + 2 * model.n_embd


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


def _array(tensor: torch.Tensor) -> F32:
    found: F32 = tensor.cpu().numpy()
    return found


def _copies(views: Mapping[str, torch.Tensor]) -> dict[str, F32]:
    return {name: np.array(view.cpu().numpy()) for name, view in views.items()}
