"""``train`` as one of several processes, or as the one that starts them: what the command asks before it trains.

What this is: which rank this process is, the engine that goes with several of them, and the connection, in which every rank but 0 follows.
What this is not: the starting (``launch.py``) or the connection itself (``pytorch/distributed_group.py``).
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from posttrainllm.cli.worker import end_with_the_launcher, report_folder
from posttrainllm.pytorch.ranks import Ranks, check_divisible, ranks_here

if TYPE_CHECKING:
    from posttrainllm.config import TrainConfig
    from posttrainllm.pytorch.distributed_group import Group

MOST = 1024  # processes on one machine: more is a typing error


def ranks_for(nproc: int | None) -> Ranks | None:
    """Which of several processes this is; None for one that trains alone or starts the others.

    Raises: ConfigError for a number of processes that cannot be, or that is not what torchrun started.
    """
    from posttrainllm.errors import ConfigError

    ranks = ranks_here()
    if nproc is not None and not 1 <= nproc <= MOST:
        raise ConfigError(
            f"--nproc must be a whole number from 1 to {MOST:,}, got {nproc}",
            "give as many processes as this machine has GPUs",
        )
    if nproc is not None and ranks is not None and report_folder() is None:
        raise ConfigError(
            f"--nproc {nproc} starts processes, and this is already rank {ranks.rank} of {ranks.count}",
            "leave out --nproc under torchrun",
        )
    return ranks


def take_torch(
    flags: dict[str, Any], config: Path | None, settings: Sequence[str], *, new: bool
) -> None:
    """Let a new run of several processes have the one engine that can, where no engine was named."""
    from posttrainllm.config import given_settings

    if new and "engine.name" not in given_settings(config, settings, flags):
        flags["engine.name"] = "torch"


def launch(count: int, config: TrainConfig | None, arguments: Sequence[str]) -> int:
    """Start this command ``count`` times and wait; ``config`` is a new run's. Raises: PosttrainError."""
    if config is not None:
        check_divisible(config, count)
    from posttrainllm.cli.launch import launch as start

    return start(count, arguments)


@contextmanager
def joined(ranks: Ranks | None) -> Iterator[Group | None]:
    """Connect with the other processes, if there are any. Every rank but 0 does its work here and leaves.

    Raises: PosttrainError; typer.Exit on the ranks that followed.
    """
    if ranks is None:
        yield None
        return
    if ranks.leads:
        end_with_the_launcher()
    else:  # rank 0 is asked to end, and tells the others
        for name in ("SIGINT", "SIGTERM", "SIGHUP"):
            if hasattr(signal, name):
                signal.signal(getattr(signal, name), signal.SIG_IGN)
    os.environ.setdefault(
        "TORCH_CPP_LOG_LEVEL", "FATAL"
    )  # what it would print comes as an error, too
    from posttrainllm.pytorch.distributed_group import join

    with join(ranks) as group:
        if ranks.leads:
            yield group
            return
        from posttrainllm.pytorch.distributed_engine import follow

        follow(group)
    raise typer.Exit(0)
