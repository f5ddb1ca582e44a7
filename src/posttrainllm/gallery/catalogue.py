"""The models of the gallery: which there are, what their cards say, and their weights.

    models/NAME.safetensors     weights as int8 (formats/quantised.py)
    models/NAME.json            the card: what it was trained on, how, how good it is, and what it is bad at
    recipes/NAME.toml           the configuration it was trained with: posttrainllm train --config

What this is: finding and reading them. A card and its weights belong together by the hash in the card.
What this is not: training them, which is ``tools/train_gallery.py``.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import ClassVar, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from posttrainllm.config import SamplingConfig
from posttrainllm.errors import CheckpointError
from posttrainllm.formats.quantised import Quantised, read_quantised
from posttrainllm.formats.untrusted import DAMAGED, check_version, read_object
from posttrainllm.settings import show
from posttrainllm.storage import hash_file

FOLDER = Path(__file__).parent / "models"
RECIPES = Path(__file__).parent / "recipes"
PREFIX = "gallery:"
"""In front of a name: the gallery's model, whatever runs there are."""

MOST_BYTES = 12_000_000  # of a model, so that the package stays small


class _Part(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)


class Data(_Part):
    """The text a model was trained on; sizes in bytes, validation taken from its end."""

    name: str
    about: str
    licence: str
    sha256: str = Field(pattern=r"^[0-9a-f]{64}$")
    bytes: int
    train_bytes: int
    val_bytes: int


class Training(_Part):
    """How it was trained; ``step`` is the one that was kept, the best on the validation part."""

    commands: list[str]
    steps: int
    step: int
    tokens: int
    seconds: float
    engine: str
    device: str


class Losses(_Part):
    """Nats a token over the whole validation part, before and after rounding to int8."""

    float32: float
    int8: float
    windows: int
    n_ctx: int


class Sample(_Part):
    """A text that a command writes again, on every build of the C++ kernels."""

    command: str
    prompt: str
    seed: int
    max_tokens: int
    text: str


class Card(_Part):
    """What there is to know about a model of the gallery."""

    FORMAT: ClassVar[int] = 1

    name: str
    title: str
    parameters: int
    shape: str
    file: str
    sha256: str = Field(pattern=r"^[0-9a-f]{64}$")
    bytes: int
    data: Data
    training: Training
    losses: Losses
    bits_per_byte: float
    bad_at: list[str]
    sampling: dict[str, float]
    """How it writes unless told otherwise, as ``SamplingConfig`` has it; the rest is the default."""
    sample: Sample

    @property
    def path(self) -> Path:
        """The weights."""
        return FOLDER / self.file

    @property
    def writes_with(self) -> SamplingConfig:
        """The settings it writes with unless told otherwise."""
        return SamplingConfig.model_validate(self.sampling)

    @classmethod
    def read(cls, path: Path) -> Self:
        """Read a card. Raises: CheckpointError, naming the file and the first field that is wrong."""
        document = read_object(path)
        check_version(document, cls.FORMAT, str(path))
        fields = {name: value for name, value in document.items() if name != "format_version"}
        try:
            return cls.model_validate(fields)
        except ValidationError as error:
            first = error.errors(include_url=False, include_context=False)[0]
            place = ".".join(str(part) for part in first["loc"])
            raise CheckpointError(f"{path}: {place}: {first['msg'].lower()}", DAMAGED) from None


@cache
def names() -> tuple[str, ...]:
    """The models that are there, the first one first in lists."""
    found = {path.stem for path in FOLDER.glob("*.json")}
    order = ["shakespeare", "shakespeare-small", "python"]
    return tuple(sorted(found, key=lambda name: (order.index(name) if name in order else 9, name)))


def cards() -> Iterator[Card]:
    """Every card. Raises: CheckpointError for a damaged one."""
    return (card(name) for name in names())


def card(name: str) -> Card:
    """The card of a model. Raises: CheckpointError for an unknown name."""
    if name not in names():
        raise CheckpointError(
            f"there is no model {show(name)} in the gallery", f"there are: {', '.join(names())}"
        )
    return Card.read(FOLDER / f"{name}.json")


def named(name: str) -> str | None:
    """The gallery's name behind what a user gave, with or without ``gallery:``; None when it is no such name.

    Raises: CheckpointError for an unknown name after ``gallery:``.
    """
    if name.startswith(PREFIX):
        return card(name.removeprefix(PREFIX)).name
    return name if name in names() else None


def load(model: Card) -> Quantised:
    """The weights of a model, float32. Raises: CheckpointError when the file is not the card's."""
    try:
        found = hash_file(model.path)
    except OSError as error:
        raise CheckpointError(
            f"{model.path} cannot be read: {error.strerror}", "install the package again"
        ) from None
    if (found.sha256, found.bytes) != (model.sha256, model.bytes):
        raise CheckpointError(
            f"{model.path} is not the file that its card describes", "install the package again"
        )
    return read_quantised(model.path)
