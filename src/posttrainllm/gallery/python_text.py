"""A text that every machine with Python has: the source of Python's own standard library.

What this is: the modules of one Python, put one after another in an order that only their names decide, so that the same Python
gives the same bytes everywhere. The order is that of the names' hashes: the validation part at the end is then like the rest, and not
the packages from u to z.
What is left out: tests, tables of characters, documentation that was written by a program, and files that name the machine.
Licence: the Python Software Foundation's, https://docs.python.org/3/license.html.
"""

from __future__ import annotations

import argparse
import hashlib
import sysconfig
from collections.abc import Iterator
from pathlib import Path

from posttrainllm.errors import CorpusError

MOST_BYTES = 12_000_000

_LEFT_OUT = frozenset(
    {
        "__pycache__",
        "_bundled",
        "dist-packages",
        "encodings",
        "idle_test",
        "idlelib",
        "lib2to3",
        "pydoc_data",
        "site-packages",
        "test",
        "tests",
        "turtledemo",
    }
)


def standard_library() -> Path:
    """Where the modules of the running Python are."""
    return Path(sysconfig.get_path("stdlib"))


def modules(library: Path) -> Iterator[tuple[str, Path]]:
    """Names, with slashes, and files of the modules that are taken, in the order of their names' hashes."""
    found = {
        path.relative_to(library).as_posix(): path
        for path in library.rglob("*.py")
        if not _LEFT_OUT & set(path.relative_to(library).parts)
        and not path.name.startswith("_sysconfigdata")
    }
    for name in sorted(found, key=lambda name: hashlib.sha256(name.encode()).digest()):
        yield name, found[name]


def python_text(library: Path | None = None, most: int = MOST_BYTES) -> bytes:
    """The text: modules with a line feed between them, up to ``most`` bytes; one that is no UTF-8 is left out.

    Raises: CorpusError when this Python comes without the source of its library.
    """
    folder = library or standard_library()
    pieces: list[bytes] = []
    size = 0
    for _, path in modules(folder):
        piece = path.read_bytes().replace(b"\r\n", b"\n")
        try:
            piece.decode("utf-8")
        except UnicodeDecodeError:
            continue
        if piece and size + len(piece) + 1 <= most:
            pieces.append(piece)
            size += len(piece) + 1
    if not pieces:
        raise CorpusError(
            f"{folder} holds no Python files: this Python has no library in source form",
            "use another Python, or give a text",
        )
    return b"\n".join(pieces)


def write_python_text(path: Path) -> Path:
    """Write the text of the running Python to a file. Raises: CorpusError when it cannot be written."""
    text = python_text()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(text)
    except OSError as error:
        raise CorpusError(f"cannot write {path}: {error.strerror}") from None
    return path


def main() -> None:
    """Write into the file that was named."""
    parser = argparse.ArgumentParser(description="Write the text of Python's standard library.")
    parser.add_argument("file", type=Path)
    write_python_text(parser.parse_args().file)


if __name__ == "__main__":
    main()
