"""The WebAssembly builds: what they import and export, their memory limits, and that they are those of the sources."""

from __future__ import annotations

import pytest

from posttrainllm.kernels import build
from posttrainllm.kernels.build_wasm import PAGES, WASM, bits_of, with_limit
from posttrainllm.ops import OPS

KERNELS = [name for name in WASM.processors if name != "control"]
POOL = {"worker", "workers", "stop", "worker_failed", "failed"}


def read_number(module: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while module[at] & 0x80:
        value |= (module[at] & 0x7F) << shift
        at, shift = at + 1, shift + 7
    return value | module[at] << shift, at + 1


def sections(module: bytes) -> dict[int, bytes]:
    assert module[:8] == b"\0asm\1\0\0\0"
    found, at = {}, 8
    while at < len(module):
        size, body = read_number(module, at + 1)
        found[module[at]] = module[body : body + size]
        at = body + size
    assert at == len(module), "sections do not fill the file"
    return found


def exports(module: bytes) -> set[str]:
    section = sections(module)[7]
    count, at = read_number(section, 0)
    names = set()
    for _ in range(count):
        length, at = read_number(section, at)
        names.add(section[at : at + length].decode())
        at = read_number(section, at + length + 1)[1]
    return names


def read(name: str) -> bytes:
    return build.library_path(name, WASM).read_bytes()


def test_the_webassembly_builds_are_there_and_made_from_the_sources_here() -> None:
    assert not build.stale_builds(WASM), "run: make kernels"


@pytest.mark.parametrize("name", WASM.processors)
def test_a_module_imports_its_memory_alone_with_the_limit_of_its_pointer_size(name: str) -> None:
    section = sections(read(name))[2]
    assert section.startswith(b"\1\3env\6memory\2"), "one import: env.memory"
    flags, (_, at) = section[13], read_number(section, 14)
    threads = name.endswith("-threads")
    assert bool(flags & 2) == threads, "shared"
    assert bool(flags & 4) == (bits_of(name) == "wasm64"), "64-bit"
    if threads:
        limit, at = read_number(section, at)
        assert limit == PAGES[bits_of(name)]
    assert at == len(section)


@pytest.mark.parametrize("name", KERNELS)
def test_a_module_exports_the_driver_and_every_op(name: str) -> None:
    found = exports(read(name))
    assert set(OPS) <= found
    assert {"posttrain_run", "posttrain_workspace", "posttrain_op_name"} <= found
    assert {"control_sample", "control_penalize", "__heap_base", "__stack_pointer"} <= found
    pool = {word for word in POOL if f"posttrain_{word}" in found}
    assert pool == (POOL if name.endswith("-threads") else set())


def test_the_control_module_needs_no_vector_instructions() -> None:
    assert WASM.processors["control"] == "generic"
    assert {name for name in exports(read("control")) if name.startswith("posttrain")} == set()


@pytest.mark.parametrize("pages", [1, 127, 128, 65_535, 1 << 18, 1 << 28])
def test_a_limit_of_any_length_leaves_the_rest_of_the_module_as_it_is(pages: int) -> None:
    before = read("wasm64-threads")
    after = with_limit(before, pages)
    old, new = sections(before), sections(after)
    assert {kind for kind in old if old[kind] != new[kind]} <= {2}
    _, at = read_number(new[2], 14)
    assert read_number(new[2], at) == (pages, len(new[2]))


def test_contraction_is_off_and_no_fast_math_in_any_webassembly_build() -> None:
    for name in WASM.processors:
        command = WASM.command(name)
        assert "-ffp-contract=off" in command
        assert not [flag for flag in command if "fast" in flag or "relaxed" in flag]
