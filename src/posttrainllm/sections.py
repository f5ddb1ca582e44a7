"""The sections of a configuration: every setting with its type, range, unit and default.

All defaults that do not depend on the size of the model stand here and nowhere else; the others
stand in ``presets.py``, and the section of the model itself in ``shape.py``. ``config.py`` puts a
configuration together, ``settings.py`` says how a wrong value is refused.
"""

from __future__ import annotations

from typing import ClassVar, Literal, Self

from pydantic import Field, field_validator, model_validator

from posttrainllm.engine_settings import EngineConfig, check_abilities
from posttrainllm.errors import ConfigError
from posttrainllm.presets import PRESETS
from posttrainllm.settings import Section, Setting, describe, did_you_mean, show
from posttrainllm.shape import GPTConfig
from posttrainllm.wording import worded

MAX_POSITIONS = 2**31 - 1  # token positions are int32 on every engine


class OptimizerConfig(Section):
    """AdamW, or Muon for the matrices of the blocks, and the gradient clip."""

    section: ClassVar[str] = "optimizer"

    kind: Literal["adamw", "muon"] = Field(
        default="adamw",
        description="adamw for everything, or muon for the blocks' matrices and adamw for the "
        "rest; muon on engine torch only",
    )
    momentum: float = Field(
        default=0.95,
        ge=0.0,
        le=0.99999,
        description="share of its running sum of gradients that a muon step keeps",
    )
    beta1: float = Field(
        default=0.9,
        ge=0.0,
        le=0.99999,
        description="share of the gradients' running mean that a step keeps",
    )
    beta2: float = Field(
        default=0.95,
        ge=0.0,
        le=0.99999,
        description="share of the squares' running mean that a step keeps",
    )
    eps: float = Field(
        default=1e-8, ge=1e-12, le=1.0, description="added to the root of the second moment"
    )
    weight_decay: float = Field(
        default=0.1,
        ge=0.0,
        le=10.0,
        description="decay of tensors of two or more dimensions, times the learning rate a step",
    )
    clip_norm: float = Field(
        default=1.0,
        ge=1e-6,
        le=1e6,
        description="largest global norm of the gradients; larger ones are scaled down to it",
    )


class ScheduleConfig(Section):
    """The learning rate over the steps; the formula is ``control.learning_rate``."""

    section: ClassVar[str] = "schedule"

    kind: Literal["cosine", "constant", "wsd"] = Field(
        default="cosine",
        description="after warm-up: cosine decay, constant, or constant and then a linear decay",
    )
    learning_rate: float = Field(
        ge=1e-9, le=10.0, description="the highest rate, reached at the end of the warm-up"
    )
    warmup_steps: int = Field(ge=0, le=100_000_000, description="linear warm-up, in steps")
    final_ratio: float = Field(
        default=0.1,
        ge=0.0,
        le=1.0,
        description="rate at the last step, as a share of learning_rate",
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
        default=0.1,
        ge=0.0,
        le=0.5,
        description="share of the text, at its end, that training never reads",
    )
    batch_size: int = Field(ge=1, le=1_048_576, description="windows a micro-batch")
    accumulation: int = Field(default=1, ge=1, le=1_048_576, description="micro-batches a step")
    tokenizer: str = Field(
        default="",
        max_length=4096,
        description="folder with the BPE tokenizer that a new model reads its text with; empty is bytes",
    )

    @field_validator("corpus", mode="before")
    @classmethod
    def _accept_lists(cls, value: object) -> object:
        return tuple(value) if isinstance(value, list) else value


class LoopConfig(Section):
    """How long to train and what happens along the way."""

    section: ClassVar[str] = "training"

    steps: int = Field(ge=1, le=100_000_000, description="optimizer steps")
    seed: int = Field(
        default=1,
        ge=0,
        le=2**53 - 1,  # the largest range that JavaScript's numbers hold exactly
        description="seed of the initial weights, the batches and the samples",
    )
    log_every: int = Field(
        default=1, ge=1, le=100_000_000, description="steps between lines of metrics.jsonl"
    )
    eval_every: int = Field(
        default=250,
        ge=0,
        le=100_000_000,
        description="steps between evaluations, and once at the end; 0 is only at the end",
    )
    eval_windows: int = Field(
        default=256,
        ge=1,
        le=100_000_000,
        description="windows of n_ctx tokens an evaluation, spread over the validation part",
    )
    final_windows: int = Field(
        default=4096,
        ge=1,
        le=100_000_000,
        description="windows of n_ctx tokens of the last evaluation, which the verdict rests on",
    )
    sample_every: int = Field(
        default=250,
        ge=0,
        le=100_000_000,
        description="steps between samples, and once at the end; 0 is only at the end",
    )
    sample_prompt: str = Field(
        default="",
        max_length=65_536,
        description="text that samples go on from; empty is the validation part's first "
        "n_ctx/4 tokens",
    )
    sample_tokens: int = Field(
        default=200, ge=0, le=1_048_576, description="length of a sample, in tokens; 0 is none"
    )
    verdict_samples: int = Field(
        default=20, ge=0, le=10_000, description="samples that the verdict reads; 0 is no verdict"
    )
    checkpoint_every: int = Field(
        default=500,
        ge=0,
        le=100_000_000,
        description="steps between checkpoints, and once at the end; 0 is only at the end",
    )
    keep_checkpoints: int = Field(
        default=2,
        ge=1,
        le=100_000,
        description="how many of the newest checkpoints are kept, and the best one beside them",
    )
    save_best: bool = Field(
        default=False,
        description="whether an evaluation that is the best so far is followed by a checkpoint",
    )
    start_from: str = Field(
        default="",
        max_length=4096,
        description="model whose weights training starts from: one of the gallery, a run or a folder; empty is random",
    )


class SamplingConfig(Section):
    """How the next token is chosen, in samples during training and in ``posttrainllm generate``."""

    section: ClassVar[str] = "sampling"

    temperature: float = Field(
        default=0.8,
        ge=0.0,
        le=100.0,
        description="divides the logits: below 1 safer, above 1 more daring; 0 takes the likeliest",
    )
    top_k: int = Field(
        default=0,
        ge=0,
        le=4_194_304,
        description="choose among the k likeliest tokens; 0 is all",
    )
    top_p: float = Field(
        default=1.0,
        ge=0.001,
        le=1.0,
        description="choose among the likeliest tokens that together have this probability",
    )
    repetition_penalty: float = Field(
        default=1.0,
        ge=1.0,
        le=100.0,
        description="makes recently written tokens less likely; 1 is no penalty",
    )
    repetition_window: int = Field(
        default=64,
        ge=1,
        le=16_384,
        description="how many of the last tokens the repetition penalty looks at",
    )
    max_tokens: int = Field(
        default=500, ge=1, le=100_000_000, description="length of a generated text, in tokens"
    )


class TrainConfig(Section):
    """Everything a run depends on; ``config.load_config`` builds it.

    Change one with ``config.replace``: pydantic's own ``model_copy`` would not check the result.
    """

    preset: str = Field(description="row of the preset table that unset settings come from")
    model: GPTConfig
    optimizer: OptimizerConfig = OptimizerConfig()
    schedule: ScheduleConfig
    data: DataConfig
    training: LoopConfig
    sampling: SamplingConfig = SamplingConfig()
    engine: EngineConfig = EngineConfig()

    @property
    def tokens_per_step(self) -> int:
        """Tokens that one optimizer step sees, over all its micro-batches."""
        return self.data.batch_size * self.data.accumulation * self.model.n_ctx

    @property
    def flops_per_step(self) -> float:
        """Floating-point operations of an optimizer step, forward and backward."""
        return float(self.tokens_per_step * self.model.flops_per_token)

    @field_validator("preset")
    @classmethod
    def _is_known(cls, name: str) -> str:
        return known_preset(name)

    @model_validator(mode="after")
    def _sections_fit(self) -> Self:
        steps, warmup = self.training.steps, self.schedule.warmup_steps
        if warmup > steps:
            raise ConfigError(
                f"schedule.warmup_steps {warmup} is longer than the run, training.steps {steps}",
                "a tenth of the steps or less is usual",
            )
        check_abilities(self.engine, self.model.dropout, self.optimizer.kind)
        rows, context = self.data.batch_size, self.model.n_ctx
        if rows * context > MAX_POSITIONS:
            raise ConfigError(
                f"data.batch_size {rows} x model.n_ctx {context} is {rows * context:,} tokens a "
                f"micro-batch, over the limit of {MAX_POSITIONS:,}",
                worded("lower {data.batch_size} and raise {data.accumulation}"),
            )
        return self


SECTIONS: dict[str, type[Section]] = {
    part.section: part
    for part in (
        GPTConfig,
        OptimizerConfig,
        ScheduleConfig,
        DataConfig,
        LoopConfig,
        SamplingConfig,
        EngineConfig,
    )
}

SETTINGS: dict[str, Setting] = {
    f"{name}.{field}": describe(part, field)
    for name, part in SECTIONS.items()
    for field in part.model_fields
}


def known_preset(name: object) -> str:
    """Return the name of a row of the preset table, or raise ``ConfigError`` with the list."""
    if isinstance(name, str) and name in PRESETS:
        return name
    near = did_you_mean(name, PRESETS) if isinstance(name, str) else ""
    raise ConfigError(f"unknown preset {show(name)}{near}", "presets: " + ", ".join(PRESETS))


def unknown_setting(key: str, origin: str = "") -> ConfigError:
    """Build the error for a name that no setting has; the hint lists its section, or all."""
    section = key.partition(".")[0]
    hint = "sections: " + ", ".join(SECTIONS)
    if section in SECTIONS:
        hint = f"settings of {section}: " + ", ".join(SECTIONS[section].model_fields)
    near = did_you_mean(key, [*SETTINGS, "preset"])
    return ConfigError(f"unknown setting {show(key)}{origin}{near}", hint)
