"""Models and places that the user may not read or write: one line that says which, and nothing left behind."""

from __future__ import annotations

import os

import pytest

from hostile_zips import run_folder
from import_cases import model_folder, tinygpt
from needs import require
from posttrainllm.errors import CheckpointError
from posttrainllm.text.tokenizer_files import load as load_tokenizer
from posttrainllm.training import exporting
from posttrainllm.training.exporting import export_model
from posttrainllm.training.importing import import_model
from posttrainllm.training.models import find_model
from saved import save
from test_disks import folder_of_nobody

require("tokenizers")

ALLOWED = "change its permissions, or copy it to where you may read it"


@pytest.fixture
def place():
    """A folder of a user who is not root: root may read and write anything."""
    with folder_of_nobody() as folder:
        yield folder


CLOSED = {
    "a folder that cannot be listed": (model_folder, ".", 0o300, "."),
    "a folder that cannot be entered": (model_folder, ".", 0o600, "config.json"),
    "its configuration": (model_folder, "config.json", 0, "config.json"),
    "its weights": (model_folder, "model.safetensors", 0, "model.safetensors"),
    "its tokenizer": (model_folder, "tokenizer.json", 0, "tokenizer.json"),
    "a file": (tinygpt, ".", 0, "."),
    "the checkpoints of a run": (run_folder, "checkpoints", 0, "checkpoints"),
}


@pytest.mark.parametrize("case", CLOSED)
def test_what_may_not_be_read_is_named_with_a_next_step(place, case):
    make, closed, mode, named = CLOSED[case]
    source = make(place)
    (source / closed).chmod(mode)
    for refused in (
        lambda: import_model(source, runs_dir=place / "runs"),
        lambda: find_model(str(source), place / "runs"),
    ):
        with pytest.raises(CheckpointError) as caught:
            refused()
        assert caught.value.message == f"{source / named} cannot be read: Permission denied"
        assert caught.value.hint == ALLOWED
    assert not (place / "runs").exists() or not list((place / "runs").iterdir())


def test_a_part_of_a_run_that_may_not_be_read_is_not_left_out_of_the_copy(place):
    source = run_folder(place)
    save(source / "checkpoints", step=600).chmod(0)
    with pytest.raises(CheckpointError, match="step-000600 cannot be read: Permission denied"):
        import_model(source, runs_dir=place / "runs")
    assert list((place / "runs").iterdir()) == []


def test_a_tokenizer_that_may_not_be_read(place):
    folder = model_folder(place)
    folder.chmod(0)
    with pytest.raises(CheckpointError, match=r"tokenizer\.json cannot be read: Permission denied"):
        load_tokenizer(folder)


def test_a_file_of_a_run_that_may_not_be_read_is_named_by_export(place):
    source = run_folder(place)
    (source / "metrics.jsonl").chmod(0)
    with pytest.raises(CheckpointError, match=r"beer/metrics\.jsonl cannot be read: Permission"):
        export_model(str(source), "zip", place / "out" / "a.zip", runs_dir=place)
    assert list((place / "out").iterdir()) == []


@pytest.mark.parametrize("form", exporting.FORMS)
def test_a_place_that_may_not_be_written(place, form, monkeypatch):
    monkeypatch.setattr(exporting, "has_transformers", lambda: False)
    source = run_folder(place)
    (place / "closed").mkdir(mode=0o000)
    out = place / "closed" / f"out.{form}"
    with pytest.raises(CheckpointError) as caught:
        export_model(str(source), form, out, runs_dir=place, approximate=True)
    assert "no permission to write there" in caught.value.message
    assert caught.value.hint == "give another place"
    os.chmod(place / "closed", 0o700)
    assert list((place / "closed").iterdir()) == []
