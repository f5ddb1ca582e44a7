"""A free port, uvicorn on it, and an end that comes at once.

Logging is off: a server for one person says nothing about requests. A connection that does not
finish its headers within PATIENCE_S is closed, so that slow ones do not pile up.
"""

from __future__ import annotations

import asyncio
import errno
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

from posttrainllm.errors import PosttrainError
from posttrainllm.server.app import application

FIRST_PORT = 8765
TRIED = 20  # ports, upwards
PATIENCE_S = 20.0
LONGEST_HEADERS = 32 << 10
MOST_CONNECTIONS = 500


def listen(host: str, port: int) -> socket.socket:
    """Return a socket that listens on a port, or on the next one that is free; 0 takes any.

    Raises: PosttrainError when none of TRIED is, or the host is not this machine's.
    """
    last = port if port == 0 else min(port + TRIED - 1, 65535)
    for candidate in range(port, last + 1):
        try:
            return _bound(host, candidate)
        except OSError as error:
            if error.errno in (errno.EADDRINUSE, errno.EACCES) and candidate < last:
                continue
            if error.errno in (errno.EADDRINUSE, errno.EACCES):
                raise PosttrainError(
                    f"no port from {port} to {last} is free", "give another one: --port"
                ) from None
            raise PosttrainError(
                f"cannot listen on {host}: {error.strerror or error}",
                "give an address of this machine: --host 127.0.0.1, or 0.0.0.0 for all",
            ) from None
    raise AssertionError("the loop ends by returning or raising")


def _bound(host: str, port: int) -> socket.socket:
    family, kind, protocol, _, address = socket.getaddrinfo(
        host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
    )[0]
    found = socket.socket(family, kind, protocol)
    try:
        if socket.has_ipv6 and family == socket.AF_INET6:
            found.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        if hasattr(socket, "SO_EXCLUSIVEADDRUSE"):  # Windows: the other option shares a port
            found.setsockopt(socket.SOL_SOCKET, socket.SO_EXCLUSIVEADDRUSE, 1)
        else:
            found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        found.bind(address)
        found.listen(128)
    except BaseException:
        found.close()
        raise
    return found


def serve(
    listening: socket.socket,
    site: Path,
    runs_dir: Path,
    *,
    open_to_lan: bool = False,
    patience_s: float = PATIENCE_S,
    started: Callable[[], None] = lambda: None,
) -> None:
    """Serve until Ctrl-C or SIGTERM; connections that stay open do not delay the end.

    ``started`` is called once requests are answered.
    """
    import uvicorn
    from uvicorn.protocols.http.h11_impl import H11Protocol

    class PatientProtocol(H11Protocol):
        """HTTP whose headers must come within ``patience_s``."""

        waiting: asyncio.TimerHandle | None = None

        def connection_made(self, transport: Any) -> None:
            super().connection_made(transport)
            self._wait()

        def data_received(self, data: bytes) -> None:
            super().data_received(data)
            if self.cycle is not None and not self.cycle.response_complete:
                self._stop_waiting()
            elif self.waiting is None:
                self._wait()

        def on_response_complete(self) -> None:
            super().on_response_complete()
            if self.waiting is None:
                self._wait()  # for the headers of a next request

        def send_400_response(self, msg: str) -> None:
            super().send_400_response(msg)
            if self.cycle is not None:  # a body that broke: its request is answered by this
                self.cycle.disconnected = True
                self.cycle.message_event.set()

        def connection_lost(self, exc: Exception | None) -> None:
            self._stop_waiting()
            super().connection_lost(exc)

        def _wait(self) -> None:
            self.waiting = self.loop.call_later(patience_s, self._give_up)

        def _stop_waiting(self) -> None:
            if self.waiting is not None:
                self.waiting.cancel()
                self.waiting = None

        def _give_up(self) -> None:
            self.waiting = None
            if self.cycle is None or self.cycle.response_complete:
                self.transport.close()

    class Server(uvicorn.Server):
        """A server that tells when it has started and when it is asked to end."""

        async def startup(self, sockets: list[socket.socket] | None = None) -> None:
            await super().startup(sockets)
            if self.started:
                started()

        def handle_exit(self, sig: int, frame: Any) -> None:
            closing.set()
            super().handle_exit(sig, frame)

    closing = asyncio.Event()
    config = uvicorn.Config(
        application(site, runs_dir, closing, open_to_lan=open_to_lan),
        http=PatientProtocol,
        ws="none",
        log_config=None,
        log_level="critical",
        access_log=False,
        server_header=False,
        proxy_headers=False,
        timeout_keep_alive=10,
        timeout_graceful_shutdown=1,
        limit_concurrency=MOST_CONNECTIONS,
        h11_max_incomplete_event_size=LONGEST_HEADERS,
        lifespan="on",
    )
    _silence()
    asyncio.run(Server(config).serve([listening]))


def _silence() -> None:
    """Errors of connections are the peer's business; ours are told by the guard (security.py)."""
    import logging

    for name in ("uvicorn", "uvicorn.error", "uvicorn.access", "asyncio"):
        logger = logging.getLogger(name)
        logger.handlers, logger.propagate, logger.disabled = [logging.NullHandler()], False, True
