"""What the server tells while a terminal trains: lines as they come, cuts, the list, many readers."""

from __future__ import annotations

import contextlib
import json
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from posttrainllm.config import load_config
from posttrainllm.runs.folder import Run, create_run
from posttrainllm.server.live import Tail
from server_cases import Server, running


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with running(tmp_path_factory.mktemp("live")) as found:
        yield found


@pytest.fixture
def run(server: Server) -> Run:
    return create_run(server.runs, load_config("tiny"))


def line(step: int) -> dict[str, float]:
    return {"step": step, "loss": 5.0 / step}


def test_lines_come_as_they_are_written(server: Server, run: Run) -> None:
    with run.lock(), run.metrics as metrics, run.samples as samples:
        metrics.append(line(1))
        metrics.append(line(2))
        with server.events(f"/api/runs/{run.name}/events") as events:
            kind, row = events.next()
            assert (kind, row["state"], row["step"]) == ("state", "running", 2)
            assert events.next() == ("metrics", [line(1), line(2)])
            began = time.monotonic()
            metrics.append(line(3))
            assert events.next("metrics") == ("metrics", [line(3)])
            assert time.monotonic() - began < 2
            samples.append({"step": 3, "text": "\u00e9\ud800\n\u2028"})
            sample = events.next("samples")[1][0]
            assert sample["text"].startswith("\u00e9")
            assert sample["text"].endswith("\n\u2028")


def test_a_torn_line_waits_until_it_is_whole(server: Server, run: Run) -> None:
    path = run.path / "metrics.jsonl"
    text = json.dumps(line(1)) + "\n"
    path.write_text(text[:7])
    with server.events(f"/api/runs/{run.name}/events") as events:
        assert events.next()[0] == "state"
        path.write_text(text)
        assert events.next("metrics") == ("metrics", [line(1)])


def test_a_resumed_run_starts_its_curve_again(server: Server, run: Run) -> None:
    for step in range(1, 6):
        run.metrics.append(line(step))
    with server.events(f"/api/runs/{run.name}/events") as events:
        assert len(events.next("metrics")[1]) == 5
        run.start_from(2)
        assert events.next("restart") == ("restart", {"file": "metrics"})
        assert events.next("metrics") == ("metrics", [line(1), line(2)])
        run.metrics.append(line(3))
        assert events.next("metrics") == ("metrics", [line(3)])


def test_a_cut_is_seen_even_when_the_file_has_grown_beyond_it(tmp_path: Path) -> None:
    run = create_run(tmp_path, load_config("tiny"), "cut")
    for step in range(1, 6):
        run.metrics.append(line(step))
    tail = Tail(run.path, "metrics")
    assert [found["step"] for found in tail.look()[1]] == [1, 2, 3, 4, 5]
    run.start_from(2)
    for step in range(3, 9):
        run.metrics.append({"step": step, "loss": 1.0, "more": "x" * 50})
    again, lines = tail.look()
    assert (again, [found["step"] for found in lines]) == (True, [1, 2, 3, 4, 5, 6, 7, 8])
    assert tail.look() == (False, [])
    (run.path / "metrics.jsonl").unlink()
    assert tail.look() == (True, [])
    run.metrics.append(line(1))
    assert tail.look() == (False, [line(1)])


def test_a_reader_goes_on_where_it_was_cut_off(server: Server, run: Run) -> None:
    for step in (1, 2, 3):
        run.metrics.append(line(step))
    path = f"/api/runs/{run.name}/events"
    with server.events(path) as events:
        events.next("metrics")
        id = events.id
    run.metrics.append(line(4))
    for address, headers in ((path, {"Last_Event_ID": id}), (f"{path}?since={id}", {})):
        with server.events(address, **headers) as events:
            assert events.next("metrics") == ("metrics", [line(4)])
    for wrong in ("3,0", "99999999,0", "x", "1,2,3", "-1,0", "9" * 40 + ",0"):
        with server.events(f"{path}?since={wrong}") as events:
            assert len(events.next("metrics")[1]) == 4, wrong


def test_many_lines_come_in_pieces_and_none_is_lost(server: Server, run: Run) -> None:
    text = "".join(json.dumps(line(step)) + "\n" for step in range(1, 30_001))
    (run.path / "metrics.jsonl").write_text(text)
    with server.events(f"/api/runs/{run.name}/events") as events:
        steps: list[int] = []
        while len(steps) < 30_000:
            steps += [found["step"] for found in events.next("metrics")[1]]
    assert steps == list(range(1, 30_001))


def test_damaged_lines_are_left_out(server: Server, run: Run) -> None:
    (run.path / "metrics.jsonl").write_bytes(b'{"step": 1}\nnonsense\n[1]\n\xff\n{"step": 2}\n')
    with server.events(f"/api/runs/{run.name}/events") as events:
        assert events.next("metrics")[1] == [{"step": 1}, {"step": 2}]


def test_a_run_that_is_removed_ends_its_stream(server: Server, run: Run) -> None:
    with server.events(f"/api/runs/{run.name}/events") as events:
        assert events.next()[0] == "state"
        shutil.rmtree(run.path)
        assert events.next("gone") == ("gone", {})
        assert events.next() == ("end", None)


def test_the_list_follows_runs_that_come_and_change(server: Server) -> None:
    with server.events("/api/events") as events:
        before = {row["name"] for row in events.next("runs")[1]}
        made = create_run(server.runs, load_config("tiny"))
        names = {row["name"] for row in events.next("runs")[1]}
        assert names - before == {made.name}
        made.metrics.append(line(7))
        for _ in range(5):
            rows = {row["name"]: row for row in events.next("runs")[1]}
            if rows[made.name]["step"] == 7:
                break
        assert rows[made.name]["step"] == 7


def test_many_readers_hear_the_same_and_the_server_ends_at_once(tmp_path: Path) -> None:
    with running(tmp_path) as server, contextlib.ExitStack() as stack:
        made = create_run(server.runs, load_config("tiny"))
        readers = [
            stack.enter_context(server.events(f"/api/runs/{made.name}/events")) for _ in range(50)
        ]
        made.metrics.append(line(1))
        for reader in readers:
            assert reader.next("metrics") == ("metrics", [line(1)])
        held = stack.enter_context(server.events(f"/api/runs/{made.name}/hold"))
        held.next("held")
        stack.pop_all()  # left open: server_cases.py times the end
    with made.lock():
        pass
