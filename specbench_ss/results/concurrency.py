"""Concurrency results: throughput, latency and acceptance with several requests at a time."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated as Col
from typing import Any

from specbench_ss.results.summary import (
    Counted,
    Number,
    PairedTimes,
    counted,
    latencies,
    paired,
    safe_div,
    total,
)
from specbench_ss.runs.columns import Ends
from specbench_ss.runs.records import Run, SampleRecord
from specbench_ss.stats import Comparison, Interval, compare


@dataclass(frozen=True, slots=True)
class ConcurrencyRow:
    """One method with so many requests in flight, its repeats together. waits: quantiles in seconds."""

    concurrency: Col[int, "requests in flight at a time", "requests"]
    method: Col[str, "label of the server"]
    requests: Col[int, "requests that were sent, all repeats together", "requests"]
    failed: Col[int, "of them, requests without a whole answer; no other number includes them", "requests"]
    wall_s: Col[float, "time of all requests together; with one in flight, the sum of their times", "s"]
    tokens: Col[int, "tokens of all answers", "tokens"]
    tokens_per_s: Col[Number, "throughput: tokens over wall_s", "tokens/s"]
    requests_per_s: Col[Number, "answers over wall_s", "requests/s"]
    throughput_ratio: Col[Number, "tokens_per_s over the baseline's with as many in flight", "×"]
    speedup: Col[Number, "of single requests: the baseline's seconds per token over its own, paired by prompt", "×"]
    speedup_interval: Col[Interval | None, Ends("speedup", "×")]
    comparison: Col[Comparison, "`reference`, `faster`, `slower`, `not significant` or `insufficient data`"]
    mean_acceptance_length: Col[
        Number, "tokens per step by the server's own counts; missing where not measured", "tokens"
    ]
    acceptance_rate: Col[Number, "accepted over drafted tokens, by the same counts", "0 to 1"]
    waits: dict[str, Any]


def concurrency_rows(run: Run) -> list[ConcurrencyRow]:
    """Return a row for each number of requests in flight and method; none of a run that has one in flight alone."""
    if not run.concurrency:
        return []
    found: list[ConcurrencyRow] = []
    for concurrency in (1, *sorted({level.concurrency for level in run.concurrency})):
        baseline, plain_rate = requests_of(run, run.baseline, concurrency), None
        for label in sorted(run.labels, key=lambda label: label != run.baseline):
            row = _row(run, label, concurrency, baseline, plain_rate)
            plain_rate = row.tokens_per_s if label == run.baseline else plain_rate
            found.append(row)
    return found


def requests_of(run: Run, label: str, concurrency: int) -> list[SampleRecord]:
    """Return a method's samples with so many requests in flight."""
    if concurrency == 1:
        return run.of(label)
    return [row for row in run.requests if (row.method, row.concurrency) == (label, concurrency)]


def _row(
    run: Run, label: str, concurrency: int, baseline: Sequence[SampleRecord], plain_rate: float | None
) -> ConcurrencyRow:
    asked = requests_of(run, label, concurrency)
    good = [row for row in asked if row.ok]
    levels = [level for level in run.concurrency if (level.method, level.concurrency) == (label, concurrency)]
    wall_s = sum(level.wall_s for level in levels) if concurrency > 1 else total(good, "wall_s")
    counts: Sequence[Counted] = levels if concurrency > 1 else good
    tokens, rate = int(total(good, "tokens")), safe_div(total(good, "tokens"), wall_s)
    itself = label == run.baseline
    times = PairedTimes(*paired(asked, baseline))
    around = None if itself else times.interval()
    return ConcurrencyRow(
        concurrency=concurrency,
        method=label,
        requests=len(asked),
        failed=len(asked) - len(good),
        wall_s=wall_s,
        tokens=tokens,
        tokens_per_s=rate,
        requests_per_s=safe_div(len(good), wall_s),
        throughput_ratio=1.0 if itself and rate else safe_div(rate, plain_rate),
        speedup=times.speedup(),
        speedup_interval=around,
        comparison="reference" if itself else compare(around),
        mean_acceptance_length=safe_div(total(good, "later"), counted(counts, "steps")),
        acceptance_rate=safe_div(counted(counts, "accepted_tokens"), counted(counts, "draft_nodes")),
        waits=latencies(good),
    )


def at_a_time(manifest: Mapping[str, Any]) -> str:
    """Return how many requests were made at a time, as '1' or '1, 2, 4'."""
    return ", ".join(map(str, (1, *manifest["config"].get("concurrency", ()))))


def missing(run: Run) -> Iterator[str]:
    """Yield the levels that were asked for and are not there, as 'vllm with 4 in flight'."""
    there = {level.key for level in run.concurrency}
    for concurrency in run.manifest["config"].get("concurrency", ()):
        for label in run.labels:
            if any((label, concurrency, repeat) not in there for repeat in range(run.repeats)):
                yield f"{label} with {concurrency} in flight"
