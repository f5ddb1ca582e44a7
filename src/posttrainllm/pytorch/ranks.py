"""The processes that train one model together, as whoever started them says in the environment.

What this is: ``ranks_here``, which reads the names that torchrun and ``posttrainllm train --nproc`` give, and the division of a batch among
ranks. No torch in it, so that every command can ask.
What this is not: the connection between them (``pytorch/distributed_group.py``).
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from posttrainllm.errors import ConfigError
from posttrainllm.wording import Wording, setting, worded

if TYPE_CHECKING:
    from posttrainllm.config import TrainConfig

REPORT = "POSTTRAINLLM_REPORT"
"""The environment variable that names the folder into which a process started by ``--nproc`` writes what ended it."""

LISTENING = "POSTTRAINLLM_LISTEN_FD"
"""The one that names the open socket where rank 0 waits for the others, so that no other program can take its port."""

TIMEOUT = "POSTTRAINLLM_TIMEOUT_S"
"""The one that sets how long to wait for a process that does not come or does not answer, in seconds."""


@dataclass(frozen=True)
class Ranks:
    """This process among those of the run: ``rank`` of ``count``, on its machine ``local_rank`` of ``local_count``."""

    rank: int
    count: int
    local_rank: int
    local_count: int

    @property
    def leads(self) -> bool:
        """Whether this process runs the trainer, writes the files and draws the display."""
        return self.rank == 0


START = Wording(
    "start the processes with torchrun",
    terminal="start the processes with posttrainllm train --nproc, or with torchrun",
)
ALONE = Wording("train in one process", terminal="leave out --nproc")


def processes(count: int) -> Wording:
    """So many processes, as something to use."""
    return Wording(f"{count} processes", terminal=f"--nproc {count}")


def ranks_here(environment: Mapping[str, str] = os.environ) -> Ranks | None:
    """Which of several processes this one is; None for one that trains alone.

    Raises: ConfigError for numbers that cannot be: a rank beyond the last, a text.
    """
    if environment.get("WORLD_SIZE", "1") == "1" or "RANK" not in environment:
        return None
    count, rank = _number(environment, "WORLD_SIZE"), _number(environment, "RANK")
    local_count = _number(environment, "LOCAL_WORLD_SIZE", count)
    local_rank = _number(environment, "LOCAL_RANK", rank % max(1, local_count))
    if not (0 <= rank < count and 0 <= local_rank < local_count <= count):
        raise ConfigError(
            f"RANK {rank} of WORLD_SIZE {count}, LOCAL_RANK {local_rank} of LOCAL_WORLD_SIZE {local_count} cannot be",
            START,
        )
    return Ranks(rank, count, local_rank, local_count)


def _number(environment: Mapping[str, str], name: str, otherwise: int | None = None) -> int:
    text = environment.get(name)
    if text is None and otherwise is not None:
        return otherwise
    try:
        return int(text or "")
    except ValueError:
        raise ConfigError(
            f"the environment variable {name} must be a whole number, got {text!r}",
            START,
        ) from None


def check_divisible(config: TrainConfig, count: int) -> None:
    """Refuse what ``count`` processes cannot train together: another engine than torch, a batch that they cannot share equally.

    Raises: ConfigError.
    """
    if count == 1:
        return
    if config.engine.name != "torch":
        raise ConfigError(
            f"{count} processes train together on engine torch alone, and this run's engine is {config.engine.name}",
            worded("add {engine.name=torch}, or {alone}", alone=ALONE),
        )
    rows = config.data.batch_size
    if rows % count:
        below, above = rows // count * count, (rows // count + 1) * count
        fitting = [number for number in range(2, min(rows, count) + 1) if rows % number == 0]
        raise ConfigError(
            f"a batch of {rows} windows cannot be divided equally among {count} processes",
            worded(
                "use {size}{or_larger}{or_fewer}",
                size=setting("data.batch_size", below or above),
                or_larger=f" or {above}" if below else "",
                or_fewer=worded(", or {fewer}", fewer=processes(fitting[-1])) if fitting else "",
            ),
        )
