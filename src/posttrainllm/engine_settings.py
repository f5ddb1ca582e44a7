"""The section ``engine`` of a configuration, and what only some engines can do.

What this is: which engine runs, on what and how exactly; and ``check_abilities``, which refuses a
setting that the chosen engine has no use for, by name, before anything runs.
What this is not: the engines, or the choice between devices (``training/engine_choice.py``,
``pytorch/choices.py``). ``sections.py`` holds the other sections.
"""

from __future__ import annotations

from typing import ClassVar, Literal, get_args

from pydantic import Field

from posttrainllm.errors import ConfigError
from posttrainllm.settings import Section
from posttrainllm.wording import setting, worded


class EngineConfig(Section):
    """What runs the program."""

    section: ClassVar[str] = "engine"

    name: Literal["auto", "numpy", "cpp", "wasm", "webgpu", "torch"] = Field(
        default="cpp", description="engine; auto is cpp, which runs everywhere"
    )
    threads: int = Field(
        default=0,
        ge=0,
        le=1024,
        description="threads that compute; 0 is all that this process may use",
    )
    cpp_build: Literal["", "plain", "avx2", "avx512"] = Field(
        default="", description="build of the C++ kernels; empty takes the best one here"
    )
    fuse: bool = Field(
        default=True,
        description="run programs with the fused ops that the engine has; false runs them as written",
    )
    weights: Literal["float32", "int8"] = Field(
        default="float32",
        description="what writing reads token by token: int8 is rounded and a quarter of the "
        "bytes; engines cpp, wasm and numpy",
    )
    adapter: str = Field(
        default="",
        max_length=200,
        description="part of the name of the GPU that webgpu uses; empty takes the best one here",
    )
    device: Literal["auto", "cpu", "cuda", "mps"] = Field(
        default="auto", description="where torch computes; auto is CUDA, else MPS, else the CPU"
    )
    precision: Literal["auto", "float32", "tf32", "bf16", "float16"] = Field(
        default="auto",
        description="arithmetic of training steps; weights and moments are float32 always. torch: "
        "auto is bf16 on a CUDA card that has it, else float32. webgpu: float32, or float16 for "
        "forward products",
    )
    compile: Literal["auto", "on", "off"] = Field(
        default="auto",
        description="torch.compile for torch's training steps; auto compiles on CUDA when the "
        "run is long enough to win the time back",
    )
    triton: Literal["auto", "on", "off"] = Field(
        default="auto",
        description="kernels written for torch on CUDA, which Triton translates when a run starts; "
        "auto takes them when the run is long enough to win the time back",
    )
    parallel: Literal["ddp", "fsdp"] = Field(
        default="ddp",
        description="what several processes of torch divide: ddp the batch alone, fsdp parameters, "
        "gradients and moments too",
    )

    @property
    def chosen(self) -> str:
        """The engine that runs: ``name``, with ``auto`` decided."""
        return "cpp" if self.name == "auto" else self.name


ENGINES = tuple(
    name for name in get_args(EngineConfig.model_fields["name"].annotation) if name != "auto"
)


def check_abilities(engine: EngineConfig, dropout: float, optimizer: str) -> None:
    """Refuse what the chosen engine cannot do or would not look at.

    Raises: ConfigError, naming the setting and what to do.
    """
    if engine.precision == "float16" and engine.name != "webgpu":
        raise ConfigError(
            f"engine {engine.name} has no float16, and engine.precision asks for it",
            worded("use bf16 with {engine.name=torch}, or {engine.name=webgpu}"),
        )
    if engine.weights == "int8" and engine.name in ("torch", "webgpu"):
        raise ConfigError(
            f"engine {engine.name} has no int8 weights, and engine.weights asks for them",
            worded("use {engine.name=cpp}, wasm or numpy, or leave {engine.weights} out"),
        )
    if engine.name == "torch":
        return
    if dropout > 0:
        raise ConfigError(
            f"engine {engine.name} has no dropout, and model.dropout is {dropout}",
            worded("use {engine.name=torch} or {model.dropout=0}"),
        )
    if optimizer != "adamw":
        raise ConfigError(
            f"engine {engine.name} has no optimizer {optimizer}",
            worded("use {engine.name=torch} or {optimizer.kind=adamw}"),
        )
    if engine.precision not in ("auto", "float32", "float16"):
        raise ConfigError(
            f"engine {engine.name} computes in float32, and engine.precision is {engine.precision}",
            worded("use {engine.name=torch} or leave {engine.precision} out"),
        )
    for key in ("device", "compile", "triton", "parallel"):
        value = getattr(engine, key)
        if value != EngineConfig.model_fields[key].default:
            raise ConfigError(
                f"engine.{key} is {value}, which engine {engine.name} does not look at",
                worded("use {engine.name=torch} or leave {it} out", it=setting(f"engine.{key}")),
            )
