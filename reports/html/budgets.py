"""What each method had, as a table: nodes a step, settings, and what its weights learnt from."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from specbench_ss.reports.html.page_parts import Cell, Column, Table, figure, plain
from specbench_ss.reports.html.palette import Style
from specbench_ss.results import analysis
from specbench_ss.results.analysis import Budget
from specbench_ss.results.text import MISSING

COLUMNS = (
    Column("method", False),
    Column("drafted a step", help="Nodes of the draft tree, the root left out, a mean over all steps"),
    Column("verified a step", help="Of these, nodes that reached the model's last layer"),
    Column("parameters that learnt", help="Of the drafter, in its training"),
    Column("tokens read", help="Of text in its training, prompts included and repeats counted"),
    Column("steps of training"),
    Column("peak learning rate"),
    Column("text", False, help="What the drafter learnt from, or what is searched"),
    Column("settings of this run", False, help="Options that the command gave, or the weights' folder advises"),
)


def table(found: Sequence[Budget], styles: Mapping[str, Style]) -> Table:
    """Return a row for each method."""
    note = analysis.unequal(found)
    rows = [_row(budget, styles[budget.method]) for budget in found]
    return Table("budgets", COLUMNS, rows, "What each method had", notes=(note,) if note else ())


def _row(budget: Budget, style: Style) -> list[Cell]:
    learnt = budget.learnt or {}
    return [
        style.cell(),
        figure(budget.drafted, 1),
        figure(budget.verified, 1),
        *(figure(learnt.get(name), 0) for name in ("parameters", "tokens", "steps")),
        Cell(f"{learnt['lr']:g}", learnt["lr"]) if "lr" in learnt else plain(MISSING),
        plain(_text(budget.learnt)),
        plain(_settings(budget)),
    ]


def _settings(budget: Budget) -> str:
    given = budget.given + (" (a preset)" if budget.preset else "")
    return "; ".join(filter(None, (given, f"advised: {budget.advised}" if budget.advised else "")))


def _text(learnt: Mapping[str, Any] | None) -> str:
    if learnt is None:
        return "not recorded"
    if searched := learnt.get("searched"):
        return f"{searched.get('tokens') or 0:,} tokens are searched: {searched.get('made_of') or 'of unknown origin'}"
    if "own_answers" not in learnt:
        return "not recorded" if learnt else ""
    return "the model's own answers" if learnt["own_answers"] else "the answers of the data"
