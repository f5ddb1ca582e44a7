"""Train a small GPT from scratch, fine-tune it, look inside it and let it write: one program, many engines, the same numbers.

Importing this package is light: no numpy, no torch. A public name is imported when it is used.
Start reading at ``model.py`` (what is computed) and ``program.py`` (how it is written down).
"""

from __future__ import annotations

TYPE_CHECKING = False  # as typing has it; importing typing would be most of this module's time
if TYPE_CHECKING:
    from posttrainllm.api import Run, compare, load, open_run, resume, train, train_tokenizer
    from posttrainllm.errors import PosttrainError

__version__ = "0.1.0"

__all__ = [
    "train",
    "resume",
    "open_run",
    "load",
    "compare",
    "train_tokenizer",
    "Run",
    "PosttrainError",
    "__version__",
]


def __getattr__(name: str) -> object:
    """Import a public name at its first use (PEP 562)."""
    if name not in __all__:
        raise AttributeError(f"module 'posttrainllm' has no attribute '{name}'")
    from posttrainllm.whole_imports import import_whole

    home = "posttrainllm.errors" if name == "PosttrainError" else "posttrainllm.api"
    return getattr(import_whole(home), name)


def __dir__() -> list[str]:
    return sorted(__all__)
