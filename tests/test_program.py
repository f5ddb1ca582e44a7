"""Programs: the model's own hold together, they survive JSON, and every seeded fault is found and named."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings

from model_cases import VARIANTS, all_programs, model, random_models
from posttrainllm.errors import ProgramError
from posttrainllm.extent import ONE
from posttrainllm.model import gradients_program
from posttrainllm.ops import ADD, BETA, CHUNK
from posttrainllm.program import (
    FIRST,
    LAST,
    Bound,
    Buffer,
    Call,
    Extent,
    Program,
    Step,
    in_layer,
)
from posttrainllm.validate import sizes_of, validate

PROGRAMS = [
    pytest.param(program, id=f"{name}-{variant}")
    for variant, config in VARIANTS.items()
    for name, program in all_programs(config).items()
]


# ---- the model's programs -----------------------------------------------------------------------


@pytest.mark.parametrize("program", PROGRAMS)
def test_program_of_the_model_is_valid(program: Program) -> None:
    validate(program)


@settings(max_examples=25)
@given(config=random_models())
def test_programs_of_random_models_are_valid_and_survive_json(config) -> None:
    for program in all_programs(config).values():
        validate(program)
        again = Program.from_json(program.to_json())
        assert (again.buffers, again.items) == (program.buffers, program.items)


@pytest.mark.parametrize("program", PROGRAMS)
def test_program_survives_json_without_a_difference(program: Program) -> None:
    text = program.to_json()
    again = Program.from_json(text)
    assert again.to_json() == text
    assert again.name == program.name
    assert list(again.buffers.items()) == list(program.buffers.items())
    assert again.items == program.items
    validate(again)


def test_json_of_another_format_is_refused() -> None:
    data = json.loads(gradients_program(model()).to_json())
    with pytest.raises(ProgramError, match=r"program format 2 is not 1"):
        Program.from_json(json.dumps(data | {"format": 2}))


def test_gradients_program_reads_like_the_model() -> None:
    lines = gradients_program(model()).to_text().splitlines()
    calls = [line.strip() for line in lines if "=" in line]
    assert calls[0] == ("h.0.in = embedding_forward(tokens, positions, wte.weight, wpe.weight)")
    assert (
        "h.{i}.attn.out, h.{i}.attn.lse = attention_forward(h.{i}.attn.qkv, segment_start)" in calls
    )
    assert "head.logits = linear_forward(ln_f.out[rows], wte.weight, -) transposed=1" in calls
    assert "  layers 0 .. L:" in lines
    assert "  layers 0 .. L, in reverse:" in lines
    assert "  chunks of R rows of B*T:" in lines
    assert "  param   h.{i}.attn.c_attn.weight  (C, 3*C) f32" in lines


def test_unrolled_text_has_one_numbered_line_a_call() -> None:
    program = gradients_program(model(n_layer=3))
    lines = program.to_text(3).splitlines()
    steps = program.expand(3, 1)
    assert len(lines) == len(steps)
    assert [int(line.split()[0]) for line in lines] == list(range(len(steps)))
    assert not any("{" in line for line in lines)


def test_layers_run_forward_and_then_in_reverse() -> None:
    calls = [str(step.call) for step in gradients_program(model()).expand(3, 1)]
    forward = [call.split(",")[0] for call in calls if "= attention_forward" in call]
    backward = [call.split(" ")[0] for call in calls if "= attention_backward" in call]
    assert forward == [f"h.{i}.attn.out" for i in (0, 1, 2)]
    assert backward == [f"grad.h.{i}.attn.qkv" for i in (2, 1, 0)]


def test_chunks_start_the_heads_gradient_once_and_add_after_that() -> None:
    steps = [s for s in gradients_program(model()).expand(1, 3) if s.chunk is not None]
    codes = [s.call.attrs["accumulate"] for s in steps if s.call.op == "linear_backward_weight"]
    assert codes == [BETA, ADD, ADD]
    assert [s.chunk for s in steps if s.call.op == "cross_entropy_forward"] == [0, 1, 2]


def test_expanding_leaves_no_placeholder_and_no_chunk_code() -> None:
    for program in all_programs(model(n_layer=3)).values():
        buffers = program.instances(3)
        for step in program.expand(3, 2):
            names = [name for name in step.call.operands if name is not None]
            assert all(step.name_of(name) in buffers for name in names)
            assert step.call.attrs.get("accumulate") != CHUNK


def test_every_parameter_has_a_gradient_of_its_shape() -> None:
    for config in VARIANTS.values():
        buffers = gradients_program(config).buffers
        params = {name: buffer for name, buffer in buffers.items() if buffer.role == "param"}
        grads = {name: buffer for name, buffer in buffers.items() if buffer.role == "grad"}
        assert {f"grad.{name}" for name in params} == set(grads)
        for name, buffer in params.items():
            assert grads[f"grad.{name}"].shape == buffer.shape
            assert buffer.decay == (len(buffer.shape) >= 2), name
            assert buffer.init is not None


# ---- names and extents --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("3*C", Extent(3, ("C",))),
        ("B*T", Extent(1, ("B", "T"))),
        ("T*B", Extent(1, ("B", "T"))),
        ("1", ONE),
        ("2*3*C*C", Extent(6, ("C", "C"))),
    ],
)
def test_extent_is_a_whole_number_times_a_product_of_dims(text: str, wanted: Extent) -> None:
    assert Extent.parse(text) == wanted
    assert Extent.parse(str(wanted)) == wanted


@pytest.mark.parametrize("text", ["", "C+1", "-1", "C*", "2.5*C", "C/2"])
def test_extent_refuses_expressions(text: str) -> None:
    with pytest.raises(ProgramError, match="is not a whole number times a product of dims"):
        Extent.parse(text)


def test_extent_divides_or_says_that_it_cannot() -> None:
    three_c, bt = Extent.parse("3*C"), Extent.parse("B*T")
    assert three_c.divided_by(Extent.parse("C")) == Extent(3)
    assert bt.divided_by(Extent.parse("B")) == Extent.parse("T")
    assert three_c.divided_by(Extent(2)) is None
    assert three_c.divided_by(bt) is None
    assert Extent.parse("C").times_extent(three_c) == Extent.parse("3*C*C")


def test_extent_without_its_dim_says_which_one_is_missing() -> None:
    with pytest.raises(ProgramError, match=r"B\*T needs the dim 'T'; given are B, C"):
        Extent.parse("B*T").bind({"B": 2, "C": 3})


def test_names_follow_the_layer() -> None:
    assert in_layer("h.{i}.in", 2, 5) == "h.2.in"
    assert in_layer("h.{i+1}.in", 2, 5) == "h.3.in"
    assert in_layer("h.{L}.in", 2, 5) == "h.5.in"
    assert [str(bound) for bound in (FIRST, LAST, Bound(True, 1), Bound(True, -2))] == [
        "0",
        "L",
        "L+1",
        "L-2",
    ]


def test_sizes_are_found_in_the_shapes() -> None:
    shapes = {"o": ("B*T", "C"), "l": ("B", "H", "T"), "q": ("B*T", "3*C"), "s": ("B*T",)}
    step = Step(Call("attention_forward", ("o", "l"), ("q", "s")))
    buffers = {
        name: Buffer(name, tuple(map(Extent.parse, shape)), "scratch")
        for name, shape in shapes.items()
    }
    found = sizes_of(step, buffers, "here")
    assert {letter: str(extent) for letter, extent in found.items()} == {
        "B": "B",
        "T": "T",
        "C": "C",
        "H": "H",
    }
