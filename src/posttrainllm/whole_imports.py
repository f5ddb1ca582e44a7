"""Imports that an interrupt cannot cut off.

A process in which numpy's import was cut off can never import it again, and one in torch's import can end the process from inside its
C++: a notebook whose first cell was stopped had to be restarted, or was gone.
"""

from __future__ import annotations

import sys
from importlib import import_module

TYPE_CHECKING = False  # as typing has it: the package itself imports this
if TYPE_CHECKING:
    from types import ModuleType


def import_whole(name: str) -> ModuleType:
    """Import a module, and hold an interrupt back until it is there.

    Signals that somebody else answers stay theirs: the command line's do the same (``interrupts.py``).
    """
    if name in sys.modules:
        return import_module(name)
    import signal
    import threading

    usual = signal.default_int_handler
    main = threading.current_thread() is threading.main_thread()
    if not main or signal.getsignal(signal.SIGINT) is not usual:
        return import_module(name)
    held: list[int] = []
    signal.signal(signal.SIGINT, lambda number, frame: held.append(number))
    try:
        module = import_module(name)
    finally:
        signal.signal(signal.SIGINT, usual)
    if held:
        raise KeyboardInterrupt
    return module
