"""Print the build requirements of pyproject.toml, one a line, for ``pip install -r``."""

import tomllib
from pathlib import Path

project = Path(__file__).parent.parent / "pyproject.toml"
print(*tomllib.loads(project.read_text(encoding="utf-8"))["build-system"]["requires"], sep="\n")
