"""A server of the playground in a process of its own, and ways to ask it."""

from __future__ import annotations

import contextlib
import gzip
import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

PAGE = (
    '<!doctype html><title>site</title><script>document.title = "ran";</script>'
    '<script type="module" src="./_astro/page.abc123.js"></script>'
)

SCRIPT = """
import sys
from pathlib import Path
from posttrainllm.server.serve import listen, serve
host, port, site, runs, lan, patience = sys.argv[1:]
listening = listen(host, int(port))
print(listening.getsockname()[1], flush=True)
try:
    serve(
        listening, Path(site), Path(runs), open_to_lan=lan == "lan", patience_s=float(patience),
        started=lambda: print("started", flush=True),
    )
except KeyboardInterrupt:
    print("interrupted", flush=True)
"""


@dataclass
class Answer:
    """Status, headers (lower case) and body of an answer."""

    status: int
    headers: dict[str, str]
    body: bytes

    def json(self) -> Any:
        return json.loads(self.body)


@dataclass
class Server:
    """A server that runs, its folders and its process."""

    port: int
    site: Path
    runs: Path
    process: subprocess.Popen[str] = field(repr=False)

    @property
    def origin(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def ask(
        self, method: str, path: str, body: Any = None, timeout: float = 10, **headers: str
    ) -> Answer:
        """One request; a body that is no bytes is sent as JSON; what writes has our origin."""
        given = {name.replace("_", "-"): value for name, value in headers.items()}
        if method not in ("GET", "HEAD"):
            given.setdefault("Origin", self.origin)
        if body is not None and not isinstance(body, bytes):
            body = json.dumps(body).encode()
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=timeout)
        try:
            connection.request(method, path, body, given)
            answer = connection.getresponse()
            found = {name.lower(): value for name, value in answer.getheaders()}
            return Answer(answer.status, found, answer.read())
        finally:
            connection.close()

    def get(self, path: str, **headers: str) -> Answer:
        return self.ask("GET", path, **headers)

    def put(self, run: str, path: str, content: bytes, **headers: str) -> Answer:
        return self.ask("PUT", f"/api/runs/{run}/files/{path}", content, **headers)

    def raw(self, content: bytes, timeout: float = 5) -> bytes:
        """Send bytes as they are and return what comes until the server closes or says no more."""
        with socket.create_connection(("127.0.0.1", self.port), timeout=timeout) as connection:
            connection.sendall(content)
            found = b""
            with contextlib.suppress(TimeoutError, ConnectionError):
                while piece := connection.recv(65536):
                    found += piece
                    if b"\r\n\r\n" in found and timeout < 1:
                        break
            return found

    @contextlib.contextmanager
    def events(self, path: str, **headers: str) -> Iterator[Events]:
        """Follow server-sent events while the block runs."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=10)
        given = {name.replace("_", "-"): value for name, value in headers.items()}
        connection.request("GET", path, headers=given)
        answer = connection.getresponse()
        assert answer.status == 200, answer.read()
        try:
            yield Events(answer)
        finally:
            answer.close()
            connection.close()


class Events:
    """The events of one connection, one by one."""

    def __init__(self, answer: http.client.HTTPResponse) -> None:
        self._answer = answer
        self.id = ""

    def next(self, kind: str | None = None) -> tuple[str, Any]:
        """The next event, or the next of a kind; an id stays in ``id``."""
        name, data = "", ""
        while True:
            line = self._answer.readline().decode()
            if not line:
                return "end", None
            field_name, _, value = line.rstrip("\n").partition(": ")
            if field_name == "event":
                name = value
            elif field_name == "data":
                data = value
            elif field_name == "id":
                self.id = value
            elif line == "\n" and name:
                if kind in (None, name):
                    return name, json.loads(data)
                name = ""


def make_site(folder: Path) -> Path:
    """A small site with a page, a hashed script, data and a compressed file."""
    for path, content in {
        "index.html": PAGE.encode(),
        "404.html": b"<!doctype html><title>nothing</title><script>document.title += '!'</script>",
        "train/index.html": b"<!doctype html><title>train</title>",
        "_astro/page.abc123.js": b"document.body.textContent = String(crossOriginIsolated);",
        "data/posttrainllm.json": b'{"format": 1}',
        "data/posttrain-control.wasm": b"\0asm\1\0\0\0",
        "data/wgsl/add.wgsl": b"// add",
        "data/model.safetensors": bytes(range(256)) * 4000,
        "sw.js": b"// sw",
        "big.txt": b"to be or not to be\n" * 1000,
    }.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_bytes(content)
    (folder / "big.txt.gz").write_bytes(gzip.compress((folder / "big.txt").read_bytes()))
    (folder / "secret").symlink_to("/etc/hostname")
    (folder / ".hidden").write_text("no")
    return folder


@contextlib.contextmanager
def running(folder: Path, **options: Any) -> Iterator[Server]:
    """A server over a new site and an empty runs folder; it must end well and say nothing on stderr."""
    site, runs = make_site(folder / "site"), folder / "runs"
    runs.mkdir(exist_ok=True)
    with served(site, runs, **options) as server:
        yield server


@contextlib.contextmanager
def served(
    site: Path,
    runs: Path,
    *,
    host: str = "127.0.0.1",
    port: int = 0,
    lan: bool = False,
    patience_s: float = 20,
) -> Iterator[Server]:
    """A server over folders that are there; port 0 is any that is free."""
    options = [host, str(port), str(site), str(runs), "lan" if lan else "-", str(patience_s)]
    command = [sys.executable, "-c", SCRIPT, *options]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=os.environ.copy()
    )
    assert process.stdout is not None
    assert process.stderr is not None
    said: list[str] = []
    stderr = process.stderr
    listener = threading.Thread(target=lambda: said.extend(stderr), daemon=True)
    listener.start()
    try:
        given = process.stdout.readline().strip()
        assert given.isdigit(), said
        assert process.stdout.readline().strip() == "started", said
        yield Server(int(given), site, runs, process)
        assert process.poll() is None, f"the server ended by itself: {said}"
        began = time.monotonic()
        process.send_signal(signal.SIGINT)
        process.wait(10)
        assert time.monotonic() - began < 3, "Ctrl-C took its time"
        listener.join(5)
        assert said == [], f"said on stderr: {''.join(said)}"
    finally:
        process.kill()
        process.wait()
        process.stdout.close()
        process.stderr.close()
