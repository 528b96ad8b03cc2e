"""The page of several runs beside each other: what differs between them first, then what changed, and how surely."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from string import ascii_uppercase
from typing import Any

from specbench_ss import __version__
from specbench_ss.errors import UserError
from specbench_ss.reports import charts
from specbench_ss.reports.html.health import LEVELS
from specbench_ss.reports.html.page_parts import Cell, Chart, Column, Notice, Table, figure, plain
from specbench_ss.reports.palette import Style, styles, symbols
from specbench_ss.results.analysis import Results
from specbench_ss.results.checks import Check, worst_first
from specbench_ss.results.compare import Change, ComparedRow, Difference, compared, differences, judged
from specbench_ss.results.summary import OVERALL, SummaryRow
from specbench_ss.results.terminal import NAMES, change_text, comparison_finding, interval_text
from specbench_ss.results.text import interval, times, title
from specbench_ss.runs.records import Run

MOST_RUNS = len(ascii_uppercase)
VERDICTS = {"faster": "good", "higher": "good", "slower": "bad", "lower": "bad", "void": "bad"}


@dataclass(frozen=True, slots=True)
class Named:
    """A run with its letter. summary: of all tasks and each. overall: that over all tasks, by method."""

    letter: str
    results: Results
    run: Run
    summary: Sequence[SummaryRow]
    overall: dict[str, SummaryRow]
    checks: Sequence[Check]


@dataclass(frozen=True, slots=True)
class Pair:
    """What changed from the first run to another one. why: in place of rows, why the two do not compare."""

    letter: str
    finding: str
    rows: Sequence[ComparedRow]
    why: str = ""


def page(runs: Sequence[Results]) -> dict[str, Any]:
    """Return everything that the template shows of two runs or more. Raises UserError for too many."""
    if len(runs) > MOST_RUNS:
        raise UserError(f"{len(runs)} runs: at most {MOST_RUNS} stand beside each other")
    named = [_named(letter, run) for letter, run in zip(ascii_uppercase, runs, strict=False)]
    labels = list(dict.fromkeys(label for one in named for label in one.run.labels))
    plain = {label for one in named for label, row in one.overall.items() if row.reference_of}
    look = styles(labels, plain, _baseline(named))
    pairs = [_pair(named[0], other) for other in named[1:]]
    found = [(other.letter, differences(named[0].run, other.run)) for other in named[1:]]
    return {
        "title": f"{len(runs)} runs beside each other",
        "version": __version__,
        "styles": list(look.values()),
        "definitions": symbols(),
        "runs": _runs(named),
        "findings": [f"{named[0].letter} to {pair.letter}: {pair.finding}" for pair in pairs],
        "notices": list(_notices(named, pairs)),
        "differences": _differences(named, found),
        "speedups": _speedups(named, look),
        "changes": [_changes(pair, metric, look) for pair in pairs for metric in NAMES if _known(pair, metric)],
        "tasks": [_tasks(pair, look) for pair in pairs if _has_tasks(pair)],
    }


def _named(letter: str, results: Results) -> Named:
    overall = {row.method: row for row in results.overall}
    return Named(letter, results, results.run, results.rows, overall, results.checks)


def _pair(first: Named, other: Named) -> Pair:
    try:
        _, rows = compared(first.results, other.results)
    except UserError as error:
        return Pair(other.letter, "no comparison, see below.", (), str(error).split("; --anyway")[0])
    return Pair(other.letter, comparison_finding(rows), rows)


def _runs(named: Sequence[Named]) -> Table:
    columns = [Column(name, False) for name in ("run", "folder", "model", "suite", "device", "started")]
    rows = []
    for one in named:
        manifest = one.run.manifest
        model, suite = manifest["model"], manifest["suite"]
        texts = (
            one.run.path.name,
            f"{model['name']}, {model['dtype']}",
            f"{suite['name']}, {suite['prompts']:,} prompts",
            model["device"],
            str(manifest["created"]).replace("T", " ")[:16],
        )
        rows.append([plain(one.letter), *map(plain, texts)])
    return Table("runs", columns, rows, "The runs", sortable=False)


def _notices(named: Sequence[Named], pairs: Sequence[Pair]) -> Iterator[Notice]:
    """Yield what must be known before the numbers are believed."""
    for pair in pairs:
        if pair.why:
            yield Notice("warning", f"{named[0].letter} and {pair.letter} do not compare.", [pair.why])
    for one in named:
        for check in worst_first(one.checks):
            if check.state in ("wrong", "warning"):
                yield Notice(LEVELS[check.state], f"Run {one.letter}: {check.sentence}")


def _differences(named: Sequence[Named], found: Sequence[tuple[str, Sequence[Difference]]]) -> Table:
    """Return a row for each thing in which any run differs from the first, what hinders comparing first."""
    values: dict[str, dict[str, str]] = {}
    hindering = set()
    for letter, differing in found:
        for one in differing:
            values.setdefault(one.what, {})[letter] = one.b
            values[one.what][named[0].letter] = one.a
            hindering |= {one.what} if one.hinders else set()
    columns = [Column("what", False), *(Column(one.letter, False) for one in named)]
    rows = []
    for what in sorted(values, key=lambda name: name not in hindering):
        same = values[what][named[0].letter]
        cells = [plain(values[what].get(one.letter, same)) for one in named]
        rows.append([plain(f"✕ {what}" if what in hindering else what, what), *cells])
    return Table("differences", columns, rows, "What differs")


def _speedups(named: Sequence[Named], look: dict[str, Style]) -> Chart:
    """Return every method's speedup in every run on one axis, the fastest method first."""
    rows = [(label, one) for label in _ranked(named) for one in named if label in one.overall]
    names = [f"{label}, {one.letter}" for label, one in rows]
    drawn = charts.ranking([one.overall[label] for label, one in rows], look, names)
    title = f"Speedup over {_baseline(named)}, each in its own run"
    return Chart("speedups", title, drawn.to_plotly_json(), _speedup_table(named, look))


def _ranked(named: Sequence[Named]) -> list[str]:
    """Return the methods that any run measured, without the reference, by the best speedup of any run."""
    best: dict[str, float] = {}
    for one in named:
        for label, row in one.overall.items():
            if row.comparison != "reference" and not row.reference_of:
                best[label] = max(best.get(label, 0.0), row.speedup or 0.0)
    return sorted(best, key=lambda label: -best[label])


def _baseline(named: Sequence[Named]) -> str:
    return named[0].run.baseline


def _said(row: SummaryRow) -> str:
    return "void" if row.comparison == "void" else times(row.speedup)


def _speedup_table(named: Sequence[Named], look: dict[str, Style]) -> Table:
    columns = [
        Column("method", False),
        Column("run", False),
        Column("speedup"),
        Column("95 % interval"),
        Column("τ"),
        Column("tokens/s"),
        Column("n"),
    ]
    rows = [
        [
            look[label].cell(),
            plain(one.letter),
            Cell(_said(row), row.speedup),
            Cell(interval(row.speedup_interval), row.speedup_interval[0] if row.speedup_interval else None),
            figure(row.tau),
            figure(row.tokens_per_s, 1),
            figure(row.n_prompts, 0),
        ]
        for label in _ranked(named)
        for one in named
        if (row := one.overall.get(label)) is not None
    ]  # fmt: skip
    return Table("speedups", columns, rows, "Every method in every run")


def _known(pair: Pair, metric: str) -> bool:
    return any(row.changes[metric].a is not None for row in _overall(pair, metric))


def _overall(pair: Pair, metric: str) -> list[ComparedRow]:
    return [row for row in pair.rows if row.category == OVERALL and judged(metric, row)]


def _changes(pair: Pair, metric: str, look: dict[str, Style]) -> Table:
    rows = [[look[row.method].cell(), *_change(metric, row)] for row in _overall(pair, metric)]
    return Table(
        f"change-{metric}-{pair.letter}".lower(),
        [Column("method", False), *_columns(pair)],
        rows,
        f"{NAMES[metric][0].format(pair.rows[0].baseline)}, A to {pair.letter}",
    )


def _columns(pair: Pair) -> list[Column]:
    return [
        Column("A"),
        Column(pair.letter),
        Column("change"),
        Column("95 % interval"),
        Column("verdict", False),
        Column("n"),
    ]


def _change(metric: str, row: ComparedRow) -> list[Cell]:
    change: Change = row.changes[metric]
    digits = NAMES[metric][1]
    return [
        figure(change.a, digits),
        figure(change.b, digits),
        Cell(change_text(metric, change.change), change.change, strong=change.verdict in VERDICTS),
        Cell(interval_text(metric, change), change.interval[0] if change.interval else None),
        Cell(change.verdict, change.verdict, tag=VERDICTS.get(change.verdict, "flat")),
        figure(row.n_prompts, 0),
    ]


def _has_tasks(pair: Pair) -> bool:
    return len({row.category for row in pair.rows}) > 2


def _tasks(pair: Pair, look: dict[str, Style]) -> Table:
    rows = [
        [plain(title(row.category)), look[row.method].cell(), *_change("speedup", row)]
        for row in pair.rows
        if row.category != OVERALL and judged("speedup", row)
    ]
    columns = [Column("task", False), Column("method", False), *_columns(pair)]
    return Table(f"tasks-{pair.letter}".lower(), columns, rows, f"Speedup by task, A to {pair.letter}")
