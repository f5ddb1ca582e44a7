"""The names that a notebook may rely on, listed once here and once in the package."""

from __future__ import annotations

import subprocess
import sys

import pytest

import posttrainllm

NAMES = [
    "PosttrainError",
    "Run",
    "__version__",
    "compare",
    "load",
    "open_run",
    "resume",
    "train",
    "train_tokenizer",
]


def test_the_public_names_are_these_and_each_can_be_used():
    assert dir(posttrainllm) == sorted(posttrainllm.__all__) == NAMES
    for name in NAMES:
        assert getattr(posttrainllm, name) is not None


def test_an_unknown_name_is_an_attribute_error_that_names_it():
    with pytest.raises(AttributeError, match="no attribute 'trian'"):
        _ = posttrainllm.trian


def test_importing_the_package_imports_nothing_else_of_ours_and_no_dependency():
    look = "import sys, posttrainllm; print(*sys.modules)"
    result = subprocess.run(
        [sys.executable, "-c", look], capture_output=True, text=True, check=True
    )
    loaded = {name for name in result.stdout.split() if name.startswith("posttrainllm")}
    assert loaded == {"posttrainllm"}
    assert not {"numpy", "pydantic", "typer", "rich", "torch"} & set(result.stdout.split())


def test_an_interrupt_while_the_package_is_imported_leaves_one_that_works():
    code = """
import signal, sys
import posttrainllm

class Interrupting:
    seen = 0

    def find_spec(self, name, path=None, target=None):
        if name.startswith("numpy.") and not self.seen:
            self.seen += 1
            signal.raise_signal(signal.SIGINT)

finder = Interrupting()
sys.meta_path.insert(0, finder)
try:
    posttrainllm.train
except KeyboardInterrupt:
    print("interrupted", finder.seen)
print(signal.getsignal(signal.SIGINT) is signal.default_int_handler)
print(posttrainllm.train.__name__, posttrainllm.PosttrainError.__name__)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.stdout, done.returncode) == (
        "interrupted 1\nTrue\ntrain PosttrainError\n",
        0,
    ), done.stderr
