"""The op cases as files, for engines that do not run in Python.

    python tests/op_vectors.py FOLDER [op ...]
    python tests/op_vectors.py FOLDER --page      the few that the site's /kernels page runs in a visitor's browser

writes ``cases.json`` and ``data.bin`` (little endian, every array on a multiple of 8 bytes). For each case: the op, its sizes and
attributes in the table's order, its operands with their content before the run (null where one is left out), and for each output the
float64 reference, the float64 scale s and the limit c of ``max |got - ref| / (eps * s) <= c``. Guards, poison and the other checks of
``test_ops.py`` are the reader's part.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

from op_cases import CASES
from op_inputs import Array, Case, elements, operands, reference
from posttrainllm.lab.limits import EARLY_STEPS, PARITY_RATE, loss_limit
from posttrainllm.ops import OPS
from tolerances import EPS, LIMITS

FORMAT = 1
PAGE_CASES = 4  # of an op
PAGE_SMALL, PAGE_LARGE = 2_500, 8_000  # elements of all but one, and of that one
MAX_ELEMENTS = 50_000  # of all operands: larger cases stay out of the files


class _Data:
    """Arrays one behind the other."""

    def __init__(self) -> None:
        self.parts: list[bytes] = []
        self.size = 0

    def add(self, array: Array) -> dict[str, Any]:
        raw = np.ascontiguousarray(array).tobytes()
        place = {"dtype": array.dtype.name, "shape": list(array.shape), "offset": self.size}
        raw += bytes(-len(raw) % 8)
        self.parts.append(raw)
        self.size += len(raw)
        return place


def save(
    folder: Path,
    cases: Iterable[Case],
    *,
    engine: str = "wasm",
    scales_as: type = np.float64,
    **more: Any,
) -> int:
    """Write the files with the limits of an engine, and ``more`` beside the cases; the number of cases written."""
    data, entries = _Data(), []
    for case in cases:
        if elements(case) > MAX_ELEMENTS:
            continue
        given = operands(case)
        ref = reference(case, given)
        limit = LIMITS[case.op]
        scales = limit.scale(case, given, ref)
        entries.append(
            {
                "name": str(case),
                "op": case.op,
                "sizes": [case.sizes[letter] for letter in case.row.sizes],
                "attrs": list(case.attributes().values()),
                "operands": [
                    None if value is None else {"name": name, **data.add(value)}
                    for name, value in given.items()
                ],
                "results": [
                    {
                        "name": name,
                        "ref": data.add(value),
                        "scale": data.add((scales[name] + 0.0).astype(scales_as)),
                    }
                    for name, value in ref.items()
                ],
                "limit": limit.of(engine),
                "limits": {name: limit.of(name) for name in ("wasm", "webgpu")},
                "exact": limit.exact,
            }
        )
    folder.mkdir(parents=True, exist_ok=True)
    text = json.dumps({"format": FORMAT, "engine": engine, "eps": EPS, "cases": entries, **more})
    (folder / "cases.json").write_text(text, encoding="utf-8")
    (folder / "data.bin").write_bytes(b"".join(data.parts))
    return len(entries)


def page_cases() -> list[Case]:
    """A few cases of every op: the smallest, some in between, and the largest that is small enough to be sent to a browser."""
    chosen = []
    for op in OPS:
        cases = sorted((c for c in CASES.values() if c.op == op and not c.slow), key=elements)
        small = [case for case in cases if elements(case) <= PAGE_SMALL]
        large = [case for case in cases if elements(case) <= PAGE_LARGE]
        spread = {round(k * (len(small) - 1) / (PAGE_CASES - 2)) for k in range(PAGE_CASES - 1)}
        chosen += [small[k] for k in sorted(spread)] + [c for c in large[-1:] if c not in small]
    return chosen


def save_for_page(folder: Path) -> int:
    """Write what the site's /kernels page needs: cases, and how close two engines must stay over some steps."""
    early, later = loss_limit("webgpu", EARLY_STEPS), loss_limit("webgpu", EARLY_STEPS + 1)
    parity = {
        "preset": "tiny",
        "steps": 50,
        "settings": {
            "schedule.kind": "constant",
            "schedule.warmup_steps": 0,
            "schedule.learning_rate": PARITY_RATE,
        },
        "early_steps": EARLY_STEPS,
        "limits": [early, later],
    }
    return save(folder, page_cases(), scales_as=np.float32, parity=parity)


def load(folder: Path) -> list[dict[str, Any]]:
    """The cases with arrays in place of their places."""
    raw = (folder / "data.bin").read_bytes()

    def filled(entry: Any) -> Any:
        if isinstance(entry, list):
            return [filled(part) for part in entry]
        if not isinstance(entry, dict):
            return entry
        if "offset" in entry:
            shape, dtype = entry["shape"], np.dtype(entry["dtype"])
            count = int(np.prod(shape, dtype=np.int64))
            array = np.frombuffer(raw, dtype, count, entry["offset"]).reshape(shape)
            return {**entry, "array": array}
        return {key: filled(value) for key, value in entry.items()}

    cases: list[dict[str, Any]] = filled(json.loads((folder / "cases.json").read_text())["cases"])
    return cases


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("ops", nargs="*", help="ops to write (default: all)")
    parser.add_argument("--engine", default="wasm", help="whose limits: wasm (default) or webgpu")
    parser.add_argument("--page", action="store_true", help="the cases of the /kernels page")
    arguments = parser.parse_args()
    if arguments.page:
        print(f"{save_for_page(arguments.folder)} cases in {arguments.folder}")
        return
    chosen = [
        case
        for case in CASES.values()
        if not case.slow and (not arguments.ops or case.op in arguments.ops)
    ]
    print(f"{save(arguments.folder, chosen, engine=arguments.engine)} cases in {arguments.folder}")


if __name__ == "__main__":
    main()
