"""The built site, for tests that open it in a browser: built when anything that it is made of changed."""

from __future__ import annotations

import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


@cache
def built_site() -> Path:
    """The folder of the site as ``posttrainllm play`` serves it."""
    command = [sys.executable, str(ROOT / "tools" / "site.py")]
    result = subprocess.run(command, capture_output=True, text=True, timeout=300)
    if result.returncode != 0:
        pytest.fail(f"tools/site.py failed:\n{result.stderr[-4000:]}", pytrace=False)
    return ROOT / "src" / "posttrainllm" / "site"
