"""Triton's kernels translated for a card that is not here: what they take of it, by the widest rows and both types.

The interpreter of ``test_triton_kernels.py`` knows no shared memory and no registers.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from needs import require

require("torch")
require("triton")

SHARED = 64 << 10  # bytes a block, which every card has

TRANSLATE = """
import json, torch, triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from posttrainllm.pytorch import embedding_kernels, trunk_kernels

found = {}
types = {torch.float32: "*fp32", torch.bfloat16: "*bf16", torch.int32: "*i32", torch.int64: "*i64"}

class Translated:
    # stands for a kernel: a call translates it for its arguments and runs nothing
    def __init__(self, kernel, label):
        self.kernel, self.label = kernel, label

    def __getitem__(self, grid):
        return self.call

    def call(self, *given, num_warps, **named):
        names = self.kernel.arg_names
        values = dict(zip(names, given)) | named
        signature, constants, hints = {}, {}, {}
        for place, (name, parameter) in enumerate(zip(names, self.kernel.params)):
            value = values[name]
            if parameter.is_constexpr:
                signature[name], constants[place,] = "constexpr", value
                continue
            tensor = isinstance(value, torch.Tensor)
            signature[name] = types[value.dtype] if tensor else "i32"
            if tensor or value % 16 == 0:
                hints[place,] = [["tt.divisibility", 16]]
        source = ASTSource(self.kernel, signature, constants, hints)
        target = GPUTarget("cuda", 80, 32)
        made = triton.compile(source, target=target, options={"num_warps": num_warps})
        found[f"{names[0]} {self.label} {len(found)}"] = made.metadata.shared

kernels = [(module, name) for module, name in (
    (trunk_kernels, "_layernorm_backward"), (trunk_kernels, "_gelu_backward"),
    (embedding_kernels, "_pieces"), (embedding_kernels, "_runs"),
)]
originals = {name: getattr(module, name) for module, name in kernels}
for width in (48, 4096):
    for dtype in (torch.float32, torch.bfloat16):
        for module, name in kernels:
            setattr(module, name, Translated(originals[name], f"{name} {width} {dtype}"))
        rows = 4000
        x = torch.zeros(rows, width, dtype=dtype)
        one, cols = torch.zeros(rows), torch.zeros(trunk_kernels.parts(rows), width)
        trunk_kernels.layernorm_backward(x, x, x, one, one, x[0], cols, cols, cols)
        if width == 48:
            trunk_kernels.gelu_backward(x, x, False, cols)
        else:
            order = embedding_kernels.token_order(torch.zeros(1, rows, dtype=torch.int32))
            embedding_kernels.embedding_backward(x, order, torch.zeros(5, width))
print(json.dumps(found))
"""


def test_kernels_fit_into_the_shared_memory_that_every_card_has(tmp_path: Path) -> None:
    given = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    given["TRITON_CACHE_DIR"] = str(tmp_path)
    done = subprocess.run(
        [sys.executable, "-c", TRANSLATE], capture_output=True, text=True, env=given
    )
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout)
    assert len(found) == 10
    assert max(found.values()) > 32 << 10, "loads no longer run ahead"
    assert max(found.values()) <= SHARED, found
