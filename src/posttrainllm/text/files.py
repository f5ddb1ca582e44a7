"""Text as it comes: which files a corpus is made of, and what is refused or noticed in them.

A token is a byte, so nearly any text can be trained on as it is. What is refused by name is what
would train on the wrong thing: files that are missing, empty or unreadable, UTF-16, archives and
other binary data. What is only noticed: text that is not UTF-8 (Latin-1, say) and CRLF line ends,
both kept byte for byte. A UTF-8 byte order mark is no text and is left out.

Nothing here holds a whole file: ``TextCheck`` sees each one in pieces. text/corpus.py reads the pieces.
"""

from __future__ import annotations

import codecs
import os
import shlex
import stat
import sys
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

from posttrainllm.errors import CorpusError
from posttrainllm.presets import PRESETS
from posttrainllm.settings import show
from posttrainllm.wording import Wording, setting, worded

PIECE = 1 << 20  # bytes read at a time

STANDARD_INPUT = "-"

# Control bytes that no text has. Text may have: bell, backspace, tab, line feed, vertical tab,
# form feed, carriage return (7 to 13) and escape (27, colours in logs).
CONTROL = bytes({*range(7), *range(14, 27), *range(28, 32), 127})
CONTROL_SHARE = 0.01  # random bytes have 0.10, compressed data about as much, text none
FEW_CONTROLS = 8  # a short text may end in DOS's control-Z

SIGNATURES = [
    (b"%PDF-", "a PDF file", "convert it first: pdftotext {file} {stem}.txt"),
    (b"PK\x03\x04", "a ZIP file (so are .docx, .epub and .odt)", "export or unpack the text first"),
    (b"\x1f\x8b", "gzip-compressed", "unpack it: gzip -dc {file} {into}"),
    (b"BZh91AY&SY", "bzip2-compressed", "unpack it: bzip2 -dc {file} {into}"),
    (b"\xfd7zXZ\0", "xz-compressed", "unpack it: xz -dc {file} {into}"),
    (b"\x28\xb5\x2f\xfd", "zstd-compressed", "unpack it: zstd -dc {file} {into}"),
    (b"PAR1\x15", "a Parquet file", "export its text column first"),
    (b"SQLite format 3\0", "an SQLite database", "export its text first"),
]
UTF_MARKS = [
    (codecs.BOM_UTF32_LE, "UTF-32"),
    (codecs.BOM_UTF32_BE, "UTF-32"),
    (codecs.BOM_UTF16_LE, "UTF-16"),
    (codecs.BOM_UTF16_BE, "UTF-16"),
]


@dataclass(frozen=True)
class TextFile:
    """One file, pipe or standard input to read text from."""

    path: Path | None
    """Absolute path, or None for standard input."""
    size: int
    """Bytes by the file system; 0 for a pipe."""
    mtime_ns: int
    """Time of the last change, to see whether a file is still the one that was checked."""
    regular: bool
    """Whether it can be read twice and mapped; pipes and standard input cannot."""
    found: bool = False
    """Whether a folder was given and not this file itself: then an empty file is passed over."""

    @property
    def name(self) -> str:
        """What messages call it."""
        return "standard input" if self.path is None else str(self.path)

    def open(self) -> AbstractContextManager[BinaryIO]:
        """Open it for reading; standard input stays open afterwards.

        Raises: CorpusError when it cannot be read.
        """
        if self.path is None:
            if sys.stdin is None:
                raise CorpusError("standard input is closed", "give a text file instead of -")
            return nullcontext(sys.stdin.buffer)
        try:
            return self.path.open("rb")
        except OSError as error:
            raise unreadable(self.path, error) from None

    def check_unchanged(self) -> None:
        """Make sure that the file is still the one that was found; pipes are never read twice.

        Raises: CorpusError when its size or time of change is another.
        """
        if self.path is None or not self.regular:
            return
        status = _status(self.path)
        if (status.st_size, status.st_mtime_ns) != (self.size, self.mtime_ns):
            raise CorpusError(
                f"{self.path} changed while it was read", "start again when it is complete"
            )


def unreadable(path: Path | str, error: OSError) -> CorpusError:
    """Return the error for a file that the system does not let us read."""
    hint = "give a file that exists and that you may read"
    if isinstance(error, PermissionError):
        hint = f"allow it: chmod u+r {shlex.quote(str(path))}"
    return CorpusError(f"{path} cannot be read: {error.strerror or error}", hint)


def find_files(sources: Sequence[str]) -> list[TextFile]:
    """Return the files that sources name, in their order; a folder gives its .txt files, sorted.

    Folders are searched to any depth and sorted by path, so that the order is the same everywhere.

    Raises: CorpusError for a source that is missing, unreadable, named twice, or a folder with no
    .txt file in it.
    """
    files: list[TextFile] = []
    for source in sources:
        if not source:
            raise CorpusError("a corpus has an empty name", "give a text file")
        if source == STANDARD_INPUT:
            files.append(TextFile(None, 0, 0, regular=False))
            continue
        path = _absolute(source)
        _check_name(path)
        if stat.S_ISDIR(_status(path).st_mode):
            members = _text_files_in(path)
            for member in members:
                _check_name(member)
            files.extend(_describe(member, found=True) for member in members)
        else:
            files.append(_describe(path, found=False))
    seen: set[Path | None] = set()
    for file in files:
        identity = file.path.resolve() if file.path else None
        if identity in seen:
            raise CorpusError(
                f"{file.name} is named twice",
                "name it once: a copy would put the validation text into the training part",
            )
        seen.add(identity)
    return files


def _check_name(path: Path) -> None:
    """A run writes down where its text is, and what it writes is UTF-8."""
    try:
        os.fspath(path).encode("utf-8")
    except UnicodeEncodeError:
        raise CorpusError(
            f"the file name {show(os.fspath(path))} is not text in this locale",
            "set LC_ALL=C.UTF-8, rename the file, or pipe it in: - reads standard input",
        ) from None


def _text_files_in(folder: Path) -> list[Path]:
    try:
        entries = [path for path in folder.rglob("*") if path.suffix.lower() == ".txt"]
        files = [path for path in entries if path.is_file()]
    except OSError as error:
        raise unreadable(folder, error) from None
    if not files:
        raise CorpusError(
            f"{folder} is a folder with no .txt file in it",
            "give the text files themselves, by name",
        )
    return sorted(files, key=lambda path: path.relative_to(folder).as_posix())


def _absolute(source: str) -> Path:
    try:
        return Path(source).expanduser().absolute()
    except RuntimeError:  # the home of a user that does not exist
        return Path(source).absolute()


def _status(path: Path) -> os.stat_result:
    try:
        return path.stat()
    except FileNotFoundError:
        hint = "give a text file, a folder with .txt files, or - for standard input"
        if path.name in PRESETS:
            preset = setting("preset", path.name)
            hint = worded("{name} is a preset, no text: {it}", name=path.name, it=preset)
        raise CorpusError(f"{path} does not exist", hint) from None
    except OSError as error:
        raise unreadable(path, error) from None
    except ValueError as error:  # a NUL in the name
        raise CorpusError(f"{str(path)!r} is no file name: {error}") from None


def _describe(path: Path, *, found: bool) -> TextFile:
    status = _status(path)
    regular = stat.S_ISREG(status.st_mode)
    return TextFile(path, status.st_size, status.st_mtime_ns, regular, found)


@dataclass
class Findings:
    """What is worth a notice, gathered over all files of a corpus."""

    crlf: list[str] = field(default_factory=list)
    not_utf8: list[str] = field(default_factory=list)
    empty: list[str] = field(default_factory=list)

    def notices(self) -> tuple[str, ...]:
        """Return one sentence for each kind of finding, however many files have it."""
        texts = []
        if self.not_utf8:
            texts.append(
                f"not UTF-8: {_first_of(self.not_utf8)}; trained on byte for byte, but letters "
                "beyond ASCII will show as \ufffd (iconv -f ISO-8859-1 -t UTF-8 converts Latin-1)"
            )
        if self.crlf:
            texts.append(
                f"CRLF line ends: {_first_of(self.crlf)}; kept, so the model will write them too "
                "(tr -d '\\r' takes them out)"
            )
        if self.empty:
            texts.append(f"empty, passed over: {_first_of(self.empty)}")
        return tuple(texts)


def _first_of(names: list[str]) -> str:
    return names[0] if len(names) == 1 else f"{names[0]} and {len(names) - 1} more"


class TextCheck:
    """Looks at one file piece by piece while it is read for another reason.

    ``TextCheck(file, findings).pieces(stream)`` yields the bytes of the text. Every refusal is
    raised as soon as it is certain, so that an endless device is refused too.
    """

    def __init__(self, file: TextFile, findings: Findings, *, allow_binary: bool = False) -> None:
        """Check ``file``, adding to ``findings``; ``allow_binary`` takes any bytes as they are."""
        self._file = file
        self._findings = findings
        self._allow_binary = allow_binary
        self._utf8 = codecs.getincrementaldecoder("utf-8")("strict")
        self._is_utf8 = True
        self._has_crlf = False
        self._last = b""
        self._n_bytes = 0
        self._n_control = 0

    def pieces(self, stream: BinaryIO) -> Iterator[bytes]:
        """Yield the text of a stream in pieces of at most PIECE bytes, a UTF-8 mark left out.

        Raises: CorpusError when it cannot be read or is not text.
        """
        while piece := self._read(stream):
            if not self._allow_binary:
                if self._n_bytes == 0:
                    self._refuse_other_formats(piece)
                self._refuse_binary(piece)
            start = self._n_bytes == 0 and piece.startswith(codecs.BOM_UTF8)
            self._notice(piece)
            self._n_bytes += len(piece)
            text = piece[len(codecs.BOM_UTF8) :] if start and not self._allow_binary else piece
            if text:
                yield text
        self._finish()

    def _read(self, stream: BinaryIO) -> bytes:
        try:
            return stream.read(PIECE)
        except OSError as error:
            raise unreadable(self._file.name, error) from None

    def _refuse_other_formats(self, piece: bytes) -> None:
        for mark, encoding in UTF_MARKS:
            if piece.startswith(mark):
                raise self._wrong_encoding(f"is {encoding}, not UTF-8", encoding)
        for signature, what, hint in SIGNATURES:
            if piece.startswith(signature):
                raise CorpusError(f"{self._file.name} is {what}, not text", self._fill(hint))

    def _refuse_binary(self, piece: bytes) -> None:
        nul = piece.find(b"\0")
        if nul >= 0:
            for odd, encoding in ((1, "UTF-16LE"), (0, "UTF-16BE")):
                high, low = piece[odd:4096:2], piece[1 - odd : 4096 : 2]
                if high.count(0) > 0.8 * len(high) and low.count(0) < 0.2 * len(low):
                    raise self._wrong_encoding("looks like UTF-16 with no mark", encoding)
            raise CorpusError(
                f"{self._file.name} is binary: byte {self._n_bytes + nul:,} is NUL",
                self._fill(
                    "give plain text; if it is text with stray NULs: tr -d '\\000' < {file} > {stem}-clean.txt"
                ),
            )
        self._n_control += len(piece) - len(piece.translate(None, CONTROL))
        share = self._n_control / (self._n_bytes + len(piece))
        if share > CONTROL_SHARE and self._n_control > FEW_CONTROLS:
            raise CorpusError(
                f"{self._file.name} is binary: {share:.0%} of its bytes are control characters",
                "give plain text",
            )

    def _notice(self, piece: bytes) -> None:
        if not self._has_crlf:
            self._has_crlf = b"\r\n" in piece or (self._last == b"\r" and piece[:1] == b"\n")
        self._last = piece[-1:]
        self._decode(piece)

    def _decode(self, piece: bytes, final: bool = False) -> None:
        if not self._is_utf8:
            return
        waiting = len(self._utf8.getstate()[0])
        try:
            self._utf8.decode(piece, final)
        except UnicodeDecodeError as error:
            self._is_utf8 = False
            at = self._n_bytes - waiting + error.start
            bad = error.object[error.start]
            self._findings.not_utf8.append(f"{self._file.name} (byte {at:,} is 0x{bad:02X})")

    def _finish(self) -> None:
        self._decode(b"", final=True)
        if self._n_bytes == 0 and not self._file.found:
            raise CorpusError(f"{self._file.name} is empty", "give a file with text in it")
        if self._n_bytes == 0:
            self._findings.empty.append(self._file.name)
        if self._has_crlf:
            self._findings.crlf.append(self._file.name)

    def _wrong_encoding(self, problem: str, encoding: str) -> CorpusError:
        command = f"convert it: iconv -f {encoding} -t UTF-8 {{file}} > {{stem}}-utf8.txt"
        return CorpusError(f"{self._file.name} {problem}", self._fill(command))

    def _fill(self, command: str) -> Wording:
        path = self._file.path or Path("input")
        into = Wording("> text.txt", terminal="| posttrainllm train -")
        file, stem = shlex.quote(str(path)), shlex.quote(path.stem)
        return worded(command, file=file, stem=stem, into=into)
