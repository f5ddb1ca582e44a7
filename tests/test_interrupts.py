"""Ctrl-C at many moments of each command's life: one line and exit code 130, never a traceback.

A process is interrupted some time after its first line of ours; what the interpreter does before that is not ours to answer for.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from random import Random

import pytest

from cli_cases import SIZES, train_one, write_text
from processes import Process

SOURCE = Path(__file__).parent.parent / "src"
BEGINS = (
    "import os, sys; os.write(1, b'.'); from posttrainllm.__main__ import main; sys.exit(main())"
)
WAIT_S = 120  # a machine can be slow

#: A command, and how many seconds of it are worth interrupting.
COMMANDS = {
    "help": (["--help"], 0.5),
    "presets": (["presets"], 0.5),
    "corpus": (["corpus", "TEXT"], 1.0),
    "runs": (["runs", "list"], 0.6),
    "generate": (["generate", "one", "--max-tokens=1000000"], 1.5),
    "inspect": (["inspect", "one", "a"], 1.0),
    "eval": (["eval", "one"], 1.5),
    "export": (["export", "one", "NEW", "--to", "zip"], 1.0),
    "import": (["import", "one.zip"], 1.0),
    "train": (["train", "TEXT", *SIZES, "--steps=1000000"], 1.5),
    "train-cpp": (["train", "--preset=tiny", "--steps=1000000"], 2.0),
    "train-wasm": (["train", "--preset=tiny", "--steps=1000000", "--engine=wasm"], 6.0),
    "train-torch": (["train", "--preset=tiny", "--steps=1000000", "--engine=torch"], 6.0),
    "train-webgpu": (["train", "--preset=tiny", "--steps=1000000", "--engine=webgpu"], 4.0),
    "doctor": (["doctor"], 6.0),
    "diagnose": (["diagnose", "one"], 4.0),
    "parity": (["parity", "--preset=tiny", "--engine=cpp"], 4.0),
    "verify-resume": (["verify-resume", "--preset=tiny", "--steps=200"], 4.0),
    "bench": (["bench", "--preset=tiny"], 4.0),
}
SLOW = ("train-wasm", "train-torch", "train-webgpu", "doctor", "diagnose", "parity", "bench")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run, a file of it and a text."""
    found = tmp_path_factory.mktemp("interrupts")
    train_one(found / "runs", write_text(found))
    arguments = ["export", "one", "one.zip", "--to", "zip"]
    subprocess.run([*_python("-m", "posttrainllm"), *arguments], cwd=found, env=_environment())
    return found


def _python(*arguments: str) -> list[str]:
    return [sys.executable, *arguments]


def _environment() -> dict[str, str]:
    path = os.pathsep.join([str(SOURCE), os.environ.get("PYTHONPATH", "")])
    return {**os.environ, "PYTHONPATH": path, "PYTHONFAULTHANDLER": "", "XDG_RUNTIME_DIR": "/tmp"}


def interrupted(
    folder: Path, arguments: list[str], seconds: float, number: int = signal.SIGINT
) -> tuple[int, str]:
    """Run a command, interrupt it after so many seconds; return its exit code and what it said on standard error."""
    words = {"TEXT": str(folder / "beer.txt"), "NEW": f"{time.monotonic_ns()}.zip"}
    given = [words.get(word, word) for word in arguments]
    process = Process(
        [*_python("-c", BEGINS), *given],
        cwd=folder,
        env=_environment(),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    with process:
        os.read(process.stdout.fileno(), 1)
        time.sleep(seconds)
        process.send_signal(number)
        _, err = process.communicate(timeout=WAIT_S)
    return process.returncode, err.decode()


def check(name: str, seconds: float, code: int, err: str) -> None:
    where = f"{name} after {seconds:.3f} s: {err}"
    assert code in (130, 0), where  # 0: it had done all, or ends that way
    said = err.splitlines()
    assert "Traceback" not in err, where
    if code == 130:
        assert [line for line in said if line.startswith("stopp")] or name == "generate", where
        assert len(said) == len(set(said)), where


def moments(name: str, count: int) -> list[float]:
    """Moments of a command's life, the same in every run of the tests."""
    random = Random(name)
    longest = COMMANDS[name][1]
    return [longest * (number + random.random()) / count for number in range(count)]


@pytest.mark.parametrize("name", [name for name in COMMANDS if name not in SLOW])
def test_a_command_that_is_interrupted_ends_with_one_line_and_130(folder, name):
    for seconds in moments(name, 2):
        check(name, seconds, *interrupted(folder, COMMANDS[name][0], seconds))


@pytest.mark.slow
@pytest.mark.parametrize("name", COMMANDS)
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_command_that_is_interrupted_at_many_moments_ends_with_one_line(folder, name, number):
    for seconds in moments(name, 12):
        check(name, seconds, *interrupted(folder, COMMANDS[name][0], seconds, number))


def test_a_run_that_is_interrupted_before_its_first_step_leaves_nothing(folder):
    arguments = ["train", "TEXT", *SIZES, "--name=none", "--steps=1000000", "--quiet"]
    for seconds in moments("train", 4):
        code, err = interrupted(folder, arguments, seconds)
        assert code == 130, err
        left = folder / "runs" / "none"
        assert not left.exists() or list((left / "checkpoints").iterdir()), err
        shutil.rmtree(left, ignore_errors=True)


# ---- the rules, one by one --------------------------------------------------------------------------

PRELUDE = """
import os, signal, sys, threading, time
from posttrainllm.cli.failures import exit_code
from posttrainllm.interrupts import Interrupts

interrupts = Interrupts()

def interrupt(*_):
    os.kill(os.getpid(), signal.SIGINT)
"""


def script(text: str) -> tuple[int, str, str]:
    """Run lines after ``PRELUDE``; return exit code, output and errors."""
    done = subprocess.run(
        _python("-c", PRELUDE + text), env=_environment(), capture_output=True, text=True
    )
    return done.returncode, done.stdout, done.stderr


def test_an_error_that_a_library_makes_of_an_interrupt_is_the_interrupt():
    text = """
def command():
    try:
        interrupt()
    except KeyboardInterrupt:
        raise ImportError("numpy is not installed") from None

print(exit_code(command, interrupts))
"""
    assert script(text) == (0, "130\n", "stopped\n")


def test_an_interrupt_where_nothing_can_be_raised_is_raised_again():
    text = """
class Odd:
    def __del__(self):
        interrupt()

def command():
    Odd()
    print("goes on")
    time.sleep(5)

print(exit_code(command, interrupts))
"""
    assert script(text) == (0, "goes on\n130\n", "stopped\n")


def test_an_interrupt_of_an_import_waits_until_the_module_is_there(tmp_path):
    (tmp_path / "slow_to_come.py").write_text(
        "import time\nfrom __main__ import interrupt\ninterrupt()\ntime.sleep(0.2)\nthere = True\n"
    )
    text = f"""
sys.path.insert(0, {str(tmp_path)!r})

def command():
    try:
        import slow_to_come
        time.sleep(5)
    finally:
        print(sys.modules["slow_to_come"].there)

print(exit_code(command, interrupts))
"""
    assert script(text) == (0, "True\n130\n", "stopped\n")


def test_impatience_ends_a_process_that_does_not_end():
    text = """
def command():
    interrupt()

def ending():
    interrupt()
    print("one more is nothing", flush=True)
    interrupt()
    print("never printed", flush=True)

try:
    exit_code(command, interrupts)
finally:
    ending()
"""
    assert script(text) == (130, "one more is nothing\n", "stopped\n")


def test_an_interrupt_after_the_end_keeps_the_code_of_the_command():
    text = """
import atexit
code = exit_code(lambda: None, interrupts)
interrupts.end(code)
interrupt()
print("never printed", flush=True)
"""
    assert script(text) == (0, "", "")


def test_signals_that_are_ignored_stay_ignored():
    text = """
print(signal.getsignal(signal.SIGTERM) is signal.SIG_IGN, signal.getsignal(signal.SIGINT) is not signal.SIG_IGN)
"""
    line = ["sh", "-c", 'trap "" TERM; exec "$0" "$@"', *_python("-c", PRELUDE + text)]
    done = subprocess.run(line, env=_environment(), capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, "True True\n", "")
