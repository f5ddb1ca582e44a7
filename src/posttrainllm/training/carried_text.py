"""The text of a run as one file, for a run that leaves this machine: in a browser or on another disk its path means nothing."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from posttrainllm.errors import CorpusError
from posttrainllm.runs.folder import Run
from posttrainllm.runs.trainer_state import TrainerState
from posttrainllm.storage import show_bytes, sync_file
from posttrainllm.text.corpus import open_corpus
from posttrainllm.text.datasets import TINY_SHAKESPEARE

MOST_BYTES = 2**28
"""A larger text stays where it is: no browser takes it."""


@contextmanager
def carried_text(run: Path, state: TrainerState, place: Path) -> Iterator[tuple[Path | None, str]]:
    """Give the file with the text, which is there as long as the block runs, and a notice when a text stays behind.

    No file is needed, and none is made, for a text that every installation has or that the run keeps already.

    ``place`` is a path beside which the file may be written.

    Raises: OSError when it cannot be written.
    """
    corpus = state.corpus
    if corpus is None or corpus.sha256 == TINY_SHAKESPEARE.sha256 or Run(run).corpus is not None:
        yield None, ""
        return
    if corpus.bytes > MOST_BYTES:
        yield (
            None,
            f"the text is not in it: {show_bytes(corpus.bytes)} are more than {show_bytes(MOST_BYTES)}",
        )
        return
    try:
        text = open_corpus(state.config.data.corpus, val_fraction=0.0, sha256=corpus.sha256)
    except CorpusError as error:
        yield None, f"the text is not in it, and going on elsewhere asks for it: {error.message}"
        return
    path = place.with_name(place.name + "-text")
    try:
        text.train_text.tofile(path)
        sync_file(path)
        yield path, ""
    finally:
        path.unlink(missing_ok=True)
