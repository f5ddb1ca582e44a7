"""The choice of a display: live where it can be, plain lines, JSON lines, or only warnings."""

from __future__ import annotations

import sys

from posttrainllm.cli.terminal import can_redraw
from posttrainllm.cli.watcher import Watcher


def watcher(*, verbose: bool, quiet: bool, as_json: bool) -> Watcher:
    """Choose who watches: the live display where standard output can be drawn again."""
    if as_json:
        from posttrainllm.cli.jsonlines import JsonLines

        return JsonLines()
    from posttrainllm.cli.plain import PlainLines, Quiet

    if quiet:
        return Quiet()
    if can_redraw(sys.stdout):
        from posttrainllm.cli.live import LiveDisplay

        return LiveDisplay(verbose=verbose)
    return PlainLines(verbose=verbose)
