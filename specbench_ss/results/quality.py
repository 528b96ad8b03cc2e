"""Quality beside speed: means over questions, paired differences, and whether a method that changes the model is worse.

Non-inferiority is judged as in clinical trials: by the interval of the paired difference against a margin stated
beforehand.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal

import numpy as np
from scipy.special import betaincinv

from specbench_ss.errors import UserError
from specbench_ss.options import plain_number
from specbench_ss.results.intervals import Interval, mean_interval
from specbench_ss.results.report import Report
from specbench_ss.results.resampling import Floats
from specbench_ss.runs.rows import Key, Row
from specbench_ss.runs.suite import Question

MARGIN = Report.quality_margin  # of a score from 0 to 1: how much worse still counts as no worse
CHANGED = 0.01  # of a score from 0 to 1: from here on the outcome of a question is another one
FEW_CHANGED = 5  # questions: of fewer that all go one way, no sign test says which way (0.5 ** 4 > 0.05)
LEVEL = 0.95  # one-sided, of the bound where few changed
NonInferiority = Literal["non-inferior", "inferior", "not shown"]


def checked_margin(margin: float) -> float:
    """Return the margin. Raises UserError where it is no number above 0 and up to 1."""
    value = plain_number("quality_margin", margin)
    if not 0 < value <= 1:
        raise UserError(f"the margin of quality must be above 0 and at most 1, not {value:g}")
    return value


def measures(questions: Iterable[Question]) -> list[str]:
    """Return by what the answers are scored, each measure once; a mean over several of them says nothing."""
    return sorted({question.metric for question in questions if question.metric})


def mean_score(
    own: Sequence[Row],
    ref: Sequence[Row],
    itself: bool,
    name: str,
    scores: Mapping[Key, float | None],
    may_change: bool = False,
) -> dict[str, Any]:
    """Return the mean score and its mean paired difference to the reference, both as means of question means.

    own, ref: paired samples. itself: whether the method is the reference, which has no interval. name: what the score
    is called in the summary. scores: of each sample that has one. may_change: whether the method may change answers, so
    that a question which did not change says little of those that were not asked.
    """
    pairs: dict[str, list[tuple[float, float]]] = {}
    for a, b in zip(own, ref, strict=True):
        mine, theirs = scores.get(a.key), scores.get(b.key)
        if mine is not None and theirs is not None:
            pairs.setdefault(a.question_id, []).append((mine, theirs))
    means = np.array([np.mean(values, axis=0) for values in pairs.values()], dtype=np.float64).reshape(-1, 2)
    difference = means[:, 0] - means[:, 1]
    none = len(means) == 0
    return {
        name: None if none else float(means[:, 0].mean()),
        f"{name}_n": len(means),
        f"{name}_difference": None if none else float(difference.mean()),
        f"{name}_interval": None if itself else cautious(difference) if may_change else mean_interval(difference),
    }


def cautious(differences: Floats) -> Interval | None:
    """Return the interval of the mean paired difference [n]; where few questions changed, at least `unseen`."""
    found = mean_interval(differences)
    if found is None or (np.abs(differences) > CHANGED).sum() >= FEW_CHANGED:
        return found
    low, high = unseen(differences)
    return min(found[0], low), max(found[1], high)


def unseen(differences: Floats) -> Interval:
    """Return how far a mean difference may be from 0 by questions that changed, however few of these [n] did.

    No more of all questions are lost, or won, than Clopper and Pearson's bound at 95%, which is the rule of three, 3 /
    n, where none was (Hanley and Lippman-Hand 1983); and none by more than 1. What changed less adds its mean.
    """
    n, small = len(differences), np.abs(differences) <= CHANGED
    drift = float(differences[small].sum() / n)
    lost, won = int((differences < -CHANGED).sum()), int((differences > CHANGED).sum())
    return min(drift, 0.0) - _at_most(lost, n), max(drift, 0.0) + _at_most(won, n)


def _at_most(seen: int, n: int) -> float:
    return 1.0 if seen == n else float(betaincinv(seen + 1, n - seen, LEVEL))


def non_inferiority(interval: Interval | None, margin: float) -> NonInferiority:
    """Say whether a method's quality is at most `margin` below the reference's, by the interval of the difference."""
    if interval is None or interval[0] <= -margin <= interval[1]:
        return "not shown"
    return "non-inferior" if interval[0] > -margin else "inferior"
