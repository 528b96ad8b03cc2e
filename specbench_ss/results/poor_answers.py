"""Tasks in which the reference's own answers are poor, so that a speedup there may be of text that is of no use."""

from __future__ import annotations

from collections.abc import Sequence

from specbench_ss.results.number_text import number, title
from specbench_ss.results.summary import OVERALL, SummaryRow
from specbench_ss.runs.rows import Run

POOR = 0.1  # of 1, by the task's own measure: below that, answers are called poor


def poor_tasks(summaries: Sequence[SummaryRow]) -> dict[str, float]:
    """Return the mean quality of the reference's answers by task, where it is poor, the worst first."""
    own = [row for row in summaries if row.comparison == "reference" and row.category != OVERALL]
    found = {row.category: row.quality for row in own if row.quality is not None and row.quality < POOR}
    return dict(sorted(found.items(), key=lambda item: item[1]))


def poor_answers(run: Run, summaries: Sequence[SummaryRow]) -> str:
    """Return a sentence on the tasks in which answers are poor, or ''. summaries: of all tasks, and of each."""
    tasks = poor_tasks(summaries)
    if not tasks:
        return ""
    named = ", ".join(f"{title(task)} ({number(quality)} of 1)" for task, quality in tasks.items())
    return f"Answers of {run.baseline} are poor in {named}: the model is weak there, or the limit cut them too early."
