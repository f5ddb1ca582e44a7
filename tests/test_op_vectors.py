"""The op cases as files say the same as the op cases in Python."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from op_cases import CASES
from op_inputs import elements, operands, reference
from op_vectors import MAX_ELEMENTS, load, save
from posttrainllm.ops import OPS
from tolerances import LIMITS


def test_files_hold_operands_references_and_limits(tmp_path: Path) -> None:
    chosen = [case for case in CASES.values() if not case.slow][::5]
    written = save(tmp_path, chosen, engine="webgpu")
    loaded = load(tmp_path)
    assert written == len(loaded) >= 50
    by_name = {str(case): case for case in chosen}
    for entry in loaded:
        case = by_name[entry["name"]]
        given = operands(case)
        assert entry["op"] == case.op
        assert entry["sizes"] == [case.sizes[letter] for letter in OPS[case.op].sizes]
        assert entry["attrs"] == list(case.attributes().values())
        assert entry["limit"] == LIMITS[case.op].webgpu
        for part, (name, value) in zip(entry["operands"], given.items(), strict=True):
            assert (part is None) == (value is None)
            if part is not None and value is not None:
                assert part["name"] == name
                assert part["array"].dtype == value.dtype
                assert part["array"].tobytes() == value.tobytes()
        ref = reference(case, given)
        scales = LIMITS[case.op].scale(case, given, ref)
        for part, (name, value) in zip(entry["results"], ref.items(), strict=True):
            assert part["name"] == name
            assert np.array_equal(part["ref"]["array"], value, equal_nan=True)
            assert np.array_equal(part["scale"]["array"], scales[name], equal_nan=True)


def test_files_have_small_cases_of_every_op() -> None:
    small = [case for case in CASES.values() if not case.slow and elements(case) <= MAX_ELEMENTS]
    assert {case.op for case in small} == set(OPS)
