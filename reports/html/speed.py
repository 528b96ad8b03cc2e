"""Speed by task: the matrix of methods by tasks, all numbers, and other measures."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from specbench_ss.reports import charts
from specbench_ss.reports.html.page_parts import Cell, Chart, Column, Table, figure, plain
from specbench_ss.reports.html.ranking import PILLS
from specbench_ss.reports.palette import Style
from specbench_ss.results import frames, ranking
from specbench_ss.results.summary import SummaryRow
from specbench_ss.results.text import interval, number, percent, times, title
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


def by_task(summaries: Sequence[SummaryRow]) -> Cells:
    """Return the summaries by method and task."""
    return {(s.method, s.category): s for s in summaries}


def _baseline(cells: Cells) -> str:
    """Return the method that all are compared with."""
    return next(row.baseline for row in cells.values())


def tasks(cells: Cells) -> list[str]:
    """Return `overall`, then the tasks in their order."""
    return list(dict.fromkeys(task for _, task in cells))


def fields(row: SummaryRow, names: Sequence[str]) -> list[float | str | None]:
    """Return cells of a row of the summary, by the names that docs/api.md has for them."""
    return [frames.summary_value(row, name) for name in names]


def _own(row: SummaryRow) -> tuple[str, ...]:
    """Return 'over ss-shared-ar 1.52× (1.41–1.66)'; nothing for a method whose reference is the run's."""
    return () if row.reference_speedup is None else (f"over {row.reference} {ranking.own_model(row)}",)


def _n(row: SummaryRow, failed: bool = True) -> Cell:
    small = [text for text in ranking.counts(row) if failed or "failed" not in text]
    return figure(row.n_prompts, 0, small=small, values=fields(row, COUNTS))


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


def everything(
    cells: Cells, styles: Mapping[str, Style], config: Mapping[str, Any], questions: Sequence[Question] = ()
) -> Table:
    """Return the table with one row for each task and method. config: that of the manifest."""
    judged = any(row.judged is not None for row in cells.values())
    baseline = _baseline(cells)
    columns = [
        Column("task", False),
        Column("method", False),
        Column(
            "speedup",
            help=f"Wall time per token, that of {baseline} over the method's, paired by prompt",
            fields=SPEEDUP,
        ),
        Column("95 % interval", help="Sorts by its lower end", fields=ENDS),
        Column("verdict", False),
        Column("tokens/s", help="Kept tokens over wall time, prefill included"),
        Column("τ", help="Tokens per step, pooled"),
        Column("quality", help=QUALITY, fields=DIFFERENCE),
        *([Column("judged", help=JUDGED)] if judged else []),
        Column("output", False, help=f"Against the answers of its reference: {baseline}, unless another is named"),
        Column("n", help=N, fields=COUNTS),
    ]
    rows = [
        _row(cells[label, task], task, style, config, judged)
        for task in tasks(cells)
        for label, style in styles.items()
    ]
    notes = [*ranking.notes(list(cells.values()), config), *filter(None, [scored_by(questions)])]
    return Table("everything", columns, rows, notes=notes)


def _has_memory(cells: Cells) -> bool:
    return any(row.peak_memory_bytes is not None for row in cells.values())


def others_title(cells: Cells) -> str:
    """Return what the other measures are, as far as they are known."""
    memory = ", peak memory" if _has_memory(cells) else ""
    return f"Other measures: other means of speedup and τ, acceptance rate, questions scored{memory}"


def others(cells: Cells, styles: Mapping[str, Style]) -> Table:
    """Return the other measures, one row for each task and method; memory only where there is a CUDA device."""
    memory = _has_memory(cells)
    columns = [
        Column("task", False),
        Column("method", False),
        Column("geometric mean", help="Speedup as the geometric mean over prompts of the ratio of time per token"),
        Column(
            "Spec-Bench",
            help=f"Speedup by Spec-Bench's formula: mean tokens/s over questions, over {_baseline(cells)}'s",
        ),
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
        plain(title(task), task),
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
        plain(title(task), task),
        style.cell(),
        Cell(
            ranking.speedup(row),
            row.speedup,
            _own(row),
            strong=row.comparison in ("faster", "slower"),
            values=fields(row, SPEEDUP),
        ),
        Cell(interval(bounds), bounds[0] if bounds else None, values=fields(row, ENDS)),
        Cell(text, text, tag=tag),
        figure(row.tokens_per_s, 1),
        figure(row.tau),
        figure(ranking.quality(row, config), small=_difference(row), values=fields(row, DIFFERENCE)),
        *([figure(row.judged, small=_rating(row))] if judged else []),
        plain(ranking.output(row, config)),
        _n(row),
    ]


def _difference(row: SummaryRow) -> tuple[str, ...]:
    """Return the paired difference of quality to the reference, and whether a changed model's quality is no worse."""
    return tuple(filter(None, (ranking.quality_difference(row), ranking.non_inferiority(row))))


def _rating(row: SummaryRow) -> tuple[str, ...]:
    """Return the paired difference of the judge's rating to the reference."""
    return tuple(filter(None, (ranking.judged_difference(row),)))


IN_MATRIX = ("speedup", "speedup_low", "speedup_high", "comparison", "tau", "n_prompts", "n_questions", "n_failed")
STRONGEST = math.log(2.5)  # a speedup by this factor, or its inverse, has the strongest tint
DRAWN = "Lines are 95 % intervals; the line at 1 is plain decoding. The table above has the numbers."
UNSURE = "Hollow symbols are not distinguishable, or have no interval: too few questions."


def matrix(cells: Cells, styles: Mapping[str, Style], ranked: Sequence[str]) -> Table:
    """Return the table: a row for each method in the order of `ranked`, a column for each task."""
    named = tasks(cells)
    columns = [Column("method", False), *(_task_column(task) for task in named)]
    rows = [[styles[label].cell(), *(_task_cell(cells[label, task]) for task in named)] for label in ranked]
    used = [row for row in cells.values() if row.method in ranked]
    marks = {mark for row in used for mark in ranking.speedup(row)[:1]}
    notes = [
        "A number is the speedup; blue is faster than plain decoding, orange slower.",
        *(["≈ not distinguishable: the interval covers 1."] if "≈" in marks else []),
        *(["? no interval: too few questions."] if "?" in marks else []),
    ]
    return Table("matrix", columns, rows, notes=notes)


def _task_column(task: str) -> Column:
    return Column(title(task), help=f"Speedup on {title(task)}", fields=[f"{task} {name}" for name in IN_MATRIX])


def _task_cell(row: SummaryRow) -> Cell:
    sure = row.comparison in ("faster", "slower")
    size = math.log(row.speedup) if sure and row.speedup else 0.0
    text = "void" if row.comparison == "void" else ranking.speedup(row).removesuffix("×")
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
    unsure = ", not distinguishable" if row.comparison == "not distinguishable" else ""
    return f"{said}{around}{unsure}, τ {number(row.tau)}, {number(row.tokens_per_s, 1)} tokens/s, n {ranking.n(row)}"


def chart(cells: Cells, styles: Mapping[str, Style], ranked: Sequence[str]) -> Chart | None:
    """Return the speedups of every task with their intervals, a group of rows for each task."""
    named = tasks(cells)
    shown = [label for label in ranked if cells[label, named[0]].comparison != "reference"]
    if not shown:
        return None
    rows = {task: [cells[label, task] for label in shown] for task in named}
    unsure = any(row.speedup is not None and row.speedup_interval is None for own in rows.values() for row in own)
    drawn = charts.speedup_by_task(rows, styles).to_plotly_json()
    return Chart("speedup", "Speedup by task", drawn, note=f"{DRAWN} {UNSURE}" if unsure else DRAWN)
