"""Outliers: samples that took far longer than their steps, or tokens, take in the method's other samples.

One sample of forty that takes eight times as long turns a headline, and an interval cannot separate it from a
difference of the questions. A step takes about as long in every sample of a method, so such a sample stands out.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median, median_low

import numpy as np

from specbench_ss.results.findings import Finding
from specbench_ss.results.text import format_number
from specbench_ss.runs.records import Key, Run, SampleRecord
from specbench_ss.stats.intervals import FEWEST, Floats

LEAST = 2.2  # times as long as usual: contexts of other lengths change a step by less
MOST_FITTED = 500  # samples: the fit compares all pairs
DEVIATIONS = 3.5  # of a sample from the median, in scaled median absolute deviations (Iglewicz and Hoaglin 1993)
SCALE = 1.4826  # standard deviation of a normal distribution / its median absolute deviation


@dataclass(frozen=True, slots=True)
class Outlier:
    """A sample, and how many times as long it took as its method's other samples would have taken for it."""

    row: SampleRecord
    factor: float


def outliers(run: Run) -> Mapping[Key, Outlier]:
    """Return the outliers of a run, among samples that ran one at a time.

    A sample is one if it is far from the median of its method, and still half as far after the excess of the other
    methods on its prompt is subtracted: a long context slows all of them.
    """
    samples = {label: [row for row in run.of(label) if row.ok and row.wall_s and _units(row)] for label in run.labels}
    starts: dict[tuple[str, int], list[float]] = defaultdict(list)
    for row in (row for rows in samples.values() for row in rows):
        starts[row.question_id, row.turn].append(_start(row))
    usual = {prompt: median_low(seconds) for prompt, seconds in starts.items()}
    excess = {label: _excess(rows, usual) for label, rows in samples.items() if len(rows) >= FEWEST}
    on_prompt: dict[tuple[str, int, int], dict[str, float]] = defaultdict(dict)
    for label, values in excess.items():
        for row, value in zip(samples[label], values.tolist(), strict=True):
            on_prompt[row.prompt][label] = value
    found = {}
    for label, values in excess.items():
        limit = max(math.log(LEAST), DEVIATIONS * SCALE * float(np.median(np.abs(values))))
        for row, value in zip(samples[label], values.tolist(), strict=True):
            others = [other for name, other in on_prompt[row.prompt].items() if name != label]
            own = value - (median(others) if others else 0.0)  # not shared by the other methods
            if value > limit and own > min(limit, value / 2):
                found[row.key] = Outlier(row, math.exp(value))
    return found


def _units(row: SampleRecord) -> int:
    """Return the number of steps; of a server that does not report them, of tokens."""
    return row.steps or (row.later if row.counted else 0)


def _start(row: SampleRecord) -> float:
    """Return the seconds of prefill, as far as they are known apart: a buffered output comes at once."""
    return 0.0 if row.decode_s is None else row.prefill_s or 0.0


def _excess(rows: Sequence[SampleRecord], usual: Mapping[tuple[str, int], float]) -> Floats:
    """Return the logarithm of each sample's time over the expected one [samples], less its median.

    usual: seconds of prefill of each prompt, over all methods. The expected time is the method's usual multiple of
    that, and its time per step with as many verified nodes.
    """
    wall_s, nodes = np.array([(row.wall_s, row.verified_nodes or 0) for row in rows], dtype=np.float64).T
    start, units = np.array([(_start(row), _units(row)) for row in rows], dtype=np.float64).T
    prefill = np.array([usual[row.question_id, row.turn] for row in rows])
    multiple = np.median(start[prefill > 0] / prefill[prefill > 0]) if prefill.any() else 0.0
    logs = np.log(wall_s / (multiple * prefill + units * _step_seconds((wall_s - start) / units, nodes / units)))
    return np.asarray(logs - np.median(logs))


def _step_seconds(seconds: Floats, nodes: Floats) -> Floats:
    """Return the usual time per step [samples] for these numbers of nodes per step: a line that outliers do not bend.

    It is that of Theil (1950) and Sen (1968), of at most MOST_FITTED samples, and nowhere below the shortest step. A
    method with a constant number of nodes has one time.
    """
    every = math.ceil(len(nodes) / MOST_FITTED)
    slope = 0.0
    if np.ptp(nodes[::every]) > 0:
        from scipy.stats import theilslopes  # takes half a second

        slope = max(0.0, float(theilslopes(seconds[::every], nodes[::every]).slope))
    return np.asarray(np.maximum(np.median(seconds - slope * nodes) + slope * nodes, seconds.min()))


def outlier_finding(found: Sequence[Outlier], samples: int, without: str) -> Finding:
    """Return the finding on the outliers of a method, at least one. samples: of the method.

    without: the speedups without the outliers, as text; '' if too little is left.
    """
    worst = max(found, key=lambda one: one.factor)
    row = worst.row
    place = f"{row.question_id} turn {row.turn + 1}{f' repeat {row.repeat + 1}' if row.repeat else ''}"
    longer = f"{place} took {format_number(worst.factor, 1)} times as long as its steps usually take"
    if len(found) > 1:
        longer = f"{len(found)} of {samples} samples took far longer than usual; {longer}"
    rest = "without them" if len(found) > 1 else "without it"
    return Finding("outlier", f"{longer}{f'; {rest} {without}' if without else ''}")
