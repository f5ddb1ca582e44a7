"""Records of measurements: append-only JSON files that name all they depend on.

    bench/results/<date>_<engine>_<machine>_<case>.json

What this is: the envelope of a record (commit, versions, machine, adapter, configuration, formulas), its name, and reading records
again. The measurement itself is in its ``rows``.
What this is not: a measurement. A record never holds the name of a host or a user.
"""

from __future__ import annotations

import json
import os
import platform
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any, Literal

import posttrainllm
from posttrainllm.config import TrainConfig, settings_of
from posttrainllm.errors import CheckpointError, ConfigError
from posttrainllm.lab.cost import FORMULAS
from posttrainllm.machine import available_threads, instruction_sets, processor_name
from posttrainllm.storage import write_error

FORMAT = 1
Kind = Literal["step", "ladder", "training", "sweep", "decode", "gpu-checks"]
Record = dict[str, Any]

# Software that numbers depend on; looked up by name, so that nothing is imported for it.
PACKAGES = ("numpy", "torch", "wgpu", "wasmtime", "ziglang")


def make_record(
    kind: Kind,
    case: str,
    *,
    engine: str,
    info: Mapping[str, str | int],
    config: TrainConfig | Sequence[TrainConfig],
    rows: Sequence[Mapping[str, Any]],
    method: Mapping[str, Any],
    results: Mapping[str, Any] | None = None,
) -> Record:
    """Put a measurement into its envelope.

    ``info`` is the engine's own (build, threads, device), ``method`` says how it was measured (warm-up, repeats, seeds), ``rows`` holds
    the numbers and ``results`` what they come to. One configuration a preset that took part.
    """
    configs = [config] if isinstance(config, TrainConfig) else list(config)
    return {
        "format": FORMAT,
        "kind": kind,
        "case": case,
        "engine": engine,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": commit(),
        "versions": versions(),
        "machine": machine(),
        "adapter": adapter(info),
        "software": bool(info.get("software", False)),
        "engine_info": dict(info),
        "configs": {one.preset: _settings(one) for one in configs},
        "method": dict(method),
        "formulas": FORMULAS if kind in ("step", "ladder") else {},
        "results": dict(results or {}),
        "rows": [dict(row) for row in rows],
    }


def adapter(info: Mapping[str, Any]) -> str | None:
    """The graphics card that an engine computes on; None where it is the processor."""
    name = info.get("adapter") or (None if info.get("device") == "cpu" else info.get("device_name"))
    return None if name is None else str(name)


def _settings(config: TrainConfig) -> Record:
    """All settings; of the text's files only their names."""
    names = [Path(source).name for source in config.data.corpus]
    return {**settings_of(config), "data.corpus": names}


def record_name(record: Mapping[str, Any]) -> str:
    """The file's name: date, engine, machine, case."""
    parts = (
        record["date"][:10],
        record["engine"],
        slug(record["machine"]["processor"]),
        record["case"],
    )
    return "_".join(slug(part) for part in parts) + ".json"


def write_record(record: Mapping[str, Any], folder: Path) -> Path:
    """Write a record as a new file; one that is there is never touched: the next gets a number.

    Raises: CheckpointError when it cannot be written.
    """
    content = json.dumps(record, indent=1, allow_nan=False, ensure_ascii=False) + "\n"
    name = record_name(record)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for number in range(1, 1000):
            path = folder / (name if number == 1 else name.replace(".json", f"-{number}.json"))
            try:
                with path.open("x", encoding="utf-8") as stream:
                    stream.write(content)
            except FileExistsError:
                continue
            return path
    except OSError as error:
        raise write_error("write a record", folder, error) from None
    raise CheckpointError(f"{folder} holds 999 records named {name}", "use another folder")


def read_records(folder: Path, kind: Kind | None = None) -> Iterator[Record]:
    """Read the records of a folder, oldest first; other files are refused.

    Raises: ConfigError for a file that is no record of this or an older format.
    """
    records = []
    for path in sorted(folder.glob("*.json")):
        try:
            record = json.loads(path.read_text(encoding="utf-8"))
            known = record["format"] <= FORMAT
            if kind is None or record["kind"] == kind:
                records.append((record["date"], path.name, record))
        except (OSError, ValueError, KeyError, TypeError):
            known = False
        if not known:
            raise ConfigError(f"{path} is not a benchmark record of format {FORMAT} or older")
    yield from (record for _, _, record in sorted(records, key=lambda entry: entry[:2]))


def slug(text: str) -> str:
    """Lower-case words with dashes between them; marks like (R) and clock rates are left out."""
    text = re.sub(r"\((r|tm|c)\)|@.*|\bcpu\b|\bprocessor\b", " ", text.lower())
    return re.sub(r"[^a-z0-9.]+", "-", text).strip("-.") or "unknown"


def machine() -> Record:
    """What the machine is, without its name."""
    return {
        "processor": processor_name(),
        "threads_available": available_threads(),
        "instruction_sets": instruction_sets(),
        "memory_bytes": _memory(),
        "system": platform.system(),
        "architecture": platform.machine(),
    }


def versions() -> dict[str, str]:
    """Our version, Python's and those of the packages that compute."""
    found = {"posttrainllm": posttrainllm.__version__, "python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def commit() -> Record | None:
    """The source tree's commit and whether its sources differ from it; None outside of a source tree."""
    root = source_tree()
    if root is None:
        return None
    head = _git(root, "rev-parse", "HEAD")
    changed = _git(root, "status", "--porcelain", "--", "src")
    return None if head is None else {"hash": head, "changed": bool(changed)}


def source_tree() -> Path | None:
    """The folder that this package is developed in, or None when it was installed."""
    root = Path(posttrainllm.__file__).parents[2]
    return root if (root / "pyproject.toml").is_file() and (root / "bench").is_dir() else None


def _git(root: Path, *arguments: str) -> str | None:
    try:
        result = subprocess.run(
            ["git", "-C", str(root), *arguments], capture_output=True, text=True, timeout=20
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return result.stdout.strip() if result.returncode == 0 else None


def _memory() -> int | None:
    if sys.platform == "win32" or not hasattr(os, "sysconf"):
        return None
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
