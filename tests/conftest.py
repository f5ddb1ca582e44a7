"""What every test shares: the ``require`` fixture and hypothesis without deadlines."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import hypothesis
import pytest

import needs

# The same examples every time, and no time limit: the machines that run this are shared and slow.
hypothesis.settings.register_profile("posttrainllm", deadline=None, derandomize=True, database=None)
hypothesis.settings.load_profile("posttrainllm")


@pytest.fixture
def require() -> Callable[[str], Any]:
    """``require("torch")``: the module, or a skip with the command that installs it."""
    return needs.require
