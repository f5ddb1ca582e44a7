"""What a run leaves on disk while it trains: metrics, samples, checkpoints.

What this is: writing that a failing disk cannot turn into lost work. A line that cannot be written is kept and written later, a
checkpoint that cannot be written along the way is a notice, and the last one is tried until it is safe or the user gives up.
What this is not: the files' formats (``runs/records.py``, ``runs/checkpoint.py``) or the run folder (``runs/folder.py``).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal

from posttrainllm.engines.base import Engine
from posttrainllm.errors import CheckpointError, TrainingError
from posttrainllm.runs.checkpoint import write_checkpoint
from posttrainllm.runs.folder import Run
from posttrainllm.runs.records import Records
from posttrainllm.runs.trainer_state import CorpusIdentity, TrainerState
from posttrainllm.text.corpus import Corpus
from posttrainllm.text.tokenizer import Tokenizer
from posttrainllm.training.stopping import StopSignals
from posttrainllm.wording import Wording, worded

File = Literal["metrics", "samples"]

RETRY_S = 5.0  # between attempts of the last save


class Journal:
    """The writing side of one run; its lock is held by the trainer."""

    def __init__(
        self, run: Run, corpus: Corpus, tokenizer: Tokenizer, notice: Callable[[str], None]
    ) -> None:
        """``notice`` is told what could not be written."""
        self.run, self.corpus, self.tokenizer = run, corpus, tokenizer
        self.saved: Path | None = None
        self._notice = notice
        self._files: dict[File, Records] = {"metrics": run.metrics, "samples": run.samples}
        self._waiting: list[tuple[File, Mapping[str, Any]]] = []
        self._failing = False  # and the user knows

    def append(self, file: File, record: Mapping[str, Any]) -> None:
        """Add a line to ``metrics`` or ``samples``; when that fails, say so once and keep it for later."""
        self._waiting.append((file, record))
        try:
            self._flush()
        except CheckpointError as error:
            self._fail(
                worded(
                    "{what}; training goes on and keeps the lines; {then}",
                    what=error.message,
                    then=error.hint,
                )
            )

    def _flush(self) -> None:
        while self._waiting:
            file, record = self._waiting[0]
            self._files[file].append(record)
            self._waiting.pop(0)

    def checkpoint(
        self, engine: Engine, state: Callable[[CorpusIdentity, str], TrainerState]
    ) -> Path:
        """Save everything resume needs, the lines before it first. Raises: CheckpointError; nothing is lost then."""
        self._flush()
        for records in self._files.values():
            records.sync()
        tensors = engine.state()
        identity = CorpusIdentity(
            name=self.corpus.name, sha256=self.corpus.sha256, bytes=self.corpus.n_bytes
        )
        trainer_state = state(identity, self.tokenizer.fingerprint)
        self.saved = write_checkpoint(
            self.run.checkpoints,
            state=trainer_state,
            params=tensors.params,
            m=tensors.m,
            v=tensors.v,
            tokenizer=self.tokenizer,
            keep=trainer_state.config.training.keep_checkpoints,
            keep_best=True,
            write_moments=tensors.write_moments,
        )
        self._failing = False
        return self.saved

    def checkpoint_or_notice(
        self, engine: Engine, state: Callable[[CorpusIdentity, str], TrainerState]
    ) -> Path | None:
        """A checkpoint along the way: when it cannot be written, training goes on and the user is told."""
        try:
            return self.checkpoint(engine, state)
        except CheckpointError as error:
            self._fail(
                worded("{what}; training goes on; {then}", what=error.message, then=error.hint)
            )
            return None

    def _fail(self, message: str) -> None:
        """Tell of the first of several failures in a row: on a full disk, every line and every checkpoint fails."""
        if not self._failing:
            self._notice(message)
        self._failing = True

    def last_checkpoint(
        self,
        engine: Engine,
        state: Callable[[CorpusIdentity, str], TrainerState],
        stop: StopSignals,
    ) -> Path:
        """The last checkpoint: what was trained stays in memory until it is on disk.

        Raises: TrainingError when the user gives up.
        """
        asked = stop.requested, stop.again
        told = False
        while True:
            try:
                return self.checkpoint(engine, state)
            except CheckpointError as error:
                if not told:
                    self._notice(
                        worded(
                            "{what}; {then}; the state is kept in memory and saving tried again every {seconds} s; {stop} gives up",
                            what=error.message,
                            then=error.hint,
                            seconds=f"{RETRY_S:.0f}",
                            stop=Wording("an interrupt", terminal="Ctrl-C"),
                        )
                    )
                told = True
            stop.wait(RETRY_S)
            if (stop.requested, stop.again) != asked:
                newest = (
                    f"the newest checkpoint is {self.saved}"
                    if self.saved and self.saved.is_dir()
                    else "no checkpoint is there"
                )
                raise TrainingError("the last state was not saved", newest)

    def close(self) -> None:
        """Close the files."""
        for records in self._files.values():
            records.close()
