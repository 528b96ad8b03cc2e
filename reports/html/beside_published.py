"""Published numbers beside the run's, marked for what compares."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from specbench_ss.reports.html.page_parts import Cell, Column, Table, figure, plain
from specbench_ss.reports.html.palette import Style
from specbench_ss.results.number_text import times
from specbench_ss.results.published import Beside, Mark, beside, comparable
from specbench_ss.results.summary import SummaryRow
from specbench_ss.runs.rows import Run

SIGNS: dict[Mark, str] = {"same": "✓", "part": "~", "other": "✕"}
NOTE = (
    "✓ the same, ~ the same family of models or some of the questions, ✕ another. Whether drafters and settings are "
    "those that were published is not known here."
)


def published_beside(
    run: Run, overall: Mapping[str, SummaryRow], styles: Mapping[str, Style], ranked: Sequence[str]
) -> Table | None:
    """Return a row for each published number of a method of the run; None where there are none."""
    figures = {label: (overall[label].tau, overall[label].speedup) for label in ranked}
    rows = [one for one in beside(run.manifest, figures) if one.entry is not None]
    if not rows:
        return None
    texts = ("model", "GPU", "compares", "source")
    numbers = ("τ", "published τ", "speedup", "published speedup")
    columns = [Column("method", False), *map(Column, numbers), *(Column(name, False) for name in texts)]
    cells = [_row(one, styles[one.method]) for label in ranked for one in rows if one.method == label]
    return Table("published", columns, cells, "Published numbers beside this run's", notes=(NOTE,))


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
