"""``web/src/runtime/statistics.ts`` in node: the figures and the words of Python, from the same texts."""

from __future__ import annotations

import dataclasses
import json
import math
from typing import Any

import numpy as np
import pytest

from posttrainllm.config import load_config
from posttrainllm.storage import show_bytes
from posttrainllm.text import counting
from posttrainllm.text.corpus import Corpus, open_corpus, split_position
from posttrainllm.text.counting import CountingLine
from posttrainllm.training.writing import (
    memorisation_warning,
    say,
    show_ratio,
    verdict,
)
from web import assets, run_node

LINES = [
    CountingLine(name, loss, 9)
    for name, loss in zip(counting.NAMES, (5.545, 3.347, 2.484, 2.046, 1.784), strict=True)
]
SAMPLES = ["ROMEO:\nWhat the love of the king, I wis glorb and the", "And so the queen quib. "]
SPLITS = [("caf\u00e9 \u4e2d\u6587" * 9, 0.1), ("caf\u00e9" * 9, 0.35), ("", 0.5), ("x", 0.0)]
WINDOWS = [(111_540, 20, 64), (100, 0, 7), (5, 3, 64)]
STANDINGS = [1.2, 2.046, 99.0, math.nan]
BEFORE = [("tiny", 70_464, 1_003_854), ("small", 366_432, 18_000), ("behemoth", 473_244_160, 10**6)]
NUMBERS = [0.00212, 0.049, 0.5, 0.999, 1, 2.74, 9.99, 12.3, 999.4, 999.6, 1234.5]
SIZES = [0, 1, 999, 1000, 99_949, 99_951, 999_499, 999_501, 851_839_488, 3_200_000_000_000]


@pytest.fixture(scope="module")
def corpus() -> Corpus:
    return open_corpus([], val_fraction=0.1)


def verdict_cases(corpus: Corpus) -> list[dict[str, Any]]:
    recited = corpus.train_text[5000:5200].tobytes().decode()
    base: dict[str, Any] = {
        "texts": SAMPLES, "val_loss": 1.88, "best_val_loss": 1.86, "preset": "small", "steps": 1500,
        "val": True,
    }  # fmt: skip
    changes: list[dict[str, Any]] = [
        {},
        {"val_loss": 2.6, "best_val_loss": None},
        {"val_loss": 2.2, "best_val_loss": 1.9, "texts": [recited, "Nay, "]},
        {"val_loss": math.nan},
        {"val_loss": None, "best_val_loss": None, "texts": []},
        {"val": False, "val_loss": None, "best_val_loss": None, "preset": "huge", "steps": 7},
        {"texts": [corpus.val_text[:40_000].tobytes().decode()], "preset": "tiny"},
    ]
    return [base | change for change in changes]


@pytest.fixture(scope="module")
def answers(corpus: Corpus, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("statistics")

    def keep(content: bytes) -> str:
        name = folder / f"text-{len(list(folder.iterdir()))}"
        name.write_bytes(content)
        return str(name)

    train, val, empty = (
        keep(corpus.train_text.tobytes()),
        keep(corpus.val_text.tobytes()),
        keep(b""),
    )
    wide = [keep((part.astype(np.uint16) * 250).tobytes()) for part in (corpus.train, corpus.val)]
    job = {
        "counting": [
            {"train": train, "val": val, "wide": False, "vocabulary": 256},
            {"train": val, "val": empty, "wide": False, "vocabulary": 256},
            {"train": wide[0], "val": wide[1], "wide": True, "vocabulary": 50_257},
        ],
        "splits": [{"text": keep(text.encode()), "fraction": part} for text, part in SPLITS],
        "windows": WINDOWS,
        "standings": [
            {"loss": None if math.isnan(loss) else loss, "lines": list(map(as_json, LINES))}
            for loss in STANDINGS
        ],
        "before": [
            {"preset": preset, "parameters": parameters, "bytes": size, "tokens": size}
            for preset, parameters, size in BEFORE
        ],
        "verdicts": [
            {
                "texts": [keep(text.encode()) for text in case["texts"]],
                "train": train,
                "val": val if case["val"] else empty,
                "valLoss": case["val_loss"] if case["val_loss"] == case["val_loss"] else None,
                "nan": case["val_loss"] is not None and math.isnan(case["val_loss"]),
                "bestValLoss": case["best_val_loss"],
                "counting": list(map(as_json, LINES)),
                "preset": case["preset"],
                "steps": case["steps"],
            }
            for case in verdict_cases(corpus)
        ],
        "sentences": [["{a:,} {a:.1f} {b:,.2f} {c} {a}", {"a": 1234, "b": 9876.125, "c": "{a}"}]],
        "numbers": NUMBERS,
        "sizes": SIZES,
    }
    (folder / "job.json").write_text(json.dumps(job))
    found: dict[str, Any] = json.loads(
        run_node("test/statistics.ts", assets(folder / "assets"), folder / "job.json")
    )
    return found


def as_json(line: CountingLine) -> dict[str, Any]:
    return {"name": line.name, "loss": line.loss}


def test_counting_lines_are_those_of_python(answers: dict[str, Any], corpus: Corpus) -> None:
    wide = [part.astype(np.uint16) * 250 for part in (corpus.train, corpus.val)]
    expected = [
        counting.lines(corpus.train, corpus.val),
        counting.lines(corpus.val, corpus.val[:0]),
        counting.lines(*wide, 50_257),
    ]
    for got, lines in zip(answers["counting"], expected, strict=True):
        assert [line["name"] for line in got] == [line.name for line in lines]
        assert [line["loss"] for line in got] == pytest.approx([line.loss for line in lines], 1e-12)
    ends = [at for at, done in enumerate(answers["progress"]) if done == 1]
    assert len(ends) == 3
    assert answers["progress"][: ends[0] + 1] == sorted(answers["progress"][: ends[0] + 1])


def test_the_parts_and_windows_are_those_of_python(answers: dict[str, Any], corpus: Corpus) -> None:
    assert answers["splits"] == [
        split_position(np.frombuffer(text.encode(), np.uint8), part) for text, part in SPLITS
    ]
    for (n_val, wanted, n_ctx), got in zip(WINDOWS, answers["windows"], strict=True):
        part = dataclasses.replace(corpus, val=np.zeros(n_val, np.uint8))
        assert got == part.validation_offsets(wanted, n_ctx).tolist()


def test_words_of_figures_are_those_of_python(answers: dict[str, Any]) -> None:
    assert answers["standings"] == [counting.standing(loss, LINES) for loss in STANDINGS]
    assert answers["sentences"] == ["1,234 1234.0 9,876.12 {a} 1234"]
    assert answers["ratios"] == [show_ratio(number) for number in NUMBERS]
    assert answers["bytes"] == [show_bytes(size) for size in SIZES]


def test_what_is_said_before_training_is_what_python_says(answers: dict[str, Any]) -> None:
    for (preset, parameters, size), got in zip(BEFORE, answers["before"], strict=True):
        config = load_config(preset)
        epochs = config.tokens_per_step * config.training.steps / size
        assert got["epochs"] == epochs
        assert got["warning"] == memorisation_warning(parameters, size, epochs)
    assert [got["warning"] is None for got in answers["before"]] == [True, False, False]


def test_verdicts_are_those_of_python(answers: dict[str, Any], corpus: Corpus) -> None:
    whole = {True: corpus, False: dataclasses.replace(corpus, val_text=corpus.val_text[:0])}
    for case, got in zip(verdict_cases(corpus), answers["verdicts"], strict=True):
        config = load_config(case["preset"], flags={"training.steps": case["steps"]})
        expected = verdict(
            texts=case["texts"], corpus=whole[case["val"]], val_loss=case["val_loss"],
            counting=LINES, config=config, best_val_loss=case["best_val_loss"],
        )  # fmt: skip
        assert (got["words"]["written"], got["words"]["known"]) == (
            expected.words.n_words,
            expected.words.n_known,
        )
        assert (got["copy"]["length"], got["copy"]["position"]) == (
            expected.copy.n_bytes,
            expected.copy.position,
        )
        assert (got["unseen"] is None) == (expected.unseen_copy is None)
        if expected.unseen_copy is not None and expected.unseen_words is not None:
            assert got["unseen"]["copy"]["length"] == expected.unseen_copy.n_bytes
            assert got["unseen"]["words"] == {
                "written": expected.unseen_words.n_words,
                "known": expected.unseen_words.n_known,
            }
        assert got["standing"] == (None if case["val_loss"] is None else expected.standing)
        findings = expected.lines()
        assert [*got["lines"][:3], got["lines"][3].partition('"')[0]] == [
            *findings[:3],
            findings[3].partition("'")[0].partition('"')[0],
        ]
        for action, advice in zip(got["actions"], expected.actions, strict=True):
            assert action["name"] == advice.name
            assert "{" not in action["text"]
    recites = answers["verdicts"][2]["actions"]
    assert [action["name"] for action in recites] == ["overfits", "recites"]
    assert say("copy", n_bytes=200, piece="").strip(" ,") in answers["verdicts"][2]["lines"][3]
