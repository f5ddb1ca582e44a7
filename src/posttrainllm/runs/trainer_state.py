"""What a checkpoint says besides numbers in tensors: ``trainer_state.json``.

Everything that decides how training goes on stands here: the step, the whole configuration, the
corpus by its hash, and which build of which engine computed the numbers, so that a resumed run can
use the same one and stay bit-identical.
"""

from __future__ import annotations

import json
import math
from datetime import UTC, datetime
from typing import Any, ClassVar, Self

from pydantic import BaseModel, ConfigDict, Field, JsonValue, ValidationError, field_validator

import posttrainllm
from posttrainllm.config import TrainConfig
from posttrainllm.errors import CheckpointError, ConfigError
from posttrainllm.formats.untrusted import DAMAGED, check_version
from posttrainllm.settings import show


class CorpusIdentity(BaseModel):
    """Which text a run was trained on."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    name: str
    sha256: str = Field(pattern=r"^[0-9a-f]{64}$")
    bytes: int = Field(ge=0)


class TrainerState(BaseModel):
    """The state of a run after ``step`` optimizer steps; weights and moments stand beside it.

    ``engine`` is the engine's name and ``engine_info`` what else its results depend on: build,
    instruction set, tiles. ``tokenizer`` is the tokenizer's fingerprint. ``val_loss`` is the
    validation loss at this very step, if one was measured, and ``best_val_loss`` the lowest so far.
    ``corpus`` is None for a model that came from elsewhere and has not been trained here.
    ``numbers`` holds whatever the trainer wants back on resume; a NaN or infinite number in it
    becomes None, since JSON has neither.
    """

    FORMAT: ClassVar[int] = 1

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)

    step: int = Field(ge=0)
    seed: int = Field(ge=0)
    engine: str
    engine_info: dict[str, JsonValue] = {}
    threads: int = Field(ge=0)
    corpus: CorpusIdentity | None = None
    tokenizer: str
    val_loss: float | None = None
    best_val_loss: float | None = None
    numbers: dict[str, JsonValue] = {}
    elapsed_s: float = Field(ge=0)
    created_by: str = Field(default_factory=lambda: f"posttrainllm {posttrainllm.__version__}")
    saved_at: str = Field(default_factory=lambda: datetime.now(UTC).isoformat(timespec="seconds"))
    config: TrainConfig

    @field_validator("numbers", "engine_info", mode="before")
    @classmethod
    def _are_json(cls, value: object) -> object:
        return finite(value)

    def to_json(self) -> bytes:
        """Write the state; ``parse`` gives an equal one back."""
        document = {"format_version": self.FORMAT, **self.model_dump(mode="json")}
        text = json.dumps(document, indent=2, ensure_ascii=False, allow_nan=False) + "\n"
        return text.encode("utf-8", "backslashreplace")  # a lone surrogate in the name of a corpus

    @classmethod
    def parse(cls, document: dict[str, Any], source: str) -> Self:
        """Read what ``to_json`` wrote.

        Raises: CheckpointError, naming ``source`` and the first field that is wrong.
        """
        check_version(document, cls.FORMAT, source)
        fields = {name: value for name, value in document.items() if name != "format_version"}
        try:
            return cls.model_validate(fields)
        except ConfigError as error:
            raise CheckpointError(f"{source}: {error.message}", DAMAGED) from None
        except ValidationError as error:
            first = error.errors(include_url=False, include_context=False)[0]
            place = ".".join(str(part) for part in first["loc"])[:100]
            got = "" if first["type"] == "missing" else f", got {show(first['input'])}"
            message = " ".join(first["msg"].split())
            raise CheckpointError(f"{source}: {show(place)}: {message}{got}", DAMAGED) from None


def finite(value: Any) -> Any:
    """Replace each NaN or infinity inside a JSON value by None."""
    if isinstance(value, dict):
        return {name: finite(part) for name, part in value.items()}
    if isinstance(value, list | tuple):
        return [finite(part) for part in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
