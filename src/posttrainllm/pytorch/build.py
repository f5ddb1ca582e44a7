"""From choices to a training step: which kernels, which form of the layers, and whether they may be trusted.

What this is: ``build_step``, and ``check_fused``, which holds the fused layers to autograd on this very device before the
first step. A card or a driver on which they fail trains with autograd, and the start display says why.
What this is not: the choices (``choices.py``) or the step (``step.py``).
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from types import ModuleType
from typing import Any, Final

import torch

from posttrainllm.config import TrainConfig
from posttrainllm.pytorch.arena import Arenas
from posttrainllm.pytorch.choices import Choices
from posttrainllm.pytorch.device import logits_limit
from posttrainllm.pytorch.gpt import GPT, run_block
from posttrainllm.pytorch.loss import chunk_rows, cross_entropy
from posttrainllm.pytorch.optim import Optimizer
from posttrainllm.pytorch.step import Reduce, TrainingStep
from posttrainllm.pytorch.trunk import AutogradTrunk, FusedTrunk, Trunk

ALLOWED: Final = {"float32": 1e-3, "tf32": 1e-2, "bf16": 0.1}
"""How far fused layers may be from autograd's, as a share of a tensor's norm; a wrong kernel is 1 off or more."""


def build_step(
    config: TrainConfig,
    choices: Choices,
    module: GPT,
    arenas: Arenas,
    around: Callable[[], Any],
    reduce: Reduce | None,
) -> TrainingStep:
    """Put the step of ``module`` together; its parameters become views of the working arena."""
    device, working = arenas.flat_params.device, arenas.flat_working.dtype
    module.load_state_dict(arenas.padded_views(arenas.flat_working), assign=True)
    kernels: ModuleType | None = None
    if choices.triton and arenas.flat_params.dtype == torch.float32:
        kernels = import_module("posttrainllm.pytorch.kernels")
    if choices.compiled:
        module.run_block = torch.compile(run_block, dynamic=False)
    trunk: Trunk = AutogradTrunk(module, arenas)
    if choices.fused:
        trunk = FusedTrunk(module, arenas, import_module("posttrainllm.pytorch.trunk_kernels"))
    return TrainingStep(
        trunk,
        module,
        arenas,
        Optimizer(arenas, config.optimizer, kernels),
        n_vocab=config.model.n_vocab,
        chunk=chunk_rows(arenas.padded.n_vocab, working.itemsize, logits_limit(device)),
        cross_entropy=kernels.cross_entropy if kernels else cross_entropy,
        around=around,
        reduce=reduce,
    )


def check_fused(
    config: TrainConfig, choices: Choices, step: TrainingStep, module: GPT, arenas: Arenas
) -> str:
    """Compare the fused layers with autograd's on random tokens; put autograd's in their place where they fail.

    Gradients in the arena are lost. Returns the reason for the replacement, or "".

    Raises: torch.OutOfMemoryError.
    """
    plain = AutogradTrunk(module, arenas)
    try:
        fault = _difference(config, choices, step, plain, arenas)
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # whatever Triton or a driver comes up with
        lines = str(error).strip().splitlines()
        fault = f"they do not run here: {type(error).__name__}: {lines[0] if lines else ''}"
    if fault:
        step.trunk = plain
    return fault


def _difference(
    config: TrainConfig, choices: Choices, step: TrainingStep, plain: Trunk, arenas: Arenas
) -> str:
    model, device = config.model, arenas.flat_params.device
    shape = (config.data.batch_size, model.n_ctx)
    generator = torch.Generator(device).manual_seed(1)
    tokens = torch.randint(0, model.n_vocab, shape, device=device, generator=generator)
    grad = torch.randn((tokens.numel(), model.n_embd), device=device, generator=generator).to(
        arenas.flat_working.dtype
    )
    found = []
    for trunk in (plain, step.trunk):
        arenas.flat_grads.zero_()
        with step.around(), torch.no_grad():
            hidden = trunk.forward(tokens.int())
            trunk.backward(grad, True)
        found.append({"hidden": hidden.float(), **arenas.views(arenas.flat_grads.clone())})
    wanted, got = found
    errors = {
        name: (got[name] - value).norm() / value.norm().clamp(min=1e-30)
        for name, value in wanted.items()
    }
    limit = ALLOWED[choices.precision]
    odd = {name: error for name, error in errors.items() if not float(error) <= limit}
    if not odd:
        return ""
    name, error = next(iter(odd.items()))
    return f"on this device they differ from autograd's by {float(error):.2g} in {name}"
