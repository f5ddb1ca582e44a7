"""Compiling the kernels: flags, freshness, errors. A small throw-away source keeps it quick."""

from __future__ import annotations

import ctypes
import json
import shutil

import pytest

from posttrainllm.errors import EngineError
from posttrainllm.kernels import build

THREE = 'extern "C" int three() { return 3; }\n'


@pytest.fixture(scope="module")
def zig_cache(tmp_path_factory):
    return tmp_path_factory.mktemp("zig")


@pytest.fixture
def tree(tmp_path, zig_cache, monkeypatch):
    """Folders for sources and libraries, in place of the package's own."""
    sources, libraries = tmp_path / "cpp", tmp_path / "lib"
    sources.mkdir()
    (sources / "probe.cpp").write_text(THREE)
    monkeypatch.setattr(build, "SOURCE_DIR", sources)
    monkeypatch.setattr(build, "LIBRARY_DIR", libraries)
    monkeypatch.setenv("ZIG_GLOBAL_CACHE_DIR", str(zig_cache))
    return sources, libraries


def compile_plain(tree, **options):
    sources, libraries = tree
    return build.compile_builds(builds=["plain"], sources=sources, destination=libraries, **options)


def test_compile_builds_makes_a_library_that_loads_and_only_when_something_changed(tree):
    sources, _ = tree
    lines = []
    assert build.stale_builds() == list(build.host_target().processors)
    assert compile_plain(tree, report=lines.append) == ["plain"]
    assert [line.split()[0] for line in lines] == ["compiling", "compiled"]
    assert build.available_builds() == ["plain"]
    assert "plain" not in build.stale_builds()
    assert ctypes.CDLL(str(build.library_path("plain"))).three() == 3
    first = build.build_id("plain")

    assert compile_plain(tree) == []
    library = build.library_path("plain")
    library.write_bytes(library.read_bytes()[:100])  # a disk that was full, a copy cut short
    assert compile_plain(tree) == ["plain"]
    assert build.build_id("plain") == first

    (sources / "probe.h").write_text("// a header counts as well\n")
    assert "plain" in build.stale_builds()
    assert compile_plain(tree) == ["plain"]
    assert build.build_id("plain") != first


def test_a_source_that_does_not_compile_is_an_error_that_shows_where(tree):
    sources, _ = tree
    (sources / "broken.cpp").write_text("int f() { return nothing; }\n")
    with pytest.raises(EngineError, match=r"broken\.cpp:1:18: error") as caught:
        compile_plain(tree)
    assert caught.value.message == "the 'plain' kernels do not compile"
    assert build.available_builds() == []


def test_a_function_that_nobody_defines_is_an_error_of_the_build(tree):
    sources, _ = tree
    text = 'int missing_everywhere();\nextern "C" int f() { return missing_everywhere(); }\n'
    (sources / "caller.cpp").write_text(text)
    with pytest.raises(EngineError, match="missing_everywhere"):
        compile_plain(tree)


def test_libraries_of_another_target_do_not_stay(tree):
    _, libraries = tree
    libraries.mkdir()
    for name in ("libposttrain-plain.other", "libposttrain-neon.so", "libposttrain-neon.json"):
        (libraries / name).touch()
    compile_plain(tree)
    kept = {path.suffix for path in libraries.iterdir()}
    assert kept == {build.host_target().suffix, ".json"}


def test_what_is_not_there_is_named_with_the_next_action(tree):
    sources, _ = tree
    with pytest.raises(EngineError, match="make kernels"):
        build.build_id("plain")
    with pytest.raises(EngineError, match="no kernel build 'avx1024'"):
        build.library_path("avx1024")
    shutil.rmtree(sources)
    with pytest.raises(EngineError, match="no C.. kernels in"):
        compile_plain(tree)


def test_contraction_is_off_and_no_fast_math_in_any_build():
    target = build.host_target()
    for name in target.processors:
        command = target.command(name)
        assert "-ffp-contract=off" in command
        assert not [flag for flag in command if "fast" in flag]


def test_the_kernels_here_are_built_from_the_sources_here():
    if not any(build.SOURCE_DIR.glob("*.cpp")):
        pytest.skip("there are no kernels yet")
    assert not build.stale_builds(), "run: make kernels"
    for name in build.available_builds():
        info = json.loads(build.library_path(name).with_suffix(".json").read_text())
        assert info == build.build_info(name)
