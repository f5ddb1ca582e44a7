"""Whether Triton's kernels compute right on the device at hand, asked before the first step of a run.

What this is: ``check_kernels``. On random numbers the fused layers must have autograd's gradients, cross-entropy and
the update those of PyTorch's calls. Where they fail, ``use_calls`` makes the step one of PyTorch's calls alone, slower and
right, and the start display says why. It takes two steps' time, and the compiled kernels are those that the run needs anyway.
What this is not: the tests (``tests/test_cuda.py``), which are far stricter.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Final

import torch
from torch import Tensor

from posttrainllm.config import TrainConfig, load_config
from posttrainllm.errors import EngineError
from posttrainllm.pytorch.arena import Arenas, padded_vocabulary
from posttrainllm.pytorch.choices import Choices
from posttrainllm.pytorch.gpt import GPT
from posttrainllm.pytorch.loss import CrossEntropy, cross_entropy
from posttrainllm.pytorch.optim import Optimizer
from posttrainllm.pytorch.step import TrainingStep
from posttrainllm.pytorch.trunk import AutogradTrunk
from posttrainllm.wording import worded

ALLOWED: Final = {"float32": 1e-3, "tf32": 1e-2, "bf16": 0.1}
"""How far a tensor may be off, as a share of its norm; a wrong kernel is 1 off or more."""

UPDATE: Final = 1e-2
"""The same for an update, where weights may be rounded to bfloat16."""

ROWS: Final = 64  # of logits


def check_kernels(
    config: TrainConfig, choices: Choices, step: TrainingStep, module: GPT, arenas: Arenas
) -> str:
    """Compare kernels with calls on random numbers. Gradients in the arena are lost. Returns what is wrong, or "".

    Raises: torch.OutOfMemoryError; EngineError when the device does not answer any more.
    """
    limit, device = ALLOWED[choices.precision], arenas.flat_params.device

    def compare() -> str:
        kind, padded = arenas.flat_working.dtype, arenas.padded.n_vocab
        n_vocab = config.model.n_vocab
        fault = _of_loss(step.cross_entropy, device, kind, n_vocab, padded, limit)
        fault = fault or _of_update(config, step.optimizer.kernels, device, kind)
        if not fault and choices.fused:
            fault = _of_layers(config, step, AutogradTrunk(module, arenas), arenas, limit)
        return fault

    return _fault(compare, device)


def use_calls(config: TrainConfig, step: TrainingStep, module: GPT, arenas: Arenas) -> None:
    """Put PyTorch's calls into the step, in place of Triton's kernels."""
    if not isinstance(step.trunk, AutogradTrunk):
        step.trunk = AutogradTrunk(module, arenas)
    step.cross_entropy = cross_entropy
    step.optimizer = Optimizer(arenas, config.optimizer)
    step.reset()


def check_loss(
    kernel: CrossEntropy, choices: Choices, device: torch.device, kind: torch.dtype, n_vocab: int
) -> str:
    """Compare the cross-entropy kernel alone, on logits of type ``kind``; returns what is wrong, or "".

    Raises: as ``check_kernels``.
    """
    padded = padded_vocabulary(n_vocab, choices.vocabulary_multiple)
    limit = ALLOWED[choices.precision]
    return _fault(lambda: _of_loss(kernel, device, kind, n_vocab, padded, limit), device)


def _fault(compare: Callable[[], str], device: torch.device) -> str:
    """What ``compare`` found, or what kept it from comparing."""
    try:
        return compare()
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # whatever Triton or a driver comes up with
        lines = str(error).strip().splitlines()
        fault = f"they do not run here: {type(error).__name__}: {lines[0] if lines else ''}"
    if device.type == "cuda":
        try:
            torch.cuda.synchronize(device)  # what still runs would write into later gradients
        except RuntimeError:
            raise EngineError(
                f"Triton's kernels broke the connection to the device: {fault}",
                worded("add {engine.triton=off}"),
            ) from None
    return fault


def _of_loss(
    kernel: CrossEntropy,
    device: torch.device,
    kind: torch.dtype,
    n_vocab: int,
    padded: int,
    limit: float,
) -> str:
    """The loss and its gradient, also of ignored targets."""
    generator = torch.Generator(device).manual_seed(1)
    logits = 3 * torch.randn((ROWS, padded), device=device, generator=generator)
    targets = torch.randint(-1, n_vocab, (ROWS,), device=device, generator=generator).int()
    scale = torch.full((), 1 / ROWS, device=device)
    found = []
    for function in (cross_entropy, kernel):
        loss, grad = function(logits.to(kind, copy=True), targets, scale, n_vocab)
        found.append({"the loss": loss, "the gradient of logits": grad.float()})
    return _difference(found[0], found[1], limit)


def _of_update(
    config: TrainConfig, kernels: ModuleType | None, device: torch.device, kind: torch.dtype
) -> str:
    """Weights, moments and norm after two updates of a small model."""
    generator = torch.Generator(device).manual_seed(1)
    scalars = torch.tensor([1.0, 1e-2, 0.1, 0.05], device=device)
    model = load_config("tiny").model
    drawn: Tensor | None = None
    found = []
    for module in (None, kernels):
        arenas = Arenas(model, device=device, working=kind)
        if drawn is None:
            drawn = torch.randn(arenas.flat_grads.shape, device=device, generator=generator)
        arenas.flat_grads.copy_(drawn)
        optimizer = Optimizer(arenas, config.optimizer, module)
        for _ in range(2):
            optimizer.step(scalars, scalars[0])
        found.append(
            {
                "the norm of gradients": optimizer.norm,
                "the first moment": arenas.flat_m,
                "the second moment": arenas.flat_v,
                "the update": arenas.flat_params,
                "the rounded update": arenas.flat_working.float(),
            }
        )
    return _difference(found[0], found[1], UPDATE)


def _of_layers(
    config: TrainConfig, step: TrainingStep, plain: AutogradTrunk, arenas: Arenas, limit: float
) -> str:
    """The last layer's output and every parameter's gradient: of two micro-batches, where the run has several."""
    model, device = config.model, arenas.flat_params.device
    shape = (config.data.batch_size, model.n_ctx)
    generator = torch.Generator(device).manual_seed(1)
    tokens = torch.randint(0, model.n_vocab, shape, device=device, generator=generator)
    grad = torch.randn((tokens.numel(), model.n_embd), device=device, generator=generator)
    grad = grad.to(arenas.flat_working.dtype)
    found: list[dict[str, Tensor]] = []
    for trunk in (plain, step.trunk):
        arenas.flat_grads.zero_()
        with step.around(), torch.no_grad():
            for first in (True, False) if config.data.accumulation > 1 else (True,):
                hidden = trunk.forward(tokens.int())
                trunk.backward(grad, first)
        grads = arenas.flat_grads if found else arenas.flat_grads.clone()
        found.append({"hidden": hidden.float(), **arenas.views(grads)})
    return _difference(found[0], found[1], limit)


def _difference(wanted: Mapping[str, Tensor], got: Mapping[str, Tensor], limit: float) -> str:
    """Name the first tensor that is further off than allowed."""
    for name, value in wanted.items():
        error = float((got[name] - value).norm() / value.norm().clamp(min=1e-30))
        if not error <= limit:  # also when it is no number
            return f"on this device {name} is off by {error:.2g} of its size"
    return ""
