"""Train a small GPT from scratch, fine-tune it, look inside it and let it write: one program, many engines, the same numbers.

Importing this package is light: no numpy, no torch. A public name is imported when it is used.
Start reading at ``model.py`` (what is computed) and ``program.py`` (how it is written down).
"""

from __future__ import annotations

import sys
from importlib import import_module

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
    home = "posttrainllm.errors" if name == "PosttrainError" else "posttrainllm.api"
    return getattr(_import_whole(home), name)


def _import_whole(home: str) -> object:
    """Import a module, and hold an interrupt back until it is there.

    A process in which numpy's import was cut off can never import it again: a notebook whose first cell was stopped had to be restarted.
    """
    if home in sys.modules:
        return import_module(home)
    import signal
    import threading

    usual = signal.default_int_handler
    main = threading.current_thread() is threading.main_thread()
    if not main or signal.getsignal(signal.SIGINT) is not usual:
        return import_module(home)
    held: list[int] = []
    signal.signal(signal.SIGINT, lambda number, frame: held.append(number))
    try:
        module = import_module(home)
    finally:
        signal.signal(signal.SIGINT, usual)
    if held:
        raise KeyboardInterrupt
    return module


def __dir__() -> list[str]:
    return sorted(__all__)
