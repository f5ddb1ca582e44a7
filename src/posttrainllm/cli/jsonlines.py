"""A run as JSON lines, for programs: one object a line, told apart by "event".

start, step, sample, checkpoint, notice and end; the keys of a step are those of metrics.jsonl. A number
that is not finite is null.
"""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

from posttrainllm.cli.watcher import Watcher
from posttrainllm.config import settings_of
from posttrainllm.runs.trainer_state import finite
from posttrainllm.training.observer import Outcome, Record
from posttrainllm.training.report import start_warnings


class JsonLines(Watcher):
    """One JSON object a line on standard output, and nothing else there."""

    def _event(self, event: str, **facts: Any) -> None:
        sys.stdout.write(json.dumps({"event": event, **finite(facts)}, allow_nan=False) + "\n")
        sys.stdout.flush()

    def show_start(self) -> None:
        """See ``Watcher``."""
        assert self.progress is not None
        start = self.progress.start
        corpus = start.corpus
        self._event(
            "start",
            run=str(start.run),
            preset=start.config.preset,
            parameters=start.parameters,
            bytes=start.nbytes,
            corpus={
                "name": corpus.name,
                "sha256": corpus.sha256,
                "bytes": corpus.n_bytes,
                "train_bytes": len(corpus.train_text),
                "val_bytes": len(corpus.val_text),
            },
            first_step=start.first_step,
            steps=start.config.training.steps,
            tokens=start.tokens,
            epochs=start.epochs,
            engine=start.engine,
            counting={line.name: line.loss for line in start.counting},
            seconds_per_step=start.seconds_per_step,
            seconds_left=start.seconds_left,
            settings=settings_of(start.config),
        )
        for warning in start_warnings(start):
            self._event("notice", message=warning)

    def show_step(self, record: Record) -> None:
        """See ``Watcher``."""
        self._event("step", **asdict(record))

    def show_sample(self) -> None:
        """See ``Watcher``."""
        assert self.progress is not None
        assert self.progress.sample is not None
        step, prompt, text = self.progress.sample
        self._event("sample", step=step, prompt=prompt, text=text)

    def show_saved(self, folder: Path) -> None:
        """See ``Watcher``."""
        assert self.progress is not None
        self._event("checkpoint", step=self.progress.saved, path=str(folder))

    def show_notice(self, message: str) -> None:
        """See ``Watcher``."""
        self._event("notice", message=message)

    def show_end(self, outcome: Outcome) -> None:
        """See ``Watcher``."""
        self._event(
            "end",
            run=str(outcome.run),
            finished=outcome.finished,
            step=outcome.step,
            loss=outcome.losses[-1] if outcome.losses else None,
            val_loss=outcome.val_loss,
            checkpoint=str(outcome.checkpoint) if outcome.checkpoint else None,
            verdict=outcome.verdict.figures() if outcome.verdict else None,
        )
