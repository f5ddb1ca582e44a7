"""From a configuration to an engine: who may run here, with which programs, from which weights.

What this is: the one place that knows all engines by name and hands them the model's programs. Engines are imported when they are chosen,
so that nobody needs what they do not use.
What this is not: an engine, or the model. Read next: ``training/trainer.py``.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import NDArray

from posttrainllm.config import (
    PRESETS,
    EngineConfig,
    GPTConfig,
    TrainConfig,
    load_config,
    replace,
)
from posttrainllm.engines.base import (
    Engine,
    ProgramEngine,
    TooLargeError,
    check_memory,
    copied_bytes,
)
from posttrainllm.engines.native_control import initial_values
from posttrainllm.errors import EngineError
from posttrainllm.fuse import fuse
from posttrainllm.int8 import can_round, int8_dims, int8_program
from posttrainllm.model import (
    gradients_program,
    inference_programs,
    model_dims,
    training_programs,
)
from posttrainllm.plan import make_plan
from posttrainllm.program import Program
from posttrainllm.whole_imports import import_whole
from posttrainllm.wording import worded

if TYPE_CHECKING:
    from posttrainllm.pytorch.distributed_group import Group

TORCH_ENGINE = "posttrainllm.pytorch.engine"

HAVE_INT8 = ("cpp", "numpy", "wasm")
"""Engines that can write from int8 weights."""


def training_engine(
    config: TrainConfig,
    *,
    dtype: type[np.floating[Any]] = np.float32,
    before: Mapping[str, Any] | None = None,
    group: Group | None = None,
) -> Engine:
    """The engine of a configuration, set up for training; ``load`` gives it weights.

    ``dtype`` float64 is for proofs and exists on numpy and torch. ``group`` are the processes that train together, which this one leads.
    ``before`` is the ``info`` of the engine that trained the run so far:
    what the configuration leaves open (build, threads, kernels) is then chosen as it was, where that can run here, so that losses
    stay bit-identical. Raises: EngineError when it cannot run here.
    """
    name = config.engine.chosen
    config = _as_before(config, before or {}, ranks=1 if group is None else group.ranks.count)
    try:
        if group is not None:
            from posttrainllm.pytorch.distributed_engine import LeadingEngine

            return LeadingEngine(config, group)
        check_memory(name, least_bytes(config))
        if name == "torch":
            import_whole(TORCH_ENGINE)
            from posttrainllm.pytorch.engine import TorchEngine

            return TorchEngine(config, dtype="float64" if dtype is np.float64 else "float32")
        programs, dims = training_programs(config.model, config.optimizer, config.data.batch_size)
        return _program_engine(name, config.engine, programs, dims, dtype, before)
    except TooLargeError as error:
        raise EngineError(error.message, _what_fits(error.allowed)) from None


def inference_engine(
    model: GPTConfig,
    engine: EngineConfig,
    *,
    batch: int = 1,
    logits: bool = False,
    dtype: type[np.floating[Any]] = np.float32,
) -> Engine:
    """An engine for generating and evaluating ``batch`` rows at a time, without gradients and moments.

    ``logits`` keeps room for logits of every position, which ``Engine.logits`` needs and writing does not.
    Raises: EngineError when it cannot run here.
    """
    name = engine.chosen
    check_memory(name, 4 * model.parameters())  # before a plan of absurd sizes takes its time
    if name == "torch":
        import_whole(TORCH_ENGINE)
        from posttrainllm.pytorch.engine import TorchEngine

        sizes = {f"model.{key}": value for key, value in model.model_dump().items()}
        sizes |= {f"engine.{key}": value for key, value in engine.model_dump().items()}
        config = replace(load_config(), {**sizes, "data.batch_size": batch})
        kind: Literal["float64", "float32"] = "float64" if dtype is np.float64 else "float32"
        return TorchEngine(config, dtype=kind, training=False)
    programs, dims = inference_programs(model, batch, logits=logits)
    if engine.weights == "int8" and name in HAVE_INT8 and can_round(dims["decode"]):
        programs["decode"] = int8_program(programs["decode"])
        dims["decode"] = int8_dims(dims["decode"])
    return _program_engine(name, engine, programs, dims, dtype)


def looking_engine(
    beside: Mapping[str, Any],
    programs: Mapping[str, Program],
    dims: Mapping[str, Mapping[str, int]],
) -> ProgramEngine:
    """An engine for the programs of ``inspection.py``: numpy for a model on numpy, else cpp where it is built.

    ``beside`` is the ``info`` of the engine that the model is on. It runs the programs as they were written, without fused ops.

    Raises: TooLargeError when this machine does not have the memory.
    """
    from posttrainllm.engines.cpp_engine import CppEngine, runnable_builds
    from posttrainllm.engines.numpy_engine import NumpyEngine

    name = beside.get("engine")
    if name == "numpy" or (name != "cpp" and not runnable_builds()):
        return NumpyEngine(programs, dims)
    chosen = beside if name == "cpp" else {}
    threads, build = int(chosen.get("threads", 0)), str(chosen.get("build", ""))
    return CppEngine(programs, dims, threads=threads, build=build)


def least_bytes(config: TrainConfig) -> int:
    """Bytes that training takes on any engine, without a plan, which for absurd sizes takes its time.

    Weights and moments are copied to save them; a batch has ids, positions and indices and leaves at least its residual streams.
    """
    model = config.model
    rows = config.data.batch_size * model.n_ctx
    return 4 * (3 * model.parameters() + rows * (4 + model.n_layer * model.n_embd))


def initial_parameters(model: GPTConfig, seed: int) -> dict[str, NDArray[np.float32]]:
    """First values of every parameter by name: a function of the seed, the name and the element's index alone."""
    program, dims = gradients_program(model), model_dims(model, batch=1)
    values = {}
    for buffer in program.instances(model.n_layer).values():
        if buffer.role == "param" and buffer.init is not None:
            shape = tuple(extent.bind(dims) for extent in buffer.shape)
            count = int(np.prod(shape))
            drawn = initial_values(seed, buffer.name, count, buffer.init, n_layer=model.n_layer)
            values[buffer.name] = drawn.reshape(shape)
    return values


def _what_fits(nbytes: int) -> str:
    """Name the preset with the largest plan that stays below ``nbytes``."""
    planned = {}
    for preset in PRESETS:
        config = load_config(preset)
        sets = training_programs(config.model, config.optimizer, config.data.batch_size)
        plan = make_plan(*sets)
        planned[preset] = plan.nbytes + copied_bytes(plan)
    fitting = [preset for preset, size in planned.items() if size <= nbytes]
    if not fitting:
        return "no preset needs so little; close other programs"
    largest = max(fitting, key=planned.__getitem__)
    return worded(
        "the largest preset that fits is {largest}; a smaller {data.batch_size} or {model.n_ctx} needs less",
        largest=largest,
    )


def differences(info: Mapping[str, Any], before: Mapping[str, Any]) -> list[str]:
    """What decides the last digits of a loss and is not as it was: ``key: then -> now``. Threads count for torch alone."""
    ignored = {"parallel"} if info.get("engine") == "torch" else {"threads"}
    then, now = {"ranks": 1, **before}, {"ranks": 1, **info}
    keys = [key for key in then if key not in ignored and not key.endswith("_reason")]
    return [f"{key}: {then[key]} -> {now.get(key)}" for key in keys if then[key] != now.get(key)]


def _as_before(config: TrainConfig, before: Mapping[str, Any], ranks: int) -> TrainConfig:
    """Fill what the configuration leaves open as the engine of ``before`` had it, on as many processes."""
    name = config.engine.chosen
    if before.get("engine") != name:
        return config
    if before.get("ranks", 1) != ranks:
        before = {key: value for key, value in before.items() if key != "threads"}
    if name == "torch":
        from posttrainllm.pytorch.choices import as_before

        return as_before(config, before)
    if name == "cpp" and not config.engine.cpp_build:
        from posttrainllm.engines.cpp_engine import runnable_builds

        if before.get("build") in runnable_builds():
            return replace(config, {"engine.cpp_build": before["build"]})
    return config


def _program_engine(
    name: str,
    engine: EngineConfig,
    programs: Mapping[str, Program],
    dims: Mapping[str, Mapping[str, int]],
    dtype: type[np.floating[Any]],
    before: Mapping[str, Any] | None = None,
) -> Engine:
    def fused(kind: type[ProgramEngine]) -> Mapping[str, Program]:
        ops = kind.fused_ops if engine.fuse else ()
        return {key: fuse(program, ops) for key, program in programs.items()} if ops else programs

    if name == "numpy":
        from posttrainllm.engines.numpy_engine import NumpyEngine

        return NumpyEngine(fused(NumpyEngine), dims, dtype=dtype)
    if name == "wasm":
        from posttrainllm.engines.wasm_engine import WasmEngine

        return WasmEngine(fused(WasmEngine), dims)
    if name == "webgpu":
        from posttrainllm.engines.webgpu.engine import WebGpuEngine
        from posttrainllm.training.selfcheck import check_half, checked_adapter

        choices = (before or {}).get("choices")
        preferred = json.loads(choices) if choices else None
        adapter = checked_adapter(engine.adapter)
        half = engine.precision == "float16"
        if half:
            check_half(adapter)
        return WebGpuEngine(
            fused(WebGpuEngine), dims, adapter=adapter, preferred=preferred, half=half
        )
    from posttrainllm.engines.cpp_engine import CppEngine

    return CppEngine(fused(CppEngine), dims, threads=engine.threads, build=engine.cpp_build)
