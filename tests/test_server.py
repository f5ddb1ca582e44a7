"""The playground's server: the site's files with their headers, and the API of runs."""

from __future__ import annotations

import base64
import gzip
import hashlib
import json
import os
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from posttrainllm import __version__
from posttrainllm.config import load_config, to_toml
from posttrainllm.errors import CheckpointError
from posttrainllm.gallery.catalogue import FOLDER as GALLERY
from posttrainllm.runs.checkpoint_folder import list_checkpoints, newest_checkpoint
from posttrainllm.runs.folder import Run, create_run, describe_run, list_runs
from saved import save
from server_cases import Server, running

NUMBERS = count()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with running(tmp_path_factory.mktemp("server")) as found:
        yield found


@pytest.fixture
def run(server: Server) -> str:
    """A run of a tab: a folder with a configuration."""
    name = f"of-a-tab-{next(NUMBERS)}"
    assert server.ask("POST", "/api/runs", {"name": name}).status == 201
    assert server.put(name, "config.toml", config_text()).status == 201
    return name


def config_text(preset: str = "tiny") -> bytes:
    return to_toml(load_config(preset)).encode()


# -- the site --------------------------------------------------------------------------------------


def test_every_answer_is_isolated_and_loads_nothing_from_outside(server: Server) -> None:
    for path in ("/", "/train/", "/_astro/page.abc123.js", "/nothing", "/api/health", "/api/none"):
        headers = server.get(path).headers
        assert headers["cross-origin-opener-policy"] == "same-origin"
        assert headers["cross-origin-embedder-policy"] == "require-corp"
        assert headers["cross-origin-resource-policy"] == "same-origin"
        assert headers["x-content-type-options"] == "nosniff"
        policy = headers["content-security-policy"]
        assert policy.startswith("default-src 'none'")
        assert "http" not in policy
        assert "unsafe-eval" not in policy.replace("wasm-unsafe-eval", "")


def test_a_page_may_run_its_own_inline_script_and_no_other(server: Server) -> None:
    [digest] = re.findall(r"'sha256-([^']+)'", server.get("/").headers["content-security-policy"])
    script = b'document.title = "ran";'
    assert base64.b64decode(digest) == hashlib.sha256(script).digest()
    assert "sha256" not in server.get("/train/").headers["content-security-policy"]


@pytest.mark.parametrize(
    ("path", "kind"),
    [
        ("/", "text/html; charset=utf-8"),
        ("/_astro/page.abc123.js", "text/javascript; charset=utf-8"),
        ("/sw.js", "text/javascript; charset=utf-8"),
        ("/data/posttrainllm.json", "application/json"),
        ("/data/posttrain-control.wasm", "application/wasm"),
        ("/data/wgsl/add.wgsl", "text/plain; charset=utf-8"),
        ("/data/model.safetensors", "application/octet-stream"),
    ],
)
def test_content_types_are_those_that_browsers_want(server: Server, path: str, kind: str) -> None:
    assert server.get(path).headers["content-type"] == kind


def test_hashed_files_are_kept_and_all_others_asked_for_again(server: Server) -> None:
    kept = server.get("/_astro/page.abc123.js").headers["cache-control"]
    assert kept == "public, max-age=31536000, immutable"
    for path in ("/", "/sw.js", "/data/posttrainllm.json"):
        answer = server.get(path)
        assert answer.headers["cache-control"] == "no-cache"
        again = server.get(path, If_None_Match=answer.headers["etag"])
        assert (again.status, again.body) == (304, b"")
        assert again.headers["etag"] == answer.headers["etag"]
        assert server.get(path, If_None_Match='"other", W/"x"').status == 200


def test_a_page_that_was_built_again_is_new_at_once(server: Server) -> None:
    page = server.site / "train" / "index.html"
    before = server.get("/train/")
    page.write_text("<!doctype html><script>1</script>")
    after = server.get("/train/", If_None_Match=before.headers["etag"])
    assert after.status == 200
    assert b"<script>1" in after.body
    assert "sha256-" in after.headers["content-security-policy"]
    page.write_bytes(before.body)


@pytest.mark.parametrize(
    ("wanted", "status", "start", "end"),
    [
        ("bytes=0-9", 206, 0, 10),
        ("bytes=1000-", 206, 1000, None),
        ("bytes=-5", 206, -5, None),
        ("bytes=5-5", 206, 5, 6),
        ("bytes=0-99999999", 206, 0, None),
        ("bytes=0-1,5-6", 200, 0, None),
        ("bytes=9-2", 200, 0, None),
        ("bytes=-", 200, 0, None),
        ("rows=1-2", 200, 0, None),
        ("bytes=99999999-", 416, 0, 0),
        ("bytes=-0", 416, 0, 0),
    ],
)
def test_ranges_are_what_was_asked_for(
    server: Server, wanted: str, status: int, start: int, end: int | None
) -> None:
    content = (server.site / "data" / "model.safetensors").read_bytes()
    answer = server.get("/data/model.safetensors", Range=wanted)
    assert answer.status == status
    if status == 416:
        assert answer.headers["content-range"] == f"bytes */{len(content)}"
    else:
        assert answer.body == content[start:end]
    if status == 206:
        first = start % len(content)
        last = first + len(answer.body) - 1
        assert answer.headers["content-range"] == f"bytes {first}-{last}/{len(content)}"


def test_a_range_of_an_older_file_is_answered_with_the_whole_new_one(server: Server) -> None:
    tag = server.get("/data/model.safetensors").headers["etag"]
    for asked, status in ((tag, 206), ('"older"', 200)):
        assert (
            server.get("/data/model.safetensors", Range="bytes=0-9", If_Range=asked).status
            == status
        )


def test_what_was_compressed_beforehand_is_sent_so(server: Server) -> None:
    plain = server.get("/big.txt")
    for accepted in ("gzip", "br, gzip;q=0.5", "*"):
        packed = server.get("/big.txt", Accept_Encoding=accepted)
        assert packed.headers["content-encoding"] == "gzip"
        assert packed.headers["content-type"] == "text/plain; charset=utf-8"
        assert packed.headers["vary"] == "Accept-Encoding"
        assert gzip.decompress(packed.body) == plain.body
        assert packed.headers["etag"] != plain.headers["etag"]
    for refused in ("identity", "gzip;q=0", "br", ""):
        assert "content-encoding" not in server.get("/big.txt", Accept_Encoding=refused).headers
    ranged = server.get("/big.txt", Accept_Encoding="gzip", Range="bytes=0-4")
    assert (ranged.status, ranged.body) == (206, b"to be")
    assert server.get("/big.txt.gz").status == 404


def test_head_has_the_headers_of_get_and_no_body(server: Server) -> None:
    for path in ("/", "/data/model.safetensors", "/nothing"):
        got, head = server.get(path), server.ask("HEAD", path)
        assert (head.status, head.body) == (got.status, b"")
        assert head.headers["content-length"] == got.headers["content-length"]


def test_a_page_without_its_slash_is_sent_there(server: Server) -> None:
    answer = server.get("/train")
    assert (answer.status, answer.headers["location"]) == (308, "/train/")


@pytest.mark.parametrize(
    "path",
    [
        "/nothing", "/secret", "/.hidden", "/data", "/data/", "/../runs/x", "/..%2fruns", "/%2e%2e/x",
        "//etc/hostname", "/data/%00", "/data/posttrainllm.json%00.html", "/data\\posttrainllm.json",
        "/%ff", "/" + "a" * 5000, "/" + "a/" * 300, "/train/index.html/", "/C:/x", "/data/wgsl/..",
    ],
)  # fmt: skip
def test_nothing_but_the_sites_own_files_is_there(server: Server, path: str) -> None:
    answer = server.get(path)
    assert answer.status == 404
    assert answer.body == b"there is nothing here\n"


def test_a_browser_at_a_wrong_address_gets_the_sites_own_page(server: Server) -> None:
    for path in ("/nothing", "/deep/below/nothing/", "/data/"):
        answer = server.get(path, Accept="text/html,application/xhtml+xml,*/*;q=0.8")
        assert answer.status == 404
        assert answer.headers["content-type"] == "text/html; charset=utf-8"
        assert b"<title>nothing</title>" in answer.body
        assert "'sha256-" in answer.headers["content-security-policy"]  # its script may run
        assert answer.headers["cache-control"] == "no-store"


def test_the_models_of_the_site_are_those_of_the_package(server: Server) -> None:
    name = next(path.name for path in GALLERY.iterdir() if path.suffix == ".safetensors")
    answer = server.get(f"/data/models/{name}")
    assert answer.body == (GALLERY / name).read_bytes()
    assert answer.headers["cache-control"] == "no-cache"
    for wrong in ("nothing.safetensors", "../__init__.py", "..%2f__init__.py", ""):
        assert server.get(f"/data/models/{wrong}").status == 404


def test_a_site_is_only_read(server: Server) -> None:
    for method in ("POST", "PUT", "DELETE", "PATCH", "OPTIONS", "TRACE", "FOO"):
        answer = server.ask(method, "/")
        assert answer.status == 405, method
        assert answer.headers["allow"] == "GET, HEAD"


# -- runs ------------------------------------------------------------------------------------------


def test_the_api_says_what_it_is(server: Server) -> None:
    found = server.get("/api/health").json()
    assert (found["name"], found["version"]) == ("posttrainllm", __version__)
    assert "runs" in found["features"]
    assert server.get("/api/health").headers["cache-control"] == "no-store"


def test_a_run_of_a_terminal_is_listed_and_read(server: Server) -> None:
    made = create_run(server.runs, load_config("tiny"), "of-a-terminal")
    made.metrics.append({"step": 10, "loss": 3.5, "val_loss": None})
    rows = {row["name"]: row for row in server.get("/api/runs").json()["runs"]}
    row = describe_run(made)
    assert rows["of-a-terminal"] == {
        "name": row.name, "preset": "tiny", "state": "stopped", "step": 10, "steps": 2000,
        "loss": 3.5, "best_val_loss": None, "bytes": row.bytes,
        "modified": row.modified.isoformat(timespec="milliseconds") if row.modified else None,
    }  # fmt: skip
    text = server.get("/api/runs/of-a-terminal/files/metrics.jsonl")
    assert text.body == (made.path / "metrics.jsonl").read_bytes()
    found = server.get("/api/runs/of-a-terminal").json()
    assert [file["path"] for file in found["files"]] == ["config.toml", "metrics.jsonl"]
    assert not found["locked"]
    with made.lock():
        assert server.get("/api/runs/of-a-terminal").json()["locked"]
        rows = {row["name"]: row for row in server.get("/api/runs").json()["runs"]}
        assert rows["of-a-terminal"]["state"] == "running"


@pytest.fixture
def source(tmp_path: Path) -> list[Path]:
    """The files of a checkpoint of step 7, by the terminal's own code, its hashes last."""
    files = save(tmp_path, 7).iterdir()
    return sorted(files, key=lambda file: (file.name == "hashes.json", file.name))


def test_a_checkpoint_appears_when_its_hashes_came_and_hold(
    server: Server, run: str, source: list[Path]
) -> None:
    folder, place = server.runs / run / "checkpoints", "checkpoints/step-000007"
    for file in source[:-1]:
        assert server.put(run, f"{place}/{file.name}", file.read_bytes()).status == 201
        assert list_checkpoints(folder) == []
    assert server.get(f"/api/runs/{run}/files/{place}/config.json").status == 404
    assert server.put(run, f"{place}/hashes.json", source[-1].read_bytes()).status == 201
    newest, notices = newest_checkpoint(folder)
    assert (newest.name, notices) == ("step-000007", ())
    for file in source:
        assert server.get(f"/api/runs/{run}/files/{place}/{file.name}").body == file.read_bytes()
    assert [path.name for path in folder.iterdir()] == ["step-000007"]
    assert server.ask("DELETE", f"/api/runs/{run}/files/{place}").status == 200
    assert list(folder.iterdir()) == []


def test_hashes_that_do_not_hold_make_no_checkpoint(
    server: Server, run: str, source: list[Path]
) -> None:
    folder, place = server.runs / run / "checkpoints", "checkpoints/step-000007"
    contents = {file.name: file.read_bytes() for file in source}
    for name, content in contents.items():
        damaged = (
            content[:-1] + bytes([content[-1] ^ 1]) if name == "model.safetensors" else content
        )
        answer = server.put(run, f"{place}/{name}", damaged)
    assert answer.status == 422
    assert "model.safetensors has changed" in answer.json()["error"]
    assert list_checkpoints(folder) == []
    for name in ("model.safetensors", "hashes.json"):
        assert server.put(run, f"{place}/{name}", contents[name]).status == 201
    assert newest_checkpoint(folder)[0].name == "step-000007"


def test_lines_are_appended_and_cut_back(server: Server, run: str) -> None:
    path = f"/api/runs/{run}/files/metrics.jsonl"
    lines = [json.dumps({"step": step, "loss": 1.0}).encode() + b"\n" for step in (1, 2, 3)]
    assert server.ask("PATCH", path, lines[0] + lines[1], X_Offset="0").status == 200
    at = len(lines[0] + lines[1])
    assert server.ask("PATCH", path, lines[2], X_Offset=str(at)).json() == {
        "bytes": at + len(lines[2])
    }
    assert [line["step"] for line in Run(server.runs / run).metrics.read()] == [1, 2, 3]
    assert server.ask("PATCH", path, b"", X_Offset=str(len(lines[0]))).status == 200
    assert server.get(path).body == lines[0]
    too_far = server.ask("PATCH", path, b"x\n", X_Offset="9999")
    assert (too_far.status, "bytes" in too_far.json()["error"]) == (409, True)
    for offset in ("-1", "a", "1e3", "9" * 30, "\u0661"):
        assert (
            server.ask("PATCH", path, b"", X_Offset=offset.encode().decode("latin-1")).status == 400
        )
    assert server.ask("PATCH", path, b"").status == 400
    assert (
        server.ask("PATCH", f"/api/runs/{run}/files/config.toml", b"", X_Offset="0").status == 403
    )


def test_a_run_is_renamed_removed_and_brought_back(server: Server, run: str) -> None:
    there = server.runs / run
    renamed = server.ask("POST", f"/api/runs/{run}/rename", {"name": "nicer"})
    assert (renamed.status, renamed.json()) == (200, {"name": "nicer"})
    assert not there.exists()
    removed = server.ask("DELETE", "/api/runs/nicer").json()
    assert "nicer" not in [row.name for row in list_runs(server.runs)]
    listed = server.get("/api/runs").json()
    assert removed["id"] in [entry["id"] for entry in listed["removed"]]
    assert server.ask("POST", "/api/runs", {"name": "nicer"}).status == 201
    back = server.ask("POST", "/api/runs/nicer/restore", {"id": removed["id"]})
    assert back.json() == {"name": "nicer-2"}
    assert (server.runs / "nicer-2" / "config.toml").is_file()
    assert server.ask("POST", "/api/runs/nicer/restore").status == 404
    gone = server.ask("DELETE", "/api/runs/nicer-2").json()
    assert server.ask("DELETE", f"/api/removed/{gone['id']}").status == 200
    assert server.ask("POST", "/api/runs/nicer-2/restore").status == 404
    assert server.ask("DELETE", "/api/removed/..").status == 404


@pytest.mark.parametrize("name", ["", "a/b", "..", ".x", "con", "x" * 200, "a\nb", " a", 7, None])
def test_names_that_a_run_cannot_have_are_refused(server: Server, run: str, name: Any) -> None:
    before = sorted(os.listdir(server.runs))
    made = server.ask("POST", "/api/runs", {"name": name})
    renamed = server.ask("POST", f"/api/runs/{run}/rename", {"name": name})
    assert (made.status, renamed.status) == (400, 400)
    assert made.json()["error"]
    assert sorted(os.listdir(server.runs)) == before


def test_a_name_that_is_taken_is_refused(server: Server, run: str) -> None:
    assert server.ask("POST", "/api/runs", {"name": run}).status == 409
    other = server.ask("POST", "/api/runs", {"name": "another"})
    assert other.status == 201
    assert server.ask("POST", "/api/runs/another/rename", {"name": run}).status == 409
    assert server.ask("DELETE", "/api/runs/another").status == 200


def test_nothing_is_written_while_a_terminal_trains(server: Server, run: str) -> None:
    asks = [
        ("PUT", f"/api/runs/{run}/files/config.toml", b"x"),
        ("PATCH", f"/api/runs/{run}/files/metrics.jsonl", b"x\n"),
        ("DELETE", f"/api/runs/{run}/files/config.toml", None),
        ("DELETE", f"/api/runs/{run}", None),
        ("POST", f"/api/runs/{run}/rename", {"name": "elsewhere"}),
    ]
    with Run(server.runs / run).lock():
        for method, path, body in asks:
            answer = server.ask(method, path, body, X_Offset="0")
            assert answer.status == 409, (method, path)
            assert "is being trained by process" in answer.json()["error"]
    assert (server.runs / run / "config.toml").read_bytes() == config_text()
    assert not (server.runs / run / "metrics.jsonl").exists()


def test_a_tab_holds_its_run_against_terminals_and_other_tabs(server: Server, run: str) -> None:
    path, body = f"/api/runs/{run}/files/metrics.jsonl", b'{"step": 1}\n'
    with server.events(f"/api/runs/{run}/hold") as events:
        token = events.next("held")[1]["token"]
        with pytest.raises(CheckpointError, match="is being trained by process"):
            Run(server.runs / run).lock()
        assert server.get(f"/api/runs/{run}/hold").status == 409
        assert server.ask("PATCH", path, body, X_Offset="0").status == 409
        assert server.ask("PATCH", path, body, X_Offset="0", X_Hold="wrong").status == 409
        assert server.ask("PATCH", path, body, X_Offset="0", X_Hold=token).status == 200
        assert server.get(f"/api/runs/{run}").json()["locked"]
    for _ in range(50):
        if not server.get(f"/api/runs/{run}").json()["locked"]:
            break
    with Run(server.runs / run).lock():
        pass
    assert server.ask("PATCH", path, body, X_Offset="0", X_Hold=token).status == 409


def test_puts_at_the_same_time_leave_one_of_them_whole(server: Server, run: str) -> None:
    contents = [bytes([65 + number]) * 300_000 for number in range(12)]
    with ThreadPoolExecutor(12) as pool:
        answers = list(pool.map(lambda text: server.put(run, "corpus.txt", text), contents))
    assert {answer.status for answer in answers} == {201}
    assert (server.runs / run / "corpus.txt").read_bytes() in contents
    assert [name for name in os.listdir(server.runs / run) if name.startswith(".up-")] == []
