"""``posttrainllm inspect``: what a model makes of a text: its surprise, what it expects next, and what its heads look at."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from posttrainllm.cli.options import RunsDir

if TYPE_CHECKING:
    from posttrainllm.training.looking import Inspection, Span

USUAL = 80  # columns where there is no terminal
BAR = 30  # cells of the longest bar
CONTEXT = 16  # cells of text before a surprising token
ENGINES = ("cpp", "numpy", "auto")


def inspect(
    model: Annotated[
        str,
        typer.Argument(
            metavar="MODEL",
            help="A run, a model of the gallery, a checkpoint or Hugging Face GPT-2 folder, a .zip or .tinygpt file.",
            show_default=False,
        ),
    ],
    text: Annotated[
        str,
        typer.Argument(
            metavar="TEXT", help="Text to read; - takes standard input.", show_default=False
        ),
    ],
    top: Annotated[
        int, typer.Option(min=1, max=1000, help="How many candidates and surprises to show.")
    ] = 5,
    layer: Annotated[
        int | None,
        typer.Option(help="Show what the heads of this layer look at; the first is 0."),
    ] = None,
    head: Annotated[
        int | None, typer.Option(help="Of --layer, this head alone, large; the first is 0.")
    ] = None,
    engine: Annotated[
        str | None,
        typer.Option(help="cpp or numpy [dim](default: cpp, where it is built)[/dim]."),
    ] = None,
    runs_dir: RunsDir = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Look inside a model: its surprise at a text, what it expects next, what its heads look at."""
    from posttrainllm.api import RUNS_DIR
    from posttrainllm.cli.generate import read_input
    from posttrainllm.cli.terminal import say
    from posttrainllm.errors import ConfigError
    from posttrainllm.figures import counted, one_line
    from posttrainllm.training.looking import look
    from posttrainllm.training.models import find_model

    if head is not None and layer is None:
        raise ConfigError("--head needs --layer", "give both: --layer 0 --head 0")
    if engine is not None and engine not in ENGINES:
        raise ConfigError(
            f"looking inside runs on cpp or numpy, got --engine {engine}",
            "leave --engine out: a model of every engine can be looked at",
        )
    found = find_model(model, runs_dir or Path(RUNS_DIR))
    config = found.checkpoint.config
    for name, number, count in (("layer", layer, config.n_layer), ("head", head, config.n_head)):
        if number is not None and not 0 <= number < count:
            raise ConfigError(
                f"this model has no {name} {number}",
                f"--{name} takes 0 .. {count - 1}" if count > 1 else f"--{name} takes 0",
            )
    inspection = look(
        read_input("TEXT -") if text == "-" else text,
        config=config,
        params=found.checkpoint.params,
        tokenizer=found.tokenizer,
        beside={"engine": engine} if engine in ("cpp", "numpy") else {},
    )
    for notice in found.checkpoint.notices:
        say(("notice: ", "yellow"), one_line(notice), error=True)
    if inspection.cut:
        say(
            ("notice: ", "yellow"),
            f"the model looks at {counted(len(inspection.tokens), 'token')} at most; left out at the beginning: {inspection.cut:,}",
            error=True,
        )
    if as_json:
        print(json.dumps(_document(found.title, inspection, top, layer, head), allow_nan=False))
        return
    _show_text(found.title, config.parameters(), inspection)
    if layer is None:
        _show_surprises(inspection, top)
        _show_candidates(inspection, top)
    else:
        _show_attention(inspection, layer, head)


def _document(
    name: str, inspection: Inspection, top: int, layer: int | None, head: int | None
) -> dict[str, Any]:
    """All of it as one object."""
    surprise = [None, *inspection.surprise.tolist()]
    document: dict[str, Any] = {
        "model": name,
        "cut": inspection.cut,
        "loss": inspection.loss,
        "tokens": [
            {"id": token, "piece": piece, "surprise": nats}
            for token, piece, nats in zip(
                inspection.tokens.tolist(), inspection.pieces, surprise, strict=True
            )
        ],
        "next": [
            {"id": token, "piece": piece, "probability": probability}
            for token, (piece, probability) in zip(
                inspection.likeliest(count=top).tolist(),
                inspection.candidates(count=top),
                strict=True,
            )
        ],
    }
    if layer is not None:
        weights = inspection.attention(layer)
        chosen = weights if head is None else weights[head]
        document["attention"] = {"layer": layer, "head": head, "weights": chosen.tolist()}
    return document


def _show_text(name: str, parameters: int, inspection: Inspection) -> None:
    from posttrainllm.cli.surprise import coloured, legend, marked, shaded
    from posttrainllm.cli.terminal import fields, has_colours, has_unicode, say
    from posttrainllm.figures import counted, one_line, perplexity

    layers, heads = inspection.n_layer, inspection.n_head
    length, loss = counted(len(inspection.tokens), "token"), inspection.loss
    mean = "" if loss is None else f", {loss:.2f} nats each, perplexity {perplexity(loss)}"
    rows = [
        ("model", one_line(name)),
        ("", f"{parameters:,} parameters: {counted(layers, 'layer')} of {counted(heads, 'head')}"),
        ("text", length + mean),
    ]
    fields(rows)
    say()
    colours, unicode = has_colours(sys.stdout), has_unicode(sys.stdout)
    for line in shaded(inspection.spans(), _room(), unicode=unicode):
        if colours:
            say(*coloured(line))
        else:
            text, under = marked(line, unicode=unicode)
            say(text)
            say(under)
    if colours:
        say()
    say(*legend(colours=colours, unicode=unicode))
    say()


def _show_surprises(inspection: Inspection, top: int) -> None:
    from posttrainllm.cli.table import Column, print_table
    from posttrainllm.cli.terminal import say
    from posttrainllm.figures import percent, quoted

    spans = inspection.spans()
    ranked = sorted((span for span in spans if span.surprise is not None), key=_by_surprise)
    if not ranked:
        return
    columns = [
        Column("most surprising"),
        Column("at", right=True, goes=2),
        Column("chance", right=True),
        Column("nats", right=True, goes=3),
        Column("expected", goes=1),
        Column("after", goes=4),
    ]
    rows = []
    for span in ranked[:top]:
        assert span.surprise is not None
        (expected, probability), *_ = inspection.candidates(span.first - 1, 1)
        rows.append(
            [
                quoted(span.text),
                f"{span.first}",
                percent(math.exp(-span.surprise)),
                f"{span.surprise:.2f}",
                f"{quoted(expected)} {percent(probability)}",
                _before(spans, span),
            ]
        )
    print_table(columns, rows)
    say()


def _show_candidates(inspection: Inspection, top: int) -> None:
    from posttrainllm.cli.terminal import cells, has_unicode, say
    from posttrainllm.figures import percent, quoted

    say(("what comes next", "bold"))
    found = [(quoted(piece), share) for piece, share in inspection.candidates(count=top)]
    widest = max(cells(name) for name, _ in found)
    room = max(4, min(BAR, _room() - widest - 12))
    full = "█" if has_unicode(sys.stdout) else "#"
    for name, share in found:
        bar = full * max(1, round(room * share / max(found[0][1], 1e-9)))
        space = " " * (widest - cells(name))
        say(f"{name}{space}  {percent(share):>8}  ", (bar, "cyan"))


def _show_attention(inspection: Inspection, layer: int, head: int | None) -> None:
    from posttrainllm.cli.grid import all_heads, legend, one_head
    from posttrainllm.cli.terminal import has_unicode, say
    from posttrainllm.figures import counted
    from posttrainllm.training.looking import PLACES, habit

    unicode = has_unicode(sys.stdout)
    weights = inspection.attention(layer)
    if head is None:
        title, about = f"layer {layer}", f": what {counted(inspection.n_head, 'head')} looked at"
        lines, pooled = all_heads(weights, _room(), unicode=unicode)
        if pooled > 1:
            about += f"; a cell is the largest of up to {pooled} x {pooled} tokens"
    else:
        place, share = habit(weights[head])
        title, about = f"layer {layer}, head {head}", f": {100 * share:.0f} % on {PLACES[place]}"
        names = [_plain(piece, unicode=unicode) for piece in inspection.pieces]
        lines, shown = one_head(weights[head], names, _room(), unicode=unicode)
        if shown < len(names):
            about += f"; here the last {shown} of {len(names):,} tokens"
    say((title, "bold"), about)
    say((legend(unicode=unicode), "dim"))
    say()
    for line in lines:
        say(line)


def _room() -> int:
    """Columns to draw in."""
    from posttrainllm.cli.terminal import WIDEST, width

    return max(8, min(WIDEST, width(sys.stdout) or USUAL))


def _by_surprise(span: Span) -> tuple[float, int]:
    return (-(span.surprise or 0.0), span.first)


def _before(spans: list[Span], span: Span) -> str:
    """The text before a part, as much as a column bears."""
    from posttrainllm.cli.terminal import cells, has_unicode
    from posttrainllm.figures import escaped

    text = ""
    for each in reversed([each for each in spans if each.first < span.first]):
        if cells(escaped(each.text) + text) > CONTEXT:
            return ("…" if has_unicode(sys.stdout) else "...") + text
        text = escaped(each.text) + text
    return text


def _plain(piece: str, *, unicode: bool) -> str:
    """A piece at the side of a grid, where a space must be seen."""
    from posttrainllm.figures import printable

    marks = {" ": "␣", "\n": "⏎", "\t": "⇥"} if unicode else {" ": "_", "\n": "\\n", "\t": "\\t"}
    return "".join(marks.get(character, character) for character in printable(piece))
