""".tinygpt files built and read to the letter of their layout, by code that shares nothing with the package.

Everything here is written from the description alone: struct for the numbers, a list of names in the order of the file, and
arrays in the order (in, out) that the bytes have. docs/formats.md is that description.
"""

from __future__ import annotations

import json
import struct
from dataclasses import dataclass
from typing import Any

import numpy as np

LAYER = [
    ("ln1.weight", "c"),
    ("ln1.bias", "c"),
    ("attn.q_proj.weight", "cc"),
    ("attn.q_proj.bias", "c"),
    ("attn.k_proj.weight", "cc"),
    ("attn.k_proj.bias", "c"),
    ("attn.v_proj.weight", "cc"),
    ("attn.v_proj.bias", "c"),
    ("attn.o_proj.weight", "cc"),
    ("attn.o_proj.bias", "c"),
    ("ln2.weight", "c"),
    ("ln2.bias", "c"),
    ("mlp.fc_in.weight", "cf"),
    ("mlp.fc_in.bias", "f"),
    ("mlp.fc_out.weight", "fc"),
    ("mlp.fc_out.bias", "c"),
]


@dataclass
class Sizes:
    """The sizes of a model, under the header's names."""

    ctx: int = 12
    layers: int = 2
    heads: int = 2
    dModel: int = 8
    dMlp: int = 20

    def config(self) -> dict[str, Any]:
        return {
            **vars(self),
            "batchSize": 4,
            "learningRate": 0.003,
            "gradClip": 1.5,
            "maxSteps": 3000,
            "evalEvery": 100,
            "seed": 42,
            "backend": "wasm",
        }


def names(sizes: Sizes) -> list[tuple[str, tuple[int, ...]]]:
    """Names in the order of the file, with the shapes that the bytes really have."""
    letters = {"c": sizes.dModel, "f": sizes.dMlp}
    found: list[tuple[str, tuple[int, ...]]] = [
        ("token_embedding.weight", (256, sizes.dModel)),
        ("position_embedding.weight", (sizes.ctx, sizes.dModel)),
        ("ln_final.weight", (sizes.dModel,)),
        ("ln_final.bias", (sizes.dModel,)),
    ]
    for i in range(sizes.layers):
        found += [
            (f"blocks.{i}.{name}", tuple(letters[letter] for letter in shape))
            for name, shape in LAYER
        ]
    return found


def random_weights(sizes: Sizes, seed: int = 0) -> dict[str, np.ndarray]:
    generator = np.random.default_rng(seed)
    return {
        name: generator.standard_normal(shape).astype("<f4") * np.float32(0.4)
        for name, shape in names(sizes)
    }


def manifest(sizes: Sizes) -> list[dict[str, Any]]:
    """As the original declares it: linear weights the wrong way round."""
    entries, offset = [], 0
    for name, shape in names(sizes):
        linear = len(shape) == 2 and "embedding" not in name
        declared = shape[::-1] if linear else shape
        entries.append({"name": name, "shape": list(declared), "floatOffset": offset})
        offset += int(np.prod(shape))
    return entries


def file_bytes(header: dict[str, Any] | bytes, state: bytes, version: int = 2) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return b"TGPT" + struct.pack("<II", version, len(text)) + text + state


def header_of(sizes: Sizes, state: bytes, *, moments: bool, **changes: Any) -> dict[str, Any]:
    """A header; a change to ``...`` leaves the field out."""
    header = {
        "version": 2,
        "savedAt": "2026-05-01T12:00:00.000Z",
        "config": sizes.config(),
        "manifest": manifest(sizes),
        "includesOptimizerState": moments,
        "stateByteLength": len(state),
        "lossHistory": [
            {"step": 100, "train": 3.5, "val": 3.25},
            {"step": 200, "train": 2.5, "val": None},
        ],
        "finalLoss": {"step": 200, "train": 2.5, "val": None},
        "sample": "ROMEO: caf\u00e9",
        "bestVal": {"loss": 3.25, "step": 100},
        **changes,
    }
    return {name: value for name, value in header.items() if value is not ...}


def fp32(
    sizes: Sizes,
    weights: dict[str, np.ndarray],
    m: dict,
    v: dict,
    *,
    step: int = 200,
    **changes: Any,
) -> bytes:
    state = struct.pack("<i", step)
    for name, _ in names(sizes):
        state += weights[name].tobytes() + m[name].tobytes() + v[name].tobytes()
    return file_bytes(header_of(sizes, state, moments=True, **changes), state)


def fp16(sizes: Sizes, weights: dict[str, np.ndarray], **changes: Any) -> bytes:
    state = struct.pack("<i", 0)
    state += b"".join(weights[name].astype("<f2").tobytes() for name, _ in names(sizes))
    header = header_of(sizes, state, moments=False, **{"weightDtype": "fp16", **changes})
    return file_bytes(header, state)


def int4(
    sizes: Sizes, weights: dict[str, np.ndarray], block: int = 64, **changes: Any
) -> tuple[bytes, dict[str, np.ndarray]]:
    """A file, and the values that it stands for: (nibble - 8) * scale, in float32."""
    scales_blob, packed_blob, values = b"", b"", {}
    for name, shape in names(sizes):
        flat = weights[name].ravel()
        exact = []
        for start in range(0, flat.size, block):
            part = flat[start : start + block]
            scale = np.float16(np.abs(part).max() / 7)
            steps = np.clip(np.rint(part / np.float32(scale)), -7, 7) if scale else part * 0
            nibbles = [int(step) + 8 for step in steps] + [0] * (block - part.size)
            scales_blob += struct.pack("<e", scale)
            packed_blob += bytes(
                low | high << 4 for low, high in zip(nibbles[::2], nibbles[1::2], strict=True)
            )
            exact += [np.float32(int(step)) * np.float32(scale) for step in steps]
        values[name] = np.array(exact, np.float32).reshape(shape)
    state = struct.pack("<i", 0) + scales_blob + packed_blob
    header = header_of(
        sizes,
        state,
        moments=False,
        **{
            "weightDtype": "int4",
            "int4BlockSize": block,
            "int4ScalesBytes": len(scales_blob),
            "int4PackedBytes": len(packed_blob),
            **changes,
        },
    )
    return file_bytes(header, state), values


def as_gpt2(sizes: Sizes, weights: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The same weights under GPT-2's names: query, key and value side by side, nothing transposed."""
    ours = {
        "wte.weight": weights["token_embedding.weight"],
        "wpe.weight": weights["position_embedding.weight"],
    }
    for i in range(sizes.layers):
        layer = {
            name.removeprefix(f"blocks.{i}."): array
            for name, array in weights.items()
            if name.startswith(f"blocks.{i}.")
        }
        for kind in ("weight", "bias"):
            parts = [layer[f"attn.{letter}_proj.{kind}"] for letter in "qkv"]
            ours[f"h.{i}.attn.c_attn.{kind}"] = np.concatenate(parts, axis=-1)
            for theirs, name in (
                ("ln1", "ln_1"),
                ("attn.o_proj", "attn.c_proj"),
                ("ln2", "ln_2"),
                ("mlp.fc_in", "mlp.c_fc"),
                ("mlp.fc_out", "mlp.c_proj"),
            ):
                ours[f"h.{i}.{name}.{kind}"] = layer[f"{theirs}.{kind}"]
    for kind in ("weight", "bias"):
        ours[f"ln_f.{kind}"] = weights[f"ln_final.{kind}"]
    return ours


def take_apart(content: bytes) -> tuple[int, dict[str, Any], bytes]:
    """Version, header and state of a file."""
    assert content[:4] == b"TGPT"
    version, length = struct.unpack_from("<II", content, 4)
    return version, json.loads(content[12 : 12 + length].decode()), content[12 + length :]
