"""SIGKILL at any moment of a whole training: what is resumed computes what an undisturbed run computes, bit by bit.

The kills come at a step, inside the writing of a checkpoint and at a random time, in turn; a run that ends before it was killed often
enough is trained once more. What is compared stands in ``lab/verify_resume.py``.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from lab_cases import small
from needs import require
from posttrainllm.lab import verify_resume as module
from posttrainllm.lab.verify_resume import checkable, losses_sha256, verify_resume
from posttrainllm.runs.folder import Run

PLACES = {"step", "checkpoint", "time"}


@pytest.fixture(autouse=True)
def _children_find_the_package(monkeypatch):
    source = Path(module.__file__).parents[2]
    path = [str(source), os.environ.get("PYTHONPATH", "")]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, path)))


def check(found: module.VerifyResume, every: int, kills: int) -> None:
    assert found.problems == []
    assert len(found.kills) == kills
    assert {kill.where for kill in found.kills} == PLACES
    assert 0 < found.repeated <= kills * every


def test_ten_kills_change_nothing(tmp_path):
    config = checkable(small(tmp_path), 20)
    found = verify_resume(config, kills=10, folder=tmp_path / "runs")
    check(found, config.training.checkpoint_every, 10)
    wanted = r"verify-resume: PASS, 20 losses bit-identical after 10 kills \(cpp, sha256 \w{12}\)"
    assert re.fullmatch(wanted, found.verdict)
    assert found.losses_sha256 == losses_sha256(Run(tmp_path / "runs" / "undisturbed"))


@pytest.mark.slow
@pytest.mark.parametrize(("engine", "kills"), [("cpp", 100), ("numpy", 30), ("torch", 30)])
def test_many_kills_change_nothing(tmp_path, engine, kills):
    if engine == "torch":
        require("torch")
    config = checkable(small(tmp_path, engine=engine), 60)
    check(verify_resume(config, kills=kills, seed=2), config.training.checkpoint_every, kills)


def test_steps_that_were_computed_twice_are_counted_a_life_at_a_time(tmp_path):
    (tmp_path / "run.steps").write_text("1\n2\n3\n2\n3\n4\n5\n6\n6\n7\n")
    assert module.repeated_steps(Run(tmp_path / "run")) == [2, 1]
