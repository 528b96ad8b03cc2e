"""Help texts as they are written: square brackets are no markup. Knows commands, none by name."""

from __future__ import annotations

from typing import Any

from rich.markup import escape


def literal(command: Any) -> Any:
    """A click command, once every bracket in its texts, its parameters' and its commands' is shown as it is."""
    for part in (command, *command.params):
        if getattr(part, "help", None):
            part.help = escape(part.help)
    for inner in getattr(command, "commands", {}).values():
        literal(inner)
    return command
