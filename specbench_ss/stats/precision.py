"""Precision of a run's intervals: whether more questions, repeats or processes would narrow them.

The units of an interval are questions, so its variance has two parts: how much questions differ, which no repeat
changes, and how much repeats of a question differ, which falls with their number. Sessions and blocks add how much
processes differ, which falls neither with questions nor with repeats. docs/design/compare.md has the rule.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from scipy import stats

from specbench_ss.stats.intervals import FEWEST, TIMING_FLOOR, Estimate, Floats, Part, strata_of
from specbench_ss.stats.pairs import Pairs, S

KNOWN = 8  # degrees of freedom from which the spread of repeats is used for predictions
SURE = 0.95  # confidence that repeats cannot help
DOMINATES = 0.8  # share of the width that no repeat can narrow, above which another repeat is not worth its time
MOST = 1000  # times as many questions, beyond which no number of them is taken to be of use
MORE_PROCESSES = "more processes would (blocks in a file of servers, else --sessions)"  # where no questions suffice


@dataclass(frozen=True, slots=True)
class Width:
    """Width of a method's interval after some repeats, and predictions of it.

    parts: of the variance of the logarithm of the speedup; () with too few questions. questions: their number. floor:
    part of half the interval of the logarithm that nothing narrows. repeats: upper bound of the share of repeats in
    the variance over questions; None with too few repeats for an estimate.
    """

    method: str
    parts: tuple[Part, ...] = ()
    questions: int = 0
    floor: float = 0.0
    repeats: float | None = None

    @property
    def half(self) -> float | None:
        """Return half the width of the interval, relative to the speedup; None with too few questions."""
        return self._half() if self.parts else None

    @property
    def at_best(self) -> float | None:
        """Return `half` with any number of repeats; None with too few repeats for an estimate."""
        return None if self.repeats is None else self._half(1 - self.repeats)

    @property
    def repeats_cannot_help(self) -> bool:
        """Return whether most of the width is known to stay however many repeats are made."""
        return self.half is not None and self.at_best is not None and self.at_best > DOMINATES * self.half

    def needed(self, target: float) -> int | None:
        """Return about how many questions narrow `half` to a target, with as many repeats; None if no number does."""
        n = FEWEST
        while self._half(self.questions / n, n / self.questions) > target:
            n += 1 + n // 100
            if n > MOST * self.questions:
                return None
        return n

    def _half(self, variance: float = 1.0, degrees: float = 1.0) -> float:
        """Return `half` if questions had `variance` times their variance, and that `degrees` times its degrees."""
        over_questions, *others = (replace(part, questions=variance * part.questions) for part in self.parts)
        expected = Estimate(0.0, (replace(over_questions, degrees=degrees * over_questions.degrees), *others))
        low, high = expected.ratio(more=self.floor)
        return (high - low) / 2


def widest_ci(rows: Sequence[S], labels: Sequence[str], repeats: int) -> Width:
    """Return the widest interval of all speedups over all questions, of the first repeats of a run.

    labels: of its methods, its reference first.
    """
    made = widths(rows, labels, repeats)
    if not made:
        return Width(labels[0])
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
    if times.interval() is None:
        return Width(label)
    floor = times.processes * math.log1p(TIMING_FLOOR)
    return Width(label, times.log_speedup().parts, len(times.questions), floor, repeats_share(times))


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
    centered = influences.mean(1) - (np.bincount(strata, influences.mean(1)) / size)[strata]
    of_all = float((centered**2 * (size / (size - 1))[strata]).mean())
    of_repeats, between = influences.var(1, ddof=1).mean() / most, len(whole) - len(size)  # degrees of freedom
    upper = float(stats.f.ppf(SURE, between, len(whole) * (most - 1)))
    return float(min(1.0, upper * of_repeats / of_all)) if of_all > 0 else 1.0


def advice(width: Width, tasks: int) -> str:
    """Return what would halve an interval of a run with so many tasks, as text; '' where nothing is known to.

    An example is 'about 112 questions in place of 28 would halve the interval of ss, ±0.062 (--limit 16)'.
    """
    if width.half is None:
        return ""
    halved, count = f"halve the interval of {width.method}, ±{width.half:.3f}", width.needed(width.half / 2)
    if count is None:
        return f"no number of questions would {halved}; {MORE_PROCESSES}" if len(width.parts) > 1 else ""
    found = f"about {count} questions in place of {width.questions} would {halved} (--limit {math.ceil(count / tasks)})"
    return f"{found}; repeats cannot (±{width.at_best:.3f} at best)" if width.repeats_cannot_help else found
