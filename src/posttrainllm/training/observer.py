"""What a run tells whoever watches it: before the start, step by step, and at the end.

What this is: the events of ``training/trainer.py`` as plain data, and the ``Observer`` that receives them; the terminal, a
notebook and a test each bring their own.
What this is not: a display.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from posttrainllm.config import TrainConfig
from posttrainllm.text.corpus import Corpus
from posttrainllm.text.counting import CountingLine
from posttrainllm.training.writing import Verdict


@dataclass(frozen=True)
class Record:
    """One line of metrics.jsonl: a step as it was measured."""

    step: int
    loss: float
    val_loss: float | None
    lr: float
    grad_norm: float
    tokens_per_second: float
    elapsed_s: float


@dataclass(frozen=True)
class Start:
    """What is known before step 0."""

    run: Path
    config: TrainConfig
    corpus: Corpus
    engine: dict[str, str | int]
    parameters: int
    nbytes: int
    tokens_per_step: int
    first_step: int
    counting: list[CountingLine]
    seconds_per_step: float

    @property
    def tokens(self) -> int:
        """Tokens the whole run sees."""
        return self.tokens_per_step * self.config.training.steps

    @property
    def epochs(self) -> float:
        """How often it sees the training part."""
        return self.tokens / max(1, len(self.corpus.train))

    @property
    def seconds_left(self) -> float:
        """Estimate for the steps from here, from a probe of the first step's gradients."""
        return self.seconds_per_step * (self.config.training.steps - self.first_step + 1)


@dataclass(frozen=True)
class Outcome:
    """How a run ended."""

    run: Path
    finished: bool
    step: int
    losses: list[float]
    val_loss: float | None
    verdict: Verdict | None
    checkpoint: Path | None
    stopped: bool = False
    """Whether the user asked for the end before it came by itself: a run can be finished and have no verdict for that."""


class Observer(Protocol):
    """Whoever watches a run. Every method returns quickly; none may raise."""

    def preparing(self, what: str, done: int, total: int) -> None:
        """Long work on the text before the start, told often: see ``figures.Progress``."""

    def started(self, start: Start) -> None:
        """Before the first step."""

    def stepped(self, record: Record) -> None:
        """After a step that is logged."""

    def sampled(self, step: int, prompt: str, text: str) -> None:
        """The model wrote something."""

    def saved(self, step: int, folder: Path) -> None:
        """A checkpoint is safe on disk."""

    def noticed(self, message: str) -> None:
        """Something the user should know, and training goes on."""

    def stopping(self) -> None:
        """The user asked for the end; the step that runs is finished first. Called inside a signal handler: note it, print nothing."""

    def ended(self, outcome: Outcome) -> None:
        """After the last step."""


class Silent:
    """An observer that looks away."""

    def preparing(self, what: str, done: int, total: int) -> None:
        """See ``Observer``."""

    def started(self, start: Start) -> None:
        """See ``Observer``."""

    def stepped(self, record: Record) -> None:
        """See ``Observer``."""

    def sampled(self, step: int, prompt: str, text: str) -> None:
        """See ``Observer``."""

    def saved(self, step: int, folder: Path) -> None:
        """See ``Observer``."""

    def noticed(self, message: str) -> None:
        """See ``Observer``."""

    def stopping(self) -> None:
        """See ``Observer``."""

    def ended(self, outcome: Outcome) -> None:
        """See ``Observer``."""
