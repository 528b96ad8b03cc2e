"""`ssbench paper all`: every table and figure that can run here, and one page of what agrees with the papers."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path

import msgspec
import typer

from specbench_ss import registry
from specbench_ss.commands.paper_folder import begin_folder, check_folder
from specbench_ss.commands.paper_work import check_settings, in_order, make, without_effect
from specbench_ss.commands.shared import interrupted, to_go_on
from specbench_ss.errors import UserError, error_text
from specbench_ss.files import crash_safe, records
from specbench_ss.models.model_folder import check_model
from specbench_ss.results.experiment import CLAIMS, VERDICTS, Claim, Experiment, Grid, Request, Result, Span
from specbench_ss.results.experiment_output import FIGURE, RESULT, markdown
from specbench_ss.results.markdown_table import table
from specbench_ss.runs.config import RunTarget

ALL, PAGE = "all", "paper.md"
ROWS = 40  # of a table on the page


class _Stored(msgspec.Struct):
    """What is read of an experiment's result.json."""

    claims: list[Claim] = []
    grids: tuple[Grid, ...] = ()
    lines: tuple[tuple[Span, ...], ...] = ()
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Item:
    """What became of one table or figure. problem: why it was not made. lacking: rows that need what is not here."""

    name: str
    title: str
    source: str
    claims: tuple[Claim, ...] = ()
    result: Result | None = None
    lacking: tuple[str, ...] = ()
    problem: str = ""


def make_all(request: Request, where: RunTarget, dry_run: bool) -> None:
    """Make everything, each in a folder of its own, and write the page after each. What was made stays made.

    What cannot run here is told on the page and stops nothing. Options that a table has no use for are left out for it.
    """
    experiments = _experiments()
    check_settings(request)
    check_model(request.model)
    if dry_run:
        for experiment in experiments:
            print(f"{experiment.name:<14} {experiment.source}: {experiment.title}")
        print(f"out            {where.out}")
        return
    items: list[Item] = []
    begin_folder(where.out, ALL, request)
    try:
        for number, experiment in enumerate(experiments, 1):
            print(f"{number} of {len(experiments)}: {experiment.name}", file=sys.stderr)
            items.append(_item(experiment, request, where))
            _write(items, request, where.out)
    except KeyboardInterrupt:
        raise interrupted(to_go_on(where.out)) from None
    print(f"wrote: {where.out / PAGE}")
    if all(item.problem for item in items):
        raise typer.Exit(1)


def _experiments() -> list[Experiment]:
    found = registry.load_all(registry.EXPERIMENTS)
    return [found[name]() for name in sorted(found, key=in_order)]


def _item(experiment: Experiment, request: Request, where: RunTarget) -> Item:
    """Make one of them, unless it was made in an earlier session."""
    own, folder = _used(experiment, request), where.out / experiment.name
    item = Item(experiment.name, experiment.title, experiment.source)
    try:
        lacking = tuple(f"{part.name} needs {part.missing}" for part in experiment.parts(own) if part.missing)
        item = replace(item, lacking=lacking)
        check_folder(folder, experiment.name, own)
        if (stored := _stored(folder)) is None:
            make(experiment, own, RunTarget(folder, resume=folder.exists()))
            stored = _stored(folder)
    except Exception as error:  # one of them: the others are worth having
        return replace(item, problem=error_text(error))
    if stored is None:
        return replace(item, problem=f"{folder / RESULT} cannot be read")
    grids = tuple(grid for grid in stored.grids if grid.name != CLAIMS)
    return replace(item, claims=tuple(stored.claims), result=Result(grids, (), stored.lines, stored.notes))


def _used(experiment: Experiment, request: Request) -> Request:
    """Return the request without what makes no difference to this experiment."""
    default = Request()
    idle = {f.name: getattr(default, f.name) for f in fields(Request) if f.name not in experiment.uses}
    own = replace(request, **idle)
    return replace(own, settings=tuple(text for text in own.settings if _has_use(text, experiment, own)))


def _has_use(setting: str, experiment: Experiment, request: Request) -> bool:
    """Say whether one of the experiment's runs decodes with METHOD.OPTION=VALUE."""
    try:
        configs = experiment.configs(replace(request, settings=(setting,)))
    except UserError:  # it has no such method
        return False
    return not without_effect([setting], configs.values())


def _stored(folder: Path) -> _Stored | None:
    """Return a result that was written, its page with it; None where there is none that can be read."""
    if not (folder / FIGURE).exists():
        return None
    try:
        return records.decoder(_Stored)((folder / RESULT).read_bytes())
    except (OSError, ValueError):
        return None


def _write(items: Sequence[Item], request: Request, folder: Path) -> None:
    """Write the page anew."""
    text = "\n".join(_lines(items, request)) + "\n"
    with crash_safe.replacing(folder / PAGE) as file:
        file.write(text.encode())


def _lines(items: Sequence[Item], request: Request) -> Iterator[str]:
    given = {name: value for name, value in asdict(request).items() if value != getattr(Request(), name)}
    claims = [claim for item in items for claim in item.claims]
    counts = Counter(claim.verdict for claim in claims)
    yield "# The papers' tables and figures, measured again"
    yield ""
    options = "".join(f", {name} {value}" for name, value in given.items() if name != "model")
    told = ", ".join(f"{counts[verdict]} *{verdict}*" for verdict in VERDICTS)
    yield (
        f"On {request.model}{options}. Statements of the papers held against what was found here: {told}. *open*: "
        "intervals overlap, or a part was not measured; *tends*: single values were compared, which have no intervals. "
        "Published numbers are of other models and another machine: what is held against them is their order and their "
        "direction, never their size."
    )
    for item in items:
        yield from ("", f"## {item.name}: {item.title}", "", f"{item.source}.{_page(item)}", "")
        if item.problem:
            yield f"Not made: {item.problem}"
        elif item.claims:
            head = ("the paper says", "here", "found")
            yield table(head, [(c.says, c.verdict, c.found) for c in item.claims], head)
        else:
            yield "No statement of the paper is held against it here."
        if item.lacking and not item.problem:
            yield from ("", f"Left out: {'; '.join(item.lacking)}.")
        if item.result is not None:
            yield from ("", "<details><summary>The numbers</summary>", *markdown(item.result, ROWS), "", "</details>")


def _page(item: Item) -> str:
    return "" if item.problem else f" [The whole of it]({item.name}/{FIGURE})."
