"""Zips and other files that are damaged or meant to do harm, and what their refusals must say.

``ZIPS`` maps a name to (make, words): ``make(folder)`` writes into an empty folder and returns what is to be imported, and the
refusal's one line must contain ``words``.
"""

from __future__ import annotations

import os
import struct
from pathlib import Path

from hostile_pickle import Case, file_with, pickled
from hostile_zips import (
    bomb,
    declared,
    drop,
    entries,
    large_table,
    many,
    named,
    overlapping,
    pack,
    put,
    repacked_lines,
    run_folder,
    special,
    table,
    write,
    zipped,
)

STEP = "beer/checkpoints/step-000005"

ZIPS: dict[str, Case] = {
    "up and out": (named("../evil"), "which is not the name of a file inside a folder"),
    "up inside": (named("beer/../../evil"), "which is not the name"),
    "absolute": (named("/tmp/evil"), "which is not the name"),
    "drive": (named("C:/evil"), "which is not the name"),
    "backslash": (named("beer\\..\\evil"), "which is not the name"),
    "a dot": (named("beer/./config.toml"), "which is not the name"),
    "nothing between": (named("beer//config.toml"), "which is not the name"),
    "control character": (named("beer/a\nb"), "which is not the name"),
    "a long name": (named("beer/" + "x" * 300), "which is not the name"),
    "a deep name": (named("/".join("abcdefghijk")), "which is not the name"),
    "a link": (special(0o120777), "is a link or a device"),
    "a device": (special(0o020666), "is a link or a device"),
    "a pipe": (special(0o010666), "is a link or a device"),
    "twice": (
        entries(lambda archive: archive.writestr("beer/Config.toml", b"x")),
        "'beer/Config.toml' twice",
    ),
    "a file and a folder": (
        entries(lambda archive: archive.writestr("beer/config.toml/x.json", b"x")),
        "is both a file and a folder",
    ),
    "bomb": (bomb, "would grow from"),
    "overlapping bomb": (overlapping, "overlaps the entry before it"),
    "too many": (many, "10,001 files, over the limit of 10,000"),
    "a large table": (large_table, "its table of entries is over the limit"),
    "encrypted": (table(put(8, "<H", 1)), "is encrypted"),
    "unknown method": (table(put(10, "<H", 99)), "is packed with method 99"),
    "a size of 4 GB": (declared(2**32 - 2), "would grow from"),
    "a smaller size": (declared(3), "no whole zip file"),
    "another checksum": (table(put(16, "<I", 12345)), "no whole zip file"),
    "an offset outside": (table(put(42, "<I", 2**31)), "overlaps"),
    "entry of another name": (
        lambda folder: file_with(
            folder,
            "beer.zip",
            pack(run_folder(folder)).replace(b"beer/config.toml", b"beer/confog.toml", 1),
        ),
        "no whole zip file",
    ),
    "only the magic": (
        lambda folder: file_with(folder, "a.zip", b"PK\x03\x04"),
        "no whole zip file",
    ),
    "empty archive": (
        lambda folder: file_with(folder, "a.zip", b"PK\x05\x06" + bytes(18)),
        "neither a run nor a model",
    ),
    "a pickle in it": (
        lambda folder: file_with(
            folder,
            "beer.zip",
            pack(
                run_folder(folder),
                lambda files: (
                    files.clear(),
                    files.update({"x/pytorch_model.bin": pickled(folder), "x/config.json": b"{}"}),
                ),
            ),
        ),
        "'pytorch_model.bin' is a pickle",
    ),
    "no checkpoint": (zipped(drop("checkpoints/")), "neither a run nor a model"),
    "checkpoint without weights": (
        zipped(drop("model.safetensors")),
        "no checkpoint that is whole",
    ),
    "checkpoint without hashes": (zipped(drop("hashes.json")), "no checkpoint that is whole"),
    "weights changed": (
        zipped(
            lambda f: f.update(
                {f"{STEP}/model.safetensors": f[f"{STEP}/model.safetensors"][:-1] + b"x"}
            )
        ),
        "its hash differs",
    ),
    "configuration of another model": (
        zipped(
            lambda f: f.update(
                {"beer/config.toml": f["beer/config.toml"].replace(b"n_ctx = 12", b"n_ctx = 13")}
            )
        ),
        "describe different models",
    ),
    "configuration no TOML": (zipped(write("config.toml", b"= = =")), "config.toml"),
    "configuration of another version": (zipped(write("config.toml", b"format = 99")), "format 99"),
    "metrics of millions of lines": (
        lambda folder: repacked_lines(folder, 3_000_000),
        "metrics.jsonl has more than 2,000,000 lines",
    ),
    "metrics no JSON": (zipped(write("metrics.jsonl", b"{}\nharm\n{}\n")), "metrics.jsonl, line 2"),
    "metrics deep": (zipped(write("metrics.jsonl", b"[" * 10**5 + b"\n")), "nested too deeply"),
}


def nothing_there(folder: Path) -> Path:
    return folder / "nothing"


def fifo(folder: Path) -> Path:
    os.mkfifo(folder / "model.tinygpt")
    return folder / "model.tinygpt"


OTHERS: dict[str, Case] = {
    "nothing": (nothing_there, "does not exist"),
    "a pipe": (fifo, "is not a regular file"),
    "empty": (lambda folder: file_with(folder, "a.tinygpt", b""), "is no model"),
    "text": (lambda folder: file_with(folder, "a.tinygpt", b"ROMEO: hello"), "is no model"),
    "GGUF": (lambda folder: file_with(folder, "a.gguf", b"GGUF\x03\0\0\0"), "begins with b'GGUF"),
    "a pickle": (lambda folder: file_with(folder, "model.pt", pickled(folder)), "is a pickle"),
    "a pickle named otherwise": (
        lambda folder: file_with(folder, "model.tinygpt", pickled(folder)),
        "is a pickle",
    ),
    "weights alone": (
        lambda folder: file_with(folder, "model.safetensors", struct.pack("<Q", 2) + b"{}"),
        "is one file of a model",
    ),
    "an empty folder": (
        lambda folder: (folder / "model").mkdir() or folder / "model",
        "config.json",
    ),
}
