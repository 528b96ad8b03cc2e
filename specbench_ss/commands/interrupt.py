"""Ctrl-C as a command tells it: one line that says how to go on, exit code 130."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path

import typer


def interrupted(rest: str) -> typer.Exit:
    """What to raise, once the line has been printed. rest: of the line."""
    print(f"\nssbench: interrupted{rest}", file=sys.stderr)
    return typer.Exit(130)


def to_go_on(out: Path) -> str:
    """'; to go on: COMMAND' where there is something to go on with."""
    begun = out.is_dir() and any(p.suffix != ".tmp" for p in out.iterdir())
    return f"; to go on: {resume_line(out)}" if begun else ""


def resume_line(out: Path) -> str:
    """This command line, with where it went and --resume."""
    arguments = list(sys.argv[1:])
    if "--resume" not in arguments:
        arguments.append("--resume")
    if not any(word == "--out" or word.startswith("--out=") for word in arguments):
        arguments += ["--out", str(out)]
    return shlex.join(["ssbench", *arguments])
