"""Two rows of a table on the applications, held against each other question by question.

The papers print single values. Few questions are asked here, so that each statement has an interval over them.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from specbench_ss.reports.paper.claims import NOWHERE, Point, at_least, at_most, number_or_none, place_of
from specbench_ss.results.quality import MARGIN, cautious, non_inferiority
from specbench_ss.results.report import Claim, Column, Grid, Value
from specbench_ss.results.summary import paired
from specbench_ss.results.text import counted, end, interval, interval_of
from specbench_ss.runs.records import Run
from specbench_ss.stats import FEWEST, Floats, ratio_interval

SHARED, DRAFT_MODEL = "SS-Shared", "2-Model SD"
KEPT, AGAINST = "quality-kept", "against-a-draft-model"  # names of the tables
TIME, CALLS = "time of an answer", "target calls of an answer"
AROUND = "95 % interval"
LOST = -100 * MARGIN  # of 100: less quality than this is a loss
HOLDS = {"non-inferior": True, "inferior": False, "not shown": None}
Pair = tuple[str, str]  # labels in the run: SS-Shared's, and that of what it is held against


def quality_kept(run: Run, pair: Pair, other: str, source: str) -> Grid:
    """Return SS-Shared's quality on each task beside that of another model, and the difference, of 100."""
    columns = (
        Column("task", "text"), Column(SHARED), Column(other), Column("difference"), Column(AROUND, "text"),
        Column("questions", "count"),
    )  # fmt: skip
    rows: list[tuple[Value, ...]] = []
    for task in run.categories:
        own, others = _by_question(run, pair, task, "quality")
        if len(own):
            around = cautious(own - others)
            written = interval((100 * around[0], 100 * around[1]), 1, LOST) if around else None
            means = 100 * float(own.mean()), 100 * float(others.mean()), 100 * float((own - others).mean())
            rows.append((task, *means, written, len(own)))
    return Grid(KEPT, columns, tuple(rows), f"{source}: quality of shared mode, of 100")


def against_draft_model(run: Run, pair: Pair, source: str) -> Grid:
    """Return SS-Shared's time and target calls of an answer over those of two-model speculative decoding."""
    columns = (
        Column("task", "text"), Column(TIME, "times"), Column(AROUND, "text"), Column(CALLS, "times"),
        Column(AROUND, "text"), Column("questions", "count"),
    )  # fmt: skip
    rows: list[tuple[Value, ...]] = []
    for task in run.categories:
        seconds = _by_question(run, pair, task, "wall_s")
        if len(seconds[0]):
            both = _over(*seconds, processes=1), _over(*_by_question(run, pair, task, "steps"))
            rows.append((task, *both[0], *both[1], len(seconds[0])))
    return Grid(AGAINST, columns, tuple(rows), f"{source}: {SHARED} over {DRAFT_MODEL}")


def kept_claims(grid: Grid, other: str) -> list[Claim]:
    """Hold that shared mode costs no quality (ACL table 3), as non-inferiority within a margin."""
    made = []
    for task, own, theirs, difference, around, count in grid.rows:
        says = f"{task}: shared mode costs no quality against {other} (here: at most {-LOST:g} of 100)"
        found = f"{own:.1f} and {theirs:.1f} of 100, difference {end(float(difference or 0), 1, 0)}"
        asked = counted(int(count or 0), "question")
        told = f"{found} ({around}), {asked}" if around else f"{found}, {asked}"
        bounds = interval_of(around)
        verdict = non_inferiority(bounds and (bounds[0] / 100, bounds[1] / 100), MARGIN)
        made.append(Claim(says, HOLDS[verdict], told))
    return made


def draft_model_claims(grid: Grid) -> list[Claim]:
    """Hold that SS-Shared answers sooner though it calls the target more often (ACL table 5, 2024 table 2)."""
    made = []
    for row in grid.rows:
        for says, hold, title in (
            (f"{row[0]}: {SHARED} answers sooner than {DRAFT_MODEL}", at_most, TIME),
            (f"{row[0]}: {SHARED} calls the target more often than {DRAFT_MODEL}", at_least, CALLS),
        ):
            claim = hold(f"{says} (here: its {title} over the other's)", _point(row, place_of(grid, title)), 1.0)
            made.append(Claim(claim.says, claim.holds, f"{claim.found}, {counted(int(row[-1] or 0), 'question')}"))
    return made


def _point(row: Sequence[Value], at: int) -> Point:
    value = number_or_none(row[at])
    return NOWHERE if value is None else (value, interval_of(row[at + 1]))


def _by_question(run: Run, pair: Pair, task: str, column: str) -> tuple[Floats, Floats]:
    """Return means of a column over the samples of each question that both answered, [questions] each."""
    rows = [[r for r in run.rows if r.method == label and r.category == task] for label in pair]
    given: dict[str, list[tuple[float, float]]] = {}
    for own, other in zip(*paired(*rows), strict=True):
        mine, theirs = getattr(own, column), getattr(other, column)
        if mine is not None and theirs is not None:
            given.setdefault(own.question_id, []).append((mine, theirs))
    means = np.array([np.mean(both, axis=0) for both in given.values()], dtype=np.float64).reshape(-1, 2)
    return means[:, 0], means[:, 1]


def _over(own: Floats, others: Floats, processes: int = 0) -> tuple[float | None, str | None]:
    """Return the ratio of sums [questions] and its interval, as texts have it."""
    if not len(own) or not others.sum():
        return None, None
    around = ratio_interval((own,), (others,), processes) if len(own) >= FEWEST else None
    return float(own.sum() / others.sum()), interval(around) or None
