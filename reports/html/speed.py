"""How fast the methods are: cards, a matrix of tasks and methods, the table with everything, and other measures."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from specbench_ss.method_spec import REFERENCE
from specbench_ss.reports.html.page_parts import Cell, Column, Table, figure, plain
from specbench_ss.reports.html.palette import Style
from specbench_ss.results import frames, verdict_text
from specbench_ss.results.number_text import interval, number, percent, times, title
from specbench_ss.results.summary import OVERALL, SummaryRow

PILLS = {
    "faster": ("faster", "good"),
    "slower": ("slower", "bad"),
    "not distinguishable": ("not distinguishable", "flat"),
    "too few": ("too few questions", "flat"),
    "void": ("void", "flat"),
    "reference": ("reference", "flat"),
}
N = "Prompts that both the method and the reference answered; a prompt is one turn of a question"
JUDGED = f"Mean over questions of a judge's rating over ten; below it the paired difference to {REFERENCE}"
QUALITY = (
    "Mean over questions, not over prompts, of the score against the expected answers, 0 to 1; "
    f"below it the paired difference to {REFERENCE}"
)
Cells = Mapping[tuple[str, str], SummaryRow]  # by (method, task)
# Columns of a CSV file, by the names that docs/api.md has for them.
SPEEDUP = ("speedup", "reference", "reference_speedup", "reference_speedup_low", "reference_speedup_high")
ENDS = ("speedup_low", "speedup_high")
DIFFERENCE = ("quality", "quality_difference", "quality_difference_low", "quality_difference_high", "quality_verdict")
NO_INTERVAL = "no interval: too few questions"
COUNTS = ("n_prompts", "n_questions", "n_failed")
IN_MATRIX = ("speedup", *ENDS, "comparison", "tau", *COUNTS)


@dataclass(frozen=True, slots=True)
class Card:
    """One method at a glance."""

    label: str
    style: Style
    verdict: tuple[str, str]
    speedup: str
    interval: str
    facts: Sequence[tuple[str, str]]


def by_task(summaries: Sequence[SummaryRow]) -> Cells:
    """Return the summaries by method and task."""
    return {(s.method, s.category): s for s in summaries}


def tasks(cells: Cells) -> list[str]:
    """Return `overall`, then the tasks in their order."""
    return list(dict.fromkeys(task for _, task in cells))


def cards(cells: Cells, styles: Mapping[str, Style], config: Mapping[str, Any]) -> list[Card]:
    """Return one card a method, the fastest first, the reference last. config: that of the manifest."""
    found = [(cells[label, OVERALL], style) for label, style in styles.items()]
    found.sort(key=lambda pair: (pair[0].comparison == "reference", -(pair[0].speedup or 0)))
    return [_card(row, style, config) for row, style in found]


def _card(row: SummaryRow, style: Style, config: Mapping[str, Any]) -> Card:
    reference = row.comparison == "reference"
    bounds = interval(row.speedup_interval)
    under = f"95 % interval {bounds}" if bounds else "void" if row.comparison == "void" else NO_INTERVAL
    facts = [
        ("tokens per second", number(row.tokens_per_s, 1)),
        ("tokens per step, τ", number(row.tau)),
        ("output", verdict_text.output(row, config)),
        ("quality", number(row.quality)),
        ("prompts", verdict_text.n(row)),
    ]
    if row.quality_verdict is not None:
        facts.append(("quality is", verdict_text.non_inferiority(row)))
    if row.reference_speedup is not None:
        facts.append((f"speedup over {row.reference}", verdict_text.own_model(row)))
    return Card(
        row.method, style, PILLS[row.comparison], times(row.speedup), "by definition" if reference else under, facts
    )


def matrix(cells: Cells, styles: Mapping[str, Style], config: Mapping[str, Any]) -> Table:
    """Return the table of tasks by methods, with speedups and intervals. config: that of the manifest."""
    columns = [Column("task", False), *(_matrix_column(label, style) for label, style in styles.items())]
    rows = [
        [plain(title(task)), *(_matrix_cell(cells[label, task]) for label in styles), _prompts(cells, styles, task)]
        for task in tasks(cells)
    ]
    notes = verdict_text.notes(list(cells.values()), config, outputs=False)
    return Table("matrix", [*columns, Column("n", help=N)], rows, total=True, notes=notes)


def _matrix_column(label: str, style: Style) -> Column:
    return Column(label, swatch=style.css, fields=[f"{label} {name}" for name in IN_MATRIX])


def _matrix_cell(row: SummaryRow) -> Cell:
    values = _fields(row, IN_MATRIX)
    if row.speedup is None:
        return figure(None, values=values, small=("void",) if row.comparison == "void" else ())
    sure = row.comparison in ("faster", "slower")
    text = times(row.speedup) if sure else verdict_text.speedup(row)
    return Cell(text, row.speedup, _matrix_details(row), strong=sure, values=values)


def _matrix_details(row: SummaryRow) -> tuple[str, ...]:
    if row.comparison == "reference":
        return (f"{number(row.tokens_per_s, 1)} tokens/s",)
    bounds = interval(row.speedup_interval) or "too few questions"
    unsure = ("not distinguishable",) if row.comparison == "not distinguishable" else ()
    return (f"{bounds} · τ {number(row.tau)}", *unsure, *_own(row))


def _fields(row: SummaryRow, names: Sequence[str]) -> list[float | str | None]:
    return [frames.summary_value(row, name) for name in names]


def _own(row: SummaryRow) -> tuple[str, ...]:
    """Return 'over ss-shared-ar 1.52× (1.41–1.66)'; nothing for a method whose reference is the run's."""
    return () if row.reference_speedup is None else (f"over {row.reference} {verdict_text.own_model(row)}",)


def _prompts(cells: Cells, styles: Mapping[str, Style], task: str) -> Cell:
    return _n(max((cells[label, task] for label in styles), key=lambda row: row.n_prompts), failed=False)


def _n(row: SummaryRow, failed: bool = True) -> Cell:
    small = [text for text in verdict_text.counts(row) if failed or "failed" not in text]
    return figure(row.n_prompts, 0, small=small, values=_fields(row, COUNTS))


def everything(cells: Cells, styles: Mapping[str, Style], config: Mapping[str, Any]) -> Table:
    """Return the table with one row for each task and method. config: that of the manifest."""
    judged = any(row.judged is not None for row in cells.values())
    columns = [
        Column("task", False),
        Column("method", False),
        Column(
            "speedup",
            help=f"Wall time per token, that of {REFERENCE} over the method's, paired by prompt",
            fields=SPEEDUP,
        ),
        Column("95 % interval", help="Sorts by its lower end", fields=ENDS),
        Column("verdict", False),
        Column("tokens/s", help="Kept tokens over wall time, prefill included"),
        Column("τ", help="Tokens per step, pooled"),
        Column("quality", help=QUALITY, fields=DIFFERENCE),
        *([Column("judged", help=JUDGED)] if judged else []),
        Column("output", False, help=f"Against the answers of its reference: {REFERENCE}, unless another is named"),
        Column("n", help=N, fields=COUNTS),
    ]
    rows = [
        _row(cells[label, task], task, style, config, judged)
        for task in tasks(cells)
        for label, style in styles.items()
    ]
    return Table("everything", columns, rows, notes=verdict_text.notes(list(cells.values()), config))


def others(cells: Cells, styles: Mapping[str, Style]) -> Table:
    """Return the other measures, one row for each task and method; memory only where there is a CUDA device."""
    memory = any(row.peak_memory_bytes is not None for row in cells.values())
    columns = [
        Column("task", False),
        Column("method", False),
        Column("geometric mean", help="Speedup as the geometric mean over prompts of the ratio of time per token"),
        Column("Spec-Bench", help=f"Speedup by Spec-Bench's formula: mean tokens/s over questions, over {REFERENCE}'s"),
        Column("τ by sample", help="Tokens per step of each sample, their mean; τ pools all steps"),
        Column("acceptance rate", help="Accepted drafted tokens over drafted ones, where a tree counts its depth"),
        Column("questions scored", help="Questions with a quality on both sides: what quality is a mean over"),
        *([Column("peak memory", help="MiB that a sample took beyond what was there before")] if memory else []),
    ]
    rows = [_other(cells[label, task], task, style, memory) for task in tasks(cells) for label, style in styles.items()]
    return Table("others", columns, rows)


def _other(row: SummaryRow, task: str, style: Style, memory: bool) -> list[Cell]:
    mebibytes = None if row.peak_memory_bytes is None else row.peak_memory_bytes / 2**20
    return [
        plain(title(task)),
        style.cell(),
        Cell(times(row.speedup_geomean), row.speedup_geomean),
        Cell(times(row.speedup_specbench), row.speedup_specbench),
        figure(row.tau_request_mean),
        Cell(percent(row.acceptance_rate, 1), row.acceptance_rate),
        figure(row.quality_n, 0),
        *([figure(mebibytes, 1)] if memory else []),
    ]


def _row(row: SummaryRow, task: str, style: Style, config: Mapping[str, Any], judged: bool) -> list[Cell]:
    text, tag = PILLS[row.comparison]
    bounds = row.speedup_interval
    return [
        plain(title(task)),
        style.cell(),
        Cell(
            verdict_text.speedup(row),
            row.speedup,
            _own(row),
            strong=row.comparison in ("faster", "slower"),
            values=_fields(row, SPEEDUP),
        ),
        Cell(interval(bounds), bounds[0] if bounds else None, values=_fields(row, ENDS)),
        Cell(text, text, tag=tag),
        figure(row.tokens_per_s, 1),
        figure(row.tau),
        figure(row.quality, small=_difference(row), values=_fields(row, DIFFERENCE)),
        *([figure(row.judged, small=_rating(row))] if judged else []),
        plain(verdict_text.output(row, config)),
        _n(row),
    ]


def _difference(row: SummaryRow) -> tuple[str, ...]:
    """Return the paired difference of quality to the reference, and whether a changed model's quality is no worse."""
    return tuple(filter(None, (verdict_text.quality_difference(row), verdict_text.non_inferiority(row))))


def _rating(row: SummaryRow) -> tuple[str, ...]:
    """Return the paired difference of the judge's rating to the reference."""
    return tuple(filter(None, (verdict_text.judged_difference(row),)))
