"""Sweeps and cases: values compared, expectations held, and the default rates that rest on recorded sweeps."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from lab_cases import as_arguments, settings, small
from posttrainllm.cli import main
from posttrainllm.config import PRESETS, SETTINGS, load_config, settings_of
from posttrainllm.errors import ConfigError, NonFiniteError
from posttrainllm.lab import cases, measured_run
from posttrainllm.lab.bench import make_cells
from posttrainllm.lab.benchmark_record import read_records
from posttrainllm.lab.cases import Case, load_case, run_case
from posttrainllm.lab.sweep import parse_axes, sweep

BENCH = Path(__file__).parent.parent / "bench"
CASES = sorted(path.stem for path in (BENCH / "cases").glob("*.toml"))
SWEPT = ("tiny", "small", "medium", "large")
CLOSE = 0.03  # nats: what a default rate may lie above the best of its sweep


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


def decisive(settings):
    """Settings that a sweep of the rate rests on; one that came later had its default's effect."""
    sections = ("model.", "optimizer.", "schedule.", "data.", "training.steps")
    free = "schedule.learning_rate"
    known = {key: setting.default for key, setting in SETTINGS.items()} | settings
    return {k: v for k, v in known.items() if k.startswith(sections) and k != free}


def swept_losses(preset):
    """Validation loss by learning rate over all recorded sweeps of a preset as it is now."""
    losses = {}
    for record in read_records(BENCH / "results", "sweep"):
        now = json.loads(json.dumps(settings_of(load_config(preset))))
        if preset not in record["configs"] or decisive(record["configs"][preset]) != decisive(now):
            continue
        for point in record["results"]["points"]:
            if point["settings"].keys() == {"schedule.learning_rate"} and point["val_loss"]:
                losses[point["settings"]["schedule.learning_rate"]] = point["val_loss"]
    return losses


RECORDED = {
    preset for record in read_records(BENCH / "results", "sweep") for preset in record["configs"]
}


@pytest.mark.parametrize("preset", [p for p in PRESETS if p in SWEPT or p in RECORDED])
def test_the_default_rate_is_close_to_the_best_of_its_sweep(preset):
    losses = swept_losses(preset)
    again = f"posttrainllm bench --case lr-sweep-{preset} --record bench/results"
    assert losses, f"no sweep of {preset} as it is now: {again}"
    default = load_config(preset).schedule.learning_rate
    assert default in losses, f"the sweep of {preset} does not hold its default, {default}"
    assert losses[default] <= min(losses.values()) + CLOSE
    assert min(losses) < default < max(losses), "the default is at the end of what was tried"


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


def test_a_ladder_compares_each_rung_with_the_one_before_and_the_first(tmp_path):
    rungs = [
        ["engine.cpp_build=plain", f"engine.fuse={fuse}"] for fuse in ("false", "true", "true")
    ]
    case = Case(
        name="rungs",
        kind="ladder",
        about="",
        presets=["tiny", "small"],
        engines=["cpp"],
        set=settings(tmp_path),
        rungs=rungs,
        repeats=10,
    )
    [record] = run_case(case).records
    assert (record["kind"], record["case"], list(record["configs"])) == (
        "ladder",
        "rungs",
        case.presets,
    )
    rows = record["rows"]
    assert [(row["preset"], row["rung"]) for row in rows] == [
        (preset, rung) for preset in case.presets for rung in rungs
    ]
    for at in (0, 3):
        first, second, third = (row["median_ms"] for row in rows[at : at + 3])
        assert rows[at]["times_the_rung_before"] == rows[at]["times_the_first"] == 1
        assert rows[at + 2]["times_the_rung_before"] == pytest.approx(second / third)
        assert rows[at + 2]["times_the_first"] == pytest.approx(first / third)
    with pytest.raises(ConfigError, match="at least two rungs"):
        run_case(case.model_copy(update={"rungs": rungs[:1]}))


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


def test_sweep_command_prints_a_table_and_writes_a_record(tmp_path, capsys):
    arguments = ["sweep", "--preset", "tiny", "--steps", "20", "--set-values"]
    arguments += ["schedule.learning_rate=1e-4,1e-2", *as_arguments(tmp_path)]
    assert main([*arguments, "--record", str(tmp_path / "results")]) == 0
    out = capsys.readouterr().out
    assert "best: schedule.learning_rate=0.01 at a validation loss of" in out
    assert [p.stem.split("_")[-1] for p in (tmp_path / "results").iterdir()] == [
        "sweep-learning-rate-tiny"
    ]
