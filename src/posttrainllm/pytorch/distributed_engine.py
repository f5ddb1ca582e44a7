"""Several processes as one engine: rank 0 is called, the others follow.

What this is: ``LeadingEngine``, the ``Engine`` that the trainer of rank 0 holds, and ``follow``, what the other ranks do instead of
training. Each call of the protocol is named to every rank with its numbers, then run by all of them on their share: so there is one
trainer, one journal and one display, and no rank can decide anything (to stop, to save, to give up) otherwise than another.
What this is not: arithmetic (``distributed_replica.py``, ``sharded_engine.py``) or the connection (``distributed_group.py``).

Rows: rank r of n computes rows r*B/n to (r+1)*B/n of every batch, whatever n is: rank 0 cuts them, and the others need neither the text
nor the run's folder. That is 8 bytes a token, against 6 N operations.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Protocol

import numpy as np
import torch

from posttrainllm.config import TrainConfig, from_toml, replace, to_toml
from posttrainllm.engines.base import F32, I32, Batch, State, StepResult, StepScalars, Tensors
from posttrainllm.errors import EngineError
from posttrainllm.machine import available_threads
from posttrainllm.pytorch.batches import check_targets, check_tokens
from posttrainllm.pytorch.distributed_group import Group
from posttrainllm.pytorch.ranks import check_divisible
from posttrainllm.wording import worded

Shapes = dict[str, tuple[int, ...]]


class RankEngine(Protocol):
    """What each rank has: an ``Engine`` whose calls all ranks make together, on their own rows.

    Tensors to load are taken once each, in the order of their names. ``state`` is complete on rank 0.
    """

    every_rank_infers: bool
    """Whether logits, prefill and decode need every rank, since none has the whole model."""

    @property
    def info(self) -> dict[str, str | int]: ...  # noqa: D102  as in Engine, like what follows
    @property
    def nbytes(self) -> int: ...  # noqa: D102
    def load(self, params: Tensors, m: Tensors | None = None, v: Tensors | None = None) -> None: ...  # noqa: D102
    def gradients(self, batch: Batch, *, inv_count: float, first: bool) -> None: ...  # noqa: D102
    def update(self, scalars: StepScalars) -> None: ...  # noqa: D102
    def results(self, wait: bool = True) -> list[StepResult]: ...  # noqa: D102
    def gradient_tensors(self) -> dict[str, F32]: ...  # noqa: D102
    def logits(self, tokens: I32) -> F32: ...  # noqa: D102
    def prefill(self, tokens: I32, lengths: I32 | None = None) -> F32: ...  # noqa: D102
    def decode(self, tokens: I32) -> F32: ...  # noqa: D102
    def state(self) -> State: ...  # noqa: D102
    def close(self) -> None: ...  # noqa: D102

    def loss_sum(self, batch: Batch) -> float:
        """Add up the loss of this rank's rows, in nats."""
        ...

    def write_moments(self, folder: Path) -> None:
        """Write this rank's part of the moments. Raises: OSError on every rank when one could not."""
        ...


def rank_engine(config: TrainConfig, group: Group) -> RankEngine:
    """The engine of one rank for a configuration of all of them. Raises: EngineError when it cannot run here."""
    threads = config.engine.threads or max(1, available_threads() // group.ranks.local_count)
    rows = config.data.batch_size // group.ranks.count
    own = replace(config, {"data.batch_size": rows, "engine.threads": threads})
    if config.engine.parallel == "fsdp":
        from torch.distributed.fsdp import FSDPModule  # which takes half a second

        if not hasattr(FSDPModule, "set_force_sum_reduction_for_comms"):
            raise EngineError(
                f"dividing a model among processes needs a newer PyTorch than {torch.__version__}",
                worded("update torch, or use {engine.parallel=ddp}"),
            )
        from posttrainllm.pytorch.sharded_engine import ShardedEngine

        return ShardedEngine(own, group)
    from posttrainllm.pytorch.distributed_replica import ReplicaEngine

    return ReplicaEngine(own, group)


class LeadingEngine:
    """The engine of a run on several ranks, as its trainer sees it."""

    name = "torch"

    def __init__(self, config: TrainConfig, group: Group) -> None:
        """Set up every rank.

        Raises: ConfigError for a batch that cannot be divided, EngineError where memory is short.
        """
        check_divisible(config, group.ranks.count)
        self._group, self._model = group, config.model
        text = to_toml(config)
        group.call("setup", len(text.encode()))
        group.share_text(text)
        self._local = rank_engine(config, group)
        self._parallel = config.engine.parallel

    @property
    def info(self) -> dict[str, str | int]:
        """See ``Engine.info``."""
        return {**self._local.info, "ranks": self._group.ranks.count, "parallel": self._parallel}

    @property
    def nbytes(self) -> int:
        """Planned memory of one rank."""
        return self._local.nbytes

    def load(self, params: Tensors, m: Tensors | None = None, v: Tensors | None = None) -> None:
        """See ``Engine.load``."""
        for moments in (m, v):
            if moments is not None and set(moments) != set(params):
                odd = min(set(moments) ^ set(params))
                raise EngineError(f"tensor {odd!r} is missing or not part of this model")
        shapes = {name: params[name].shape for name in sorted(params)}
        text = json.dumps(shapes)
        self._group.call("load", len(text.encode()), m is not None, v is not None)
        self._group.share_text(text)
        with self._group.guarded():
            self._local.load(
                Shared(self._group, shapes, params),
                None if m is None else Shared(self._group, shapes, m),
                None if v is None else Shared(self._group, shapes, v),
            )

    def state(self) -> State:
        """See ``Engine.state``."""
        self._group.call("state")
        with self._group.guarded():
            state = self._local.state()
        if self._local.every_rank_infers:
            return State(state.params, {}, {}, write_moments=self._write_moments)
        return state

    def _write_moments(self, folder: Path) -> None:
        text = str(folder.absolute())
        self._group.call("write_moments", len(text.encode()))
        self._group.share_text(text)
        with self._group.guarded():
            self._local.write_moments(folder)

    def gradients(self, batch: Batch, *, inv_count: float, first: bool) -> None:
        """See ``Engine.gradients``."""
        share = self._divided("gradients", batch, inv_count, first)
        with self._group.guarded():
            self._local.gradients(share, inv_count=inv_count, first=first)

    def gradient_tensors(self) -> dict[str, F32]:
        """See ``Engine.gradient_tensors``: the sums over all ranks, once an update has made them."""
        self._group.call("gradient_tensors")
        with self._group.guarded():
            return self._local.gradient_tensors()

    def update(self, scalars: StepScalars) -> None:
        """See ``Engine.update``."""
        self._group.call("update", scalars.lr, scalars.correction1, scalars.correction2)
        with self._group.guarded():
            self._local.update(scalars)

    def results(self, wait: bool = True) -> list[StepResult]:
        """See ``Engine.results``: rank 0's, which are every rank's."""
        with self._group.guarded():
            return self._local.results(wait)

    def loss(self, batch: Batch) -> float:
        """See ``Engine.loss``."""
        share = self._divided("loss", batch)
        with self._group.guarded():
            return self._group.total(self._local.loss_sum(share)) / max(1, batch.trained)

    def logits(self, tokens: I32) -> F32:
        """See ``Engine.logits``."""
        check_tokens(self._model, tokens)
        self._tell("logits", tokens)
        with self._group.guarded():
            return self._local.logits(tokens)

    def prefill(self, tokens: I32, lengths: I32 | None = None) -> F32:
        """See ``Engine.prefill``."""
        check_tokens(self._model, tokens)
        if lengths is None:
            lengths = np.full(len(tokens), tokens.shape[1], np.int32)
        self._tell("prefill", np.column_stack([lengths.astype(np.int32), tokens]))
        with self._group.guarded():
            return self._local.prefill(tokens, lengths)

    def decode(self, tokens: I32) -> F32:
        """See ``Engine.decode``."""
        check_tokens(self._model, tokens[:, None])
        self._tell("decode", tokens[:, None])
        with self._group.guarded():
            return self._local.decode(tokens)

    def close(self) -> None:
        """Free what this rank holds; the others end with the connection."""
        self._local.close()

    def _divided(self, name: str, batch: Batch, *numbers: float) -> Batch:
        """Name a call on a batch and give every rank its rows of it. Raises: EngineError for ids that are none."""
        check_tokens(self._model, batch.tokens)
        check_targets(self._model, batch.targets)
        rows, time = batch.tokens.shape
        own = -(-rows // self._group.ranks.count)
        self._group.call(name, own, time, *numbers)
        return self._group.divide(batch, own, time)

    def _tell(self, name: str, tokens: I32) -> None:
        """Let every rank compute from the same tokens, where one alone cannot. Shapes: tokens (B, T)."""
        if self._local.every_rank_infers:
            self._group.call(name, *tokens.shape)
            self._group.share(np.array(tokens, np.int32))


def follow(group: Group) -> None:
    """Do what rank 0 says until it says "end".

    Raises: LostError when rank 0 is gone; whatever the engine raises here.
    """
    local: RankEngine | None = None
    while True:
        name, numbers = group.next_call()
        if name == "end":
            break
        if name == "setup":
            text = group.share_text("", int(numbers[0]))
            local = None  # one after the other, where a process sets up two
            local = rank_engine(from_toml(text, "the configuration of rank 0"), group)
            continue
        assert local is not None, "rank 0 sets the engine up first"
        with group.guarded():
            _run(local, group, name, numbers)
    if local is not None:
        local.close()


def _run(local: RankEngine, group: Group, name: str, numbers: list[float]) -> None:
    """One call, as ``LeadingEngine`` made it."""
    whole = [int(number) for number in numbers]
    if name == "gradients":
        share = group.divide(None, whole[0], whole[1])
        local.gradients(share, inv_count=numbers[2], first=bool(numbers[3]))
    elif name == "update":
        local.update(StepScalars(*numbers[:3]))
        local.results(wait=False)
    elif name == "loss":
        group.total(local.loss_sum(group.divide(None, whole[0], whole[1])))
    elif name == "load":
        shapes = {
            key: tuple(size) for key, size in json.loads(group.share_text("", whole[0])).items()
        }
        m, v = (Shared(group, shapes) if given else None for given in whole[1:3])
        local.load(Shared(group, shapes), m, v)
    elif name == "state":
        local.state()
    elif name == "write_moments":
        folder = Path(group.share_text("", whole[0]))
        with suppress(OSError):  # every rank raises what one could not write, and rank 0 tells
            local.write_moments(folder)
    elif name == "gradient_tensors":
        local.gradient_tensors()
    else:
        tokens = np.zeros(whole[:2], np.int32)
        group.share(tokens)
        if name == "logits":
            local.logits(tokens)
        elif name == "prefill":
            local.prefill(np.ascontiguousarray(tokens[:, 1:]), np.ascontiguousarray(tokens[:, 0]))
        else:
            assert name == "decode", name
            local.decode(np.ascontiguousarray(tokens[:, 0]))


class Shared(Mapping[str, F32]):
    """Tensors of rank 0 by name; taking one sends it to every rank, or receives it there."""

    def __init__(self, group: Group, shapes: Shapes, values: Tensors | None = None) -> None:
        """``shapes`` are alike on every rank; ``values`` are given on rank 0."""
        self._group, self._shapes, self._values = group, shapes, values

    def __getitem__(self, name: str) -> F32:
        """Every rank takes the same tensors in the same order."""
        if self._values is None:
            values = np.zeros(self._shapes[name], np.float32)
        else:
            values = np.array(self._values[name], np.float32)
        self._group.share(values)
        return values

    def __contains__(self, name: object) -> bool:
        return name in self._shapes  # without taking it

    def __iter__(self) -> Iterator[str]:
        return iter(self._shapes)

    def __len__(self) -> int:
        return len(self._shapes)
