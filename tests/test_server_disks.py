"""The server on disks that are full or cannot be written: one line, nothing lost, and well again afterwards."""

from __future__ import annotations

import os
from pathlib import Path

from disks import small_disk
from posttrainllm.config import load_config
from posttrainllm.runs.folder import create_run
from server_cases import make_site, served

LINE = b'{"step": 1}\n'


def test_a_full_disk_is_said_and_loses_nothing(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", "1m") as disk:
        runs = disk.folder / "runs"
        run = create_run(runs, load_config("tiny"), "mine")
        with served(make_site(tmp_path / "site"), runs) as server:
            path = "/api/runs/mine/files/metrics.jsonl"
            assert server.ask("PATCH", path, LINE, X_Offset="0").status == 200
            assert server.put("mine", "corpus.txt", b"old").status == 201
            disk.fill(room=100_000)
            announced = server.put("mine", "corpus.txt", bytes(300_000))
            assert announced.status == 507
            assert announced.json()["error"].startswith("the disk has ")
            disk.fill()
            for answer in (
                server.put("mine", "config.toml", b"x" * 5000),
                server.ask("PATCH", path, LINE * 2000, X_Offset=str(len(LINE))),
            ):
                assert answer.status == 507, answer.body
                assert "the disk " in answer.json()["error"]
            assert (run.path / "corpus.txt").read_bytes() == b"old"
            assert run.config().preset == "tiny"
            assert server.get(path).body == LINE
            assert [name for name in os.listdir(run.path) if name.startswith(".up-")] == []
            disk.free()
            assert server.ask("PATCH", path, LINE, X_Offset=str(len(LINE))).status == 200
            assert server.get(path).body == LINE * 2
            assert server.put("mine", "corpus.txt", b"new").status == 201


def test_a_disk_that_cannot_be_written_is_still_read(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk") as disk:
        runs = disk.folder / "runs"
        create_run(runs, load_config("tiny"), "mine")
        disk.remount("ro")
        try:
            with served(make_site(tmp_path / "site"), runs) as server:
                assert [row["name"] for row in server.get("/api/runs").json()["runs"]] == ["mine"]
                assert server.get("/api/runs/mine/files/config.toml").status == 200
                for answer in (
                    server.put("mine", "config.toml", b"x"),
                    server.ask("POST", "/api/runs", {"name": "another"}),
                    server.ask("DELETE", "/api/runs/mine"),
                    server.ask("POST", "/api/runs/mine/rename", {"name": "other"}),
                ):
                    assert answer.status in (409, 507), answer.body
                    assert "read-only" in answer.json()["error"]
        finally:
            disk.remount("rw")
