"""The WebAssembly builds of the C++ kernels: flags and names; ``build.py`` compiles them.

Four modules hold all kernels: 32 and 64 bits, each with and without threads; a host takes the
smallest that its plan and its environment allow. ``control`` holds the control plane and the
statistics of text, and needs nothing newer than plain WebAssembly. All import their memory (``env.memory``) and nothing
else, so that the host makes it once, at the size that the plan says.
"""

from __future__ import annotations

from pathlib import Path

from posttrainllm.kernels.build import FLAGS, Target

STACK_BYTES = 1 << 20  # kernels keep tiles of up to 128 KiB on the stack
SIMD = "generic+simd128+bulk_memory+nontrapping_fptoint+sign_ext"
PAGE = 1 << 16
PAGES = {"wasm32": (1 << 32) // PAGE, "wasm64": (1 << 34) // PAGE}
"""Pages of memory a module may be given; beyond 16 GiB no browser has 64-bit memory today."""

# zig hides symbols on WebAssembly unless they say otherwise, and the sources say so for all that a
# host calls. __heap_base is where the host's own data may start.
LINK_FLAGS = (
    "-Wl,--no-entry",
    "-Wl,--import-memory",
    "-Wl,--export-dynamic",
    "-Wl,--export=__heap_base",
    "-Wl,--export=__stack_pointer",
    f"-Wl,-z,stack-size={STACK_BYTES}",
)

# What statistics.h declares: for hosts without Python, and no engine needs it.
STATISTICS = ("corpus.cpp", "counting.cpp", "likeness.cpp", "movement.cpp", "writing.cpp")

# Shared memory needs a limit, and the compiler takes none above 32 bits: ``finish`` sets ours.
SHARED_FLAGS = ("-Wl,--shared-memory", f"-Wl,--max-memory={(1 << 32) - PAGE}")


class WasmTarget(Target):
    """WebAssembly without a system: a build's name says its pointer size and whether it has threads."""

    def command(self, build: str) -> list[str]:
        """See ``Target.command``."""
        shared = SHARED_FLAGS if build.endswith("-threads") else ()
        triple = ("-target", f"{bits_of(build)}-freestanding")
        mcpu = f"-mcpu={self.processors[build]}"
        return ["cc", "-x", "c++", *FLAGS, *LINK_FLAGS, *shared, *triple, mcpu]

    def units(self, build: str, sources: Path) -> list[Path]:
        """See ``Target.units``."""
        if build == "control":
            return [sources / "control.cpp", *(sources / name for name in STATISTICS)]
        return [unit for unit in super().units(build, sources) if unit.name not in STATISTICS]

    def finish(self, build: str, library: Path) -> None:
        """See ``Target.finish``."""
        if build.endswith("-threads"):
            library.write_bytes(with_limit(library.read_bytes(), PAGES[bits_of(build)]))


def bits_of(build: str) -> str:
    """``wasm32`` or ``wasm64``."""
    return "wasm64" if build.startswith("wasm64") else "wasm32"


def with_limit(module: bytes, pages: int) -> bytes:
    """The module with another upper limit on the shared memory that it imports, its only import.

    Layout: https://webassembly.github.io/spec/core/binary/modules.html (import section, limits).
    """
    at = 8  # behind magic number and version
    while True:
        kind, (size, body) = module[at], _number(module, at + 1)
        if kind == 2:
            break
        at = body + size
    end = _number(module, body)[1]  # behind the number of imports
    for _ in range(2):  # "env", "memory"
        length, text = _number(module, end)
        end = text + length
    assert module[end] == 2, "the first import is a memory"
    assert module[end + 1] & 1, "and has an upper limit"
    limit = _number(module, end + 2)[1]
    rest = _number(module, limit)[1]
    section = module[body:limit] + _encoded(pages) + module[rest : body + size]
    return module[: at + 1] + _encoded(len(section)) + section + module[body + size :]


def _number(module: bytes, at: int) -> tuple[int, int]:
    """An unsigned LEB128 number, and where it ends."""
    value = shift = 0
    while True:
        byte = module[at]
        value |= (byte & 0x7F) << shift
        at, shift = at + 1, shift + 7
        if byte < 0x80:
            return value, at


def _encoded(value: int) -> bytes:
    out = bytearray()
    while value >= 0x80:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*out, value])


WASM = WasmTarget(
    "WebAssembly",
    ".wasm",
    {
        "control": "generic",
        "wasm32": SIMD,
        "wasm64": SIMD,
        "wasm32-threads": f"{SIMD}+atomics",
        "wasm64-threads": f"{SIMD}+atomics",
    },
    prefix="posttrain-",
)
"""The builds by name, as ``host_target()`` is for this machine."""
