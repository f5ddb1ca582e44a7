"""How far a run is: what the displays keep of the events that the trainer sends.

Plain numbers and no drawing; the displays of the command line and of notebooks read them.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from posttrainllm.runs.curves import GrowingCurve
from posttrainllm.text.counting import standing
from posttrainllm.training.observer import Record, Start

SMOOTHED = 20  # logged steps at most whose mean is shown as the loss, and their pace as the speed
SHARE = 20  # of the run, one part in so many: or the loss of a short run is that of its beginning
MOST_POINTS = 1024  # of the curve, so that a frame of a long run costs no more than one of a short


@dataclass
class Progress:
    """A run seen from outside. ``now`` is a clock in seconds."""

    start: Start
    now: Callable[[], float] = time.monotonic
    curve: GrowingCurve = field(default_factory=lambda: GrowingCurve(MOST_POINTS))
    """Training losses since the start, of logged steps."""
    measured: GrowingCurve = field(default_factory=lambda: GrowingCurve(MOST_POINTS))
    """Validation losses since the start."""
    last: Record | None = None
    val_loss: float | None = None
    val_step: int = 0
    best: float | None = None
    sample: tuple[int, str, str] | None = None
    saved: int = 0
    stopping: bool = False

    def __post_init__(self) -> None:
        """Start the clock."""
        self._began = self._seen = self.now()
        logged = self.steps // self.start.config.training.log_every
        self._losses: deque[float] = deque(maxlen=max(1, min(SMOOTHED, logged // SHARE)))
        self._paces: deque[float] = deque(maxlen=SMOOTHED)

    def add(self, record: Record) -> None:
        """Take over a logged step."""
        self.last = record
        self._losses.append(record.loss)
        self._paces.append(1.0 / max(record.tokens_per_second, 1e-9))
        self.curve.add(record.step, record.loss)
        self._seen = self.now()
        if record.val_loss is not None:
            self.measured.add(record.step, record.val_loss)
            self.val_loss, self.val_step = record.val_loss, record.step
            self.best = record.val_loss if self.best is None else min(self.best, record.val_loss)

    @property
    def steps(self) -> int:
        """Steps of the whole run."""
        return self.start.config.training.steps

    @property
    def step(self) -> int:
        """The newest step that is known."""
        return self.last.step if self.last else self.start.first_step - 1

    @property
    def loss(self) -> float | None:
        """Training loss, the mean of the newest steps."""
        return sum(self._losses) / len(self._losses) if self._losses else None

    @property
    def tokens_per_second(self) -> float:
        """The pace of the newest steps, of training alone; 0 before the first."""
        return len(self._paces) / sum(self._paces) if self._paces else 0.0

    @property
    def seconds_per_step(self) -> float:
        """What a step takes at that pace; the probe's estimate before the first."""
        pace = self.tokens_per_second
        return self.start.tokens_per_step / pace if pace else self.start.seconds_per_step

    @property
    def seconds_left(self) -> float:
        """Estimate of the time to the last step, evaluations and samples included; it counts down between two steps."""
        done = self.step - self.start.first_step + 1
        each = (self._seen - self._began) / done if done else self.start.seconds_per_step
        return max(0.0, (self.steps - self.step) * each - (self.now() - self._seen))

    @property
    def elapsed(self) -> float:
        """Seconds since the start."""
        return self.now() - self._began

    @property
    def next_evaluation(self) -> int:
        """The step of the next evaluation."""
        every = self.start.config.training.eval_every
        return min(self.steps, (self.step // every + 1) * every) if every else self.steps

    def stands(self, loss: float) -> str:
        """Where a loss stands among the counting lines: "below triples (2.05)"; nothing without them."""
        return standing(loss, self.start.counting) if self.start.counting else ""
