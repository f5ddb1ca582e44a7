"""What the site's pages must know beside the programs: forms, records, rules of files, words for help.

What this is: data for ``web/src``, which repeats none of it: limits and help of every setting, what a configuration must fulfil beyond
single ranges, what the presets reached when they were measured, which files are no text, and two sentences on every term.
What this is not: a definition. Settings stand in ``sections.py``, presets in ``presets.py``, the rules of text in ``text/files.py``;
``tests/test_web_settings.py`` holds what is repeated here against them. Read next: ``export_web.py``.
"""

from __future__ import annotations

import codecs
from dataclasses import asdict, dataclass
from typing import Any, Final

from posttrainllm.config import SETTINGS, WARMUP_DIVISOR, load_config
from posttrainllm.gallery.catalogue import cards
from posttrainllm.sections import MAX_POSITIONS
from posttrainllm.shape import MAX_PARAMETERS
from posttrainllm.site_terms import TERMS
from posttrainllm.text import files
from posttrainllm.training.generate import KEPT_DIVISOR
from posttrainllm.training.samples import PROMPT_DIVISOR


@dataclass(frozen=True)
class Measured:
    """What a preset came to on TinyShakespeare, from ``bench/results``."""

    loss: float
    """Validation loss at the preset's own learning rate, nats a byte."""
    writes: str
    """What it writes then."""
    step_ms: float | None
    """Milliseconds a step of wasm in node on two threads of an AMD EPYC; None where nobody waited for it."""


RECORDS: Final = {
    "tiny": Measured(1.96, "almost words", 6.87),
    "small": Measured(1.80, "words and speakers", 31.5),
    "medium": Measured(1.83, "words, lines and speakers", 95.3),
    "large": Measured(1.99, "words and speakers; more steps would help", 286.0),
    "xl": Measured(2.30, "the shape of a play; needs more steps", 421.0),
    "huge": Measured(1.73, "good verse", None),
    "massive": Measured(2.21, "the shape of a play; needs more steps and more text", None),
    "mega": Measured(2.45, "the shape of a play; needs more steps and more text", None),
}

FIRST: Final = "shakespeare-small"
"""The model of the gallery that writes when the site is opened."""

FRONT: Final = ("tiny", "small", "medium", "large", "huge")
"""Presets that are offered at once; the others stand behind "more"."""

HIDDEN: Final = (
    "data.corpus",  # the page has a place of its own for the text
    "data.tokenizer",
    "model.n_vocab",  # bytes
    "model.dropout",  # torch's alone
    "optimizer.kind",  # muon is torch's alone
    "optimizer.momentum",
    "training.start_from",
    "training.checkpoint_every",  # the tab saves by the clock
    "training.save_best",
    # the page has a place of its own for the engine, and the rest is for others
    *(key for key in SETTINGS if key.startswith("engine.") and key != "engine.threads"),
)
"""Settings that a tab cannot change, or asks for elsewhere."""

RULES: Final[tuple[dict[str, Any], ...]] = (
    {
        "kind": "divides",
        "divisor": "model.n_head",
        "of": "model.n_embd",
        "message": "model.n_embd {model.n_embd} is not divisible by model.n_head {model.n_head}",
        "hint": "the width must be a multiple of the number of heads",
    },
    {
        "kind": "at_most",
        "key": "schedule.warmup_steps",
        "other": "training.steps",
        "message": "schedule.warmup_steps {schedule.warmup_steps} is longer than the run, training.steps {training.steps}",
        "hint": "a tenth of the steps or less is usual",
    },
    {
        "kind": "product_at_most",
        "of": ["data.batch_size", "model.n_ctx"],
        "limit": MAX_POSITIONS,
        "message": "data.batch_size {data.batch_size} x model.n_ctx {model.n_ctx} is over the limit of {limit} tokens a micro-batch",
        "hint": "lower batch_size and raise accumulation",
    },
    {
        "kind": "only",
        "key": "model.dropout",
        "value": 0.0,
        "message": "the engines of a browser have no dropout, and model.dropout is {model.dropout}",
        "hint": "leave it at 0; PyTorch has it, in a terminal or in Python",
    },
    {
        "kind": "only",
        "key": "model.n_vocab",
        "value": 256,
        "message": "model.n_vocab is {model.n_vocab}, but a tab reads text as bytes, 256 of them",
        "hint": "leave it out, or train in a terminal",
    },
    {
        "kind": "only",
        "key": "data.tokenizer",
        "value": "",
        "message": "a tab reads text as bytes, and data.tokenizer is {data.tokenizer}",
        "hint": "leave it out, or train in a terminal",
    },
    {
        "kind": "only",
        "key": "training.start_from",
        "value": "",
        "message": "a tab trains from random weights, and training.start_from is {training.start_from}",
        "hint": "leave it out, or train in a terminal",
    },
)
"""What a configuration must fulfil beyond the range of each value."""


def site() -> dict[str, Any]:
    """Everything that is for the pages alone."""
    return {
        "front": list(FRONT),
        "hidden": list(HIDDEN),
        "records": {
            name: asdict(record) | {"step_flops": load_config(name).flops_per_step}
            for name, record in RECORDS.items()
        },
        "rules": list(RULES),
        "max_parameters": MAX_PARAMETERS,
        "short_run": {
            "key": "schedule.warmup_steps",
            "of": "training.steps",
            "divisor": WARMUP_DIVISOR,
        },
        "first": {"model": FIRST, "prompt": "ROMEO:", "tokens": 600},
        "models": _models(),
        "probe": {
            "wasm": {"preset": "tiny", "least_ms": 250},
            "webgpu": {"preset": "medium", "least_ms": 250},
        },
        "recommend": {"seconds": 600, "more_seconds": 120},
        "snapshot_s": 60,
        "movement_most": 30_000_000,
        "glimpse": {"share": 0.04, "least_s": 1.5},
        "prompt_divisor": PROMPT_DIVISOR,
        "kept_divisor": KEPT_DIVISOR,
        "text": _text_rules(),
        "terms": TERMS,
    }


def _models() -> list[dict[str, Any]]:
    """The gallery's models, the first one that is shown first, then by size."""
    found = sorted(cards(), key=lambda card: (card.name != FIRST, card.bytes))
    return [
        {
            "name": card.name,
            "title": card.title,
            "bytes": card.bytes,
            "prompt": card.sample.prompt,
            "text": card.data.name,
        }
        for card in found
    ]


def _text_rules() -> dict[str, Any]:
    return {
        "signatures": [
            {"hex": signature.hex(), "what": what} for signature, what, _ in files.SIGNATURES
        ],
        "marks": [{"hex": mark.hex(), "name": name} for mark, name in files.UTF_MARKS],
        "bom": codecs.BOM_UTF8.hex(),
        "control": list(files.CONTROL),
        "control_share": files.CONTROL_SHARE,
        "few_controls": files.FEW_CONTROLS,
    }
