"""A/A: the reference against itself comes out not significant, on timings that were really measured."""

from __future__ import annotations

import bz2
import csv
from collections import defaultdict
from pathlib import Path

import pytest

from specbench_ss.bench.build_config import method_specs
from specbench_ss.errors import UserError
from specbench_ss.results.summary import OVERALL, summarise
from specbench_ss.runs.config import RunConfig
from specbench_ss.runs.records import Run, SampleRecord, Steps
from specbench_ss.stats.intervals import FEWEST
from tests.tiny import thorough

RECORDED = Path(__file__).parent / "a_a_timings.csv.bz2"  # of runs with --methods ar,ar


def test_the_reference_may_be_asked_for_twice_and_no_other_method() -> None:
    specs = method_specs("ar,ar,ss", ())
    assert [spec.label for spec in specs] == ["ar", "ar#2", "ss"]
    stored = RunConfig(methods=specs).as_dict()["methods"]
    assert stored == [
        {"name": "ar", "options": {}},
        {"name": "ar", "options": {}, "copy": 2},
        {"name": "ss", "options": {}},
    ]
    with pytest.raises(UserError, match="given twice"):
        method_specs("ss,ss", ())


def recorded() -> dict[str, Run]:
    """The recorded comparisons, each as a run."""
    rows: dict[str, list[SampleRecord]] = defaultdict(list)
    with bz2.open(RECORDED, "rt", encoding="utf-8", newline="") as file:
        for line in csv.DictReader(file):
            row = SampleRecord(line["question"], 0, line["method"], 0, "qa", len(rows), 0, 0, "", "", "ok")
            row.tokens = row.prefill_tokens = int(line["tokens"])  # as if by prefill: steps were not kept
            row.token_ids, row.steps = [0] * row.tokens, 0
            row.prefill_s = row.wall_s = float(line["wall_s"])
            rows[line["comparison"]].append(row)
    methods = [{"label": label, "lossless": True} for label in ("ar", "ar#2")]
    manifest = {"config": {}, "methods": methods, "model": {"dtype": "float32"}}
    return {name: Run(Path(), manifest, found, Steps.from_samples({})) for name, found in rows.items()}


@thorough
def test_recorded_timings_of_the_reference_twice_are_not_distinguishable() -> None:
    runs = recorded()
    verdicts = [
        row.comparison for run in runs.values() for row in summarise(run) if (row.task, row.method) == (OVERALL, "ar#2")
    ]
    assert len(verdicts) == 100
    assert all(len({row.question_id for row in run.rows}) >= FEWEST for run in runs.values())
    assert verdicts.count("not significant") >= 95


@thorough
def test_the_same_timings_with_a_method_that_is_faster_are_reported_apart() -> None:
    """Intervals are not wide for nothing: on the same recordings, noisy as they are, half the time is reported
    apart."""
    found = 0
    for run in recorded().values():
        for row in run.rows:
            if row.method == "ar#2" and row.wall_s:
                row.prefill_s = row.wall_s = row.wall_s / 2
        found += next(r for r in summarise(run) if (r.task, r.method) == (OVERALL, "ar#2")).comparison == "faster"
    assert found > 80
