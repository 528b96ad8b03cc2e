"""Tokens a step of every method of a run, and over another method's, with intervals that resample the questions.

    python benchmarks/tau_ratios.py RUN --over "medusa[nodes=8]"

Both methods of a ratio have the same questions in every resample (bootstrap, BCa, 9,999 resamples). The intervals hold
for these questions and these weights: they say nothing of another training. No time is looked at.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.stats import bootstrap

from specbench_ss.errors import UserError
from specbench_ss.runs.records import Row, Run
from specbench_ss.runs.run_dir import read_run

Sums = NDArray[np.float64]  # [2, questions]: tokens after the prompt's pass, and steps


def main() -> None:
    """Print a line for every method."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path)
    parser.add_argument("--over", required=True, help="the method that others are compared with")
    given = parser.parse_args()
    run = read_run(given.run)
    if given.over not in run.labels:
        parser.error(f"{given.over!r} is none of the methods: {', '.join(run.labels)}")
    sums = {label: by_question(run, label) for label in run.labels if label != run.baseline}
    print("| method | tau | interval | over the other | interval |\n|---|---|---|---|---|")
    for label, own in sorted(sums.items(), key=lambda item: -tau(*item[1])):
        ratio = "1 | " if label == given.over else around(ratio_of, (*own, *sums[given.over]))
        print(f"| `{label}` | {around(tau, tuple(own))} | {ratio} |")


def by_question(run: Run, label: str) -> Sums:
    """A method's tokens and steps, by question. Raises UserError where a sample failed."""
    found = {question: [0.0, 0.0] for question in sorted({str(row.question_id) for row in run.rows})}
    for row in rows_of(run, label):
        if not row.ok:
            raise UserError(f"{label} failed at question {row.question_id}")
        sums = found[str(row.question_id)]
        sums[0] += (row.tokens or 0) - (row.prefill_tokens or 0)
        sums[1] += row.steps or 0
    return np.array(list(found.values())).T


def rows_of(run: Run, label: str) -> Iterable[Row]:
    """The samples of a method."""
    return (row for row in run.rows if row.method == label)


def tau(tokens: Sums, steps: Sums, axis: int = -1) -> Any:
    """Tokens a step over all questions."""
    return tokens.sum(axis) / steps.sum(axis)


def ratio_of(tokens: Sums, steps: Sums, other_tokens: Sums, other_steps: Sums, axis: int = -1) -> Any:
    """One method's tau over another's, over the same questions."""
    return tau(tokens, steps, axis) / tau(other_tokens, other_steps, axis)


def around(statistic: Any, samples: tuple[Sums, ...]) -> str:
    """A statistic and its 95 % interval, as two cells."""
    found = bootstrap(samples, statistic, paired=True, vectorized=True, rng=np.random.default_rng(0))
    low, high = found.confidence_interval
    return f"{statistic(*samples):.2f} | {low:.2f}–{high:.2f}"


if __name__ == "__main__":
    main()
