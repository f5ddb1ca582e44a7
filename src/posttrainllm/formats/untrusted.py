"""Opening files that someone else may have written: plain files only, small JSON, one-line refusals.

What is refused here: links that lead out of the folder, pipes and devices (opening one may block
for ever), JSON that is too large, too deep, repeats a name or holds NaN.
Read next: ``tensor_file.py`` and ``huggingface.py``, which check what the files say.
"""

from __future__ import annotations

import json
import stat
from pathlib import Path
from typing import Any, NoReturn

from posttrainllm.errors import CheckpointError
from posttrainllm.settings import show
from posttrainllm.storage import read_error, show_bytes

DAMAGED = "the file is damaged: take another checkpoint, or copy the folder again"

MAX_JSON_BYTES = 8 * 2**20
MAX_CONTAINERS = 200_000  # lists and objects, which take twenty times their two characters


def plain_file(folder: Path, name: str) -> Path:
    """Return the path of a regular file that lies inside ``folder``.

    A link may stay inside the folder. The one exception is the cache of huggingface_hub, whose
    ``snapshots/<revision>/`` holds links into ``blobs/`` beside it.

    Raises: CheckpointError.
    """
    path = folder / name
    plain = name.isprintable() and not any(character in name for character in "/\\:")
    if not plain or name in ("", ".", "..") or len(name) > 255:
        raise CheckpointError(f"{folder}: {show(name)} is not the name of a file", DAMAGED)
    try:
        target = path.resolve(strict=True)
        mode = target.stat().st_mode
        inside = [folder.resolve(strict=True)]
    except FileNotFoundError:
        raise CheckpointError(f"{folder} has no {name}", "is this the right folder?") from None
    except (OSError, RuntimeError) as error:  # RuntimeError: a loop of links, before Python 3.13
        raise read_error(path, error) from None
    if inside[0].parent.name == "snapshots":
        inside.append(inside[0].parent.parent / "blobs")
    if not any(target.is_relative_to(allowed) for allowed in inside):
        raise CheckpointError(
            f"{path} is a link that leaves its folder, to {show(str(target))}",
            "copy the file itself into the folder",
        )
    if not stat.S_ISREG(mode):
        raise CheckpointError(
            f"{path} is not a regular file", "copy the file itself into the folder"
        )
    return path


def read_object(path: Path) -> dict[str, Any]:
    """Read a JSON file whose top level is an object.

    Raises: CheckpointError for anything that strict JSON of a reasonable size is not.
    """
    try:
        with path.open("rb") as stream:
            content = stream.read(MAX_JSON_BYTES + 1)
    except OSError as error:
        raise read_error(path, error) from None
    if len(content) > MAX_JSON_BYTES:
        raise CheckpointError(
            f"{path} is larger than {show_bytes(MAX_JSON_BYTES)}, too large for its kind", DAMAGED
        )
    return parse_object(content, str(path))


def parse_object(content: bytes, source: str) -> dict[str, Any]:
    """Read strict JSON: UTF-8, an object on top, no name twice in an object, no NaN or Infinity.

    Raises: CheckpointError, naming ``source`` and the place.
    """
    if content.count(b"[") + content.count(b"{") > MAX_CONTAINERS:
        raise CheckpointError(
            f"{source} has more than {MAX_CONTAINERS:,} lists and objects, too many for its kind",
            DAMAGED,
        )
    try:
        document = json.loads(
            content.decode("utf-8"),
            object_pairs_hook=_without_repeats,
            parse_constant=_refuse_constant,
        )
    except UnicodeDecodeError as error:
        raise CheckpointError(f"{source} is not UTF-8 at byte {error.start}", DAMAGED) from None
    except json.JSONDecodeError as error:
        place = f"line {error.lineno}, column {error.colno}"
        raise CheckpointError(f"{source} is not JSON: {error.msg} at {place}", DAMAGED) from None
    except RecursionError:
        raise CheckpointError(f"{source} is nested too deeply", DAMAGED) from None
    except ValueError as error:  # ours below, or a number with more digits than Python reads
        raise CheckpointError(f"{source}: {error}", DAMAGED) from None
    if not isinstance(document, dict):
        raise CheckpointError(f"{source} must hold a JSON object, got {show(document)}", DAMAGED)
    return document


def check_version(document: dict[str, Any], supported: int, source: str) -> None:
    """Refuse a file of a format that this version does not know.

    Raises: CheckpointError.
    """
    version = document.get("format_version")
    if type(version) is not int or version < 1:
        raise CheckpointError(
            f"{source}: format_version must be a whole number from 1 on, got {show(version)}",
            DAMAGED,
        )
    if version > supported:
        raise CheckpointError(
            f"{source} has format_version {show(version)}; this version reads up to {supported}",
            "update posttrainllm",
        )


def _without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        seen: set[str] = set()
        for name, _ in pairs:
            if name in seen:
                raise ValueError(f"the name {show(name)} stands there twice")
            seen.add(name)
    return found


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a JSON number")
