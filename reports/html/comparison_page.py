"""Page of several runs side by side: methods by runs first, then changes with intervals, then the differences."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from string import ascii_uppercase
from typing import Any

from specbench_ss import __version__
from specbench_ss.errors import UserError
from specbench_ss.reports import charts
from specbench_ss.reports.html.page_parts import Cell, Chart, Column, Table, method_cell, plain, shared, verdict_cell
from specbench_ss.reports.palette import Style, styles, symbols
from specbench_ss.results.analysis import Results
from specbench_ss.results.compare import ANYWAY, ComparedRow, Difference, compared, differences, judged
from specbench_ss.results.comparison_text import NAMES, change_columns, comparison_finding, verdict
from specbench_ss.results.findings import worst_first
from specbench_ss.results.ranking import speedup
from specbench_ss.results.summary import OVERALL, SummaryRow
from specbench_ss.results.table import ranking_columns
from specbench_ss.results.text import MISSING, format_number, interval, pluralize, title, visible
from specbench_ss.runs.records import Run

MOST_RUNS = len(ascii_uppercase)
HASH = re.compile(r"\b([0-9a-f]{8})[0-9a-f]{8,}\b")
IN_RUNS = ("speedup", "speedup_interval", "mean_acceptance_length", "tokens_per_s", "n_prompts")


@dataclass(frozen=True, slots=True)
class Named:
    """A run with its letter. overall: its rows over all tasks, by method."""

    letter: str
    results: Results
    overall: Mapping[str, SummaryRow]

    @property
    def run(self) -> Run:
        """The records of the run."""
        return self.results.run


@dataclass(frozen=True, slots=True)
class Pair:
    """Changes from the first run to another one; no rows if the two are not comparable."""

    letter: str
    headline: str
    rows: Sequence[ComparedRow]


def page(runs: Sequence[Results]) -> dict[str, Any]:
    """Return everything that the template shows of two runs or more. Raises UserError for too many."""
    if len(runs) > MOST_RUNS:
        raise UserError(f"{len(runs)} runs are too many: compare at most {MOST_RUNS}")
    named = [
        Named(letter, of, {row.method: row for row in of.overall})
        for letter, of in zip(ascii_uppercase, runs, strict=False)
    ]
    labels = list(dict.fromkeys(label for one in named for label in one.run.labels))
    own_baselines = {label for one in named for label, row in one.overall.items() if row.reference_of}
    look = styles(labels, own_baselines, runs[0].run.baseline)
    pairs = [_pair(named[0], other) for other in named[1:]]
    found = [(other.letter, differences(named[0].run, other.run)) for other in named[1:]]
    return {
        "title": f"{len(runs)} runs side by side",
        "version": __version__,
        "styles": list(look.values()),
        "abbreviated": [style for style in look.values() if style.name != visible(style.label)],
        "definitions": symbols(),
        "runs": _runs(named),
        "headlines": [f"{named[0].letter} to {pair.letter}: {pair.headline}" for pair in pairs],
        "matrix": _matrix(named, look),
        "differences": _differences(named, found),
        "trend": _trend(named, look) if len(named) > 2 else None,
        "speedups": _speedups(named, look),
        "changes": [_changes(pair, metric, look) for pair in pairs for metric in NAMES if _known(pair, metric)],
        "tasks": [_tasks(pair, look) for pair in pairs if len({row.task for row in pair.rows}) > 2],
    }


def _pair(first: Named, other: Named) -> Pair:
    try:
        _, rows = compared(first.results, other.results)
    except UserError as error:
        return Pair(other.letter, f"not comparable: {str(error).removesuffix(ANYWAY)}", ())
    return Pair(other.letter, comparison_finding(rows), rows)


def _runs(named: Sequence[Named]) -> Table:
    def of(title: str, text: Callable[[Any], str]) -> Column:
        return Column(title, lambda one: text(one.run.manifest), numeric=False)

    columns = [
        Column("run", "letter", numeric=False),
        Column("folder", lambda one: one.run.path.name, numeric=False),
        of("model", lambda manifest: f"{manifest['model']['name']}, {manifest['model']['dtype']}"),
        of(
            "suite",
            lambda manifest: f"{manifest['suite']['name']}, {pluralize(manifest['suite']['prompts'], 'prompt')}",
        ),
        of("device", lambda manifest: manifest["model"]["device"]),
        of("started", lambda manifest: str(manifest["created"]).replace("T", " ")[:16]),
        Column("checks", _worst, numeric=False),
    ]
    return Table.of("runs", columns, named, "Runs", sortable=False)


def _worst(one: Named) -> str:
    """Return the worst finding of the checks of a run, and the number of the others."""
    found = [check for check in worst_first(one.results.checks) if check.is_alert]
    if not found:
        return "✓"
    sign = "✕" if found[0].state == "wrong" else "!"
    return f"{sign} {found[0].sentence}" + (f" {len(found) - 1} more." if len(found) > 1 else "")


def _matrix(named: Sequence[Named], look: Mapping[str, Style]) -> Table:
    """Return the speedup, interval and τ of every method in every run, the fastest method first."""

    def of(one: Named) -> Column:
        return Column(f"{one.letter}: {one.run.path.name}", lambda label: _in_run(one.overall.get(label)))

    columns = [Column("method", lambda label: method_cell(look[label]), numeric=False), *map(of, named)]
    caption = f"Speedup over {named[0].run.baseline} in each run, 95% CI, τ"
    return Table.of("methods-by-runs", columns, _ranked(named), caption)


def _in_run(row: SummaryRow | None) -> Cell:
    if row is None:
        return plain(MISSING)
    small = " · ".join(filter(None, (interval(row.speedup_interval), f"τ {format_number(row.mean_acceptance_length)}")))
    return Cell(speedup(row), row.speedup, (small,), strong=row.comparison in ("faster", "slower"))


def _differences(named: Sequence[Named], found: Sequence[tuple[str, Sequence[Difference]]]) -> Table:
    """Return a row for each difference of any run from the first, those that block a comparison first."""
    values: dict[str, dict[str, str]] = {}
    blocking = set()
    for letter, differing in found:
        for one in differing:
            values.setdefault(one.what, {})[letter] = one.b
            values[one.what][named[0].letter] = one.a
            blocking |= {one.what} if one.blocking else set()
    columns = [Column("what", numeric=False), *(Column(one.letter, numeric=False) for one in named)]
    rows = []
    for what in sorted(values, key=lambda name: name not in blocking):
        same = values[what][named[0].letter]
        cells = [plain(HASH.sub(r"\1…", values[what].get(one.letter, same))) for one in named]
        rows.append([plain(f"✕ {what}" if what in blocking else what, what), *cells])
    return Table("differences", columns, rows, "What differs")


def _speedups(named: Sequence[Named], look: Mapping[str, Style]) -> Chart:
    """Return every method's speedup in every run on one axis, the fastest method first."""
    rows = [(one.overall[label], one.letter) for label in _ranked(named) for one in named if label in one.overall]
    known = ranking_columns(named[0].results.config)

    def of(key: str) -> Column:
        column = shared(known[key])
        return Column(column.title, lambda pair: column.cell(pair[0]))

    names = [f"{look[row.method].name}, {letter}" for row, letter in rows]
    drawn = charts.ranking([row for row, _ in rows], look, names)
    columns = [
        Column("method", lambda pair: method_cell(look[pair[0].method]), numeric=False),
        Column("run", lambda pair: pair[1], numeric=False),
        *map(of, IN_RUNS),
    ]
    table = Table.of("speedups", columns, rows, "Every method in every run")
    title = f"Speedup over {named[0].run.baseline} of the same run"
    return Chart("speedups", title, drawn.to_plotly_json(), table)


def _trend(named: Sequence[Named], look: Mapping[str, Style]) -> Chart:
    """Return every method's speedup against the run, a line per method; the table above has the numbers."""
    found = {
        label: {one.letter: one.overall[label] for one in named if label in one.overall and one.overall[label].speedup}
        for label in _ranked(named)
    }
    drawn = charts.trend(found, look, [one.letter for one in named])
    return Chart("trend", f"Speedup over {named[0].run.baseline} by run", drawn.to_plotly_json())


def _ranked(named: Sequence[Named]) -> list[str]:
    """Return the measured methods without the baseline, by their best speedup of any run."""
    best: dict[str, float] = {}
    for one in named:
        for label, row in one.overall.items():
            if row.comparison != "baseline" and not row.reference_of:
                best[label] = max(best.get(label, 0.0), row.speedup or 0.0)
    return sorted(best, key=lambda label: -best[label])


def _known(pair: Pair, metric: str) -> bool:
    return any(row.changes[metric].a is not None for row in _overall(pair, metric))


def _overall(pair: Pair, metric: str) -> list[ComparedRow]:
    return [row for row in pair.rows if row.task == OVERALL and judged(metric, row)]


def _changes(pair: Pair, metric: str, look: Mapping[str, Style]) -> Table:
    name = f"change-{metric}-{pair.letter}".lower()
    caption = f"{NAMES[metric][0].format(pair.rows[0].baseline)}, A to {pair.letter}"
    return Table.of(name, _columns(pair, metric, look), _overall(pair, metric), caption)


def _columns(pair: Pair, metric: str, look: Mapping[str, Style]) -> list[Column]:
    own = {
        "method": Column("method", lambda row: method_cell(look[row.method]), numeric=False),
        "verdict": Column("verdict", lambda row: verdict_cell(verdict(row.changes[metric])), numeric=False),
    }
    return [own.get(column.key) or shared(column) for column in change_columns(metric, pair.letter)]


def _tasks(pair: Pair, look: Mapping[str, Style]) -> Table:
    rows = [row for row in pair.rows if row.task != OVERALL and judged("speedup", row)]
    columns = [Column("task", lambda row: title(row.task), numeric=False), *_columns(pair, "speedup", look)]
    return Table.of(f"tasks-{pair.letter}".lower(), columns, rows, f"Speedup by task, A to {pair.letter}")
