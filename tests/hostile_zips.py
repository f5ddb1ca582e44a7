"""Zips that are damaged or meant to do harm: how to make them. What their refusals must say is in ``hostile_zip_cases.py``."""

from __future__ import annotations

import io
import struct
import zipfile
from collections.abc import Callable
from pathlib import Path

from hostile_pickle import Make, file_with
from posttrainllm.runs.checkpoint import write_checkpoint
from posttrainllm.runs.folder import create_run
from posttrainllm.text.tokenizer import ByteTokenizer
from saved import (
    make_state,
    make_values,
    small_config,
)


def run_folder(folder: Path) -> Path:
    """A whole run of one checkpoint."""
    config = small_config()
    run = create_run(folder / "made", config, "beer")
    for step in (1, 2, 5):
        run.metrics.append({"step": step, "loss": 3.0 / step, "val_loss": None})
    write_checkpoint(
        run.checkpoints,
        state=make_state(5, config),
        **make_values(config),
        tokenizer=ByteTokenizer(),
        keep=1,
    )
    return run.path


def pack(run: Path, change: Callable[[dict[str, bytes]], object] | None = None) -> bytes:
    """A zip of a run, its files changed first."""
    files = {
        f"beer/{path.relative_to(run).as_posix()}": path.read_bytes()
        for path in sorted(run.rglob("*"))
        if path.is_file()
    }
    if change is not None:
        change(files)
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w") as archive:
        for name, content in files.items():
            archive.writestr(name, content)
    return stream.getvalue()


def zipped(change: Callable[[dict[str, bytes]], object] | None = None) -> Make:
    return lambda folder: file_with(folder, "beer.zip", pack(run_folder(folder), change))


def entries(
    write: Callable[[zipfile.ZipFile], object], compression: int = zipfile.ZIP_DEFLATED
) -> Make:
    """A zip with entries written by hand, behind those of a whole run."""

    def make(folder: Path) -> Path:
        path = file_with(folder, "beer.zip", pack(run_folder(folder)))
        with zipfile.ZipFile(path, "a", compression) as archive:
            write(archive)
        return path

    return make


def named(name: str) -> Make:
    return entries(lambda archive: archive.writestr(name, b"harm"))


def special(mode: int) -> Make:
    def write(archive: zipfile.ZipFile) -> None:
        info = zipfile.ZipInfo("beer/notes.json")
        info.external_attr = mode << 16
        archive.writestr(info, "/etc/passwd")

    return entries(write)


def table(change: Callable[[bytearray, int], object]) -> Make:
    """Change the table of entries at its first entry."""

    def make(folder: Path) -> Path:
        content = bytearray(pack(run_folder(folder)))
        change(content, content.index(b"PK\x01\x02"))
        return file_with(folder, "beer.zip", bytes(content))

    return make


def put(at: int, form: str, number: int) -> Callable[[bytearray, int], object]:
    def change(content: bytearray, start: int) -> None:
        struct.pack_into(form, content, start + at, number)

    return change


def bomb(folder: Path) -> Path:
    """Two hundred megabytes of zeros in two hundred kilobytes, under a name that is wanted."""
    path = folder / "beer.zip"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED, compresslevel=9) as archive:
        archive.writestr("beer/config.toml", "format = 1\n")
        with archive.open("beer/checkpoints/step-000001/model.safetensors", "w") as stream:
            for _ in range(200):
                stream.write(bytes(2**20))
    return path


def overlapping(folder: Path) -> Path:
    """A hundred entries that share one compressed block: small file, large content."""
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("a.json", bytes(2**20))
    content = stream.getvalue()
    start = content.index(b"PK\x01\x02")
    end = content.index(b"PK\x05\x06")
    one = content[start:end]
    copies = b"".join(one.replace(b"a.json", f"{i:02d}.jso".encode()) for i in range(99))
    tail = bytearray(content[end:])
    struct.pack_into("<HHI", tail, 8, 99, 99, len(copies))
    return file_with(folder, "beer.zip", content[:start] + copies + bytes(tail))


def many(folder: Path) -> Path:
    path = folder / "beer.zip"
    with zipfile.ZipFile(path, "w") as archive:
        for number in range(10_001):
            archive.writestr(f"{number}.x", b"")
    return path


def large_table(folder: Path) -> Path:
    path = folder / "beer.zip"
    with zipfile.ZipFile(path, "w") as archive:
        for number in range(12_000):
            archive.writestr(f"{number:05d}" + "x" * 180, b"")
    return path


def declared(size: int) -> Make:
    """The largest file of a run declares another size than it has."""

    def make(folder: Path) -> Path:
        content = bytearray(pack(run_folder(folder)))
        at = content.index(b"beer/config.toml", content.index(b"PK\x01\x02")) - 46
        struct.pack_into("<I", content, at + 24, size)
        return file_with(folder, "beer.zip", bytes(content))

    return make


def repacked_lines(folder: Path, count: int) -> Path:
    """A run with so many lines of metrics that reading them would fill the memory."""
    run = run_folder(folder)
    (run / "metrics.jsonl").write_bytes(b"{}\n" * count)
    return file_with(folder, "beer.zip", pack(run))


def drop(pattern: str) -> Callable[[dict[str, bytes]], object]:
    def change(files: dict[str, bytes]) -> None:
        for name in [name for name in files if pattern in name]:
            del files[name]

    return change


def write(name: str, content: bytes) -> Callable[[dict[str, bytes]], object]:
    return lambda files: files.update({f"beer/{name}": content})
