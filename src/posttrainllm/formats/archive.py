"""Zip files: a folder of files in one, written plainly and opened as if someone meant harm.

Written are the files as they are, not compressed: weights do not get smaller, and every reader of zip
takes them. Read are stored and deflated entries. Before anything is written to the disk, all entries
have been looked at, and refused is the whole file for one that

    leads out of the folder (absolute, "..", a drive, a backslash), is a link or a device, is encrypted,
    stands there twice (also when only the case differs), overlaps another one, or, with the others,
    takes more room than the disk has or MOST_EXPANSION times the file.

The table of entries is read within MAX_TABLE_BYTES, the content piece by piece, each entry up to the
size that it declared; its checksum is compared.
"""

from __future__ import annotations

import io
import os
import stat
import zipfile
import zlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from posttrainllm.errors import CheckpointError
from posttrainllm.formats.untrusted import DAMAGED
from posttrainllm.settings import show
from posttrainllm.storage import free_bytes, read_error, reason, show_bytes, write_file

MAGIC = b"PK\x03\x04"
SUFFIX = ".zip"

MAX_ENTRIES = 10_000
MAX_TABLE_BYTES = 2 * 2**20
MAX_NAME_BYTES = 255
MAX_DEPTH = 8
MOST_EXPANSION = 50  # times the file; JSON lines become ten times as small, zeros a thousand times
ALWAYS_ALLOWED = 16 * 2**20
LOCAL_HEADER_BYTES = 30
PIECE = 2**20

UNPACK_ELSEWHERE = "free some space, or unpack it yourself and give the folder"

# Everything that zipfile lets out when a file is damaged.
_BROKEN = (
    zipfile.BadZipFile,
    zlib.error,
    EOFError,
    NotImplementedError,
    RuntimeError,
    ValueError,
    OverflowError,
)


@dataclass(frozen=True)
class Extracted:
    """What came out of an archive, by names relative to its top folder; ``left`` stayed inside."""

    names: tuple[str, ...]
    left: tuple[str, ...]


def write_archive(path: Path, files: Iterable[tuple[str, Path]]) -> None:
    """Write a new zip file of (name inside, file on the disk) pairs, in their order.

    Raises: OSError when it cannot be written; CheckpointError for a file that cannot be read.
    """
    with path.open("xb") as stream:
        with zipfile.ZipFile(stream, "w", zipfile.ZIP_STORED) as archive:
            for name, file in files:
                try:
                    entry = zipfile.ZipInfo.from_file(file, name, strict_timestamps=False)
                    source = file.open("rb")
                except OSError as error:
                    raise read_error(file, error) from None
                with source, archive.open(entry, "w") as target:
                    while piece := source.read(PIECE):
                        target.write(piece)
        stream.flush()
        os.fsync(stream.fileno())


def extract_archive(path: Path, folder: Path, wanted: Callable[[str], bool]) -> Extracted:
    """Write the entries whose names are ``wanted`` into an empty folder; others stay inside.

    A top folder that all entries share is left out of the names; hidden files do not count, nor what
    macOS puts beside the files. The caller removes ``folder`` when
    this fails half-way.

    Raises: CheckpointError, in one line that names the file and the entry.
    """
    try:
        with _Bounded(path) as stream, zipfile.ZipFile(stream) as archive:
            stream.bound = None
            entries = [entry for entry in archive.infolist() if not entry.filename.endswith("/")]
            for entry in archive.infolist():
                _check_entry(entry, path)
            _check_together(entries, path, archive.start_dir)
            seen = [entry for entry in entries if not _is_hidden(entry.filename)]
            names = dict(zip(_without_top([e.filename for e in seen]), seen, strict=True))
            chosen = {name: entry for name, entry in names.items() if wanted(name)}
            _check_room(list(chosen.values()), path, folder)
            for name, entry in chosen.items():
                target = folder / name
                target.parent.mkdir(parents=True, exist_ok=True)
                write_file(target, _content(archive, entry))
            return Extracted(tuple(chosen), tuple(sorted(set(names) - set(chosen))))
    except OSError as error:
        raise CheckpointError(
            f"{path} cannot be unpacked: {reason(error)}", UNPACK_ELSEWHERE
        ) from None
    except _BROKEN as error:
        raise CheckpointError(
            f"{path} is no whole zip file: {reason(error)[:120]}", DAMAGED
        ) from None


class _Bounded(io.FileIO):
    """A file of which no more than ``bound`` bytes are read at once while its table is."""

    bound: int | None = MAX_TABLE_BYTES

    def __init__(self, path: Path) -> None:
        super().__init__(path, "rb")
        self._path, self._size = path, os.fstat(self.fileno()).st_size

    def read(self, size: int | None = -1, /) -> bytes:
        if size is None or size < 0:
            size = self._size - self.tell()
        if self.bound is not None and size > self.bound:
            raise CheckpointError(
                f"{self._path}: its table of entries is over the limit of {show_bytes(self.bound)}",
                "a run has far fewer files",
            )
        return super().read(size) or b""


def _check_entry(entry: zipfile.ZipInfo, path: Path) -> None:
    """Refuse one entry for what it is on its own."""
    name = entry.orig_filename
    parts = name.removesuffix("/").split("/")
    harmless = all(
        part not in ("", ".", "..")
        and part.isprintable()
        and not any(character in part for character in '\\:*?"<>|')
        and len(part.encode("utf-8", "replace")) <= MAX_NAME_BYTES
        for part in parts
    )
    if not harmless or len(parts) > MAX_DEPTH or entry.filename != name:
        raise CheckpointError(
            f"{path} holds {show(name)}, which is not the name of a file inside a folder",
            "whoever made this file may mean harm: do not use it",
        )
    kind = stat.S_IFMT(entry.external_attr >> 16)
    if kind not in (0, stat.S_IFDIR if entry.is_dir() else stat.S_IFREG):
        raise CheckpointError(
            f"{path}: {show(name)} is a link or a device, wanted plain files",
            "pack the files themselves",
        )
    if entry.flag_bits & 1:
        raise CheckpointError(f"{path}: {show(name)} is encrypted", "pack it without a password")
    if entry.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
        raise CheckpointError(
            f"{path}: {show(name)} is packed with method {entry.compress_type}, wanted 0 (stored) or 8 "
            "(deflated)",
            "pack it with another program",
        )


def _check_together(entries: list[zipfile.ZipInfo], path: Path, table: int) -> None:
    """Refuse entries for what they are beside each other; ``table`` is where their table begins."""
    if len(entries) > MAX_ENTRIES:
        raise CheckpointError(
            f"{path} holds {len(entries):,} files, over the limit of {MAX_ENTRIES:,}",
            "a run has far fewer files",
        )
    seen: set[str] = set()
    for entry in entries:
        same = entry.filename.casefold()
        if same in seen:
            raise CheckpointError(f"{path} holds {show(entry.filename)} twice", DAMAGED)
        seen.add(same)
    for entry in entries:
        parent = entry.filename.casefold()
        while "/" in parent:
            parent = parent.rpartition("/")[0]
            if parent in seen:
                raise CheckpointError(
                    f"{path}: {show(parent)} is both a file and a folder", DAMAGED
                )
    end = 0
    for entry in sorted(entries, key=lambda entry: entry.header_offset):
        if entry.header_offset < end:
            raise CheckpointError(
                f"{path}: {show(entry.filename)} overlaps the entry before it", DAMAGED
            )
        end = entry.header_offset + LOCAL_HEADER_BYTES + entry.compress_size
    if end > table:
        raise CheckpointError(f"{path}: its last entry overlaps the table of entries", DAMAGED)


def _check_room(entries: list[zipfile.ZipInfo], path: Path, folder: Path) -> None:
    need, size = sum(entry.file_size for entry in entries), path.stat().st_size
    most = max(MOST_EXPANSION * size, ALWAYS_ALLOWED)
    if need > most:
        raise CheckpointError(
            f"{path} would grow from {show_bytes(size)} to {show_bytes(need)}, over the limit of "
            f"{show_bytes(most)}",
            "whoever made this file may mean harm: do not use it",
        )
    free = free_bytes(folder)
    if free is not None and need > free:
        raise CheckpointError(
            f"{path} needs {show_bytes(need)} to be unpacked, the disk has {show_bytes(free)}",
            UNPACK_ELSEWHERE,
        )


def _is_hidden(name: str) -> bool:
    """Tell whether a file is hidden, or one in which macOS keeps what a zip file has no place for."""
    return any(part.startswith(".") or part == "__MACOSX" for part in name.split("/"))


def _without_top(names: list[str]) -> list[str]:
    """Names without the one folder that all are in, if there is one."""
    tops = {name.partition("/")[0] for name in names}
    if len(tops) != 1 or not all("/" in name for name in names):
        return names
    return [name.partition("/")[2] for name in names]


def _content(archive: zipfile.ZipFile, entry: zipfile.ZipInfo) -> Iterator[bytes]:
    with archive.open(entry) as stream:
        count = 0
        while piece := stream.read(PIECE):
            count += len(piece)
            yield piece
    if count != entry.file_size:
        raise zipfile.BadZipFile(f"{entry.filename!r} has {count} bytes, not {entry.file_size}")
