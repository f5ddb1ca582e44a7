"""The op cases as files, for engines that do not run in Python.

    python tests/op_vectors.py FOLDER [op ...]

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
from tolerances import EPS, LIMITS

FORMAT = 1
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


def save(folder: Path, cases: Iterable[Case], *, engine: str = "wasm") -> int:
    """Write the files with the limits of an engine; the number of cases written."""
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
                    {"name": name, "ref": data.add(value), "scale": data.add(scales[name] + 0.0)}
                    for name, value in ref.items()
                ],
                "limit": limit.of(engine),
                "exact": limit.exact,
            }
        )
    folder.mkdir(parents=True, exist_ok=True)
    text = json.dumps({"format": FORMAT, "engine": engine, "eps": EPS, "cases": entries})
    (folder / "cases.json").write_text(text, encoding="utf-8")
    (folder / "data.bin").write_bytes(b"".join(data.parts))
    return len(entries)


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
    arguments = parser.parse_args()
    chosen = [
        case
        for case in CASES.values()
        if not case.slow and (not arguments.ops or case.op in arguments.ops)
    ]
    print(f"{save(arguments.folder, chosen, engine=arguments.engine)} cases in {arguments.folder}")


if __name__ == "__main__":
    main()
