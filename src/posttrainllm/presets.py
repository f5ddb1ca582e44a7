"""The preset table: sizes and schedules that are known to train well, smallest first.

This is the only home of these numbers: the command line, the engines, the tests and the web app
(through ``config.schema_json``) read them from here. The module imports nothing, so that
``posttrainllm --help`` can list the names for free.
What is *not* here: defaults that all presets share; those stand at their fields in ``sections.py``.
"""

from __future__ import annotations

from dataclasses import dataclass

DEFAULT_PRESET = "small"


@dataclass(frozen=True, kw_only=True)
class Preset:
    """One row of the table; the fields are named after the settings that they fill.

    ``learning_rate`` and ``warmup_steps`` belong to the preset because the best value depends on
    width, batch and length of the run. What is None keeps the default of all presets; the windows
    of an evaluation are fewer where the usual number would take as long as the run itself.
    """

    summary: str
    batch_size: int
    n_ctx: int
    n_layer: int
    n_head: int
    n_embd: int
    steps: int
    learning_rate: float
    warmup_steps: int
    n_vocab: int | None = None
    eval_windows: int | None = None
    final_windows: int | None = None

    def settings(self) -> dict[str, int | float]:
        """Return the row as {"section.key": value}, the form in which ``load_config`` merges it."""
        row: dict[str, int | float | None] = {
            "model.n_layer": self.n_layer,
            "model.n_head": self.n_head,
            "model.n_embd": self.n_embd,
            "model.n_ctx": self.n_ctx,
            "model.n_vocab": self.n_vocab,
            "schedule.learning_rate": self.learning_rate,
            "schedule.warmup_steps": self.warmup_steps,
            "data.batch_size": self.batch_size,
            "training.steps": self.steps,
            "training.eval_windows": self.eval_windows,
            "training.final_windows": self.final_windows,
        }
        return {key: value for key, value in row.items() if value is not None}


PRESETS: dict[str, Preset] = {
    "tiny": Preset(
        summary="seconds; to see that everything works",
        batch_size=16,
        n_ctx=32,
        n_layer=2,
        n_head=3,
        n_embd=48,
        steps=2000,
        learning_rate=6e-3,
        warmup_steps=100,
    ),
    "small": Preset(
        summary="a quarter of a minute on two cores; writes mostly real words",
        batch_size=16,
        n_ctx=64,
        n_layer=3,
        n_head=3,
        n_embd=96,
        steps=1500,
        learning_rate=6e-3,
        warmup_steps=100,
    ),
    "medium": Preset(
        summary="half a minute on two cores; lines with a rhythm",
        batch_size=16,
        n_ctx=96,
        n_layer=4,
        n_head=4,
        n_embd=128,
        steps=1000,
        learning_rate=6e-3,
        warmup_steps=100,
    ),
    "large": Preset(
        summary="about a minute on two cores, seconds on a GPU",
        batch_size=12,
        n_ctx=128,
        n_layer=6,
        n_head=6,
        n_embd=192,
        steps=600,
        learning_rate=3e-3,
        warmup_steps=60,
    ),
    "xl": Preset(
        summary="about a minute on two cores; few steps for its size",
        batch_size=8,
        n_ctx=128,
        n_layer=8,
        n_head=8,
        n_embd=256,
        steps=400,
        learning_rate=2e-3,
        warmup_steps=40,
    ),
    "huge": Preset(
        summary="a GPU; deep and narrow, a longer context",
        batch_size=8,
        n_ctx=256,
        n_layer=12,
        n_head=8,
        n_embd=256,
        steps=1500,
        learning_rate=2e-3,
        warmup_steps=100,
    ),
    "massive": Preset(
        summary="a GPU; about one pass over a small text, so bring a large one",
        batch_size=4,
        n_ctx=256,
        n_layer=14,
        n_head=12,
        n_embd=384,
        steps=1000,
        learning_rate=1e-3,
        warmup_steps=100,
    ),
    "mega": Preset(
        summary="a GPU; massive with twice the context",
        batch_size=2,
        n_ctx=512,
        n_layer=14,
        n_head=12,
        n_embd=384,
        steps=800,
        learning_rate=3e-4,
        warmup_steps=80,
        eval_windows=64,
    ),
    "behemoth": Preset(
        summary="a test of memory: 9 GB in all, 50 steps",
        batch_size=1,
        n_ctx=512,
        n_layer=24,
        n_head=20,
        n_embd=1280,
        steps=50,
        learning_rate=3e-4,
        warmup_steps=5,
        eval_windows=16,
        final_windows=64,
    ),
    # 5,000 steps are 41 million tokens, minutes to an hour on one GPU: enough to see that a large
    # text is learned. A full training (2.5 billion tokens at 20 a parameter) is a choice to make
    # with --steps, not a default to stumble into.
    "gpt2": Preset(
        summary="GPT-2's own 124M shape; needs a BPE vocabulary and a GPU",
        batch_size=8,
        n_ctx=1024,
        n_layer=12,
        n_head=12,
        n_embd=768,
        n_vocab=50257,
        steps=5000,
        learning_rate=6e-4,
        warmup_steps=250,
        eval_windows=64,
    ),
}
