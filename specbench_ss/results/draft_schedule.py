"""Draft schedule: the recommended server, and its number k of drafted tokens, by requests in flight."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import groupby
from typing import Any

from specbench_ss.results.concurrency import ConcurrencyRow, level_rows, requests_of
from specbench_ss.runs.config import Load
from specbench_ss.runs.records import Run
from specbench_ss.stats.intervals import FEWEST, Interval, pairwise
from specbench_ss.stats.pairs import Pairs, together

VLLM = "vLLM"


@dataclass(frozen=True, slots=True)
class ScheduleEntry:
    """One server with one number of requests in flight.

    group: label of its entry in the file of servers. k: drafted tokens; None if the entry does not state them. speedup:
    time per token of a request, baseline / server. suitable: significantly faster than the baseline, faster in every
    repeat, and not significantly slower than the fastest such server of its group.
    """

    concurrency: int
    method: str
    group: str
    k: int | None
    speedup: float
    speedup_interval: Interval
    suitable: bool = False


@dataclass(frozen=True, slots=True)
class DraftSchedule:
    """Speedups of servers by requests in flight, and the recommended servers.

    levels: measured numbers of requests in flight; a level without entries is off. vllm_groups: those that are served
    by vLLM with several k. single_repeat_levels: numbers of requests in flight at which a server ran once, so that
    nothing is known.
    """

    levels: tuple[int, ...]
    entries: tuple[ScheduleEntry, ...]
    vllm_groups: tuple[str, ...]
    single_repeat_levels: tuple[int, ...] = ()

    @property
    def choices(self) -> dict[int, ScheduleEntry | None]:
        """Return the recommended server for each number of requests in flight; None: no speculation."""
        return self._choices(self.entries)

    def vllm(self) -> dict[str, dict[str, Any]]:
        """Return for each group of vLLM the fields of `--speculative-config` that set its own schedule.

        There are none with a level that ran once: they set a k for every batch size.
        """
        if self.single_repeat_levels:
            return {}
        of_group = {group: [e for e in self.entries if e.group == group] for group in self.vllm_groups}
        found = {group: _vllm_fields(self._choices(entries)) for group, entries in of_group.items()}
        return {group: fields for group, fields in found.items() if fields}

    def _choices(self, entries: Sequence[ScheduleEntry]) -> dict[int, ScheduleEntry | None]:
        """Return the recommended one of these entries at each level."""
        return {level: _choice([entry for entry in entries if entry.concurrency == level]) for level in self.levels}

    def text(self) -> str:
        """Return the recommended servers, as in 'eagle3: k=4 at 1 in flight, k=2 at 4, off from 8'."""
        single = ", ".join(map(str, self.single_repeat_levels))
        return self._text() + (f" ({single} in flight measured once: --repeats 3)" if single else "")

    def _text(self) -> str:
        stretches = _stretches(self.choices)
        groups = {choice.group for choice, _ in stretches if choice}
        if not groups:
            levels = _span([level for _, levels in stretches for level in levels])
            return f"off at {levels} in flight: no server is significantly faster than the baseline"
        common = groups.pop() if len(groups) == 1 else ""
        parts = [f"{_name(choice, common)} at {_span(levels)}" for choice, levels in stretches]
        if stretches[-1][0] is None and not self.single_repeat_levels:
            parts[-1] = f"off from {stretches[-1][1][0]}"
        return f"{common}{': ' * bool(common)}{', '.join([f'{parts[0]} in flight', *parts[1:]])}"

    def as_dict(self) -> dict[str, Any]:
        """Return the schedule as JSON-ready data."""
        choices = {level: choice and choice.method for level, choice in self.choices.items()}
        return {
            "entries": [asdict(entry) for entry in self.entries],
            "choices": choices,
            "single_repeat_levels": list(self.single_repeat_levels),
            "vllm": self.vllm(),
        }


def draft_schedule(run: Run, rows: Sequence[ConcurrencyRow], invalid: Collection[str]) -> DraftSchedule | None:
    """Return the schedule of a run whose servers differ in k; None for another run, or below four questions.

    rows: of the run's load levels; empty if requests ran one at a time. invalid: labels of servers without valid
    numbers. A server that failed on more requests than the baseline is left out of that level.
    """
    groups = _groups(run)
    several = [group for group, depths in groups.items() if len(depths) > 1]
    if not several or _speculates(run):
        return None
    places = {label: (group, k) for group, depths in groups.items() for label, k in depths.items()}
    levels, entries, failed, single = list[int](), list[ScheduleEntry](), 0, _single_repeat_levels(run, invalid)
    for row in rows or level_rows(run, Load()):
        if row.concurrency is None or row.concurrency in single:
            continue
        if row.is_baseline:  # the first row of its level
            failed = row.failed
            levels += [row.concurrency] if row.tokens else []
        elif row.method not in invalid and row.failed <= failed and row.speedup and row.speedup_interval:
            entries.append(
                ScheduleEntry(row.concurrency, row.method, *places[row.method], row.speedup, row.speedup_interval)
            )
    software = {entry["label"]: entry.get("served", {}).get("software") for entry in run.manifest["methods"]}
    of_vllm = [group for group in several if any(software.get(label) == VLLM for label in groups[group])]
    if not entries:
        return None
    return DraftSchedule(tuple(levels), _judged(run, entries), tuple(of_vllm), tuple(single))


def _single_repeat_levels(run: Run, invalid: Collection[str]) -> list[int]:
    """Return the numbers of requests in flight at which a server ran once, as in an interrupted run."""
    repeats = Counter((level.method, level.concurrency) for level in run.concurrency)
    return sorted({level for (label, level), n in repeats.items() if n == 1 and level and label not in invalid})


def _groups(run: Run) -> Mapping[str, Mapping[str, int | None]]:
    """Return k of each server other than the baseline, by group and label."""
    groups: dict[str, dict[str, int | None]] = defaultdict(dict)
    for endpoint in run.manifest["config"].get("endpoints", ()):
        if endpoint["label"] != run.baseline:
            groups[endpoint.get("group") or endpoint["label"]][endpoint["label"]] = endpoint.get("k")
    return groups


def _speculates(run: Run) -> bool:
    """Return True if the baseline drafts tokens, so that no entry is a comparison with speculation off."""
    endpoints = run.manifest["config"].get("endpoints", ())
    stated = any(endpoint.get("k") for endpoint in endpoints if endpoint["label"] == run.baseline)
    return stated or any(row.draft_nodes for row in run.of(run.baseline))


def _judged(run: Run, entries: Sequence[ScheduleEntry]) -> tuple[ScheduleEntry, ...]:
    """Return the entries with their field `suitable`."""
    candidates: dict[tuple[int, str], list[ScheduleEntry]] = defaultdict(list)
    for entry in entries:
        if entry.speedup_interval[0] > 1 and _faster_in_every_repeat(run, entry):
            candidates[entry.concurrency, entry.group].append(entry)
    suitable = {entry for of_group in candidates.values() for entry in _as_fast(run, of_group)}
    return tuple(replace(entry, suitable=entry in suitable) for entry in entries)


def _load(entry: ScheduleEntry) -> Load:
    return Load(entry.concurrency)


def _faster_in_every_repeat(run: Run, entry: ScheduleEntry) -> bool:
    """Return True if the speedup is above 1 in every repeat."""
    samples, baseline = (requests_of(run, label, _load(entry)) for label in (entry.method, run.baseline))
    by_repeat = ([row for row in samples if row.repeat == repeat] for repeat in {row.repeat for row in samples})
    return all((Pairs(rows, baseline).speedup() or 0.0) > 1 for rows in by_repeat)


def _as_fast(run: Run, entries: Sequence[ScheduleEntry]) -> list[ScheduleEntry]:
    """Return the entries that are not significantly slower than the fastest one, by the requests that all answered.

    entries: of one level and group.
    """
    fastest, *others = sorted(entries, key=lambda entry: -entry.speedup)
    samples = [requests_of(run, entry.method, _load(entry)) for entry in (fastest, *others)]
    found = together(samples, levels=_load(fastest) != Load())
    if found.seconds.shape[1] < FEWEST:
        return [fastest]
    intervals = pairwise(*found[:3], run.processes, simultaneous=False, sessions=found.sessions, blocks=found.blocks)
    over_others = intervals[0][1:]  # how many times as fast the fastest one is
    return [fastest, *(entry for entry, (low, _) in zip(others, over_others, strict=True) if low <= 1)]


def _choice(entries: Sequence[ScheduleEntry]) -> ScheduleEntry | None:
    """Return the recommended entry of one level, the smallest suitable k of the fastest group; None without one."""
    suitable = [entry for entry in entries if entry.suitable]
    if not suitable:
        return None
    best = max(suitable, key=lambda entry: entry.speedup)
    return min((entry for entry in suitable if entry.group == best.group), key=lambda entry: entry.k or 0)


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
