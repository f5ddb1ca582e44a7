"""What every test shares: the ``require`` fixture, hypothesis without deadlines, one thread a worker, and
Triton without a card.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import hypothesis
import pytest

import needs

# With several workers the libraries' own threads would only fight for the processors. This runs before
# any test imports numpy or torch, which read the variables once.
if "PYTEST_XDIST_WORKER" in os.environ:
    for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
        os.environ.setdefault(name, "1")

# Where there is no NVIDIA card, Triton's kernels run in its interpreter. Triton asks for this when it is imported, whoever does so first.
if not Path("/dev/nvidiactl").exists():
    os.environ.setdefault("TRITON_INTERPRET", "1")

# The same examples every time, and no time limit: the machines that run this are shared and slow.
hypothesis.settings.register_profile("posttrainllm", deadline=None, derandomize=True, database=None)
hypothesis.settings.load_profile("posttrainllm")


@pytest.fixture
def require() -> Callable[[str], Any]:
    """``require("torch")``: the module, or a skip with the command that installs it."""
    return needs.require
