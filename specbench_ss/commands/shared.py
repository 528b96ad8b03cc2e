"""What several commands share: the line that Ctrl-C ends with (exit code 130), and the option --plugin."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.markup import escape


def interrupted(rest: str) -> typer.Exit:
    """Print the line that says how to go on, and return the exception to raise. rest: the rest of that line."""
    print(f"\nssbench: interrupted{rest}", file=sys.stderr)
    return typer.Exit(130)


def to_go_on(out: Path, hidden: Callable[[list[str]], list[str]] = list) -> str:
    """Return '; to go on: COMMAND' where there is something to go on with, else ''. hidden: words without secrets."""
    begun = out.is_dir() and any(p.suffix != ".tmp" for p in out.iterdir())
    return f"; to go on: {resume_line(out, hidden)}" if begun else ""


def resume_line(out: Path, hidden: Callable[[list[str]], list[str]] = list) -> str:
    """Return this command line with --resume and with --out, the folder that it wrote to."""
    arguments = hidden(sys.argv[1:])
    if "--resume" not in arguments:
        arguments.append("--resume")
    if not any(word == "--out" or word.startswith("--out=") for word in arguments):
        arguments += ["--out", str(out)]
    return shlex.join(["ssbench", *arguments])


def literal(command: Any) -> Any:
    """Make the help texts of a click command, its parameters and its commands show every bracket literally."""
    for part in (command, *command.params):
        if getattr(part, "help", None):
            part.help = escape(part.help)
    for inner in getattr(command, "commands", {}).values():
        literal(inner)
    return command


def _load(ctx: typer.Context, given: Any) -> Any:
    """Register the methods of the files before the command begins.

    Returns a tuple of `PluginFile`; an option callback.
    """
    if ctx.resilient_parsing:
        return given
    from specbench_ss.plugin_file import load_plugin  # imports torch, and `ssbench --help` imports this module

    return tuple(load_plugin(Path(file)) for file in dict.fromkeys(given or ()))


Plugin = Annotated[
    list[str] | None,
    typer.Option(
        metavar="FILE.py",
        help="Python file that defines methods of your own. May be given several times.",
        callback=_load,
    ),
]
