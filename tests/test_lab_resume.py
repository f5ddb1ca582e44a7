"""verify-resume: killed runs come back bit by bit, and it notices when one does not."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from dataclasses import replace as changed

import pytest

from lab_cases import as_arguments, small
from posttrainllm.config import TrainConfig, replace, to_toml
from posttrainllm.errors import TrainingError
from posttrainllm.lab import verify_resume as module
from posttrainllm.lab.trial import Life
from posttrainllm.lab.verify_resume import checkable, differences, losses_sha256, verify_resume
from posttrainllm.runs.folder import Run
from posttrainllm.training.session import new_trainer


@pytest.fixture
def config(tmp_path) -> TrainConfig:
    return checkable(small(tmp_path), 20)


@pytest.fixture(autouse=True)
def _children_find_the_package(monkeypatch):
    source = os.path.dirname(os.path.dirname(module.__file__))
    path = [os.path.dirname(source), os.environ.get("PYTHONPATH", "")]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, path)))


def trained(config: TrainConfig, folder, name: str) -> Run:
    return Run(new_trainer(config, runs_dir=folder, name=name).train().run)


def test_kills_hit_the_inside_of_a_checkpoint(config, tmp_path):
    """At every tenth operation of the first checkpoint: a temporary folder is left, or the checkpoint is whole."""
    left = set()
    for operation in range(2, 40, 9):
        name = f"run-{operation}"
        life = Life(str(tmp_path), name, to_toml(config), kill_operation=operation)
        assert subprocess.run(life.command(), stderr=subprocess.DEVNULL).returncode == -9
        run = Run(tmp_path / name)
        left |= {path.name.split("-")[0] for path in run.checkpoints.iterdir()}
        assert module._newest(run) in (0, 5, 10)
    assert ".tmp" in left


def test_equal_runs_have_no_differences(config, tmp_path):
    first, second = (trained(config, tmp_path, name) for name in ("first", "second"))
    assert differences(first, second, 20) == []
    assert losses_sha256(first) == losses_sha256(second)


def test_a_run_that_differs_is_noticed_with_step_and_both_numbers(config, tmp_path):
    first = trained(config, tmp_path, "first")
    other = trained(replace(config, {"optimizer.beta2": 0.951}), tmp_path, "other")
    found = differences(first, other, 20)
    assert re.match(r"step [23]: \w+ is [\d.]+ after resuming, [\d.]+ undisturbed", found[0])
    assert any(line.startswith("the final model") for line in found)
    assert losses_sha256(first) != losses_sha256(other)


def test_gaps_and_doubles_of_the_log_are_noticed(config, tmp_path):
    run = trained(config, tmp_path, "run")
    lines = run.metrics.path.read_text().splitlines(keepends=True)
    run.metrics.path.write_text("".join(lines[:6] + lines[5:6] + lines[7:]))
    found = differences(run, run, 20)
    assert found == ["metrics.jsonl of run: missing steps [7], double steps [6]"]


def test_a_checkpoint_that_should_be_there_is_noticed():
    kill = module.Kill("step", logged=11, checkpoint=10)
    assert not module._lost_too_much(kill, every=5)
    assert module._lost_too_much(changed(kill, checkpoint=5), every=5)
    # step 10 was logged, and its checkpoint was being written
    assert not module._lost_too_much(changed(kill, logged=10, checkpoint=5), every=5)


def test_a_run_that_fails_by_itself_is_an_error_and_not_a_kill(config, tmp_path):
    broken = replace(config, {"data.corpus": (str(tmp_path / "missing.txt"),)})
    with pytest.raises(TrainingError, match=r"failed by itself: .*missing.txt"):
        verify_resume(broken, kills=1)


def test_command_ends_with_the_verdict(tmp_path):
    arguments = ["verify-resume", "--engine", "numpy", "--steps", "8", "--kills", "1"]
    command = [sys.executable, "-m", "posttrainllm", *arguments, *as_arguments(tmp_path)]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert result.stdout.splitlines()[-1].startswith(
        "verify-resume: PASS, 8 losses bit-identical after 1 kill (numpy, sha256 "
    )


def test_command_exits_with_1_when_something_differs(tmp_path, monkeypatch, capsys):
    from posttrainllm.cli import main

    problem = "step 3: loss is 2.0 after resuming, 2.1 undisturbed"
    found = module.VerifyResume("tiny", "cpp", 8, [], 1, "0" * 64, [problem])
    monkeypatch.setattr(module, "verify_resume", lambda *_, **__: found)
    arguments = ["verify-resume", "--steps", "8", *as_arguments(tmp_path)]
    assert main(arguments) == 1
    assert capsys.readouterr().out.splitlines()[-1] == f"verify-resume: FAIL (cpp), {problem}"
    assert main([*arguments, "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["passed"] is False
