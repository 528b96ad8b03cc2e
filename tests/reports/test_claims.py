"""Statements of papers compared with results: sure where intervals lie apart, and open where they do not."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pytest

from specbench_ss import registry
from specbench_ss.reports.paper.claims import ahead, all_of, at_most, number_or_none, rising, same_order, smallest
from specbench_ss.results.report import Bench, Claim, Column, Experiment, Grid, Request, Result, Value
from specbench_ss.results.text import interval, interval_of
from tests.tiny import thorough

POINTS = ("series", "k", "speedup", "95 % interval")


@pytest.mark.parametrize("bounds", [(1.25, 1.75), (0.5, 12.5), (-1.5, 0.25)])
def test_intervals_are_read_as_they_are_written(bounds: tuple[float, float]) -> None:
    assert interval_of(interval(bounds)) == pytest.approx(bounds, abs=0.06)


@pytest.mark.parametrize("text", [None, "", "none", 3])
def test_what_is_no_interval_is_none(text: object) -> None:
    assert interval_of(text) is None


def test_one_speedup_is_ahead_of_another_where_intervals_lie_apart() -> None:
    near, far = (1.2, (1.1, 1.3)), (2.0, (1.8, 2.2))
    assert [ahead("", a, b).holds for a, b in ((far, near), (near, far), (near, (1.25, (1.2, 1.4))))] == [
        True,
        False,
        None,
    ]
    assert ahead("", (None, None), near) == Claim("", None, "not measured here")
    assert ahead("", (2.0, None), near).holds is None, "without an interval nothing is sure"
    assert ahead("", far, near).found == "2.00× (1.80–2.20) against 1.20× (1.10–1.30)"


def test_a_ratio_stays_within_its_bound_where_its_whole_interval_does() -> None:
    results = [at_most("", (1.0, around), 1.2).holds for around in ((0.9, 1.2), (1.21, 1.3), (0.9, 1.3), None)]
    assert results == [True, False, None, None]
    assert at_most("", (None, None), 1.2) == Claim("", None, "not measured here")
    assert at_most("", (1.0, (0.9, 1.1)), 1.2).found == "1.00× (0.90–1.10)"


def test_several_hold_where_each_does() -> None:
    yes, no, who = (Claim("", holds, "") for holds in (True, False, None))
    assert [all_of("", of).holds for of in ([yes, yes], [yes, who], [yes, no, who], [])] == [True, None, False, None]
    assert all_of("", [yes, Claim("", True, "", sure=False)]).verdict == "tends to agree"


def test_values_rise() -> None:
    assert rising("", [("a", 1.0), ("c", 2.0)]) == Claim("", True, "a: 1.00, c: 2.00", sure=False)
    assert rising("", [("a", 1.0), ("b", None), ("c", 2.0)]) == Claim("", None, "a: 1.00, b: –, c: 2.00")
    assert rising("", [("a", 1.0), ("b", 1.0)]).verdict == "tends not to" and rising("", [("a", 1.0)]).holds is None


def test_what_is_no_number_is_not_measured() -> None:
    assert [number_or_none(value) for value in (1, 0.5, None, "1", float("nan"))] == [1.0, 0.5, None, None, None]


def test_one_is_the_smallest() -> None:
    assert smallest("", "a", {"b": 20.0, "a": 3.0}) == Claim("", True, "a 3, b 20")
    assert smallest("", "b", {"b": 20.0, "a": 3.0}).holds is False


def test_an_order_is_the_published_one_the_opposite_or_open() -> None:
    theirs = {name: float(10 - i) for i, name in enumerate("abcdef")}
    (same,), (other,) = (same_order(theirs, {n: s * v for n, v in theirs.items()}, "qa") for s in (1, -1))
    assert same.holds and other.holds is False and same.statement == "qa: a > b > c > d > e > f"
    assert "15 of 15 pairs alike" in same.found and "0 of 15 pairs alike" in other.found
    (mixed,) = same_order(theirs, dict(zip("abcdef", (3.0, 6.0, 1.0, 5.0, 2.0, 4.0), strict=True)), "qa")
    assert mixed.holds is None
    assert same_order(theirs, {"a": 1.0, "b": 2.0}, "qa") == [], "two methods have no order to speak of"
    (level,) = same_order(theirs, dict.fromkeys("abcdef", 1.0), "qa")
    assert level.holds is None, "where all are equal there is no order"


def claims_of(name: str, columns: tuple[str, ...], rows: Sequence[tuple[Value, ...]]) -> list[bool | None]:
    kind: type[Experiment] = registry.load(registry.EXPERIMENTS, name)
    grid = Grid("speedup", tuple(Column(title) for title in columns), tuple(rows))
    return [claim.holds for claim in kind().claims(Result((grid,)))]


def points(series: str, *speedups: tuple[Value, float]) -> list[tuple[Value, ...]]:
    """Rows of a series, (place, speedup), with an interval of a hundredth to each side."""
    return [(series, x, value, f"{value - 0.01:.2f}–{value + 0.01:.2f}") for x, value in speedups]


def by_k(*speedups: float) -> Iterator[tuple[int, float]]:
    return enumerate(speedups, start=1)


FALLING = (1.2, 1.1, 1.0, 0.9, 0.8, 0.7)
WHOLE = points("without pruning", *by_k(*FALLING))
LEVEL: list[tuple[Value, ...]] = [
    (series, k, 1.0, "0.9–1.1") for series in ("with pruning", "without pruning") for k in range(1, 7)
]
TOP_K = [
    row
    for name, x in (("SS", 1.9), ("Medusa", 1.6))
    for row in points(name, *((k, x - k / 100) for k in (1, 5, 10, 50)))
]
TRAINED = ("streams", "MSA layers", "stream 1", "τ", "speedup", "95 % interval")
BY_LAYERS: list[tuple[Value, ...]] = [("embeddings", n, 0.5, 1.5 + n / 10, 1.0 + (n == 4), "") for n in (1, 2, 4, 8)]
ROTATED: list[tuple[Value, ...]] = [
    *(("stream embeddings", n, 0.5, 2.0, 1.0, "") for n in (2, 4)),
    *(("value rotation", n, 0.5, 1.0 + n / 10, 1.0, "") for n in (2, 4)),
]
SEEN: list[tuple[Value, ...]] = [("base", 0, 0.9), *(("240 steps", n, 0.5 + n / 10) for n in (0, 1, 2))]
STATES = ("state", "tokens ahead", "layer 4", "layer 8")
TABLE = ("task", "method", "ours: lab", "95 % interval", "Vicuna-7B", "Vicuna-13B")
ORDERED: list[tuple[Value, ...]] = [
    ("qa", name, 1.5 - i / 10, "", 2.5 - i / 10, None if i else 2.0)
    for i, name in enumerate(("Eagle", "Hydra", "Medusa", "PLD", "SS-Lossless"))
]


@pytest.mark.parametrize(
    ("name", "columns", "rows", "holds"),
    [
        ("figure-10", POINTS, [*points("with pruning", *by_k(1.1, 1.2, 1.3, 1.25, 1.2, 1.1)), *WHOLE], [True, True]),
        ("figure-10", POINTS, [*points("with pruning", *by_k(*FALLING)), *WHOLE], [False, None]),
        ("figure-10", POINTS, LEVEL, [None, None]),
        ("figure-10", POINTS, LEVEL[:2], [None, None]),  # not measured
        ("figure-13", POINTS, points("ss", ("chain", 1.0), ("tree", 1.2), ("tree, pruned", 1.3)), [True, True]),
        ("figure-13", POINTS, points("ss", ("chain", 1.0), ("tree", 0.9), ("tree, pruned", 1.3)), [False, True]),
        ("figure-13", POINTS, points("ss", ("chain", 1.0)), [None, None]),
        ("figure-12b", POINTS, TOP_K, [True, True]),
        ("figure-12b", POINTS, TOP_K[1:], [None, None]),
        ("figure-21", POINTS, [("SS-Lossless", 4, 1.3, "1.2–1.4")], [True]),
        ("figure-11", TRAINED, BY_LAYERS, [True]),
        ("figure-11", TRAINED, [*BY_LAYERS, ("embeddings", 9, 0.5, None, 1.0, "")], [None]),
        ("figure-12a", TRAINED, ROTATED, [True, True]),
        ("figure-4", ("model", "gamma", "right tokens"), SEEN, [True]),
        ("figure-5", STATES, [("stream", 1, 0.5, 0.8), ("Medusa head", 1, None, 0.7)], [True, True]),
        ("figure-5", STATES, [("stream", 1, 0.5, 0.8), ("Medusa head", 1, None, None)], [True, None]),
        ("table-2", TABLE, ORDERED, [True]),  # decided by the order of their methods
        ("table-2", TABLE, ORDERED[:3], []),
    ],
)
def test_statements_of_the_papers_are_compared_with_the_rows(
    name: str, columns: tuple[str, ...], rows: list[tuple[Value, ...]], holds: list[bool | None]
) -> None:
    assert claims_of(name, columns, rows) == holds


@pytest.mark.parametrize(
    "name", [pytest.param("figure-8", marks=thorough), pytest.param("figure-9", marks=thorough), "parameters"]
)
def test_experiments_without_weights_are_compared_with_the_papers(name: str) -> None:
    experiment = registry.load(registry.EXPERIMENTS, name)()
    claims = experiment.claims(experiment.run(Bench(Request(), None, None, None)))
    assert claims and all(claim.found for claim in claims)
    assert {c.holds for c in claims} == ({False} if name in ("figure-9", "parameters") else {True}), claims
