"""Files that a corpus needs beside its sources: joined text, token ids, and what was found out.

    <cache folder>/text/<sha256>.txt       text from a pipe, or of several large files joined
    <cache folder>/tokens/<...>.uint16     ids of a text under a tokenizer that is not bytes
    <cache folder>/facts/<...>.json        hash and notices of large files, so that a start is quick

Each is written under another name, then renamed: a file that is there is whole. All of them can be
deleted at any time; only text from a pipe cannot be made again.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt

from posttrainllm.errors import CorpusError
from posttrainllm.figures import Progress, untold
from posttrainllm.machine import available_threads
from posttrainllm.text.files import TextFile
from posttrainllm.text.tokenizer import Tokenizer

ENCODED_AT_ONCE = 1 << 20  # bytes

# Where text can be cut so that the ids of the parts, joined, are the ids of the whole: behind a
# single line feed between printable characters. GPT-2's pattern never joins across one.
_SAFE_CUT = re.compile(rb"[!-~]\n(?=[!-~])")

_SETTLED = 2 * 10**9  # nanoseconds; a file changed later than this may change again unseen


@dataclass(frozen=True)
class Facts:
    """What reading a text from start to end told about it."""

    sha256: str
    n_bytes: int
    notices: tuple[str, ...]


def map_file(path: Path, n_bytes: int, offset: int = 0) -> npt.NDArray[np.uint8]:
    """Return bytes of a file as a read-only array (n_bytes,) that is read from disk as it is used.

    Raises: CorpusError when the file has fewer bytes or cannot be read.
    """
    if n_bytes == 0:
        return np.zeros(0, np.uint8)
    try:
        return np.asarray(np.memmap(path, np.uint8, "r", offset, (n_bytes,)))
    except (OSError, ValueError) as error:
        raise CorpusError(
            f"{path} cannot be mapped: {error}", "was it changed meanwhile?"
        ) from None


class TextCache:
    """The cache folder of this user, made when it is first written to."""

    def __init__(self, folder: Path) -> None:
        """Use ``folder``, which need not exist."""
        self._folder = folder

    def text_path(self, sha256: str) -> Path:
        """Return where the text with this hash is, if it is in the cache."""
        return self._folder / "text" / f"{sha256}.txt"

    def write_text(self, pieces: Iterable[bytes]) -> tuple[str, int]:
        """Write a text, named by its hash; return hash and size.

        Raises: CorpusError when the folder cannot be written or the disk is full.
        """
        digest = hashlib.sha256()
        n_bytes = 0
        with self._new_file("text") as (stream, name_it):
            for piece in pieces:
                digest.update(piece)
                n_bytes += len(piece)
                stream.write(piece)
            name_it(self.text_path(digest.hexdigest()))
        return digest.hexdigest(), n_bytes

    def tokens(
        self,
        text: npt.NDArray[np.uint8],
        tokenizer: Tokenizer,
        name: str,
        progress: Progress = untold,
    ) -> npt.NDArray[Any]:
        """Return the ids (n,) of a text, mapped from the cache, encoded first if need be.

        ``name`` stands for the text: equal names must mean equal bytes. ``progress`` counts bytes.

        Raises: CorpusError when the folder cannot be written or the disk is full.
        """
        kind = np.dtype(np.uint16 if tokenizer.n_vocab <= 1 << 16 else np.uint32)
        path = self._folder / "tokens" / f"{name}-{tokenizer.fingerprint}.{kind.name}"
        if not path.is_file():
            with self._new_file("tokens") as (stream, name_it):
                for ids in _encoded(text, tokenizer, progress):
                    stream.write(ids.astype(kind).tobytes())
                name_it(path)
        if path.stat().st_size == 0:
            return np.zeros(0, kind)
        return np.asarray(np.memmap(path, kind, "r"))

    def recall(self, files: list[TextFile]) -> Facts | None:
        """Return what was found out about these files, if none of them has changed since."""
        try:
            facts = json.loads(self._facts_path(files).read_bytes())
            return Facts(facts["sha256"], facts["n_bytes"], tuple(facts["notices"]))
        except (OSError, ValueError, KeyError, TypeError):
            return None

    def remember(self, files: list[TextFile], facts: Facts) -> None:
        """Keep what was found out; without a word when it cannot be kept, for it can be again."""
        newest = max(file.mtime_ns for file in files)
        if time.time_ns() - newest < _SETTLED:
            return
        with suppress(CorpusError), self._new_file("facts") as (stream, name_it):
            stream.write(json.dumps(asdict(facts)).encode())
            name_it(self._facts_path(files))

    def _facts_path(self, files: list[TextFile]) -> Path:
        identity = json.dumps([1, *((str(f.path), f.size, f.mtime_ns) for f in files)])
        name = hashlib.sha256(identity.encode("utf-8", "surrogatepass")).hexdigest()
        return self._folder / "facts" / f"{name}.json"

    @contextmanager
    def _new_file(self, kind: str) -> Iterator[tuple[BinaryIO, Callable[[Path], None]]]:
        """Give a stream to write and a function to name the file; an unfinished one is removed."""
        part: Path | None = None
        names: list[Path] = []
        try:
            folder = self._folder / kind
            folder.mkdir(parents=True, exist_ok=True)
            handle, name = tempfile.mkstemp(suffix=".part", dir=folder)
            part = Path(name)
            with os.fdopen(handle, "wb") as stream:
                yield stream, names.append
                stream.flush()
                os.fsync(stream.fileno())
            os.replace(part, names[0])
        except OSError as error:
            raise CorpusError(
                f"the cache folder {self._folder} cannot be written: {error.strerror or error}",
                "free some space there, or name another folder in XDG_CACHE_HOME",
            ) from None
        finally:
            if part is not None:
                part.unlink(missing_ok=True)


def _encoded(
    text: npt.NDArray[np.uint8], tokenizer: Tokenizer, progress: Progress
) -> Iterator[npt.NDArray[Any]]:
    """Yield the ids of a text piece by piece, several pieces at once: the library encodes outside of Python's lock."""
    threads = available_threads()
    pieces = encodable_pieces(text)
    done = 0
    with ThreadPoolExecutor(threads) as pool:
        while group := list(islice(pieces, threads)):
            yield from pool.map(tokenizer.encode, group)
            done += sum(map(len, group))
            progress("bytes turned into tokens", done, len(text))


def encodable_pieces(text: npt.NDArray[np.uint8]) -> Iterator[bytes]:
    """Yield a text in pieces of about ENCODED_AT_ONCE bytes whose ids can be joined.

    A stretch without a safe place to cut is cut where a character starts.
    """
    start = 0
    while start < len(text):
        piece = text[start : start + ENCODED_AT_ONCE].tobytes()
        if start + len(piece) < len(text):
            cuts = [match.end() for match in _SAFE_CUT.finditer(piece, len(piece) // 2)]
            end = cuts[-1] if cuts else len(piece)
            while not cuts and end > len(piece) - 3 and text[start + end] & 0xC0 == 0x80:
                end -= 1
            piece = piece[:end]
        yield piece
        start += len(piece)
