"""Limits of `ssbench compare --fail-on`: changes from the first run to the second that fail the command."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import product

from specbench_ss.errors import UserError, known_words
from specbench_ss.results.compare import METRICS, ComparedRow, judged

FORM = re.compile(r"(?P<metric>\w+)\s*<\s*(?P<value>[-+−]?\d+(?:\.\d+)?)\s*(?P<percent>%?)")


@dataclass(frozen=True, slots=True)
class Limit:
    """metric: one of METRICS. value: the change that is still allowed, as a share: -0.05. text: as it was given."""

    metric: str
    value: float
    text: str


def read_limits(text: str | None) -> tuple[Limit, ...]:
    """Read limits that are separated by commas; None gives none. Raises UserError for other text."""
    return () if text is None else tuple(_read(part.strip()) for part in text.split(","))


def _read(part: str) -> Limit:
    if not part:
        raise UserError("--fail-on has a blank where a limit is expected: speedup<-5%, or several with commas")
    found = FORM.fullmatch(part)
    if found is None:
        raise UserError(f"--fail-on: cannot read {part!r}; expected a metric, <, and a change: speedup<-5%")
    metric = "mean_acceptance_length" if found["metric"] == "tau" else found["metric"]
    if metric not in METRICS:
        raise UserError(f"--fail-on: no metric {metric!r}{known_words(metric, METRICS)}")
    value = float(found["value"].replace("−", "-")) / (100 if found["percent"] else 1)
    if metric != "quality" and value > 0 and not found["percent"]:
        raise UserError(f"--fail-on: {part!r}: a limit is a change from the first run to the second, as in speedup<-5%")
    if not math.isfinite(value) or abs(value) > 1:
        raise UserError(f"--fail-on: {part!r} is a change of more than 100%: speedup<-5% is one of a twentieth")
    return Limit(metric, value, part)


def broken(rows: Iterable[ComparedRow], limits: Sequence[Limit]) -> list[tuple[ComparedRow, Limit]]:
    """Return the rows whose whole interval lies below a limit, with that limit."""
    return [(row, one) for row, one, around in _with_intervals(rows, limits) if around[1] < one.value]


def undecided(rows: Iterable[ComparedRow], limits: Sequence[Limit]) -> list[tuple[ComparedRow, Limit]]:
    """Return the rows whose interval reaches below a limit and above it, with that limit."""
    return [(row, one) for row, one, around in _with_intervals(rows, limits) if around[0] < one.value <= around[1]]


def _with_intervals(
    rows: Iterable[ComparedRow], limits: Sequence[Limit]
) -> Iterator[tuple[ComparedRow, Limit, tuple[float, float]]]:
    for row, limit in product(rows, limits):
        around = row.changes[limit.metric].interval
        if around and judged(limit.metric, row):
            yield row, limit, around


def not_judged(rows: Iterable[ComparedRow], limits: Sequence[Limit]) -> list[str]:
    """Return the limited metrics without an interval: 'tokens_per_s of ss: other threads (threads 1 → 2)'."""
    return [
        f"{limit.metric} of {row.method}: {row.changes[limit.metric].why}"
        for row in rows
        for limit in limits
        if judged(limit.metric, row) and row.changes[limit.metric].interval is None
    ]
