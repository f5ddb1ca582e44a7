"""``posttrainllm play``: the playground in the browser, served from here."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from posttrainllm.cli.options import RunsDir

HERE = "127.0.0.1"


def play(
    port: Annotated[
        int,
        typer.Option(min=0, max=65535, help="Port; a busy one is tried upwards, 0 takes any."),
    ] = 8765,
    host: Annotated[
        str,
        typer.Option(
            metavar="ADDRESS",
            help="Address to listen on; 0.0.0.0 lets others on the network see the site "
            "[dim](without your runs)[/dim].",
        ),
    ] = HERE,
    no_open: Annotated[bool, typer.Option("--no-open", help="Open no browser.")] = False,
    runs_dir: RunsDir = None,
) -> None:
    """Open the playground: train in a browser tab, watch it, talk to it."""
    import contextlib
    import os

    from posttrainllm.api import RUNS_DIR
    from posttrainllm.cli.terminal import say
    from posttrainllm.errors import PosttrainError
    from posttrainllm.server.serve import listen, serve
    from posttrainllm.server.site import SITE

    if not (SITE / "index.html").is_file():
        raise PosttrainError(
            "the playground is not built in this installation",
            "in a source tree run: make play   (or tools/site.py, and install again)",
        )
    runs = Path(runs_dir or RUNS_DIR).absolute()
    if os.path.lexists(runs) and not runs.is_dir():
        raise PosttrainError(f"{runs} is not a folder", "give a folder for the runs: --runs-dir")
    listening = listen(host, port)
    found = int(listening.getsockname()[1])
    if port not in (0, found):
        say(f"play: port {port} is taken, using {found}")
    local = host in (HERE, "localhost", "::1")
    say(f"play: runs in {runs}")
    if not local:
        _say_what_others_get(host, found)
    address = f"http://{'[::1]' if host == '::1' else HERE}:{found}/"

    def started() -> None:
        say("play: ", (address, "bold"), "   (Ctrl-C ends it)")
        if not no_open:
            _open_browser(address)

    with listening, contextlib.suppress(KeyboardInterrupt):
        serve(listening, SITE, runs, open_to_lan=not local, started=started)
    say("play: ended")


def _say_what_others_get(host: str, port: int) -> None:
    """Tell the host of a class what browsers do on a LAN."""
    import socket

    from posttrainllm.cli.terminal import say

    name = socket.gethostname() if host in ("0.0.0.0", "::") else host
    say(f"play: others on the network: http://{name}:{port}/ (they see the site and no runs)")
    say(
        ("play: note: ", "yellow"),
        "browsers give WebGPU and threads only on localhost or https: over plain http others train",
    )
    say("play:       on one thread of WebAssembly and lose their runs when the tab closes. Better:")
    say("play:       web/dist on any https host, or posttrainllm play on each machine")


def _open_browser(address: str) -> None:
    """Open a browser with a window of its own; a text browser would take the terminal."""
    import os
    import sys
    import threading
    import webbrowser

    if sys.platform.startswith("linux") and not (
        os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY") or os.environ.get("BROWSER")
    ):
        return
    threading.Thread(target=webbrowser.open, args=(address,), daemon=True).start()
