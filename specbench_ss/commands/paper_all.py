"""`ssbench paper all`: every table and figure that can run here, and one page of what agrees with the papers."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

import msgspec

from specbench_ss.commands.paper_work import in_order, make
from specbench_ss.commands.shared import interrupted, to_go_on
from specbench_ss.errors import UserError, error_text
from specbench_ss.files import crash_safe, records
from specbench_ss.results.experiment import Claim, Experiment, Request
from specbench_ss.results.experiment_output import FIGURE, RESULT
from specbench_ss.runs.config import RunTarget

PAGE, STATE = "paper.md", "state.json"


class _Claim(msgspec.Struct):
    says: str
    holds: bool | None
    found: str


class _Stored(msgspec.Struct):
    """What is read of an experiment's result.json."""

    title: str
    source: str
    notes: list[str]
    claims: list[_Claim] = []
    created: str = ""


@dataclass(frozen=True, slots=True)
class Item:
    """What became of one table or figure. problem: why it was not made. lacking: rows that need what is not here."""

    name: str
    title: str
    source: str
    claims: tuple[Claim, ...] = ()
    lacking: tuple[str, ...] = ()
    problem: str = ""
    seconds: float | None = None


def make_all(request: Request, where: RunTarget, dry_run: bool) -> None:
    """Make everything, each in a folder of its own, and write the page after each. What was made stays made.

    What cannot run here is told on the page and stops nothing. Options that a table has no use for are left out for it.
    """
    experiments = _experiments()
    if dry_run:
        for experiment in experiments:
            print(f"{experiment.name:<14} {experiment.source}: {experiment.title}")
        print(f"out            {where.out}")
        return
    items: list[Item] = []
    where.out.mkdir(parents=True, exist_ok=True)
    try:
        for number, experiment in enumerate(experiments, 1):
            print(f"{number} of {len(experiments)}: {experiment.name}", file=sys.stderr)
            items.append(_item(experiment, request, where))
            _write(items, request, where.out)
    except KeyboardInterrupt:
        raise interrupted(to_go_on(where.out)) from None
    print(f"wrote: {where.out / PAGE}")


def _experiments() -> list[Experiment]:
    from specbench_ss import registry

    found = registry.load_all(registry.EXPERIMENTS)
    return [found[name]() for name in sorted(found, key=in_order)]


def _item(experiment: Experiment, request: Request, where: RunTarget) -> Item:
    """Make one of them, unless it was made in an earlier session."""
    own, folder = _used(experiment, request), where.out / experiment.name
    lacking = tuple(f"{part.name} needs {part.missing}" for part in experiment.parts(own) if part.missing)
    item = Item(experiment.name, experiment.title, experiment.source, lacking=lacking)
    if (stored := _stored(folder)) is None:
        started = time.monotonic()
        try:
            make(experiment, own, RunTarget(folder, resume=folder.exists()))
        except UserError as error:
            return replace(item, problem=error_text(error))
        crash_safe.write_json(folder / STATE, {"seconds": time.monotonic() - started})
        stored = _stored(folder)
        assert stored is not None
    claims = tuple(Claim(claim.says, claim.holds, claim.found) for claim in stored.claims)
    return replace(item, claims=claims, seconds=_seconds(folder))


def _used(experiment: Experiment, request: Request) -> Request:
    """Return the request without what makes no difference to this experiment."""
    default = Request()
    idle = {f.name: getattr(default, f.name) for f in fields(Request) if f.name not in experiment.uses}
    return replace(request, **idle)


def _stored(folder: Path) -> _Stored | None:
    """Return a result that was written; None where there is none that can be read."""
    try:
        return records.decoder(_Stored)((folder / RESULT).read_bytes())
    except (OSError, ValueError):
        return None


def _seconds(folder: Path) -> float | None:
    try:
        state: Any = json.loads((folder / STATE).read_bytes())
        return float(state["seconds"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _write(items: Sequence[Item], request: Request, folder: Path) -> None:
    """Write the page anew."""
    text = "\n".join(_lines(items, request)) + "\n"
    with crash_safe.replacing(folder / PAGE) as file:
        file.write(text.encode())


def _lines(items: Sequence[Item], request: Request) -> Iterator[str]:
    given = {name: value for name, value in asdict(request).items() if value != getattr(Request(), name)}
    claims = [claim for item in items for claim in item.claims]
    counts = {verdict: sum(claim.verdict == verdict for claim in claims) for verdict in VERDICTS}
    yield "# The papers' tables and figures, measured again"
    yield ""
    options = "".join(f", {name} {value}" for name, value in given.items() if name != "model")
    yield (
        f"On {request.model}{options}. Of {len(claims)} statements of the papers that a result can be held against, "
        f"{counts['agrees']} agree with what was found here, {counts['does not agree']} do not, and {counts['open']} "
        "stay open, since intervals overlap or a part could not be measured. Published numbers are of other models and "
        "another machine: what is held against them is their order and their direction, never their size."
    )
    for item in items:
        yield from ("", f"## {item.name}: {item.title}", "", f"{item.source}.{_took(item)}", "")
        if item.problem:
            yield f"Not made: {item.problem}"
        elif item.claims:
            yield from ("| the paper says | here | found |", "|---|---|---|")
            yield from (f"| {_cell(c.says)} | {c.verdict} | {_cell(c.found)} |" for c in item.claims)
        else:
            yield f"The paper says nothing of it that a result could be held against; {FIGURE} shows what was found."
        if item.lacking and not item.problem:
            yield from ("", f"Left out: {'; '.join(item.lacking)}.")


VERDICTS = ("agrees", "does not agree", "open")


def _took(item: Item) -> str:
    return "" if item.seconds is None else f" Made in {item.seconds:,.0f} s; {item.name}/{FIGURE} has it whole."


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")
