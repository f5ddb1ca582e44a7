"""From choices to a training step: which kernels, and which form of the layers.

What this is: ``build_step``. What this is not: the choices (``choices.py``), the step (``step.py``), or the proof that the
kernels compute right on the device at hand (``check.py``).
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from types import ModuleType
from typing import Any

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
    if choices.triton:
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
