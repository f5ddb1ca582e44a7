"""How a command says that it is still at work: one line on standard error.

On a terminal the line is drawn again in place and goes away at the end; elsewhere a line comes every ten seconds.
"""

from __future__ import annotations

import sys
import time
from types import TracebackType
from typing import TYPE_CHECKING, Self

from posttrainllm.figures import part_done

if TYPE_CHECKING:
    from posttrainllm.cli.area import LiveArea

REDRAW_S = 0.1
LINE_S = 10.0


class Ticker:
    """A callable for arguments named ``progress``: ``ticker("cpp", 12, 200)``."""

    def __init__(self) -> None:
        """Say nothing yet."""
        from posttrainllm.cli.terminal import can_redraw

        self._area: LiveArea | None = None
        if can_redraw(sys.stderr):
            from posttrainllm.cli.area import LiveArea

            self._area = LiveArea(sys.stderr)
        self._said = time.monotonic()

    def __call__(self, what: str, done: int, total: int) -> None:
        """Show that ``done`` of ``total`` are done; a total of 0 is not known."""
        now = time.monotonic()
        if now - self._said < (LINE_S if self._area is None else REDRAW_S):
            return
        self._said = now
        line = part_done(what, done, total)
        if self._area is None:
            from posttrainllm.cli.terminal import say

            say(line, error=True)
        else:
            from rich.text import Text

            self._area.draw([Text(line, style="dim")])

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """See ``erase``."""
        self.erase()

    def erase(self) -> None:
        """Take the line away."""
        if self._area is not None:
            self._area.erase()
