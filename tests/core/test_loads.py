"""Load levels: rates and concurrencies are never mixed; goodput of hand-made times."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from specbench_ss.reports.html.report import HtmlReport
from specbench_ss.results.analysis import analyse
from specbench_ss.results.checks import served_checks
from specbench_ss.results.concurrency import concurrency_rows, missing
from specbench_ss.results.table import levels_markdown
from specbench_ss.runs.config import Load
from specbench_ss.runs.records import ConcurrencyResult, Run, SampleRecord
from specbench_ss.runs.run_dir import read_concurrency, read_run
from specbench_ss.user_files import encoded
from tests.tiny import thorough

LOADS = (Load(2), Load(None, 2.0))


@pytest.fixture
def run(make_run: Callable[..., Path]) -> Run:
    """A run whose requests take a second longer to the first token at 2/s than with two in flight."""
    run = read_run(make_run(labels=("ar", "ss"), categories=("qa",), questions=4))
    run.manifest["config"] |= {"concurrency": [2], "rate": [2.0]}
    for load, seconds in zip(LOADS, (0.0, 1.0), strict=True):
        for label in run.labels:
            add(run, load, [later(row, seconds) for row in run.of(label)])
    return run


def later(row: SampleRecord, seconds: float) -> SampleRecord:
    return replace(row, prefill_s=(row.prefill_s or 0.0) + seconds, wall_s=(row.wall_s or 0.0) + seconds)


def add(run: Run, load: Load, rows: list[SampleRecord]) -> None:
    """Add a level of ten seconds."""
    level = ConcurrencyResult(rows[0].method, load.concurrency, 0, 0.0, 10.0, 10.0, len(rows), rate=load.rate)
    run.concurrency.append(level)
    run.requests += [replace(row, concurrency=load.concurrency, rate=load.rate) for row in rows]


def repeat(run: Run, slower: float = 1.0) -> None:
    """Add a second repeat of every level, in which the method takes this many times as long."""
    run.manifest["config"]["repeats"] = 2
    run.concurrency += [replace(level, repeat=1) for level in run.concurrency]
    for row in [*run.requests]:
        times = slower if row.method == "ss" else 1.0
        run.requests.append(replace(row, repeat=1, wall_s=times * (row.wall_s or 0.0)))


def test_a_rate_of_two_is_not_a_concurrency_of_two(run: Run) -> None:
    rows = concurrency_rows(run)
    assert [(str(row.load), row.method) for row in rows] == [(n, m) for n in ("1", "2", "2/s") for m in ("ar", "ss")]
    assert all(row.requests == 4 for row in rows)
    for two, rate in zip(rows[2:4], rows[4:], strict=True):
        assert rate.waits["ttft_s_p99"] == pytest.approx(two.waits["ttft_s_p99"] + 1)
        assert rate.waits["tpot_s_p99"] == two.waits["tpot_s_p99"]
    for name, records in (("requests", run.requests), ("concurrency", run.concurrency)):
        (run.path / f"{name}.jsonl").write_bytes(b"".join(map(encoded, records)))
    assert read_concurrency(run.path) == (run.concurrency, run.requests)
    assert not list(missing(run))
    run.concurrency = [level for level in run.concurrency if level.key != ("ss", Load(None, 2.0), 0)]
    assert list(missing(run)) == ["ss at 2 requests/s"]


@pytest.mark.parametrize(
    ("limits", "met"),
    [
        ({"ttft": 500.0, "tpot": 35.0}, 2),
        ({"ttft": 500.0}, 3),
        ({"tpot": 35.0}, 3),
        ({"e2el": 150.0}, 1),
        ({"ttft": 1.0}, 0),
        (None, None),
    ],
)
def test_goodput_counts_requests_within_all_limits(limits: dict[str, float] | None, met: int | None, run: Run) -> None:
    first = run.of("ar")[0]
    run.concurrency, run.requests = [], []
    times = ((0.1, 0.01, 10), (0.1, 0.04, 10), (0.6, 0.01, 10), (0.1, 9.0, 0))  # the last one has one token: no TPOT
    rows = [
        replace(first, turn=i, tokens=1 + n, prefill_tokens=1, prefill_s=a, decode_s=b * n, wall_s=a + b * n)
        for i, (a, b, n) in enumerate(times)
    ]
    add(run, Load(None, 2.0), [*rows, replace(first, turn=4, status="failed", error="refused")])
    run.manifest["goodput"] = limits
    (row,) = [row for row in concurrency_rows(run) if (row.method, row.rate) == ("ar", 2.0)]
    assert (row.requests, row.failed) == (5, 1)
    assert row.goodput == (None if met is None else pytest.approx(met / 10))
    assert row.slo_attainment == (None if met is None else pytest.approx(met / 5))


@thorough
def test_tables_show_rates_and_goodput_where_there_are_some(run: Run, tmp_path: Path) -> None:
    def page() -> str:
        HtmlReport().write(analyse(run), tmp_path / "page.html")
        return (tmp_path / "page.html").read_text()

    def text() -> str:
        return levels_markdown(analyse(run))

    assert "| 2/s |" in text() and "goodput" not in text()
    assert "2/s arrivals" in page() and "arrivals per second (/s)" in page() and "within the limits" not in page()
    run.manifest["goodput"] = {"ttft": 500.0}
    assert "ttft ≤ 500 ms" in text() and "| 0% |" in text()
    assert "within the limits" in page() and "ttft ≤ 500 ms" in page()
    run.concurrency, run.manifest["config"] = run.concurrency[:2], run.manifest["config"] | {"rate": []}
    assert "arrivals per second (/s)" not in page() and "2/s" not in text()


def test_only_a_closed_loop_has_a_throughput_ratio_and_a_comparison(run: Run) -> None:
    """The arrivals of an open loop set its throughput, so its ratio would compare the drains of the last requests."""
    repeat(run)
    for row in concurrency_rows(run):
        closed, baseline = row.rate is None, row.method == "ar"
        assert (row.throughput_ratio is not None) == closed, (row.load, row.method)
        assert (row.speedup_interval is not None) == (closed and not baseline), (row.load, row.method)
        assert (row.comparison is None) == (not closed and not baseline), (row.load, row.method)
        assert row.speedup is not None and row.tokens_per_s is not None


def test_the_relative_step_time_of_a_level_is_tau_over_the_speedup_of_later_tokens(run: Run) -> None:
    def per(name: str, method: str) -> float:
        rows = run.of(method)
        return sum(row.decode_s or 0.0 for row in rows) / sum(getattr(row, name) or 0 for row in rows)

    for level in run.concurrency:
        level.steps = sum(row.steps or 0 for row in run.of(level.method))
    for row in concurrency_rows(run):
        expected = per("steps", row.method) / per("steps", "ar") if row.rate is None else None
        assert row.relative_step_time == (expected and pytest.approx(expected)), (row.load, row.method)
    summary = {row.method: row.relative_step_time for row in analyse(run).overall}
    assert summary["ss"] == pytest.approx(per("steps", "ss") / per("steps", "ar"))
    assert {row.relative_step_time for row in concurrency_rows(run, {"ss"}) if row.method == "ss"} == {None}


@pytest.mark.parametrize("load", LOADS)
def test_times_of_an_open_loop_are_no_finding(load: Load, run: Run) -> None:
    """Its requests wait for each other, so their times do not compare the servers alone."""
    for row in run.requests:
        if (row.method, row.load) == ("ss", load):
            row.wall_s = 20 * (row.wall_s or 0.0)
    repeat(run)
    found = [check.name for check in served_checks(run)]
    assert ("concurrency-verdicts" in found) == (load.rate is None)


def test_the_interval_of_a_level_covers_how_much_its_repeats_differ(run: Run) -> None:
    def half(slower: float) -> float:
        both = replace(run, concurrency=[*run.concurrency], requests=[*run.requests])
        repeat(both, slower)
        (row,) = (row for row in concurrency_rows(both) if (row.method, row.load) == ("ss", Load(2)))
        low, high = row.speedup_interval or (0.0, 0.0)
        return math.log(high / low) / 2

    single = next(row for row in concurrency_rows(run) if (row.method, row.load) == ("ss", Load()))
    low, high = single.speedup_interval or (0.0, 0.0)
    assert half(1.0) == pytest.approx(math.log(high / low) / 2)
    assert half(1.05) > half(1.0) and half(1.5) > 5 * half(1.05)  # one degree of freedom
