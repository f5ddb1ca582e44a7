"""Fixtures of the tests that open texts: files to write, a cache of their own, a pipe.

PYTEST_DONT_REWRITE: the tests import this module before they register its fixtures.
"""

from __future__ import annotations

import io
import sys

import pytest

from posttrainllm.errors import CorpusError
from posttrainllm.text import cache as textcache
from posttrainllm.text import corpus
from posttrainllm.wording import in_terminal

TEXT = b"".join(b"line %d of a text that is long enough\n" % number for number in range(200))


@pytest.fixture
def cache(tmp_path):
    return tmp_path / "cache"


@pytest.fixture
def write(tmp_path):
    def write(name, content=TEXT):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
        return str(path)

    return write


@pytest.fixture
def open_text(cache):
    def open_text(*sources, **options):
        return corpus.open_corpus(sources, **{"val_fraction": 0.1, "cache_dir": cache, **options})

    return open_text


@pytest.fixture
def big_files(monkeypatch):
    """Every file is a large one: mapped, joined in the cache, remembered."""
    monkeypatch.setattr(corpus, "READ_WHOLE", 0)
    monkeypatch.setattr(textcache, "_SETTLED", -(10**18))


@pytest.fixture
def pipe(monkeypatch):
    def pipe(content):
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(content)))

    return pipe


def whole(text):
    """Both parts of a corpus as bytes."""
    return text.train_text.tobytes() + text.val_text.tobytes()


def refusal(open_text, *sources, **options):
    """Return the one line and the next action with which sources are refused, as a terminal shows them."""
    with pytest.raises(CorpusError) as caught:
        open_text(*sources, **options)
    assert "\n" not in caught.value.message
    assert caught.value.hint
    return f"{caught.value.message} / {in_terminal(caught.value.hint)}"
