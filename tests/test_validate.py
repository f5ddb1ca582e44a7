"""Building and validating programs: every seeded fault is found, and the message names call, buffer, wanted and got."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest

from model_cases import model
from posttrainllm.errors import ProgramError
from posttrainllm.model import gradients_program
from posttrainllm.ops import ADD, BETA, CHUNK, OPS, WRITE
from posttrainllm.program import FIRST, LAST, Call, Extent, LayerBlock, Program, RowBlock
from posttrainllm.validate import validate

Fault = Callable[[Program], None]

# ---- building -----------------------------------------------------------------------------------


def block() -> Program:
    """x -> layernorm -> linear -> loss, with the backward of both: the smallest thing to break."""
    p = Program("small")
    for name in ("x", "dy"):
        p.buffer(name, "N", "C", role="input")
    p.buffer("ids", "N", role="input", dtype="i32")
    p.buffer("scalars", "8", role="input")
    for name, shape in (("ln.weight", ("C",)), ("ln.bias", ("C",)), ("fc.weight", ("C", "O"))):
        p.buffer(name, *shape, role="param", init="normal")
        p.buffer(f"grad.{name}", *shape, role="grad")
    p.buffer("ln.out", "N", "C", role="saved")
    p.buffer("ln.mean", "N", role="saved")
    p.buffer("ln.rstd", "N", role="saved")
    p.buffer("fc.out", "N", "O", role="scratch")
    p.buffer("dfc", "N", "O", role="scratch")
    p.buffer("dx", "N", "C", role="scratch")
    p.buffer("loss", "1", role="output")
    p.call(
        "layernorm_forward",
        ["ln.out", "ln.mean", "ln.rstd"],
        ["x", "ln.weight", "ln.bias"],
        eps=1e-5,
    )
    p.call("linear_forward", ["fc.out"], ["ln.out", "fc.weight", None])
    p.call("gelu_forward", ["dfc"], ["fc.out"])
    p.call(
        "linear_backward_weight", ["grad.fc.weight"], ["ln.out", "dfc", "scalars"], accumulate=BETA
    )
    p.call("linear_backward_input", ["dx"], ["dfc", "fc.weight"])
    p.call(
        "layernorm_backward_weight",
        ["grad.ln.weight", "grad.ln.bias"],
        ["dx", "x", "ln.mean", "ln.rstd", "scalars"],
        accumulate=BETA,
    )
    p.call("loss_sum", ["loss"], ["ln.mean", "scalars"])
    return p


def test_the_block_that_faults_are_seeded_into_is_valid() -> None:
    validate(block())


def test_unknown_op_is_refused_when_it_is_called() -> None:
    with pytest.raises(ProgramError, match=r"program small: there is no op 'linear'"):
        block().call("linear", [], [])


@pytest.mark.parametrize("attrs", [{}, {"eps": 1e-5, "epsilon": 1e-5}, {"epsilon": 1e-5}])
def test_missing_or_unknown_attribute_is_refused(attrs: dict[str, float]) -> None:
    with pytest.raises(ProgramError, match=r"program small: layernorm_forward takes eps, not"):
        block().call(
            "layernorm_forward", ["ln.out", "ln.mean", "ln.rstd"], ["x", "x", "x"], **attrs
        )


def test_wrong_number_of_operands_is_refused() -> None:
    with pytest.raises(
        ProgramError, match=r"add_forward has 1 outputs and 2 inputs, given were 1 and 3"
    ):
        block().call("add_forward", ["dx"], ["x", "x", "x"])


def test_buffer_cannot_change_its_shape_or_role() -> None:
    p = block()
    assert p.buffer("x", "N", "C", role="input") == "x"
    for shape, role in ((("N", "O"), "input"), (("N", "C"), "scratch")):
        with pytest.raises(ProgramError, match=r"program small: buffer 'x' is declared twice"):
            p.buffer("x", *shape, role=role)


def test_blocks_do_not_nest() -> None:
    p = block()
    with (
        p.layers(),
        pytest.raises(ProgramError, match=r"program small: blocks do not nest"),
        p.row_chunks("R", "N"),
    ):
        pass


def test_attributes_are_kept_in_the_tables_order() -> None:
    p = Program("small")
    p.call("linear_backward_input", ["a"], ["b", "c"], accumulate=ADD, transposed=1)
    assert isinstance(p.items[0], Call)
    assert list(p.items[0].attrs) == list(OPS["linear_backward_input"].attrs)


# ---- seeded faults ------------------------------------------------------------------------------


FAULTS: list[Any] = []


def fault(index: int, op: str, message: str) -> Callable[[Fault], Fault]:
    """What validate has to say about the fault: the call's index, its op and the rest of the message."""

    def note(seed: Fault) -> Fault:
        wanted = f"program small, call {index} {op}: {message}"
        FAULTS.append(pytest.param(seed, wanted, id=seed.__name__))
        return seed

    return note


def change(p: Program, index: int, **fields: object) -> None:
    """Replace fields of call ``index``."""
    call = p.items[index]
    assert isinstance(call, Call)
    p.items[index] = dataclasses.replace(call, **fields)


def redeclare(p: Program, name: str, **fields: object) -> None:
    p.buffers[name] = dataclasses.replace(p.buffers[name], **fields)


def shape(*entries: str) -> tuple[Extent, ...]:
    return tuple(Extent.parse(entry) for entry in entries)


@fault(1, "linear_forward", "'fc.weight' is (O, O) where I = C was wanted, as 'ln.out' says")
def wrong_width(p: Program) -> None:
    redeclare(p, "fc.weight", shape=shape("O", "O"))


@fault(1, "linear_forward", "'ln.out' is (N, C) where N = 2*N was wanted, as 'fc.out' says")
def wrong_number_of_rows(p: Program) -> None:
    redeclare(p, "fc.out", shape=shape("2*N", "O"))


@fault(0, "layernorm_forward", "mean 'ln.mean' is (N, 1) but layernorm_forward takes (N)")
def wrong_rank(p: Program) -> None:
    redeclare(p, "ln.mean", shape=shape("N", "1"))


@fault(1, "linear_forward", "'fc.weight' is (C, O) where")
def weight_not_transposed(p: Program) -> None:
    change(p, 1, attrs={"transposed": 1.0})


@fault(2, "gelu_forward", "buffer 'dfc' is not declared")
def undeclared(p: Program) -> None:
    del p.buffers["dfc"]


@fault(1, "add_forward", "buffer 'h.2.in' is not declared")
def undeclared_in_a_layer(p: Program) -> None:
    p.buffer("h.{i}.in", "N", "C", role="scratch")
    p.items.insert(
        0, LayerBlock(FIRST, LAST, False, (Call("add_forward", ("h.{i+1}.in",), ("x", "dy")),))
    )


@fault(0, "layernorm_forward", "bias 'ln.bias' is i32 but layernorm_forward takes f32")
def wrong_dtype(p: Program) -> None:
    redeclare(p, "ln.bias", dtype="i32")


@fault(0, "gather_forward", "rows 'scalars' is f32 but gather_forward takes i32")
def float_ids(p: Program) -> None:
    p.call("gather_forward", ["dx"], ["x", "scalars"])
    redeclare(p, "scalars", shape=shape("N"))
    p.items[:-1] = []


@fault(1, "linear_forward", "weight is missing and linear_forward cannot do without it")
def missing_operand(p: Program) -> None:
    change(p, 1, inputs=("ln.out", None, None))


@fault(0, "linear_forward", "reads 'ln.out' before anything has written it")
def read_before_write(p: Program) -> None:
    p.items.insert(0, p.items.pop(1))


@fault(1, "gelu_forward", "reads 'dfc[rows]' before anything has written it")
def read_of_half_the_rows(p: Program) -> None:
    body = (Call("gelu_forward", ("fc.out[rows]",), ("dfc[rows]",), {"erf": 0.0}),)
    p.items.insert(1, RowBlock(Extent.parse("R"), Extent.parse("N"), body))


@fault(2, "layernorm_forward", "writes 'ln.out' again, but saved for the backward pass once")
def saved_written_twice(p: Program) -> None:
    p.items.insert(2, p.items[0])


@fault(2, "add_forward", "writes 'ln.out[rows]' again, but saved for the backward pass once")
def saved_written_twice_by_rows(p: Program) -> None:
    again = Call("add_forward", ("ln.out[rows]",), ("x[rows]", "dy[rows]"))
    p.items.insert(2, RowBlock(Extent.parse("R"), Extent.parse("N"), (again,)))


@fault(4, "linear_backward_weight", "writes 'grad.fc.weight' again, but a gradient is started once")
def gradient_started_twice(p: Program) -> None:
    p.items.insert(4, p.items[3])


@fault(
    3,
    "linear_backward_weight",
    "adds to 'grad.fc.weight', which no call of this program has started",
)
def gradient_added_before_started(p: Program) -> None:
    change(p, 3, attrs={"transposed": 0.0, "accumulate": float(ADD)})


@fault(3, "linear_backward_weight", "overwrites 'grad.fc.weight' whatever beta is")
def gradient_forgets_the_batch_before(p: Program) -> None:
    change(p, 3, attrs={"transposed": 0.0, "accumulate": float(WRITE)})


@fault(3, "linear_backward_weight", "accumulate is 3.0, which only a row block resolves")
def gradient_chunk_outside_a_block(p: Program) -> None:
    change(p, 3, attrs={"transposed": 0.0, "accumulate": float(CHUNK)})


@fault(
    4,
    "linear_backward_input",
    "accumulate is BETA, but linear_backward_input does not read scalars",
)
def beta_without_scalars(p: Program) -> None:
    change(p, 4, attrs={"transposed": 0.0, "accumulate": float(BETA)})


@fault(4, "linear_backward_input", "reads 'dx' before anything has written it")
def added_to_nothing(p: Program) -> None:
    change(p, 4, attrs={"transposed": 0.0, "accumulate": float(ADD)})


@fault(
    5, "linear_backward_input", "overwrites 'dx', and nobody has read what program small, call 4"
)
def unread_result_overwritten(p: Program) -> None:
    p.items.insert(5, p.items[4])


@fault(7, "add_forward", "writes 'dx', and no call of program small ever reads it")
def result_of_no_use(p: Program) -> None:
    p.items.append(Call("add_forward", ("dx",), ("x", "dy")))


@fault(4, "linear_backward_input", "overwrites 'dy', whose role is input")
def input_overwritten(p: Program) -> None:
    change(p, 4, outputs=("dy",))


@fault(4, "linear_backward_input", "overwrites 'table', whose role is param")
def parameter_overwritten(p: Program) -> None:
    p.buffer("table", "N", "C", role="param")
    change(p, 4, outputs=("table",))


@fault(4, "linear_backward_input", "overwrites 'dx', whose role is state")
def state_overwritten(p: Program) -> None:
    redeclare(p, "dx", role="state")


@fault(2, "gelu_forward", "reads and writes 'fc.out'; give the result a buffer of its own")
def in_place(p: Program) -> None:
    change(p, 2, outputs=("fc.out",))


@fault(2, "gather_forward", "reads and writes 'fc.out'; give the result a buffer of its own")
def in_place_by_rows(p: Program) -> None:
    body = (Call("gather_forward", ("fc.out[rows]",), ("fc.out", "ids[rows]")),)
    p.items.insert(2, RowBlock(Extent.parse("R"), Extent.parse("N"), body))


@fault(5, "layernorm_backward_weight", "writes 'grad.ln.weight' twice")
def both_outputs_the_same(p: Program) -> None:
    change(p, 5, outputs=("grad.ln.weight", "grad.ln.weight"))


@fault(2, "gelu_forward", "'fc.out[rows]' is a window of rows outside a row block")
def rows_outside_a_block(p: Program) -> None:
    change(p, 2, inputs=("fc.out[rows]",))


@fault(2, "gelu", "there is no such op")
def unknown_op(p: Program) -> None:
    change(p, 2, op="gelu")


@fault(2, "gelu_forward", "has 1 outputs and 0 inputs where 1 outputs and 1 inputs were wanted")
def operand_left_out(p: Program) -> None:
    change(p, 2, inputs=())


@fault(0, "layernorm_forward", "has the attributes () where (eps) were wanted")
def attribute_left_out(p: Program) -> None:
    change(p, 0, attrs={})


@fault(4, "linear_backward_input", "has the attributes (accumulate, transposed)")
def attributes_in_another_order(p: Program) -> None:
    change(p, 4, attrs={"accumulate": 0.0, "transposed": 0.0})


@pytest.mark.parametrize(("seed", "message"), FAULTS)
def test_validate_finds_and_names_a_seeded_fault(seed: Fault, message: str) -> None:
    program = block()
    seed(program)
    with pytest.raises(ProgramError) as caught:
        validate(program)
    assert caught.value.message.startswith(message)


def test_validate_finds_every_missing_call_but_the_terms_of_a_sum() -> None:
    """A call that is left out leaves something unwritten or unread, unless it only adds to what is there."""
    program = gradients_program(model())
    wanted = {name for name, b in program.instances(2).items() if b.role in ("grad", "output")}
    missed = []
    for at, item in enumerate(program.items):
        for call in (item,) if isinstance(item, Call) else item.body:
            broken = Program.from_json(program.to_json())
            if isinstance(item, Call):
                del broken.items[at]
            else:
                body = tuple(other for other in item.body if other != call)
                broken.items[at] = dataclasses.replace(item, body=body)
            written = {s.name_of(n) for s in broken.expand(2, 2) for n in s.call.outputs}
            try:
                validate(broken)
            except ProgramError:
                continue
            if wanted <= written:
                missed.append(str(call).split(",")[0])
    assert missed == [
        "grad.h = layernorm_backward_input(grad.h.{i}.ln_2.out",
        "grad.h = layernorm_backward_input(grad.h.{i}.ln_1.out",
        "grad.wte.weight = embedding_backward_weight(grad.h",
    ]
