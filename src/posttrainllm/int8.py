"""Decoding from int8 weights: a program in, the same program with its products reading a quarter of the bytes out.

What this is: a rewrite, as ``fuse.py`` is one. Every ``linear_forward`` by a parameter becomes ``int8_forward`` by a copy of it that is
rounded when weights are loaded (``rounding.py``), with a scale for each output. The parameter stays: the token table is looked up in
float32, and prompts are read with it.
What this is not: training, or reading prompts: those do enough arithmetic with each weight that its width hardly counts.
Read next: ``docs/ops/int8.md``.

A word holds four weights, so a matrix (I, O) takes (I, O/4) words. Sizes in programs are products of dims, without fractions: C/4 and F/4
are dims of their own, C4 and F4, which ``int8_dims`` adds.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from posttrainllm.extent import Extent
from posttrainllm.ops import Dtype
from posttrainllm.program import Buffer, Call, Program
from posttrainllm.rounding import IN_A_WORD
from posttrainllm.validate import validate

COPY = "int8."
SCALE = ".scale"

_WORDS = {"C": "C4", "F": "F4"}


def can_round(dims: Mapping[str, int]) -> bool:
    """Whether the rows of all matrices are whole words."""
    return all(dims[letter] % IN_A_WORD == 0 for letter in _WORDS)


def int8_dims(dims: Mapping[str, int]) -> dict[str, int]:
    """The numbers behind the letters of a rewritten program."""
    return {**dims, **{word: dims[letter] // IN_A_WORD for letter, word in _WORDS.items()}}


def int8_program(program: Program) -> Program:
    """The program with its products in int8.

    Raises: ProgramError when the result does not hold together, which is a fault of this rewrite.
    """
    rewritten = Program(program.name)
    rewritten.buffers = dict(program.buffers)
    for item in program.items:
        if isinstance(item, Call):
            rewritten.items.append(_rewritten(rewritten, item))
        else:
            body = tuple(_rewritten(rewritten, call) for call in item.body)
            rewritten.items.append(dataclasses.replace(item, body=body))
    validate(rewritten)
    return rewritten


def _rewritten(program: Program, call: Call) -> Call:
    if call.op != "linear_forward":
        return call
    x, weight, bias = call.inputs
    assert weight is not None
    buffer = program.buffers[weight]
    if buffer.role != "param":
        return call
    outputs = 0 if call.attrs["transposed"] else 1
    rows, columns = buffer.shape
    copy = _declare(program, buffer, COPY + weight, (rows, _in_words(columns)), "i32")
    scale = _declare(program, buffer, COPY + weight + SCALE, (buffer.shape[outputs],), "f32")
    return dataclasses.replace(call, op="int8_forward", inputs=(x, copy, scale, bias))


def _declare(
    program: Program, like: Buffer, name: str, shape: tuple[Extent, ...], dtype: Dtype
) -> str:
    program.buffers[name] = dataclasses.replace(
        like, name=name, shape=shape, role="state", dtype=dtype, init=None, decay=False
    )
    return name


def _in_words(extent: Extent) -> Extent:
    """3*C as 3*C4: one of its letters counts words instead of weights."""
    letter = next(dim for dim in extent.dims if dim in _WORDS)
    at = extent.dims.index(letter)
    dims = (*extent.dims[:at], _WORDS[letter], *extent.dims[at + 1 :])
    return dataclasses.replace(extent, dims=tuple(sorted(dims)))
