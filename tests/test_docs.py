"""What README and the pages tell people to type works: their blocks are run as they stand."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
BLOCK = re.compile(r"^```(python|sh)\n(.*?)^```", re.MULTILINE | re.DOTALL)
PAGES = [
    "README.md",
    *(f"docs/{p}.md" for p in ("tour", "step", "notebook", "python", "fine-tuning", "formats")),
]
TEXT = "".join(
    f"The {n}th line of a text of one's own, which is about nothing.\n" for n in range(500)
)


@pytest.mark.parametrize("page", PAGES)
def test_the_blocks_of_a_page_run_in_order(page: str, tmp_path: Path) -> None:
    blocks = BLOCK.findall((ROOT / page).read_text())
    assert blocks, f"{page} shows nothing to type"
    (tmp_path / "my.txt").write_text(TEXT)
    environment = {
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "HOME": str(tmp_path),
        "PYTHONPATH": str(ROOT / "src"),
        "COLUMNS": "100",
    }
    script = 'set -euo pipefail\nposttrainllm() { python -m posttrainllm "$@"; }\n'
    for kind, text in blocks:  # the python blocks of a page share one session, cut at its sh blocks
        script += (
            f"python - <<'PYTHON'\n{_with_earlier(blocks, text)}PYTHON\n"
            if kind == "python"
            else text
        )
    done = subprocess.run(
        ["bash", "-c", script],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]


def _with_earlier(blocks: list[tuple[str, str]], text: str) -> str:
    """A python block with the imports of those before it, as a reader of the page has them."""
    lines: list[str] = []
    for kind, earlier in blocks:
        if earlier == text:
            break
        if kind == "python":
            lines += [
                line for line in earlier.splitlines() if line.startswith(("import ", "from "))
            ]
    return "\n".join([*lines, text])
