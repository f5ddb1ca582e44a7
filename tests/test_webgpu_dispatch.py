"""The dispatch table: every op has kernels, every kernel exists, every expression evaluates, portable limits hold."""

from __future__ import annotations

import re
from importlib.resources import files

import pytest

from op_cases import CASES
from posttrainllm.config import PRESETS, load_config
from posttrainllm.engines.webgpu.dispatch import MOST_GROUPS, DispatchTable, Limits, source
from posttrainllm.engines.webgpu.work import work_of
from posttrainllm.model import inference_programs, training_programs
from posttrainllm.ops import OPS, OPTIONAL
from posttrainllm.plan import BoundCall, Place, make_plan

TABLE = DispatchTable(Limits())
MOST_STORAGE = 8  # buffers a stage, on every adapter
TEXTS = {
    entry.name: entry.read_text("utf-8")
    for entry in files("posttrainllm.kernels").joinpath("wgsl").iterdir()
    if entry.name.endswith(".wgsl")
}
ROWS = [(op, row) for op, rows in TABLE.ops.items() for row in rows]


def call_of(case) -> BoundCall:
    """A case of an op with places for its operands."""
    places = []
    for operand in case.row.operands:
        left_out = operand.optional and not case.attributes().get("bias", 1)
        places.append(None if left_out else Place(operand.name, 0, (1,)))
    sizes = tuple(case.sizes[letter] for letter in case.row.sizes)
    return BoundCall(case.op, tuple(places), sizes, tuple(case.attributes().values()))


def test_every_op_has_kernels():
    assert set(OPS) - set(OPTIONAL) <= set(TABLE.ops)


@pytest.mark.parametrize(("op", "row"), ROWS, ids=[f"{op}-{row['variant']}" for op, row in ROWS])
def test_kernels_of_a_variant_exist_and_bind_no_more_than_every_adapter_allows(op, row):
    for entry in row["passes"]:
        text = source(entry["file"])
        assert re.search(rf"@compute[^{{]*fn {entry['entry']}\(", text, re.DOTALL), entry["entry"]
        declared = set(re.findall(r"^override (\w+)", text, re.MULTILINE))
        assert set(entry.get("overrides", {})) <= declared
        assert len(entry["bind"]) <= MOST_STORAGE


def test_every_file_of_kernels_is_dispatched_or_is_part_of_one_that_is():
    wholes = [source(entry["file"]) for _, row in ROWS for entry in row["passes"]]
    unused = {name for name, text in TEXTS.items() if not any(text in whole for whole in wholes)}
    assert not unused


@pytest.mark.parametrize("case", [c for c in CASES.values() if c.op not in OPTIONAL], ids=str)
def test_every_variant_of_a_case_evaluates(case):
    work = work_of(call_of(case))
    names = TABLE.candidates(work)
    assert names
    assert len(set(names)) == len(names)
    for name in names:
        found = TABLE.dispatches(work, variant=name)
        assert found.passes
        assert found.workspace >= 0
        for dispatch in found.passes:
            assert all(0 < count <= MOST_GROUPS for count in dispatch.grid)
            assert len(dispatch.words) <= 64


@pytest.mark.parametrize("preset", PRESETS)
def test_every_preset_has_kernels_for_training_and_inference(preset):
    config = load_config(preset)
    sets = (
        training_programs(config.model, config.optimizer, config.data.batch_size),
        inference_programs(config.model),
    )
    for programs, dims in sets:
        plan = make_plan(programs, dims)
        for name in programs:
            for work in TABLE.merge(plan.bind(name)):
                TABLE.dispatches(work)


def test_a_step_at_small_takes_few_dispatches():
    config = load_config("small")
    plan = make_plan(*training_programs(config.model, config.optimizer, config.data.batch_size))
    table = DispatchTable(Limits(workgroup_bytes=32_768))
    calls = [*table.merge(plan.bind("gradients")), *table.merge(plan.bind("update"))]
    assert sum(len(table.dispatches(work).passes) for work in calls) <= 80
