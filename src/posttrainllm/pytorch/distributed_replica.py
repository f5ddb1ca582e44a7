"""A rank that holds the whole model: data parallelism by replicas (DDP).

What this is: ``ReplicaEngine``, a ``TorchEngine`` for its share of each batch that adds its gradients to the others' before it clips and
updates. All replicas compute the same update from the same sum, so that they stay equal bit for bit; checkpoints check that.
What this is not: torch's DistributedDataParallel, which copies gradients into buckets of its own and averages; why not is said in
docs/decisions. Read next: ``pytorch/distributed_reducer.py``.
"""

from __future__ import annotations

from pathlib import Path

from posttrainllm.config import TrainConfig
from posttrainllm.engines.base import Batch, State, Tensors
from posttrainllm.errors import TrainingError
from posttrainllm.pytorch.distributed_group import Group
from posttrainllm.pytorch.distributed_reducer import Reducer, bits
from posttrainllm.pytorch.engine import TorchEngine
from posttrainllm.wording import worded


class ReplicaEngine(TorchEngine):
    """One of several equal engines; see ``RankEngine``."""

    every_rank_infers = False  # rank 0 has the whole model

    def __init__(self, config: TrainConfig, group: Group) -> None:
        """``config`` is that of one rank: its rows, its threads."""
        super().__init__(config, "cuda" if group.device.type == "cuda" else "cpu", reduce=Reducer())
        self._group = group

    def load(self, params: Tensors, m: Tensors | None = None, v: Tensors | None = None) -> None:
        """See ``Engine.load``; every tensor is taken once, in the order of the mappings."""
        whole = dict(params)
        super().load(whole, None if m is None else dict(m), None if v is None else dict(v))

    def _agreed(self, refusal: str) -> str:
        """One rank that refuses decides for all: an update by other kernels has other last digits."""
        said = self._group.collected(bool(refusal))
        return refusal or (f"rank {said.index(1)} refused them" if any(said) else "")

    def loss_sum(self, batch: Batch) -> float:
        """Add up the loss of this rank's rows, in nats."""
        return self.loss(batch) * batch.trained

    def state(self) -> State:
        """See ``Engine.state``; called by every rank, and given on rank 0.

        Raises: TrainingError when a replica's parameters are not rank 0's.
        """
        found = self._group.collected(bits(self._arenas.params))
        odd = [rank for rank, value in enumerate(found) if value != found[0]]
        if odd:
            raise TrainingError(
                f"rank {odd[0]} does not have the parameters of rank 0 any more: a GPU or a link computes wrong numbers",
                worded("go on from the newest checkpoint with {resume}, without that machine"),
            )
        return super().state() if self._group.ranks.leads else State({}, {}, {})

    def write_moments(self, folder: Path) -> None:
        """Rank 0 has them all and writes them itself."""
        raise AssertionError("replicas have no moments to write apart")
