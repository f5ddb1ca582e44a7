"""Model folders that are damaged or meant to do harm."""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from hostile_pickle import Make, pickled
from import_cases import bpe, model_folder
from saved import (
    edit_json,
    read_tensor_file,
    write_tensor_file,
)

WTE = "transformer.wte.weight"
BIAS = "transformer.h.0.attn.c_attn.bias"
HUGE = 10**18


def hf(change: Callable[[Path], object]) -> Make:
    def make(folder: Path) -> Path:
        model = model_folder(folder)
        change(model)
        return model

    return make


def config(**changes: Any) -> Make:
    return hf(lambda model: edit_json(model / "config.json", **changes))


def weights(change: Callable[[dict, bytes], tuple[Any, bytes]]) -> Make:
    def edit(model: Path) -> None:
        path = model / "model.safetensors"
        write_tensor_file(path, *change(*read_tensor_file(path)))

    return hf(edit)


def entry(name: str = WTE, **changes: Any) -> Make:
    def change(header: dict, data: bytes) -> tuple[dict, bytes]:
        header[name].update(changes)
        return header, data

    return weights(change)


def value(name: str, number: float) -> Make:
    def change(header: dict, data: bytes) -> tuple[dict, bytes]:
        start = header[name]["data_offsets"][0]
        return header, data[:start] + struct.pack("<f", number) + data[start + 4 :]

    return weights(change)


def rename(old: str, new: str) -> Make:
    def change(header: dict, data: bytes) -> tuple[dict, bytes]:
        header[new] = header.pop(old)
        return header, data

    return weights(change)


def sharded(change: Callable[[dict[str, Any], Path], object]) -> Make:
    """Cut the weights into two files with an index, then damage them."""

    def edit(model: Path) -> None:
        header, data = read_tensor_file(model / "model.safetensors")
        header.pop("__metadata__", None)
        names = sorted(header)
        index: dict[str, str] = {}
        for number, part in enumerate((names[: len(names) // 2], names[len(names) // 2 :]), 1):
            file = f"model-0000{number}-of-00002.safetensors"
            piece, content = {}, b""
            for name in part:
                begin, end = header[name]["data_offsets"]
                offsets = [len(content), len(content) + end - begin]
                piece[name] = {**header[name], "data_offsets": offsets}
                content += data[begin:end]
                index[name] = file
            write_tensor_file(model / file, piece, content)
        (model / "model.safetensors").unlink()
        document = {"metadata": {"total_size": len(data)}, "weight_map": index}
        change(document, model)
        (model / "model.safetensors.index.json").write_text(json.dumps(document))

    return hf(edit)


def whole_shards(folder: Path) -> Path:
    """The same with nothing damaged."""
    return sharded(lambda document, model: None)(folder)


def only_pickle(name: str) -> Make:
    def edit(model: Path) -> None:
        (model / "model.safetensors").unlink()
        (model / name).write_bytes(pickled(model.parent))

    return hf(edit)


def tokenizer(change: Callable[[dict[str, Any]], object]) -> Make:
    def make(folder: Path) -> Path:
        model = model_folder(folder, n_vocab=300)
        document = bpe(300)
        change(document)
        (model / "tokenizer.json").write_text(json.dumps(document))
        return model

    return make


def raw(name: str, content: bytes) -> Make:
    return hf(lambda model: (model / name).write_bytes(content))


def link(name: str) -> Make:
    def edit(model: Path) -> None:
        (model / name).rename(model.parent / "secret")
        (model / name).symlink_to("../secret")

    return hf(edit)


def pipe(name: str) -> Make:
    def edit(model: Path) -> None:
        (model / name).unlink(missing_ok=True)
        os.mkfifo(model / name)

    return hf(edit)


def holes(folder: Path) -> Path:
    """A file that claims terabytes and takes no room on the disk."""
    model = model_folder(folder)
    sizes = {"n_layer": 1, "n_head": 1, "n_embd": 65_536, "n_positions": 1, "vocab_size": 3_000_000}
    edit_json(model / "config.json", **sizes, n_inner=1)
    wide = 65_536
    shapes = {
        WTE: (3_000_000, wide),
        "transformer.wpe.weight": (1, wide),
        "transformer.ln_f.weight": (wide,),
        "transformer.ln_f.bias": (wide,),
    }
    layer = {
        "ln_1.weight": (wide,),
        "ln_1.bias": (wide,),
        "attn.c_attn.weight": (wide, 3 * wide),
        "attn.c_attn.bias": (3 * wide,),
        "attn.c_proj.weight": (wide, wide),
        "attn.c_proj.bias": (wide,),
        "ln_2.weight": (wide,),
        "ln_2.bias": (wide,),
        "mlp.c_fc.weight": (wide, 1),
        "mlp.c_fc.bias": (1,),
        "mlp.c_proj.weight": (1, wide),
        "mlp.c_proj.bias": (wide,),
    }
    shapes |= {f"transformer.h.0.{name}": shape for name, shape in layer.items()}
    header, end = {}, 0
    for name, shape in shapes.items():
        begin, end = end, end + 2 * int(np.prod(shape, dtype=np.int64))
        header[name] = {"dtype": "F16", "shape": list(shape), "data_offsets": [begin, end]}
    path = model / "model.safetensors"
    write_tensor_file(path, header, b"")
    try:
        os.truncate(path, path.stat().st_size + end)
    except OSError:  # a file system without room for it: the refusal is then another one
        os.truncate(path, path.stat().st_size + 2**30)
    return model
