"""The text that a run trains on: opened once, split once, read by position.

``open_corpus`` finds the files, refuses what is no text (text/files.py), hashes the content and cuts
it into a training part (the start) and a validation part (the end); training never reads the
latter. The cut is made in bytes and never inside a character, so with any tokenizer the two parts
hold the same text. Which windows a step reads is control.py's business; here are the parts, the
windows at given positions, and the fixed windows of an evaluation.

Memory: up to ``READ_WHOLE`` bytes are read at once, and an editor that rewrites a file does no harm
to a run. A larger file is mapped and its bytes are the tokens, with no copy. Standard input, and
several files beyond that size, are first written to one file in the cache folder, named by the hash
of its content; there a resumed run finds again what came through a pipe.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from posttrainllm.errors import CorpusError
from posttrainllm.figures import Progress, untold
from posttrainllm.storage import default_cache_dir
from posttrainllm.text.cache import Facts, TextCache, map_file
from posttrainllm.text.datasets import shakespeare_path
from posttrainllm.text.files import Findings, TextCheck, TextFile, find_files
from posttrainllm.text.tokenizer import ByteTokenizer, Ids, Tokenizer
from posttrainllm.wording import setting, worded

READ_WHOLE = 64 << 20

Tokens = npt.NDArray[Any]
"""(n,) of an unsigned integer type, perhaps mapped from a file: never written to."""

Bytes = npt.NDArray[np.uint8]


DEFAULT_NAME = "TinyShakespeare"
"""What the text is called that is used when none is named."""


@dataclass(frozen=True, eq=False)
class Corpus:
    """A text in two parts, as tokens and as bytes."""

    name: str
    """What a person calls it: TinyShakespeare, a file's name, "3 files", standard input."""
    sources: tuple[str, ...]
    """Absolute paths, or "-"; none for TinyShakespeare. With ``sha256`` they open the same text."""
    sha256: str
    """Hash of the whole text, both parts."""
    n_bytes: int
    """Size of the whole text."""
    train: Tokens
    """Training part (n,): uint8, uint16 or uint32, whichever holds the vocabulary."""
    val: Tokens
    """Validation part, of the same type; empty when the validation fraction is 0."""
    train_text: Bytes
    """Training part as bytes; the same array as ``train`` with the byte tokenizer."""
    val_text: Bytes
    """Validation part as bytes."""
    val_fraction: float
    """Share of the text that was asked for as validation part."""
    notices: tuple[str, ...]
    """What the user should know about the files, one sentence each."""

    def check(self, n_ctx: int, *, fixed: bool = False) -> None:
        """Make sure that each part holds at least one window: n_ctx tokens and one to predict.

        ``fixed``: it is the context of a model that exists, so that none of its ways out is another one.

        Raises: CorpusError naming the part and both numbers.
        """
        parts = [("training", self.train, worded("or a larger file"))]
        if self.val_fraction > 0:
            parts.append(("validation", self.val, worded("a larger file or {data.val_fraction=0}")))
        for part, tokens, other in parts:
            if len(tokens) < n_ctx + 1:
                fitting = worded("use a larger file")
                if len(tokens) > 1 and not fixed:
                    most = setting("model.n_ctx", len(tokens) - 1)
                    fitting = worded("use {most} or less, {other}", most=most, other=other)
                raise CorpusError(
                    f"the {part} part has {len(tokens):,} tokens, "
                    f"a context of {n_ctx:,} needs at least {n_ctx + 1:,}",
                    fitting,
                )

    @property
    def bytes_per_token(self) -> float:
        """Bytes that a token of the validation part stands for on average; of the training part where there is no other."""
        text, tokens = (self.val_text, self.val) if len(self.val) else (self.train_text, self.train)
        return len(text) / max(1, len(tokens))

    def positions(self, n_ctx: int) -> int:
        """Return how many windows the training part has: offsets 0 to this, exclusive."""
        return max(0, len(self.train) - n_ctx)

    def windows(self, offsets: npt.NDArray[np.int64], n_ctx: int) -> tuple[Ids, Ids]:
        """Return tokens and targets (B, T) of the training windows at ``offsets`` (B,)."""
        return windows(self.train, offsets, n_ctx)

    def validation_offsets(self, n_windows: int, n_ctx: int) -> npt.NDArray[np.int64]:
        """Return the offsets (W,) of fixed validation windows that do not overlap.

        The part is a row of windows of n_ctx tokens; ``n_windows`` of them, evenly spaced, or all
        of them when ``n_windows`` is 0 or more than there are.
        """
        available = max(0, len(self.val) - 1) // n_ctx
        if n_windows == 0 or n_windows >= available:
            chosen = np.arange(available, dtype=np.int64)
        else:
            chosen = (2 * np.arange(n_windows, dtype=np.int64) + 1) * available // (2 * n_windows)
        return chosen * n_ctx

    def validation_windows(self, n_windows: int, n_ctx: int) -> tuple[Ids, Ids]:
        """Return tokens and targets (W, T) of the fixed validation windows."""
        return windows(self.val, self.validation_offsets(n_windows, n_ctx), n_ctx)


def windows(part: Tokens, offsets: npt.NDArray[np.int64], n_ctx: int) -> tuple[Ids, Ids]:
    """Return tokens and targets (B, T), int32, of the windows of a part at ``offsets`` (B,).

    Row b holds part[offsets[b] : offsets[b] + T]; its targets are the same one token later.
    """
    assert len(offsets) == 0 or offsets.min() >= 0
    rows = part[np.asarray(offsets, np.int64)[:, None] + np.arange(n_ctx + 1)].astype(np.int32)
    return np.ascontiguousarray(rows[:, :-1]), np.ascontiguousarray(rows[:, 1:])


def default_corpus_path() -> Path:
    """Return where TinyShakespeare is in the package.

    Raises: CorpusError when the build did not put it there.
    """
    path = shakespeare_path()
    if not path.is_file():
        raise CorpusError(
            f"TinyShakespeare is missing from this installation: {path}",
            "fetch it with python -m posttrainllm.text.datasets, or give a text file",
        )
    return path


def open_corpus(
    sources: Sequence[str],
    *,
    val_fraction: float,
    tokenizer: Tokenizer | None = None,
    cache_dir: Path | None = None,
    sha256: str | None = None,
    allow_binary: bool = False,
    progress: Progress = untold,
) -> Corpus:
    """Open text files as one corpus.

    ``sources`` are files, folders (their .txt files at any depth, sorted) and "-" for standard
    input, in this order; none is TinyShakespeare. Files are joined as they are, with a line feed
    between two when the first does not end in one. ``tokenizer`` is bytes unless given, and
    ``cache_dir`` the user's cache folder. ``sha256`` is the hash of the text that is wanted, when a
    run is resumed: another text is refused, and standard input is then not read but taken from the
    cache. ``allow_binary`` takes files byte for byte, whatever is in them. ``progress`` hears of the
    work on long texts: reading them, and turning them into tokens that are not bytes.

    Raises: CorpusError, in one line with the next action, for files that are missing, unreadable,
    empty, binary, UTF-16, or no longer the text of ``sha256``.
    """
    if not 0 <= val_fraction < 1:
        raise CorpusError(
            f"data.val_fraction is {val_fraction}, wanted 0 or more and less than 1",
            "0.1 keeps the last tenth of the text for validation",
        )
    cache = TextCache(default_cache_dir() if cache_dir is None else cache_dir)
    files = find_files(sources if sources else [str(default_corpus_path())])
    name = _name(files) if sources else DEFAULT_NAME
    data, facts = _read(files, cache, progress, wanted=sha256, allow_binary=allow_binary)
    if facts.n_bytes == 0:
        raise CorpusError(f"{name} has no text", "give a file with text in it")
    if sha256 is not None and facts.sha256 != sha256:
        raise CorpusError(
            f"{name} is not the text of this run: its hash is {facts.sha256[:12]}, "
            f"wanted {sha256[:12]}",
            "bring the text back as it was, or start a new run",
        )
    cut = split_position(data, val_fraction)
    train_text, val_text = data[:cut], data[cut:]
    train: Tokens = train_text
    val: Tokens = val_text
    if tokenizer is not None and not isinstance(tokenizer, ByteTokenizer):
        train = cache.tokens(train_text, tokenizer, f"{facts.sha256}-to-{cut}", progress)
        val = cache.tokens(val_text, tokenizer, f"{facts.sha256}-from-{cut}", progress)
    return Corpus(
        name=name,
        sources=tuple("-" if file.path is None else str(file.path) for file in files if sources),
        sha256=facts.sha256,
        n_bytes=facts.n_bytes,
        train=train,
        val=val,
        train_text=train_text,
        val_text=val_text,
        val_fraction=val_fraction,
        notices=facts.notices,
    )


def split_position(text: Bytes, val_fraction: float) -> int:
    """Return where the validation part of a text starts: at a character, close to the fraction.

    The exact place moves forward over the continuation bytes of a UTF-8 character, at most three;
    in text of another encoding four such bytes in a row mean nothing, and it stays.
    """
    exact = int(len(text) * (1 - val_fraction))
    for position in range(exact, min(exact + 4, len(text))):
        if text[position] & 0xC0 != 0x80:
            return position
    return len(text) if len(text) < exact + 4 else exact


def _name(files: list[TextFile]) -> str:
    if len(files) > 1:
        return f"{len(files)} files"
    return files[0].name if files[0].path is None else files[0].path.name


def _read(
    files: list[TextFile],
    cache: TextCache,
    progress: Progress,
    *,
    wanted: str | None,
    allow_binary: bool,
) -> tuple[Bytes, Facts]:
    """Return the joined text of files as an array, in memory or mapped, and its facts."""
    piped = not all(file.regular for file in files)
    if piped and wanted is not None and cache.text_path(wanted).is_file():
        path = cache.text_path(wanted)
        size = path.stat().st_size
        return map_file(path, size), Facts(wanted, size, ())
    findings = Findings()
    pieces = _joined(files, findings, allow_binary=allow_binary)
    if not piped and sum(file.size for file in files) <= READ_WHOLE:
        text = b"".join(pieces)
        facts = Facts(hashlib.sha256(text).hexdigest(), len(text), findings.notices())
        return np.frombuffer(text, np.uint8), facts
    in_place = len(files) == 1 and not piped
    known = None if piped or allow_binary else cache.recall(files)
    if known is not None and (in_place or cache.text_path(known.sha256).is_file()):
        facts = known
    else:
        told = _told(pieces, 0 if piped else sum(file.size for file in files), progress)
        sha256, n_bytes = _hash(told) if in_place else cache.write_text(told)
        facts = Facts(sha256, n_bytes, findings.notices())
        for file in files:
            file.check_unchanged()
        if not piped and not allow_binary:
            cache.remember(files, facts)
    if in_place and files[0].path is not None:
        return map_file(files[0].path, facts.n_bytes, files[0].size - facts.n_bytes), facts
    return map_file(cache.text_path(facts.sha256), facts.n_bytes), facts


def _hash(pieces: Iterable[bytes]) -> tuple[str, int]:
    digest = hashlib.sha256()
    n_bytes = 0
    for piece in pieces:
        digest.update(piece)
        n_bytes += len(piece)
    return digest.hexdigest(), n_bytes


def _told(pieces: Iterable[bytes], total: int, progress: Progress) -> Iterator[bytes]:
    """The pieces of a text, counted as they are read."""
    done = 0
    for piece in pieces:
        yield piece
        done += len(piece)
        progress("bytes of text read", done, total)


def _joined(files: list[TextFile], findings: Findings, *, allow_binary: bool) -> Iterator[bytes]:
    """Yield the text of all files, with a line feed between two where the first ends in none."""
    end = b"\n"
    for file in files:
        check = TextCheck(file, findings, allow_binary=allow_binary)
        with file.open() as stream:
            for number, piece in enumerate(check.pieces(stream)):
                if number == 0 and end != b"\n":
                    yield b"\n"
                end = piece[-1:]
                yield piece
