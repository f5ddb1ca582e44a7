"""What the tables of hostile files share: a pickle that tells when it was loaded, and the form of a case."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

Make = Callable[[Path], Path]
Case = tuple[Make, str]


class Payload:
    """A pickle that leaves a file behind where it is loaded."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return (open, (str(self.path), "w"))


def pickled(folder: Path) -> bytes:
    """The bytes of one; the file that it leaves is RAN, in ``folder``."""
    return pickle.dumps(Payload(folder / "RAN"))


def file_with(folder: Path, name: str, content: bytes) -> Path:
    """Write a file and return where it is."""
    (folder / name).write_bytes(content)
    return folder / name
