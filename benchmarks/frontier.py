"""Tau against the time of a step, a number a drafter: of the table of `ssbench paper ablations`, or of a run.

    python benchmarks/frontier.py DIR/table.csv docs/images/ablations.svg
    python benchmarks/frontier.py RUN docs/images/smollm2-frontier.svg [--names "ss, root known;eagle;..."]

Dotted lines are where tau over step time is the same: above that at 1 a drafter would pay.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd

from specbench_ss.method_spec import MethodSpec
from specbench_ss.results.run_results import load_run
from specbench_ss.results.summary import OVERALL

NAMES = {"drafter": "name", "step time over ar's": "cost", "lowest tau": "least", "highest tau": "most"}


def methods_of(run: Path) -> pd.DataFrame:
    """Return the methods of a run over all tasks, the reference left out."""
    found = load_run(run).summary()
    found = found[(found.category == OVERALL) & (found.comparison != "reference")].sort_values("tau", ascending=False)
    names = [MethodSpec.parse(label).name if "weights=" in label else label for label in found.method]
    costs = 1 / found.step_ratio
    return pd.DataFrame({"name": names, "cost": costs, "tau": found.tau, "least": found.tau, "most": found.tau})


def draw(table: pd.DataFrame, out: Path) -> None:
    """Write the picture: the range of tau over seeds as a line through each number."""
    plt.rcParams["svg.hashsalt"] = "frontier"  # the same table gives the same file
    figure, axes = plt.subplots(figsize=(8.6, 4.8))
    low, high = table.cost.min() - 0.08, table.cost.max() + 0.08
    bottom, top = table.least.min() - 0.1, table.most.max() + 0.1
    for ratio in (0.6, 0.8, 1.0, 1.2, 1.4):
        ends = np.array([low, high])
        axes.plot(ends, ratio * ends, ":", color="#888888", linewidth=0.9)
        at = min(high, 0.98 * top / ratio)
        axes.text(at, ratio * at, f" {ratio:g}×", fontsize=8, color="#666666", va="bottom", ha="right")
    for number, row in enumerate(table.itertuples(index=False), 1):
        axes.plot([row.cost, row.cost], [row.least, row.most], color="#0072B2", linewidth=1.2, alpha=0.6)
        axes.plot(row.cost, row.tau, "o", color="#0072B2", markersize=4)
        axes.annotate(str(number), (row.cost, row.tau), xytext=(5, 3), textcoords="offset points", fontsize=8)
    names = "\n".join(f"{number}  {row.name}" for number, row in enumerate(table.itertuples(index=False), 1))
    axes.text(1.02, 1.0, names, transform=axes.transAxes, fontsize=7.5, va="top", linespacing=1.5)
    axes.set(xlim=(low, high), ylim=(bottom, top))
    axes.set(xlabel="time of a step over plain decoding's", ylabel="tokens a step (tau)")
    figure.savefig(out, bbox_inches="tight", metadata={"Date": None})


def main() -> None:
    """Read the table, write the picture."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("table", type=Path, help="a table, or the directory of a run")
    parser.add_argument("out", type=Path)
    parser.add_argument("--names", default="", help="what to call them, from the largest tau on, with semicolons")
    arguments = parser.parse_args()
    of_run = arguments.table.is_dir()
    table = methods_of(arguments.table) if of_run else pd.read_csv(arguments.table).rename(columns=NAMES)
    if arguments.names:
        table["name"] = arguments.names.split(";")
    draw(table, arguments.out)


if __name__ == "__main__":
    main()
