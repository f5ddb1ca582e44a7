"""The rules of the layout that a reader relies on, checked on the source text.

Imports point one way: the table below is the order of the package, and each row says what it may
import. A new module goes into the row it belongs to; what does not fit there is a design question.
"""

from __future__ import annotations

import ast
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "src" / "posttrainllm"
ABOVE = "all rows above"


@dataclass(frozen=True)
class Row:
    """Modules (first part of the dotted name inside the package), and the rows they may import."""

    modules: tuple[str, ...]
    may_import: tuple[str, ...]


TABLE = {
    "errors": Row(("errors", "wording"), ()),
    "machine": Row(("machine", "storage", "figures", "whole_imports"), ("errors",)),
    "config": Row(
        ("settings", "shape", "presets", "engine_settings", "sections", "config"), ("errors",)
    ),
    "control": Row(("control",), ("errors",)),
    "ops": Row(("ops",), ("errors",)),
    "program": Row(("extent", "rounding", "program", "validate", "plan"), ("ops", "errors")),
    "optim": Row(("optim",), ("config", "program", "ops", "errors")),
    "model": Row(("model", "inspection"), ("config", "optim", "program", "ops", "errors")),
    "rewrites": Row(("fuse", "int8"), ("program", "ops", "errors")),
    "kernels": Row(("kernels",), ("errors",)),
    "engines": Row(("engines",), ("ops", "program", "control", "kernels", "machine", "errors")),
    "pytorch": Row(("pytorch",), ("config", "control", "engines", "machine", "errors")),
    "text": Row(("text",), ("config", "machine", "errors")),
    "files": Row(
        ("formats", "runs", "gallery"),
        ("config", "program", "text", "machine", "errors"),
    ),
    "training": Row(("training",), (ABOVE,)),
    "notebook": Row(("notebook",), (ABOVE,)),
    "web": Row(("export_web", "export_site", "site_terms"), (ABOVE,)),
    "api": Row(("api",), (ABOVE,)),
    "lab": Row(("lab",), (ABOVE,)),
    "surface": Row(("interrupts", "cli", "server", "__main__"), (ABOVE,)),
}

# Imported where they are used, so that a user who never needs them never waits for them.
HEAVY = {"torch", "transformers", "wgpu", "wasmtime", "uvicorn"}
HEAVY_ALLOWED = ("pytorch.",)  # the package is imported where it is used

PRINTS = {"cli", "kernels.__main__"}
MAX_LINES = 400
SUFFIXES = {".py", ".cpp", ".h", ".ts", ".wgsl"}


def module_name(path: Path) -> str:
    """Dotted name inside the package: ``kernels.build``; the package's own __init__ is ''."""
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {module_name(path): path for path in sorted(PACKAGE.rglob("*.py"))}
TREES = {name: ast.parse(path.read_text(encoding="utf-8")) for name, path in MODULES.items()}


def imports(name: str) -> Iterator[tuple[int, str]]:
    """Line and absolute dotted name of everything that a module imports, anywhere in it."""
    for node in ast.walk(TREES[name]):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                package = MODULES[name].relative_to(PACKAGE.parent).parent
                for _ in range(node.level - 1):
                    package = package.parent
                base = ".".join([*package.parts, base] if base else package.parts)
            yield from ((node.lineno, f"{base}.{alias.name}") for alias in node.names)


def our_imports(name: str) -> Iterator[tuple[int, str]]:
    """Line and name inside the package of every module of ours that a module imports."""
    for line, target in imports(name):
        if target.split(".")[0] != "posttrainllm":
            continue
        if target in ("posttrainllm", "posttrainllm.__version__"):
            continue  # the package's own names: the version
        inner = target.removeprefix("posttrainllm").removeprefix(".")
        while inner and inner not in MODULES:  # `from module import name`: drop the name
            inner = inner.rpartition(".")[0]
        yield line, inner


def row_of(name: str) -> str | None:
    first = name.split(".")[0]
    return next((row for row, content in TABLE.items() if first in content.modules), None)


def test_every_module_has_its_row_in_the_table():
    unknown = [name for name in MODULES if name and row_of(name) is None]
    assert not unknown, (
        f"add {unknown} to TABLE in {Path(__file__).name}, in the row they belong to"
    )


@pytest.mark.parametrize("name", [name for name in MODULES if name and row_of(name)])
def test_imports_point_one_way(name):
    row = row_of(name)
    assert row is not None
    order = list(TABLE)
    allowed = set(TABLE[row].may_import) | {row}
    if ABOVE in allowed:
        allowed |= set(order[: order.index(row)])
    wrong = {
        target: f"{MODULES[name].name}:{line} imports posttrainllm.{target} of '{row_of(target)}'"
        for line, target in our_imports(name)
        if row_of(target) not in allowed
    }
    assert not wrong, f"row '{row}' may import {sorted(allowed)}: " + "; ".join(wrong.values())


def test_no_two_modules_import_each_other():
    graph = {
        name: {target for _, target in our_imports(name) if target != name} for name in MODULES
    }
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        pytest.fail(f"a circle of imports: {' -> '.join(error.args[1])}")


def top_level(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """The statements that run at import: also under if, try and with, not under TYPE_CHECKING."""
    for node in body:
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            continue
        yield node
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            for field in ("body", "orelse", "finalbody", "handlers"):
                yield from top_level(getattr(node, field, []))


def test_heavy_packages_are_imported_where_they_are_used():
    wrong = []
    for name, tree in TREES.items():
        if name.startswith(HEAVY_ALLOWED):
            continue
        for node in top_level(tree.body):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom) and not node.level:
                names = [node.module or ""]
            found = HEAVY & {imported.split(".")[0] for imported in names}
            wrong += [f"{name or '__init__'}:{node.lineno} {package}" for package in sorted(found)]
    assert not wrong, f"import these inside the function that needs them: {wrong}"


def source_files() -> Iterator[Path]:
    for folder in ("src", "tests", "tools", "bench", "web"):
        for path in sorted((ROOT / folder).rglob("*")):
            if path.suffix in SUFFIXES and not {"node_modules", "dist"} & set(path.parts):
                yield path


def test_no_file_is_longer_than_a_reader_can_hold():
    lengths = {p: len(p.read_text(encoding="utf-8").splitlines()) for p in source_files()}
    long = [f"{p.relative_to(ROOT)}: {n}" for p, n in lengths.items() if n > MAX_LINES]
    assert not long, f"over {MAX_LINES} lines, split them by noun: {long}"


def test_no_module_is_a_drawer_for_everything():
    drawers = {"utils", "util", "common", "helpers", "misc"}
    found = [str(path.relative_to(ROOT)) for path in source_files() if path.stem in drawers]
    assert not found, f"name these after what they hold: {found}"


def test_only_the_command_line_prints():
    wrong = [
        f"{name}:{node.lineno}"
        for name, tree in TREES.items()
        if name not in PRINTS and name.split(".")[0] not in PRINTS
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and ast.unparse(node.func) in ("print", "sys.stdout.write")
    ]
    assert not wrong, f"return it, raise it or report it through a callback instead: {wrong}"


def test_the_command_line_starts_without_heavy_imports():
    command = [sys.executable, "-X", "importtime", "-c", "import posttrainllm.cli"]
    path = os.pathsep.join([str(PACKAGE.parent), os.environ.get("PYTHONPATH", "")])
    result = subprocess.run(
        command, capture_output=True, text=True, env=os.environ | {"PYTHONPATH": path}
    )
    assert result.returncode == 0, result.stderr
    loaded = {line.rsplit("|", 1)[-1].strip().split(".")[0] for line in result.stderr.splitlines()}
    slow = loaded & (HEAVY | {"numpy", "pydantic", "rich", "safetensors", "tokenizers"})
    assert not slow, f"import these inside the command that needs them: {sorted(slow)}"


def defined_in(module: str) -> set[str]:
    """Names at the top of a module, and the modules below it."""
    found = {
        name[len(module) + 1 :].partition(".")[0]
        for name in MODULES
        if name.startswith(f"{module}.")
    }
    for node in top_level(TREES[module].body):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            found.add(node.name)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            found |= {(alias.asname or alias.name).partition(".")[0] for alias in node.names}
        found |= {
            each.id
            for each in ast.walk(node)
            if isinstance(each, ast.Name) and isinstance(each.ctx, ast.Store)
        }
    return found


SCRIPTS = [path for folder in ("tools", "bench") for path in sorted((ROOT / folder).rglob("*.py"))]


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.name)
def test_what_a_script_imports_is_there(path):
    """Scripts that no test runs, since they take hours or a card, are not left behind when a name goes."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if (
            isinstance(node, ast.ImportFrom)
            and (node.module or "").partition(".")[0] == "posttrainllm"
        ):
            module = (node.module or "").partition(".")[2]
            lacking = {alias.name for alias in node.names} - defined_in(module)
            assert not lacking, f"{path.name}:{node.lineno}: {module} has no {sorted(lacking)}"


def git_log(*arguments: str) -> list[str]:
    """The lines of git log, or a skip where there is no history."""
    if shutil.which("git") is None or not (ROOT / ".git").exists():
        pytest.skip("no git history here")
    if (ROOT / ".git" / "shallow").exists():
        pytest.skip("a shallow clone: its oldest commit seems to change every file")
    command = ["git", "-C", str(ROOT), "log", *arguments]
    log = subprocess.run(command, capture_output=True, text=True)
    if log.returncode != 0:
        pytest.skip(f"git log does not work here: {log.stderr.strip()}")
    return log.stdout.splitlines()


def test_a_commit_that_changes_golden_values_says_so():
    """STYLE: a diff under tests/golden carries a ``Numerics:`` trailer that gives the reason.

    Where that was forgotten, a later commit says ``Numerics: <hash of that commit> <reason>``.
    """
    trailers = "%(trailers:key=Numerics,valueonly,separator=%x20)"
    reasons = git_log(f"--format={trailers}")
    changes = git_log(
        "--no-merges", "--abbrev=7", f"--format=%h%x09%s%x09{trailers}", "--", "tests/golden"
    )
    silent = [
        f"{commit} {subject}"
        for commit, subject, trailer in (line.split("\t") for line in changes)
        if not trailer.strip() and not any(commit in reason for reason in reasons)
    ]
    assert not silent, f"these commits change tests/golden without a Numerics: trailer: {silent}"
