"""The sections of a configuration: every setting with its type, its range, its unit and its default.

A section is a frozen pydantic model. Whatever is wrong with a value becomes one ``ConfigError`` of one line that names the
setting, what it takes and what it got; pydantic's own errors never leave this module. ``SETTINGS`` lists all settings as data, for
messages, for parsing ``--set`` and for the web app. Read next: ``presets.py`` for the sizes, ``config.py`` for how a configuration
is put together.
"""

from __future__ import annotations

import difflib
import types
import typing
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, Self

import annotated_types
from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    ModelWrapValidatorHandler,
    ValidationError,
    ValidationInfo,
    field_validator,
    model_validator,
)

from posttrainllm.errors import ConfigError
from posttrainllm.presets import PRESETS

MAX_POSITIONS = 2**31 - 1  # token positions are int32 on every engine
MAX_PARAMETERS = 10**12  # 16 TB of weights, gradients and moments: a typing error, not a plan


class Section(BaseModel):
    """A frozen group of settings that reports what it refuses as ``ConfigError``."""

    # strict: "8", true and 8.0 are no whole numbers; validate_default: a wrong default fails the first test that builds one.
    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        strict=True,
        allow_inf_nan=False,
        validate_default=True,
        hide_input_in_errors=True,
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
            raise _refusal(cls.section, error, origins) from None


class GPTConfig(Section):
    """The shape of the model: GPT-2 with every size free."""

    section: ClassVar[str] = "model"

    n_layer: int = Field(ge=1, le=1024, description="transformer blocks")
    n_head: int = Field(ge=1, le=1024, description="attention heads a block; must divide n_embd")
    n_embd: int = Field(
       ge=1, le=65_536, description="width of the residual stream, in numbers a token"
    )
    n_ctx: int = Field(
       ge=1, le=1_048_576, description="context: the longest window the model sees, in tokens"
    )
    n_vocab: int = Field(
        default=256, ge=2, le=4_194_304, description="vocabulary, in tokens; 256 is the byte tokenizer's"
    )
    n_inner: int | None = Field(
        default=None,
        ge=1,
        le=1_048_576,
        description="width of the MLP, in numbers a token; unset is 4 * n_embd",
    )
    activation: Literal["gelu_new", "gelu"] = Field(
        default="gelu_new",
        description="MLP activation: gelu_new is GPT-2's tanh form, gelu the exact erf form",
    )
    tied: bool = Field(default=True, description="the head shares the token embedding's weights")
    dropout: float = Field(
        default=0.0,
        ge=0.0,
        le=0.9,
        description="share of activations dropped in training; engine torch only",
    )

    @property
    def inner(self) -> int:
        """Width of the MLP: ``n_inner``, or 4 C when that is unset."""
        return 4 * self.n_embd if self.n_inner is None else self.n_inner

    @property
    def head_size(self) -> int:
        """Width D of one attention head: C / H."""
        return self.n_embd // self.n_head

    def parameters(self) -> int:
        """Count the trained numbers; a tied head counts once."""
        width, inner = self.n_embd, self.inner
        layernorm = 2 * width
        attention = (3 * width * width + 3 * width) + (width * width + width)
        mlp = (width * inner + inner) + (inner * width + width)
        head = 0 if self.tied else self.n_vocab * width
        embeddings = (self.n_vocab + self.n_ctx) * width
        return embeddings + self.n_layer * (2 * layernorm + attention + mlp) + layernorm + head

    @model_validator(mode="after")
    def _shapes_fit(self) -> Self:
        width, heads = self.n_embd, self.n_head
        if width % heads:
            below, above = width // heads * heads, (width // heads + 1) * heads
            near = f"{below} or {above}" if below else f"{above}"
            raise ConfigError(
                f"model.n_embd {width} is not divisible by model.n_head {heads}",
                f"the nearest widths that work: {near}",
            )
        if self.parameters() > MAX_PARAMETERS:
            raise ConfigError(
                f"a model of {self.parameters():,} parameters is beyond the limit of {MAX_PARAMETERS:,}",
                "lower model.n_layer, model.n_embd or model.n_vocab",
            )
        return self


class OptimizerConfig(Section):
    """AdamW and the gradient clip."""

    section: ClassVar[str] = "optimizer"

    beta1: float = Field(
        default=0.9, ge=0.0, le=0.9999999, description="decay of the mean of the gradients, a step"
    )
    beta2: float = Field(
        default=0.95, ge=0.0, le=0.9999999, description="decay of the mean of their squares, a step"
    )
    eps: float = Field(default=1e-8, ge=1e-12, le=1.0, description="added to the root of the second moment")
    weight_decay: float = Field(
        default=0.1,
        ge=0.0,
        le=10.0,
        description="decay of tensors of two or more dimensions, times the rate",
    )
    clip_norm: float = Field(
        default=1.0,
        ge=1e-6,
        le=1e6,
        description="largest global norm of the gradients; larger ones are scaled down",
    )


class ScheduleConfig(Section):
    """The learning rate over the steps; ``control.learning_rate`` is the formula."""

    section: ClassVar[str] = "schedule"

    kind: Literal["cosine", "constant", "wsd"] = Field(
        default="cosine",
        description="after the warm-up: cosine decay, constant, or constant and a linear decay at the end (wsd)",
    )
    learning_rate: float = Field(
       ge=1e-9, le=10.0, description="the highest rate, reached at the end of the warm-up"
    )
    warmup_steps: int = Field(ge=0, le=100_000_000, description="linear warm-up, in steps")
    final_ratio: float = Field(
        default=0.1, ge=0.0, le=1.0, description="rate at the last step, as a share of learning_rate"
    )
    decay_fraction: float = Field(
        default=0.2, ge=0.0, le=1.0, description="share of the steps that wsd decays over"
    )


class DataConfig(Section):
    """The text and how it is cut into batches."""

    section: ClassVar[str] = "data"

    corpus: tuple[str, ...] = Field(
        default=(), description="text files, '-' for standard input; empty is TinyShakespeare"
    )
    val_fraction: float = Field(
        default=0.1, ge=0.0, le=0.5, description="share of the text, at its end, that training never reads"
    )
    batch_size: int = Field(ge=1, le=1_048_576, description="windows a micro-batch")
    accumulation: int = Field(default=1, ge=1, le=1_048_576, description="micro-batches a step")

    @field_validator("corpus", mode="before")
    @classmethod
    def _accept_lists(cls, value: object) -> object:
        return tuple(value) if isinstance(value, list) else value


class LoopConfig(Section):
    """How long to train, and what happens along the way. A period of 0 means: only at the end."""

    section: ClassVar[str] = "training"

    steps: int = Field(ge=1, le=100_000_000, description="optimizer steps")
    seed: int = Field(
        default=1,
        ge=0,
        le=2**53 - 1,
        description="seed of weights, batches and samples; below 2^53, so JavaScript keeps it",
    )
    log_every: int = Field(
        default=10, ge=1, le=100_000_000, description="steps between lines of metrics.jsonl"
    )
    eval_every: int = Field(
        default=250,
        ge=0,
        le=100_000_000,
        description="steps between evaluations; the last step always evaluates",
    )
    eval_windows: int = Field(
        default=256,
        ge=1,
        le=100_000_000,
        description="windows of n_ctx tokens an evaluation, spread evenly over the validation part",
    )
    sample_every: int = Field(
        default=250,
        ge=0,
        le=100_000_000,
        description="steps between samples; the last step always writes one",
    )
    sample_prompt: str = Field(
        default="",
        max_length=65_536,
        description="text that samples go on from; empty is the first n_ctx/4 tokens of the validation part",
    )
    sample_tokens: int = Field(
        default=200, ge=0, le=1_048_576, description="length of a sample, in tokens; 0 writes none"
    )
    checkpoint_every: int = Field(
        default=500,
        ge=0,
        le=100_000_000,
        description="steps between checkpoints; the last step always saves",
    )
    keep_checkpoints: int = Field(
        default=2, ge=1, le=100_000, description="newest checkpoints that are kept"
    )


class EngineConfig(Section):
    """What runs the program."""

    section: ClassVar[str] = "engine"

    name: Literal["auto", "numpy", "cpp", "wasm", "webgpu", "torch"] = Field(
        default="cpp", description="engine; auto takes the fastest here"
    )
    threads: int = Field(
        default=0, ge=0, le=1024, description="threads of cpp and wasm; 0 is all that this process may use"
    )
    cpp_build: Literal["", "plain", "avx2", "avx512"] = Field(
        default="", description="build of the C++ kernels; empty takes the best here"
    )


class TrainConfig(Section):
    """Everything a run depends on. Build it with ``load_config``; equal configurations make equal runs."""

    preset: str = Field(description="row of the preset table that unset settings come from")
    model: GPTConfig
    optimizer: OptimizerConfig = OptimizerConfig()
    schedule: ScheduleConfig
    data: DataConfig
    training: LoopConfig
    engine: EngineConfig = EngineConfig()

    @field_validator("preset")
    @classmethod
    def _is_known(cls, name: str) -> str:
        check_preset(name)
        return name

    @model_validator(mode="after")
    def _sections_fit(self) -> Self:
        steps, warmup = self.training.steps, self.schedule.warmup_steps
        if warmup > steps:
            raise ConfigError(
                f"schedule.warmup_steps {warmup} is longer than the run: training.steps is {steps}",
                "lower schedule.warmup_steps; a tenth of the steps or less is usual",
            )
        if self.model.dropout > 0 and self.engine.name != "torch":
            raise ConfigError(
                f"model.dropout {self.model.dropout} needs the engine torch, and engine.name is {self.engine.name}",
                "use --engine torch, or model.dropout=0",
            )
        rows, context = self.data.batch_size, self.model.n_ctx
        if rows * context > MAX_POSITIONS:
            raise ConfigError(
                f"data.batch_size {rows} x model.n_ctx {context} is {rows * context:,} tokens a micro-batch; "
                f"the limit is {MAX_POSITIONS:,}",
                "lower data.batch_size and raise data.accumulation",
            )
        return self


SECTIONS: dict[str, type[Section]] = {
    part.section: part
    for part in (GPTConfig, OptimizerConfig, ScheduleConfig, DataConfig, LoopConfig, EngineConfig)
}


@dataclass(frozen=True)
class Setting:
    """One setting as data.

    ``kind`` is integer, number, boolean, text, texts (a list) or choice. ``low`` and ``high`` are inclusive and stand for integer
    and number only. ``default`` is None where the preset decides (``from_preset``) or where unset is a value of its own.
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
        if self.low is None or self.high is None:
            return {"boolean": "true or false", "text": "text", "texts": "a list of texts"}[
                self.kind
            ]
        noun = "a whole number" if self.kind == "integer" else "a number"
        return f"{noun} from {_number(self.low)} to {_number(self.high)}"


def _number(value: float) -> str:
    return (
        f"{value:,}"
        if isinstance(value, int)
        else f"{value:g}"
        if len(repr(value)) > 9 and value < 0.5
        else repr(value)
    )


def _describe(section: type[Section], name: str) -> Setting:
    field = section.model_fields[name]
    annotation = field.annotation
    arguments = typing.get_args(annotation)
    if isinstance(annotation, types.UnionType):  # int | None
        annotation = next(part for part in arguments if part is not type(None))
    kinds: dict[Any, Any] = {int: "integer", float: "number", bool: "boolean", str: "text"}
    is_choice = typing.get_origin(annotation) is Literal
    low = next((part.ge for part in field.metadata if isinstance(part, annotated_types.Ge)), None)
    high = next((part.le for part in field.metadata if isinstance(part, annotated_types.Le)), None)
    return Setting(
        key=f"{section.section}.{name}",
        kind="choice" if is_choice else kinds.get(annotation, "texts"),
        default=None if field.is_required() else field.default,
        from_preset=field.is_required(),
        low=typing.cast("float | None", low),
        high=typing.cast("float | None", high),
        choices=arguments if is_choice else (),
        help=field.description or "",
    )


SETTINGS: dict[str, Setting] = {
    f"{name}.{field}": _describe(part, field)
    for name, part in SECTIONS.items()
    for field in part.model_fields
}


def show(value: object) -> str:
    """Write a refused value on one line of at most 60 characters."""
    try:
        text = repr(value)
    except ValueError:  # an integer with more digits than Python prints
        text = "a number of thousands of digits"
    return text if len(text) <= 60 else text[:57] + "..."


def check_preset(name: str) -> None:
    """Raise ``ConfigError`` unless the preset table has this row."""
    if name not in PRESETS:
        near = difflib.get_close_matches(name[:100], PRESETS, n=1)
        question = f"; did you mean {near[0]!r}?" if near else ""
        raise ConfigError(
            f"unknown preset {show(name)}{question}", "presets: " + ", ".join(PRESETS)
        )


def unknown_setting(key: str, origin: str = "") -> ConfigError:
    """Build the error for a name that no setting has, with the nearest one that exists.

    A bare name ("steps") is taken for the setting that ends in it; the hint lists the section, or the sections.
    """
    section, _, name = key[:200].rpartition(".")
    homes = [known for known in SETTINGS if known.rpartition(".")[2] == name]
    near = homes[:1] or difflib.get_close_matches(key[:200], [*SETTINGS, "preset"], n=1)
    question = f"; did you mean {near[0]!r}?" if near else ""
    if section in SECTIONS:
        hint = f"settings of {section}: " + ", ".join(SECTIONS[section].model_fields)
    else:
        hint = "sections: " + ", ".join(SECTIONS)
    return ConfigError(f"unknown setting {show(key)}{origin}{question}", hint)


def _refusal(section: str, error: ValidationError, origins: dict[str, str]) -> ConfigError:
    """Turn the first of pydantic's complaints into one line; an unknown name goes before a wrong value."""
    complaints = error.errors(include_url=False, include_context=False)
    first = next((part for part in complaints if part["type"] == "extra_forbidden"), complaints[0])
    path = [str(part) for part in first["loc"]]
    key = ".".join(([section] if section else []) + path[:1])
    origin = f" ({origins[key]})" if key in origins else ""
    if first["type"] == "extra_forbidden":
        return unknown_setting(key, origin)
    setting = SETTINGS.get(key)
    if first["type"] == "missing":
        return ConfigError(f"{key} is missing", setting.help if setting else "")
    more = f" (and {len(complaints) - 1} more)" if len(complaints) > 1 else ""
    if setting is None:
        return ConfigError(
            f"{key or 'configuration'}: {first['msg'].lower()}, got {show(first['input'])}{origin}{more}"
        )
    if first["type"] == "string_too_long":
        return ConfigError(f"{key}: {first['msg'].lower()}{origin}{more}")
    return ConfigError(
        f"{key} must be {setting.wanted}, got {show(first['input'])}{origin}{more}", setting.help
    )
