"""What tests of the notebook share: a tiny run, a cell that keeps what is shown in it, and what a page must be."""

from __future__ import annotations

import time
from xml.etree import ElementTree

SMALL = {
    "preset": "tiny",
    "engine": "numpy",
    "n_ctx": 16,
    "batch_size": 4,
    "n_layer": 1,
    "n_head": 2,
    "n_embd": 8,
    "eval_every": 4,
    "sample_every": 4,
    "sample_tokens": 12,
    "verdict_samples": 2,
    "final_windows": 8,
    "eval_windows": 4,
}


class Cell:
    """The output of a cell: what was shown in it, and when."""

    def __init__(self, *, fails: bool = False) -> None:
        self.shown: list[tuple[float, dict[str, str]]] = []
        self.fails = fails

    def __call__(self, bundle: dict[str, str]) -> None:
        self.shown.append((time.monotonic(), bundle))
        if self.fails:
            raise RuntimeError("the browser went away")

    @property
    def html(self) -> str:
        return self.shown[-1][1]["text/html"]


def well_formed(html: str) -> None:
    """HTML without void elements, as ours is, is XML too."""
    ElementTree.fromstring(html)
