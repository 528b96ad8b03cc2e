"""Samples of a method paired with its reference's, and what their times say: the speedup in its forms.

A prompt is one turn of one question; its repeats are averaged. Intervals resample questions.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from specbench_ss.results.intervals import FEWEST, Interval, ratio_interval, speedup_interval
from specbench_ss.results.resampling import Floats
from specbench_ss.runs.rows import Row


def paired(own: Sequence[Row], ref: Sequence[Row]) -> tuple[list[Row], list[Row]]:
    """Return the samples of both that succeeded on both sides, in the same order."""

    def good(rows: Sequence[Row]) -> dict[tuple[str, int, int], Row]:
        return {r.prompt: r for r in rows if r.ok and r.tokens and (r.wall_s or 0) > 0}

    mine, theirs = good(own), good(ref)
    both = [key for key in mine if key in theirs]
    return [mine[key] for key in both], [theirs[key] for key in both]


class PairedTimes:
    """Paired times and tokens. own_s, own_tokens, ref_s, ref_tokens: [prompts], means over repeats."""

    def __init__(self, own: Sequence[Row], ref: Sequence[Row]) -> None:
        prompts = list(dict.fromkeys((r.question_id, r.turn) for r in own))
        self.questions = list(dict.fromkeys(q for q, _ in prompts))
        number = {q: i for i, q in enumerate(self.questions)}
        self._question = np.array([number[q] for q, _ in prompts], dtype=np.int64)
        place = {p: i for i, p in enumerate(prompts)}
        self._at = at = np.array([place[r.question_id, r.turn] for r in own], dtype=np.int64)  # [samples], its prompt
        self._wall_s = np.array([r.wall_s for r in own], dtype=np.float64)
        self.own_s, self.own_tokens = _means(own, at, "wall_s"), _means(own, at, "tokens")
        self.ref_s, self.ref_tokens = _means(ref, at, "wall_s"), _means(ref, at, "tokens")

    def by_question(self) -> tuple[Floats, Floats, Floats, Floats]:
        """Return each question's sums: reference seconds and tokens, own seconds and tokens, [questions] each."""
        columns = (self.ref_s, self.ref_tokens, self.own_s, self.own_tokens)
        a, b, c, d = (_grouped(self._question, x, len(self.questions)) for x in columns)
        return a, b, c, d

    def speedup(self) -> float | None:
        """Return seconds per token, the reference's over the method's, each a ratio of sums."""
        a, b, c, d = (float(x.sum()) for x in self.by_question())
        return a / b / (c / d) if b and c and d else None

    def interval(self) -> Interval | None:
        """Return the 95% interval of `speedup`."""
        return speedup_interval(*self.by_question())

    def faster_than(self, other_s: Floats) -> Interval | None:
        """Return the 95% interval of other seconds over the method's own. other_s: [samples], as `own` was given.

        Where the estimate lies below 1, so does the lower end, and the interval is that one number.
        """
        other = _grouped(self._question[self._at], other_s, len(self.questions))
        own = _grouped(self._question[self._at], self._wall_s, len(self.questions))
        if len(own) < FEWEST:
            return None
        estimate = float(other.sum() / own.sum())
        return (estimate, estimate) if estimate <= 1 else ratio_interval((other,), (own,), processes=1)

    def geomean(self) -> float | None:
        """Return the geometric mean over prompts of the ratio of seconds per token."""
        if not len(self.own_s):
            return None
        return float(np.exp(np.log(self.ref_s / self.ref_tokens * self.own_tokens / self.own_s).mean()))

    def specbench(self) -> float | None:
        """Return Spec-Bench's speedup: the mean over questions of tokens per second, over the reference's mean."""
        a, b, c, d = self.by_question()
        return float((d / c).mean() / (b / a).mean()) if len(a) else None


def _means(rows: Sequence[Row], at: Any, name: str) -> Floats:
    values = np.array([getattr(r, name) for r in rows], dtype=np.float64)
    return _grouped(at, values) / np.bincount(at)


def _grouped(at: Any, values: Floats, groups: int = 0) -> Floats:
    """Return the sums of the values that have the same number in `at`."""
    return np.bincount(at, values, groups).astype(np.float64)


def total(rows: Sequence[Row], name: str) -> float:
    """Return the sum of a field of the rows."""
    return float(sum(getattr(r, name) for r in rows))


def over(a: float | None, b: float | None) -> float | None:
    """Return a / b; None where one of them is missing, or b is 0."""
    return None if a is None or not b else a / b
