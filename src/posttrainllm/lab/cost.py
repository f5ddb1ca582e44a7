"""What a training step costs by formula: bytes moved and held, beside the operations that ``config.TrainConfig.flops_per_step`` counts.

What this is: counts that follow from a configuration alone, so that records of different engines can be put on one scale.
What this is not: what an engine really does; recomputation inside attention, for one, is not counted. The formulas are part of every
record (``FORMULAS``).
"""

from __future__ import annotations

from typing import Final

from posttrainllm.config import TrainConfig
from posttrainllm.machine import available_memory
from posttrainllm.model import training_programs
from posttrainllm.plan import make_plan

FORMULAS: Final = {
    "flops_per_step": "tokens * (6 N + 12 L C T); N all parameters, tokens = batch * accumulation * T",
    "bytes_per_step": (
        "4 * (10 N + 2 tokens L (8 C + 2 F)): weights read twice, gradients written and read, parameters and both moments "
        "read and written; every saved activation written and read once"
    ),
    "planned_bytes": "what the engine takes or, for torch, arenas plus an estimate of what autograd keeps",
    "peak_bytes": "growth of the process's resident memory from before the engine is made to its peak in the first steps",
    "mfu": "flops_per_step / median / peak of the data sheet in this precision (lab/peak.py); null when that is not known",
    "mfu_of_measured": "flops_per_step / median / operations a second of one large matrix product in this precision, timed after the steps",
    "ratio": (
        "median of the baseline divided by this one: torch's faster form, else the first engine; "
        "at the same threads where it has them"
    ),
}


def step_bytes(config: TrainConfig) -> float:
    """Bytes that a training step moves at least, in float32."""
    model = config.model
    saved = config.tokens_per_step * model.n_layer * (8 * model.n_embd + 2 * model.inner)
    return 4.0 * (10 * model.parameters() + 2 * saved)


def planned_bytes(config: TrainConfig) -> int:
    """Bytes of the plan of the training programs, without any engine's own work space."""
    return make_plan(
        *training_programs(config.model, config.optimizer, config.data.batch_size)
    ).nbytes


def fits_float64(config: TrainConfig) -> bool:
    """Whether the plan in float64 takes no more than half of the memory there is (yes when that is unknown)."""
    available = available_memory()
    return available == 0 or 2 * planned_bytes(config) <= available // 2
