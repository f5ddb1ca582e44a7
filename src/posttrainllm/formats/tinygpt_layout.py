"""What stands where in a ``.tinygpt`` file: its tensors in order, under their names and ours.

    0         "TGPT"
    4         u32   version, 1 or 2
    8         u32   N, bytes of the header
    12        JSON  header, UTF-8
    12 + N    i32   step, and the tensors, one behind the other; nothing is aligned

Everything is little endian, and there is no checksum. The tensors come in the order of ``tensors``:

    fp32      for each tensor its n weights, then AdamW's n means, then n mean squares, as f32
    fp16      the weights of all tensors as f16; no means and squares
    int4      f16 scales of all tensors, one for each block of 64 values, then all values as nibbles, the
              low one first, value = (nibble - 8) * scale; a tensor's last block is filled up with zeros

**A linear weight is stored (in, out), row after row, although the manifest in the header declares
(out, in).** That is GPT-2's own layout, so nothing is transposed here; whoever believes the manifest
loads square matrices transposed, with no error and a much higher loss.

Query, key and value are three tensors there and one of ours, side by side in its columns.
The model is GPT-2 with the exact erf form of GELU, a tied head and the 256 bytes as vocabulary.
Read next: ``tinygpt.py``.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from posttrainllm.config import GPTConfig
from posttrainllm.errors import CheckpointError
from posttrainllm.formats.untrusted import DAMAGED
from posttrainllm.settings import show

MAGIC = b"TGPT"
VERSIONS = (1, 2)
PREFIX_BYTES = 12
STEP_BYTES = 4
BLOCK = 64

# What a .tinygpt model computes: our setting, and the value that it has there.
FIXED: dict[str, object] = {
    "n_vocab": 256,
    "tied": True,
    "activation": "gelu",
    "layer_norm_epsilon": 1e-5,
}

DTYPES = ("fp32", "fp16", "int4")

_BLOCK_TENSORS = (
    ("ln1.weight", "ln_1.weight", None),
    ("ln1.bias", "ln_1.bias", None),
    ("attn.q_proj.weight", "attn.c_attn.weight", 0),
    ("attn.q_proj.bias", "attn.c_attn.bias", 0),
    ("attn.k_proj.weight", "attn.c_attn.weight", 1),
    ("attn.k_proj.bias", "attn.c_attn.bias", 1),
    ("attn.v_proj.weight", "attn.c_attn.weight", 2),
    ("attn.v_proj.bias", "attn.c_attn.bias", 2),
    ("attn.o_proj.weight", "attn.c_proj.weight", None),
    ("attn.o_proj.bias", "attn.c_proj.bias", None),
    ("ln2.weight", "ln_2.weight", None),
    ("ln2.bias", "ln_2.bias", None),
    ("mlp.fc_in.weight", "mlp.c_fc.weight", None),
    ("mlp.fc_in.bias", "mlp.c_fc.bias", None),
    ("mlp.fc_out.weight", "mlp.c_proj.weight", None),
    ("mlp.fc_out.bias", "mlp.c_proj.bias", None),
)


@dataclass(frozen=True)
class Tensor:
    """One tensor of a file. ``part`` is its third of our columns: 0 query, 1 key, 2 value, None all."""

    name: str
    ours: str
    part: int | None
    shape: tuple[int, ...]

    @property
    def size(self) -> int:
        """How many values it has."""
        return math.prod(self.shape)

    @property
    def declared(self) -> tuple[int, ...]:
        """The shape that the manifest declares: that of a linear weight the other way round."""
        tables = ("token_embedding.weight", "position_embedding.weight")
        return self.shape if self.name in tables else self.shape[::-1]


def tensors(config: GPTConfig) -> Iterator[Tensor]:
    """Yield the tensors of a model in the order of the file."""
    width, inner = config.n_embd, config.inner
    yield Tensor("token_embedding.weight", "wte.weight", None, (config.n_vocab, width))
    yield Tensor("position_embedding.weight", "wpe.weight", None, (config.n_ctx, width))
    yield Tensor("ln_final.weight", "ln_f.weight", None, (width,))
    yield Tensor("ln_final.bias", "ln_f.bias", None, (width,))
    wide = {"mlp.fc_in.weight": (width, inner), "mlp.fc_out.weight": (inner, width)}
    for i in range(config.n_layer):
        for name, ours, part in _BLOCK_TENSORS:
            if name.startswith(("attn.", "mlp.")) and name.endswith("weight"):
                shape: tuple[int, ...] = wide.get(name, (width, width))
            else:
                shape = (inner,) if name == "mlp.fc_in.bias" else (width,)
            yield Tensor(f"blocks.{i}.{name}", f"h.{i}.{ours}", part, shape)


def block_count(config: GPTConfig, block: int) -> int:
    """Return how many blocks int4 cuts a model's tensors into."""
    return sum(-(-tensor.size // block) for tensor in tensors(config))


def state_bytes(config: GPTConfig, dtype: str, block: int = BLOCK) -> int:
    """Return how long everything behind the header is."""
    if dtype == "int4":
        return STEP_BYTES + block_count(config, block) * (2 + block // 2)
    return STEP_BYTES + config.parameters() * (12 if dtype == "fp32" else 2)


def manifest(config: GPTConfig) -> list[dict[str, Any]]:
    """Return the list of tensors as a header declares it; offsets count weights alone."""
    entries, offset = [], 0
    for tensor in tensors(config):
        entries.append({"name": tensor.name, "shape": list(tensor.declared), "floatOffset": offset})
        offset += tensor.size
    return entries


def check_manifest(found: object, config: GPTConfig, source: str) -> None:
    """Refuse a header whose manifest is not that of its config; a linear weight may stand either way.

    Raises: CheckpointError, naming the first tensor that differs.
    """
    if not isinstance(found, list):
        raise CheckpointError(f"{source}: manifest must be a list, got {show(found)}", DAMAGED)
    offset = 0
    wanted = list(tensors(config))
    for number, tensor in enumerate(wanted):
        entry = found[number] if number < len(found) else None
        if not isinstance(entry, dict) or entry.get("name") != tensor.name:
            raise CheckpointError(
                f"{source}: manifest entry {number} must be {tensor.name!r}, got {show(entry)}",
                DAMAGED,
            )
        shapes = [list(tensor.declared), list(tensor.shape)]
        if entry.get("shape") not in shapes:
            raise CheckpointError(
                f"{source}: the manifest gives {tensor.name!r} the shape {show(entry.get('shape'))}, "
                f"and its config {shapes[0]}",
                DAMAGED,
            )
        if entry.get("floatOffset", offset) != offset:
            raise CheckpointError(
                f"{source}: the manifest gives {tensor.name!r} the floatOffset "
                f"{show(entry['floatOffset'])}, and the tensors before it end at {offset}",
                DAMAGED,
            )
        offset += tensor.size
    if len(found) > len(wanted):
        extra = found[len(wanted)]
        name = extra.get("name") if isinstance(extra, dict) else extra
        raise CheckpointError(
            f"{source}: the manifest has a tensor {show(name)}, which no .tinygpt of "
            f"{config.n_layer} layers has",
            "this variant of the format cannot be loaded",
        )
