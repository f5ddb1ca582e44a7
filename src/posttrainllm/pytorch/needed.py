"""What is said where PyTorch is not installed: one line for the engine and for the launcher of several processes. Imports no torch."""

from __future__ import annotations

from importlib.util import find_spec

from posttrainllm.errors import EngineError


def torch_missing() -> EngineError:
    """The error that says how to install it."""
    return EngineError(
        "the torch engine needs PyTorch, which is not installed",
        "pip install 'posttrainllm[torch]'",
    )


def require_torch() -> None:
    """Ask without loading it, before processes are started. Raises: EngineError."""
    if find_spec("torch") is None:
        raise torch_missing()
