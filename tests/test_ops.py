"""Every op on every engine, over every case: guards, finite numbers, errors within the limits, the same bits every time.

The order of the checks is that of how a result can be worthless: not supported, written outside of its buffer, not finite, too far off,
inputs changed, another result the second time, with another number of threads, or from memory that is not aligned.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from guarded import ENGINES, MARK, GuardedMemory, OpEngine, Outcome, obtain
from op_cases import CASES, cases_of
from op_inputs import Array, Case, Operands, elements, operands, reference
from posttrainllm.engines.numpy_ops import NUMPY_OPS
from posttrainllm.ops import OPS, OPTIONAL
from tolerances import LIMITS, errors

ROOT = Path(__file__).parent.parent

_last: tuple[str, Operands, dict[str, Array]] | None = None


def prepared(case: Case) -> tuple[Operands, dict[str, Array]]:
    """Operands and reference; the engines of one case follow each other, so the last one is kept."""
    global _last
    if _last is None or _last[0] != str(case):
        given = operands(case)
        _last = (str(case), given, reference(case, given))
    return _last[1], _last[2]


def same_bits(left: Array, right: Array) -> bool:
    """Bitwise, so that NaN equals itself and 0 differs from -0."""
    return left.tobytes() == right.tobytes()


def check(case: Case, engine: OpEngine, outcome: Outcome) -> None:
    """Guards, finite, within the limit, inputs as they were."""
    given, ref = prepared(case)
    assert not outcome.broken, f"wrote outside of {', '.join(outcome.broken)}"
    got = outcome.outputs(case)
    for name, wanted in ref.items():
        bad = np.isfinite(wanted) & ~np.isfinite(got[name])
        assert not bad.any(), f"{name} has {np.count_nonzero(bad)} numbers that are not finite"
    limit = LIMITS[case.op].of(engine.name)
    for name, error in errors(case, given, ref, got).items():
        assert error <= limit, f"{name} is off by {error:.3g} eps * s, the limit is {limit:g}"
    for operand in case.row.inputs:
        before, after = given[operand.name], outcome.after[operand.name]
        if before is not None and after is not None:
            assert same_bits(before, after), f"changed its input {operand.name}"


def assert_same(case: Case, first: Outcome, other: Outcome, when: str) -> None:
    for name, value in first.outputs(case).items():
        assert same_bits(value, other.outputs(case)[name]), f"{name} has other bits {when}"


@pytest.mark.parametrize("engine_name", ENGINES)
@pytest.mark.parametrize(
    "case", [pytest.param(c, id=n, marks=[pytest.mark.slow] * c.slow) for n, c in CASES.items()]
)
def test_op_is_right(case: Case, engine_name: str) -> None:
    engine = obtain(engine_name, pytest.skip)
    assert engine.supports(case.op), f"{engine_name} has no {case.op}"
    given, _ = prepared(case)
    first = engine.run(case, given)
    check(case, engine, first)
    assert_same(case, first, engine.run(case, given), "the second time")
    for threads in engine.threads[1:2] if case.slow else engine.threads[1:]:
        assert_same(
            case, first, engine.run(case, given, threads=threads), f"with {threads} threads"
        )
    check(case, engine, engine.run(case, given, shift=1))


@pytest.mark.parametrize("engine_name", ENGINES)
@pytest.mark.parametrize("op", OPS)
def test_a_nan_that_goes_in_comes_out(op: str, engine_name: str) -> None:
    """No maximum, clamp or mask may swallow it: the clip op has to see it, or a broken model trains on."""
    engine = obtain(engine_name, pytest.skip)
    plain = [case for case in cases_of(op) if case.kind == "normal" and not case.accumulates]
    case = max(
        (case for case in plain if elements(case) <= 20_000), key=elements, default=cases_of(op)[0]
    )
    for operand in case.row.inputs:
        given = operands(case)
        value = given[operand.name]
        if value is None or value.dtype == np.int32 or operand.name in ("scalars", "clip"):
            continue
        value[...] = np.nan
        got = engine.run(case, given).outputs(case)
        assert any(np.isnan(result).any() for result in got.values()), operand.name


@pytest.mark.parametrize("engine_name", [name for name in ENGINES if name.startswith("cpp")])
def test_layernorms_mean_is_right_to_its_last_bit(engine_name: str) -> None:
    """In a nearly constant row rstd multiplies its error by hundreds, so the kernel corrects the mean by the mean of x - mean."""
    engine = obtain(engine_name, pytest.skip)
    case = Case("layernorm_forward", {"N": 257, "C": 769}, {"eps": 1e-5})
    given = operands(case)
    x = given["x"]
    assert x is not None
    x *= np.float32(1e-3)
    x += np.float32(1000.0)
    wanted = x.astype(np.float64).mean(axis=1)
    got = engine.run(case, given).outputs(case)["mean"]
    error = np.abs(got - wanted) / np.spacing(wanted.astype(np.float32))
    assert error.max() < 0.75, f"off by {error.max():.3g} units in the last place"


# ---- nothing is left out ------------------------------------------------------------------------


def test_every_op_has_cases_and_a_limit_with_its_reason() -> None:
    assert set(LIMITS) == set(OPS)
    assert {case.op for case in CASES.values()} == set(OPS)
    for op in OPS:
        assert any(not case.slow for case in cases_of(op)), f"{op} has no case in the fast tests"
        assert LIMITS[op].reason


@pytest.mark.parametrize("op", OPS)
def test_every_attribute_and_mode_of_an_op_is_tried(op: str) -> None:
    row, cases = OPS[op], cases_of(op)
    if "transposed" in row.attrs:
        assert {case.attributes()["transposed"] for case in cases} == {0, 1}
    if "erf" in row.attrs:
        assert {case.attributes()["erf"] for case in cases} == {0, 1}
    if "accumulate" in row.attrs:
        reads_beta = any(operand.name == "scalars" for operand in row.inputs)
        wanted = {"write", "add", "beta0", "beta1"} if reads_beta else {"write", "add"}
        assert {case.mode for case in cases} == wanted
    for operand in row.inputs:
        if operand.optional:
            assert any(operand.name in case.without for case in cases)
    for letter in row.sizes:
        assert any(case.sizes[letter] == 1 for case in cases), f"no case has {letter} = 1"
        assert len({case.sizes[letter] for case in cases}) >= 3


def test_the_numpy_engine_has_the_ops_of_the_table_in_its_order() -> None:
    assert list(NUMPY_OPS) == list(OPS)


@pytest.mark.parametrize("engine_name", [name for name in ENGINES if name != "numpy"])
def test_the_cpp_kernels_have_the_ops_of_the_table_in_its_order(engine_name: str) -> None:
    engine: Any = obtain(engine_name, pytest.skip)
    assert engine.ops == list(OPS)


@pytest.mark.parametrize("op", OPS)
def test_every_op_is_declared_for_cpp_with_its_operands_in_the_tables_order(op: str) -> None:
    header = (ROOT / "src/posttrainllm/kernels/cpp/ops.h").read_text(encoding="utf-8")
    found = re.search(rf"\bvoid {op}\(([^)]*)\)", header)
    assert found, f"ops.h declares no {op}"
    names = [part.split()[-1].lstrip("*") for part in found[1].split(",")]
    assert names[: len(OPS[op].operands)] == [operand.name for operand in OPS[op].operands]


@pytest.mark.parametrize("family", sorted({op.family for op in OPS.values()}))
def test_every_family_has_its_kernels_and_its_page(family: str) -> None:
    names = [op.name for op in OPS.values() if op.family == family]
    assert (ROOT / "src/posttrainllm/kernels/cpp" / f"{family}.cpp").is_file()
    page = ROOT / "docs/ops" / f"{family}.md"
    assert page.is_file(), f"docs/ops/{family}.md is missing"
    text = page.read_text(encoding="utf-8")
    assert not [name for name in names if name not in text], "the page names every op of the family"


# ---- the definition's corners -------------------------------------------------------------------


def outputs(op: str, **settings: Any) -> dict[str, Array]:
    case = next(
        case for case in cases_of(op) if all(getattr(case, k) == v for k, v in settings.items())
    )
    return reference(case, operands(case))


@pytest.mark.parametrize("op", ["cross_entropy_forward", "cross_entropy_backward"])
def test_ignored_rows_cost_nothing(op: str) -> None:
    found = outputs(op, kind="ignored")
    assert not found["row_loss" if op.endswith("forward") else "dlogits"].any()


def test_equal_logits_cost_the_logarithm_of_the_vocabulary() -> None:
    found = outputs("cross_entropy_forward", kind="equal")
    assert np.abs(found["lse"] - np.log(259)).max() <= 1e-12


def test_a_flagged_step_changes_nothing() -> None:
    case = next(case for case in cases_of("adamw_step") if case.kind == "flagged")
    given = operands(case)
    for name, value in reference(case, given).items():
        assert np.array_equal(value, given[name].astype(np.float64))  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("kind", "clip_norm", "scale", "flag"),
    [
        ("above", 1.0, 1 / np.sqrt(2 * 3.7), 0),
        ("above", 0.0, 1, 0),
        ("below", 1.0, 1, 0),
        ("zero", 1.0, 1, 0),
        ("inf", 1.0, 0, 1),
        ("nan", 1.0, 1, 1),
        ("sticky", 1.0, 1 / np.sqrt(2 * 3.7), 1),
    ],
)
def test_the_clip_scales_down_and_its_flag_is_sticky(
    kind: str, clip_norm: float, scale: float, flag: int
) -> None:
    clip = outputs("gradient_clip", kind=kind, attrs={"clip_norm": clip_norm})["clip"]
    assert abs(clip[1] - scale) <= 1e-7
    assert clip[2] == flag
    assert np.isfinite(clip[0]) == (kind not in ("inf", "nan"))


# ---- the checks themselves ----------------------------------------------------------------------


def sabotaged(spoil: Callable[[dict[str, Any]], None]) -> Outcome:
    """A right result of one op, spoilt."""
    case = CASES["add_forward-N13C17"]
    given = operands(case)
    memory = GuardedMemory(given)
    views: dict[str, Any] = dict(memory.views)
    views["out"][...] = views["a"] + views["b"]
    spoil(views | {"words": memory.words, "at": memory.offsets})
    return Outcome(memory.views, memory.broken_guards())


def past_the_end(views: dict[str, Any]) -> None:
    views["words"][views["at"]["out"] + views["out"].size] = 0


def far_before_the_start(views: dict[str, Any]) -> None:
    views["words"][views["at"]["a"] - 400] = 0


def one_nan(views: dict[str, Any]) -> None:
    views["out"][3, 3] = np.nan


def one_element_left_out(views: dict[str, Any]) -> None:
    views["out"][12, 16] = -7.25e30


def last_bit(views: dict[str, Any]) -> None:
    views["out"].view(np.uint32)[5, 5] ^= 1


def input_touched(views: dict[str, Any]) -> None:
    views["b"][0, 0] = 0


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (past_the_end, r"wrote outside of out \(1 elements away\)"),
        (far_before_the_start, r"wrote outside of a \(400 elements away\)"),
        (one_nan, "out has 1 numbers that are not finite"),
        (one_element_left_out, "out is off by"),
        (last_bit, "out is off by .* the limit is 0"),
        (input_touched, "changed its input b"),
    ],
)
def test_the_checks_find_a_fault(spoil: Callable[[dict[str, Any]], None], message: str) -> None:
    check(CASES["add_forward-N13C17"], obtain("numpy", pytest.skip), sabotaged(lambda views: None))
    with pytest.raises(AssertionError, match=message):
        check(CASES["add_forward-N13C17"], obtain("numpy", pytest.skip), sabotaged(spoil))


def test_guards_are_not_numbers() -> None:
    assert np.isnan(np.array([MARK]).view(np.float32)).all()


def test_the_docs_table_has_every_op_within_its_limit() -> None:
    page = ROOT / "docs" / "ops" / "support.md"
    again = "write it again with: python tests/op_report.py --write"
    assert page.is_file(), again
    lines = page.read_text(encoding="utf-8").splitlines()
    rows = [[cell.strip(" `") for cell in line.split("|")[1:-1]] for line in lines if "|" in line]
    limits = {op: "exact" if limit.exact else f"{limit.native:g}" for op, limit in LIMITS.items()}
    assert {row[0]: row[1] for row in rows[2:]} == limits, again
    assert rows[0][2] == "numpy"
    for row in rows[2:]:
        held = [cell for cell in row[2:] if cell != "-" or row[0] not in OPTIONAL]
        assert all(cell == "exact" or float(cell) <= 1 for cell in held), row
