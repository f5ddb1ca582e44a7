"""Diagnose and doctor: they say what is wrong, and with what it is put right."""

from __future__ import annotations

import json
import re

import pytest

from lab_cases import as_arguments, small
from posttrainllm.cli import main
from posttrainllm.config import load_config
from posttrainllm.engines import numpy_engine
from posttrainllm.engines.numpy_ops import NUMPY_OPS
from posttrainllm.lab import doctor as doctor_module
from posttrainllm.lab.diagnose import Probe, conclusion, diagnose
from posttrainllm.lab.doctor import doctor, self_check
from posttrainllm.runs.folder import Run
from posttrainllm.training.session import new_trainer


def trained(folder, *settings: str) -> Run:
    config = small(folder, *settings, "training.verdict_samples=0", steps=12)
    return Run(new_trainer(config, runs_dir=folder / "runs", name="run").train().run)


# ---- diagnose -----------------------------------------------------------------------------------


def test_a_rate_that_is_too_low_is_named_with_the_gain(tmp_path):
    found = diagnose(trained(tmp_path, "schedule.learning_rate=1e-4"), steps=60)
    usual = load_config("tiny").schedule.learning_rate
    assert ("schedule.learning_rate", 1e-4, usual) in found.changed
    assert [line.name for line in found.counting][:2] == ["guessing", "letter frequencies"]
    assert found.standing.startswith("validation loss 5.")
    assert [probe.factor for probe in found.probes] == [0.3, 1.0, 3.0]
    assert re.match(r"at 3x the loss after 60 steps is lower by \d\.\d\d", found.sentence)
    assert "not the model's ceiling" in found.sentence
    assert "--learning-rate 0.0003" in found.sentence


@pytest.mark.parametrize(
    ("losses", "wanted"),
    [
        ((2.5, 2.4, 2.2), "at 3x the loss after 100 steps is lower by 0.20: .* too low"),
        ((2.2, 2.4, 2.5), "at 0.3x the loss after 100 steps is lower by 0.20: .* too high"),
        ((2.5, 2.4, 2.38), "no rate nearby is better"),
        ((2.5, 2.4, None), "no rate nearby is better"),
        ((2.5, None, None), "not a number within 100 steps: lower it, --learning-rate 0.0003"),
        ((None, None, None), "not a number"),
    ],
)
def test_probes_become_a_sentence(losses, wanted):
    factors = (0.3, 1.0, 3.0)
    probes = [Probe(f, f * 1e-3, loss) for f, loss in zip(factors, losses, strict=True)]
    assert re.search(wanted, conclusion(probes, 100))


def test_diagnose_command_shows_settings_lines_and_probe(tmp_path, capsys):
    trained(tmp_path, "schedule.learning_rate=1e-4")
    arguments = ["diagnose", "run", "--runs-dir", str(tmp_path / "runs"), "--steps", "20"]
    assert main(arguments) == 0
    out = capsys.readouterr().out
    assert "schedule.learning_rate 0.0001 (preset: " in out
    assert "guessing (5.55)" in out
    assert "loss after 20 steps" in out
    assert main([*arguments, "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert len(document["probes"]) == 3
    assert main(["diagnose", "none", "--runs-dir", str(tmp_path / "runs")]) == 2


# ---- doctor -------------------------------------------------------------------------------------


def by_name():
    return {finding.name: finding for finding in doctor()}


def test_doctor_finds_this_installation_good(capsys):
    found = by_name()
    assert {"processor", "threads", "memory", "text", "engine numpy"} <= found.keys()
    assert any(name.startswith("engine cpp") for name in found)
    assert not [finding for finding in found.values() if finding.status == "problem"]
    assert main(["doctor"]) == 0
    assert capsys.readouterr().out.splitlines()[-1].startswith("doctor: all that training needs")


def test_doctor_finds_a_missing_or_changed_text(tmp_path, monkeypatch, capsys):
    path = tmp_path / "tinyshakespeare.txt"
    monkeypatch.setattr(doctor_module, "shakespeare_path", lambda: path)
    monkeypatch.setattr(doctor_module, "_engines", lambda: iter(()))
    assert by_name()["text"].status == "problem"
    path.write_text("To be or not")
    assert by_name()["text"].status == "problem"
    assert main(["doctor"]) == 1
    assert "python -m posttrainllm.text.datasets" in capsys.readouterr().out


def test_doctor_finds_that_the_kernels_are_not_built(monkeypatch):
    monkeypatch.setattr(doctor_module, "available_builds", list)
    found = [*doctor_module._kernels()]
    assert all(finding.status == "problem" for finding in found)
    assert {finding.fix for finding in found} == {"make kernels"}


def test_doctor_finds_an_engine_that_computes_wrong(monkeypatch):
    right = NUMPY_OPS["gelu_backward"]

    def wrong(out, *operands, **attrs):
        right(out, *operands, **attrs)
        if out.dtype == "float32":
            out *= 1.01

    monkeypatch.setitem(numpy_engine.NUMPY_OPS, "gelu_backward", wrong)
    found = doctor_module._engine("numpy", "")
    assert found.status == "problem"
    assert "computes something else than numpy float64: gradient of" in found.detail


def test_an_engine_that_is_not_installed_is_a_note_with_the_command(monkeypatch):
    def missing(engine, build=""):
        raise doctor_module.EngineError("the torch engine needs PyTorch", "pip install torch")

    monkeypatch.setattr(doctor_module, "self_check", missing)
    assert doctor_module._engine("torch", "").status == "note"
    assert doctor_module._engine("torch", "").fix == "pip install torch"
    assert doctor_module._engine("cpp", "").status == "problem"


def test_self_check_compares_two_steps():
    assert self_check("cpp").first_failure is None
    assert len(self_check("cpp").losses) == 2


def test_doctor_command_gives_json(capsys):
    assert main(["doctor", "--json"]) == 0
    assert {"name", "status", "detail", "fix"} == json.loads(capsys.readouterr().out)[0].keys()


def test_the_lab_is_a_panel_of_the_help(tmp_path, capsys):
    assert main(["--help"]) == 0
    out = capsys.readouterr().out
    for command in ("bench", "sweep", "parity", "verify-resume", "diagnose", "doctor"):
        assert command in out
    assert main(["parity", "--engine", "fortran", *as_arguments(tmp_path)]) == 2
