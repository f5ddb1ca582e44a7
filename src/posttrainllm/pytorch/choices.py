"""What the torch engine runs with, and why: device, precision, kernels, graph, torch.compile.

What this is: ``choose``, which turns the settings of ``engine`` and what is there into one ``Choices``,
every part with its reason. Nothing falls back in silence: what was asked for and cannot be had is an
EngineError, what was left open is decided here and shown at the start of a run.
What this is not: the doing (``step.py``).
"""

from __future__ import annotations

import dataclasses
import importlib.util
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal

import torch

from posttrainllm.config import TrainConfig, replace
from posttrainllm.errors import EngineError
from posttrainllm.pytorch.device import device_name
from posttrainllm.wording import worded

Device = Literal["cpu", "cuda", "mps"]
Precision = Literal["float32", "tf32", "bf16"]

COMPILE_SECONDS: Final = 15.0
"""What importing the compiler and translating one block and its gradients takes, in seconds, with room to spare."""

TRITON_SECONDS: Final = 6.0
"""What importing Triton, translating a dozen kernels and checking them takes, in seconds, where it is done for the first time."""

TRITON_GAIN: Final[tuple[float, float]] = (0.35, 0.85)
"""Shares that the kernels save of the two times of ``step_seconds``.

Measured on one H200: from 93.9 to 57 ms a step at GPT-2 124M, from 0.59 to 0.25 ms at small."""

GAIN: Final[tuple[float, float]] = (0.06, 0.2)
"""Shares that torch.compile saves of the time that arithmetic takes, and of the time that starting kernels takes.

Measured on one H200: 6 % at GPT-2 124M, 17 to 20 % at small to xl (docs/torch.md)."""

KERNEL_SECONDS: Final = 2.2e-6
"""A small kernel inside a CUDA graph, start to start."""

CALLS_A_LAYER: Final = 45
CALLS_AROUND: Final = 40
"""Kernels of a step that is not compiled: a layer's forward and backward, and what stands around the layers."""

TRITON_MISSING: Final = "the package triton, part of PyTorch for Linux, is not installed"

WIDEST: Final = 4096
"""C that the fused kernels take at most: a row must fit into one tile."""

RATE: Final[Mapping[str, float]] = {"bf16": 300e12, "tf32": 120e12, "float32": 35e12}
"""Operations a second that a step reaches on a large card, for the estimate of a step's time alone."""


@dataclass(frozen=True)
class Choices:
    """What was chosen; each ``*_reason`` says why."""

    device: Device
    device_reason: str
    precision: Precision
    precision_reason: str
    compiled: bool
    compile_reason: str
    triton: bool
    fused: bool
    kernels_reason: str

    @property
    def graph(self) -> bool:
        """Whether a step is one CUDA graph."""
        return self.device == "cuda"

    @property
    def vocabulary_multiple(self) -> int:
        """The embedding's rows in memory are a multiple of this: tensor cores want one."""
        return 64 if self.device == "cuda" else 1

    def refused(self, fault: str) -> Choices:
        """The same without Triton's kernels, which were found wrong."""
        reason = f"Triton's were refused: {fault}"
        return dataclasses.replace(self, triton=False, fused=False, kernels_reason=reason)

    def info(self) -> dict[str, str | int]:
        """As part of ``engine_info``."""
        return {
            "precision": self.precision,
            "precision_reason": self.precision_reason,
            "step": "one CUDA graph" if self.graph else "call by call",
            "kernels": "fused" if self.fused else "triton and torch" if self.triton else "torch",
            "kernels_reason": self.kernels_reason,
            "triton": "on" if self.triton else "off",
            "compile": "on" if self.compiled else "off",
            "compile_reason": self.compile_reason,
        }


def engine_info(
    choices: Choices, device: torch.device, dtype: torch.dtype = torch.float32
) -> dict[str, str | int]:
    """``Engine.info`` of the engines here: PyTorch, the device, and what was chosen."""
    return {
        "engine": "torch",
        "torch": torch.__version__,
        "device": device.type,
        "device_name": device_name(device),
        "device_reason": choices.device_reason,
        "threads": torch.get_num_threads(),
        "dtype": str(dtype).removeprefix("torch."),
        **choices.info(),
    }


def choose(
    config: TrainConfig, device: Device | None, *, training: bool, divided: bool = False
) -> Choices:
    """Decide everything. ``device`` overrides the configuration's; ``divided``: a process holds a part of the model (FSDP).

    Raises: EngineError for what was asked for by name and is not there.
    """
    wanted = device or (None if config.engine.device == "auto" else config.engine.device)
    where, why_there = choose_device(wanted)
    precision, why_precise = _precision(config, where)
    triton, why_kernels = _triton(config, where, precision, training)
    compiled, why_compiled = False, "nothing is trained here"
    fused, why_fused = False, why_kernels
    if training:
        fused, why_fused = _fused(config, triton, why_kernels, divided)
        if fused and config.engine.compile == "auto":  # GPT-2 124M: 56.7 ms fused, 60.7 compiled
            why_compiled = "the fused kernels are faster"
        elif divided and config.engine.compile == "auto":  # 91 ms without, 94 with, on two H200s
            why_compiled = "layers that are divided among processes gain nothing by it"
        else:
            compiled, why_compiled = _compile(config, where, precision, triton)
    return Choices(
        where, why_there, precision, why_precise, compiled, why_compiled, triton, fused, why_fused
    )


def choose_device(device: Device | None) -> tuple[Device, str]:
    """Return the device and why it was taken. Raises: EngineError."""
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


def as_before(config: TrainConfig, before: Mapping[str, Any]) -> TrainConfig:
    """Fill what the configuration leaves open as ``before``, an engine's ``info``, had it.

    Precision and compilers are taken over on the same kind of device only.
    """
    wanted = None if config.engine.device == "auto" else config.engine.device
    same = before.get("device") == choose_device(wanted)[0]
    kept = ("precision", "compile", "triton")
    left_open = {"threads": 0} | (dict.fromkeys(kept, "auto") if same else {})
    changes = {
        f"engine.{key}": before[key]
        for key, value in left_open.items()
        if getattr(config.engine, key) == value and before.get(key)
    }
    if before.get("device") == "cuda" and not _has_triton():  # then nothing can be as it was
        changes = {key: value for key, value in changes.items() if value != "on"}
    return replace(config, changes)


def _has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None


def _precision(config: TrainConfig, device: Device) -> tuple[Precision, str]:
    asked = config.engine.precision
    tensor_cores = device == "cuda" and torch.cuda.get_device_capability() >= (8, 0)
    if asked == "auto":
        if tensor_cores:
            return "bf16", "several times as fast as float32 on this card; weights stay float32"
        return "float32", f"no fast bfloat16 is known on this {device} device"
    if asked == "tf32" and not tensor_cores:
        raise EngineError(
            "tf32 is a form of arithmetic of NVIDIA's cards from compute capability 8.0 on, "
            f"and the device is {device}",
            worded("leave {engine.precision} out, or ask for float32"),
        )
    assert asked != "float16", "refused with the configuration"
    return asked, "asked for"


def _triton(
    config: TrainConfig, device: Device, precision: Precision, training: bool
) -> tuple[bool, str]:
    """Whether the Triton kernels run: on CUDA, where the package is there and the run wins the time of translating them back.

    Raises: EngineError where they were asked for and cannot run.
    """
    asked = config.engine.triton
    if not training:
        return False, "nothing is trained here"
    missing = ""
    if device != "cuda":
        missing = f"Triton is for CUDA, and the device is {device}"
    elif not _has_triton():
        missing = TRITON_MISSING
    if missing and asked == "on":
        raise EngineError(missing, worded("leave {engine.triton} out"))
    if missing:
        return False, missing
    if asked != "auto":
        return asked == "on", f"engine.triton is {asked}"
    if config.engine.compile == "on":
        return True, "torch.compile, which was asked for, needs Triton anyway"
    won, told = _won(config, precision, TRITON_GAIN, TRITON_SECONDS)
    return won, f"Triton's kernels: {told}"


def _won(
    config: TrainConfig, precision: Precision, gain: tuple[float, float], price: float
) -> tuple[bool, str]:
    """Whether a run is long enough to win the seconds of a compiler back, and how that was found."""
    parts = step_seconds(config, precision)
    won = config.training.steps * sum(g * part for g, part in zip(gain, parts, strict=True))
    return won > price, (
        f"{config.training.steps:,} steps of about {1e3 * sum(parts):.2g} ms would win back "
        f"{won:.1f} s of the {price:.0f} s that compiling takes"
    )


def _fused(config: TrainConfig, triton: bool, why_not: str, divided: bool) -> tuple[bool, str]:
    """Whether layers run through the fused kernels of ``trunk_kernels.py``."""
    model = config.model
    if not triton:
        return False, why_not
    if divided:
        return False, "layers that are divided among processes are autograd's"
    if config.engine.compile == "on":
        return False, "torch.compile makes the layers' kernels"
    if model.dropout > 0:
        return False, "the fused kernels have no dropout"
    if model.n_embd > WIDEST:
        return False, f"the fused kernels take a width of {WIDEST:,} at most"
    if not config.engine.fuse:
        return False, "engine.fuse is false"
    return True, "additions, biases and LayerNorms joined"


def _compile(
    config: TrainConfig, device: Device, precision: Precision, triton: bool
) -> tuple[bool, str]:
    """Whether torch.compile translates the layers: when asked to, or when that wins its time back."""
    asked = config.engine.compile
    if asked == "on" and device == "cuda" and not _has_triton():
        raise EngineError(
            f"torch.compile needs Triton: {TRITON_MISSING}", worded("leave {engine.compile} out")
        )
    if asked != "auto":
        return asked == "on", "asked for"
    if device != "cuda" or not triton:
        return False, "automatic on CUDA where Triton's kernels run"
    return _won(config, precision, GAIN, COMPILE_SECONDS)


def step_seconds(config: TrainConfig, precision: Precision) -> tuple[float, float]:
    """Estimate a step on a large card, not compiled: seconds of arithmetic, and of starting kernels.

    By formula and not by the clock, so that two runs of one configuration choose alike.
    """
    calls = config.data.accumulation * (CALLS_A_LAYER * config.model.n_layer + CALLS_AROUND)
    return config.flops_per_step / RATE[precision], calls * KERNEL_SECONDS
