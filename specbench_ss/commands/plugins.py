"""The option --plugin, which several commands have: methods in a file."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer


def _load(ctx: typer.Context, given: Any) -> Any:
    """Option callback: the files' methods are registered before the command begins. -> tuple of `PluginFile`."""
    if ctx.resilient_parsing:
        return given
    from specbench_ss.plugin_file import load_plugin

    return tuple(load_plugin(Path(file)) for file in dict.fromkeys(given or ()))


Plugin = Annotated[
    list[str] | None,
    typer.Option(metavar="FILE.py", help="Python file that defines a method; repeatable.", callback=_load),
]
