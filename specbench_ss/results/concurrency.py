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
    """One method with one number of concurrent requests, all repeats together. waits: quantiles in seconds."""

    concurrency: Col[int, "number of concurrent requests", "requests"]
    method: Col[str, "label of the method or server"]
    requests: Col[int, "sent requests, all repeats together", "requests"]
    failed: Col[int, "failed requests; no other number includes them", "requests"]
    wall_s: Col[
        float,
        "time of all requests together, over all repeats; with one request at a time, the sum of their times",
        "s",
    ]
    tokens: Col[int, "output tokens", "tokens"]
    tokens_per_s: Col[Number, "throughput: tokens / wall_s", "tokens/s"]
    requests_per_s: Col[Number, "successful requests / wall_s", "requests/s"]
    throughput_ratio: Col[Number, "tokens_per_s / that of the baseline with as many concurrent requests", "×"]
    throughput_ratio_interval: Col[Interval | None, Ends("throughput_ratio", "×")]
    speedup: Col[Number, "time per token of a request: baseline / method, paired by prompt", "×"]
    speedup_interval: Col[Interval | None, Ends("speedup", "×")]
    comparison: Col[Comparison, "`baseline`, `faster`, `slower`, `not significant` or `insufficient data`"]
    mean_acceptance_length: Col[Number, "τ; of a server by its metrics, missing if not reported", "tokens"]
    acceptance_rate: Col[
        Number, "accepted tokens / drafted nodes, unlike `summary()`, which divides by draft depth", "0 to 1"
    ]
    waits: dict[str, Any]

    @property
    def is_baseline(self) -> bool:
        """Return True for a row of the baseline."""
        return self.comparison == "baseline"

    @property
    def throughput_comparison(self) -> Comparison:
        """Return how the throughput compares with the baseline's."""
        return "baseline" if self.is_baseline else compare(self.throughput_ratio_interval)


def concurrency_rows(run: Run) -> list[ConcurrencyRow]:
    """Return a row for each number of concurrent requests and method; none if requests ran one at a time."""
    if not run.concurrency:
        return []
    levels = (1, *sorted({level.concurrency for level in run.concurrency}))
    return [row for concurrency in levels for row in level_rows(run, concurrency)]


def level_rows(run: Run, concurrency: int) -> list[ConcurrencyRow]:
    """Return a row for each method with this number of concurrent requests, the baseline first."""
    found: list[ConcurrencyRow] = []
    baseline, plain_rate = requests_of(run, run.baseline, concurrency), None
    for label in sorted(run.labels, key=lambda label: label != run.baseline):
        row = _row(run, label, concurrency, baseline, plain_rate)
        plain_rate = row.tokens_per_s if label == run.baseline else plain_rate
        found.append(row)
    return found


def requests_of(run: Run, label: str, concurrency: int) -> list[SampleRecord]:
    """Return a method's samples with this number of concurrent requests."""
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
    around, speedup = None if itself else times.interval(), times.speedup()
    ratio = 1.0 if itself and rate else safe_div(rate, plain_rate)
    return ConcurrencyRow(
        concurrency=concurrency,
        method=label,
        requests=len(asked),
        failed=len(asked) - len(good),
        wall_s=wall_s,
        tokens=tokens,
        tokens_per_s=rate,
        requests_per_s=safe_div(len(good), wall_s),
        throughput_ratio=ratio,
        throughput_ratio_interval=_scaled(around, safe_div(ratio, speedup)),
        speedup=speedup,
        speedup_interval=around,
        comparison="baseline" if itself else compare(around),
        mean_acceptance_length=safe_div(total(good, "later"), counted(counts, "steps")),
        acceptance_rate=safe_div(counted(counts, "accepted_tokens"), counted(counts, "draft_nodes")),
        waits=latencies(good),
    )


def _scaled(around: Interval | None, factor: float | None) -> Interval | None:
    """Return the interval of a throughput ratio from that of the speedup of requests. factor: ratio / speedup.

    With N requests in flight, throughput is N * tokens / sum of request times (Little's theorem). The two ratios
    therefore differ only by the start and end of a level, when fewer requests are in flight.
    """
    return None if around is None or not factor else (factor * around[0], factor * around[1])


def at_a_time(manifest: Mapping[str, Any]) -> str:
    """Return the numbers of concurrent requests of a run, as '1' or '1, 2, 4'."""
    return ", ".join(map(str, (1, *manifest["config"].get("concurrency", ()))))


def missing(run: Run) -> Iterator[str]:
    """Yield the requested numbers of concurrent requests that are missing: 'vllm with 4 concurrent requests'."""
    measured = {level.key for level in run.concurrency}
    for concurrency in run.manifest["config"].get("concurrency", ()):
        for label in run.labels:
            if any((label, concurrency, repeat) not in measured for repeat in range(run.repeats)):
                yield f"{label} with {concurrency} concurrent requests"
