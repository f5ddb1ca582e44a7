"""Whether Triton's kernels compute right on the device at hand, asked before the first step of a run.

What this is: ``check_kernels``. On random tokens the fused layers must have autograd's gradients, and the cross-entropy
kernel those of PyTorch's calls. A card, a driver or a compiler on which they fail trains with PyTorch's calls alone, slower and
right, and the start display says why. It takes two steps' time, and the compiled kernels are those that the run needs anyway.
What this is not: the tests (``tests/test_cuda.py``), which are far stricter.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import torch
from torch import Tensor

from posttrainllm.config import TrainConfig
from posttrainllm.pytorch.arena import Arenas
from posttrainllm.pytorch.choices import Choices
from posttrainllm.pytorch.gpt import GPT
from posttrainllm.pytorch.loss import cross_entropy
from posttrainllm.pytorch.optim import Optimizer
from posttrainllm.pytorch.step import TrainingStep
from posttrainllm.pytorch.trunk import AutogradTrunk

ALLOWED: Final = {"float32": 1e-3, "tf32": 1e-2, "bf16": 0.1}
"""How far a tensor may be off, as a share of its norm; a wrong kernel is 1 off or more."""

ROWS: Final = 64  # of logits


def check_kernels(
    config: TrainConfig, choices: Choices, step: TrainingStep, module: GPT, arenas: Arenas
) -> str:
    """Compare kernels with calls on random numbers; put the calls into the step where a kernel fails.

    Gradients in the arena are lost. Returns the reason for the replacement, or "".

    Raises: torch.OutOfMemoryError.
    """
    limit = ALLOWED[choices.precision]
    plain = AutogradTrunk(module, arenas)
    try:
        fault = _of_loss(config, step, arenas, limit)
        if not fault and choices.fused:
            fault = _of_layers(config, step, plain, arenas, limit)
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # whatever Triton or a driver comes up with
        lines = str(error).strip().splitlines()
        fault = f"they do not run here: {type(error).__name__}: {lines[0] if lines else ''}"
    if fault:
        step.trunk, step.cross_entropy = plain, cross_entropy
        step.optimizer = Optimizer(arenas, config.optimizer)
        step.reset()
    return fault


def _of_loss(config: TrainConfig, step: TrainingStep, arenas: Arenas, limit: float) -> str:
    """The loss and its gradient, also of ignored targets."""
    device, kind = arenas.flat_params.device, arenas.flat_working.dtype
    generator = torch.Generator(device).manual_seed(1)
    n_vocab = config.model.n_vocab
    logits = 3 * torch.randn((ROWS, arenas.padded.n_vocab), device=device, generator=generator)
    targets = torch.randint(-1, n_vocab, (ROWS,), device=device, generator=generator).int()
    scale = torch.full((), 1 / ROWS, device=device)
    found = []
    for function in (cross_entropy, step.cross_entropy):
        loss, grad = function(logits.to(kind, copy=True), targets, scale, n_vocab)
        found.append({"the loss": loss, "the gradient of logits": grad.float()})
    return _difference(found[0], found[1], limit)


def _of_layers(
    config: TrainConfig, step: TrainingStep, plain: AutogradTrunk, arenas: Arenas, limit: float
) -> str:
    """The last layer's output and every parameter's gradient."""
    model, device = config.model, arenas.flat_params.device
    shape = (config.data.batch_size, model.n_ctx)
    generator = torch.Generator(device).manual_seed(1)
    tokens = torch.randint(0, model.n_vocab, shape, device=device, generator=generator)
    grad = torch.randn((tokens.numel(), model.n_embd), device=device, generator=generator)
    found = []
    for trunk in (plain, step.trunk):
        arenas.flat_grads.zero_()
        with step.around(), torch.no_grad():
            hidden = trunk.forward(tokens.int())
            trunk.backward(grad.to(arenas.flat_working.dtype), True)
        found.append({"hidden": hidden.float(), **arenas.views(arenas.flat_grads.clone())})
    return _difference(found[0], found[1], limit)


def _difference(wanted: Mapping[str, Tensor], got: Mapping[str, Tensor], limit: float) -> str:
    """Name the first tensor that is further off than allowed."""
    for name, value in wanted.items():
        error = float((got[name] - value).norm() / value.norm().clamp(min=1e-30))
        if not error <= limit:  # also when it is no number
            return f"on this device {name} is off by {error:.2g} of its size"
    return ""
