"""Predict one run's speedups from another's, as the report's "what if" does, and say how far that is off.

    python benchmarks/predict.py FROM_RUN TO_RUN

The model's size changes by the ratio of bytes that a plain step reads. Tokens a step are taken from FROM_RUN, and then
from TO_RUN, which leaves the error of the costs alone.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from specbench_ss.method_spec import REFERENCE
from specbench_ss.results.machine import machine_rows
from specbench_ss.results.what_if import Change, Sides, parts, predictions
from specbench_ss.runs.run_directory import read_run


def main() -> None:
    """Read both runs, predict, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", type=Path, metavar="FROM_RUN")
    parser.add_argument("goal", type=Path, metavar="TO_RUN")
    arguments = parser.parse_args()
    source, goal = read_run(arguments.source), read_run(arguments.goal)
    before, after = ({one.own.method: one for one in parts(run)} for run in (source, goal))
    change = Change(size=after[REFERENCE].own.read_s / before[REFERENCE].own.read_s)
    measured = {row.method: row.decode_speedup for row in machine_rows(goal)}
    own, with_tau = (predictions(found, change) for found in (before.values(), told(before, after)))
    print(f"size ×{change.size:.1f}")
    print(f"{'method':20} {'measured':>9} {'predicted':>10} {'error':>7} {'its own τ':>10} {'error':>7}")
    for method, value in measured.items():
        if value and method in with_tau:
            told_of = [f"{x:10.2f} {x / value - 1:+7.0%}" for x in (own[method], with_tau[method])]
            print(f"{method:20} {value:9.2f} {' '.join(told_of)}")


def told(before: Mapping[str, Sides], after: Mapping[str, Sides]) -> list[Sides]:
    """The parts of one run with tokens a step of the other, for the methods of both."""
    both = [(one, after[name].own) for name, one in before.items() if name in after]
    return [replace(one, own=replace(one.own, tau=other.tau, nodes=other.nodes)) for one, other in both]


if __name__ == "__main__":
    main()
