"""A/A: how often plain decoding, compared with itself, comes out not distinguishable. At least 95 of 100 runs must.

Each comparison is a run `--methods ar,ar` of its own, with its own seed, on two questions of three tasks. The model is
loaded once, and a first run that is not counted warms it up. The timings are written to a CSV file, which
tests/core/test_a_a.py replays.

    python benchmarks/a_a.py [--runs 100] [--model lab] [--new 8] [--out tests/core/a_a_timings.csv]
"""

from __future__ import annotations

import argparse
import csv
import os
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

from specbench_ss import RunResults, load_model, run
from specbench_ss.decoding.target import Target

TASKS, EACH = "qa,math_reasoning,translation", 2  # of short prompts
COLUMNS = ("comparison", "question", "method", "tokens", "wall_s")


def compared(target: Target, seed: int, new: int) -> RunResults:
    """Make one run of the reference twice, and return it."""
    with TemporaryDirectory() as folder:
        out = Path(folder) / "run"
        return run(
            "ar,ar", model=target, categories=TASKS, limit=EACH, max_new_tokens=new, warmup=0, seed=seed, out=out
        )


def lines(found: RunResults, number: int) -> Iterator[tuple[object, ...]]:
    """Yield what the test replays: a line for each sample."""
    for row in found.samples.itertuples():
        yield number, row.question_id, row.method, row.tokens, f"{row.wall_s:.6f}"


def verdict(found: RunResults) -> str:
    """Return how the second `ar` compares with the first, over all tasks."""
    table = found.summary().set_index(["category", "method"])
    return str(table.loc[("overall", "ar#2"), "comparison"])


def main() -> None:
    """Make the runs, write their timings, and print the verdicts."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=100)
    parser.add_argument("--model", default="lab")
    parser.add_argument("--new", type=int, default=8, help="tokens of an answer")
    parser.add_argument("--out", type=Path, default=Path("tests/core/a_a_timings.csv"))
    asked = parser.parse_args()
    target, verdicts = load_model(asked.model), Counter[str]()
    with asked.out.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(COLUMNS)
        compared(target, 0, asked.new)
        for number in range(asked.runs):
            found = compared(target, number, asked.new)
            writer.writerows(lines(found, number))
            verdicts[verdict(found)] += 1
            file.flush()
    load = ", ".join(f"{x:.1f}" for x in os.getloadavg())
    print(f"{verdicts['not distinguishable']} of {asked.runs} not distinguishable: {dict(verdicts)}; load {load}")


if __name__ == "__main__":
    main()
