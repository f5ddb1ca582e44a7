"""Memory: what a machine does not have is refused before it is taken, on every engine and with both numbers."""

from __future__ import annotations

import subprocess
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cli_cases import SIZES, check_error, cli, write_text
from needs import require
from posttrainllm.config import load_config
from posttrainllm.engines import base
from posttrainllm.model import training_programs
from posttrainllm.plan import make_plan
from posttrainllm.training import engine_choice
from posttrainllm.training.engine_choice import least_bytes


@pytest.mark.parametrize("engine", ["numpy", "cpp", "wasm", "torch"])
def test_memory_that_is_not_there_is_refused_with_both_numbers(tmp_path, monkeypatch, engine):
    if engine in ("wasm", "torch"):
        require("wasmtime" if engine == "wasm" else "torch")
    monkeypatch.setattr(base, "available_memory", lambda: 3_000_000)
    text = write_text(tmp_path)
    for arguments in (["--n-ctx=1000"], ["--set=model.n_layer=1024", "--set=model.n_embd=65536"]):
        result = cli(
            *["train", text, "--preset=tiny", f"--engine={engine}", "--batch-size=64"],
            *["--runs-dir", tmp_path / "runs", "--val-fraction=0", *arguments],
            "--set=model.n_head=1",
        )
        words = ["bytes", "may take 3,000,000 here"]
        check_error(result, *(words if arguments[0] == "--n-ctx=1000" else []))
        assert list((tmp_path / "runs").glob("*")) == []


def test_refusal_names_the_largest_preset_that_fits(tmp_path, monkeypatch):
    monkeypatch.setattr(base, "available_memory", lambda: 30_000_000)
    result = cli("train", write_text(tmp_path), "--preset=xl", "--runs-dir", tmp_path / "runs")
    check_error(result, "cpp needs", "may take 30,000,000", "the largest preset that fits is ")
    assert engine_choice._what_fits(10**5) == "no preset needs so little; close other programs"


@given(
    layers=st.integers(1, 6),
    width=st.integers(1, 40),
    inner=st.integers(1, 99),
    context=st.integers(1, 99),
    rows=st.integers(1, 2000),
)
@settings(max_examples=50)
def test_least_bytes_never_exceed_the_plan(layers, width, inner, context, rows):
    flags = {"model.n_layer": layers, "model.n_head": 1, "model.n_embd": width}
    flags |= {"model.n_inner": inner, "model.n_ctx": context, "data.batch_size": rows}
    config = load_config("tiny", flags=flags)
    plan = make_plan(*training_programs(config.model, config.optimizer, config.data.batch_size))
    assert least_bytes(config) <= plan.nbytes


def test_unknown_memory_refuses_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr(base, "available_memory", lambda: 0)
    text = write_text(tmp_path)
    assert cli("train", text, *SIZES, "--steps=1", "--runs-dir", tmp_path / "runs", "-q").code == 0


def test_a_limit_of_address_space_is_known_before_memory_is_taken():
    code = """
import resource
from posttrainllm.machine import available_memory
before = available_memory()
resource.setrlimit(resource.RLIMIT_AS, (1 << 30, 1 << 30))
print(0 < available_memory() < 1 << 30 <= before)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "True\n"
