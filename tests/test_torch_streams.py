"""Work on a second stream, without a card: which stream waits for which, and what is kept until then."""

from __future__ import annotations

import gc
import time
import weakref
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import pytest

from needs import require
from posttrainllm.config import TrainConfig

torch = require("torch")

from posttrainllm.pytorch import calls  # noqa: E402
from posttrainllm.pytorch.arena import Arenas  # noqa: E402
from posttrainllm.pytorch.gpt import GPT  # noqa: E402
from posttrainllm.pytorch.recording import recording  # noqa: E402
from posttrainllm.pytorch.trunk import FusedTrunk, _Beside  # noqa: E402
from torch_cases import config_of  # noqa: E402


class Stream:
    """Writes down what it is asked for."""

    def __init__(self, name: str, log: list[str]) -> None:
        self.name, self.log, self.count = name, log, 0

    def wait_stream(self, other: Stream) -> None:
        self.log.append(f"{self.name} waits for {other.name}")

    def record_event(self) -> str:
        self.count += 1
        return f"{self.name} {self.count}"

    def wait_event(self, event: str) -> None:
        self.log.append(f"{self.name} waits for {event}")


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    found: list[str] = []
    main, current = Stream("main", found), []

    @contextmanager
    def inside(stream: Stream) -> Any:
        current.append(stream)
        try:
            yield
        finally:
            current.pop()

    monkeypatch.setattr(torch.cuda, "Stream", lambda device, priority: Stream("side", found))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: current[-1] if current else main)
    monkeypatch.setattr(torch.cuda, "stream", inside)
    return found


def test_work_beside_begins_after_what_it_reads_and_is_kept_until_it_is_waited_for(
    log: list[str],
) -> None:
    beside = _Beside(torch.device("cuda"))
    beside.begin(True)
    read = torch.ones(3)
    kept = weakref.ref(read)
    with beside(read):
        log.append("work")
    del read
    beside.meet(1)
    assert log == ["side waits for main", "work"]
    gc.collect()
    assert kept() is not None
    beside.meet(1)
    assert log[2:] == ["main waits for side 1"]
    gc.collect()
    assert kept() is None
    beside.meet(0)
    assert log[3:] == ["main waits for side 2", "main waits for side 3"]


def test_what_was_broken_off_is_waited_for_before_the_next_micro_batch(log: list[str]) -> None:
    beside = _Beside(torch.device("cuda"))
    beside.begin(True)
    beside.begin(True)
    assert log == []
    with pytest.raises(ValueError, match="no memory"), beside(torch.ones(1)):
        raise ValueError("no memory")
    beside.begin(False)  # also one that is done in turn
    assert log == ["side waits for main", "main waits for side"]
    with beside(torch.ones(1)):
        log.append("work")
    beside.meet(0)
    beside.begin(True)
    assert log[2:] == ["work"]


def test_one_thread_records_at_a_time_and_pythons_collector_rests(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    modes, inside = [], []

    @contextmanager
    def graph(graph: object, pool: object, capture_error_mode: str) -> Any:
        modes.append(capture_error_mode)
        inside.append(graph)
        assert len(inside) == 1
        yield
        inside.remove(graph)

    monkeypatch.setattr(torch.cuda, "CUDAGraph", object)
    monkeypatch.setattr(torch.cuda, "graph", graph)

    def record(number: int) -> bool:
        with recording():
            time.sleep(0.01)
            return gc.isenabled()

    with ThreadPoolExecutor(3) as pool:
        assert not any(pool.map(record, range(6)))
    assert gc.isenabled()
    assert set(modes) == {"thread_local"}
    with pytest.raises(ValueError, match="no memory"), recording():
        raise ValueError("no memory")
    assert gc.isenabled()


def trunk_of(config: TrainConfig, operations: Any) -> FusedTrunk:
    arenas = Arenas(config.model, device=torch.device("cpu"))
    with torch.device("meta"):
        module = GPT(config.model).eval()
    module.load_state_dict(arenas.padded_views(arenas.flat_params), assign=True)
    return FusedTrunk(module, arenas, operations)


def test_batches_of_many_shapes_share_their_partial_sums() -> None:
    trunk = trunk_of(config_of(), calls)
    for rows in (3, 8, 8, 40):
        tokens = torch.zeros(rows, 5, dtype=torch.int32)
        trunk.backward(torch.ones_like(trunk.forward(tokens)), True)
    assert len(trunk._tables) == 1
