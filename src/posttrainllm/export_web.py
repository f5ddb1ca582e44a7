"""What browser and node must know, as one JSON file: programs, op table, presets, schema.

What this is: ``python -m posttrainllm.export_web FOLDER`` writes ``posttrainllm.json`` and copies the
WebAssembly modules and the WGSL kernels beside it. TypeScript repeats none of it: a program's sizes are letters, its numbers
that are settings are the settings' names, and ``web/src/runtime`` puts the values of a configuration in.
What this is not: the programs of one configuration, which is ``Program.to_json``.
"""

from __future__ import annotations

import argparse
import json
import shutil
from collections.abc import Collection
from importlib.resources import files as package_files
from pathlib import Path
from typing import Any, get_args

from posttrainllm import __version__
from posttrainllm.config import (
    PRESETS,
    GPTConfig,
    OptimizerConfig,
    load_config,
    schema_json,
    settings_of,
)
from posttrainllm.control import Init, Schedule
from posttrainllm.engines.wasm_engine import WasmEngine
from posttrainllm.engines.webgpu.engine import WebGpuEngine
from posttrainllm.engines.webgpu.tuning import wgsl_digest
from posttrainllm.export_site import site
from posttrainllm.extent import Extent
from posttrainllm.fuse import fuse
from posttrainllm.gallery.catalogue import FOLDER as MODELS
from posttrainllm.inspection import inspection_programs
from posttrainllm.kernels.build import build_id, library_path
from posttrainllm.kernels.build_wasm import PAGES, WASM
from posttrainllm.model import inference_programs, training_programs
from posttrainllm.ops import ADD, BETA, CHUNK, CLIP, OPS, SCALARS, WRITE, Operand
from posttrainllm.plan import ALIGN, ARENAS, CHUNK_BYTES, CHUNK_ROWS, PARTS
from posttrainllm.program import FORMAT, ROWS, Program
from posttrainllm.runs.export_form import files, tinygpt_form
from posttrainllm.text.corpus import default_corpus_path
from posttrainllm.text.counting import NAMES
from posttrainllm.training.importing import TRAINING
from posttrainllm.training.selfcheck import CHECKED, NORM_LIMIT
from posttrainllm.training.selfcheck import LIMIT as CHECK_LIMIT
from posttrainllm.training.selfcheck import STEPS as CHECK_STEPS
from posttrainllm.training.starting import GENTLER
from posttrainllm.training.writing import ACTIONS, MOST_SHOWN, SENTENCES, WARNINGS

FILE = "posttrainllm.json"

# Sizes that no two of a program's dims share by accident: they tell which setting a dim comes from.
_BATCH, _TIME = 97, 89


def export() -> dict[str, Any]:
    """Everything that another host needs beside the kernels."""
    return {
        "format": FORMAT,
        "version": __version__,
        "ops": [
            {
                "name": op.name,
                "outputs": [_operand(operand) for operand in op.outputs],
                "inputs": [_operand(operand) for operand in op.inputs],
                "sizes": list(op.sizes),
                "attrs": list(op.attrs),
            }
            for op in OPS.values()
        ],
        "accumulate": {"write": WRITE, "add": ADD, "beta": BETA, "chunk": CHUNK},
        "rows": ROWS,
        "scalars": list(SCALARS),
        "clip": list(CLIP),
        "plan": {
            "align": ALIGN,
            "parts": list(PARTS),
            "arenas": ARENAS,
            "chunk_bytes": CHUNK_BYTES,
            "chunk_rows": CHUNK_ROWS,
            "inner_ratio": _inner_ratio(),
        },
        "control": {"inits": list(get_args(Init)), "schedules": list(get_args(Schedule))},
        "wasm": {
            "pages": PAGES,
            "builds": {build: build_id(build, WASM) for build in WASM.processors},
        },
        "webgpu": {
            "kernels": wgsl_digest(),
            "check": {
                "preset": CHECKED,
                "steps": CHECK_STEPS,
                "loss": CHECK_LIMIT,
                "grad_norm": NORM_LIMIT,
            },
        },
        "programs": {
            engine.name: {
                f"{activation}/{'tied' if tied else 'untied'}": _programs(
                    activation, tied, engine.fused_ops
                )
                for activation in ("gelu_new", "gelu")
                for tied in (True, False)
            }
            for engine in (WasmEngine, WebGpuEngine)
        },
        "sets": _sets(),
        "presets": {
            name: {"summary": preset.summary, "settings": settings_of(load_config(name))}
            for name, preset in PRESETS.items()
        },
        "writing": {
            "lines": list(NAMES),
            "most_shown": MOST_SHOWN,
            "sentences": SENTENCES,
            "warnings": list(WARNINGS),
            "actions": [{"name": name, "text": action.tab} for name, action in ACTIONS.items()],
        },
        "schema": json.loads(schema_json()),
        "files": {**files(), "tinygpt": tinygpt_form(TRAINING, GENTLER)},
        "site": site(),
    }


def _operand(operand: Operand) -> dict[str, Any]:
    def shape(letters: tuple[str, ...]) -> list[Any]:
        return [[extent.times, list(extent.dims)] for extent in map(Extent.parse, letters)]

    return {
        "name": operand.name,
        "shape": shape(operand.shape),
        "transposed": operand.transposed and shape(operand.transposed),
        "mode": operand.mode,
        "dtype": operand.dtype,
        "optional": operand.optional,
    }


def _symbolic(activation: str, tied: bool) -> tuple[GPTConfig, OptimizerConfig]:
    """Sections whose numbers are the settings' names: a program takes them as it takes a dim's name."""
    settings: Any = {"n_layer": 1, "n_head": 1, "n_embd": 7, "n_ctx": _TIME, "n_inner": None}
    choices: Any = {"n_vocab": 5, "activation": activation, "tied": tied, "dropout": 0.0}
    model = GPTConfig.model_construct(
        **settings, **choices, layer_norm_epsilon="model.layer_norm_epsilon"
    )
    names: Any = {name: f"optimizer.{name}" for name in OptimizerConfig.model_fields}
    return model, OptimizerConfig.model_construct(**names)


def _inner_ratio() -> int:
    """The MLP's width over the model's where no setting says it."""
    model, _ = _symbolic("gelu_new", True)
    return model.inner // model.n_embd


def _programs(activation: str, tied: bool, fused: Collection[str]) -> dict[str, Any]:
    """All programs of a model, with the fused ops that an engine has."""
    model, optimizer = _symbolic(activation, tied)
    found: dict[str, Program] = inference_programs(model)[0]
    found |= training_programs(model, optimizer, 1)[0]
    found |= inspection_programs(model)[0]
    return {name: json.loads(fuse(program, fused).to_json()) for name, program in found.items()}


def _sets() -> dict[str, dict[str, list[str | int]]]:
    """The programs of each set, with what their batch and their length are: a setting's name or a number."""
    model, optimizer = _symbolic("gelu_new", True)
    sets = {
        "training": training_programs(model, optimizer, _BATCH)[1],
        "inference": inference_programs(model, _BATCH)[1],
        "inspection": inspection_programs(model)[1],
    }
    names: dict[int, str | int] = {_BATCH: "batch", _TIME: "model.n_ctx"}
    return {
        key: {
            name: [names.get(sizes[letter], sizes[letter]) for letter in ("B", "T")]
            for name, sizes in dims.items()
        }
        for key, dims in sets.items()
    }


def write(folder: Path) -> None:
    """Write the file; copy modules, kernels, the default text and the gallery's models. Raises: EngineError when kernels are not built."""
    tables = json.dumps(export(), separators=(",", ":"))
    folder.mkdir(parents=True, exist_ok=True)
    (folder / FILE).write_text(tables, encoding="utf-8")
    for build in WASM.processors:
        source = library_path(build, WASM)
        shutil.copyfile(source, folder / source.name)
    kernels = folder / "wgsl"
    kernels.mkdir(exist_ok=True)
    for entry in package_files("posttrainllm.kernels").joinpath("wgsl").iterdir():
        (kernels / entry.name).write_bytes(entry.read_bytes())
    text = default_corpus_path()
    shutil.copyfile(text, folder / text.name)
    models = folder / "models"
    models.mkdir(exist_ok=True)
    for path in sorted(MODELS.glob("*.*")):
        shutil.copyfile(path, models / path.name)


def main() -> None:
    """Write into the folder that was named."""
    parser = argparse.ArgumentParser(prog="posttrainllm.export_web", description=__doc__)
    parser.add_argument("folder", type=Path)
    write(parser.parse_args().folder)


if __name__ == "__main__":
    main()
