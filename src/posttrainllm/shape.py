"""The section of a configuration that says what the model is: every size of a GPT-2, and how many numbers it has.

What this is: the one section that programs, formats and engines read too.
What this is not: how a model is trained; those sections stand in ``sections.py``.
"""

from __future__ import annotations

from typing import ClassVar, Literal, Self

from pydantic import Field, model_validator

from posttrainllm.errors import ConfigError
from posttrainllm.settings import Section
from posttrainllm.wording import worded

MAX_PARAMETERS = 10**12  # 16 TB of weights, gradients and moments: a typing error, not a plan


class GPTConfig(Section):
    """The shape of the model: GPT-2 with every size free."""

    section: ClassVar[str] = "model"

    n_layer: int = Field(ge=1, le=1024, description="transformer blocks")
    n_head: int = Field(ge=1, le=1024, description="attention heads a block; must divide n_embd")
    n_embd: int = Field(
        ge=1, le=65_536, description="width of the residual stream, in numbers a token"
    )
    n_ctx: int = Field(
        ge=1, le=1_048_576, description="context, the longest window the model sees, in tokens"
    )
    n_vocab: int = Field(
        default=256,
        ge=2,
        le=4_194_304,
        description="vocabulary, in tokens; 256 is the byte tokenizer's",
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
    layer_norm_epsilon: float = Field(
        default=1e-5, ge=1e-12, le=1e-2, description="added to the variance in every LayerNorm"
    )
    tied: bool = Field(
        default=True, description="whether the head shares the token embedding's weights"
    )
    dropout: float = Field(
        default=0.0,
        ge=0.0,
        le=0.9,
        description="share of activations dropped in training; engine torch only",
    )

    @property
    def inner(self) -> int:
        """Width F of the MLP: ``n_inner``, or 4 C when that is unset."""
        return 4 * self.n_embd if self.n_inner is None else self.n_inner

    @property
    def head_size(self) -> int:
        """Width D of one attention head: C / H."""
        return self.n_embd // self.n_head

    def parameters(self) -> int:
        """Count the trained numbers; a tied head counts once."""
        width, inner = self.n_embd, self.inner
        embeddings = (self.n_vocab + self.n_ctx) * width
        layernorm = 2 * width
        attention = (3 * width * width + 3 * width) + (width * width + width)
        mlp = (width * inner + inner) + (inner * width + width)
        head = 0 if self.tied else self.n_vocab * width
        return embeddings + self.n_layer * (2 * layernorm + attention + mlp) + layernorm + head

    @property
    def flops_per_token(self) -> int:
        """Floating-point operations of training on one token of a full context: 6N + 12LCT.

        Source: Chowdhery and others, PaLM, 2022, appendix B.
        """
        return 6 * self.parameters() + 12 * self.n_layer * self.n_embd * self.n_ctx

    @model_validator(mode="after")
    def _shapes_fit(self) -> Self:
        width, heads = self.n_embd, self.n_head
        if width % heads:
            below, above = width // heads * heads, (width // heads + 1) * heads
            raise ConfigError(
                f"model.n_embd {width} is not divisible by model.n_head {heads}",
                f"the nearest widths that work: {f'{below} and ' if below else ''}{above}",
            )
        if self.parameters() > MAX_PARAMETERS:
            raise ConfigError(
                f"a model of {self.parameters():,} parameters is over the limit, "
                f"{MAX_PARAMETERS:,}",
                worded("lower {model.n_layer}, {model.n_embd} or {model.n_vocab}"),
            )
        return self
