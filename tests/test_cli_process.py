"""The command line as a process: Ctrl-C, a reader that ends, a terminal, another encoding."""

from __future__ import annotations

import json
import os
import pty
import re
import select
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from processes import Process

SOURCE = Path(__file__).parent.parent / "src"
SIZES = [
    "--preset=tiny",
    "--engine=numpy",
    "--n-ctx=16",
    "--batch-size=4",
    "--set=model.n_layer=1",
    "--set=model.n_head=2",
    "--set=model.n_embd=8",
    "--set=training.sample_tokens=8",
    "--set=training.verdict_samples=1",
    "--set=training.final_windows=8",
    "--set=training.checkpoint_every=10",
]
ENDLESS = "--steps=1000000"
WAIT_S = 60  # a machine can be slow


def environment(**more: str) -> dict[str, str]:
    path = os.pathsep.join([str(SOURCE), os.environ.get("PYTHONPATH", "")])
    return {**os.environ, "PYTHONPATH": path, "PYTHONFAULTHANDLER": "", **more}


def command(*arguments: object) -> list[str]:
    return [sys.executable, "-m", "posttrainllm", *map(str, arguments)]


@pytest.fixture
def text(tmp_path):
    path = tmp_path / "text.txt"
    path.write_text("".join(f"{number} green bottles on the wall.\n" for number in range(300)))
    return path


def start(*arguments: object, **options: object) -> subprocess.Popen[str]:
    return Process(
        command(*arguments),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment(),
        **options,
    )


def read_until(process: subprocess.Popen[str], words: str) -> None:
    assert process.stdout is not None
    for line in process.stdout:
        if words in line:
            return
    pytest.fail(f"the process ended before it said {words!r}: {process.stderr.read()}")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_stops_after_the_step_saves_and_says_how_to_go_on(tmp_path, text, number):
    runs = tmp_path / "runs"
    process = start(
        "train", text, *SIZES, ENDLESS, "--runs-dir", runs, "--set=training.eval_every=20"
    )
    with process:
        read_until(process, "step ")
        process.send_signal(number)
        out, err = process.communicate(timeout=WAIT_S)
    assert process.returncode == 130
    assert err == "stopping after this step; Ctrl-C again stops at once\n"
    stopped = re.search(r"^stopped after ([\d,]+) steps", out, re.MULTILINE)
    assert stopped, out
    step = int(stopped.group(1).replace(",", ""))
    assert (runs / "tiny-001" / "checkpoints" / f"step-{step:06}").is_dir()
    assert f"posttrainllm train --resume tiny-001 --runs-dir {runs}" in out
    lines = (runs / "tiny-001" / "metrics.jsonl").read_text().splitlines()
    assert json.loads(lines[-1])["step"] == step


def test_training_goes_on_when_the_reader_of_its_output_ends(tmp_path, text):
    with start("train", text, *SIZES, "--steps=30", "--runs-dir", tmp_path) as process:
        process.stdout.readline()
        process.stdout.close()
        assert process.wait(timeout=WAIT_S) == 0
        err = process.stderr.read()
    assert err in ("", "notice: standard output is gone (Broken pipe); training goes on\n")
    assert (tmp_path / "tiny-001" / "checkpoints" / "step-000030").is_dir()


@pytest.mark.skipif(os.name == "nt", reason="descriptors are closed by a shell")
@pytest.mark.parametrize("closed", [">&-", ">&- 2>&- <&-"])
def test_output_that_was_closed_before_the_start_is_no_mistake(tmp_path, text, closed):
    training = command("train", text, *SIZES, "--steps=2", "--runs-dir", tmp_path / "runs")
    for arguments in (training, command("runs", "list", "--runs-dir", tmp_path / "runs")):
        line = f"{shlex.join(arguments)} {closed}"
        result = subprocess.run(
            line, shell=True, env=environment(), stderr=subprocess.PIPE, text=True
        )
        assert (result.returncode, result.stderr) == (0, "")
    assert (tmp_path / "runs" / "tiny-001" / "checkpoints" / "step-000002").is_dir()


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no /dev/full here")
def test_errors_that_nobody_can_read_do_not_end_a_command(tmp_path, text):
    training = command("train", text, *SIZES, "--steps=2", "--quiet", "--runs-dir", tmp_path)
    subprocess.run(training, env=environment(), check=True)
    generate = command(
        "generate", "--runs-dir", tmp_path, "--max-tokens=4"
    )  # says which model on standard error
    resume = command(
        "train", "--resume", "tiny-001", "--steps=4", "--runs-dir", tmp_path
    )  # and this one notices
    for arguments, words in ((generate, ""), (resume, "finished 4 steps")):
        line = f"{shlex.join(arguments)} 2>/dev/full"
        result = subprocess.run(line, shell=True, env=environment(), stdout=subprocess.PIPE)
        assert result.returncode == 0
        assert words in result.stdout.decode("utf-8", "replace")
        assert result.stdout


def test_other_commands_end_quietly_when_the_reader_of_their_output_ends(tmp_path, text):
    subprocess.run(
        command("train", text, *SIZES, "--steps=2", "--quiet", "--runs-dir", tmp_path),
        env=environment(),
        check=True,
    )
    with start("generate", "--runs-dir", tmp_path, "--max-tokens=1000000") as process:
        os.read(process.stdout.fileno(), 10)
        process.stdout.close()
        assert process.wait(timeout=WAIT_S) == 141
        assert "Error" not in process.stderr.read()


def test_output_survives_an_encoding_that_lacks_its_characters(tmp_path, text):
    arguments = ["train", text, *SIZES, "--steps=2", "--runs-dir", tmp_path]
    done = subprocess.run(
        command(*arguments), env=environment(PYTHONIOENCODING="ascii"), capture_output=True
    )
    assert done.returncode == 0
    assert done.stderr == b""
    assert b"finished 2 steps" in done.stdout


def test_a_terminal_gets_a_live_display_that_answers_ctrl_c(tmp_path, text):
    ours, theirs = pty.openpty()
    process = Process(
        command("train", text, *SIZES, ENDLESS, "--runs-dir", tmp_path),
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        env=environment(TERM="xterm-256color", COLUMNS="70", LINES="20"),
        start_new_session=True,
    )
    with process:
        os.close(theirs)
        shown = b""
        signalled = False
        deadline = time.monotonic() + WAIT_S
        while time.monotonic() < deadline:
            if select.select([ours], [], [], 0.2)[0]:
                try:
                    piece = os.read(ours, 65536)
                except OSError:  # the process ended
                    break
                shown += piece
            if not signalled and shown.count(b"\x1b[?2026l") > 2:
                process.send_signal(signal.SIGINT)
                signalled = True
        os.close(ours)
        assert process.wait(timeout=WAIT_S) == 130
    out = shown.decode()
    assert signalled
    assert "\u2501" in out  # the bar
    assert "tokens/s" in out
    plain = re.sub(r"\x1b\[[?\d;]*[A-Za-z]", "", out)
    assert "Traceback" not in plain
    assert re.search(r"stopped after [\d,]+ steps", plain)
    assert "--resume tiny-001" in plain
