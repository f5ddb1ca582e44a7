"""What a device is and has: its name, room for logits, kernels of attention, precision of products.

What this is: the few places where CUDA, the CPU and MPS differ. The choice between them is in ``choices.py``.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

import torch
from torch.nn.attention import SDPBackend

from posttrainllm.config import GPTConfig
from posttrainllm.machine import processor_name

LOGITS_BYTES: Final = 256 << 20
"""Bytes of logits that a step holds at a time, on a device of unknown size."""

LOGITS_SHARE: Final = 1 / 16
"""And as a share of a card's memory."""


def logits_limit(device: torch.device) -> int:
    """Bytes of logits that a step may hold at a time."""
    if device.type != "cuda":
        return LOGITS_BYTES
    total: int = torch.cuda.get_device_properties(device).total_memory
    return max(LOGITS_BYTES, int(total * LOGITS_SHARE))


def attention_kernels(model: GPTConfig) -> list[SDPBackend]:
    """Kernels of attention in the order of preference."""
    rest = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
    if model.dropout == 0 and model.n_ctx >= 512:
        return [SDPBackend.CUDNN_ATTENTION, *rest]
    return rest


@contextmanager
def matrix_precision(tf32: bool) -> Iterator[None]:
    """Let float32 products run in TF32 or not; the process keeps what it had."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high" if tf32 else "highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def device_name(device: torch.device) -> str:
    """The device as people call it."""
    if device.type == "cuda":
        name: str = torch.cuda.get_device_name(device)
        return name
    if (
        device.type == "cpu"
    ):  # with the vector instructions that PyTorch chose, which decide rounding
        return f"{processor_name()}, {torch.backends.cpu.get_cpu_capability()}"
    return processor_name()
