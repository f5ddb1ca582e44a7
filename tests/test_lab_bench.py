"""Benchmarks: what is timed and in which order, what a record holds, cases, sweeps and the defaults that rest on them."""

from __future__ import annotations

import json
import platform
import re
from pathlib import Path

import pytest

from lab_cases import as_arguments, settings, small
from needs import require
from posttrainllm.cli import main
from posttrainllm.config import load_config, settings_of
from posttrainllm.engines.base import StepResult
from posttrainllm.engines.numpy_engine import NumpyEngine
from posttrainllm.errors import ConfigError, EngineError, NonFiniteError
from posttrainllm.lab import bench as module
from posttrainllm.lab import cases, measured_run
from posttrainllm.lab.bench import Row, bench, make_cells
from posttrainllm.lab.benchmark_record import (
    make_record,
    read_records,
    record_name,
    slug,
    write_record,
)
from posttrainllm.lab.cases import Case, load_case, run_case
from posttrainllm.lab.cost import step_flops
from posttrainllm.lab.sweep import parse_axes, sweep

BENCH = Path(__file__).parent.parent / "bench"
CASES = sorted(path.stem for path in (BENCH / "cases").glob("*.toml"))
SWEPT = ("tiny", "small", "medium", "large")
CLOSE = 0.03  # nats: what a default rate may lie above the best of its sweep


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
    assert cpp.gflops == pytest.approx(step_flops(config) / cpp.median_ms / 1e6)
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


@pytest.mark.slow
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


# ---- sweeps -------------------------------------------------------------------------------------


def test_a_sweep_finds_the_better_value(tmp_path):
    config = small(tmp_path, "schedule.learning_rate=1e-5", steps=30)
    found = sweep(config, parse_axes(["schedule.learning_rate=1e-5,1e-2"]), [1, 2])
    assert [point.runs for point in found.points] == [2, 2]
    assert found.best is not None
    assert found.best.settings == {"schedule.learning_rate": 1e-2}
    assert found.usual == found.points[0]
    assert "above it" in found.sentence
    record = found.record("a-sweep")
    assert record["kind"] == "sweep"
    assert len(record["rows"]) == 4
    assert record["results"]["best"]["settings"] == {"schedule.learning_rate": 1e-2}


def test_a_run_that_diverges_is_a_row_and_never_the_best(tmp_path, monkeypatch):
    right = measured_run.new_trainer

    def new_trainer(config, **options):
        trainer = right(config, **options)
        if config.schedule.learning_rate > 1:

            def train():
                raise NonFiniteError("step 3: a loss or gradient is not a finite number")

            trainer.train = train
        return trainer

    monkeypatch.setattr(measured_run, "new_trainer", new_trainer)
    found = sweep(small(tmp_path), parse_axes(["schedule.learning_rate=1e-3,5"]))
    assert found.points[1].diverged == 1
    assert found.points[1].val_loss is None
    assert found.best == found.points[0]


def test_axes_are_typed_and_checked_before_training(tmp_path):
    assert parse_axes(["optimizer.beta2=0.95,0.99", "training.seed=3"]) == {
        "optimizer.beta2": [0.95, 0.99],
        "training.seed": [3],
    }
    for wrong in ("optimizer.beta2", "optimizer.beta2=", "optimizer.beta9=1"):
        with pytest.raises(ConfigError):
            parse_axes([wrong])
    with pytest.raises(ConfigError, match="beta2"):
        sweep(small(tmp_path), {"optimizer.beta2": [0.9, 7.0]})


@pytest.mark.parametrize("preset", SWEPT)
def test_the_default_rate_is_close_to_the_best_of_its_sweep(preset):
    case = f"lr-sweep-{preset}"
    records = [r for r in read_records(BENCH / "results", "sweep") if r["case"] == case]
    if not records:
        pytest.skip(f"no record yet: posttrainllm bench --case {case} --record bench/results")
    record = records[-1]
    now, then = settings_of(load_config(preset)), record["configs"][preset]
    shape = [key for key in now if key.startswith(("model.", "data.batch", "training.steps"))]
    assert {key: now[key] for key in shape} == {key: then[key] for key in shape}, "sweep it again"
    losses = {
        point["settings"]["schedule.learning_rate"]: point["val_loss"]
        for point in record["results"]["points"]
        if point["val_loss"] is not None
    }
    default = now["schedule.learning_rate"]
    assert default in losses, f"the sweep of {preset} does not hold its default, {default}"
    assert losses[default] <= min(losses.values()) + CLOSE


# ---- cases --------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", CASES)
def test_every_case_can_be_read_and_is_in_the_readme(name):
    case = load_case(name)
    assert case.config().training.steps
    if case.kind == "step":
        assert make_cells(case.presets[:1], case.engines[:1], case.threads, case.set)
    if case.kind == "sweep":
        values = parse_axes(case.values)["schedule.learning_rate"]
        assert case.config().schedule.learning_rate in values
        assert len(values) >= 4
    named = (BENCH / "README.md").read_text()
    assert f"`{name}`" in named or f"`-{name.rpartition('-')[2]}`" in named


def test_the_anchor_is_nanogpts_run():
    config = load_case("anchor-nanogpt-cpu").config()
    model, schedule = config.model, config.schedule
    assert (model.n_layer, model.n_head, model.n_embd, model.n_ctx) == (4, 4, 128, 64)
    assert (config.data.batch_size, config.training.steps, config.optimizer.beta2) == (
        12,
        2000,
        0.99,
    )
    assert (schedule.learning_rate, schedule.warmup_steps) == (1e-3, 100)
    assert schedule.learning_rate * schedule.final_ratio == pytest.approx(1e-4)


def training_case(tmp_path, **more):
    values = {
        "name": "a-case",
        "kind": "training",
        "about": "a small run",
        "presets": ["tiny"],
        "engines": ["cpp"],
        "set": [*settings(tmp_path), "training.sample_tokens=20", "training.verdict_samples=2"],
        "seeds": [1, 2],
        **more,
    }
    return Case.model_validate(values)


def test_a_case_that_trains_is_held_to_its_expectations(tmp_path):
    expect = {"val_loss_at_most": 5.5, "val_loss_at_least": 5.4, "seconds_at_most": 600}
    found = run_case(training_case(tmp_path, expect=expect), steps=25)
    assert len(found.runs) == 2
    assert [run.seed for run in found.runs] == [1, 2]
    texts = [check.text for check in found.checks if not check.passed]
    assert all("wanted at least 5.4" in text for text in texts)
    assert found.passed is False
    record = found.records[0]
    assert record["results"]["passed"] is False
    assert record["rows"][0]["word_share"] is not None
    assert record["results"]["val_loss"]["min"] <= record["results"]["val_loss"]["max"]


def test_a_case_of_steps_and_a_case_of_values_give_records_of_their_name(tmp_path):
    timed = training_case(tmp_path, kind="step", repeats=10, engines=["cpp", "numpy"])
    assert [record["case"] for record in run_case(timed).records] == ["a-case", "a-case"]
    swept = training_case(tmp_path, kind="sweep", values=["optimizer.beta2=0.9,0.99"], seeds=[1])
    found = run_case(swept, steps=5)
    assert found.records[0]["case"] == "a-case"
    assert found.sweep is not None


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('kind = "stepp"\nabout = ""\npreset = "tiny"', "kind"),
        ('kind = "training"\nabout = ""\npreset = "tiny"\nseeeds = [1]', "seeeds"),
        ('kind = "training"\nabout = ""\npreset = "tiny"\nexpect = { lossy_at_most = 1 }', "lossy"),
        ("kind = ", "cannot be read"),
    ],
)
def test_a_case_with_a_mistake_is_refused_by_file_and_field(tmp_path, text, message):
    path = tmp_path / "wrong.toml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=message) as caught:
        load_case(str(path))
    assert "wrong.toml" in caught.value.message


def test_an_unknown_case_is_refused_with_the_ones_there_are(monkeypatch):
    monkeypatch.setattr(cases, "source_tree", lambda: BENCH.parent)
    with pytest.raises(ConfigError, match="lr-sweep-small") as caught:
        load_case("lr-sweep-smal")
    assert "default-3-seeds" in caught.value.hint


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


def test_sweep_command_prints_a_table_and_writes_a_record(tmp_path, capsys):
    arguments = ["sweep", "--preset", "tiny", "--steps", "20", "--set-values"]
    arguments += ["schedule.learning_rate=1e-4,1e-2", *as_arguments(tmp_path)]
    assert main([*arguments, "--record", str(tmp_path / "results")]) == 0
    out = capsys.readouterr().out
    assert "best: schedule.learning_rate=0.01 at a validation loss of" in out
    assert [p.stem.split("_")[-1] for p in (tmp_path / "results").iterdir()] == [
        "sweep-learning-rate-tiny"
    ]
