"""Commands whose help has a word beside an option that takes a value, and nothing beside one that takes none.

Typer writes Python's types there from 0.29 on, ``--json <bool>`` and ``MODEL <str>``: a reader asks what to give to a switch. An
older typer does not, and is left as it is.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from typer.core import TyperCommand, TyperGroup

WORDS = {
    "<bool>": "",
    "<int>": "N",
    "<int range>": "N",
    "<float>": "X",
    "<path>": "PATH",
    "<str>": "NAME",
}
"""What stands for typer's word of a type, where an option has no ``metavar`` of its own."""


class PlainCommand(TyperCommand):
    """A command with such a help."""

    def get_params(self, ctx: Any) -> list[Any]:
        """All parameters, that of --help too."""
        return _plain(super().get_params(ctx), ctx)


class PlainGroup(TyperGroup):
    """A command that has commands, with such a help."""

    def get_params(self, ctx: Any) -> list[Any]:
        """All parameters, that of --help too."""
        return _plain(super().get_params(ctx), ctx)


def _plain(params: Iterable[Any], context: Any) -> list[Any]:
    found = list(params)
    for param in found:
        if not hasattr(param, "display_type"):
            continue
        if param.param_type_name == "argument":  # its name says it
            param.display_type_rich = lambda ctx: None
        elif param.metavar is None:
            shown = param.display_type(context)
            param.metavar = WORDS.get(shown, shown)
    return found
