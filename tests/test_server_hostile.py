"""The server against what no browser of ours sends: other sites, other names, broken and endless requests.

Each case must be answered in one line or closed, at once, with nothing on stderr (server_cases.py
looks at the end) and with the server well afterwards.
"""

from __future__ import annotations

import contextlib
import os
import random
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from posttrainllm.config import load_config
from posttrainllm.runs.folder import create_run
from server_cases import Server, running


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("hostile")
    with running(folder) as found:
        made = create_run(found.runs, load_config("tiny"), "mine")
        (made.path / "link.txt").symlink_to("/etc/passwd")
        (made.path / "checkpoints" / "step-000001").symlink_to("/etc")
        (made.path / "pipe.txt").unlink(missing_ok=True)
        os.mkfifo(made.path / "pipe.txt")
        (found.runs / "linked").symlink_to("/etc")
        yield found


@pytest.fixture(autouse=True)
def stays_well(server: Server) -> Iterator[None]:
    before = (server.runs / "mine" / "config.toml").read_bytes()
    yield
    began = time.monotonic()
    assert server.get("/api/health").status == 200
    assert time.monotonic() - began < 2
    assert (server.runs / "mine" / "config.toml").read_bytes() == before


# -- other sites -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "host",
    [
        "evil.example", "evil.example:80", "127.0.0.1.evil.example", "localhost.evil.example:8765",
        "127.0.0.1@evil.example", "evil.example#127.0.0.1", "0.0.0.0", "192.168.1.2", "2130706433",
        "", " ", "[::1", "127.0.0.1:99999", "127.0.0.1:x", "localhost/", "xn--lcalhost-c2a", "\xff",
    ],
)  # fmt: skip
def test_another_name_is_refused_whatever_is_asked(server: Server, host: str) -> None:
    for path in ("/", "/api/runs", "/data/posttrainllm.json"):
        answer = server.get(path, Host=host)
        assert answer.status in (400, 403), path
        assert answer.body.count(b"\n") <= 1
        assert b"mine" not in answer.body


@pytest.mark.parametrize(
    "host", ["127.0.0.1", "localhost", "LOCALHOST:1", "localhost.", "[::1]:80"]
)
def test_the_names_of_this_machine_are_answered_at_any_port(server: Server, host: str) -> None:
    assert server.get("/", Host=host).status == 200


def test_two_host_headers_or_none_are_refused(server: Server) -> None:
    for headers in ("", "Host: 127.0.0.1\r\nHost: evil.example\r\n"):
        found = server.raw(f"GET / HTTP/1.1\r\n{headers}Connection: close\r\n\r\n".encode())
        assert found.startswith(b"HTTP/1.1 400 "), headers
    assert server.raw(b"GET /api/runs HTTP/1.0\r\n\r\n").startswith(b"HTTP/1.1 400 ")


@pytest.mark.parametrize(
    "origin",
    ["http://evil.example", "null", "", "http://127.0.0.1", "https://127.0.0.1:{port}",
     "http://localhost:{port}", "http://127.0.0.1:{port}/", "http://127.0.0.1:{port}.evil.example"],
)  # fmt: skip
def test_a_page_of_another_site_writes_nothing(server: Server, origin: str) -> None:
    given = origin.replace("{port}", str(server.port))
    for method, path, body in (
        ("POST", "/api/runs", {"name": "theirs"}),
        ("PUT", "/api/runs/mine/files/config.toml", b"x"),
        ("PATCH", "/api/runs/mine/files/metrics.jsonl", b"x\n"),
        ("DELETE", "/api/runs/mine", None),
        ("POST", "/api/runs/mine/rename", {"name": "theirs"}),
    ):
        answer = server.ask(method, path, body, Origin=given, X_Offset="0")
        assert answer.status == 403, method
        assert answer.json()["error"] == "only this server's own pages may change anything here"
    assert not (server.runs / "theirs").exists()


def test_writing_without_an_origin_is_refused(server: Server) -> None:
    content = b"POST /api/runs HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 15\r\nConnection: close\r\n\r\n"
    found = server.raw(content + b'{"name":"them"}')
    assert found.startswith(b"HTTP/1.1 403 ")
    assert not (server.runs / "them").exists()


@pytest.mark.parametrize(
    "headers",
    [
        {"Sec_Fetch_Site": "cross-site"},
        {"Sec_Fetch_Site": "same-site"},
        {"Origin": "http://evil.example"},
        {"Origin": "null", "Sec_Fetch_Site": "cross-site"},
    ],
)
def test_a_page_of_another_site_reads_no_run(server: Server, headers: dict[str, str]) -> None:
    for path in ("/api/runs", "/api/runs/mine/files/config.toml", "/api/runs/mine/events"):
        assert server.get(path, **headers).status == 403
    assert server.get("/", **headers).status == 200, "a link to the playground works"


def test_no_answer_allows_another_site(server: Server) -> None:
    for headers in ({}, {"Origin": "http://evil.example"}):
        for path in ("/", "/api/health", "/data/posttrainllm.json"):
            assert not [
                name
                for name in server.get(path, **headers).headers
                if name.startswith("access-control")
            ]


# -- other places ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "path",
    [
        "../../../etc/passwd", "..%2f..%2f..%2fetc%2fpasswd", "%2e%2e/%2e%2e/etc/passwd", "/etc/passwd",
        "%2fetc%2fpasswd", "..\\..\\x", "..%5c..%5cx", "link.txt", "checkpoints/step-000001/passwd",
        ".lock", "checkpoints", "", ".", "..", "pipe.txt", "config.toml%00", "config.toml%00.txt",
        "config.toml/", "config.toml/x", "%ff", "%c0%ae%c0%ae/x", "a" * 300, "/".join("a" * 40),
        "CON", "x:y", "config.toml%0d%0aX-Evil:%201", "%f0%28%8c%28", "\x7f",
    ],
)  # fmt: skip
def test_a_run_gives_its_own_plain_files_and_nothing_else(server: Server, path: str) -> None:
    found = server.raw(
        f"GET /api/runs/mine/files/{path} HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n\r\n".encode()
    )
    assert found.split(b" ")[1] in (b"404", b"400"), found[:200]
    assert b"root:" not in found
    assert b"X-Evil" not in found.partition(b"\r\n\r\n")[0]


@pytest.mark.parametrize(
    "name", ["linked", "..", ".", "%2e%2e", ".trash", "..%2fx", "%00", "nothing"]
)
def test_only_folders_of_the_runs_folder_are_runs(server: Server, name: str) -> None:
    for path in ("", "/files/passwd", "/events", "/hold"):
        found = server.raw(
            f"GET /api/runs/{name}{path} HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n\r\n".encode()
        )
        assert found.split(b" ")[1] == b"404", found[:200]
    assert "linked" not in [row["name"] for row in server.get("/api/runs").json()["runs"]]


@pytest.mark.parametrize(
    "path",
    [
        "evil.sh", ".lock", "../x", "..%2fx", "checkpoints/x", "checkpoints/step-000002/evil.py",
        "checkpoints/step-2/config.json", "checkpoints/../config.toml", "model.safetensors", "",
        "checkpoints/step-000002/../../config.toml", "config.toml%00", "link.txt", "checkpoints",
        "CONFIG.TOML", "config.toml/",
    ],
)  # fmt: skip
def test_only_what_a_run_has_is_written(server: Server, path: str) -> None:
    before = sorted(os.listdir(server.runs / "mine"))
    answer = server.put("mine", path, b"x")
    assert answer.status in (403, 404, 405), answer.body
    assert sorted(os.listdir(server.runs / "mine")) == before


def test_a_link_in_place_of_a_file_is_not_written_through(server: Server, tmp_path: Path) -> None:
    target = tmp_path / "target"
    target.write_text("safe")
    link = server.runs / "mine" / "samples.jsonl"
    link.symlink_to(target)
    try:
        answer = server.ask("PATCH", "/api/runs/mine/files/samples.jsonl", b"x\n", X_Offset="0")
        assert answer.status == 507
        assert target.read_text() == "safe"
        assert server.put("mine", "samples.jsonl", b"{}\n").status == 201
        assert (target.read_text(), link.is_symlink()) == ("safe", False)
    finally:
        link.unlink(missing_ok=True)


# -- broken and endless requests -------------------------------------------------------------------

HEAD = b"GET / HTTP/1.1\r\nHost: 127.0.0.1\r\n"


@pytest.mark.parametrize(
    "content",
    [
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(200),
        b"\r\n\r\n\r\n",
        b"GET\r\n\r\n",
        b"GET / HTTP/9.9\r\nHost: 127.0.0.1\r\n\r\n",
        b"GET /\x00 HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n",
        b"GET /\xff\xfe HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: 127.0.0.1\r\nX-A: \x00\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost : 127.0.0.1\r\n\r\n",
        b"GET / HTTP/1.1\nHost: 127.0.0.1\r\n folded\r\n\r\n",
        HEAD + b"Content-Length: -1\r\n\r\n",
        HEAD + b"Content-Length: 5\r\nContent-Length: 6\r\n\r\nabcdef",
        HEAD + b"Transfer-Encoding: chunked, gzip\r\n\r\n",
        HEAD + b"Transfer-Encoding: chunked\r\n\r\nZZ\r\n",
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        b"OPTIONS * HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n",
        b"GET http://evil.example/ HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n",
        b"CONNECT evil.example:80 HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n",
    ],
)
def test_what_is_no_request_is_answered_in_one_line_or_closed(
    server: Server, content: bytes
) -> None:
    began = time.monotonic()
    found = server.raw(content, timeout=0.5)
    assert time.monotonic() - began < 3
    assert b"Traceback" not in found
    assert not found or found.startswith(b"HTTP/1.1 4") or b"200 OK" in found[:20]


def test_requests_with_broken_bytes_do_no_harm(server: Server) -> None:
    """Good requests with some bytes changed, doubled or taken out: 400 of them, from a fixed seed."""
    rng = random.Random(7)
    good = [
        f"{method} /api/runs/mine/files/metrics.jsonl?x=%20 HTTP/1.1\r\nHost: 127.0.0.1:{server.port}\r\n"
        f"Origin: {server.origin}\r\nRange: bytes=0-1\r\nX-Offset: 0\r\nContent-Length: 2\r\n"
        "Accept-Encoding: gzip\r\nConnection: close\r\n\r\n{}".encode()
        for method in ("GET", "PATCH", "PUT", "DELETE")
    ]
    for _ in range(400):
        content = bytearray(rng.choice(good))
        for _ in range(rng.randint(1, 6)):
            at = rng.randrange(len(content))
            content[at : at + rng.randint(0, 3)] = rng.choice(
                [
                    bytes([rng.randrange(256)]),
                    b"",
                    bytes(content[at : at + 9]),
                    b"\r\n",
                    b"\0",
                    b"%00",
                ]
            )
        with socket.create_connection(("127.0.0.1", server.port)) as connection:
            connection.settimeout(5)
            with contextlib.suppress(ConnectionError):
                connection.sendall(content)
                connection.shutdown(socket.SHUT_WR)
                found = connection.recv(65536)
                assert not found or found.startswith(b"HTTP/1.1 ")
                assert b"mistake in posttrainllm" not in found, bytes(content)
    (server.runs / "mine" / "metrics.jsonl").unlink(missing_ok=True)


def test_headers_that_are_too_long_are_refused(server: Server) -> None:
    for content in (
        b"GET /" + b"a" * 200_000 + b" HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n",
        HEAD + b"X-Long: " + b"a" * 200_000 + b"\r\n\r\n",
        HEAD + b"".join(b"X-%d: 1\r\n" % number for number in range(20_000)) + b"\r\n",
    ):
        try:
            found = server.raw(content)
        except ConnectionError:  # closed before it was all sent
            continue
        assert found[:12] in (b"HTTP/1.1 400", b"")


def test_a_slow_client_is_let_go_and_holds_nobody_up(server: Server) -> None:
    slow = [socket.create_connection(("127.0.0.1", server.port)) for _ in range(60)]
    try:
        for connection in slow:
            connection.sendall(HEAD)
        began = time.monotonic()
        assert server.get("/").status == 200
        assert time.monotonic() - began < 1
    finally:
        for connection in slow:
            connection.close()


def test_headers_that_do_not_end_are_given_up(tmp_path: Path) -> None:
    with running(tmp_path, patience_s=0.5) as server:
        for content in (HEAD, b"", HEAD + b"\r\n" + HEAD):
            with socket.create_connection(("127.0.0.1", server.port)) as slow:
                slow.settimeout(5)
                slow.sendall(content)
                found = b""
                while piece := slow.recv(65536):  # until it is closed from the other side
                    found += piece
                assert found.startswith(b"HTTP/1.1 200" if content.endswith(HEAD * 2) else b"")


def test_a_body_larger_than_its_file_may_be_is_refused_early(server: Server) -> None:
    head = (
        f"PUT /api/runs/mine/files/config.toml HTTP/1.1\r\nHost: 127.0.0.1:{server.port}\r\n"
        f"Origin: {server.origin}\r\n"
    ).encode()
    length = b"Connection: close\r\nContent-Length: 99999999999\r\n\r\n"
    announced = server.raw(head + length)
    assert announced.startswith(b"HTTP/1.1 413 ")
    assert b"may have 1.0 MB" in announced
    with socket.create_connection(("127.0.0.1", server.port)) as connection:
        connection.settimeout(5)
        connection.sendall(head + b"Transfer-Encoding: chunked\r\n\r\n")
        answer = b""
        try:
            for _ in range(200):
                connection.sendall(b"10000\r\n" + bytes(0x10000) + b"\r\n")
        except ConnectionError:
            pass
        try:
            answer = connection.recv(65536)
        except ConnectionError:
            answer = b"HTTP/1.1 413 "
        assert answer.startswith(b"HTTP/1.1 413 ")
    assert [name for name in os.listdir(server.runs / "mine") if name.startswith(".up-")] == []


def test_a_body_that_is_cut_leaves_nothing(server: Server) -> None:
    head = (
        f"PUT /api/runs/mine/files/config.toml HTTP/1.1\r\nHost: 127.0.0.1:{server.port}\r\n"
        f"Origin: {server.origin}\r\nContent-Length: 1000\r\n\r\n"
    ).encode()
    for _ in range(5):
        with socket.create_connection(("127.0.0.1", server.port)) as connection:
            connection.sendall(head + b"half")
    for _ in range(100):
        left = [name for name in os.listdir(server.runs / "mine") if name.startswith(".up-")]
        if not left:
            break
        time.sleep(0.05)
    assert left == []


@pytest.mark.parametrize(
    "body",
    [b"", b"{", b"[]", b"null", b'"x"', b"\xff\xfe", b'{"name": 1}', b"[" * 90_000, b"1e999"],
)
def test_bodies_that_are_no_json_object_are_refused(server: Server, body: bytes) -> None:
    for path in ("/api/runs", "/api/runs/mine/rename"):
        answer = server.ask("POST", path, body)
        assert answer.status == 400
        assert answer.json()["error"]
    assert server.ask("POST", "/api/runs", b" " * 200_000).status == 413


def test_many_at_once_are_all_answered(server: Server) -> None:
    with ThreadPoolExecutor(40) as pool:
        found = list(pool.map(lambda _: server.get("/data/model.safetensors").status, range(200)))
    assert set(found) == {200}


# -- a class on a LAN ------------------------------------------------------------------------------


def test_on_a_lan_others_get_the_site_and_no_runs(tmp_path: Path) -> None:
    own = own_address()
    with running(tmp_path, host="0.0.0.0", lan=True) as server:
        for host in (f"{own}:{server.port}", socket.gethostname(), "localhost"):
            assert server.get("/", Host=host).status == 200
        for host in ("evil.example", "localhost.evil.example"):
            assert server.get("/", Host=host).status == 403
        assert server.get("/api/runs").status == 200
        with socket.create_connection((own, server.port)) as connection:
            ask = (
                f"GET /api/runs HTTP/1.1\r\nHost: {own}:{server.port}\r\nConnection: close\r\n\r\n"
            )
            connection.sendall(ask.encode())
            found = connection.recv(65536)
        others = own != "127.0.0.1"  # else this machine has no address that others could use
        assert found.startswith(b"HTTP/1.1 403 " if others else b"HTTP/1.1 200 ")


def own_address() -> str:
    """An address of this machine that others would use."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))  # sends nothing
        except OSError:
            return "127.0.0.1"
        return str(probe.getsockname()[0])
