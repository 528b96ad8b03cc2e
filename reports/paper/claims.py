"""Statements of the papers, tested against results: by intervals where there are some, else by single values."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import combinations
from math import comb

from scipy.stats import kendalltau

from specbench_ss.results.report import Claim, Grid, Value
from specbench_ss.results.text import MISSING, format_number, format_speedup, interval_of

FEWEST = 5  # methods: of four, even the same order may be chance (p = 0.08)
SURE = 0.05  # p-value below which two orders are called equal or opposite
NOT_MEASURED = "not measured here"
Ratio = tuple[float | None, tuple[float, float] | None]  # a ratio, such as a speedup, and its 95 % interval
NOWHERE: Ratio = (None, None)


def number_or_none(value: Value) -> float | None:
    """Return a number of a grid; None for a text, for nothing and for NaN."""
    return float(value) if isinstance(value, (int, float)) and not math.isnan(value) else None


def place_of(grid: Grid, title: str) -> int:
    """Return the place of a column. Raises ValueError where the grid has none of that title."""
    return [c.title for c in grid.columns].index(title)


def point(grid: Grid, row: Sequence[Value], title: str) -> Ratio:
    """Return a ratio of a row with its interval, which stands in the next column."""
    at = place_of(grid, title)
    return number_or_none(row[at]), interval_of(row[at + 1])


def ahead(says: str, better: Ratio, worse: Ratio) -> Claim:
    """Hold one speedup against another; the claim is decided where the intervals lie apart."""
    if better[0] is None or worse[0] is None:
        return Claim(says, None, NOT_MEASURED)
    apart = better[1] and worse[1] and (better[1][0] > worse[1][1] or better[1][1] < worse[1][0])
    return Claim(says, better[0] > worse[0] if apart else None, f"{_text(better)} against {_text(worse)}")


def at_most(says: str, ratio: Ratio, bound: float) -> Claim:
    """Hold a ratio against its upper bound; the claim is decided where the whole interval lies on one side of it."""
    return _bounded(says, ratio, lambda low, high: True if high <= bound else False if low > bound else None)


def at_least(says: str, ratio: Ratio, bound: float) -> Claim:
    """Hold a ratio against its lower bound; the claim is decided where the whole interval lies on one side of it."""
    return _bounded(says, ratio, lambda low, high: True if low >= bound else False if high < bound else None)


def _bounded(says: str, ratio: Ratio, holds: Callable[[float, float], bool | None]) -> Claim:
    if ratio[0] is None or ratio[1] is None:
        return Claim(says, None, NOT_MEASURED if ratio[0] is None else _text(ratio))
    return Claim(says, holds(*ratio[1]), _text(ratio))


def all_of(says: str, claims: Sequence[Claim]) -> Claim:
    """Hold several at once: one that does not hold is enough to break it, one that is open to leave it open."""
    held = [claim.holds for claim in claims]
    holds = False if False in held else None if None in held or not held else True
    found = "; ".join(claim.found for claim in claims) or NOT_MEASURED
    return Claim(says, holds, found, all(claim.sure for claim in claims))


def rising(says: str, values: Iterable[tuple[Value, float | None]], form: str = "{:.2f}") -> Claim:
    """Hold single values, which have no intervals, against a rise from each to the next. values: (what, value)."""
    given = list(values)
    known = [value for _, value in given if value is not None]
    found = ", ".join(f"{what}: {MISSING if value is None else form.format(value)}" for what, value in given)
    if len(known) < max(2, len(given)):
        return Claim(says, None, found or NOT_MEASURED)
    return Claim(says, all(a < b for a, b in zip(known, known[1:], strict=False)), found, sure=False)


def smallest(says: str, name: str, values: Mapping[str, float], form: str = "{:.3g}") -> Claim:
    """Hold that one has the smallest value of all, which are counted."""
    found = ", ".join(f"{what} {form.format(value)}" for what, value in sorted(values.items(), key=lambda kv: kv[1]))
    return Claim(says, values[name] == min(values.values()), found)


def same_order(published: Mapping[str, float], ours: Mapping[str, float | None], of: str) -> list[Claim]:
    """Hold the published order of methods against ours, by Kendall's tau; nothing where there are few methods."""
    mine = {name: value for name in published if (value := ours.get(name)) is not None}
    if len(mine) < FEWEST:
        return []
    rank = kendalltau([published[name] for name in mine], list(mine.values()))
    alike = sum((published[a] - published[b]) * (mine[a] - mine[b]) > 0 for a, b in combinations(mine, 2))
    order = sorted(mine, key=lambda name: -published[name])
    values = ", ".join(f"{name} {format_number(mine[name])}" for name in sorted(mine, key=lambda name: -mine[name]))
    holds = bool(rank.statistic > 0) if rank.pvalue < SURE else None
    pairs = f"{alike} of {comb(len(mine), 2)} pairs alike (Kendall's tau {rank.statistic:.2f}, p {rank.pvalue:.2g})"
    return [Claim(f"{of}: {' > '.join(order)}", holds, f"{values}: {pairs}")]


def _text(point: Ratio) -> str:
    around = f" ({point[1][0]:.2f}–{point[1][1]:.2f})" if point[1] else ""
    return f"{format_speedup(point[0])}{around}"
