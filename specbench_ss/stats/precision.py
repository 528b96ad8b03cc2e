"""Precision of a run's intervals: whether more questions or more repeats would narrow them.

The units of an interval are questions, so its width has two parts: how much questions differ, which no repeat changes,
and how much repeats of a question differ, which falls with their number. docs/design/compare.md has the rule.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from scipy import stats

from specbench_ss.stats.intervals import FEWEST, LEVEL, TIMING_FLOOR, Floats, strata_of
from specbench_ss.stats.pairs import Pairs, S

KNOWN = 8  # degrees of freedom from which the spread of repeats is used for predictions
SURE = 0.95  # confidence that repeats cannot help
DOMINATES = 0.8  # share of the width that no repeat can narrow, above which another repeat is not worth its time


@dataclass(frozen=True, slots=True)
class Width:
    """Half the width of an interval, relative to the speedup, after some repeats; at_best: with any number of them.

    half is None with too few questions; at_best is None with too few repeats for an estimate. questions: their number.
    freedom: degrees of freedom of the interval. floor: part of the width that no question narrows.
    """

    method: str
    half: float | None
    at_best: float | None
    questions: int = 0
    freedom: float = 1.0
    floor: float = 0.0

    @property
    def repeats_cannot_help(self) -> bool:
        """Return whether most of the width is known to stay however many repeats are made."""
        return self.half is not None and self.at_best is not None and self.at_best > DOMINATES * self.half

    def needed(self, target: float) -> int:
        """Return about how many questions an interval needs that is within a target with any number of repeats.

        The target must exceed `floor`.
        """
        width, n = self.half if self.at_best is None else self.at_best, self.questions

        def scaled(n: int) -> float:
            return float(stats.t.isf((1 - LEVEL) / 2, self.freedom * n / self.questions)) / math.sqrt(n)

        scale = ((width or 0.0) - self.floor) / scaled(n)
        while self.floor + scale * scaled(n) > target:
            n += 1 + n // 100
        return n


def widest_ci(rows: Sequence[S], labels: Sequence[str], repeats: int) -> Width:
    """Return the widest interval of all speedups over all questions, of the first repeats of a run.

    labels: of its methods, its reference first.
    """
    made = widths(rows, labels, repeats)
    if not made:
        return Width(labels[0], None, None)
    return max(made, key=lambda width: math.inf if width.half is None else width.half)


def widths(rows: Sequence[S], labels: Sequence[str], repeats: int) -> list[Width]:
    """Return the width of each method's interval, as `widest_ci` has them."""
    of_method: dict[str, list[S]] = {label: [] for label in labels}
    for row in rows:
        if row.repeat < repeats and row.method in of_method:
            of_method[row.method].append(row)
    return [_width(label, of_method[label], of_method[labels[0]]) for label in labels[1:]]


def _width(label: str, own: Sequence[S], ref: Sequence[S]) -> Width:
    times = Pairs(own, ref)
    around, speedup = times.interval(), times.speedup()
    if around is None or not speedup:
        return Width(label, None, None)
    half = (around[1] - around[0]) / 2 / speedup
    share = repeats_share(times)
    of_questions = times.log_speedup(between_processes=False)
    floor = min(half, times.processes * TIMING_FLOOR)
    if times.n_sessions > 1 or times.blocks:
        floor = max(0.0, half - of_questions.around()[1] + of_questions.value)
    at_best = None if share is None else floor + (half - floor) * math.sqrt(1 - share)
    return Width(label, half, at_best, len(times.questions), of_questions.freedom, floor)


def repeats_share(pairs: Pairs[S]) -> float | None:
    """Return an upper bound of the share of repeats in the interval's squared width; None if unknown.

    Each repeat of a question has an influence on the logarithm of the speedup; the variance of their mean is compared
    with that of questions within tasks. Both are estimates: the share is the upper end of its one-sided interval, by
    the F distribution.
    """
    sums: dict[str, dict[int, Floats]] = {}
    for a, b in zip(pairs.own, pairs.other, strict=True):
        parts = np.array([b.wall_s or 0.0, a.tokens or 0, b.tokens or 0, a.wall_s or 0.0], dtype=np.float64)
        of_question = sums.setdefault(a.question_id, {})
        of_question[a.repeat] = of_question.get(a.repeat, np.zeros(4)) + parts
    most = max((len(of) for of in sums.values()), default=0)
    task = {row.question_id: row.category for row in pairs.own}
    chosen = [question for question, of in sums.items() if len(of) == most]
    whole = [np.stack(list(sums[question].values())) for question in chosen]
    if len(whole) < FEWEST or len(whole) * (most - 1) < KNOWN:
        return None
    columns = np.stack(whole)  # [questions, repeats, 4]
    total = columns.mean(1).sum(0)
    influences = (columns / total) @ np.array([1.0, 1.0, -1.0, -1.0])  # [questions, repeats]
    strata = strata_of([task[question] for question in chosen])
    size = np.bincount(strata)
    apart = influences.mean(1) - (np.bincount(strata, influences.mean(1)) / size)[strata]
    of_all = float((apart**2 * (size / (size - 1))[strata]).mean())
    of_repeats, between = influences.var(1, ddof=1).mean() / most, len(whole) - len(size)  # degrees of freedom
    upper = float(stats.f.ppf(SURE, between, len(whole) * (most - 1)))
    return float(min(1.0, upper * of_repeats / of_all)) if of_all > 0 else 1.0


def advice(width: Width, tasks: int) -> str:
    """Return what would halve an interval of a run with so many tasks, as text; '' where nothing is known to.

    An example is 'about 112 questions in place of 28 would halve the interval of ss, ±0.062 (--limit 16)'.
    """
    if width.half is None or width.half / 2 <= width.floor:
        return ""
    count = replace(width, at_best=None).needed(width.half / 2)  # with as many repeats as now
    more = f"about {count} questions in place of {width.questions}"
    found = f"{more} would halve the interval of {width.method}, ±{width.half:.3f} (--limit {math.ceil(count / tasks)})"
    return f"{found}; repeats cannot (±{width.at_best:.3f} at best)" if width.repeats_cannot_help else found
