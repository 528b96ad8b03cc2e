"""`--fail-on`: which findings end a command with exit code 1, for whoever has it watched. Imports nothing heavy."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Annotated

import typer

from specbench_ss.errors import UserError, known_words
from specbench_ss.results.run_health import Check, checks
from specbench_ss.results.summary import summarise
from specbench_ss.runs.rows import Run

KINDS = (
    "failed", "mismatch", "biased", "untestable", "impossible", "void", "unstable", "disturbed", "near-tie", "length",
    "unjudged", "incomplete", "warnings",
)  # fmt: skip
NOT_CHECKED = "not-checked"  # whatever could not be checked
NAMES = (*KINDS, NOT_CHECKED)


def read(text: str | None) -> tuple[str, ...]:
    """Return the names of the findings; None gives none. Raises UserError for an unknown or blank one."""
    names = () if text is None else tuple(part.strip() for part in text.split(","))
    for name in names:
        if not name:
            raise UserError(f"--fail-on has a blank where a finding is expected: {', '.join(NAMES)}")
        if name not in NAMES:
            raise UserError(f"--fail-on: there is no finding {name!r}{known_words(name, NAMES)}")
    return names


def _checked(text: str | None) -> str | None:
    """Return the text: an option callback, so that a mistake is found before anything is done."""
    read(text)
    return text


FailOn = Annotated[
    str | None,
    typer.Option(
        "--fail-on",
        metavar="A,B",
        help=f"Findings that end the command with exit code 1, after everything is written: {', '.join(NAMES)}.",
        callback=_checked,
    ),
]


def found(made: Sequence[Check], names: Sequence[str]) -> list[str]:
    """Return what was asked for and found, one text for each check."""
    return [
        f"{NOT_CHECKED if check.state == 'not checked' else check.name} ({_details(check)})"
        for check in made
        if (check.name in names and check.state in ("wrong", "warning"))
        or (NOT_CHECKED in names and check.state == "not checked")
    ]


def _details(check: Check) -> str:
    """Return the first line of what was found, and how many there are besides."""
    rest = len(check.lines) - 1
    return (check.lines[0] if check.lines else check.sentence) + (f", and {rest} more" if rest > 0 else "")


def fail(run: Run, asked: str | None) -> None:
    """Exit with code 1 and one line that says why, where a run has one of these findings."""
    names = read(asked)
    if not names:
        return

    why = found(checks(run, summarise(run)), names)
    if why:
        print(f"ssbench: --fail-on: {' '.join('; '.join(why).split())}", file=sys.stderr)
        raise typer.Exit(1)
