"""The live area: lines at the bottom of a terminal that are drawn again in place.

Made for not flickering and for terminals that change their size:
- Lines are overwritten and then cut, never erased first, and a frame is one write; terminals that know
  synchronized updates (mode 2026) show it at once.
- When a terminal becomes narrower it breaks the lines that are there into several. Before the next
  frame the rows that they fill now are counted from their widths.
- The cursor is left visible, so that no way of ending, suspending or killing the process hides it.

What this is not: what stands in the lines (``frame.py``) or when they are drawn (``display.py``).
"""

from __future__ import annotations

import io
import shutil
from collections.abc import Callable, Sequence
from typing import TextIO

from rich.console import Console
from rich.text import Text

UP = "\x1b[{}A"
CUT_LINE = "\x1b[K"
CUT_BELOW = "\x1b[J"
HOLD, SHOW = "\x1b[?2026h", "\x1b[?2026l"


def terminal_size() -> tuple[int, int]:
    """Columns and lines of the terminal."""
    size = shutil.get_terminal_size()
    return size.columns, size.lines


class LiveArea:
    """A few lines that stay the last ones on the terminal until ``close``."""

    def __init__(self, stream: TextIO, size: Callable[[], tuple[int, int]] = terminal_size) -> None:
        """Draw nothing yet. ``size`` gives columns and lines at any time."""
        self._stream, self._size = stream, size
        self._widths: list[int] = []  # in cells, of the lines that are on the terminal
        self._buffer = io.StringIO()
        self._console = Console(
            file=self._buffer, force_terminal=True, highlight=False, markup=False, emoji=False
        )

    def draw(self, lines: Sequence[Text]) -> None:
        """Show these lines in place of the last ones, cut to the size of the terminal."""
        columns, rows = self._size()
        shown = [line.copy() for line in lines[: max(1, rows - 1)]]
        for line in shown:
            line.truncate(max(1, columns - 1), overflow="ellipsis")
        frame = (CUT_LINE + "\n").join(self._ansi(line) for line in shown)
        self._write(HOLD + self._to_top(columns) + frame + CUT_LINE + CUT_BELOW + SHOW)
        self._widths = [line.cell_len for line in shown]

    def erase(self) -> None:
        """Take the lines away, so that something else can be printed where they were."""
        self._write(self._to_top(self._size()[0]) + CUT_BELOW)
        self._widths = []

    def leave(self) -> None:
        """Leave the lines where they are and go on below them."""
        if self._widths:
            self._write("\n")
        self._widths = []

    def forget(self) -> None:
        """Draw the next frame where the cursor is: after the process was suspended."""
        self._widths = []

    def _to_top(self, columns: int) -> str:
        """Return to the first column of the first row that the lines on the terminal fill."""
        filled = sum(max(1, -(-width // max(1, columns))) for width in self._widths)
        return "\r" + (UP.format(filled - 1) if filled > 1 else "")

    def _ansi(self, line: Text) -> str:
        self._console.print(line, end="", soft_wrap=True)
        text = self._buffer.getvalue()
        self._buffer.seek(0)
        self._buffer.truncate()
        return text

    def _write(self, text: str) -> None:
        self._stream.write(text)
        self._stream.flush()
