"""What can go wrong on purpose: one tree of errors, each with one line for the user and a next step.

    PosttrainError
    +-- ConfigError        a setting, a preset, a TOML file or a command line that cannot be used
    +-- CorpusError        text that is missing, empty, binary or too short
    +-- CheckpointError    a run folder or model file that is missing, damaged, newer or foreign
    +-- ProgramError       a program whose shapes or order of calls do not hold together
    +-- EngineError        an engine that is not installed, not built or does not fit into memory
    +-- TrainingError      training that cannot go on; exit code 1
        +-- NonFiniteError a loss or gradient that is not a number
        +-- LostError      another process of the run that is gone

A few are narrower still and stand where they are raised: ``engines.base.TooLargeError``, ``runs.checkpoint_folder.DamagedError``,
``cli.launch.RankError``.

The command line prints the message and the hint and never a traceback. An ``assert`` in this package is about our own invariants,
never about what a user gave.
"""

from __future__ import annotations


class PosttrainError(Exception):
    """Base of every error that is meant for the user.

    ``message`` says what was wanted and what was got, naming the setting, file or buffer, in words that are right everywhere;
    ``hint`` is the next action, a ``Wording`` (wording.py) where each face has its own words for it.
    """

    exit_code = 2

    def __init__(self, message: str, hint: str = "") -> None:
        """Keep the message and the hint apart, so that a terminal can set them on two lines."""
        super().__init__(message if not hint else f"{message}\n{hint}")
        self.message = message
        self.hint = hint

    def _render_traceback_(self) -> list[str]:
        """What IPython and notebooks show: the two lines, as the command line does; ``%debug`` still finds the place."""
        return [f"{type(self).__name__}: {self}"]


class ConfigError(PosttrainError):
    """A setting that cannot be used."""


class CorpusError(PosttrainError):
    """Text that cannot be trained on."""


class CheckpointError(PosttrainError):
    """A run folder or model file that cannot be loaded or written."""


class ProgramError(PosttrainError):
    """A program that does not hold together."""


class EngineError(PosttrainError):
    """An engine that cannot run here."""


class TrainingError(PosttrainError):
    """Training that cannot go on."""

    exit_code = 1


class NonFiniteError(TrainingError):
    """A loss or gradient that is not a number."""


class LostError(TrainingError):
    """Another process of the run is gone, or does not answer."""
