"""``posttrainllm play`` as a user starts it: lines, ports, the address, the end."""

from __future__ import annotations

import contextlib
import gzip
import http.client
import importlib.util
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from posttrainllm.cli import main
from posttrainllm.server import serve, site
from site_cases import ROOT, built_site


class Playing:
    """A process of ``posttrainllm play`` and what it has printed."""

    def __init__(self, folder: Path, *arguments: str) -> None:
        command = [sys.executable, "-m", "posttrainllm", "play", "--no-open", *arguments]
        self.process = subprocess.Popen(
            command, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        self.lines: list[str] = []
        self._listener = threading.Thread(target=self._listen, daemon=True)
        self._listener.start()

    def _listen(self) -> None:
        assert self.process.stdout is not None
        self.lines.extend(line.rstrip() for line in self.process.stdout)

    def port(self) -> int:
        """Wait for the address."""
        for _ in range(400):
            found = re.search(r"http://(?:127\.0\.0\.1|\[::1\]):(\d+)/ ", "\n".join(self.lines))
            if found:
                return int(found.group(1))
            assert self.process.poll() is None, self.lines
            time.sleep(0.05)
        raise AssertionError(self.lines)

    def close(self) -> None:
        self._listener.join(5)
        assert self.process.stdout is not None
        self.process.stdout.close()

    def end(self) -> int:
        """Ctrl-C; return the exit code."""
        began = time.monotonic()
        self.process.send_signal(signal.SIGINT)
        code = self.process.wait(10)
        assert time.monotonic() - began < 2
        self._listener.join(5)
        return code


@contextlib.contextmanager
def playing(folder: Path, *arguments: str) -> Iterator[Playing]:
    built_site()
    found = Playing(folder, *arguments)
    try:
        yield found
    finally:
        found.process.kill()
        found.process.wait()
        found.close()


def get(port: int, path: str, host: str = "127.0.0.1") -> tuple[int, bytes]:
    connection = http.client.HTTPConnection(host, port, timeout=10)
    with contextlib.closing(connection):
        connection.request("GET", path)
        answer = connection.getresponse()
        return answer.status, answer.read()


def test_play_says_where_it_is_and_ends_at_once(tmp_path: Path) -> None:
    with playing(tmp_path, "--port", "0") as play:
        port = play.port()
        assert get(port, "/")[0] == 200
        assert b'"features"' in get(port, "/api/health")[1]
        assert get(port, "/data/posttrainllm.json")[0] == 200
        assert play.end() == 0
        assert play.lines == [
            f"play: runs in {tmp_path / 'runs'}",
            f"play: http://127.0.0.1:{port}/   (Ctrl-C ends it)",
            "play: ended",
        ]
    assert list(tmp_path.iterdir()) == [], "nothing is made where nothing was asked for"


def test_a_busy_port_is_tried_upwards(tmp_path: Path) -> None:
    with socket.socket() as busy:
        busy.bind(("127.0.0.1", 0))
        busy.listen()
        taken = busy.getsockname()[1]
        with playing(tmp_path, "--port", str(taken), "--runs-dir", "elsewhere") as play:
            port = play.port()
            assert taken < port < taken + serve.TRIED
            assert play.lines[:2] == [
                f"play: port {taken} is taken, using {port}",
                f"play: runs in {tmp_path / 'elsewhere'}",
            ]
            assert play.end() == 0


def test_when_no_port_is_free_that_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(site, "SITE", a_page(tmp_path))
    with socket.socket() as busy:
        busy.bind(("127.0.0.1", 0))
        busy.listen()
        taken = busy.getsockname()[1]
        monkeypatch.setattr(serve, "TRIED", 1)
        assert main(["play", "--no-open", "--port", str(taken)]) == 2
    assert capsys.readouterr().err == (
        f"error: no port from {taken} to {taken} is free\n  give another one: --port\n"
    )


def a_page(folder: Path) -> Path:
    (folder / "index.html").write_text("<!doctype html><title>site</title>")
    return folder


def test_without_a_built_site_play_says_what_to_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(site, "SITE", tmp_path)
    assert main(["play"]) == 2
    assert capsys.readouterr().err.startswith(
        "error: the playground is not built in this installation\n  in a source tree run: make play"
    )


def test_runs_that_are_no_folder_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(site, "SITE", a_page(tmp_path))
    assert main(["play", "--no-open", "--runs-dir", str(tmp_path / "index.html")]) == 2
    assert capsys.readouterr().err.startswith(f"error: {tmp_path / 'index.html'} is not a folder")


@pytest.mark.parametrize("host", ["203.0.113.7", "no-such-host.invalid"])
def test_an_address_that_is_not_ours_is_refused(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    host: str,
) -> None:
    monkeypatch.setattr(site, "SITE", a_page(tmp_path))
    assert main(["play", "--no-open", "--host", host]) == 2
    assert capsys.readouterr().err.startswith(f"error: cannot listen on {host}: ")


def test_a_class_on_a_lan_is_told_what_browsers_do(tmp_path: Path) -> None:
    with playing(tmp_path, "--port", "0", "--host", "0.0.0.0") as play:
        port = play.port()
        text = "\n".join(play.lines)
        assert f"http://{socket.gethostname()}:{port}/ (they see the site and no runs)" in text
        assert "WebGPU and threads only on localhost or https" in text
        assert get(port, "/")[0] == 200
        assert play.end() == 0


@pytest.mark.skipif(not os.path.exists("/proc/net/if_inet6"), reason="no IPv6 here")
def test_the_other_loopback_works_too(tmp_path: Path) -> None:
    with playing(tmp_path, "--port", "0", "--host", "::1") as play:
        assert get(play.port(), "/", "::1")[0] == 200
        assert play.end() == 0


def test_a_second_interrupt_and_a_signal_end_it_too(tmp_path: Path) -> None:
    for number in (signal.SIGINT, signal.SIGTERM):
        with playing(tmp_path, "--port", "0") as play:
            play.port()
            play.process.send_signal(number)
            time.sleep(0.01)
            play.process.send_signal(number)
            assert play.process.wait(5) in (0, 130, -number)
            assert "Traceback" not in "\n".join(play.lines)


def test_the_makefile_has_one_line_a_stage_for_play() -> None:
    text = (ROOT / "Makefile").read_text(encoding="utf-8")
    assert re.search(r"^play: site ## ", text, re.MULTILINE)
    assert re.search(r"^site: \$\(VENV\)/\.site kernels ## ", text, re.MULTILINE)


@pytest.fixture
def builder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """tools/site.py over folders of its own, whose programs only say that they ran."""
    spec = importlib.util.spec_from_file_location("site_tool", ROOT / "tools" / "site.py")
    assert spec is not None
    assert spec.loader is not None
    tool = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tool)
    web, package = tmp_path / "web", tmp_path / "src" / "posttrainllm"
    for folder in (web / "src", web / "node_modules", package / "kernels" / "lib"):
        folder.mkdir(parents=True)
    (web / "package-lock.json").write_text("{}")
    (web / "src" / "page.ts").write_text("1")
    places = {"ROOT": tmp_path, "WEB": web, "PACKAGE": package, "SITE": package / "site"}
    places |= {"DATA": web / "public" / "data", "STAMP": package / "site" / ".made-of"}
    places |= {"TOOLS_STAMP": web / "node_modules" / ".made-of"}
    for name, path in places.items():
        monkeypatch.setattr(tool, name, path)

    def run(*command: str) -> None:
        print(*command)
        if command[:2] == ("npm", "run"):
            (web / "dist").mkdir(exist_ok=True)
            (web / "dist" / "index.html").write_text("a page " * 100)

    monkeypatch.setattr(tool, "run", run)
    monkeypatch.setattr(tool, "write_op_cases", lambda: None)
    monkeypatch.setattr("posttrainllm.export_web.write", lambda folder: print("data"))
    monkeypatch.setattr(sys, "argv", ["site.py"])
    return tool


def test_the_site_is_built_again_only_when_something_changed(
    builder: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    def said() -> list[str]:
        builder.main()
        return capsys.readouterr().out.splitlines()

    built = ["site: building the pages", "data", "npm run --silent build"]
    done = ["site: 1 files, 0.0 MB: web/dist, and in the package"]
    assert said() == ["site: installing the web tools", "npm ci", *built, *done]
    assert gzip.decompress((builder.SITE / "index.html.gz").read_bytes()) == b"a page " * 100
    assert said() == []
    (builder.WEB / "src" / "page.ts").write_text("2")
    assert said() == [*built, *done]
    (builder.WEB / "package-lock.json").write_text("{ }")
    assert said()[:2] == ["site: installing the web tools", "npm ci"]
    (builder.PACKAGE / "kernels" / "lib" / "new.wasm").write_text("x")
    assert said() == [*built, *done]
    builder.DATA.mkdir(parents=True)
    (builder.DATA / "posttrainllm.json").write_text("written by each build")
    assert said() == []


def test_the_site_is_built_without_the_test_tools() -> None:
    """The op cases of /kernels come from the tests, but ``make play`` installs none of their tools."""
    blocked = ("pytest", "hypothesis", "torch", "transformers", "wasmtime", "wgpu", "playwright")
    script = f"import sys; sys.modules.update(dict.fromkeys({blocked})); import op_vectors"
    path = os.pathsep.join([str(ROOT / "tests"), str(ROOT / "src"), str(ROOT)])
    environment = os.environ | {"PYTHONPATH": path}
    result = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, env=environment
    )
    assert result.returncode == 0, result.stderr
