"""Speedups as a picture for the README: a row per method, fastest first, with 95 % intervals.

    python benchmarks/forest.py docs/results/all-methods.csv docs/images/all-methods.svg "84 prompts, lab model, ..."
    python benchmarks/forest.py runs/MY-RUN picture.svg "what was measured on what"

The first argument is a run directory, or a CSV file with the columns of `load_run(...).summary()` that are drawn. Plain
decodings of changed models (`medusa2-ar` and the like) are left out: they are references, not contestants.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import pandas as pd

from specbench_ss import load_run
from specbench_ss.reports.html import palette
from specbench_ss.reports.html.forest import Mark, PictureRow, picture


def read(path: Path) -> pd.DataFrame:
    """One row a method, over all tasks, the fastest first."""
    if path.is_dir():
        summary = load_run(path).summary()
        methods = summary[(summary.category == "overall") & (summary.method != "ar")]
    else:
        methods = pd.read_csv(path)
    return methods[~methods.method.str.endswith("-ar")].sort_values("speedup", ascending=False)


def rows(methods: pd.DataFrame) -> list[PictureRow]:
    """What is drawn of each method, in the colours of the report."""
    look = palette.styles(list(methods.method))
    return [
        PictureRow(
            row.method, Mark(row.speedup, (row.speedup_low, row.speedup_high), style.colour, style.symbol), row.tau
        )
        for row, style in zip(methods.itertuples(), look.values(), strict=True)
    ]


def main() -> None:
    """Read the run, write the picture."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("what", help="what was measured on what, for the line below the picture")
    arguments = parser.parse_args()
    title = f"Speedup over autoregressive decoding, logarithmic: {arguments.what}"
    arguments.out.write_text(picture(rows(read(arguments.run)), title, palette.symbols()) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
