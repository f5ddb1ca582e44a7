"""Programs for looking inside a model: what every head of every layer looked at.

What this is: the logits program with queries, keys and values as outputs, and attention alone over what the host gives; both of ops that
training has. What this is not: a picture, which is the host's. Read next: ``docs/decisions/0011-attention-by-identity.md``.
"""

from __future__ import annotations

from posttrainllm.config import GPTConfig
from posttrainllm.model import ROWS, logits_program, model_dims
from posttrainllm.program import Program


def attention_program() -> Program:
    """Attention alone, over queries, keys and values that the host gives.

    With rows of the identity as values, what comes out are the probabilities themselves: D of the T columns of every head at a time,
    and nothing of size T x T is ever held.
    """
    p = Program("attention")
    p.buffer("given.qkv", ROWS, "3*C", role="input")
    p.buffer("segment_start", ROWS, role="input", dtype="i32")
    p.call(
        "attention_forward",
        [
            p.buffer("given.out", ROWS, "C", role="output"),
            p.buffer("given.lse", "B", "H", "T", role="scratch"),
        ],
        ["given.qkv", "segment_start"],
    )
    return p


def inspection_programs(
    config: GPTConfig, time: int | None = None
) -> tuple[dict[str, Program], dict[str, dict[str, int]]]:
    """What looking inside needs, and the dims to plan it with: one window of ``time`` tokens (default: the context)."""
    programs = {
        "inspect": logits_program(config, "inspect", inspects=True),
        "attention": attention_program(),
    }
    return programs, {name: model_dims(config, 1, time) for name in programs}
