"""Point estimates of a fixed run stay as they are: of the summary, comparisons of runs, load levels and parity."""

from __future__ import annotations

import gzip
import json
import math
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from specbench_ss.results.analysis import Results, analyse
from specbench_ss.results.compare import compared
from specbench_ss.results.concurrency import concurrency_rows
from specbench_ss.results.cost_model import waterfalls
from specbench_ss.results.parity import compare_pairs
from specbench_ss.results.ranking import speedup_of
from specbench_ss.runs.config import Load
from specbench_ss.runs.records import ConcurrencyResult, Run
from specbench_ss.runs.run_dir import read_run
from tests.conftest import MakeRun
from tests.tiny import thorough

STORED = Path(__file__).parent / "point_estimates.json.gz"
TASKS = ("overall", "qa")
LABELS = ("ar", "ss", "medusa", "ss-shared", "ss-shared-ar")
NOT_POINTS = ("interval", "comparison", "health", "unstable", "verdict", "output_match", "waits")  # parts of names


def estimates(make_run: MakeRun) -> dict[str, Any]:
    """Return all point estimates of a run with turns, repeats, failures and another model, and of one with levels."""
    references = {"ss-shared": "ss-shared-ar"}
    run, other = (
        read_run(
            make_run(labels=LABELS, questions=3, turns=2, repeats=2, seed=s, failing=("medusa",), references=references)
        )
        for s in (0, 1)
    )
    a, b = analyse(run), analyse(other)
    loaded = with_levels(read_run(make_run(labels=("ar", "ss"), questions=2)))
    changes = [
        [row.task, row.method, {name: [one.a, one.b, one.change] for name, one in row.changes.items()}]
        for row in compared(a, b)[1]
        if row.task in TASKS
    ]
    found = {
        "summary": [
            points(asdict(row)) | {"decode_speedup": row.decode_speedup} for row in a.rows if row.task in TASKS
        ],
        "compare": changes,
        "levels": [points(asdict(row)) for row in concurrency_rows(loaded)],
        "parity": [
            [one.method, one.tau, one.counts()] for one in compare_pairs(run, other, [("ss", "ss"), ("medusa", "ss")])
        ],
        "groups": [speedup_of(run, label, ("qa", "writing")) for label in LABELS],
        "machine": [points(asdict(row)) for row in a.machine_rows],
        "waterfalls": {label: asdict(one) for label, one in waterfalls(a.pairs).items()},
        "headline": Results(run).headline.partition("(")[0],
    }
    return json.loads(json.dumps(found))


def points(columns: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in columns.items() if not any(part in name for part in NOT_POINTS)}


def with_levels(run: Run) -> Run:
    """Add a level with two requests in flight, on which each method takes other times."""
    run.manifest["config"] |= {"concurrency": [2]}
    for label, factor in zip(run.labels, (1.5, 1.7), strict=True):
        level = ConcurrencyResult(label, 2, 0, 0.0, 10.0, 10.0, len(run.of(label)), steps=40)
        run.concurrency.append(level)
        run.requests += [replace(row, concurrency=2, wall_s=factor * (row.wall_s or 0.0)) for row in run.of(label)]
    assert all(level.load == Load(2) for level in run.concurrency)
    return run


@thorough
def test_point_estimates_are_those_stored(make_run: MakeRun) -> None:
    """The numbers were stored before questions were resampled within tasks: only intervals and verdicts changed."""
    found, stored = dict(flat(estimates(make_run))), dict(flat(json.loads(gzip.decompress(STORED.read_bytes()))))
    assert found.keys() == stored.keys()
    numbers = {place for place, value in stored.items() if isinstance(value, float)}
    assert {x: found[x] for x in found if x not in numbers} == {x: stored[x] for x in stored if x not in numbers}
    assert len(numbers) > 500
    assert not [x for x in numbers if not math.isclose(found[x], stored[x], rel_tol=1e-14)]  # other CPUs round so


def flat(value: Any, place: str = "") -> Iterator[tuple[str, Any]]:
    """Yield every number and text of nested data with its place."""
    if isinstance(value, dict | list):
        for name, inner in value.items() if isinstance(value, dict) else enumerate(value):
            yield from flat(inner, f"{place}.{name}")
    else:
        yield place, value
