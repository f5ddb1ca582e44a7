"""What a notebook shows of an ``Inspection``: its text shaded by surprise, what comes next, and the heads of the last layer.

What this is: a pure function to HTML without script, style sheet or ids, below 200 kB whatever the text, and ``show_inspections``, which
tells a notebook of it. Colours are the page's own with a transparent one upon them, so that it can be read in light and in dark.
What this is not: the numbers (``training/looking.py``), or the same in a terminal (``cli/inspect.py``).
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from html import escape

import numpy as np
from numpy.typing import NDArray

from posttrainllm.engines.base import F32
from posttrainllm.errors import PosttrainError
from posttrainllm.figures import counted, percent, perplexity, printable, quoted
from posttrainllm.notebook.curve import BLUE
from posttrainllm.notebook.live import kernel_shell
from posttrainllm.notebook.page import DIM, block, heading, notices
from posttrainllm.training.looking import (
    PLACES,
    RARER,
    Inspection,
    Span,
    habit,
    largest,
    level,
)

SHADE = "rgba(217,119,6,{})"
ALPHAS = (
    0.0,
    0.14,
    0.28,
    0.42,
    0.58,
)  # of a level: the last leaves text a contrast of 4.5 to 1 on white and on black
MOST_TOKENS, MOST_LETTERS, MOST_HEADS = (
    256,
    60,
    24,
)  # shown; letters are those of one part of the text
CELLS = 32  # rows and columns of a head's grid
OPACITIES = (0.1, 0.25, 0.45, 0.7, 1.0)
LIMITS = (
    0.02,
    0.08,
    0.25,
    0.5,
)  # shares of a row from which a cell is a shade darker, as in a terminal
CODE = "font-family:ui-monospace,monospace;white-space:pre"


def show_inspections() -> None:
    """Tell the notebook that this runs in, if it does in one, how an ``Inspection`` is shown."""
    shell = kernel_shell()
    if shell is not None:
        shell.display_formatter.formatters["text/html"].for_type(Inspection, inspection_html)


def inspection_html(inspection: Inspection) -> str:
    """An inspection as a page; where the attention cannot be computed, that is said."""
    loss = inspection.loss
    mean = "" if loss is None else f" · {loss:.2f} nats each · perplexity {perplexity(loss)}"
    told = []
    if inspection.cut:
        told.append(
            f"the model looks at no more; left out at the beginning: {counted(inspection.cut, 'token')}"
        )
    spans = inspection.spans()
    shown = [span for span in spans if span.last > len(inspection.tokens) - MOST_TOKENS]
    if len(shown) < len(spans):
        told.append(f"the last {MOST_TOKENS} tokens are shown")
    try:
        heads = _heads(inspection, inspection.n_layer - 1)
    except PosttrainError as error:
        heads = notices([error.message])
    return block(
        heading(counted(len(inspection.tokens), "token"), mean),
        notices(told),
        _text(inspection, shown),
        _legend(),
        _candidates(inspection),
        heads,
    )


def _text(inspection: Inspection, spans: Iterable[Span]) -> str:
    style = "white-space:pre-wrap;overflow-wrap:anywhere;margin:0.5em 0 0.2em;padding:0;line-height:1.7;max-height:24em;overflow:auto"
    return f'<pre style="{style}">{"".join(_part(inspection, span) for span in spans)}</pre>'


def _part(inspection: Inspection, span: Span) -> str:
    """A part of the text, its shade, and what is known of it where the mouse stands."""
    shown = printable(span.text)
    if len(shown) > MOST_LETTERS:
        shown = shown[: MOST_LETTERS - 1] + "…"
    words = escape(shown.replace("\n", "⏎\n"))
    shade = level(span.surprise)
    if span.surprise is None or shade is None:
        return f'<span style="{DIM}">{words}</span>'
    piece, probability = inspection.candidates(span.first - 1, 1)[0]
    note = f"{percent(math.exp(-span.surprise))}, {span.surprise:.2f} nats; expected {quoted(piece[:MOST_LETTERS])} {percent(probability)}"
    colour = f' style="background:{SHADE.format(ALPHAS[shade])}"' if shade else ""
    return f'<span title="{escape(note)}"{colour}>{words}</span>'


def _legend() -> str:
    swatches = "".join(
        f' <span style="background:{SHADE.format(alpha)};padding:0 0.4em">{limit:,}</span>'
        for limit, alpha in zip(RARER, ALPHAS[1:], strict=True)
    )
    return (
        f'<div style="font-size:0.9em"><span style="{DIM}">rarer than 1 in</span>{swatches}</div>'
    )


def _candidates(inspection: Inspection) -> str:
    found = inspection.candidates()
    most = max(found[0][1], 1e-9)
    bar = f"align-self:center;height:0.7em;border-radius:3px;background:{BLUE}"
    rows = "".join(
        f'<span style="{CODE};overflow:hidden">{escape(quoted(piece[:MOST_LETTERS]))}</span>'
        f'<span style="text-align:right">{percent(share)}</span>'
        f'<span style="{bar};width:{max(0.5, 100 * share / most):.1f}%"></span>'
        for piece, share in found
    )
    columns = "display:grid;grid-template-columns:max-content max-content minmax(0,1fr);gap:0.1em 1em;max-width:420px"
    return f'<div style="margin-top:0.6em"><b>what comes next</b></div><div style="{columns}">{rows}</div>'


def _heads(inspection: Inspection, layer: int) -> str:
    """Every head of a layer as a small picture: a row for each token, dark where it looked."""
    weights = inspection.attention(layer)
    pictures = [_head(number, each) for number, each in enumerate(weights[:MOST_HEADS])]
    pooled = -(-weights.shape[1] // CELLS)
    more = f", the first {MOST_HEADS} of {len(weights)}" if len(weights) > MOST_HEADS else ""
    cell = f"; a cell is the largest of up to {pooled} x {pooled} tokens" if pooled > 1 else ""
    about = f" · what its heads looked at{more}: a row for each token{cell}"
    grid = "display:flex;flex-wrap:wrap;gap:0.8em;margin-top:0.4em"
    return f'<div style="margin-top:0.6em"></div>{heading(f"layer {layer}", about)}<div style="{grid}">{"".join(pictures)}</div>'


def _head(number: int, weights: F32) -> str:
    size = min(len(weights), CELLS)
    place, share = habit(weights)
    words = f"head {number}: {100 * share:.0f} % on {PLACES[place]}"
    levels = np.searchsorted(LIMITS, largest(weights, size), side="right")
    paths = []
    for shade, opacity in enumerate(OPACITIES):
        runs = "".join(_runs(levels[row, : row + 1] == shade, row) for row in range(size))
        if runs:
            paths.append(f'<path d="{runs}" opacity="{opacity}"/>')
    return (
        '<figure style="margin:0;width:96px">'
        f'<svg xmlns="http://www.w3.org/2000/svg" role="img" aria-label="{words}" viewBox="0 0 {size} {size}" '
        'style="width:96px;height:96px;display:block" stroke="currentColor" stroke-width="1" fill="none" shape-rendering="crispEdges">'
        f"<title>{words}</title>{''.join(paths)}</svg>"
        f'<figcaption style="font-size:0.8em;line-height:1.3">head {number}<br>'
        f'<span style="{DIM}">{place} {100 * share:.0f} %</span></figcaption></figure>'
    )


def _runs(chosen: NDArray[np.bool_], row: int) -> str:
    """Lines over the cells of a row that are chosen, neighbours in one."""
    edges = np.flatnonzero(np.diff(np.concatenate(([0], chosen.astype(np.int8), [0]))))
    return "".join(f"M{start} {row}.5h{end - start}" for start, end in edges.reshape(-1, 2))
