""".tinygpt files that are damaged or meant to do harm, and what their refusals must say.

``TINYGPT`` maps a name to (make, words): ``make(folder)`` writes into an empty folder and returns what is to be imported, and the
refusal's one line must contain ``words``.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import tinygpt_files
from hostile_pickle import Case, Make, file_with, pickled
from import_cases import tinygpt
from tinygpt_files import Sizes

HUGE = 10**18
SIZES = Sizes()


def tiny(dtype: str = "fp32", **changes: Any) -> Make:
    """A file with fields of its header changed."""

    def make(folder: Path) -> Path:
        path = tinygpt(folder, SIZES, dtype)
        _, header, state = tinygpt_files.take_apart(path.read_bytes())
        for name, new in changes.items():
            header[name] = new(header[name]) if callable(new) else new
        path.write_bytes(tinygpt_files.file_bytes(header, state))
        return path

    return make


def tiny_config(**changes: Any) -> Make:
    return tiny(config=lambda old: {**old, **changes})


def tiny_entry(number: int, **changes: Any) -> Make:
    def change(entries: list[dict[str, Any]]) -> list[dict[str, Any]]:
        entries[number].update(changes)
        return entries

    return tiny(manifest=change)


def tiny_bytes(change: Callable[[bytes], bytes], dtype: str = "fp32") -> Make:
    def make(folder: Path) -> Path:
        path = tinygpt(folder, SIZES, dtype)
        path.write_bytes(change(path.read_bytes()))
        return path

    return make


def tiny_state(at: int, new: bytes, dtype: str = "fp32") -> Make:
    """Bytes of the state changed; 0 is the step."""

    def change(content: bytes) -> bytes:
        start = len(content) - len(tinygpt_files.take_apart(content)[2]) + at
        return content[:start] + new + content[start + len(new) :]

    return tiny_bytes(change, dtype)


FIRST = 256 * SIZES.dModel  # values of the first tensor
NAN, INF = struct.pack("<f", float("nan")), struct.pack("<f", float("inf"))

TINYGPT: dict[str, Case] = {
    "version 0": (tiny_bytes(lambda c: c[:4] + struct.pack("<I", 0) + c[8:]), "has version 0"),
    "version 3": (tiny_bytes(lambda c: c[:4] + struct.pack("<I", 3) + c[8:]), "has version 3"),
    "header of 4 GB": (
        tiny_bytes(lambda c: c[:8] + struct.pack("<I", 2**32 - 1) + c[12:]),
        "is cut off",
    ),
    "header too long": (
        tiny_bytes(lambda c: c[:8] + struct.pack("<I", 17 * 2**20) + b" " * (17 * 2**20)),
        "over the limit",
    ),
    "no header": (tiny_bytes(lambda c: c[:8] + struct.pack("<I", 0)), "is not JSON"),
    "header deep": (
        tiny_bytes(lambda c: c[:8] + struct.pack("<I", 10**5) + b"[" * 10**5),
        "nested too deeply",
    ),
    "header no JSON": (tiny_bytes(lambda c: c[:12] + b"!" + c[13:]), "is not JSON"),
    "header no UTF-8": (tiny_bytes(lambda c: c[:13] + b"\xff" + c[14:]), "is not UTF-8"),
    "header a list": (tiny_bytes(lambda c: c[:8] + struct.pack("<I", 2) + b"[]"), "JSON object"),
    "header with NaN": (
        tiny_bytes(lambda c: c[:8] + struct.pack("<I", 10) + b'{"a": NaN}'),
        "NaN is not a JSON number",
    ),
    "no config": (tiny(config=None), "config must be an object"),
    "config of text": (tiny(config="small"), "config must be an object"),
    "no layers": (tiny_config(layers=None), "config.layers must be a whole number"),
    "layers of text": (tiny_config(layers="2"), "config.layers must be a whole number"),
    "true heads": (tiny_config(heads=True), "config.heads must be a whole number"),
    "layers of 10^18": (tiny_config(layers=HUGE), "n_layer must be"),
    "width of 10^18": (tiny_config(dModel=HUGE), "n_embd must be"),
    "context of 10^18": (tiny_config(ctx=HUGE), "n_ctx must be"),
    "inner of 10^18": (tiny_config(dMlp=HUGE), "n_inner must be"),
    "most of everything": (
        tiny_config(layers=1024, dModel=65536, ctx=2**20, dMlp=2**20, heads=1),
        "over the limit",
    ),
    "negative context": (tiny_config(ctx=-1), "n_ctx must be"),
    "heads that do not divide": (tiny_config(heads=3), "not divisible"),
    "one layer more": (tiny_config(layers=3), "stateByteLength is"),
    "longer context": (tiny_config(ctx=13), "stateByteLength is"),
    "mixture of experts": (tiny_config(useMoE=True), "config.useMoE is True"),
    "sliding window": (tiny_config(slidingWindow=64), "config.slidingWindow is 64"),
    "state length": (tiny(stateByteLength=7), "stateByteLength is 7"),
    "state length of text": (tiny(stateByteLength="7"), "stateByteLength is '7'"),
    "unknown dtype": (tiny(weightDtype="fp8"), "weightDtype is 'fp8'"),
    "dtype of numbers": (tiny(weightDtype=[16]), "weightDtype is [16]"),
    "fp16 with moments": (tiny(weightDtype="fp16"), "includesOptimizerState is True"),
    "fp32 without": (tiny("fp16", weightDtype="fp32"), "includesOptimizerState is False"),
    "moments maybe": (tiny(includesOptimizerState=1), "includesOptimizerState is 1"),
    "odd block": (tiny("int4", int4BlockSize=63), "int4BlockSize must be"),
    "block of 10^18": (tiny("int4", int4BlockSize=HUGE), "int4BlockSize must be"),
    "another block": (tiny("int4", int4BlockSize=32), "stateByteLength is"),
    "scales length": (tiny("int4", int4ScalesBytes=2), "int4ScalesBytes is 2"),
    "packed length": (tiny("int4", int4PackedBytes=2), "int4PackedBytes is 2"),
    "manifest of text": (tiny(manifest="all"), "manifest must be a list"),
    "manifest empty": (tiny(manifest=[]), "manifest entry 0 must be 'token_embedding.weight'"),
    "manifest in another order": (
        tiny(manifest=lambda m: [m[1], m[0], *m[2:]]),
        "manifest entry 0 must be",
    ),
    "tensor twice": (tiny(manifest=lambda m: [*m[:3], *m[2:]]), "manifest entry 3 must be"),
    "tensor missing": (
        tiny(manifest=lambda m: m[:-1]),
        "must be 'blocks.1.mlp.fc_out.bias', got None",
    ),
    "tensor more": (
        tiny(manifest=lambda m: [*m, {"name": "output.weight", "shape": [256, 8]}]),
        "a tensor 'output.weight', which no .tinygpt",
    ),
    "shape of 10^18": (tiny_entry(0, shape=[HUGE, HUGE]), "the shape"),
    "offsets overlap": (tiny_entry(1, floatOffset=0), "the floatOffset 0"),
    "offset of 10^18": (tiny_entry(2, floatOffset=HUGE), "the floatOffset"),
    "nan weight": (tiny_state(4, NAN), "'token_embedding.weight' holds NaN values (weight)"),
    "nan mean": (tiny_state(4 + 4 * FIRST, NAN), "holds NaN values (mean)"),
    "infinite square": (tiny_state(4 + 8 * FIRST, INF), "holds infinite values (mean square)"),
    "negative square": (
        tiny_state(4 + 8 * FIRST, struct.pack("<f", -1.0)),
        "has a negative mean square",
    ),
    "nan half": (tiny_state(4, b"\x00\x7e", "fp16"), "holds NaN values"),
    "infinite scale": (tiny_state(4, b"\x00\x7c", "int4"), "values (weight)"),
    "step below 0": (tiny_state(0, struct.pack("<i", -5)), "step is -5"),
    "more bytes": (tiny_bytes(lambda c: c + b"\0"), "belong to no tensor"),
    "fewer bytes": (tiny_bytes(lambda c: c[:-1]), "is cut off"),
    "pickle behind the magic": (
        lambda folder: file_with(folder, "a.tinygpt", b"TGPT" + pickled(folder)),
        "a.tinygpt",
    ),
}
