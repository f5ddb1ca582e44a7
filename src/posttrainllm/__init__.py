"""Train a small GPT from scratch, fine-tune it and sample from it.

Importing this package is light: no numpy, no torch. A public name is imported when it is used.
Start reading at ``model.py`` (what is computed) and ``program.py`` (how it is written down).
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

__version__ = "0.1.0"

# Public name -> the module it lives in.
_PUBLIC = {
    "PosttrainError": "posttrainllm.errors",
}

__all__ = ["__version__", *_PUBLIC]


def __getattr__(name: str) -> Any:
    """Import a public name at its first use (PEP 562)."""
    if name not in _PUBLIC:
        raise AttributeError(f"module 'posttrainllm' has no attribute '{name}'")
    return getattr(import_module(_PUBLIC[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
