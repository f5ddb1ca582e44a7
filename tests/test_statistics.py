"""The corpus's parts and the counting tables in C++ against their definitions in Python.

Texts are fed in pieces of any size, and the verdict's rules are checked too.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from posttrainllm.config import load_config
from posttrainllm.kernels import build
from posttrainllm.presets import PRESETS
from posttrainllm.text import counting
from posttrainllm.text.corpus import open_corpus, split_position
from posttrainllm.text.counting import CountingLine, standing
from posttrainllm.text.datasets import shakespeare_path
from posttrainllm.text.likeness import Copy
from posttrainllm.training import writing
from statistics_cases import GUARD, State, array, functions, pieces


@pytest.fixture(scope="module")
def cpp() -> Any:
    return functions()


# -- the parts of a text ---------------------------------------------------------------------------


@given(st.text(max_size=40) | st.binary(max_size=40), st.floats(0, 1, exclude_max=True))
def test_the_split_is_that_of_the_corpus(cpp: Any, text: str | bytes, fraction: float) -> None:
    data = array(text.encode() if isinstance(text, str) else text)
    near = cpp.corpus_split_near(len(data), fraction)
    window = np.array(data[near : near + 4])
    assert cpp.corpus_split(window.ctypes.data, len(data), fraction) == split_position(
        data, fraction
    )


def test_the_validation_windows_are_those_of_the_corpus(cpp: Any) -> None:
    corpus = open_corpus([], val_fraction=0.1)
    for wanted, n_ctx in ((0, 64), (50, 64), (1, 2000), (10**6, 512), (7, 1), (3, 200_000)):
        expected = corpus.validation_offsets(wanted, n_ctx)
        count = cpp.corpus_validation_offsets(None, len(corpus.val), wanted, n_ctx)
        out = np.empty(count, np.int64)
        cpp.corpus_validation_offsets(out.ctypes.data, len(corpus.val), wanted, n_ctx)
        assert out.tolist() == expected.tolist()
    assert cpp.corpus_validation_offsets(None, 0, 5, 8) == 0


# -- counting --------------------------------------------------------------------------------------


def cpp_runs(cpp: Any, part: np.ndarray, validation: bool) -> list[np.ndarray]:
    starts, length = np.zeros(65, np.uint64), np.zeros(2, np.uint64)
    count = cpp.counting_runs(starts.ctypes.data, length.ctypes.data, len(part), validation)
    assert (length[1], starts[-1]) == (0, 0)
    return [part[int(start) : int(start + length[0])] for start in starts[:count]]


def cpp_lines(
    cpp: Any, train: np.ndarray, val: np.ndarray, n_vocab: int, size: int = 1 << 20
) -> list[CountingLine]:
    width = train.dtype.itemsize
    val_runs = cpp_runs(cpp, val if len(val) else train, True)
    n_val = sum(map(len, val_runs))
    state = State(cpp.counting_bytes(n_val, width))
    cpp.counting_begin(state.at, n_val, width)
    for read, runs in (("validation", val_runs), ("train", cpp_runs(cpp, train, False))):
        for run in runs:
            for number, piece in enumerate(pieces(run, size)):
                getattr(cpp, f"counting_{read}")(
                    state.at, piece.ctypes.data, len(piece), number == 0
                )
    n_counted = cpp.counting_counted(state.at)
    losses = [cpp.counting_guessing(n_vocab)]
    losses += [loss for n in range(1, 5) if (loss := cpp.counting_loss(state.at, n)) >= 0]
    state.check()
    return [
        CountingLine(name, loss, n_counted)
        for name, loss in zip(counting.NAMES, losses, strict=False)
    ]


def same_lines(got: Sequence[CountingLine], expected: Sequence[CountingLine]) -> None:
    assert [(line.name, line.n_counted) for line in got] == [
        (line.name, line.n_counted) for line in expected
    ]
    for one, other in zip(got, expected, strict=True):
        assert one.loss == pytest.approx(other.loss, rel=1e-12, abs=1e-12)


@pytest.mark.parametrize("size", [1 << 20, 10_007])
def test_counting_lines_of_tinyshakespeare_are_the_definition(cpp: Any, size: int) -> None:
    text = np.fromfile(shakespeare_path(), np.uint8)
    train, val = text[:1_003_854], text[1_003_854:]
    same_lines(cpp_lines(cpp, train, val, 256, size), counting.lines(train, val))


@given(
    st.lists(st.integers(0, 255), max_size=60),
    st.lists(st.integers(0, 255), max_size=60),
    st.sampled_from([np.uint8, np.uint16]),
    st.integers(1, 9),
    st.sampled_from([1, 50]),
)
@settings(deadline=None)
def test_counting_lines_are_the_definition(
    cpp: Any, train: list[int], val: list[int], kind: Any, size: int, coarse: int
) -> None:
    spread = 257 if kind is np.uint16 else 1  # ids up to 65,535
    train_part = np.array([spread * (token // coarse) for token in train], kind)
    val_part = np.array([spread * (token // coarse) for token in val], kind)
    expected = counting.lines(train_part, val_part, 65_536)
    same_lines(cpp_lines(cpp, train_part, val_part, 65_536, size), expected)


def test_runs_of_a_long_text_are_the_definition(cpp: Any) -> None:
    for most, validation in ((counting.MOST_TRAIN, False), (counting.MOST_VAL, True)):
        for n in (1, most, most + 1, most + 12_345):
            part = np.arange(n, dtype=np.int32)
            starts, length = np.zeros(64, np.uint64), np.zeros(1, np.uint64)
            count = cpp.counting_runs(starts.ctypes.data, length.ctypes.data, n, validation)
            expected = counting._runs(part, most)
            assert (count, int(length[0])) == (len(expected), len(expected[0]))
            assert starts[:count].tolist() == [int(run[0]) for run in expected]


def test_a_long_text_with_no_validation_part_is_the_definition(
    cpp: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = np.tile(np.fromfile(shakespeare_path(), np.uint8), 3)  # over MOST_VAL
    same_lines(cpp_lines(cpp, text, text[:0], 256), counting.lines(text, text[:0]))


def test_memory_for_counting_is_that_of_the_validation_part(cpp: Any) -> None:
    assert cpp.counting_bytes(111_540, 1) < 16 * 2**20
    assert cpp.counting_bytes(counting.MOST_VAL, 1) < 256 * 2**20


LOSSES = st.one_of(st.floats(0, 9), st.sampled_from([math.nan, math.inf, -math.inf, 2.0, 3.0]))


@given(LOSSES, st.lists(st.sampled_from([1.0, 2.0, 3.0, 4.5, 5.545]), min_size=1, max_size=5))
def test_standing_is_the_definition(cpp: Any, loss: float, losses: list[float]) -> None:
    lines = [CountingLine(str(number), value, 1) for number, value in enumerate(losses)]
    given_lines = np.array(losses)
    at = cpp.counting_standing(loss, given_lines.ctypes.data, len(losses))
    words = "not a number"
    if at >= 0:
        words = f"{'below' if at < len(lines) else 'above'} {lines[at % len(lines)]}"
    assert words == standing(loss, lines)


# -- what to make of it ----------------------------------------------------------------------------

LINES = [
    CountingLine(name, loss, 9)
    for name, loss in zip(counting.NAMES, (5.545, 3.347, 2.484, 2.046, 1.784), strict=True)
]


@given(st.integers(1, 10**9), st.integers(1, 10**9), st.floats(0, 200))
def test_warnings_are_the_definition(
    cpp: Any, n_parameters: int, train_bytes: int, epochs: float
) -> None:
    expected = writing.memorisation_warning(n_parameters, train_bytes, epochs)
    key = writing.WARNINGS[cpp.writing_warning(n_parameters, train_bytes, epochs)]
    enough = cpp.writing_enough(n_parameters)
    ratio = writing.show_ratio(train_bytes / n_parameters)
    values = {"ratio": ratio, "epochs": epochs, "enough": writing.show_bytes(enough)}
    assert expected == (writing.say(key, **values) if key else None)
    assert enough == math.ceil(n_parameters * writing.BYTES_TO_MEMORISE)


def test_epochs_are_those_of_the_configuration(cpp: Any) -> None:
    for name in PRESETS:
        config = load_config(name)
        sizes = (config.data.batch_size, config.data.accumulation, config.model.n_ctx)
        expected = config.tokens_per_step * config.training.steps / 1_003_854
        assert cpp.writing_epochs(*sizes, config.training.steps, 1_003_854) == expected


@given(
    st.none() | LOSSES,
    st.none() | LOSSES,
    st.integers(0, 5),
    st.integers(0, 200),
    st.none() | st.integers(0, 100),
    st.sampled_from(list(PRESETS)),
)
@settings(deadline=None, max_examples=300)
def test_actions_are_the_definition(
    cpp: Any,
    loss: float | None,
    best: float | None,
    n_lines: int,
    copied: int,
    unseen: int | None,
    preset: str,
) -> None:
    corpus, config, lines = open_corpus([], val_fraction=0.1), load_config(preset), LINES[:n_lines]
    expected = writing._actions(
        loss, best, lines, Copy(b"x" * copied, 0),
        None if unseen is None else Copy(b"x" * unseen, 0), corpus, config,
    )  # fmt: skip
    columns = [
        np.array([getattr(row, name) or 256 for row in PRESETS.values()], np.uint64)
        for name in ("n_vocab", "n_layer", "n_embd")
    ]
    presets = list(PRESETS)
    larger = cpp.writing_larger(
        *(column.ctypes.data for column in columns),
        len(presets), presets.index(preset), len(corpus.train_text),
    )  # fmt: skip
    codes = np.full(4, GUARD, np.uint32)
    losses = np.array([math.nan if value is None else value for value in (loss, best)])
    measured = (loss is not None) + 2 * (best is not None)
    given_lines = np.array([line.loss for line in lines])
    count = cpp.writing_actions(
        codes.ctypes.data, losses.ctypes.data, measured, given_lines.ctypes.data, n_lines,
        copied, -1 if unseen is None else unseen, larger >= 0,
    )  # fmt: skip
    ahead = -1 if loss is None else cpp.writing_ahead(loss, given_lines.ctypes.data, n_lines)
    values = {
        "loss": loss, "best": best, "n_bytes": copied, "total": 2 * config.training.steps,
        "line": lines[ahead] if ahead >= 0 else "", "preset": presets[larger] if larger >= 0 else "",
    }  # fmt: skip
    names = [list(writing.ACTIONS)[code] for code in codes[:count]]
    got = [writing.Advice(name, values).terminal for name in names]
    assert got == [advice.terminal for advice in expected]
    assert codes[3] == GUARD


def test_the_order_of_actions_and_warnings_is_that_of_the_header() -> None:
    header = (Path(build.SOURCE_DIR) / "statistics.h").read_text(encoding="utf-8")
    codes = dict(re.findall(r"WRITING_([A-Z_]+) = (\d+)", header))
    for number, name in enumerate(writing.ACTIONS):
        assert codes[name.upper()] == str(number)
    assert [codes[name] for name in ("FITS", "MEMORISES", "TOO_LARGE")] == ["0", "1", "2"]
    assert writing.WARNINGS == (None, "memorises", "too_large")


def test_an_update_ratio_is_that_of_the_norms(cpp: Any) -> None:
    draw = np.random.default_rng(3)
    tensors = [draw.normal(size=n).astype(np.float32) for n in (1, 97, 4096)]
    moved = [
        values + np.float32(1e-3) * draw.normal(size=len(values)).astype(np.float32)
        for values in tensors
    ]
    sums = np.zeros(2)
    for after, before in zip(moved, tensors, strict=True):
        for part in (slice(0, 50), slice(50, None)):
            now, was = after[part].copy(), before[part].copy()
            cpp.movement_add(sums.ctypes.data, now.ctypes.data, was.ctypes.data, len(now))
    before, after = (np.concatenate(parts).astype(np.float64) for parts in (tensors, moved))
    wanted = np.linalg.norm(after - before) / np.linalg.norm(before)
    assert cpp.movement_ratio(sums.ctypes.data) == pytest.approx(wanted, rel=1e-12)
    assert cpp.movement_ratio(np.zeros(2).ctypes.data) == 0
