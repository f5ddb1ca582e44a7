"""A command in a process of its own that does not outlive a test that fails."""

from __future__ import annotations

import subprocess


class Process(subprocess.Popen):  # type: ignore[type-arg]
    """``Popen``, killed where an error leaves its block: it would be waited for without end."""

    def __exit__(self, kind, error, trace):
        """Kill it after an error, and wait for its end."""
        if kind is not None:
            self.kill()
        super().__exit__(kind, error, trace)
