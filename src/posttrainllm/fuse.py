"""Fusing: a program in, the same program with fewer passes over memory out.

What this is: a rewrite. Neighbouring calls of a body (a layer block, a row block, or the calls outside of both) that match a rule become
one or two calls of fused ops. A buffer between them disappears, which is why a rule applies only where nobody else reads it, and the plan
of a fused program is smaller. What is computed stays the same, and on the engines of the C++ kernels so do the bits.
What this is not: a part of the model. Every engine runs the plain program; which fused ops it has, it says in ``fused_ops``.
Read next: ``docs/ops/fused.md``.

The rules, on the names that the model gives:
    mlp.act = gelu_forward(mlp.fc = linear_forward(x))             linear_gelu_forward, which writes both: backward reads fc
    mid = add_forward(in, proj = linear_forward(x))                linear_residual_forward
    dfc = gelu_backward(dact = linear_backward_input(dout))        gelu_linear_backward_input; it computes act again for the weight's
                                                                   gradient, so that no layer keeps act until then
    linear_backward_weight(x, dout), linear_backward_bias(dout)    linear_backward_weight_bias
    layernorm_backward_weight, layernorm_backward_input            layernorm_backward, where dx is added to
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Collection
from dataclasses import dataclass

from posttrainllm.ops import ADD, OPS, WRITE
from posttrainllm.program import ROWS, Buffer, Call, Item, LayerBlock, Program, RowBlock, in_layer
from posttrainllm.validate import validate

_LAYERS, _CHUNKS = 3, 2  # what a program is unrolled to where its reads are counted
_AGAIN = ".again"  # behind the name of an activation that backward computes a second time

Calls = tuple[Call, ...]


@dataclass(frozen=True)
class Rule:
    """Consecutive ``plain`` ops become ``fused`` ones; ``rewrite`` gives the new calls, or None where operands do not fit."""

    plain: tuple[str, ...]
    fused: tuple[str, ...]
    rewrite: Callable[[Program, Calls], Calls | None]


def fuse(program: Program, supported: Collection[str]) -> Program:
    """The program with the fused ops of ``supported`` in it; the program itself where no rule applies.

    Raises: ProgramError when the result does not hold together, which is a fault of a rule.
    """
    fused = Program(program.name)
    fused.buffers, fused.items = dict(program.buffers), list(program.items)
    for rule in RULES:
        if all(op in supported or op in rule.plain for op in rule.fused):
            while _apply_once(fused, rule):
                pass
    _drop_unused(fused)
    validate(fused)
    return fused


# ---- rules ----------------------------------------------------------------------------------------------------------------------------


def _linear_gelu(program: Program, calls: Calls) -> Calls | None:
    linear, gelu = calls
    if linear.attrs["transposed"] or gelu.inputs != linear.outputs:
        return None
    return (
        Call(
            "linear_gelu_forward", (*gelu.outputs, *linear.outputs), linear.inputs, dict(gelu.attrs)
        ),
    )


def _linear_residual(program: Program, calls: Calls) -> Calls | None:
    linear, add = calls
    (out,) = linear.outputs
    if linear.attrs["transposed"] or add.inputs.count(out) != 1:
        return None
    (residual,) = (name for name in add.inputs if name != out)
    return (Call("linear_residual_forward", add.outputs, (residual, *linear.inputs)),)


def _gelu_linear_backward(program: Program, calls: Calls) -> Calls | None:
    linear, gelu, weight = calls
    act, dout, scalars = weight.inputs
    dact, fc = gelu.inputs
    plain = not weight.attrs["transposed"] and not linear.attrs["transposed"]
    if not plain or linear.attrs["accumulate"] != WRITE:
        return None
    if linear.outputs != (dact,) or linear.inputs[0] != dout:
        return None
    if act is None or not _is_gelu_of(program, act, fc, gelu.attrs["erf"]):
        return None
    again = dataclasses.replace(program.buffers[act], name=act + _AGAIN, role="scratch")
    program.buffers[again.name] = again
    return (
        Call(
            "gelu_linear_backward_input",
            (*gelu.outputs, again.name),
            (*linear.inputs, fc),
            dict(gelu.attrs),
        ),
        dataclasses.replace(weight, inputs=(again.name, dout, scalars)),
    )


def _linear_weight_bias(program: Program, calls: Calls) -> Calls | None:
    weight, bias = calls
    _, dout, scalars = weight.inputs
    accumulate = weight.attrs["accumulate"]
    if weight.attrs["transposed"] or bias.attrs["accumulate"] != accumulate:
        return None
    if bias.inputs != (dout, scalars):
        return None
    return (
        Call(
            "linear_backward_weight_bias",
            weight.outputs + bias.outputs,
            weight.inputs,
            {"accumulate": accumulate},
        ),
    )


def _layernorm(program: Program, calls: Calls) -> Calls | None:
    weight, inputs = calls
    dout, x, mean, rstd, scalars = weight.inputs
    if inputs.attrs["accumulate"] != ADD:
        return None
    if (inputs.inputs[:2], inputs.inputs[3:]) != ((dout, x), (mean, rstd)):
        return None
    return (
        Call(
            "layernorm_backward",
            inputs.outputs + weight.outputs,
            (*inputs.inputs, scalars),
            dict(weight.attrs),
        ),
    )


#: In the order in which they are tried: the third one takes the weight's gradient alone, before the fourth joins it to the bias's.
RULES = (
    Rule(("linear_forward", "gelu_forward"), ("linear_gelu_forward",), _linear_gelu),
    Rule(("linear_forward", "add_forward"), ("linear_residual_forward",), _linear_residual),
    Rule(
        ("linear_backward_input", "gelu_backward", "linear_backward_weight"),
        ("gelu_linear_backward_input", "linear_backward_weight"),
        _gelu_linear_backward,
    ),
    Rule(
        ("linear_backward_weight", "linear_backward_bias"),
        ("linear_backward_weight_bias",),
        _linear_weight_bias,
    ),
    Rule(
        ("layernorm_backward_weight", "layernorm_backward_input"),
        ("layernorm_backward",),
        _layernorm,
    ),
)


def _is_gelu_of(program: Program, act: str, fc: str | None, erf: float | str) -> bool:
    """Whether some call of the program makes ``act`` from ``fc``, as gelu in the same form."""
    return any(
        call.outputs[0] == act
        and call.attrs.get("erf") == erf
        and (
            (call.op == "gelu_forward" and call.inputs == (fc,))
            or (call.op == "linear_gelu_forward" and call.outputs[1] == fc)
        )
        for item in program.items
        for call in body_of(item)
    )


# ---- rewriting ------------------------------------------------------------------------------------------------------------------------


def body_of(item: Item) -> Calls:
    """The calls of a block, or the call itself."""
    return (item,) if isinstance(item, Call) else item.body


def _apply_once(program: Program, rule: Rule) -> bool:
    """Rewrite the first place where a rule applies; False where there is none."""
    width = len(rule.plain)
    for at, item in enumerate(program.items):
        if isinstance(item, Call):  # neighbours outside of blocks are neighbours in the list
            window = program.items[at : at + width]
            calls = tuple(call for call in window if isinstance(call, Call))
            new = _rewritten(program, rule, calls, None) if len(calls) == width else None
            if new is not None:
                program.items[at : at + width] = new
                return True
            continue
        for start in range(len(item.body) - width + 1):
            new = _rewritten(program, rule, item.body[start : start + width], item)
            if new is not None:
                body = item.body[:start] + new + item.body[start + width :]
                program.items[at] = dataclasses.replace(item, body=body)
                return True
    return False


def _rewritten(
    program: Program, rule: Rule, calls: Calls, block: LayerBlock | RowBlock | None
) -> Calls | None:
    if tuple(call.op for call in calls) != rule.plain:
        return None
    before = dict(program.buffers)
    new = rule.rewrite(program, calls)
    if new is not None:
        kept = {name for call in new for name in call.outputs}
        gone = {name for call in calls for name in call.outputs} - kept
        if all(_is_private(program, name, calls, block) for name in gone):
            return new
    program.buffers = before
    return None


def _is_private(
    program: Program, name: str, calls: Calls, block: LayerBlock | RowBlock | None
) -> bool:
    """Whether what these calls write to a buffer is read by these calls alone, and by no host."""
    here = sum(call.inputs.count(name) for call in calls)
    reads: Counter[str] = Counter()
    for step in program.expand(_LAYERS, _CHUNKS):
        reads.update(step.name_of(operand) for operand in _read_by(step.call))
    buffers = program.instances(_LAYERS)
    layers = block.order(_LAYERS) if isinstance(block, LayerBlock) else range(1)
    times = _CHUNKS if isinstance(block, RowBlock) else 1
    places = [in_layer(name.removesuffix(ROWS), i, _LAYERS) for i in layers]
    return len(set(places)) == len(places) and all(
        buffers[place].role in ("saved", "scratch") and reads[place] == here * times
        for place in places
    )


def _read_by(call: Call) -> list[str]:
    """Every operand that a call looks at, outputs that it adds to included."""
    found = [name for name in call.inputs if name is not None]
    for operand, name in zip(OPS[call.op].outputs, call.outputs, strict=True):
        if operand.mode == "update" or (
            operand.mode == "accumulate" and call.attrs.get("accumulate") != WRITE
        ):
            found.append(name)
    return found


def _drop_unused(program: Program) -> None:
    """Remove work space that no call touches any more; an activation that backward computes again need not be saved."""
    touched = {
        step.name_of(operand)
        for step in program.expand(_LAYERS, _CHUNKS)
        for operand in step.call.operands
        if operand is not None
    }
    kept: dict[str, Buffer] = {}
    for name, buffer in program.buffers.items():
        places = {in_layer(name, i, _LAYERS) for i in range(_LAYERS + 1)}
        if buffer.role in ("saved", "scratch") and not places & touched:
            continue
        if buffer.role == "saved" and name + _AGAIN in program.buffers:
            buffer = dataclasses.replace(buffer, role="scratch")
        kept[name] = buffer
    program.buffers = kept
