"""Speed by task: the matrix of methods by tasks, all numbers, and other measures."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from specbench_ss.reports import charts
from specbench_ss.reports.html.page_parts import MEANINGS, Cell, Chart, Column, Table, View, figure, method_cell, plain
from specbench_ss.reports.html.ranking import PILLS
from specbench_ss.results import frames, ranking
from specbench_ss.results.summary import SummaryRow
from specbench_ss.results.text import format_number, interval, percent, title
from specbench_ss.suite import Question

N = "Prompts that both the method and the reference answered; a prompt is one turn of a question"
JUDGED = "Mean over questions of a judge's rating over ten; below it the paired difference to the reference"
QUALITY = (
    "Mean over questions, not over prompts, of the score against the expected answers, 0 to 1; "
    "below it the paired difference to the reference"
)
Cells = Mapping[tuple[str, str], SummaryRow]  # by (method, task)
# Columns of a CSV file, by the names that docs/api.md has for them.
SPEEDUP = ("speedup", "reference", "reference_speedup", "reference_speedup_low", "reference_speedup_high")
ENDS = ("speedup_low", "speedup_high")
DIFFERENCE = ("quality", "quality_difference", "quality_difference_low", "quality_difference_high", "quality_verdict")
COUNTS = ("n_prompts", "n_questions", "n_failed")


def by_task(view: View) -> Cells:
    """Return the summaries by method and task."""
    return {(s.method, s.category): s for s in view.results.rows}


def tasks(cells: Cells) -> list[str]:
    """Return `overall`, then the tasks in their order."""
    return list(dict.fromkeys(task for _, task in cells))


def _all(view: View) -> list[SummaryRow]:
    """Return the rows task by task, each in the order of the ranking."""
    cells = by_task(view)
    return [cells[label, task] for task in tasks(cells) for label in view.look]


def fields(row: SummaryRow, names: Sequence[str]) -> list[float | str | None]:
    """Return cells of a row of the summary, by the names that docs/api.md has for them."""
    return [frames.summary_value(row, name) for name in names]


def _own(row: SummaryRow) -> tuple[str, ...]:
    """Return 'over ss-shared-ar 1.52× (1.41–1.66)'; nothing for a method whose reference is the run's."""
    return () if row.reference_speedup is None else (f"over {row.reference} {ranking.own_model(row)}",)


def scored_by(questions: Sequence[Question]) -> str:
    """Say how the answers of each task are scored: 'Quality is bleu for translation; for writing there is no score'."""
    by_metric: dict[str, list[str]] = {}
    for task, metric in dict.fromkeys((question.category, question.metric or "") for question in questions):
        by_metric.setdefault(metric, []).append(title(task))
    without = by_metric.pop("", [])
    parts = [f"{metric} for {_listed(tasks)}" for metric, tasks in by_metric.items()]
    said = [f"Quality is {', '.join(parts)}"] if parts else []
    said += [f"{'for' if parts else 'For'} {_listed(without)} there is no score"] if without else []
    return "; ".join(said)


def _listed(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"


TASK = Column("task", lambda row: plain(title(row.category), row.category), numeric=False)


def everything(view: View) -> Table:
    """Return the table with one row for each task and method."""
    rows, baseline, config = _all(view), view.run.baseline, view.results.config
    help = f"Wall time per token, that of {baseline} over the method's, paired by prompt"
    against = f"Against the answers of its reference: {baseline}, unless another is named"
    columns = [
        TASK,
        view.method(),
        Column("speedup", _speedup, help, fields=SPEEDUP),
        Column("95 % interval", _interval, "Sorts by its lower end", fields=ENDS),
        Column(
            "verdict", lambda row: Cell(*PILLS[row.comparison][:1] * 2, tag=PILLS[row.comparison][1]), numeric=False
        ),
        Column("tokens/s", "tokens_per_s", digits=1),
        Column("τ", "mean_acceptance_length"),
        Column("quality", lambda row: _quality(row, config), QUALITY, fields=DIFFERENCE),
        *([Column("judged", _judged, JUDGED)] if any(row.judge_score is not None for row in rows) else []),
        Column("output", lambda row: ranking.output(row, config), against, numeric=False),
        Column("n", _n, N, fields=COUNTS),
    ]
    notes = [*ranking.notes(view.results.rows, config), *filter(None, [scored_by(view.run.questions)])]
    return Table.of("everything", columns, rows, notes=notes)


def _speedup(row: SummaryRow) -> Cell:
    """Return the speedup, with that over a reference of the method's own below it: 'over ss-shared-ar 1.52×'."""
    own = () if row.reference_speedup is None else (f"over {row.reference} {ranking.own_model(row)}",)
    sure = row.comparison in ("faster", "slower")
    return Cell(ranking.speedup(row), row.speedup, own, strong=sure, values=fields(row, SPEEDUP))


def _interval(row: SummaryRow) -> Cell:
    bounds = row.speedup_interval
    return Cell(interval(bounds), bounds[0] if bounds else None, values=fields(row, ENDS))


def _quality(row: SummaryRow, config: Mapping[str, Any]) -> Cell:
    """Return the quality, with its difference to the reference, and whether a changed model's is no worse."""
    small = tuple(filter(None, (ranking.quality_difference(row), ranking.non_inferiority(row))))
    return figure(ranking.quality(row, config), small=small, values=fields(row, DIFFERENCE))


def _judged(row: SummaryRow) -> Cell:
    return figure(row.judge_score, small=tuple(filter(None, (ranking.judged_difference(row),))))


def _n(row: SummaryRow) -> Cell:
    return figure(row.n_prompts, 0, small=ranking.counts(row), values=fields(row, COUNTS))


def _has_memory(view: View) -> bool:
    return any(row.peak_memory_bytes is not None for row in view.results.rows)


def others_title(view: View) -> str:
    """Return what the other measures are, as far as they are known."""
    memory = ", peak memory" if _has_memory(view) else ""
    return f"Other measures: other means of speedup and τ, acceptance rate, questions scored{memory}"


def others(view: View) -> Table:
    """Return the other measures, one row for each task and method; memory only where there is a CUDA device."""
    memory = Column(
        "peak memory", "peak_memory_bytes", "MiB that a sample took beyond what was there before", 1, per=2**20
    )
    columns = [
        TASK,
        view.method(),
        Column("geometric mean", "speedup_geomean", unit="×"),
        Column("Spec-Bench", "speedup_specbench", unit="×"),
        Column("τ by sample", "tau_request_mean"),
        Column(
            "acceptance rate",
            lambda row: Cell(percent(row.acceptance_rate, 1), row.acceptance_rate),
            MEANINGS["acceptance_rate"],
        ),
        Column("questions scored", "quality_n", digits=0),
        *([memory] if _has_memory(view) else []),
    ]
    return Table.of("others", columns, _all(view))


IN_MATRIX = (
    "speedup",
    "speedup_low",
    "speedup_high",
    "comparison",
    "mean_acceptance_length",
    "n_prompts",
    "n_questions",
    "n_failed",
)
STRONGEST = math.log(2.5)  # a speedup by this factor, or its inverse, has the strongest tint
DRAWN = "Lines are 95 % intervals; the line at 1 is autoregressive decoding. The table above has the numbers."
UNSURE = "Hollow symbols are not significant, or have no interval: too few questions."


def matrix(view: View) -> Table:
    """Return the table: a row for each method in the order of `ranked`, a column for each task."""
    cells = by_task(view)
    columns = [Column("method", numeric=False), *map(_task_column, tasks(cells))]
    rows = [
        [method_cell(view.look[label]), *(_task_cell(cells[label, task]) for task in tasks(cells))]
        for label in view.contestants
    ]
    marks = {ranking.speedup(row)[:1] for row in cells.values() if row.method in view.contestants}
    notes = [
        "A number is the speedup; blue is faster than autoregressive decoding, orange slower.",
        *(["≈ not significant: the interval covers 1."] if "≈" in marks else []),
        *(["? no interval: too few questions."] if "?" in marks else []),
    ]
    return Table("matrix", columns, rows, notes=notes)


def _task_column(task: str) -> Column:
    fields = [f"{task} {name}" for name in IN_MATRIX]
    return Column(title(task), help=f"Speedup on {title(task)}", fields=fields)


def _task_cell(row: SummaryRow) -> Cell:
    sure = row.comparison in ("faster", "slower")
    size = math.log(row.speedup) if sure and row.speedup else 0.0
    text = "invalid" if row.comparison == "invalid" else ranking.speedup(row).removesuffix("×")
    return Cell(
        text,
        row.speedup,
        strong=sure,
        values=fields(row, IN_MATRIX),
        tint="up" if size > 0 else "down" if size < 0 else "",
        share=round(min(abs(size) / STRONGEST, 1.0), 2),
        note=_task_note(row),
    )


def _task_note(row: SummaryRow) -> str:
    """Return what is told of a cell where the reader points at it."""
    bounds = interval(row.speedup_interval)
    said = f"{row.method}, {title(row.category)}: {ranking.speedup(row)}"
    around = f", 95 % interval {bounds}" if bounds else "" if row.comparison == "reference" else ", no interval"
    unsure = ", not significant" if row.comparison == "not significant" else ""
    tau = format_number(row.mean_acceptance_length)
    return f"{said}{around}{unsure}, τ {tau}, {format_number(row.tokens_per_s, 1)} tokens/s, n {ranking.n(row)}"


def chart(view: View) -> Chart | None:
    """Return the speedups of every task with their intervals, a group of rows for each task."""
    cells = by_task(view)
    shown = [label for label in view.contestants if view.overall[label].comparison != "reference"]
    if not shown:
        return None
    rows = {task: [cells[label, task] for label in shown] for task in tasks(cells)}
    unsure = any(row.speedup is not None and row.speedup_interval is None for own in rows.values() for row in own)
    drawn = charts.speedup_by_task(rows, view.look).to_plotly_json()
    return Chart("speedup", "Speedup by task", drawn, note=f"{DRAWN} {UNSURE}" if unsure else DRAWN)
