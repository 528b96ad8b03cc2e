"""Draft schedule: the recommended server, and its number k of drafted tokens, by requests in flight."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import groupby
from typing import Any

from specbench_ss.results.concurrency import ConcurrencyRow, level_rows
from specbench_ss.runs.config import Load
from specbench_ss.runs.records import Run
from specbench_ss.stats import Interval

VLLM = "vLLM"


@dataclass(frozen=True, slots=True)
class ScheduleEntry:
    """One server with one number of requests in flight.

    group: label of its entry in the file of servers. k: drafted tokens; None if the entry does not state them.
    """

    concurrency: int
    method: str
    group: str
    k: int | None
    throughput_ratio: float
    throughput_ratio_interval: Interval


@dataclass(frozen=True, slots=True)
class DraftSchedule:
    """Throughput ratios of servers by requests in flight, and the recommended servers.

    entries: in order of concurrency. vllm_groups: those that are served by vLLM with several k.
    """

    entries: tuple[ScheduleEntry, ...]
    vllm_groups: tuple[str, ...]

    @property
    def choices(self) -> dict[int, ScheduleEntry | None]:
        """Return the recommended server for each number of requests in flight; None: no speculation."""
        return _choices(self.entries)

    def vllm(self) -> dict[str, dict[str, Any]]:
        """Return for each group of vLLM the fields of `--speculative-config` that set its own schedule."""
        of_group = {group: [e for e in self.entries if e.group == group] for group in self.vllm_groups}
        found = {group: _vllm_fields(_choices(entries)) for group, entries in of_group.items()}
        return {group: fields for group, fields in found.items() if fields}

    def text(self) -> str:
        """Return the recommended servers, as in 'eagle3: k=4 at 1 in flight, k=2 at 4, off from 8'."""
        stretches = _stretches(self.choices)
        groups = {choice.group for choice, _ in stretches if choice}
        if not groups:
            levels = _span([level for _, levels in stretches for level in levels])
            return f"off at {levels} in flight: no server has a throughput significantly above the baseline's"
        common = groups.pop() if len(groups) == 1 else ""
        parts = [f"{_name(choice, common)} at {_span(levels)}" for choice, levels in stretches]
        if stretches[-1][0] is None:
            parts[-1] = f"off from {stretches[-1][1][0]}"
        return f"{common}{': ' * bool(common)}{', '.join([f'{parts[0]} in flight', *parts[1:]])}"

    def as_dict(self) -> dict[str, Any]:
        """Return the schedule as JSON-ready data."""
        choices = {level: choice and choice.method for level, choice in self.choices.items()}
        return {"entries": [asdict(entry) for entry in self.entries], "choices": choices, "vllm": self.vllm()}


def draft_schedule(run: Run, rows: Sequence[ConcurrencyRow], invalid: Collection[str]) -> DraftSchedule | None:
    """Return the schedule of a run whose servers differ in k; None for another run, or below four questions.

    rows: of the run's load levels; empty if requests ran one at a time. Those of open loops have no throughput ratio
    and no entry. invalid: labels of servers without valid numbers. A server that failed on more requests than the
    baseline is left out of that level.
    """
    groups = _groups(run)
    several = [group for group, depths in groups.items() if len(depths) > 1]
    if not several:
        return None
    places = {label: (group, k) for group, depths in groups.items() for label, k in depths.items()}
    entries, failed = list[ScheduleEntry](), 0
    for row in rows or level_rows(run, Load()):
        failed = row.failed if row.is_baseline else failed  # the first row of its level
        if row.method in places and row.method not in invalid and row.failed <= failed:
            entries += _entries(row, *places[row.method])
    software = {entry["label"]: entry.get("served", {}).get("software") for entry in run.manifest["methods"]}
    of_vllm = [group for group in several if any(software.get(label) == VLLM for label in groups[group])]
    return DraftSchedule(tuple(entries), tuple(of_vllm)) if entries else None


def _groups(run: Run) -> Mapping[str, Mapping[str, int | None]]:
    """Return k of each server other than the baseline, by group and label."""
    groups: dict[str, dict[str, int | None]] = defaultdict(dict)
    for endpoint in run.manifest["config"].get("endpoints", ()):
        if endpoint["label"] != run.baseline:
            groups[endpoint.get("group") or endpoint["label"]][endpoint["label"]] = endpoint.get("k")
    return groups


def _entries(row: ConcurrencyRow, group: str, k: int | None) -> list[ScheduleEntry]:
    """Return the entry of a row; none without an interval."""
    concurrency, ratio, around = row.concurrency, row.throughput_ratio, row.throughput_ratio_interval
    if concurrency is None or ratio is None or around is None:
        return []
    return [ScheduleEntry(concurrency, row.method, group, k, ratio, around)]


def _choices(entries: Sequence[ScheduleEntry]) -> dict[int, ScheduleEntry | None]:
    """Return the recommended entry of each level. entries: in order of concurrency."""
    return {level: _choice(list(of)) for level, of in groupby(entries, key=lambda entry: entry.concurrency)}


def _choice(entries: Sequence[ScheduleEntry]) -> ScheduleEntry | None:
    """Return the recommended entry of one level; None if no interval lies above 1.

    Of the group of the highest ratio, it is the smallest k whose interval lies above 1 and contains or exceeds that
    ratio: it is not significantly worse.
    """
    faster = [entry for entry in entries if entry.throughput_ratio_interval[0] > 1]
    if not faster:
        return None
    best = max(faster, key=lambda entry: entry.throughput_ratio)
    as_good = [e for e in faster if e.group == best.group and e.throughput_ratio_interval[1] >= best.throughput_ratio]
    return min(as_good, key=lambda entry: entry.k or 0)


def _stretches(choices: Mapping[int, ScheduleEntry | None]) -> list[tuple[ScheduleEntry | None, list[int]]]:
    """Return consecutive levels with the same recommended server: the first choice, and the levels."""
    runs = [list(of) for _, of in groupby(choices.items(), key=lambda item: item[1] and item[1].method)]
    return [(run[0][1], [level for level, _ in run]) for run in runs]


def _span(levels: Sequence[int]) -> str:
    return f"{levels[0]}" if len(levels) == 1 else f"{levels[0]} to {levels[-1]}"


def _name(choice: ScheduleEntry | None, common: str) -> str:
    """Return a choice as text. common: the group of all choices, which is not repeated; '' if they differ."""
    if choice is None:
        return "off"
    parts = ["" if common else choice.group, "" if choice.k is None else f"k={choice.k}"]
    return " ".join(filter(None, parts)) or "on"


def _vllm_fields(choices: Mapping[int, ScheduleEntry | None]) -> dict[str, Any]:
    """Return vLLM's schedule: inclusive ranges of batch sizes with their k; empty if speculation is always off.

    A choice holds up to the next level, the last one for all larger batches, as vLLM extends the last range.
    """
    found = [(choice.k or 0 if choice else 0, levels) for choice, levels in _stretches(choices)]
    most = max((k for k, _ in found), default=0)
    if not most:
        return {}
    starts = [1, *(levels[0] for _, levels in found[1:])]
    ends = [*(start - 1 for start in starts[1:]), found[-1][1][-1]]
    ranges = [[start, end, k] for start, end, (k, _) in zip(starts, ends, found, strict=True)]
    several = {"num_speculative_tokens_per_batch_size": ranges} if len(ranges) > 1 else {}
    return {"num_speculative_tokens": most, **several}
