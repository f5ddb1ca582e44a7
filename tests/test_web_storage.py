"""Runs of the browser and of the terminal are one: the same folder, byte for byte, and the same next loss both ways.

The storage of the web app runs here in node, on a shelf in memory; in Chromium, on OPFS, in ``test_web_runs.py``.
"""

from __future__ import annotations

import json
import random
import shutil
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import posttrainllm
from needs import require
from posttrainllm.config import (
    PRESETS,
    SETTINGS,
    from_toml,
    load_config,
    replace,
    settings_of,
    to_toml,
)
from posttrainllm.runs.checkpoint import read_checkpoint, write_checkpoint
from posttrainllm.runs.folder import Run
from posttrainllm.text.tokenizer import ByteTokenizer
from web import assets
from web_storage import HALF, STEPS, perform, python_run, settings, unzipped, zipped

require("wasmtime")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return assets(tmp_path_factory.mktemp("assets"))


def test_a_configuration_is_written_as_python_writes_it_and_read_back(
    folder: Path, tmp_path: Path
) -> None:
    generator = random.Random(1)
    configs = [load_config(name) for name in PRESETS]
    for name in PRESETS:
        changes: dict[str, Any] = {
            "schedule.learning_rate": generator.uniform(1e-9, 1e-2),
            "optimizer.eps": 10.0 ** -generator.randint(1, 12),
            "optimizer.weight_decay": float(generator.randint(0, 3)),
            "optimizer.beta1": generator.random() * 0.99,
            "training.seed": generator.randrange(2**53),
            "training.sample_prompt": 'a "quoted" \\ line\n\ttab \x7f é 😀',
            "data.corpus": ["a b.txt", "c\\d.txt"],
        }
        configs.append(replace(load_config(name), changes))
    given = [{"preset": config.preset, **settings_of(config)} for config in configs]
    written = perform(
        folder, tmp_path / "a", *({"kind": "toml", "settings": values} for values in given)
    )
    assert [one["text"] for one in written] == [to_toml(config) for config in configs]
    assert all(
        from_toml(one["text"]) == config for one, config in zip(written, configs, strict=True)
    )
    read = perform(
        folder, tmp_path / "b", *({"kind": "toml", "text": to_toml(config)} for config in configs)
    )
    assert [one["settings"] for one in read] == json.loads(json.dumps(given))
    assert set(SETTINGS) == set(read[0]["settings"]) - {"preset"}


def test_a_run_of_the_tab_is_the_folder_that_python_writes(folder: Path, tmp_path: Path) -> None:
    job = {"kind": "train", "name": "tab", "settings": settings(), "bundled": True, "to": HALF}
    perform(folder, tmp_path / "work", job)
    run = unzipped(tmp_path / "work" / "0.zip", tmp_path / "runs")
    assert (run / "config.toml").read_text() == to_toml(Run(run).config())
    checkpoint = read_checkpoint(run)
    assert checkpoint.state is not None
    assert checkpoint.m is not None
    assert checkpoint.v is not None
    again = write_checkpoint(
        tmp_path / "again",
        state=checkpoint.state,
        params=checkpoint.params,
        m=checkpoint.m,
        v=checkpoint.v,
        tokenizer=ByteTokenizer(),
        keep=1,
    )
    names = {path.name for path in again.iterdir()}
    assert names == {path.name for path in checkpoint.path.iterdir()}
    for name in names - {"hashes.json"}:
        assert (again / name).read_bytes() == (checkpoint.path / name).read_bytes(), name
    assert _hashes(again) == _hashes(checkpoint.path)
    state = checkpoint.state
    assert (state.step, state.engine, state.engine_info["build"]) == (HALF, "wasm", "wasm32")
    lines = Run(run).metrics.read()
    assert [line["step"] for line in lines] == list(range(1, HALF + 1))
    for line in (run / "metrics.jsonl").read_text().splitlines():
        assert line == json.dumps(json.loads(line), ensure_ascii=False)
    assert Run(run).samples.read()[-1]["text"] == 'an "answer"\né😀'


def _hashes(folder: Path) -> Any:
    return json.loads((folder / "hashes.json").read_text())


@pytest.mark.parametrize("own_text", [False, True])
def test_a_run_of_the_tab_goes_on_in_the_terminal_with_the_same_losses(
    folder: Path, tmp_path: Path, own_text: bool
) -> None:
    text = tmp_path / "mine.txt"
    text.write_text("the quick brown fox jumps over the lazy dog; " * 60)
    corpus = {"data.corpus": [str(text)]} if own_text else {}
    whole = python_run(tmp_path / "whole", **corpus)
    assert whole.config.engine.name == "wasm"
    job = {"kind": "train", "name": "tab", "to": HALF, "bundled": not own_text}
    named = {"data.corpus": ["mine.txt"]} if own_text else {}
    half = perform(
        folder,
        tmp_path / "work",
        {**job, "settings": settings(**named), "text": text.read_bytes()},
    )[0]
    assert half["losses"] == whole.losses[:HALF]
    unzipped(tmp_path / "work" / "0.zip", tmp_path / "runs")
    text.unlink()
    resumed = posttrainllm.resume("tab", runs_dir=tmp_path / "runs")
    assert resumed.losses == whole.losses


@pytest.mark.parametrize("method", [zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED])
def test_a_run_of_the_terminal_goes_on_in_the_tab_with_the_same_losses_and_back(
    folder: Path, tmp_path: Path, method: int
) -> None:
    whole = python_run(tmp_path / "whole", "run")
    half = python_run(tmp_path / "half", "run")
    shutil.rmtree(half.path / "checkpoints" / f"step-{STEPS:06d}")
    job = {"kind": "train", "name": "x", "zip": zipped(half.path, method), "to": STEPS - 1}
    done = perform(folder, tmp_path / "work", job)[0]
    assert (done["name"], done["notices"]) == ("run", [])
    assert done["losses"] == whole.losses[HALF : STEPS - 1]
    back = unzipped(tmp_path / "work" / "0.zip", tmp_path / "back")
    for file in (half.path / "checkpoints" / f"step-{HALF:06d}").iterdir():
        copied = back / file.relative_to(half.path)
        assert copied.read_bytes() == file.read_bytes(), file.name
    resumed = posttrainllm.resume("run", runs_dir=tmp_path / "back")
    assert resumed.losses == whole.losses
    np.testing.assert_array_equal(
        read_checkpoint(resumed.path).params["wte.weight"],
        read_checkpoint(whole.path).params["wte.weight"],
    )


def test_the_newest_whole_checkpoint_is_taken_and_the_damaged_one_named(
    folder: Path, tmp_path: Path
) -> None:
    run = python_run(tmp_path / "runs").path
    weights = run / "checkpoints" / f"step-{STEPS:06d}" / "model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)
    job = {"kind": "train", "name": "x", "zip": zipped(run), "to": HALF + 1}
    done = perform(folder, tmp_path / "work", job)[0]
    assert len(done["losses"]) == 1
    assert "step-000010/model.safetensors has changed since it was written" in done["notices"][0]
    assert done["notices"][0].endswith("using checkpoints/step-000006")
