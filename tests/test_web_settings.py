"""What the pages know of settings, records and texts is what Python says; and web code holds none of it itself."""

from __future__ import annotations

import json
import random
import re
from pathlib import Path
from typing import Any

import pytest

from posttrainllm.config import PRESETS, SETTINGS, load_config, settings_of
from posttrainllm.errors import ConfigError, CorpusError
from posttrainllm.export_site import FRONT, HIDDEN, RECORDS, site
from posttrainllm.text.corpus import open_corpus
from web import WEB, assets, run_node

RESULTS = Path(__file__).parent.parent / "bench" / "results"
SPREAD = 0.03  # of a loss between machines


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return assets(tmp_path_factory.mktemp("assets"))


def perform(folder: Path, place: Path, **work: Any) -> dict[str, Any]:
    """What ``web/test/settings_check.ts`` makes of cases and files."""
    (place / "work.json").write_text(json.dumps({"cases": [], "files": [], **work}))
    found: dict[str, Any] = json.loads(
        run_node("test/settings_check.ts", folder, place / "work.json")
    )
    return found


def random_value(key: str, dice: random.Random) -> Any:
    """A value that is often right, often at an end of the range, and sometimes beyond it."""
    setting = SETTINGS[key]
    if setting.kind == "choice":
        return dice.choice([*setting.choices, "none of them"])
    if setting.kind == "boolean":
        return dice.choice([True, False, 1])
    if setting.kind in ("text", "texts"):
        most = int(setting.high or 0)
        texts = ["", "ROMEO:", "\N{SNOWMAN}\N{CAT FACE}", "\N{CAT FACE}" * most, "a" * (most + 1)]
        return dice.choice(texts) if setting.kind == "text" else []
    low, high = setting.low or 0, setting.high or 0
    usual = [low, low - 1, high, high + 1, low + (high - low) // 2 if high < 1e6 else 48]
    if setting.kind == "integer":
        return dice.choice([*map(int, usual), 3, 7, 64, 0.5])
    return dice.choice([*map(float, usual), 0.5, 1e-3])


def test_pages_refuse_what_the_terminal_refuses_and_nothing_else(
    folder: Path, tmp_path: Path
) -> None:
    dice = random.Random(7)
    offered = [key for key in SETTINGS if key not in HIDDEN]
    presets = [name for name, row in PRESETS.items() if row.n_vocab is None]
    cases = []
    for _ in range(600):
        keys = dice.sample(offered, dice.choice([0, 1, 1, 2, 3]))
        changes = {key: random_value(key, dice) for key in keys}
        cases.append({"preset": dice.choice(presets), "changes": changes})
    taken = 0
    for case, got in zip(cases, perform(folder, tmp_path, cases=cases)["cases"], strict=True):
        preset, changes = case["preset"], case["changes"]
        try:
            wanted = settings_of(load_config(preset, flags={"engine.name": "wasm", **changes}))
        except ConfigError:
            assert got["wrong"], case
            continue
        assert got["wrong"] == [], (case, got["wrong"])
        shown = {
            key: list(value) if isinstance(value, tuple) else value for key, value in wanted.items()
        }
        ours = {key: value for key, value in got["settings"].items() if key != "preset"}
        assert ours | {"engine.name": "wasm"} == shown, case
        taken += 1
    assert 150 < taken < 550


def test_pages_refuse_the_files_that_the_terminal_refuses(folder: Path, tmp_path: Path) -> None:
    files = [
        b"",
        b"plain",
        b"\xef\xbb\xbfwith a mark",
        b"\xff\xfea\0",
        b"\xfe\xff\0a",
        b"%PDF-1.4",
        b"PK\x03\x04abc",
        b"\x1f\x8b\x08",
        b"nul \0 inside",
        bytes(range(1, 32)) * 3,
        b"dos\x1a",
        b"\x1b[31mred\x1b[0m",
        "Größe".encode("latin-1"),
        b"crlf\r\nlines\r\n",
    ]
    got = perform(folder, tmp_path, files=[[content.hex()] for content in files])["files"]
    for content, said in zip(files, got, strict=True):
        path = tmp_path / "file.txt"
        path.write_bytes(content)
        try:
            corpus = open_corpus([str(path)], val_fraction=0.0)
        except CorpusError:
            assert said.startswith("refused"), content
        else:
            assert said == f"text {bytes(corpus.train_text).hex()}", content


def test_files_are_joined_as_the_terminal_joins_them(folder: Path, tmp_path: Path) -> None:
    files = [b"one", b"two\n", b"\xef\xbb\xbfthree"]
    paths = [tmp_path / f"{k}.txt" for k in range(len(files))]
    for path, content in zip(paths, files, strict=True):
        path.write_bytes(content)
    wanted = bytes(open_corpus([str(path) for path in paths], val_fraction=0.0).train_text)
    (said,) = perform(folder, tmp_path, files=[[content.hex() for content in files]])["files"]
    assert said == f"text {wanted.hex()}"


def recorded(pattern: str) -> list[dict[str, Any]]:
    return [json.loads(path.read_text()) for path in sorted(RESULTS.glob(pattern))]


@pytest.mark.parametrize("preset", RECORDS)
def test_what_a_preset_reached_stands_in_a_record(preset: str) -> None:
    rate = load_config(preset).schedule.learning_rate
    losses = [
        point["val_loss"]
        for pattern in (f"*lr-sweep-{preset}*.json", f"*sweep-learning-rate-{preset}*.json")
        for record in recorded(pattern)
        for point in record["results"]["points"]
        if point["settings"] == {"schedule.learning_rate": rate}
    ]
    assert losses
    assert min(abs(loss - RECORDS[preset].loss) for loss in losses) <= SPREAD
    assert site()["records"][preset]["step_flops"] == load_config(preset).flops_per_step


def test_step_times_stand_in_a_record() -> None:
    (record,) = recorded("*wasm-node_amd-epyc_step-tiny-small-medium-large-xl.json")
    rows = {row["preset"]: row["median_ms"] for row in record["rows"] if row["threads"] == 2}
    ours = {name: each.step_ms for name, each in RECORDS.items() if each.step_ms is not None}
    assert ours == pytest.approx(rows, rel=0.01)


def test_presets_in_front_and_hidden_settings_exist() -> None:
    assert set(FRONT) <= set(RECORDS) <= set(PRESETS)
    assert set(HIDDEN) <= set(SETTINGS)


CODE = [
    path
    for path in sorted((WEB / "src").rglob("*"))
    if path.suffix in (".ts", ".svelte", ".astro", ".mjs")
]
ARITHMETIC = {  # where a number that is shown is computed from another one
    "components/train/Details.svelte": {"exp"},  # perplexity
    "runtime/words.ts": {"log10"},  # digits
    "storage/foreign.ts": {"log"},  # which preset is nearest in size
}


TRANSLATED = {
    "storage/foreign.ts"
}  # what another project's file leaves out, as training/importing.py says it


def script(path: Path) -> str:
    """The code of a file: without comments, style and markup's texts."""
    text = path.read_text(encoding="utf-8")
    text = re.sub(r"<style.*?</style>", "", text, flags=re.S)
    text = re.sub(r"/\*.*?\*/|<!--.*?-->", "", text, flags=re.S)
    return re.sub(r"^\s*//.*$|\s//\s.*$", "", text, flags=re.M)


@pytest.mark.parametrize("path", CODE, ids=lambda path: str(path.relative_to(WEB / "src")))
def test_web_code_holds_no_preset_no_default_and_no_model_maths(path: Path) -> None:
    code = script(path)
    name = str(path.relative_to(WEB / "src"))
    quoted = set(re.findall(r"""["'`](\w+)["'`]""", code))
    assert not quoted & (set(PRESETS) - {"small", "medium", "large"}), "a preset's name"
    for key in SETTINGS:
        value = re.search(rf"""["']{re.escape(key)}["']\s*:\s*-?[\d.]""", code)
        assert not value or name in TRANSLATED, f"a value of {key}"
    used = set(
        re.findall(
            r"Math\.(exp|log|log2|log10|sqrt|tanh|pow|sin|cos|random|hypot|cbrt|expm1|log1p)\b",
            code,
        )
    )
    assert used <= ARITHMETIC.get(name, set()), used
    for word in ("softmax", "gelu(", "adamw(", "layernorm("):
        assert word not in code.lower().replace(" ", ""), word
