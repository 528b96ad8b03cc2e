"""Published numbers beside the run's, marked for what compares."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import combinations
from math import comb

from specbench_ss.reports.html.page_parts import Cell, Column, Table, figure, plain
from specbench_ss.reports.html.palette import Style
from specbench_ss.results.published import Beside, Mark, beside, comparable
from specbench_ss.results.summary import SummaryRow
from specbench_ss.results.text import times
from specbench_ss.runs.records import Run

FORMULA_OF = "specbench"  # the suite whose published speedups have a formula of their own
FEWEST = 3  # methods: of two there is no order to speak of
SIGNS: dict[Mark, str] = {"same": "✓", "part": "~", "other": "✕"}
NOTE = (
    "✓ the same, ~ the same family of models or some of the questions, ✕ another. Whether drafters and settings are "
    "those that were published is not known here. Speedups beside those of Spec-Bench are by its formula."
)


def published_beside(
    run: Run, overall: Mapping[str, SummaryRow], styles: Mapping[str, Style], ranked: Sequence[str]
) -> Table | None:
    """Return a row for each published number of a method of the run; None where there are none."""
    figures = {label: (overall[label].tau, overall[label].speedup) for label in ranked}
    rows = [_alike(one, overall[one.method]) for one in beside(run.manifest, figures) if one.entry is not None]
    if not rows:
        return None
    texts = ("model", "GPU", "compares", "source")
    numbers = ("τ", "published τ", "speedup", "published speedup")
    columns = [Column("method", False), *map(Column, numbers), *(Column(name, False) for name in texts)]
    cells = [_row(one, styles[one.method]) for label in ranked for one in rows if one.method == label]
    return Table(
        "published", columns, cells, "Published numbers beside this run's", notes=(*order_in_words(rows), NOTE)
    )


def _alike(one: Beside, row: SummaryRow) -> Beside:
    """Return the run's speedup by the formula of the published one."""
    of_suite = one.entry is not None and one.entry.suite == FORMULA_OF
    return replace(one, speedup=row.speedup_specbench) if of_suite else one


def order_in_words(rows: Sequence[Beside]) -> list[str]:
    """Say how the order of methods was published and how it is here, on the model and GPU with the most methods."""
    lists: dict[tuple[str, str], dict[str, Beside]] = {}
    for one in rows:
        if one.entry is not None and one.speedup is not None:
            lists.setdefault((one.entry.model, one.entry.gpu), {}).setdefault(one.entry.method, one)
    (model, gpu), most = max(lists.items(), key=lambda item: len(item[1]), default=(("", ""), {}))
    if len(most) < FEWEST:
        return []
    theirs = sorted(most, key=lambda name: -(most[name].entry.speedup))  # type: ignore[union-attr]
    ours = sorted(theirs, key=lambda name: -(most[name].speedup or 0.0))
    same = sum(ours.index(a) < ours.index(b) for a, b in combinations(theirs, 2))
    apart = all(comparable(one.marks) == "nothing" for one in most.values())
    lead = "No number of these compares with this run's; orders can be set side by side. " if apart else ""
    return [
        f"{lead}By speedup, the order published for {model} on {gpu} is {', '.join(theirs)}; here it is "
        f"{', '.join(most[name].method for name in ours)}. {same} of {comb(len(theirs), 2)} pairs stand in the same "
        "order, those counted too whose order is not sure here. Where model or machine are others, it may well differ."
    ]


def _row(one: Beside, style: Style) -> list[Cell]:
    entry = one.entry
    assert entry is not None
    return [
        style.cell(),
        figure(one.tau),
        figure(entry.tau),
        Cell(times(one.speedup), one.speedup),
        Cell(times(entry.speedup), entry.speedup),
        plain(f"{SIGNS[one.marks['model']]} {entry.model}", entry.model),
        plain(f"{SIGNS[one.marks['GPU']]} {entry.gpu}", entry.gpu),
        plain(comparable(one.marks)),
        plain(entry.source.removeprefix("https://")),
    ]
