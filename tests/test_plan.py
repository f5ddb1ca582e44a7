"""Plans: every byte known, aligned and inside its region, and no live buffer ever overwritten by another."""

from __future__ import annotations

import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from model_cases import SETS, VARIANTS, model, random_models
from posttrainllm.config import PRESETS, GPTConfig, OptimizerConfig, load_config
from posttrainllm.errors import ProgramError
from posttrainllm.model import inference_programs, model_dims, training_programs
from posttrainllm.ops import OPS
from posttrainllm.plan import (
    ALIGN,
    ARENAS,
    CHUNK_BYTES,
    CHUNK_ROWS,
    PARTS,
    Plan,
    chunk_rows,
    chunks,
    make_plan,
)
from posttrainllm.program import Program

# DESIGN's table: parameters with the byte vocabulary (gpt2: its own 50257)
COUNTS = {
    "tiny": 70_464,
    "small": 366_432,
    "medium": 838_400,
    "large": 2_743_296,
    "xl": 6_416_896,
    "huge": 9_608_704,
    "massive": 25_039_872,
    "mega": 25_138_176,
    "behemoth": 473_244_160,
    "gpt2": 124_439_808,
}


def training_plan(config: GPTConfig, batch: int = 2) -> Plan:
    return make_plan(*training_programs(config, OptimizerConfig(), batch))


def preset_plan(name: str) -> Plan:
    config = load_config(name)
    return make_plan(*training_programs(config.model, config.optimizer, config.data.batch_size))


def held(plan: Plan, *kinds: str) -> int:
    """Bytes of the regions of some kinds: the first part of their names."""
    return sum(r.nbytes for r in plan.regions.values() if r.name.split(".")[0] in kinds)


PLANS = [
    pytest.param(make_plan(*build(config, 3)), id=f"{kind}-{variant}")
    for kind, build in SETS.items()
    for variant, config in VARIANTS.items()
]


# ---- no buffer is overwritten while it is needed ------------------------------------------------


class Owners:
    """Memory that remembers which buffer wrote each element last."""

    def __init__(self, plan: Plan) -> None:
        self.ids: dict[str, int] = {}
        self.memory = {name: np.full(r.elements, -1) for name, r in plan.regions.items()}

    def id_of(self, buffer: str) -> int:
        return self.ids.setdefault(buffer, len(self.ids))

    def who(self, region: str, offset: int, elements: int) -> set[int]:
        return set(np.unique(self.memory[region][offset : offset + elements]).tolist())


def simulate(plan: Plan, name: str, **smaller: int) -> None:
    """Run a program on owners instead of numbers: whatever a call reads must still be that buffer's."""
    program, dims = plan.programs[name], {**plan.dims[name], **smaller}
    buffers = program.instances(dims["L"])
    owners = Owners(plan)
    for buffer_name, place in plan.places[name].items():
        if buffers[buffer_name].role in ("param", "grad", "moment", "state", "input"):
            held = owners.memory[place.region][place.offset : place.offset + place.elements]
            assert (held == -1).all(), f"{buffer_name} lies over another one in {place.region}"
            held[:] = owners.id_of(buffer_name)
    steps = program.expand(dims["L"], chunks(program, dims))
    bound = plan.bind(name, **smaller)
    assert len(steps) == len(bound)
    for step, call in zip(steps, bound, strict=True):
        row = OPS[call.op]
        assert call.op == step.call.op
        assert len(call.sizes) == len(row.sizes)
        assert len(call.attrs) == len(row.attrs)
        named = list(zip(row.operands, step.call.operands, call.operands, strict=True))
        for operand, buffer_name, place in named:
            if buffer_name is None or place is None:
                assert operand.optional
                assert buffer_name is None
                assert place is None
                continue
            adds = operand.mode == "accumulate" and dict(
                zip(row.attrs, call.attrs, strict=True)
            ).get("accumulate")
            if operand.mode in ("read", "update") or adds:
                whose = owners.who(place.region, place.offset, place.elements)
                wanted = {owners.id_of(step.name_of(buffer_name))}
                if buffers[step.name_of(buffer_name)].role == "output":
                    wanted |= {-1}
                assert whose <= wanted, f"{step.call} reads {buffer_name} after {whose} took it"
        for operand, buffer_name, place in named:
            if operand.mode != "read" and buffer_name is not None and place is not None:
                assert place.offset + place.elements <= plan.regions[place.region].elements
                at = slice(place.offset, place.offset + place.elements)
                owners.memory[place.region][at] = owners.id_of(step.name_of(buffer_name))
        for operand, buffer_name, place in named:
            if operand.mode == "read" and buffer_name is not None and place is not None:
                whose = owners.who(place.region, place.offset, place.elements)
                assert whose == {owners.id_of(step.name_of(buffer_name))}, (
                    f"{step.call} writes over {buffer_name}, which it reads"
                )


@pytest.mark.parametrize("plan", PLANS)
def test_no_call_reads_what_another_buffer_has_overwritten(plan: Plan) -> None:
    for name in plan.programs:
        simulate(plan, name)


@settings(max_examples=25)
@given(config=random_models(), batch=st.integers(1, 4), kind=st.sampled_from(list(SETS)))
def test_random_models_are_planned_without_overlap(config, batch: int, kind: str) -> None:
    plan = make_plan(*SETS[kind](config, batch))
    for name in plan.programs:
        simulate(plan, name)
    check_places(plan)


def test_no_call_overwrites_another_buffer_in_many_row_chunks() -> None:
    programs, dims = training_programs(model(n_layer=1), OptimizerConfig(), 2)
    for rows in (1, 3, 4, 12):
        plan = make_plan(programs, {name: {**d, "R": rows} for name, d in dims.items()})
        assert chunks(programs["gradients"], plan.dims["gradients"]) == 12 // rows
        simulate(plan, "gradients")
        simulate(plan, "loss")


def test_the_simulation_sees_two_live_buffers_in_one_place() -> None:
    plan = training_plan(model())
    places = plan.places["gradients"]
    held = places["h.0.ln_1.out"]
    places["h.0.ln_1.out"] = places["h.0.in"]
    with pytest.raises(AssertionError, match=r"writes over h.0.in, which it reads"):
        simulate(plan, "gradients")
    places["h.0.ln_1.out"], places["h.0.attn.out"] = held, places["h.0.in"]
    with pytest.raises(AssertionError, match=r"reads h.0.in after"):
        simulate(plan, "gradients")


# ---- places and regions -------------------------------------------------------------------------


def check_places(plan: Plan) -> None:
    """Alignment, bounds, dtypes, and that no region is larger than the largest of its users."""
    ends = dict.fromkeys(plan.regions, 0)
    for name, places in plan.places.items():
        buffers = plan.programs[name].instances(plan.dims[name]["L"])
        for buffer_name, place in places.items():
            region = plan.regions[place.region]
            assert place.offset * 4 % 256 == 0, buffer_name
            assert place.offset + place.elements <= region.elements, buffer_name
            assert region.dtype == buffers[buffer_name].dtype, buffer_name
            ends[place.region] = max(ends[place.region], place.offset + place.elements)
    for name, region in plan.regions.items():
        assert region.name == name
        assert region.nbytes % 256 == 0
        assert region.nbytes > 0
        # an arena without a tensor of its own (no program of the set touches it) may stay larger
        if name.split(".")[0] not in ("grad", "adam"):
            assert region.elements - ends[name] < ALIGN, f"{name} is larger than anyone needs"
    assert plan.nbytes == sum(region.nbytes for region in plan.regions.values())


@pytest.mark.parametrize("plan", PLANS)
def test_every_buffer_is_aligned_and_lies_inside_a_region_that_fits(plan: Plan) -> None:
    check_places(plan)


@pytest.mark.parametrize("preset", PRESETS)
def test_presets_have_the_parameters_of_the_design(preset: str) -> None:
    plan = preset_plan(preset)
    assert sum(place.elements for _, place in plan.layout.values()) == COUNTS[preset]
    assert load_config(preset).model.parameters() == COUNTS[preset]


@pytest.mark.parametrize("plan", [p for p in PLANS if str(p.id).startswith("training")])
def test_the_four_arenas_have_one_layout_with_decayed_tensors_apart(plan: Plan) -> None:
    for part in PARTS:
        sizes = {plan.regions[f"{kind}.{part}"].elements for kind in ARENAS}
        assert len(sizes) == 1
    for name, (part, place) in plan.layout.items():
        assert part == ("decayed" if len(place.shape) >= 2 else "plain")
        offsets = {plan.tensor(kind, name).offset for kind in ARENAS}
        assert offsets == {place.offset}
        assert plan.places["gradients"][name] == plan.tensor("param", name)
        assert plan.places["gradients"][f"grad.{name}"] == plan.tensor("grad", name)
    update = plan.places["update"]
    for part in PARTS:
        for kind in ARENAS:
            place = update[f"{kind}.{part}"]
            assert place.offset == 0
            assert place.elements == plan.regions[place.region].elements


def test_inference_takes_no_memory_for_training() -> None:
    plan = make_plan(*inference_programs(model(), 2))
    assert held(plan, "grad", "adam") == 0
    assert held(plan, "param") > 0
    assert held(plan, "state") == 2 * 1024, "two layers, 2 x 2 x 6 x 10 numbers each, aligned"


def test_programs_of_a_set_share_regions_of_the_largest_size() -> None:
    programs, dims = training_programs(model(), OptimizerConfig(), 4)
    together = make_plan(programs, dims)
    alone = {
        name: make_plan({name: programs[name]}, {name: dims[name]})
        for name in programs
        if name != "update"
    }
    for name, region in together.regions.items():
        sizes = [plan.regions[name].elements for plan in alone.values() if name in plan.regions]
        if sizes and not name.startswith("work."):
            assert region.elements == max(sizes), name
    work = [held(plan, "work") for plan in alone.values()]
    assert held(together, "work") <= 1.05 * max(work), "slots of two programs do not overlap"


def live_elements(plan: Plan, name: str) -> int:
    """The largest number of elements of work space that are alive during one call."""
    program, dims = plan.programs[name], plan.dims[name]
    buffers = program.instances(dims["L"])
    steps = program.expand(dims["L"], chunks(program, dims))
    span: dict[str, tuple[int, int]] = {}
    for index, step in enumerate(steps):
        for operand in step.call.operands:
            if operand and buffers[step.name_of(operand)].role in ("saved", "scratch"):
                buffer = step.name_of(operand)
                span[buffer] = (span.get(buffer, (index, index))[0], index)
    size = {buffer: -(-plan.places[name][buffer].elements // ALIGN) * ALIGN for buffer in span}
    return max(
        sum(size[b] for b, (first, last) in span.items() if first <= index <= last)
        for index in range(len(steps))
    )


@pytest.mark.parametrize("preset", ["tiny", "small", "medium", "large", "gpt2"])
def test_work_space_is_little_more_than_what_is_alive_at_once(preset: str) -> None:
    plan = preset_plan(preset)
    most = max(live_elements(plan, name) for name in plan.programs)
    assert held(plan, "work") <= 1.10 * 4 * most


def test_a_parameter_cannot_have_two_shapes_in_one_set() -> None:
    programs, dims = inference_programs(model(), 1)
    dims["loss"] = dims["loss"] | {"C": 20}
    with pytest.raises(
        ProgramError, match=r"parameter 'wte.weight' is \(13, 10\) in program logits and \(13, 20\)"
    ):
        make_plan(programs, dims)


# ---- binding ------------------------------------------------------------------------------------


@pytest.mark.parametrize("smaller", [{}, {"T": 1}, {"T": 5}, {"B": 1}, {"B": 2, "T": 3}])
def test_smaller_dims_stay_in_the_planned_places(smaller: dict[str, int]) -> None:
    plan = make_plan(*inference_programs(model(), 3))
    for name in ("prefill", "logits"):
        simulate(plan, name, **smaller)
        for call, full in zip(plan.bind(name, **smaller), plan.bind(name), strict=True):
            for place, planned in zip(call.operands, full.operands, strict=True):
                if place is not None and planned is not None:
                    assert (place.region, place.offset) == (planned.region, planned.offset)
                    assert place.elements <= planned.elements


@pytest.mark.parametrize(("dim", "value"), [("T", 7), ("B", 4), ("T", 0), ("B", -1)])
def test_dims_that_do_not_fit_the_plan_are_refused(dim: str, value: int) -> None:
    plan = make_plan(*inference_programs(model(), 3))
    planned = plan.dims["prefill"][dim]
    wanted = f"program prefill: {dim} = {value} does not fit the plan's {dim} = {planned}"
    with pytest.raises(ProgramError, match=wanted):
        plan.bind("prefill", **{dim: value})


def test_bound_calls_carry_sizes_and_attributes_in_the_tables_order() -> None:
    config = model(n_inner=7, activation="gelu")
    plan = training_plan(config, batch=3)
    first: dict[str, tuple[tuple[int, ...], tuple[float, ...]]] = {}
    for call in plan.bind("gradients") + plan.bind("update") + plan.bind("decode"):
        first.setdefault(call.op, (call.sizes, call.attrs))
    assert first["embedding_forward"] == ((18, 10, 13, 6), ())
    assert first["layernorm_forward"] == ((18, 10), (1e-5,))
    assert first["linear_forward"] == ((18, 10, 30), (0.0,))
    assert first["gelu_forward"] == ((18, 7), (1.0,))
    assert first["attention_forward"] == ((3, 6, 10, 2), ())
    assert first["attention_decode"] == ((1, 1, 10, 6), (2.0,))
    assert first["gradient_clip"] == ((), (1.0,))
    assert first["adamw_step"][1] == (0.9, 0.95, 1e-8, 0.1)
    decay = [call.attrs[3] for call in plan.bind("update") if call.op == "adamw_step"]
    assert decay == [0.1, 0.0]


def test_an_attribute_that_names_no_dim_is_refused() -> None:
    program = Program("small")
    program.buffer("x", "B*T", "3*C", role="input")
    program.buffer("cache", "2", "B", "S", "C", role="state")
    program.buffer("positions", "B*T", role="input", dtype="i32")
    program.buffer("out", "B*T", "C", role="output")
    program.call("attention_decode", ["out"], ["x", "cache", "positions"], n_head="heads")
    plan = make_plan({"small": program}, {"small": {"B": 1, "T": 1, "C": 2, "S": 3, "L": 1}})
    with pytest.raises(ProgramError, match="heads needs the dim 'heads'; given are B, C"):
        plan.bind("small")


# ---- row chunks ---------------------------------------------------------------------------------


def test_row_chunks_have_to_divide_the_rows() -> None:
    programs, dims = training_programs(model(), OptimizerConfig(), 2)
    with pytest.raises(
        ProgramError, match="program gradients: chunks of 5 rows do not divide 12 rows"
    ):
        make_plan(programs, {name: {**d, "R": 5} for name, d in dims.items()})


@given(rows=st.integers(1, 4096), n_vocab=st.sampled_from([2, 256, 50257, 4_194_304]))
def test_chunk_rows_divides_and_keeps_logits_small(rows: int, n_vocab: int) -> None:
    size = chunk_rows(rows, n_vocab)
    divisors = [s for s in range(1, rows + 1) if rows % s == 0]
    fitting = [s for s in divisors if s * n_vocab * 4 <= CHUNK_BYTES]
    assert size in divisors
    if size not in fitting:  # a chunk of a few rows would read the whole head for them
        assert max(fitting, default=0) < CHUNK_ROWS
        assert size == min([s for s in divisors if s >= CHUNK_ROWS] or [rows])
    elif any(s % 64 == 0 for s in fitting):
        assert size == max(s for s in fitting if s % 64 == 0)
    else:
        assert size == max(fitting)


def test_plan_of_a_thousand_layers_is_a_matter_of_seconds() -> None:
    config = load_config("tiny", flags={"model.n_layer": 1024, "model.n_embd": 3})
    began = time.process_time()
    plan = make_plan(*training_programs(config.model, config.optimizer, config.data.batch_size))
    assert plan.nbytes > 12 * config.model.parameters()
    assert time.process_time() - began < 30


@pytest.mark.parametrize("preset", PRESETS)
def test_logits_of_a_preset_never_exist_all_at_once_beyond_the_limit(preset: str) -> None:
    config = load_config(preset)
    dims = model_dims(config.model, config.data.batch_size)
    assert dims["R"] * dims["V"] * 4 <= CHUNK_BYTES
    assert dims["R"] % 64 == 0


def test_memory_of_behemoth_is_what_the_facts_say() -> None:
    plan = preset_plan("behemoth")
    assert 7.5e9 <= held(plan, "param", "grad", "adam") <= 7.7e9
    assert held(plan, "param", "grad", "adam", "work") <= 9.2e9
