"""Print requirements of pyproject.toml, one a line, for ``pip install -r``: the build's, or an extra's.

python tools/build_requires.py [EXTRA]
"""

import sys
import tomllib
from pathlib import Path

PROJECT = Path(__file__).parent.parent / "pyproject.toml"

tables = tomllib.loads(PROJECT.read_text(encoding="utf-8"))
if len(sys.argv) > 1:
    found = tables["project"]["optional-dependencies"][sys.argv[1]]
else:
    found = tables["build-system"]["requires"]
print(*found, sep="\n")
