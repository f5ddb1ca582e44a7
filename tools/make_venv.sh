#!/bin/sh
# Make a virtual environment with the first Python >= 3.11 found. PYTHON=... names one instead.
set -eu
folder=$1
suitable() { "$1" -c 'import sys; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1; }

found=
for python in ${PYTHON:-python3 python3.13 python3.12 python3.11 python3.14 python}; do
    if suitable "$python"; then found=$python; break; fi
done
if [ -z "$found" ]; then
    echo "error: no Python 3.11 or newer found (tried: ${PYTHON:-python3, python3.11 to python3.14})" >&2
    echo "install one, or name it: make PYTHON=/path/to/python3.12 setup" >&2
    exit 2
fi
echo "setup: creating $folder with $("$found" --version)"
if ! log=$("$found" -m venv --clear "$folder" 2>&1); then
    echo "$log" >&2
    echo "error: '$found -m venv' failed; on Debian and Ubuntu: apt-get install python3-venv" >&2
    rm -rf "$folder"
    exit 2
fi
