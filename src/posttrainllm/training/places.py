"""Where an export goes: a new name, which appears when everything behind it is written and was compared.

    .<name>.new-<pid>      beside it, being written; removed when anything fails

Read next: ``exporting.py``, which writes.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from posttrainllm.errors import CheckpointError
from posttrainllm.formats import archive, tinygpt
from posttrainllm.storage import free_bytes, read_error, show_bytes, sync_folder, write_error
from posttrainllm.training.models import Found
from posttrainllm.wording import setting, worded

SUFFIXES = {"tinygpt": tinygpt.SUFFIX, "zip": archive.SUFFIX}
"""How the name of a file ends, for each form that is one file."""


def new_file(found: Found, place: Path, form: str) -> Path:
    """The file that a place stands for: itself, or one called as the model is in a folder.

    Raises: CheckpointError when it exists, or the place is another file.
    """
    suffix = SUFFIXES[form]
    if os.path.lexists(place) and not os.path.isdir(place) and not place.name.endswith(suffix):
        raise CheckpointError(
            f"{place} exists and is no folder",
            f"give a folder, or a new name that ends with {suffix}",
        )
    path = place if place.name.endswith(suffix) else place / (_name(found) + suffix)
    if os.path.lexists(path):
        raise CheckpointError(f"{path} exists", "give another place, or remove it")
    return path


def _name(found: Found) -> str:
    if found.card is not None:
        return found.card.name
    path = found.checkpoint.path.resolve()
    if path.parent.name == "checkpoints":
        return path.parent.parent.name
    return path.stem if path.is_file() else path.name


def check_model_folder(place: Path) -> None:
    """Refuse a place that cannot become a model folder, also one that is called like a file of a model.

    Raises: CheckpointError.
    """
    for form, suffix in SUFFIXES.items():
        if place.name.endswith(suffix):
            raise CheckpointError(
                f"{place} has the name of a file, and a Hugging Face model is a folder",
                worded("give a folder, or write the file: {it}", it=setting("form", form)),
            )
    check_folder(place)


def check_folder(place: Path) -> None:
    """Refuse a place that cannot become a folder of ours: it must be new, or empty.

    Raises: CheckpointError.
    """
    why = ""
    if place.resolve() == Path.cwd():
        why = "is the folder you are in"
    elif os.path.isdir(place):
        try:
            why = "exists and is not empty" if any(place.iterdir()) else ""
        except OSError as error:
            raise CheckpointError(read_error(place, error).message, "give a new folder") from None
    elif os.path.lexists(place):
        why = "exists and is no folder"
    if why:
        raise CheckpointError(f"{place} {why}", "give a new folder")


@contextmanager
def hidden(path: Path, need: int) -> Iterator[Path]:
    """Give a name beside ``path`` to write to; what is there at the end gets the right name.

    Raises: CheckpointError when there is no room, or the place cannot be written. Errors of what is read
    back name ``path``.
    """
    temporary = path.with_name(f".{path.name}.new-{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        free = free_bytes(path.parent)
        if free is not None and need > free:
            raise CheckpointError(
                f"{path} needs {show_bytes(need)}, the disk has {show_bytes(free)}",
                "free some space, or give another place",
            )
        remove(temporary)
        yield temporary
        if os.path.isdir(path):
            path.rmdir()  # empty, as was checked
        temporary.rename(path)
        sync_folder(path.parent)
    except CheckpointError as error:
        message = error.message.replace(str(temporary), str(path))
        raise CheckpointError(message, error.hint) from None
    except OSError as error:
        failed = write_error("export", path.parent, error, need=need)
        raise CheckpointError(failed.message, "give another place") from None
    finally:
        remove(temporary)


def remove(path: Path) -> None:
    """Remove a file or a folder, if it is there and can be removed."""
    shutil.rmtree(path, ignore_errors=True)
    with suppress(OSError):
        path.unlink(missing_ok=True)
