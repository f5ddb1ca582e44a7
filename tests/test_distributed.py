"""Two processes compute what one computes: by replicas and sharded, on whole batches and on micro-batches."""

from __future__ import annotations

from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from needs import require

torch = require("torch")

from distributed_cases import job_on_ranks, worst  # noqa: E402
from distributed_job import CASES, STEPS, config_of, measured  # noqa: E402
from posttrainllm.errors import ConfigError, EngineError  # noqa: E402
from posttrainllm.pytorch import distributed_engine  # noqa: E402
from posttrainllm.pytorch.distributed_reducer import bits, bucket_edges  # noqa: E402
from posttrainllm.pytorch.distributed_replica import ReplicaEngine  # noqa: E402
from posttrainllm.pytorch.engine import TorchEngine  # noqa: E402
from posttrainllm.pytorch.ranks import Ranks, check_divisible, ranks_here  # noqa: E402
from posttrainllm.wording import in_terminal  # noqa: E402

KINDS = [f"{parallel} {rows}x{micro}" for parallel in ("ddp", "fsdp") for rows, micro in CASES]
LIMIT = 1e-6  # relative, of losses of float32 steps that add in another order


@pytest.fixture(scope="module")
def two(tmp_path_factory) -> dict[str, Any]:
    """What two processes found, in every way."""
    return job_on_ranks("steps", tmp_path_factory.mktemp("ranks") / "found.json")


@pytest.fixture(scope="module")
def one() -> dict[str, Any]:
    """What one process finds, by the shape of the batch."""
    configs = {f"{rows}x{micro}": config_of(rows, micro) for rows, micro in CASES}
    return {case: measured(TorchEngine(config), config) for case, config in configs.items()}


@pytest.mark.parametrize("kind", KINDS)
def test_losses_of_two_ranks_equal_one_process(two, one, kind):
    alone = one[kind.split()[1]]
    assert len(two[kind]["losses"]) == STEPS
    assert worst(two[kind]["losses"], alone["losses"]) <= LIMIT
    assert worst(two[kind]["norms"], alone["norms"]) <= 10 * LIMIT
    assert alone["losses"][-1] < alone["losses"][0] - 0.3  # or there was nothing to compare


def test_a_batch_is_the_same_whole_in_micro_batches_and_on_two_ranks(two, one):
    whole = one["16x1"]["losses"]
    assert worst(one["4x4"]["losses"], whole) <= LIMIT
    for kind in KINDS:
        assert worst(two[kind]["losses"], whole) <= LIMIT, kind


@pytest.mark.parametrize("kind", KINDS)
def test_two_ranks_evaluate_and_answer_like_one_process(two, one, kind):
    alone = one[kind.split()[1]]
    assert abs(two[kind]["loss"] - alone["loss"]) <= 2 * LIMIT * alone["loss"]
    for answer in ("logits", "prefill", "decode"):
        np.testing.assert_allclose(two[kind][answer], alone[answer], rtol=0, atol=1e-4)


@pytest.mark.parametrize("kind", KINDS)
def test_two_ranks_give_back_whole_parameters_and_gradients(two, one, kind):
    alone = one[kind.split()[1]]
    for tensors in ("params", "gradients"):
        assert two[kind][tensors].keys() == alone[tensors].keys()
        for name, size in alone[tensors].items():
            if not name.endswith("attn.c_attn.bias"):  # its key part has no gradient but rounding
                assert two[kind][tensors][name] == pytest.approx(size, rel=1e-3), name


def test_the_engine_says_how_many_processes_it_is(two):
    for kind in KINDS:
        assert two[kind]["info"]["ranks"] == 2
        assert two[kind]["info"]["parallel"] == kind.split()[0]


def test_moments_of_shards_are_written_by_every_rank_and_read_back_bit_by_bit(tmp_path):
    found = job_on_ranks("moments", tmp_path / "found.json")
    assert found["files"] == [f"optimizer-{n:05d}-of-00002.safetensors" for n in (1, 2)]
    assert found["moments"]
    assert found["params"]
    assert "rank 0" in found["refused"]
    assert len(found["no_ids"]) == 5
    assert all(" must lie in 0 .. 255" in one for one in found["no_ids"])
    assert found["still_answers"] > 0


def test_replicas_that_are_no_longer_equal_are_noticed(tmp_path):
    found = job_on_ranks("apart", tmp_path / "found.json")
    assert found.startswith("rank 1 does not have the parameters of rank 0 any more")


def test_one_bit_of_a_tensor_changes_its_number():
    values = {"a": torch.arange(7.0), "b": torch.zeros(3, 2)}
    before = bits(values)
    assert bits({name: value.clone() for name, value in values.items()}) == before
    values["b"][2, 1] = -0.0
    assert bits(values) != before


@pytest.mark.parametrize("bucket_bytes", [1, 100, 1000, 1 << 30])
def test_buckets_cover_the_arena_once_from_its_end(bucket_bytes):
    shapes = {"wte": (5, 4), "wpe": (3, 4), "h.0": (8, 8), "h.1": (8, 8), "ln": (4,), "bias": (7,)}
    arena, views, start = torch.zeros(1024), {}, 0
    for name, shape in shapes.items():
        count = int(np.prod(shape))
        views[name] = arena[start : start + count].view(shape)
        start += 64
    edges = bucket_edges(arena, views, bucket_bytes)
    ordered = sorted(edges)
    assert ordered[0][0] == 0
    assert ordered[-1][1] == len(arena)
    assert all(a[1] == b[0] for a, b in pairwise(ordered))
    assert sum(end - start for start, end in edges) == len(arena)
    assert edges[-1][0] == 0  # the embeddings, which are complete last
    if bucket_bytes == 1:
        assert edges == [(192, 256), (128, 192), (64, 128), (256, 1024), (0, 64)]


def test_what_several_processes_cannot_train_is_refused_with_the_numbers():
    with pytest.raises(
        ConfigError, match="a batch of 10 windows cannot be divided equally among 4"
    ) as error:
        check_divisible(config_of(10, 1), 4)
    assert in_terminal(error.value.hint) == "use --batch-size 8 or 12, or --nproc 2"
    with pytest.raises(ConfigError, match="a batch of 1 windows") as error:
        check_divisible(config_of(1, 1), 2)
    assert in_terminal(error.value.hint) == "use --batch-size 2"
    with pytest.raises(ConfigError, match="engine torch alone, and this run's engine is numpy"):
        check_divisible(config_of(8, 1, **{"engine.name": "numpy"}), 2)
    check_divisible(config_of(8, 1), 4)


def test_ranks_are_what_the_environment_says():
    assert ranks_here({}) is None
    assert ranks_here({"WORLD_SIZE": "1", "RANK": "0"}) is None
    several = {"WORLD_SIZE": "4", "RANK": "3", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}
    assert ranks_here(several) == Ranks(3, 4, 1, 2)
    assert ranks_here({"WORLD_SIZE": "4", "RANK": "0"}) == Ranks(0, 4, 0, 4)
    for wrong in ({"RANK": "4"}, {"RANK": "-1"}, {"RANK": "two"}, {"LOCAL_RANK": "2"}):
        with pytest.raises(ConfigError, match="RANK"):
            ranks_here(several | wrong)


def test_an_older_pytorch_that_cannot_shard_is_named(monkeypatch):
    group = SimpleNamespace(ranks=Ranks(0, 2, 0, 2))
    monkeypatch.setattr("torch.distributed.fsdp.FSDPModule", object)
    with pytest.raises(EngineError, match="needs a newer PyTorch than") as error:
        distributed_engine.rank_engine(config_of(8, 1, "fsdp"), group)
    assert in_terminal(error.value.hint).endswith("--parallel ddp")


def test_a_replica_that_refuses_kernels_decides_for_all():
    engine = object.__new__(ReplicaEngine)
    for others, own, wanted in (
        ([0, 0], "", ""),
        ([0, 1], "", "rank 1 refused them"),
        ([1, 0], "wte.weight is off", "wte.weight is off"),
    ):
        engine._group = SimpleNamespace(collected=lambda number, others=others: others)
        assert engine._agreed(own) == wanted
