"""What a setting is: a field with a type, a range and a help text, and one line of refusal.

``Section`` is the base of the configuration's sections: a frozen pydantic model whose complaints
leave it as one ``ConfigError`` that names the setting, what it takes and what it got. ``Setting``
is the same field as data, for messages, for ``--set`` and for the web app.
This module knows no section and no default; read ``sections.py`` next for those.
"""

from __future__ import annotations

import difflib
import types
import typing
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, Self

import annotated_types
from pydantic import (
    BaseModel,
    ConfigDict,
    ModelWrapValidatorHandler,
    ValidationError,
    ValidationInfo,
    model_validator,
)

from posttrainllm.errors import ConfigError


class Section(BaseModel):
    """A frozen group of settings; raises ``ConfigError`` for what it refuses, however it is built.

    The validation context may map "section.key" to where the value came from ("from --set").
    """

    # strict: "8", true and 8.0 are no whole numbers.
    # validate_default: a default outside its own range fails in the first test that builds one.
    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        strict=True,
        allow_inf_nan=False,
        validate_default=True,
    )
    section: ClassVar[str] = ""

    @model_validator(mode="wrap")
    @classmethod
    def _refuse_in_one_line(
        cls, data: Any, handler: ModelWrapValidatorHandler[Self], info: ValidationInfo
    ) -> Self:
        try:
            return handler(data)
        except ValidationError as error:
            origins = info.context if isinstance(info.context, dict) else {}
            raise _refusal(cls, error, origins) from None


@dataclass(frozen=True)
class Setting:
    """One setting as data.

    ``low`` and ``high`` are inclusive and belong to integers and numbers; ``high`` of a text is how
    many characters it may have. ``default`` is None where the preset decides (``from_preset``) and
    where unset is a value of its own.
    """

    key: str
    kind: Literal["integer", "number", "boolean", "text", "texts", "choice"]
    default: Any
    from_preset: bool
    low: float | None
    high: float | None
    choices: tuple[str, ...]
    help: str

    @property
    def wanted(self) -> str:
        """Say in words what the setting takes: "a whole number from 1 to 1,024"."""
        if self.kind == "choice":
            return "one of " + ", ".join(choice or "''" for choice in self.choices)
        if self.kind == "integer":
            return f"a whole number from {self.low:,} to {self.high:,}"
        if self.kind == "number":
            return f"a number from {self.low:g} to {self.high:g}"
        if self.kind == "text" and self.high is not None:
            return f"text of at most {self.high:,} characters"
        return {"boolean": "true or false", "text": "text", "texts": "a list of texts"}[self.kind]


def describe(section: type[Section], name: str) -> Setting:
    """Read one field of a section back as data."""
    field = section.model_fields[name]
    annotation = field.annotation
    if isinstance(annotation, types.UnionType):  # int | None
        annotation = next(part for part in annotation.__args__ if part is not types.NoneType)
    kinds: dict[Any, Any] = {int: "integer", float: "number", bool: "boolean", str: "text"}
    is_choice = typing.get_origin(annotation) is Literal
    bounds: dict[type, Any] = {type(part): part for part in field.metadata}
    low, high = bounds.get(annotated_types.Ge), bounds.get(annotated_types.Le)
    length = bounds.get(annotated_types.MaxLen)
    return Setting(
        key=f"{section.section}.{name}",
        kind="choice" if is_choice else kinds.get(annotation, "texts"),
        default=None if field.is_required() else field.default,
        from_preset=field.is_required(),
        low=low.ge if low else None,
        high=high.le if high else length.max_length if length else None,
        choices=typing.get_args(annotation) if is_choice else (),
        help=field.description or "",
    )


def show(value: object) -> str:
    """Write a refused value on one line of at most 60 characters."""
    try:
        text = repr(value)
    except ValueError:  # an integer with more digits than Python prints
        text = "a number of thousands of digits"
    return text if len(text) <= 60 else text[:57] + "..."


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return "; did you mean 'x'?" for the nearest known name, or nothing when none is near.

    A bare name is taken for the first dotted one that ends in it: steps for training.steps.
    """
    names = list(known)
    same_end = [candidate for candidate in names if candidate.rpartition(".")[2] == name]
    near = same_end or difflib.get_close_matches(name[:200], names, n=1)
    return f"; did you mean {near[0]!r}?" if near else ""


def _refusal(
    section: type[Section], error: ValidationError, origins: dict[str, str]
) -> ConfigError:
    """Turn the first of pydantic's complaints into one line; unknown names go before values."""
    complaints = error.errors(include_url=False, include_context=False)
    first = next((one for one in complaints if one["type"] == "extra_forbidden"), complaints[0])
    name = str(first["loc"][0]) if first["loc"] else ""
    key = ".".join(part for part in (section.section, name) if part)
    origin = f" ({origins[key]})" if key in origins else ""
    if first["type"] == "extra_forbidden":
        known = [f"{section.section}.{field}".lstrip(".") for field in section.model_fields]
        return ConfigError(
            f"unknown setting {show(key)}{origin}{did_you_mean(key, known)}",
            f"settings here: {', '.join(section.model_fields)}",
        )
    more = f" (and {len(complaints) - 1} more)" if len(complaints) > 1 else ""
    if name not in section.model_fields or not section.section:
        # a whole section or the configuration itself has the wrong form
        text = " ".join(first["msg"].lower().split())
        return ConfigError(f"{key or 'configuration'}: {text}, got {show(first['input'])}{more}")
    setting = describe(section, name)
    if first["type"] == "missing":
        return ConfigError(f"{key} is missing: {setting.wanted}{more}", setting.help)
    if first["type"] == "string_too_long":
        return ConfigError(f"{key}: {first['msg'].lower()}{origin}{more}", setting.help)
    got = show(first["input"])
    return ConfigError(f"{key} must be {setting.wanted}, got {got}{origin}{more}", setting.help)
