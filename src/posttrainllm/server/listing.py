"""The list of runs as the API gives it, read again only where a run has changed."""

from __future__ import annotations

import os
import threading
from dataclasses import asdict
from pathlib import Path
from typing import Any

from posttrainllm.runs.folder import CONFIG_FILE, Run, describe_run
from posttrainllm.runs.lock import is_locked
from posttrainllm.server.answers import RefusalError
from posttrainllm.server.run_files import is_plain_name

_WATCHED = ("", CONFIG_FILE, "metrics.jsonl", "samples.jsonl", "checkpoints")

Row = dict[str, Any]


class Listing:
    """The rows of the runs in a folder; links to folders elsewhere are no runs here."""

    def __init__(self, runs_dir: Path) -> None:
        """List ``runs_dir``, which need not exist yet."""
        self.runs_dir = runs_dir
        self._known: dict[str, tuple[Any, Row]] = {}
        self._turn = threading.Lock()

    def find(self, name: str) -> Path:
        """Return the folder of a run. Raises: RefusalError 404."""
        path = self.runs_dir / name
        if not is_plain_name(name) or path.is_symlink() or not os.path.isdir(path):
            raise RefusalError(404, f"there is no run {name[:100]!r}")
        return path

    def rows(self) -> list[Row]:
        """Describe every run, the last changed one first."""
        try:
            names = [
                entry.name
                for entry in os.scandir(self.runs_dir)
                if is_plain_name(entry.name) and entry.is_dir(follow_symlinks=False)
            ]
        except OSError:
            names = []
        rows = [row for row in map(self.row, names) if row is not None]
        return sorted(rows, key=lambda row: (row["modified"] or "", row["name"]), reverse=True)

    def row(self, name: str) -> Row | None:
        """Describe one run; None when it is not there."""
        try:
            path = self.find(name)
        except RefusalError:
            return None
        with self._turn:
            now = (*(_stamp(path / part) for part in _WATCHED), is_locked(path))
            known = self._known.get(name)
            if known is None or known[0] != now:
                row = asdict(describe_run(Run(path)))
                modified = row["modified"]
                row["modified"] = modified.isoformat(timespec="milliseconds") if modified else None
                known = self._known[name] = (now, row)
            return known[1]


def _stamp(path: Path) -> tuple[int, int] | None:
    try:
        status = os.lstat(path)
    except OSError:
        return None
    return status.st_mtime_ns, status.st_size
