"""Results of load levels: throughput, latency, goodput and acceptance."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated as Col
from typing import Any

from specbench_ss.results.summary import Number, implied_step_time, latencies, safe_div, total
from specbench_ss.results.text import format_number, format_speedup
from specbench_ss.runs.columns import Ends
from specbench_ss.runs.config import GOODPUT, Load, loads_of
from specbench_ss.runs.records import Counted, Run, SampleRecord, counted
from specbench_ss.stats.intervals import Comparison, Interval, compare
from specbench_ss.stats.pairs import Pairs, mean_acceptance_length


@dataclass(frozen=True, slots=True)
class ConcurrencyRow:
    """One method at one load, all repeats together. waits: quantiles in seconds."""

    concurrency: Col[int | None, "number of concurrent requests; missing with a rate", "requests"]
    rate: Col[Number, "open loop: arrivals per second, whose times count from the planned arrival", "requests/s"]
    method: Col[str, "label of the method or server"]
    requests: Col[int, "planned requests, all repeats together", "requests"]
    failed: Col[int, "failed requests; no other number includes them", "requests"]
    wall_s: Col[
        float,
        "time of all requests together, over all repeats; with one request at a time, the sum of their times",
        "s",
    ]
    tokens: Col[int, "output tokens", "tokens"]
    tokens_per_s: Col[Number, "throughput: tokens / wall_s", "tokens/s"]
    requests_per_s: Col[Number, "successful requests / wall_s", "requests/s"]
    goodput: Col[Number, "requests within all limits of --goodput / wall_s; missing without limits", "requests/s"]
    slo_attainment: Col[Number, "requests within all limits / planned requests", "0 to 1"]
    throughput_ratio: Col[
        Number, "tokens_per_s / that of the baseline; missing with a rate, which sets the throughput", "×"
    ]
    speedup: Col[Number, "time per token of a request: baseline / method, paired by prompt", "×"]
    speedup_interval: Col[Interval | None, Ends("speedup", "×")]
    comparison: Col[
        Comparison | None,
        "by that interval: `baseline`, `faster`, `slower`, `not significant`, `insufficient data` (also of a level "
        "that ran once), or `invalid`; both are missing with a rate",
    ]
    mean_acceptance_length: Col[Number, "τ; of a server by its metrics, missing if not reported", "tokens"]
    relative_step_time: Col[
        Number, "τ / speedup of the tokens after the first, as in `summary()`; missing with a rate, or if invalid", "×"
    ]
    acceptance_rate: Col[
        Number, "accepted tokens / drafted nodes, unlike `summary()`, which divides by draft depth", "0 to 1"
    ]
    same_output: Col[
        Number,
        "greedy outputs of a server that equal the baseline's of one request at a time; "
        "of the baseline itself, what its batches change",
        "0 to 1",
    ]
    waits: dict[str, Any]

    @property
    def load(self) -> Load:
        """Return the load."""
        return Load(self.concurrency, self.rate)

    @property
    def is_baseline(self) -> bool:
        """Return True for a row of the baseline."""
        return self.comparison == "baseline"


def concurrency_rows(run: Run, invalid: Collection[str] = ()) -> list[ConcurrencyRow]:
    """Return a row for each load and method, rates last; none if requests ran one at a time.

    invalid: labels of the methods without a speedup.
    """
    if not run.concurrency:
        return []
    loads = sorted({level.load for level in run.concurrency}, key=lambda load: (load.rate or 0, load.concurrency or 0))
    return [row for load in (Load(), *loads) for row in level_rows(run, load, invalid)]


def level_rows(run: Run, load: Load, invalid: Collection[str] = ()) -> list[ConcurrencyRow]:
    """Return a row for each method at this load, the baseline first."""
    found: list[ConcurrencyRow] = []
    baseline, plain = requests_of(run, run.baseline, load), None
    for label in sorted(run.labels, key=lambda label: label != run.baseline):
        row = _row(run, label, load, baseline, plain)
        if label in invalid:
            row = replace(row, comparison="invalid", speedup=None, speedup_interval=None)
            row = replace(row, throughput_ratio=None, relative_step_time=None)
        plain = row.tokens_per_s if label == run.baseline else plain
        found.append(row)
    return found


def requests_of(run: Run, label: str, load: Load) -> list[SampleRecord]:
    """Return a method's samples at this load."""
    if load == Load():
        return run.of(label)
    return [row for row in run.requests if (row.method, row.load) == (label, load)]


def _row(run: Run, label: str, load: Load, baseline: Sequence[SampleRecord], plain: float | None) -> ConcurrencyRow:
    """Return the row of a method. baseline, plain: requests and tokens/s of the baseline at the same load."""
    asked = requests_of(run, label, load)
    good = [row for row in asked if row.ok]
    levels = [level for level in run.concurrency if (level.method, level.load) == (label, load)]
    alone = load == Load()
    wall_s = total(good, "wall_s") if alone else sum(level.wall_s for level in levels)
    counts: Sequence[Counted] = good if alone else levels
    limits = run.manifest.get("goodput")
    met = sum(_within(row, limits) for row in good) if limits else None
    tokens, throughput = int(total(good, "tokens")), safe_div(total(good, "tokens"), wall_s)
    itself = label == run.baseline
    times = Pairs(asked, baseline, processes=run.processes, levels=not alone)
    closed = load.rate is None  # else the arrivals set the throughput, and requests wait for each other
    around = times.interval() if closed and not itself else None
    verdict: Comparison | None = "baseline" if itself else compare(around) if closed else None
    ratio = safe_div(throughput, throughput if itself else plain) if closed else None
    tau = mean_acceptance_length(total(good, "later"), counted(counts, "steps"))
    return ConcurrencyRow(
        concurrency=load.concurrency,
        rate=load.rate,
        method=label,
        requests=len(asked),
        failed=len(asked) - len(good),
        wall_s=wall_s,
        tokens=tokens,
        tokens_per_s=throughput,
        requests_per_s=safe_div(len(good), wall_s),
        goodput=safe_div(met, wall_s),
        slo_attainment=safe_div(met, len(asked)),
        throughput_ratio=ratio,
        speedup=times.speedup(),
        speedup_interval=around,
        comparison=verdict,
        mean_acceptance_length=tau,
        relative_step_time=implied_step_time(run, times.own, times.other, tau) if closed else None,
        acceptance_rate=safe_div(counted(counts, "accepted_tokens"), counted(counts, "draft_nodes")),
        same_output=None if itself and alone else _same_output(run, good),
        waits=latencies(good),
    )


def _same_output(run: Run, rows: Sequence[SampleRecord]) -> float | None:
    """Return the share of first turns whose greedy output is the baseline's first one of one request at a time.

    Later turns may have other prompts.
    """
    if not run.served or run.manifest["config"]["temperature"]:
        return None
    alone = {row.question_id: _output(row) for row in run.of(run.baseline) if row.ok and not (row.repeat or row.turn)}
    same = [_output(row) == alone[row.question_id] for row in rows if not row.turn and row.question_id in alone]
    return safe_div(sum(same), len(same))


def _output(row: SampleRecord) -> Any:
    return row.token_ids or (row.text, row.reasoning or "")


def _within(row: SampleRecord, limits: Mapping[str, float]) -> bool:
    """Return whether a good request is within all limits, in milliseconds; an output of one token has a TPOT of 0.

    A TPOT that is not known, since the output came at once, is at most the whole time per token.
    """
    tpot = (row.wall_s or 0.0) / (row.tokens or 1) if row.decode_s is None else row.tpot_s
    times = zip(GOODPUT, (row.prefill_s, tpot, row.wall_s), strict=True)
    return all((seconds or 0.0) * 1000 <= limits.get(name, math.inf) for name, seconds in times)


def limits_text(manifest: Mapping[str, Any]) -> str:
    """Return the limits of --goodput as 'ttft ≤ 500 ms, tpot ≤ 50 ms'; '' without limits."""
    limits = manifest.get("goodput") or {}
    return ", ".join(f"{name} ≤ {limits[name]:g} ms" for name in GOODPUT if name in limits)


def at_a_time(manifest: Mapping[str, Any]) -> str:
    """Return the numbers of concurrent requests of a run, as '1' or '1, 2, 4'."""
    return ", ".join(map(str, (1, *manifest["config"].get("concurrency", ()))))


def rates(manifest: Mapping[str, Any]) -> str:
    """Return the arrivals per second of a run, as '2/s, 4/s'; '' without open loops."""
    return ", ".join(map(str, loads_of((), manifest["config"].get("rate", ()))))


def kv_caches(manifest: Mapping[str, Any]) -> dict[str, tuple[str, int | None]]:
    """Return each server's KV cache as text, and its tokens.

    The text is '9,216 tokens, 2.25 requests of 4,096 tokens, 0.75× plain', with the first server's label, or the reason
    why it is not known.
    """
    found: dict[str, tuple[str, int | None]] = {}
    for label, served in ((entry["label"], entry.get("served", {})) for entry in manifest["methods"]):
        tokens, requests = (served.get(f"kv_cache_{name}") for name in ("size_tokens", "max_concurrency"))
        parts = [f"{tokens:,} tokens" if tokens else served.get("kv_cache", "not reported")]
        if tokens and requests:
            parts.append(f"{format_number(requests)} requests of {tokens / requests:,.0f} tokens")
        first, (_, most) = next(iter(found.items()), ("", ("", None)))
        if share := safe_div(tokens, most):
            parts.append(f"{format_speedup(share)} {first}")
        found[label] = ", ".join(parts), tokens
    return found


def missing(run: Run) -> Iterator[str]:
    """Yield the requested levels that are missing: 'vllm with 4 concurrent requests'."""
    measured, config = {level.key for level in run.concurrency}, run.manifest["config"]
    for load in loads_of(config.get("concurrency", ()), config.get("rate", ())):
        for label in run.labels:
            if any((label, load, repeat) not in measured for repeat in range(run.repeats)):
                yield f"{label} {load.phrase}"
