"""Write kernels/cpp/letters.h: which characters are letters, and their lower case, as ranges.

The definition is Python's (text/likeness.py): a letter is what ``[^\\W\\d_]`` matches, lower case is
what ``str.lower`` gives one character. Run it with the oldest Python that is supported, so that the
table holds what every version agrees on: ``python tools/make_letters.py``.
"""

from __future__ import annotations

import re
import sys
import unicodedata
from pathlib import Path

FILE = Path(__file__).parent.parent / "src" / "posttrainllm" / "kernels" / "cpp" / "letters.h"
FIRST = 0x80  # ASCII needs no table
LETTER = re.compile(r"[^\W\d_]")

HEAD = """\
// letters.h: the letters of Unicode {version} beyond ASCII, and their lower case.
//
// Written by tools/make_letters.py from Python's own tables; do not edit. A letter is what Python's
// [^\\W\\d_] matches. U+0130 is missing from LOWER: its lower case is two characters (likeness.cpp).
#pragma once
#include <stdint.h>

// First and last character of a range of letters.
struct Letters {{
  uint32_t first, last;
}};

// Every `step`th character from first to last has the lower case of its own code plus `delta`.
struct Lower {{
  uint32_t first, last;
  int32_t step, delta;
}};
"""


def letter_ranges() -> list[list[int]]:
    """First and last code of every range of letters."""
    ranges: list[list[int]] = []
    for code in range(FIRST, sys.maxunicode + 1):
        if LETTER.match(chr(code)):
            if ranges and ranges[-1][1] == code - 1:
                ranges[-1][1] = code
            else:
                ranges.append([code, code])
    return ranges


def lower_ranges() -> list[list[int]]:
    """First and last code, step and difference of every range of upper case letters."""
    ranges: list[list[int]] = []
    for code in range(FIRST, sys.maxunicode + 1):
        lower = chr(code).lower()
        if lower == chr(code) or len(lower) > 1:
            continue
        delta = ord(lower) - code
        if ranges and ranges[-1][3] == delta:
            first, last, step, _ = ranges[-1]
            gap = code - last
            if gap == step or (first == last and gap <= 2):
                ranges[-1][1:3] = [code, gap]
                continue
        ranges.append([code, code, 1, delta])
    return ranges


def rows(ranges: list[list[int]]) -> str:
    """The ranges as lines of an initializer, up to 100 characters wide."""
    lines, line = [], ""
    for values in ranges:
        shown = ", ".join([f"0x{values[0]:X}", f"0x{values[1]:X}", *map(str, values[2:])])
        entry = f"{{{shown}}}, "
        if len(line) + len(entry) > 98:
            lines.append("  " + line.rstrip())
            line = ""
        line += entry
    return "\n".join([*lines, "  " + line.rstrip()])


def text() -> str:
    """The whole file."""
    return (
        HEAD.format(version=unicodedata.unidata_version)
        + f"\nconstexpr Letters LETTERS[] = {{\n{rows(letter_ranges())}\n}};\n"
        + f"\nconstexpr Lower LOWER[] = {{\n{rows(lower_ranges())}\n}};\n"
    )


if __name__ == "__main__":
    FILE.write_text(text(), encoding="utf-8")
