"""Statements of the papers, tested against results: by intervals if there are any, else by single values."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import combinations
from math import comb

from scipy.stats import kendalltau

from specbench_ss.results.report import Claim, Grid, Value
from specbench_ss.results.text import MISSING, format_number, format_speedup, interval_of

FEWEST = 5  # methods: with four, even the same order may be chance (p = 0.08)
SURE = 0.05  # p-value below which two orders are called equal or opposite
NOT_MEASURED = "not measured here"
Ratio = tuple[float | None, tuple[float, float] | None]  # a ratio, such as a speedup, and its 95 % interval
NOWHERE: Ratio = (None, None)


def number_or_none(value: Value) -> float | None:
    """Return a number of a grid; None for text, None and NaN."""
    return float(value) if isinstance(value, (int, float)) and not math.isnan(value) else None


def point(grid: Grid, row: Sequence[Value], title: str) -> Ratio:
    """Return a ratio of a row with its interval, which is in the next column."""
    at = grid.titles.index(title)
    return number_or_none(row[at]), interval_of(row[at + 1])


def ahead(statement: str, better: Ratio, worse: Ratio) -> Claim:
    """Compare two speedups; the claim is decided if the intervals do not overlap."""
    if better[0] is None or worse[0] is None:
        return Claim(statement, None, NOT_MEASURED)
    apart = better[1] and worse[1] and (better[1][0] > worse[1][1] or better[1][1] < worse[1][0])
    return Claim(statement, better[0] > worse[0] if apart else None, f"{_text(better)} against {_text(worse)}")


def at_most(statement: str, ratio: Ratio, bound: float) -> Claim:
    """Compare a ratio with its upper bound; the claim is decided if the interval is on one side of it."""
    return _bounded(statement, ratio, lambda low, high: True if high <= bound else False if low > bound else None)


def at_least(statement: str, ratio: Ratio, bound: float) -> Claim:
    """Compare a ratio with its lower bound; the claim is decided if the interval is on one side of it."""
    return _bounded(statement, ratio, lambda low, high: True if low >= bound else False if high < bound else None)


def _bounded(statement: str, ratio: Ratio, holds: Callable[[float, float], bool | None]) -> Claim:
    if ratio[0] is None or ratio[1] is None:
        return Claim(statement, None, NOT_MEASURED if ratio[0] is None else _text(ratio))
    return Claim(statement, holds(*ratio[1]), _text(ratio))


def all_of(statement: str, claims: Sequence[Claim]) -> Claim:
    """Combine claims: false if one is false, else open if one is open."""
    outcomes = [claim.holds for claim in claims]
    holds = False if False in outcomes else None if None in outcomes or not outcomes else True
    found = "; ".join(claim.found for claim in claims) or NOT_MEASURED
    return Claim(statement, holds, found, all(claim.sure for claim in claims))


def rising(statement: str, values: Iterable[tuple[Value, float | None]], form: str = "{:.2f}") -> Claim:
    """Test whether single values without intervals rise from each to the next. values: (name, value)."""
    pairs = list(values)
    present = [value for _, value in pairs if value is not None]
    found = ", ".join(f"{name}: {MISSING if value is None else form.format(value)}" for name, value in pairs)
    if len(present) < max(2, len(pairs)):
        return Claim(statement, None, found or NOT_MEASURED)
    return Claim(statement, all(a < b for a, b in zip(present, present[1:], strict=False)), found, sure=False)


def smallest(statement: str, name: str, values: Mapping[str, float], form: str = "{:.3g}") -> Claim:
    """Test whether one has the smallest of all counted values."""
    found = ", ".join(f"{label} {form.format(value)}" for label, value in sorted(values.items(), key=lambda kv: kv[1]))
    return Claim(statement, values[name] == min(values.values()), found)


def same_order(published: Mapping[str, float], ours: Mapping[str, float | None], of: str) -> list[Claim]:
    """Compare the published order of methods with ours by Kendall's tau; no claim for few methods."""
    measured = {name: value for name in published if (value := ours.get(name)) is not None}
    if len(measured) < FEWEST:
        return []
    rank = kendalltau([published[name] for name in measured], list(measured.values()))
    alike = sum((published[a] - published[b]) * (measured[a] - measured[b]) > 0 for a, b in combinations(measured, 2))
    order = sorted(measured, key=lambda name: -published[name])
    values = ", ".join(
        f"{name} {format_number(measured[name])}" for name in sorted(measured, key=lambda name: -measured[name])
    )
    holds = bool(rank.statistic > 0) if rank.pvalue < SURE else None
    pairs = f"{alike} of {comb(len(measured), 2)} pairs alike (Kendall's tau {rank.statistic:.2f}, p {rank.pvalue:.2g})"
    return [Claim(f"{of}: {' > '.join(order)}", holds, f"{values}: {pairs}")]


def _text(point: Ratio) -> str:
    around = f" ({point[1][0]:.2f}–{point[1][1]:.2f})" if point[1] else ""
    return f"{format_speedup(point[0])}{around}"
