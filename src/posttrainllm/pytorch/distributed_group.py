"""The connection between the processes of a run: how they meet, talk, notice that one is gone, and part.

What this is: ``join``, a context in which the processes of ``Ranks`` are one torch process group, and ``Group``, what they say to each
other. Rank 0 leads: it names a call and its numbers, and every other process runs the same call (``pytorch/distributed_engine.py``).
What this is not: a way to start processes (``cli/launch.py``, or torchrun).

Two groups: data (gradients; NCCL on CUDA, gloo elsewhere) and commands (gloo). In both, a process that is silent for ``TIMEOUT_S``
ends the run, but the others wait for rank 0's next call as long as it takes: it may be writing samples or waiting for a full disk. A
process that dies closes its connections, which the others see at once.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from threading import Thread

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor
from torch.distributed.distributed_c10d import PrefixStore, Store
from torch.distributed.rendezvous import rendezvous

from posttrainllm.engines.base import Batch
from posttrainllm.errors import ConfigError, EngineError, LostError, PosttrainError
from posttrainllm.pytorch.ranks import LISTENING, START, TIMEOUT, Ranks, processes
from posttrainllm.wording import worded

TIMEOUT_S = 600.0
END_S = 10.0
NUMBERS = 7  # that a call can have

# Words of gloo, NCCL and the store for a connection that ended at its other side.
_LOST = re.compile(
    r"gloo|nccl|connection (closed|reset|refused)|broken pipe|socket|timed? ?out", re.IGNORECASE
)


class Group:
    """The processes of a run while they are connected."""

    def __init__(self, ranks: Ranks, device: torch.device) -> None:
        """Connect the commands' group; the data's is torch's default one. Called by every rank."""
        self.ranks = ranks
        self.device = device
        self.broken = False
        # Rank 0 notices who does not answer; the others wait for its next call as long as it takes.
        patience = timedelta(seconds=_timeout()) if ranks.leads else timedelta(days=365)
        self.commands = dist.new_group(backend="gloo", timeout=patience)

    # ---- calls ------------------------------------------------------------------------------------

    def call(self, name: str, *numbers: float) -> None:
        """On rank 0: name the call that every rank runs now, with its numbers."""
        header = torch.zeros(1 + NUMBERS, dtype=torch.float64)
        header[0] = CALLS.index(name)
        header[1 : 1 + len(numbers)] = torch.tensor(numbers, dtype=torch.float64)
        with self.guarded():
            dist.broadcast(header, 0, group=self.commands)

    def next_call(self) -> tuple[str, list[float]]:
        """On the other ranks: wait for the next call."""
        header = torch.zeros(1 + NUMBERS, dtype=torch.float64)
        with self.guarded():
            dist.broadcast(header, 0, group=self.commands)
        op, *numbers = header.tolist()
        return CALLS[int(op)], numbers

    def share(self, values: NDArray[np.generic]) -> None:
        """Give every rank the values of rank 0, in place. Shapes: the same on every rank."""
        with self.guarded():
            dist.broadcast(torch.from_numpy(values), 0, group=self.commands)

    def share_text(self, text: str, size: int = -1) -> str:
        """Give every rank a text of rank 0; the others know its ``size`` in bytes from the call."""
        content = np.frombuffer(text.encode(), np.uint8).copy() if self.ranks.leads else None
        buffer = np.zeros(size, np.uint8) if content is None else content
        self.share(buffer)
        return buffer.tobytes().decode()

    def divide(self, batch: Batch | None, rows: int, time: int) -> Batch:
        """Give every rank its rows of a batch that rank 0 has: rank r those from r * ``rows`` on.

        Rows beyond the batch are filled with targets that do not count. Shapes: (rows, time).
        """
        own = torch.zeros(2, rows, time, dtype=torch.int32)
        parts: list[Tensor] | None = None
        if batch is not None:
            whole = np.full((2, self.ranks.count * rows, time), -1, np.int32)
            whole[0] = 0
            whole[0, : len(batch.tokens)] = batch.tokens
            whole[1, : len(batch.targets)] = batch.targets
            split = whole.reshape(2, self.ranks.count, rows, time).transpose(1, 0, 2, 3)
            parts = [torch.from_numpy(np.ascontiguousarray(part)) for part in split]
        with self.guarded():
            dist.scatter(own, parts, 0, group=self.commands)
        tokens, targets = own.numpy()
        return Batch(tokens, targets)

    def total(self, number: float) -> float:
        """Sum of a number over all ranks, the same on each."""
        value = torch.tensor([number], dtype=torch.float64)
        with self.guarded():
            dist.all_reduce(value, group=self.commands)
        return value.item()

    def collected(self, number: int) -> list[int]:
        """The numbers of all ranks, in their order, on each."""
        values = torch.zeros(self.ranks.count, dtype=torch.int64)
        values[self.ranks.rank] = number
        with self.guarded():
            dist.all_reduce(values, group=self.commands)
        return [int(value) for value in values]

    # ---- trouble ----------------------------------------------------------------------------------

    @contextmanager
    def guarded(self) -> Iterator[None]:
        """Turn what torch raises when a process is gone into our error, once for all.

        After any other error the ranks no longer agree on what they do next, so nothing is said any more; an OSError is one that
        every rank raises.

        Raises: LostError.
        """
        try:
            yield
        except OSError:
            raise
        except RuntimeError as error:
            self.broken = True
            if isinstance(error, torch.OutOfMemoryError) or not _LOST.search(str(error)):
                raise
            raise LostError(
                f"the connection to another process is lost: {_first_line(error)}",
                worded("go on from the newest checkpoint with {resume}"),
            ) from None
        except BaseException:
            self.broken = True
            raise

    def part(self) -> None:
        """End the connection: all wait for each other first, since a process that leaves early aborts the others' last messages."""
        if not self.broken:
            with suppress(LostError), self.guarded():
                dist.barrier(group=self.commands)
        if not self.broken:
            # It can wait for ever, for a graph that somebody still holds: what matters is safe by now.
            end = Thread(target=dist.destroy_process_group, daemon=True)
            end.start()
            end.join(END_S)


CALLS = (
    "setup",
    "load",
    "gradients",
    "update",
    "gradient_tensors",
    "loss",
    "logits",
    "prefill",
    "decode",
    "state",
    "write_moments",
    "end",
)
"""What rank 0 can ask for; the numbers of each stand in ``pytorch/distributed_engine.py``."""


@contextmanager
def join(ranks: Ranks) -> Iterator[Group]:
    """Meet the other processes of the run, and part at the end.

    Raises: EngineError when a process does not come in time, the port is taken, or there are fewer GPUs than processes on this machine.
    """
    timeout = timedelta(seconds=_timeout())
    device, backend = _device(ranks)
    store = _store(ranks, timeout)
    try:
        dist.init_process_group(
            backend,
            store=PrefixStore("posttrainllm", store),
            rank=ranks.rank,
            world_size=ranks.count,
            timeout=timeout,
        )
        group = Group(ranks, device)
    except RuntimeError as error:
        raise _missing(ranks, timeout, error) from None
    try:
        yield group
    except BaseException as error:
        # After an error of its own rank 0 still agrees with the others, unless that came between two words, as a second Ctrl-C may.
        group.broken = group.broken or not (ranks.leads and isinstance(error, PosttrainError))
        raise
    finally:
        if ranks.leads and not group.broken:
            with suppress(LostError):
                group.call("end")
        group.part()


def _timeout() -> float:
    text = os.environ.get(TIMEOUT, "")
    if not text:
        return TIMEOUT_S
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 1 <= seconds <= 86_400:
        raise ConfigError(
            f"{TIMEOUT} must be a number of seconds from 1 to 86,400, got {text!r}",
            f"leave it out for {TIMEOUT_S:.0f}",
        )
    return seconds


def _device(ranks: Ranks) -> tuple[torch.device, str]:
    """The device of this rank, and what carries the data: a GPU a process, or the processor for all of them."""
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if not gpus:
        return torch.device("cpu"), "gloo"
    if ranks.local_count > gpus:
        raise EngineError(
            f"{ranks.local_count} processes need as many GPUs, and this machine has {gpus}",
            worded("use {processes}", processes=processes(gpus)),
        )
    device = torch.device("cuda", ranks.local_rank)
    torch.cuda.set_device(device)
    return device, "cpu:gloo,cuda:nccl"


def _store(ranks: Ranks, timeout: timedelta) -> Store:
    """Where the processes find each other: at rank 0, or at the agent of torchrun.

    Raises: EngineError.
    """
    try:
        if LISTENING in os.environ:
            return dist.TCPStore(  # type: ignore[attr-defined]
                os.environ["MASTER_ADDR"],
                int(os.environ["MASTER_PORT"]),
                ranks.count,
                ranks.leads,
                timeout,
                master_listen_fd=int(os.environ[LISTENING]) if ranks.leads else None,
            )
        store: Store = next(iter(rendezvous("env://", timeout=timeout)))[0]
    except (RuntimeError, ValueError) as error:
        raise _missing(ranks, timeout, error) from None
    store.set_timeout(timeout)
    return store


def _missing(ranks: Ranks, timeout: timedelta, error: Exception) -> EngineError:
    """Say in one line why the processes did not meet."""
    text = str(error)
    address = f"{os.environ.get('MASTER_ADDR', '?')}:{os.environ.get('MASTER_PORT', '?')}"
    if "EADDRINUSE" in text or "address already in use" in text.lower():
        return EngineError(
            f"port {os.environ.get('MASTER_PORT', '?')}, where the processes are to meet, is taken by another program",
            "give torchrun another one: --master-port 29501",
        )
    if isinstance(error, ValueError):
        return EngineError(
            f"the environment does not say where the processes meet: {_first_line(error)}",
            START,
        )
    if re.search(r"timed? ?out|failed to connect|clients joined|wait timeout", text, re.IGNORECASE):
        came = re.search(r"(\d+)/\d+ clients joined", text)
        who = f"{came.group(1)} of {ranks.count} processes came" if came else "not all came"
        return EngineError(
            f"waited {timeout.total_seconds():.0f} s at {address} for {ranks.count} processes: {who}",
            "start as many as announced, on machines that reach each other; "
            f"{TIMEOUT} sets how long to wait",
        )
    return EngineError(
        f"the {ranks.count} processes could not meet at {address}: {_first_line(error)}",
        "check that the machines reach each other; NCCL_DEBUG=INFO tells more",
    )


def _first_line(error: Exception) -> str:
    text = re.sub(r"^\[[^\]]*\]\s*", "", str(error))  # gloo begins with a place in its source
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return (lines[0] if lines else type(error).__name__)[:200]
