"""TypeScript plans and binds exactly what Python plans and binds: 300 random configurations, and every preset."""

from __future__ import annotations

import hashlib
import json
import random
import struct
from pathlib import Path
from typing import Any

from posttrainllm.config import (
    PRESETS,
    OptimizerConfig,
    TrainConfig,
    load_config,
    replace,
    settings_of,
)
from posttrainllm.engines.wasm_engine import WasmEngine
from posttrainllm.engines.webgpu.engine import WebGpuEngine
from posttrainllm.fuse import fuse
from posttrainllm.model import inference_programs, training_programs
from posttrainllm.plan import Place, Plan, make_plan
from web import assets, run_node

CASES = 300
ENGINES = {engine.name: engine for engine in (WasmEngine, WebGpuEngine)}


def random_config(draw: random.Random) -> TrainConfig:
    n_head = draw.randint(1, 4)
    changes: dict[str, Any] = {
        "model.n_layer": draw.randint(1, 4),
        "model.n_head": n_head,
        "model.n_embd": n_head * draw.randint(1, 40),
        "model.n_ctx": draw.choice([draw.randint(1, 80), 251, 512]),
        "model.n_vocab": draw.choice([2, 13, 256, 1000, 50257]),
        "model.n_inner": draw.choice([None, draw.randint(1, 300)]),
        "model.activation": draw.choice(["gelu", "gelu_new"]),
        "model.tied": draw.random() < 0.7,
        "model.layer_norm_epsilon": draw.choice([1e-5, 3.3e-6]),
        "data.batch_size": draw.randint(1, 9),
        "optimizer.beta1": draw.uniform(0, 0.99),
        "optimizer.weight_decay": draw.uniform(0, 1),
        "optimizer.clip_norm": draw.uniform(0.1, 3),
    }
    return replace(load_config("tiny"), changes)


def cases() -> list[dict[str, Any]]:
    draw = random.Random(6)
    configs = [load_config(preset) for preset in PRESETS] + [
        random_config(draw) for _ in range(CASES)
    ]
    found = []
    for config in configs:
        kind = draw.choice(["training", "inference"])
        batch = config.data.batch_size if kind == "training" else draw.randint(1, 3)
        rows = 1 if kind == "training" else batch
        prompt = {"B": draw.randint(1, rows), "T": draw.randint(1, config.model.n_ctx)}
        found.append(
            {
                "config": config,
                "settings": settings_of(config),
                "engine": draw.choice(list(ENGINES)),
                "kind": kind,
                "batch": batch,
                "smaller": {"prefill": prompt, "decode": {"B": 1}},
            }
        )
    return found


def text(place: Place | None) -> str:
    return (
        "-" if place is None else f"{place.region}:{place.offset}:{'x'.join(map(str, place.shape))}"
    )


def describe(case: dict[str, Any]) -> str:
    config = case["config"]
    optimizer: OptimizerConfig = config.optimizer
    if case["kind"] == "training":
        programs, dims = training_programs(config.model, optimizer, case["batch"])
    else:
        programs, dims = inference_programs(config.model, case["batch"])
    ops = ENGINES[case["engine"]].fused_ops
    programs = {name: fuse(program, ops) for name, program in programs.items()}
    plan: Plan = make_plan(programs, dims)
    inits = {
        buffer.name: buffer.init
        for program in programs.values()
        for buffer in program.instances(config.model.n_layer).values()
        if buffer.init
    }
    lines = [f"bytes {plan.nbytes}"]
    lines += [f"region {r.name} {r.dtype} {r.elements}" for r in plan.regions.values()]
    lines += [
        f"parameter {name} {part} {inits[name]} {text(place)}"
        for name, (part, place) in plan.layout.items()
    ]
    for name in programs:
        lines += [
            f"place {name} {buffer} {text(place)}" for buffer, place in plan.places[name].items()
        ]
        for smaller in ({}, case["smaller"].get(name, {})):
            for call in plan.bind(name, **smaller):
                sizes = ",".join(map(str, call.sizes))
                attrs = ",".join(struct.pack(">d", value).hex() for value in call.attrs)
                lines.append(
                    f"call {name} {call.op} {' '.join(map(text, call.operands))} {sizes} {attrs}"
                )
    return "\n".join(lines)


def test_plans_and_bound_calls_are_those_of_python(tmp_path: Path) -> None:
    tables = assets(tmp_path / "assets") / "posttrainllm.json"
    given = cases()
    file = tmp_path / "cases.json"
    file.write_text(
        json.dumps([{key: case[key] for key in case if key != "config"} for case in given])
    )
    hashes = run_node("test/plans.ts", tables, file).split()
    assert len(hashes) == len(given) == CASES + len(PRESETS)
    for index, (case, got) in enumerate(zip(given, hashes, strict=True)):
        wanted = describe(case)
        if hashlib.sha256(wanted.encode()).hexdigest() != got:
            other = run_node("test/plans.ts", tables, file, str(index)).rstrip("\n")
            assert other.split("\n") == wanted.split("\n"), f"case {index}: {case['settings']}"
