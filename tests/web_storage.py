"""Jobs for the storage of the web app in node: ``web/test/storage_work.ts`` says what each is."""

from __future__ import annotations

import json
import zipfile
from pathlib import Path
from typing import Any

import posttrainllm
from posttrainllm.config import load_config, settings_of
from web import run_node

STEPS, HALF = 10, 6
SIZES: dict[str, Any] = {
    "model.n_layer": 1,
    "model.n_head": 3,
    "model.n_embd": 24,
    "model.n_ctx": 16,
    "data.batch_size": 4,
    "training.steps": STEPS,
    "training.eval_every": 0,
    "training.eval_windows": 4,
    "training.final_windows": 4,
    "training.sample_tokens": 0,
    "training.verdict_samples": 0,
    "training.checkpoint_every": HALF,
    "schedule.warmup_steps": 3,
    "engine.name": "wasm",
}


def perform(assets: Path, place: Path, *jobs: dict[str, Any]) -> list[dict[str, Any]]:
    """Run jobs; bytes among their values go as files, and so do those that come back."""

    def sent(value: Any) -> Any:
        if isinstance(value, bytes):
            name = f"given-{len(list(place.iterdir()))}"
            (place / name).write_bytes(value)
            return {"file": name}
        if isinstance(value, dict):
            return {key: sent(part) for key, part in value.items()}
        return [sent(part) for part in value] if isinstance(value, list | tuple) else value

    place.mkdir(exist_ok=True)
    (place / "work.json").write_text(json.dumps(sent(list(jobs))))
    run_node("test/storage.ts", assets, place)
    results: list[dict[str, Any]] = json.loads((place / "results.json").read_text())
    return results


def settings(**changes: Any) -> dict[str, Any]:
    """A small run's settings, as the web app has them."""
    config = load_config("tiny", flags={**SIZES, **changes})
    return {"preset": "tiny", **settings_of(config)}


def python_run(runs: Path, name: str = "run", **changes: Any) -> posttrainllm.Run:
    """The same run, trained here."""
    given = {**SIZES, **changes}
    return posttrainllm.train(
        preset="tiny",
        name=name,
        runs_dir=runs,
        **{key.replace(".", "__"): value for key, value in given.items()},
    )


def unzipped(path: Path, runs: Path) -> Path:
    """The run of a zip file, in a folder of runs."""
    with zipfile.ZipFile(path) as archive:
        assert archive.testzip() is None
        archive.extractall(runs)
        return runs / archive.namelist()[0].partition("/")[0]


def zipped(run: Path, method: int = zipfile.ZIP_DEFLATED) -> bytes:
    """A run as a zip file that somebody else's program makes."""
    path = run.with_suffix(".zip")
    with zipfile.ZipFile(path, "w", method) as archive:
        for file in sorted(run.rglob("*")):
            if file.is_file():
                archive.write(file, f"{run.name}/{file.relative_to(run)}")
    return path.read_bytes()
