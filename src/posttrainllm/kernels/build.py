"""Compile the C++ kernels, and find the compiled libraries again.

``setup.py`` calls :func:`compile_builds` when a wheel is made, and a developer calls
``python -m posttrainllm.kernels`` (``make kernels``). The compiler is zig's clang from PyPI
(``ziglang``), so no system compiler is needed; it is needed at build time only.

All ``cpp/*.cpp`` go into one shared library, once for every instruction set of the machine's
architecture. A small JSON file beside each library says what it was built from; its ``id`` is
what a training run records, because bit-identical results are promised for one build only.

This module imports nothing heavy: it runs inside an isolated build environment. Its functions are
about the libraries of this machine, or about those of the ``target`` they are given: WebAssembly's
stands in ``build_wasm.py``. Next: ``cpp/``.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import importlib.util
import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from posttrainllm.errors import EngineError

SOURCE_DIR = Path(__file__).parent / "cpp"
LIBRARY_DIR = Path(__file__).parent / "lib"

# -ffp-contract=off: a multiply and an add are fused only where a kernel says so, or two builds of
# one source would round differently. -fno-sanitize=all: zig turns its sanitizers on by default.
# -nostdlib++: the kernels use no C++ library, and building zig's own takes a minute a target.
FLAGS = (
    "-std=c++20",
    "-O3",
    "-fno-exceptions",
    "-fno-rtti",
    "-ffp-contract=off",
    "-fno-sanitize=all",
    "-nostdlib++",
    "-s",
    "-Wall",
    "-Wextra",
)

NATIVE_FLAGS = ("-pthread", "-shared")

# A missing symbol is an error of the build and not of the first import, and two builds in one process
# (the op tests load all of them) never call into each other. The other formats do so by default.
ELF_FLAGS = ("-fPIC", "-Wl,-z,defs", "-Wl,-Bsymbolic")


@dataclass(frozen=True)
class Target:
    """What the libraries of one machine look like: zig's triple, file suffix, processor a build."""

    triple: str
    suffix: str
    processors: dict[str, str]
    prefix: str = "libposttrain-"

    def command(self, build: str) -> list[str]:
        """Compiler arguments for one build, without sources and output."""
        elf = ELF_FLAGS if self.suffix == ".so" else ()
        mcpu = f"-mcpu={self.processors[build]}"
        return ["cc", "-x", "c++", *FLAGS, *NATIVE_FLAGS, *elf, "-target", self.triple, mcpu]

    def units(self, build: str, sources: Path) -> list[Path]:
        """The files that are compiled for one build."""
        return sorted(sources.glob("*.cpp"))

    def finish(self, build: str, library: Path) -> None:
        """What is done to a library after linking: nothing."""

    def library(self, build: str, folder: Path) -> Path:
        """Where the library of one build lies in a folder."""
        return folder / f"{self.prefix}{build}{self.suffix}"


@cache
def host_target() -> Target:
    """The target of this machine.

    Raises: EngineError on an architecture that no build exists for.
    """
    machine = {"amd64": "x86_64", "arm64": "aarch64"}.get(
        platform.machine().lower(), platform.machine().lower()
    )
    if machine == "x86_64":
        processors = {"plain": "baseline", "avx2": "x86_64_v3", "avx512": "x86_64_v4"}
    elif machine == "aarch64":  # NEON belongs to the baseline
        processors = {"plain": "baseline"}
    else:
        raise EngineError(
            f"no kernels for the processor architecture '{platform.machine()}'",
            "x86_64 and aarch64 (arm64) are supported; the numpy engine runs anywhere",
        )
    if sys.platform == "darwin":
        return Target(f"{machine}-macos", ".dylib", processors)
    if sys.platform == "win32":
        return Target(f"{machine}-windows-gnu", ".dll", processors)
    libc = "gnu.2.17" if platform.libc_ver()[0] == "glibc" else "musl"
    return Target(f"{machine}-linux-{libc}", ".so", processors)


def library_path(build: str, target: Target | None = None) -> Path:
    """Where the library of ``build`` ("plain", "avx2", "avx512") is, built or not."""
    target = target or host_target()
    if build not in target.processors:
        known = ", ".join(target.processors)
        raise EngineError(f"no kernel build '{build}' on {target.triple}", f"builds here: {known}")
    return target.library(build, LIBRARY_DIR)


def available_builds(target: Target | None = None) -> list[str]:
    """The builds whose library is there, from the most portable to the fastest.

    Whether this processor can run one is for the engine to find out before it loads it.
    """
    target = target or host_target()
    return [build for build in target.processors if library_path(build, target).is_file()]


def build_info(build: str, target: Target | None = None) -> dict[str, str]:
    """What the library of ``build`` was made from: id, compiler, command, hashes.

    Raises: EngineError when it has not been built.
    """
    path = library_path(build, target)
    try:
        info: dict[str, str] = json.loads(path.with_suffix(".json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        raise EngineError(
            f"the '{build}' kernels are not built ({path} is missing or incomplete)",
            "in a source tree run: make kernels; otherwise install the package again",
        ) from None
    return info


def build_id(build: str, target: Target | None = None) -> str:
    """Sixteen hex digits that change with the sources, the flags and the compiler."""
    return build_info(build, target)["id"]


def stale_builds(target: Target | None = None) -> list[str]:
    """The builds that are missing or were made from other sources or flags than those here now."""
    target = target or host_target()
    stale = []
    for build in target.processors:
        try:
            info = build_info(build, target)
        except EngineError:
            stale.append(build)
            continue
        now = _describe(build, target, info["compiler"], _hash_sources(SOURCE_DIR))
        if now["id"] != info["id"] or not library_path(build, target).is_file():
            stale.append(build)
    return stale


def compile_builds(
    target: Target | None = None,
    *,
    builds: Iterable[str] | None = None,
    sources: Path = SOURCE_DIR,
    destination: Path = LIBRARY_DIR,
    force: bool = False,
    report: Callable[[str], None] = lambda line: None,
    warn: Callable[[str], None] = lambda text: None,
) -> list[str]:
    """Compile every build whose sources, flags or compiler changed; return those compiled.

    ``report`` is called with one line a stage, ``warn`` with the compiler's warnings.
    Libraries in ``destination`` that belong to another target are removed, so that a wheel carries
    only its own.

    Raises: EngineError with the compiler's output when a source does not compile.
    """
    target = target or host_target()
    chosen = list(builds or target.processors)
    for build in chosen:
        if build not in target.processors:
            raise EngineError(f"no kernel build '{build}' on {target.triple}")
    zig, compiler = _find_compiler()
    digest = _hash_sources(sources)
    wanted = {build: _describe(build, target, compiler, digest) for build in chosen}
    destination.mkdir(parents=True, exist_ok=True)
    _remove_foreign(destination, target)
    todo = [b for b in chosen if force or not _is_current(destination, b, target, wanted[b])]
    if not todo:
        return []
    count = f"{len(todo)} build{'s' if len(todo) > 1 else ''}"
    report(f"compiling {count} for {target.triple} ({', '.join(todo)}; about {5 * len(todo)} s)")
    started = time.monotonic()
    with (
        tempfile.TemporaryDirectory(dir=destination, prefix=".scratch-") as scratch,
        ThreadPoolExecutor(max_workers=min(len(todo), os.cpu_count() or 1)) as pool,
    ):
        environment = _zig_environment(Path(scratch))

        def compile_one(build: str) -> None:
            folder = Path(scratch) / build
            folder.mkdir()
            library = target.library(build, folder)
            units = map(str, target.units(build, sources))
            command = [zig, *target.command(build), *units, "-o", str(library)]
            result = subprocess.run(command, capture_output=True, text=True, env=environment)
            if result.returncode != 0:
                raise EngineError(f"the '{build}' kernels do not compile", result.stderr.strip())
            if result.stderr.strip():
                warn(f"{build}: {result.stderr.strip()}")
            target.finish(build, library)
            info = wanted[build] | {"library_sha256": _hash_file(library)}
            final = target.library(build, destination)
            final.with_suffix(".json").unlink(missing_ok=True)
            library.replace(final)  # the description comes last: without it a library is not ours
            record = folder / "info.json"
            record.write_text(json.dumps(info, indent=1) + "\n", encoding="utf-8")
            record.replace(final.with_suffix(".json"))

        list(pool.map(compile_one, todo))
    report(f"compiled in {time.monotonic() - started:.0f} s")
    return todo


def _find_compiler() -> tuple[str, str]:
    """Path of the zig binary that the ziglang package carries, and its version in words."""
    spec = importlib.util.find_spec("ziglang")
    if spec is None or not spec.submodule_search_locations:
        raise EngineError(
            "the compiler is missing: the Python package 'ziglang' is not installed",
            "run: make setup   (or pip install the build-system.requires of pyproject.toml)",
        )
    zig = Path(spec.submodule_search_locations[0]) / ("zig.exe" if os.name == "nt" else "zig")
    return str(zig), f"zig {importlib.metadata.version('ziglang')}"


def _zig_environment(scratch: Path) -> dict[str, str]:
    """The environment for the compiler, with its cache kept out of the home folder.

    In a source tree the cache is build/zig-cache; it saves a few seconds on the next compilation.
    """
    root = SOURCE_DIR.parents[3]
    folder = (
        root / "build" / "zig-cache" if (root / "pyproject.toml").is_file() else scratch / "zig"
    )
    cache_dir = os.environ.get("ZIG_GLOBAL_CACHE_DIR", str(folder))
    return os.environ | {"ZIG_GLOBAL_CACHE_DIR": cache_dir, "ZIG_LOCAL_CACHE_DIR": cache_dir}


def _hash_file(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _hash_sources(folder: Path) -> str:
    """One hash over the names and contents of all C++ files.

    Raises: EngineError when there are none.
    """
    files = sorted(path for path in folder.glob("*") if path.suffix in (".cpp", ".h"))
    if not any(path.suffix == ".cpp" for path in files):
        raise EngineError(f"no C++ kernels in {folder}", "the source tree is incomplete")
    listing = "".join(f"{path.name} {_hash_file(path)}\n" for path in files)
    return hashlib.sha256(listing.encode()).hexdigest()


def _describe(build: str, target: Target, compiler: str, sources: str) -> dict[str, str]:
    info = {
        "build": build,
        "compiler": compiler,
        "command": " ".join(target.command(build)),
        "sources_sha256": sources,
    }
    return {"id": hashlib.sha256(json.dumps(info).encode()).hexdigest()[:16], **info}


def _is_current(folder: Path, build: str, target: Target, wanted: dict[str, str]) -> bool:
    library = target.library(build, folder)
    try:
        info = json.loads(library.with_suffix(".json").read_text(encoding="utf-8"))
        current = info["id"] == wanted["id"] and info["library_sha256"] == _hash_file(library)
    except (OSError, ValueError, KeyError, TypeError):
        return False
    return bool(current)


def _remove_foreign(folder: Path, target: Target) -> None:
    ours = {target.library(build, folder) for build in target.processors}
    ours |= {path.with_suffix(".json") for path in ours}
    for path in folder.glob(f"{target.prefix}*"):
        if path not in ours:
            shutil.rmtree(path) if path.is_dir() else path.unlink()
