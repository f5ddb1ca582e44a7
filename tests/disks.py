"""Small file systems for tests of full and failing disks."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import needs


class Disk:
    """A file system in memory that a test fills, frees and makes read-only."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._filler = folder / "filler"

    def fill(self, room: int = 0) -> None:
        """Leave ``room`` bytes free."""
        free = shutil.disk_usage(self.folder).free
        with self._filler.open("ab") as stream:
            stream.write(bytes(max(0, free - room)))

    def free(self) -> None:
        """Remove what ``fill`` wrote."""
        self._filler.unlink()

    def remount(self, options: str) -> None:
        """Change the options of the mount, such as ``ro``."""
        subprocess.run(["mount", "-o", f"remount,{options}", str(self.folder)], check=True)


@contextmanager
def small_disk(folder: Path, size: str = "1m") -> Iterator[Disk]:
    """Mount one at a new folder; where that is not allowed, skip."""
    folder.mkdir()
    program = shutil.which("mount")
    options = ["-t", "tmpfs", "-o", f"size={size}", "posttrainllm-test", str(folder)]
    if program is None or subprocess.run([program, *options], capture_output=True).returncode != 0:
        needs.missing("mounting a file system needs root: run the tests as root")
    try:
        yield Disk(folder)
    finally:
        subprocess.run(["umount", str(folder)], check=True)
