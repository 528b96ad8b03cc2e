"""Two runs compared: for each task and method what changed from A to B, and whether that is more than noise.

Only prompts count that the method and the reference answered in both runs. Intervals resample questions, as everywhere.
docs/design/compare.md has the reasons.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from specbench_ss.errors import UserError
from specbench_ss.method_spec import REFERENCE
from specbench_ss.results.intervals import Interval, mean_interval, ratio_interval
from specbench_ss.results.paired_times import PairedTimes, paired
from specbench_ss.results.resampling import Floats
from specbench_ss.results.run_differences import Difference, conditions_apart, differences
from specbench_ss.results.summary import OVERALL, disbelieved
from specbench_ss.runs.rows import Row, Run

OTHER_MACHINE, OTHER_THREADS, FAILED = "other machine", "other threads", "failed"
TOO_FEW, SAME, VOID = "too few", "not distinguishable", "void"
FIGURES = ("speedup", "tokens_per_s", "tau", "quality")
UNJUDGED = (OTHER_MACHINE, OTHER_THREADS, FAILED, TOO_FEW, VOID)
WORDS = {"speedup": ("slower", "faster"), "tokens_per_s": ("slower", "faster")}  # others are lower or higher
Rows = list[Row]
Prompt = tuple[str, int]


@dataclass(frozen=True, slots=True)
class Change:
    """One figure in both runs. change: B over A, less 1; of quality, B less A. None where there is nothing to compare.

    interval: the 95% interval of change, None below four questions. verdict: `faster`, `slower` (`higher`, `lower`
    where it is no speed), `not distinguishable`, or one of UNJUDGED: `too few` questions, `other machine`, `other
    threads`, `failed` where a run has no whole answer, `void` where a run's times must not be used. reason: the cause
    of `other machine`, `other threads` and `failed` in words.
    """

    a: float | None
    b: float | None
    change: float | None
    interval: Interval | None
    verdict: str
    reason: str = ""

    @property
    def why(self) -> str:
        """Return the verdict with its reason."""
        return f"{self.verdict} ({self.reason})" if self.reason else self.verdict


@dataclass(frozen=True, slots=True)
class ComparedRow:
    """One method on one category (or `overall`). changes: by the names in `regression.METRICS`.

    n_prompts, n_questions: what is in both runs. n_failed_a, n_failed_b: the method's failed samples in each run;
    error: the first of their errors.
    n_answers: answers of the same prompt and repeat in both; n_other_answers: of these, with other tokens. baseline:
    the method that speedups are over.
    """

    category: str
    method: str
    n_prompts: int
    n_questions: int
    n_failed_a: int
    n_failed_b: int
    changes: Mapping[str, Change]
    n_answers: int
    n_other_answers: int
    baseline: str = REFERENCE
    error: str = ""


def compared(a: Run, b: Run, anyway: bool = False) -> tuple[list[Difference], list[ComparedRow]]:
    """Return what differs between two runs, and a row for each method that is in both, `overall` first, then by task.

    Raises UserError where they do not compare, unless `anyway`, and where no method or question is in both.
    """
    found = differences(a, b)
    hindering = [f"{one.what} ({one.a} and {one.b})" for one in found if one.hinders]
    if hindering and not anyway:
        raise UserError(f"the runs do not compare, since they differ in {', '.join(hindering)}; --anyway compares them")
    labels = [label for label in a.labels if label in b.labels]
    shared = {row.question_id for row in a.rows} & {row.question_id for row in b.rows}
    if not shared or not [label for label in labels if label != a.baseline]:
        what = "question" if not shared else f"method besides {a.baseline}"
        raise UserError(f"the runs have no {what} in common: there is nothing to compare")
    apart = conditions_apart(a, b)
    categories = [OVERALL, *(category for category in a.categories if category in b.categories)]
    void = {label for label in labels if any(disbelieved(run, label) for run in (a, b))}
    rows = [_Pair(a, b, label, category, label in void).row(apart) for category in categories for label in labels]
    return found, rows


def _nothing(verdict: str, reason: str = "") -> Change:
    return Change(None, None, None, None, verdict, reason)


def _unmeasured(apart: Mapping[str, str]) -> tuple[str, str]:
    """Return the verdict on times made under other conditions, and the conditions with both values."""
    if list(apart) == ["threads"]:
        return OTHER_THREADS, apart["threads"]
    return OTHER_MACHINE, ", ".join(f"{what} {values}" for what, values in apart.items())


class _Pair:
    """A method's samples in two runs, with the reference's, on the prompts that all four answered."""

    def __init__(self, a: Run, b: Run, label: str, category: str, void: bool) -> None:
        self.label, self.category, self.void, self.baseline = label, category, void, a.baseline
        self.asked = [_rows(run, label, category) for run in (a, b)]
        references = [_rows(run, run.baseline, category) for run in (a, b)]
        sides = [paired(*both) for both in zip(self.asked, references, strict=True)]
        self.failed = _failures(label, self.asked) or _failures(a.baseline, references)
        both = {_prompt(row) for row in sides[0][0]} & {_prompt(row) for row in sides[1][0]}
        kept = [tuple(sorted((r for r in rows if _prompt(r) in both), key=_prompt) for rows in side) for side in sides]
        self.own: list[Rows] = [own for own, _ in kept]
        self.times = [PairedTimes(own, ref) for own, ref in kept]

    def row(self, apart: Mapping[str, str]) -> ComparedRow:
        failed = [sum(not row.ok for row in rows) for rows in self.asked]
        made = [{(*_prompt(row), row.repeat): _answer(row) for row in own} for own in self.own]
        twice = [key for key in made[0] if key in made[1]]
        return ComparedRow(
            category=self.category,
            method=self.label,
            n_prompts=len(self.times[0].own_s),
            n_questions=len(self.times[0].questions),
            n_failed_a=failed[0],
            n_failed_b=failed[1],
            changes=self._changes(apart),
            n_answers=len(twice),
            n_other_answers=sum(made[0][key] != made[1][key] for key in twice),
            baseline=self.baseline,
            error=first_error([row for rows in self.asked for row in rows]),
        )

    def _changes(self, apart: Mapping[str, str]) -> dict[str, Change]:
        if self.failed:
            return dict.fromkeys(FIGURES, _nothing(FAILED, self.failed))
        rates = self._rates()
        if apart:
            rates = Change(rates.a, rates.b, None, None, *_unmeasured(apart))
        return {
            "speedup": _nothing(VOID) if self.void else self._speedups(),
            "tokens_per_s": _nothing(VOID) if self.void else rates,
            "tau": self._tau(),
            "quality": self._quality(),
        }

    def _speedups(self) -> Change:
        a, b = (times.by_question() for times in self.times)
        return _ratio("speedup", [(ref_s, own_n, ref_n, own_s) for ref_s, ref_n, own_s, own_n in (a, b)])

    def _rates(self) -> Change:
        a, b = (times.by_question() for times in self.times)
        return _ratio("tokens_per_s", [(own_n, own_s) for _, _, own_s, own_n in (a, b)])

    def _tau(self) -> Change:
        """Tokens of steps over steps; questions that took no step in one of the runs are left out."""
        a, b = (_by_question(own, _in_steps) for own in self.own)
        stepped = [question for question in a if a[question].all() and b[question].all()]
        columns = [np.array([of[question] for question in stepped]).reshape(-1, 2) for of in (a, b)]
        return _ratio("tau", [(of[:, 0], of[:, 1]) for of in columns], processes=0)

    def _quality(self) -> Change:
        scored = [[row for row in own if row.quality is not None] for own in self.own]
        means = [_by_question(own, lambda r: (r.quality or 0.0, 1)) for own in scored]
        both = [question for question in means[0] if question in means[1]]
        if not both:
            return _nothing(TOO_FEW)
        a, b = (np.array([of[question][0] / of[question][1] for question in both]) for of in means)
        around = mean_interval(b - a)
        change = float((b - a).mean())
        return Change(float(a.mean()), float(b.mean()), change, around, _verdict("quality", around))


def _rows(run: Run, label: str, category: str) -> Rows:
    return [row for row in run.rows if row.method == label and category in (OVERALL, row.category)]


def _failures(label: str, asked: Sequence[Rows]) -> str:
    """Return the runs in which every sample of a method failed, and the first error; '' where there are none."""
    failed = [(name, rows) for name, rows in zip("AB", asked, strict=True) if rows and not any(row.ok for row in rows)]
    return "; ".join(f"{label} failed in {name}: {first_error(rows)}" for name, rows in failed)


def first_error(rows: Sequence[Row]) -> str:
    """Return the first line of the first error of some samples; '' where none failed."""
    return next((line for row in rows if not row.ok for line in (row.error or "").splitlines()), "")


def _prompt(row: Row) -> Prompt:
    return row.question_id, row.turn


def _answer(row: Row) -> object:
    """Return the tokens of an answer; its text where a server made it, which sends no tokens."""
    return row.token_ids if row.token_ids is not None else row.text


def _in_steps(row: Row) -> tuple[float, float]:
    """Return the tokens that came from steps, and the steps."""
    return (row.tokens or 0) - (row.prefill_tokens or 0), row.steps or 0


def _by_question(rows: Rows, values: Callable[[Row], tuple[float, float]]) -> dict[str, Floats]:
    """Return the sums of two values over the samples of each question."""
    sums: dict[str, Floats] = {}
    for row in rows:
        sums[row.question_id] = sums.get(row.question_id, np.zeros(2)) + np.array(values(row), dtype=np.float64)
    return sums


def _ratio(metric: str, sides: Sequence[Sequence[Floats]], processes: int = 2) -> Change:
    """Compare a figure that is a product of sums over another. sides: of each run those above, then as many below.

    Each is [questions].
    """
    (a, b), half = sides, len(sides[0]) // 2
    before, after = (_over(side[:half], side[half:]) for side in sides)
    if before is None or after is None:
        return Change(before, after, None, None, TOO_FEW)
    around = ratio_interval((*b[:half], *a[half:]), (*b[half:], *a[:half]), processes)
    changed = None if around is None else (around[0] - 1, around[1] - 1)
    return Change(before, after, after / before - 1, changed, _verdict(metric, changed))


def _over(above: Sequence[Floats], below: Sequence[Floats]) -> float | None:
    tops, bottoms = ([float(column.sum()) for column in columns] for columns in (above, below))
    return float(np.prod(tops) / np.prod(bottoms)) if all(tops) and all(bottoms) else None


def _verdict(metric: str, around: Interval | None) -> str:
    if around is None:
        return TOO_FEW
    if around[0] <= 0 <= around[1]:
        return SAME
    return WORDS.get(metric, ("lower", "higher"))[around[0] > 0]


def as_record(row: ComparedRow) -> dict[str, Any]:
    """Return a row with its changes as flat, JSON-ready columns: `speedup_a`, `speedup_change_low`, ..."""
    own = {name: getattr(row, name) for name in ComparedRow.__slots__ if name not in ("changes", "baseline", "error")}
    for metric, change in row.changes.items():
        low, high = change.interval or (None, None)
        own |= {f"{metric}_a": change.a, f"{metric}_b": change.b, f"{metric}_change": change.change}
        own |= {f"{metric}_change_low": low, f"{metric}_change_high": high, f"{metric}_verdict": change.verdict}
    return own
