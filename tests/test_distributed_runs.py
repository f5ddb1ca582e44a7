"""``train --nproc 2`` from the outside: files, checkpoints across numbers of processes, kills, Ctrl-C, what goes wrong."""

from __future__ import annotations

import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from cli_cases import TEXT
from needs import require

torch = require("torch")

from distributed_cases import (  # noqa: E402
    SIZES,
    Run,
    checkpoints,
    environment,
    kill,
    losses,
    metrics,
    train,
    wait_for_step,
    worst,
)
from posttrainllm.errors import EngineError  # noqa: E402
from posttrainllm.pytorch import distributed_group  # noqa: E402
from posttrainllm.pytorch.ranks import TIMEOUT, Ranks  # noqa: E402
from posttrainllm.runs.checkpoint import read_checkpoint  # noqa: E402

LIMIT = 1e-6


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> Path:
    """The runs "ddp" and "fsdp" of two processes and "one" of one, of 20 steps with a checkpoint in the middle."""
    folder = tmp_path_factory.mktemp("runs")
    text = folder / "beer.txt"
    text.write_text(TEXT)
    for name, more in {
        "ddp": ["--nproc=2"],
        "fsdp": ["--nproc=2", "--parallel=fsdp"],
        "one": ["--nproc=1"],
    }.items():
        code, out, err = train(text, *SIZES, *more, f"--name={name}", "--runs-dir", folder)
        assert code == 0, err
        assert err == ""
        (folder / f"{name}.out").write_text(out)
    return folder


def from_step_10(runs: Path, name: str, new: str) -> Path:
    """A copy of a run as it was when its checkpoint of step 10 was the newest."""
    shutil.copytree(runs / name, runs / new)
    shutil.rmtree(runs / new / "checkpoints" / "step-000020")
    return runs / new


def test_files_are_written_once_and_one_process_prints(runs):
    for name in ("ddp", "fsdp"):
        assert [line["step"] for line in metrics(runs / name)] == list(range(1, 21))
        assert checkpoints(runs / name) == [10, 20]
        out = (runs / f"{name}.out").read_text()
        assert out.count("validation loss") == 1
        assert f"ranks 2, parallel {name}" in out
    assert sorted(path.name for path in runs.iterdir() if path.is_dir())[:3] == [
        "ddp",
        "fsdp",
        "one",
    ]


@pytest.mark.parametrize("name", ["ddp", "fsdp"])
def test_a_run_of_two_processes_is_the_run_of_one(runs, name):
    assert worst(losses(runs / name), losses(runs / "one")) <= LIMIT
    ours, theirs = (
        [line["val_loss"] for line in metrics(runs / run) if line["val_loss"] is not None]
        for run in (name, "one")
    )
    assert worst(ours, theirs) <= LIMIT
    config = (runs / name / "config.toml").read_text()
    assert (
        config.replace('"fsdp"  # preset: "ddp"', '"ddp"') == (runs / "one/config.toml").read_text()
    )


@pytest.mark.parametrize("name", ["ddp", "fsdp"])
def test_a_checkpoint_of_two_processes_goes_on_in_two_bit_by_bit(runs, name):
    again = from_step_10(runs, name, f"{name}-2-2")
    code, _, err = train("--resume", again.name, "--runs-dir", runs, "--nproc=2", "--quiet")
    assert (code, err) == (0, "")
    assert losses(again) == losses(runs / name)
    ours, theirs = (
        read_checkpoint(run / "checkpoints/step-000020") for run in (again, runs / name)
    )
    for kind in ("params", "m", "v"):
        for tensor, value in getattr(theirs, kind).items():
            assert (getattr(ours, kind)[tensor] == value).all(), (kind, tensor)


@pytest.mark.parametrize("name", ["ddp", "fsdp"])
def test_a_checkpoint_of_two_processes_goes_on_in_one(runs, name):
    again = from_step_10(runs, name, f"{name}-2-1")
    code, _, err = train("--resume", again.name, "--runs-dir", runs, "--quiet")
    assert code == 0, err
    assert "ranks: 2 -> 1" in err
    assert worst(losses(again), losses(runs / name)) <= LIMIT


def test_a_checkpoint_of_one_process_goes_on_in_two(runs):
    again = from_step_10(runs, "one", "one-1-2")
    code, _, err = train("--resume", again.name, "--runs-dir", runs, "--nproc=2", "--quiet")
    assert code == 0, err
    assert "ranks: 1 -> 2" in err
    assert worst(losses(again), losses(runs / "one")) <= LIMIT


def test_any_engine_goes_on_with_what_shards_wrote(runs):
    again = from_step_10(runs, "fsdp", "fsdp-numpy")
    arguments = ["--engine=numpy", "--parallel=ddp", "--allow-change", "--quiet"]
    code, _, err = train("--resume", again.name, "--runs-dir", runs, *arguments)
    assert code == 0, err
    assert worst(losses(again), losses(runs / "fsdp")) <= 10 * LIMIT


def test_torchrun_starts_the_same_command(runs):
    arguments = ["--name=torchrun", "--runs-dir", str(runs), "--quiet"]
    command = [
        sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2",
        "-m", "posttrainllm", "train", str(runs / "beer.txt"), *SIZES, *arguments,
    ]  # fmt: skip
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert losses(runs / "torchrun") == losses(runs / "ddp")


def killed_again_and_again(runs: Path, name: str, kills: int, more: list[str]) -> None:
    """SIGKILL for one rank after the other of a run, which goes on from its newest checkpoint each time.

    A kill ends the job within seconds, in one line and what to do; what is computed twice is what came after the checkpoint.
    """
    every, chance = 5, random.Random(kills)
    flags = [
        "--set=training.checkpoint_every=5",
        "--set=training.eval_every=0",
        "--quiet",
        "--nproc=2",
        *more,
    ]
    steps = 30 * (kills + 1)
    start = [runs / "beer.txt", *SIZES, f"--steps={steps}", *flags, "--runs-dir", runs]
    code, _, err = train(*start, f"--name={name}-undisturbed")
    assert code == 0, err
    run = runs / name
    go_on = ["--resume", name, "--runs-dir", runs, "--nproc=2", "--quiet"]
    for number in range(kills):
        process = Run(*(go_on if number else [*start, f"--name={name}"]))
        wait_for_step(run, 30 * number + chance.randrange(6, 30), process.process)
        victim = number % 2
        kill(process.ranks()[victim])
        began = time.monotonic()
        code, _, err = process.end()
        assert time.monotonic() - began < 15
        reached, safe = len(losses(run)), max(checkpoints(run))
        assert code == 1
        assert f"error: rank {victim} of 2 was ended by SIGKILL" in err
        assert f"newest checkpoint is of step {safe}; go on with it: " in err
        assert len(err.splitlines()) == 2, err
        assert 0 <= reached - safe <= every
        read_checkpoint(run)
    code, _, err = train(*go_on)
    assert code == 0, err
    assert losses(run) == losses(runs / f"{name}-undisturbed")


def test_a_killed_rank_ends_the_job_and_costs_the_steps_since_the_checkpoint(runs):
    killed_again_and_again(runs, "killed", 2, [])


@pytest.mark.slow
@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
def test_ten_killed_ranks_cost_no_more(runs, parallel):
    killed_again_and_again(runs, f"killed-{parallel}", 10, [f"--parallel={parallel}"])


def test_ctrl_c_reaches_rank_0_which_saves_once(runs):
    arguments = [*SIZES, "--steps=100000", "--name=stopped", "--runs-dir", runs, "--nproc=2"]
    process = Run(runs / "beer.txt", *arguments)
    wait_for_step(runs / "stopped", 25, process.process)
    process.process.send_signal(signal.SIGINT)
    code, out, err = process.end()
    assert code == 130
    assert err == "stopping after this step; Ctrl-C again stops at once\n"
    assert "train --resume stopped" in out
    assert max(checkpoints(runs / "stopped")) == len(losses(runs / "stopped"))
    read_checkpoint(runs / "stopped")


def test_a_rank_that_does_not_answer_ends_the_job(runs):
    arguments = [
        *SIZES,
        "--steps=100000",
        "--name=silent",
        "--runs-dir",
        runs,
        "--nproc=2",
        "--quiet",
    ]
    process = Run(runs / "beer.txt", *arguments, **{TIMEOUT: "10"})
    wait_for_step(runs / "silent", 15, process.process)
    os.kill(process.ranks()[1], signal.SIGSTOP)
    code, _, err = process.end()
    assert code == 1
    assert "error: rank 1 of 2 does not answer, and the run has stopped\n" in err
    assert f"newest checkpoint is of step {max(checkpoints(runs / 'silent'))}" in err
    assert err.count("error: ") == 1


def test_the_run_saves_and_ends_when_the_command_is_killed(runs):
    arguments = [*SIZES, "--steps=100000", "--name=orphan", "--runs-dir", runs, "--nproc=2"]
    process = Run(runs / "beer.txt", *arguments)
    wait_for_step(runs / "orphan", 25, process.process)
    ranks = process.ranks()
    kill(process.process.pid)
    process.end()
    end = time.monotonic() + 20
    while time.monotonic() < end and any(Path(f"/proc/{rank}").exists() for rank in ranks):
        time.sleep(0.05)
    assert not [rank for rank in ranks if Path(f"/proc/{rank}").exists()]
    assert max(checkpoints(runs / "orphan")) == len(losses(runs / "orphan"))


def check_line(result: tuple[int, str, str], *words: str, code: int = 2) -> None:
    found, out, err = result
    assert found == code, err
    assert out == ""
    assert err.startswith("error: ")
    assert len(err.splitlines()) == 2, err
    for word in words:
        assert word in err


def test_what_cannot_be_started_is_one_line_each(runs):
    text = runs / "beer.txt"
    start = [text, *SIZES, "--runs-dir", runs]
    check_line(train(*start, "--nproc=3"), "a batch of 8 windows", "among 3 processes")
    check_line(
        train(*start, "--nproc=2", "--engine=cpp"), "engine torch alone", "add --engine torch"
    )
    check_line(train(*start, "--nproc=0"), "--nproc must be a whole number from 1")
    check_line(train(*start, "--nproc=2", "--name=ddp"), "already has a run 'ddp'")
    check_line(train(*start, "--parallel=both"), "engine.parallel must be one of ddp, fsdp")
    assert not (runs / "tiny-001").exists()


def test_a_rank_that_fails_says_so_for_all(runs):
    arguments = [*SIZES, "--set=model.dropout=0.1", "--parallel=fsdp", "--nproc=2"]
    result = train(runs / "beer.txt", *arguments, "--runs-dir", runs)
    check_line(result, "no model.dropout=0.1", "or --parallel ddp")


def address(port: int) -> dict[str, str]:
    return {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), TIMEOUT: "2", "WORLD_SIZE": "2"}


def test_a_process_that_does_not_come_is_waited_for_and_named(runs):
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        start = [runs / "beer.txt", *SIZES, "--runs-dir", runs]
        taken = train(*start, RANK="0", **address(port))
    check_line(taken, f"port {port}", "is taken by another program", "--master-port")
    alone = train(*start, RANK="0", **address(port))
    check_line(alone, "waited 2 s", "1 of 2 processes came", TIMEOUT)
    other = train(*start, RANK="1", **address(port))
    check_line(other, "rank 1 of 2: waited 2 s", TIMEOUT)


def test_ranks_do_not_start_processes_themselves(runs):
    start = [runs / "beer.txt", *SIZES, "--runs-dir", runs, "--nproc=2"]
    check_line(train(*start, RANK="0", WORLD_SIZE="2"), "already rank 0 of 2", "under torchrun")
    check_line(train(*start, RANK="0", WORLD_SIZE="two"), "WORLD_SIZE must be a whole number")


def test_more_processes_than_gpus_are_refused_with_both_numbers(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(
        EngineError, match="4 processes need as many GPUs, and this machine has 2"
    ) as error:
        distributed_group._device(Ranks(3, 4, 3, 4))
    assert error.value.hint == "use 2 processes"
