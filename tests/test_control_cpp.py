"""The C++ control plane returns the bits of ``control.py``, in every build, on thousands of cases.

Results are compared as bytes, so that the sign of a zero counts too. Buffers that C++ writes have
one entry more than it may write, with a guard value in it.
"""

from __future__ import annotations

import ctypes
import os
import struct
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from posttrainllm import control
from posttrainllm.kernels import build
from posttrainllm.kernels.build_wasm import WASM
from posttrainllm.machine import instruction_sets

# In the order of the codes in control.h.
KINDS: tuple[control.Init, ...] = ("normal", "residual", "zeros", "ones")
SCHEDULES: tuple[control.Schedule, ...] = ("cosine", "constant", "wsd")

GUARD = 77
BUILDS = [name for name in instruction_sets() if name in build.host_target().processors]

u32, u64, i64, f64 = ctypes.c_uint32, ctypes.c_uint64, ctypes.c_int64, ctypes.c_double
pointer = ctypes.c_void_p
SIGNATURES: dict[str, tuple[Any, list[Any]]] = {
    "philox": (None, [pointer] * 3),
    "stream_id": (u64, [ctypes.c_char_p, u64]),
    "initial_values": (None, [pointer, u64, u64, u64, u64, u32, u32]),
    "batch_offsets": (None, [pointer, u64, u64, u64, u64, i64, i64]),
    "token_index": (None, [pointer] * 4 + [u64]),
    "learning_rate": (f64, [u64, u64, u32, f64, u64, f64, f64]),
    "bias_corrections": (None, [pointer, u64, f64, f64]),
    "penalize": (None, [pointer, pointer, u64, pointer, u64, f64]),
    "sample": (i64, [pointer] * 4 + [u64, u64, u64, f64, u64, f64]),
}


@pytest.fixture(scope="module", params=BUILDS)
def cpp(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The functions of control.h by their names without the prefix.

    They come from the library that the engine loads; where that is not built, from control.cpp
    alone, compiled here with the same flags.
    """
    name = request.param
    path = build.library_path(name)
    if name in build.stale_builds():
        path = compile_control(name, tmp_path_factory.mktemp("control"))
    library = ctypes.CDLL(str(path))
    functions = type("Functions", (), {})()
    for function, (result, arguments) in SIGNATURES.items():
        bound = library[f"control_{function}"]
        bound.restype, bound.argtypes = result, arguments
        setattr(functions, function, bound)
    return functions


def compile_control(name: str, folder: Path) -> Path:
    path = folder / f"libcontrol-{name}{build.host_target().suffix}"
    source = build.SOURCE_DIR / "control.cpp"
    flags = [*build.host_target().command(name), "-Wall", "-Wextra", "-Werror"]
    command = [sys.executable, "-m", "ziglang", *flags, str(source), "-o", str(path)]
    cache = str(folder.parent / "zig-cache")
    environment = os.environ | {"ZIG_GLOBAL_CACHE_DIR": cache, "ZIG_LOCAL_CACHE_DIR": cache}
    subprocess.run(command, check=True, env=environment)
    return path


def bits(values: Any) -> bytes:
    return np.ascontiguousarray(values).tobytes()


def double_bits(*values: float) -> bytes:
    return struct.pack(f"={len(values)}d", *values)


def seeds(rng: np.random.Generator, count: int) -> Iterator[int]:
    """Seeds of every length: some small, some of all 64 bits, and the ends."""
    yield from (0, 1, 2**32 - 1, 2**32, 2**64 - 1)
    for _ in range(count - 5):
        yield int(rng.integers(0, 2**64, dtype=np.uint64)) >> int(rng.integers(0, 64))


# -- random numbers, initial values ---------------------------------------------------------------


def test_philox_is_the_definition(cpp: Any) -> None:
    rng = np.random.default_rng(1)
    for _ in range(2000):
        key, counter = (rng.integers(0, 2**32, n, dtype=np.uint32) for n in (2, 4))
        out = np.empty(4, np.uint32)
        cpp.philox(out.ctypes.data, key.ctypes.data, counter.ctypes.data)
        assert bits(out) == bits(control.philox(key.tolist(), counter.tolist()))


def test_stream_id_is_the_definition(cpp: Any) -> None:
    for name in ("", "a", "wte.weight", "h.11.attn.c_attn.weight", "ñ€𝄞", "x" * 1000):
        text = name.encode()
        assert cpp.stream_id(text, len(text)) == control.stream_id(name)


@pytest.mark.parametrize("kind", KINDS)
def test_initial_values_are_the_definition(cpp: Any, kind: control.Init) -> None:
    rng = np.random.default_rng(2)
    for seed in seeds(rng, 60):
        name = f"h.{rng.integers(0, 99)}.weight"
        start = int(rng.integers(0, 2**40)) >> int(rng.integers(0, 40))
        count, n_layer = int(rng.integers(0, 300)), int(rng.integers(1, 100))
        out = np.full(count + 1, GUARD, np.float32)
        stream = control.stream_id(name)
        code = KINDS.index(kind)
        cpp.initial_values(out.ctypes.data, seed, stream, start, count, code, n_layer)
        expected = control.initial_values(seed, name, count, kind, n_layer, start)
        assert bits(out[:count]) == bits(expected)
        assert out[count] == GUARD


def test_initial_values_of_a_large_tensor_are_the_definition(cpp: Any) -> None:
    count = 200_003
    out = np.empty(count, np.float32)
    cpp.initial_values(out.ctypes.data, 1, control.stream_id("wte.weight"), 0, count, 0, 3)
    assert bits(out) == bits(control.initial_values(1, "wte.weight", count, "normal", 3))


# -- data order ------------------------------------------------------------------------------------


def test_batch_offsets_are_the_definition(cpp: Any) -> None:
    rng = np.random.default_rng(3)
    for seed in seeds(rng, 1000):
        step = int(rng.integers(0, 10**8))
        first, rows = int(rng.integers(0, 2**40)) >> int(rng.integers(0, 41)), 7
        low = int(rng.integers(-(2**40), 2**40))
        high = low + 1 + (int(rng.integers(0, 2**62)) >> int(rng.integers(0, 62)))
        out = np.full(rows + 1, GUARD, np.int64)
        cpp.batch_offsets(out.ctypes.data, seed, step, first, rows, low, high)
        assert bits(out[:rows]) == bits(
            control.batch_offsets(seed, step, rows, low, high, first_row=first)
        )
        assert out[rows] == GUARD


@pytest.mark.parametrize("n_vocab", [1, 2, 256, 257, 65_536, 65_537, 2**31 - 1])
def test_token_index_is_the_definition(cpp: Any, n_vocab: int) -> None:
    rng = np.random.default_rng(n_vocab)
    for n in [0, 1, 2, 5, 1024, *rng.integers(0, 600, 150).tolist()]:
        ids = rng.integers(0, n_vocab, n, dtype=np.int32)
        if n > 4:
            ids[rng.integers(0, n, n // 4)] = n_vocab - 1  # the largest id, and repeats
        got = [np.full(n + 1, GUARD, np.int32) for _ in range(3)]
        cpp.token_index(*(part.ctypes.data for part in got), ids.ctypes.data, n)
        for part, expected in zip(got, control.token_index(ids), strict=True):
            assert bits(part[:n]) == bits(expected)
            assert part[n] == GUARD


# -- schedule --------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", SCHEDULES)
def test_learning_rate_is_the_definition(cpp: Any, kind: control.Schedule) -> None:
    rng = np.random.default_rng(4)
    code = SCHEDULES.index(kind)
    for _ in range(4000):
        steps = 1 + (int(rng.integers(0, 10**8)) >> int(rng.integers(0, 27)))
        step = int(rng.integers(0, 2 * steps + 2))
        warmup = int(rng.integers(0, steps + 1)) >> int(rng.integers(0, 10))
        peak = float(10 ** rng.uniform(-9, 1))
        ratio, fraction = (float(np.clip(rng.uniform(-0.2, 1.2), 0, 1)) for _ in range(2))
        got = cpp.learning_rate(step, steps, code, peak, warmup, ratio, fraction)
        expected = control.learning_rate(step, steps, kind, peak, warmup, ratio, fraction)
        assert double_bits(got) == double_bits(expected)


@pytest.mark.parametrize("kind", SCHEDULES)
def test_every_step_of_a_run_has_the_learning_rate_of_the_definition(
    cpp: Any, kind: control.Schedule
) -> None:
    for step in range(1, 1501):
        got = cpp.learning_rate(step, 1500, SCHEDULES.index(kind), 3e-3, 100, 0.1, 0.2)
        expected = control.learning_rate(step, 1500, kind, 3e-3, 100, 0.1, 0.2)
        assert double_bits(got) == double_bits(expected)


def test_bias_corrections_are_the_definition(cpp: Any) -> None:
    rng = np.random.default_rng(5)
    for _ in range(4000):
        step = int(rng.integers(0, 10**8)) >> int(rng.integers(0, 27))
        betas = (1 - 10 ** rng.uniform(-6, 0, 2)).tolist()
        out = np.full(3, GUARD, np.float64)
        cpp.bias_corrections(out.ctypes.data, step, *betas)
        assert bits(out[:2]) == double_bits(*control.bias_corrections(step, *betas))
        assert out[2] == GUARD


# -- sampling --------------------------------------------------------------------------------------


def choose(cpp: Any, logits: Any, seed: int, position: int, *settings: Any) -> tuple[int, bytes]:
    n = len(logits)
    probability, weights = np.full(2, GUARD, np.float64), np.full(n + 1, GUARD, np.float64)
    order = np.full(n + 1, GUARD, np.uint32)
    temperature, top_k, top_p = settings
    token = cpp.sample(
        probability.ctypes.data, weights.ctypes.data, order.ctypes.data, logits.ctypes.data,
        n, seed, position, temperature, top_k, top_p,
    )  # fmt: skip
    assert probability[1] == weights[n] == order[n] == GUARD
    return token, double_bits(float(probability[0]))


def test_samples_are_the_definition(cpp: Any) -> None:
    rng = np.random.default_rng(6)
    temperatures = [0.0, 1.0, 0.8, 5e-324, 1e-300, 1e-5, 1e5, 1e300]
    for i, seed in enumerate(seeds(rng, 4000)):
        n = int(rng.choice([1, 2, 3, 17, 256]))
        spread = float(10 ** rng.uniform(-2, 2.5))
        logits = (rng.normal(size=n) * spread).astype(np.float32)
        if i % 3 == 0:
            logits = np.round(logits)  # many equal ones, and zeros of both signs
        temperature = float(rng.choice([*temperatures, 10 ** rng.uniform(-2, 2)]))
        top_k = int(rng.choice([0, 1, 2, n // 2, n - 1, n, 1000]))
        top_p = float(rng.choice([1.0, 5e-324, 1e-9, 1 - 2**-53, rng.uniform(1e-9, 1)]))
        position = int(rng.integers(0, 2**40))
        settings = (temperature, top_k, top_p)
        token, probability = control.sample(logits, seed, position, *settings)
        assert choose(cpp, logits, seed, position, *settings) == (token, double_bits(probability))


@pytest.mark.parametrize(
    "settings", [(1.0, 0, 1.0), (0.8, 40, 1.0), (0.8, 0, 0.95), (1.2, 200, 0.9)]
)
def test_samples_from_a_large_vocabulary_are_the_definition(cpp: Any, settings: Any) -> None:
    rng = np.random.default_rng(7)
    for position in range(5):
        logits = (rng.normal(size=50_257) * 3).astype(np.float32)
        token, probability = control.sample(logits, 1, position, *settings)
        assert choose(cpp, logits, 1, position, *settings) == (token, double_bits(probability))


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_non_finite_logits_are_refused_in_cpp_too(cpp: Any, value: float) -> None:
    for at in (0, 100, 255):
        logits = np.zeros(256, np.float32)
        logits[at] = value
        for settings in ((0.0, 0, 1.0), (1.0, 0, 1.0), (1.0, 5, 0.9)):
            token, probability = choose(cpp, logits, 1, 1, *settings)
            assert token == -1
            assert probability == double_bits(GUARD)


def test_penalized_logits_are_the_definition(cpp: Any) -> None:
    rng = np.random.default_rng(8)
    for i in range(2000):
        n, count = int(rng.choice([1, 2, 17, 256, 1000])), int(rng.choice([0, 1, 5, 64, 300]))
        logits = (rng.normal(size=n) * 10 ** rng.uniform(-3, 2.5)).astype(np.float32)
        if i % 3 == 0:
            logits = np.round(logits)  # zeros of both signs
        recent = rng.integers(0, n, count, dtype=np.int32)
        penalty = float(rng.choice([1.0, 1 + 2**-52, 1.1, 2.0, rng.uniform(1, 100)]))
        out = np.full(n + 1, GUARD, np.float32)
        cpp.penalize(out.ctypes.data, logits.ctypes.data, n, recent.ctypes.data, count, penalty)
        assert out[n] == GUARD
        assert bits(out[:n]) == bits(control.penalize(logits, recent, penalty))


def test_penalized_logits_are_the_definition_as_webassembly(require: Any) -> None:
    """The module that browser and node take: memory of ours, pointers of 32 bits."""
    wasmtime = require("wasmtime")
    path = build.library_path("control", WASM)
    assert path.exists(), "run: make kernels"
    store = wasmtime.Store()
    module = wasmtime.Module.from_file(store.engine, str(path))
    memory = wasmtime.Memory(store, wasmtime.MemoryType(wasmtime.Limits(64, 64)))
    exports = wasmtime.Instance(store, module, [memory]).exports(store)
    start = -(-exports["__heap_base"].value(store) // 64) * 64
    rng = np.random.default_rng(9)
    for _ in range(50):
        logits = (rng.normal(size=256) * 10 ** rng.uniform(-3, 2.5)).astype(np.float32)
        recent = rng.integers(0, 256, int(rng.integers(0, 65)), dtype=np.int32)
        penalty = float(rng.uniform(1, 10))
        memory.write(store, logits.tobytes() + recent.tobytes(), start + 1024)
        exports["control_penalize"](
            store, start, start + 1024, 256, start + 2048, len(recent), penalty
        )
        got = bytes(memory.read(store, start, start + 1024))
        assert got == bits(control.penalize(logits, recent, penalty))
