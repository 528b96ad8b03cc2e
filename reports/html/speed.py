"""Speed by task: the map of methods by tasks, and a table of all numbers."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

from specbench_ss.reports.html.page_parts import (
    MEANINGS,
    Cell,
    Column,
    Table,
    View,
    figure,
    method_cell,
    plain,
    shared,
    verdict_cell,
)
from specbench_ss.results import frames, ranking
from specbench_ss.results.summary import OVERALL, SummaryRow, summarise
from specbench_ss.results.table import ranking_columns
from specbench_ss.results.text import format_number, interval, title
from specbench_ss.stats.intervals import FEWEST
from specbench_ss.suite import MT_BENCH, Question

N = "Prompts with an output of both the method and the baseline; a prompt is one turn of a question"
JUDGED = "Mean over questions of the judge's rating, divided by ten; below: paired difference to the baseline"
QUALITY = "Mean over questions of the score by the task's metric, 0 to 1; below: paired difference to the baseline"
Cells = Mapping[tuple[str, str], SummaryRow]  # by (method, task)
# Columns of a CSV file, by their names in docs/columns.md.
SPEEDUP = ("speedup", "reference", "reference_speedup", "reference_speedup_low", "reference_speedup_high")
ENDS = ("speedup_low", "speedup_high")
DIFFERENCE = ("quality", "quality_difference", "quality_difference_low", "quality_difference_high", "quality_verdict")
COUNTS = ("n_prompts", "n_questions", "n_failed")


def by_task(view: View) -> Cells:
    """Return the summaries by method and task."""
    return {(s.method, s.task): s for s in view.results.rows}


def tasks(cells: Cells) -> list[str]:
    """Return `overall`, then the tasks in their order."""
    return list(dict.fromkeys(task for _, task in cells))


def _all(view: View) -> list[SummaryRow]:
    """Return the rows task by task, each in the order of the ranking."""
    cells = by_task(view)
    return [cells[label, task] for task in tasks(cells) for label in view.look]


def fields(row: SummaryRow, names: Sequence[str]) -> list[float | str | None]:
    """Return cells of a row of the summary, by the names of docs/columns.md."""
    return [frames.summary_value(row, name) for name in names]


def scored_by(questions: Sequence[Question], scored: Collection[str]) -> str:
    """Return the metric of each task: 'Quality is bleu for translation; no score for writing'.

    scored: the tasks whose outputs have a score; code, for one, has none if it was not executed.
    """
    by_metric: dict[str, list[str]] = {}
    for task, metric in dict.fromkeys((question.category, question.metric or "") for question in questions):
        metric = metric if task in scored else ""
        by_metric.setdefault(metric, []).append(title(task))
    without = by_metric.pop("", [])
    parts = [f"{metric} for {_listed(tasks)}" for metric, tasks in by_metric.items()]
    texts = [f"Quality is {', '.join(parts)}"] if parts else []
    texts += [f"{'no' if parts else 'No'} score for {_listed(without)}"] if without else []
    return "; ".join(texts)


def _listed(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"


MEMORY = Column("peak memory, MiB", "peak_memory_bytes", digits=1, per=2**20)
TASK = Column("task", lambda row: plain(title(row.task), row.task), numeric=False)


def everything(view: View) -> Table:
    """Return the table with one row for each task and method."""
    rows, baseline, config = _all(view), view.run.baseline, view.results.config
    known = ranking_columns(config)

    def of(key: str, **changes: Any) -> Column:
        return shared(known[key], **{"help": MEANINGS.get(key, ""), **changes})

    columns = [
        TASK,
        view.method(),
        of("speedup", of=_speedup, help=f"Time per token: {baseline} / method, on the same prompts", fields=SPEEDUP),
        of("speedup_interval", of=_interval, help="Sorted by its lower end", fields=ENDS),
        of("comparison", of=lambda row: verdict_cell(row.comparison)),
        of("tokens_per_s"),
        of("mean_acceptance_length"),
        of("acceptance_rate"),
        *([MEMORY] if any(row.peak_memory_bytes is not None for row in rows) else []),
        of("quality", of=lambda row: _quality(row, config), help=QUALITY, fields=DIFFERENCE),
        *([of("judge_score", of=_judged, help=JUDGED)] if known["judge_score"].has_value(rows) else []),
        of("output", help=f"Outputs compared with those of {baseline}, or of the named AR baseline"),
        of("n_prompts", of=_n, help=N, fields=COUNTS),
    ]
    scored = {sample.category for sample in view.run.rows if sample.quality is not None}
    notes = [*ranking.notes(view.results.rows, config), *filter(None, [scored_by(view.run.questions, scored)])]
    return Table.of("everything", columns, rows, notes=notes)


def _speedup(row: SummaryRow) -> Cell:
    """Return the speedup, and below it that over the method's own AR baseline: 'over ss-shared-ar 1.52×'."""
    over_own_baseline = () if row.reference_speedup is None else (f"over {row.reference} {ranking.own_model(row)}",)
    sure = row.comparison in ("faster", "slower")
    return Cell(ranking.speedup(row), row.speedup, over_own_baseline, strong=sure, values=fields(row, SPEEDUP))


def _interval(row: SummaryRow) -> Cell:
    bounds = row.speedup_interval
    return Cell(interval(bounds), bounds[0] if bounds else None, values=fields(row, ENDS))


def _quality(row: SummaryRow, config: Mapping[str, Any]) -> Cell:
    """Return the quality, with its difference to the baseline and the verdict on non-inferiority."""
    small = tuple(filter(None, (ranking.quality_difference(row), ranking.non_inferiority(row))))
    return figure(ranking.quality(row, config), small=small, values=fields(row, DIFFERENCE))


def _judged(row: SummaryRow) -> Cell:
    return figure(row.judge_score, small=tuple(filter(None, (ranking.judged_difference(row),))))


def _n(row: SummaryRow) -> Cell:
    return figure(row.n_prompts, 0, small=ranking.counts(row), values=fields(row, COUNTS))


IN_MATRIX = (
    "speedup",
    "speedup_low",
    "speedup_high",
    "comparison",
    "mean_acceptance_length",
    "tokens_per_s",
    "n_prompts",
    "n_questions",
    "n_failed",
)
STRONGEST = math.log(2.5)  # a speedup by this factor, or its inverse, has the strongest tint


def matrix(view: View) -> Table | None:
    """Return the table of methods by tasks; None unless at least one of several tasks has an interval.

    The tasks of MT-Bench are one column, as in Spec-Bench, which unfolds to them.
    """
    cells, group = by_task(view), ranking.chat_group(view.run)
    every = [task for task in tasks(cells) if task != OVERALL]
    parts = [task for task in every if task in MT_BENCH]
    grouped = len(parts) > 1 and len(parts) < len(every)
    if grouped:
        cells = {**cells, **_group(view, group, parts)}
        every = [group, *parts, *(task for task in every if task not in parts)]
    shown = [task for task in every if any(_judged_cell(cells[label, task]) for label in view.contestants)]
    if not shown or len(every) < 2:
        return None
    parts = [task for task in parts if grouped and task in shown]
    columns = [
        Column("method", numeric=False),
        *(_task_column(task, task in parts, bool(parts) and task == group) for task in (OVERALL, *shown)),
    ]
    rows = [
        [method_cell(view.look[label]), *(_task_cell(cells[label, task]) for task in (OVERALL, *shown))]
        for label in view.contestants
    ]
    left_out = ", ".join(title(task) for task in every if task not in shown)
    return Table("matrix", columns, rows, notes=[f"Fewer than {FEWEST} questions: {left_out}."] if left_out else [])


def _judged_cell(row: SummaryRow) -> bool:
    return row.comparison in ("faster", "slower", "not significant", "invalid")


def _group(view: View, group: str, parts: Sequence[str]) -> Cells:
    """Return the summaries of these tasks together, by method and the name of the group."""
    rows = [row for row in view.run.rows if row.category in parts]
    keys = {row.key for row in rows}
    matches = [one for one in view.run.output_match if one.key in keys]
    found = summarise(replace(view.run, rows=rows, output_match=matches))
    return {(row.method, group): replace(row, task=group) for row in found if row.task == OVERALL}


def _task_column(task: str, part: bool, unfolds: bool) -> Column:
    fields = [f"{task} {name}" for name in IN_MATRIX]
    return Column(title(task), help=f"Sort by {title(task)}", fields=fields, part=part, unfolds=unfolds)


def _task_cell(row: SummaryRow) -> Cell:
    sure = row.comparison in ("faster", "slower")
    size = math.log(row.speedup) if sure and row.speedup else 0.0
    text = ranking.speedup(row)
    return Cell(
        text,
        row.speedup,
        strong=sure,
        values=fields(row, IN_MATRIX),
        tint="up" if size > 0 else "down" if size < 0 else "",
        share=round(min(abs(size) / STRONGEST, 1.0), 2),
        note=_task_note(row),
        measures=(text, format_number(row.mean_acceptance_length), format_number(row.tokens_per_s, 1)),
    )


def _task_note(row: SummaryRow) -> str:
    """Return the text that is shown for a cell on hover and on focus."""
    bounds = interval(row.speedup_interval)
    around = f", 95% CI {bounds}" if bounds else "" if row.comparison == "baseline" else ", no interval"
    unsure = ", not significant" if row.comparison == "not significant" else ""
    tau = format_number(row.mean_acceptance_length)
    return (
        f"{row.method}, {title(row.task)}: {ranking.speedup(row)}{around}{unsure}, τ {tau}, "
        f"{format_number(row.tokens_per_s, 1)} tokens/s, n {ranking.n(row)}"
    )
