"""The C++ driver: the call table's layout, calls that it must refuse, and its thread pool under odd use."""

from __future__ import annotations

import ctypes
import os
import re
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from guarded import ENGINES, THREADS, CppOps, obtain
from op_cases import CASES
from op_inputs import Array, operands
from posttrainllm.engines.cpp_engine import ABSENT, CALL, NUMBER, aligned_memory, call_table
from posttrainllm.kernels.build import host_target
from posttrainllm.plan import BoundCall, Place

CPP = [name for name in ENGINES if name.startswith("cpp-")]
SOURCES = Path(__file__).parent.parent / "src" / "posttrainllm" / "kernels" / "cpp"


@pytest.fixture(params=CPP)
def library(request: pytest.FixtureRequest) -> Any:
    """Every build that this machine can run."""
    engine = obtain(request.param, pytest.skip)
    assert isinstance(engine, CppOps)
    return engine._library


def test_records_have_the_layout_of_the_header() -> None:
    header = (SOURCES / "call.h").read_text(encoding="utf-8")
    body = re.search(r"struct Call \{(.*?)\};", header, re.DOTALL)
    assert body
    sizes = {"u32": 4, "u64": 8, "i64": 8, "double": 8}
    fields = re.findall(r"^  (\w+) (\w+)(?:\[(\d+)\])?;", body[1], re.MULTILINE)
    at, found = 0, {}
    for kind, name, count in fields:
        found[name] = at
        at += sizes[kind] * int(count or 1)
    assert at == CALL.itemsize == 256
    assert CALL.fields is not None
    for name in ("op", "buf", "size", "attr"):
        assert CALL.fields[name][1] == found[name], name


# ---- calls that are refused ---------------------------------------------------------------------


def two_adds() -> Array:
    """add_forward twice, from 0 and 256 to 512, and from there to 768."""
    places = [Place("memory", at, (8, 8)) for at in (0, 64, 128, 192)]
    calls = [
        BoundCall("add_forward", (places[2], places[0], places[1]), (8, 8), ()),
        BoundCall("add_forward", (places[3], places[2], places[2]), (8, 8), ()),
    ]
    return call_table(calls, {"memory": 0})


def run(library: Any, table: Array, memory: Array, threads: int = 1) -> int:
    scratch = 4096
    assert library.posttrain_workspace(table.ctypes.data, len(table)) <= len(memory) - scratch
    code: int = library.posttrain_run(
        memory.ctypes.data, table.ctypes.data, len(table), scratch, threads
    )
    return code


def unknown_op(record: Any) -> None:
    record["op"] = len(NUMBER)


def huge_op(record: Any) -> None:
    record["op"] = 2**32 - 1


def operand_left_out(record: Any) -> None:
    record["buf"][1] = ABSENT


def odd_offset(record: Any) -> None:
    record["buf"][0] += 2


def no_rows(record: Any) -> None:
    record["size"][0] = 0


def negative_size(record: Any) -> None:
    record["size"][1] = -8


def accumulate_unknown(record: Any) -> None:
    record["op"] = NUMBER["linear_backward_bias"]
    record["attr"][0] = 3


def beta_without_scalars(record: Any) -> None:
    record["op"] = NUMBER["linear_backward_input"]
    record["size"][:3] = 2
    record["attr"][:2] = (0, 2)


def heads_that_do_not_divide(record: Any) -> None:
    record["op"] = NUMBER["attention_forward"]
    record["buf"][:4] = (512, 1024, 0, 256)
    record["size"][:4] = (1, 2, 8, 3)


def head_too_wide(record: Any) -> None:
    record["op"] = NUMBER["attention_forward"]
    record["buf"][:4] = (512, 1024, 0, 256)
    record["size"][:4] = (1, 1, 257, 1)


@pytest.mark.parametrize(
    "fault",
    [
        unknown_op,
        huge_op,
        operand_left_out,
        odd_offset,
        no_rows,
        negative_size,
        accumulate_unknown,
        beta_without_scalars,
        heads_that_do_not_divide,
        head_too_wide,
    ],
)
def test_a_call_that_is_not_valid_is_refused_by_its_number(
    library: Any, fault: Callable[[Any], None]
) -> None:
    memory = aligned_memory(8192)
    values = memory[:1024].view(np.float32)
    values[:128] = 1
    table = two_adds()
    fault(table[1])
    assert run(library, table, memory) == 2
    assert (values[128:192] == 2).all(), "the call before it has run"
    assert not values[192:256].any(), "the call itself has not"


def test_valid_calls_run_in_order(library: Any) -> None:
    memory = aligned_memory(8192)
    values = memory[:1024].view(np.float32)
    values[:64], values[64:128] = 1, 2
    assert run(library, two_adds(), memory) == 0
    assert (values[192:256] == 6).all()


def test_an_empty_table_is_no_error(library: Any) -> None:
    table = two_adds()[:0]
    assert library.posttrain_run(None, table.ctypes.data, 0, 0, 2) == 0
    assert library.posttrain_workspace(table.ctypes.data, 0) == 0


# ---- threads ------------------------------------------------------------------------------------

CASE = CASES["linear_forward-N97I101O103-transposed1"]


@pytest.mark.parametrize("name", CPP)
def test_the_pool_changes_its_size_from_call_to_call(name: str) -> None:
    engine, given = obtain(name, pytest.skip), operands(CASE)
    wanted = engine.run(CASE, given).outputs(CASE)["out"].tobytes()
    for threads in (*THREADS, 1, 9, 2, 64, 3, 3, 1, 300):
        got = engine.run(CASE, given, threads=threads)
        assert not got.broken
        assert got.outputs(CASE)["out"].tobytes() == wanted, f"{threads} threads"


@pytest.mark.parametrize("name", CPP)
def test_callers_on_several_threads_at_once_get_the_same_bits(name: str) -> None:
    engine, given = obtain(name, pytest.skip), operands(CASE)
    wanted = engine.run(CASE, given).outputs(CASE)["out"].tobytes()
    different: list[int] = []

    def caller(number: int) -> None:
        for threads in (1, 2, 3) * 8:
            if engine.run(CASE, given, threads=threads).outputs(CASE)["out"].tobytes() != wanted:
                different.append(number)

    callers = [threading.Thread(target=caller, args=(number,)) for number in range(4)]
    for one in callers:
        one.start()
    for one in callers:
        one.join()
    assert not different


MEETING = """
#include <pthread.h>
#include "pool.h"

static void* caller(void*) {
  for (int i = 0; i < 8000000; i++) pool_end(pool_begin(2));
  return nullptr;
}

extern "C" __attribute__((visibility("default"))) u32 threads_after_a_meeting() {
  pthread_t callers[4];
  for (pthread_t& one : callers) pthread_create(&one, nullptr, caller, nullptr);
  for (pthread_t& one : callers) pthread_join(one, nullptr);
  const u32 threads = pool_begin(2);
  pool_end(threads);
  return threads;
}
"""


@pytest.mark.skipif(sys.platform == "win32", reason="a library that is loaded cannot be removed")
def test_the_pool_is_free_again_after_callers_that_met(tmp_path: Path) -> None:
    """Claiming it takes one instruction; with two, callers in C lose it for good in about a second."""
    source, library, cache = (str(tmp_path / name) for name in ("meeting.cpp", "meeting.so", "zig"))
    Path(source).write_text(MEETING, encoding="utf-8")
    command = [sys.executable, "-m", "ziglang", *host_target().command("plain"), f"-I{SOURCES}"]
    done = subprocess.run(
        [*command, source, str(SOURCES / "pool.cpp"), "-o", library],
        capture_output=True,
        text=True,
        env=os.environ | {"ZIG_GLOBAL_CACHE_DIR": cache, "ZIG_LOCAL_CACHE_DIR": cache},
    )
    assert done.returncode == 0, done.stderr
    assert ctypes.CDLL(library).threads_after_a_meeting() == 2


FORK = """
import os, pytest, sys
from guarded import obtain
from op_cases import CASES
from op_inputs import operands
case = CASES[sys.argv[2]]
engine, given = obtain(sys.argv[1], pytest.skip), operands(case)
wanted = engine.run(case, given, threads=3).outputs(case)["out"].tobytes()
child = os.fork()
same = engine.run(case, given, threads=3).outputs(case)["out"].tobytes() == wanted
if child == 0:
    os._exit(0 if same else 3)
assert same and os.waitpid(child, 0)[1] == 0
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
@pytest.mark.parametrize("name", CPP)
def test_a_forked_process_has_a_pool_of_its_own(name: str) -> None:
    obtain(name, pytest.skip)
    command = [sys.executable, "-W", "ignore", "-c", FORK, name, str(CASE)]
    done = subprocess.run(
        command,
        cwd=Path(__file__).parent,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
