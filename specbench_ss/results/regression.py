"""Limits on what may become worse from one run to another, as `--fail-on "speedup<-5%,quality<-0.02"` gives them.

A limit is broken only where the whole interval lies below it. Imports nothing heavy.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from specbench_ss.errors import UserError, known_words
from specbench_ss.results.comparison import ComparedRow

METRICS = ("speedup", "tokens_per_s", "tau", "quality")
FORM = re.compile(r"(?P<metric>\w+)\s*<\s*(?P<value>[-+−]?\d+(?:\.\d+)?)\s*(?P<percent>%?)")


@dataclass(frozen=True, slots=True)
class Limit:
    """metric: one of METRICS. value: the change that is still allowed, as a share: -0.05. text: as it was given."""

    metric: str
    value: float
    text: str


def read_limits(text: str | None) -> tuple[Limit, ...]:
    """Read limits that are separated by commas; None gives none. Raises UserError for what is none, a blank too."""
    return () if text is None else tuple(_read(part.strip()) for part in text.split(","))


def _read(part: str) -> Limit:
    if not part:
        raise UserError("--fail-on has a blank where a limit is expected: speedup<-5%, or several with commas")
    found = FORM.fullmatch(part)
    if found is None:
        raise UserError(f"--fail-on: cannot read {part!r}; expected a figure, <, and a change: speedup<-5%")
    if found["metric"] not in METRICS:
        raise UserError(f"--fail-on: there is no figure {found['metric']!r}{known_words(found['metric'], METRICS)}")
    value = float(found["value"].replace("−", "-")) / (100 if found["percent"] else 1)
    if not math.isfinite(value) or abs(value) > 1:
        raise UserError(f"--fail-on: {part!r} is a change of more than 100%: speedup<-5% is one of a twentieth")
    return Limit(found["metric"], value, part)


def broken(rows: Iterable[ComparedRow], limits: Sequence[Limit]) -> list[tuple[ComparedRow, Limit]]:
    """Return the rows whose whole interval lies below a limit, with that limit."""
    return [(row, limit) for row in rows for limit in limits if judged(limit.metric, row) and _below(row, limit)]


def judged(metric: str, row: ComparedRow) -> bool:
    """Say whether a figure of a method says anything: of the reference, only its tokens per second do."""
    return row.method != row.baseline or metric == "tokens_per_s"


def _below(row: ComparedRow, limit: Limit) -> bool:
    around = row.changes[limit.metric].interval
    return around is not None and around[1] < limit.value


def not_judged(rows: Iterable[ComparedRow], limits: Sequence[Limit]) -> list[str]:
    """Return what a limit was set on and could not be judged: 'tokens_per_s of ss: other threads (threads 1 → 2)'."""
    return [
        f"{limit.metric} of {row.method}: {row.changes[limit.metric].why}"
        for row in rows
        for limit in limits
        if judged(limit.metric, row) and row.changes[limit.metric].interval is None
    ]
