"""Files of JSON lines: appended while training, read while it runs, cut back on resume.

A line is one JSON object with a newline behind it, written in one call and flushed to the system,
so that a killed process leaves at most its last line torn. A torn last line is not data: reading
leaves it out and appending removes it first.
The lines of a run are in order of their "step".
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

from posttrainllm.errors import CheckpointError
from posttrainllm.formats.untrusted import parse_object
from posttrainllm.runs.trainer_state import finite
from posttrainllm.settings import show
from posttrainllm.storage import read_error, replace_file, write_error

Record = dict[str, Any]


def number_of(record: Mapping[str, Any], key: str) -> float | None:
    """A finite number of a record as it stands there; None where there is none, or something else."""
    value = record.get(key)
    if not isinstance(value, int | float) or isinstance(value, bool):
        return None
    try:
        return value if math.isfinite(value) else None
    except OverflowError:  # an integer beyond every float
        return None


def column(records: Iterable[Mapping[str, Any]], key: str) -> list[float]:
    """The numbers under a key, leaving out null and what is none."""
    values = (number_of(record, key) for record in records)
    return [value for value in values if value is not None]


def newest(records: Sequence[Mapping[str, Any]], key: str) -> float | None:
    """The last number under a key; None where there is none."""
    values = (number_of(record, key) for record in reversed(records))
    return next((value for value in values if value is not None), None)


def _line(record: Mapping[str, Any]) -> bytes:
    line = json.dumps(finite(dict(record)), ensure_ascii=False, allow_nan=False) + "\n"
    return line.encode("utf-8", "backslashreplace")


class Records:
    """One file of JSON lines, such as a run's ``metrics.jsonl``."""

    def __init__(self, path: Path) -> None:
        """Name the file; it is opened by the first ``append``."""
        self.path = path
        self._descriptor: int | None = None
        self._end = 0

    @property
    def exists(self) -> bool:
        """Whether a line was ever added."""
        return self.path.exists()

    def append(self, record: Mapping[str, Any]) -> None:
        """Add a line; NaN and infinite numbers become null, since JSON has neither.

        Raises: CheckpointError when it cannot be written. The file then ends as before, and the
        call can be repeated.
        """
        content = _line(record)
        try:
            descriptor = self._open()
            written = os.write(descriptor, content)
            while written < len(content):  # the system may take less, and says why the next time
                written += os.write(descriptor, content[written:])
            self._end += written
        except OSError as error:
            self._undo()
            raise write_error(f"append to {self.path.name}", self.path.parent, error) from None

    def replace_last(self, record: Mapping[str, Any]) -> None:
        """Put another line in the place of the last one, in one step; not while the file is open for appending.

        Raises: CheckpointError, with the file as it was.
        """
        ends = [0, *(end for end, _ in self._lines())]
        try:
            content = self.path.read_bytes()[: ends[-2]] + _line(record)
            replace_file(self.path, content)
        except OSError as error:
            raise write_error(f"rewrite {self.path.name}", self.path.parent, error) from None

    def sync(self) -> None:
        """Flush to the disk. Called before a checkpoint: what it counts on must be there.

        Raises: CheckpointError.
        """
        if self._descriptor is not None:
            try:
                os.fsync(self._descriptor)
            except OSError as error:
                raise write_error(f"flush {self.path.name}", self.path.parent, error) from None

    def read(self) -> list[Record]:
        """Read all lines; a file that is not there has none.

        Raises: CheckpointError for a damaged line that is not the last one, by its number.
        """
        return [record for _, record in self._lines()]

    def cut_back(self, step: int) -> None:
        """Remove the lines beyond ``step``, and a torn one.

        The lines are in order, so this shortens the file in one call: it needs no room on a full
        disk and cannot be interrupted half-way.

        Raises: CheckpointError.
        """
        self.close()
        end = 0
        for after, record in self._lines():
            found = record.get("step")
            if type(found) is not int:
                raise CheckpointError(
                    f"{self.path}: a line has no whole number as step, got {show(found)}",
                    "remove that line",
                )
            if found > step:
                break
            end = after
        try:
            if self.path.exists() and self.path.stat().st_size != end:
                os.truncate(self.path, end)
        except OSError as error:
            raise write_error(f"shorten {self.path.name}", self.path.parent, error) from None

    def close(self) -> None:
        """Close the file; ``append`` opens it again."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _open(self) -> int:
        if self._descriptor is not None and os.fstat(self._descriptor).st_nlink == 0:
            self.close()  # the file was removed: what is written there goes with it
        if self._descriptor is None:
            self._check_kind()
            flags = os.O_RDWR | os.O_CREAT | os.O_APPEND | getattr(os, "O_BINARY", 0)
            self._descriptor = os.open(self.path, flags, 0o666)
            self._end = self.path.read_bytes().rfind(b"\n") + 1
            os.ftruncate(self._descriptor, self._end)
        return self._descriptor

    def _check_kind(self) -> None:
        """Opening a pipe would wait for ever."""
        if self.path.exists() and not self.path.is_file():
            raise CheckpointError(f"{self.path} is not a regular file", "remove it")

    def _undo(self) -> None:
        """Remove what a failed ``append`` may have left of its line."""
        if self._descriptor is not None:
            try:
                os.ftruncate(self._descriptor, self._end)
            except OSError:
                self.close()  # opening it again removes the torn line

    def _lines(self) -> Iterator[tuple[int, Record]]:
        """Yield (position after the line, record) for each whole line."""
        self._check_kind()
        try:
            content = self.path.read_bytes()
        except FileNotFoundError:
            return
        except OSError as error:
            raise read_error(self.path, error) from None
        end = 0
        for number, line in enumerate(content.split(b"\n")[:-1], start=1):
            end += len(line) + 1
            yield end, parse_object(line, f"{self.path}, line {number}")
