"""``posttrainllm models``: the models that come along, and the card of one."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated

import typer

from posttrainllm.cli.options import AsJson

if TYPE_CHECKING:
    from posttrainllm.gallery.catalogue import Card


def models(
    name: Annotated[
        str | None, typer.Argument(metavar="NAME", help="Show the card of this one.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """List the models that come along, ready to write, or show one's card."""
    from posttrainllm.gallery import catalogue

    found = list(catalogue.cards()) if name is None else [catalogue.card(_bare(name))]
    if as_json:
        documents = [card.model_dump(mode="json") for card in found]
        print(json.dumps(documents if name is None else documents[0]))
    elif name is None:
        _list(found)
    else:
        _show(found[0])


def _bare(name: str) -> str:
    """The name alone, also of ``gallery:NAME``."""
    from posttrainllm.gallery.catalogue import PREFIX

    return name.removeprefix(PREFIX)


def _list(cards: list[Card]) -> None:
    from posttrainllm.cli.report import command
    from posttrainllm.cli.table import Column, print_table
    from posttrainllm.cli.terminal import say
    from posttrainllm.storage import show_bytes

    columns = [
        Column("model"),
        Column("parameters", right=True),
        Column("file", right=True, goes=3),
        Column("loss", right=True, goes=1),
        Column("bits a byte", right=True, goes=2),
        Column("writes", goes=4),
    ]
    rows = [
        [
            card.name,
            f"{card.parameters:,}",
            show_bytes(card.bytes),
            f"{card.losses.int8:.3f}",
            f"{card.bits_per_byte:.2f}",
            card.title,
        ]
        for card in cards
    ]
    print_table(columns, rows)
    if cards:
        say()
        say(f"let one write:         {command()} generate {cards[0].name}")
        say(f"its card:              {command()} models {cards[0].name}")
        say(f"teach it your text:    {command()} train --from {cards[0].name} FILE")


def _show(card: Card) -> None:
    from posttrainllm.cli.terminal import fields, say
    from posttrainllm.figures import clock, counted, one_line, printable
    from posttrainllm.storage import show_bytes

    say((card.name, "bold"), f"  {card.title}")
    say()
    trained, losses, data = card.training, card.losses, card.data
    rows = [
        ("model", f"{card.parameters:,} parameters: {card.shape}"),
        ("file", f"{show_bytes(card.bytes)}, int8 with a scale for each output"),
        ("", f"sha256 {card.sha256}"),
        ("text", f"{data.name}: {data.about}"),
        (
            "",
            f"{show_bytes(data.train_bytes)} to train on, {show_bytes(data.val_bytes)} to validate",
        ),
        ("", f"sha256 {data.sha256}"),
        ("licence", data.licence),
        (
            "training",
            f"{counted(trained.step, 'step')} of {trained.steps:,} kept, the best on the validation part; "
            f"{trained.tokens:,} tokens, {clock(trained.seconds)}",
        ),
        ("", f"{trained.engine} on {trained.device}"),
        *(("" if number else "commands", line) for number, line in enumerate(trained.commands)),
        (
            "loss",
            f"{losses.int8:.4f} nats a byte on {losses.windows:,} windows of {losses.n_ctx}, the whole "
            "validation part",
        ),
        ("", f"{losses.float32:.4f} before rounding to int8 ({losses.int8 - losses.float32:+.4f})"),
        ("bits a byte", f"{card.bits_per_byte:.3f}"),
        *(("" if number else "bad at", line) for number, line in enumerate(card.bad_at)),
        ("sample", card.sample.command),
    ]
    fields((label, one_line(value)) for label, value in rows)
    say()
    say((printable(card.sample.prompt), "dim"), printable(card.sample.text))
