"""Streams by their number of MSA layers times the rank of their adapters: tau, parameters and steps, two seeds.

    python benchmarks/stream_grid.py OUT [--device cpu]

`ssbench paper ablations` changes one part at a time; this is the product of the two that matter most, trained and
decoded in the same way: its text, batches, prompts and eight nodes, nothing pruned. It goes on where it was cut off.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from itertools import product
from pathlib import Path

from specbench_ss.commands.paper_work import make
from specbench_ss.reports.paper.ablations import Ablations, Variant
from specbench_ss.results.experiment import Claim, Request, Result
from specbench_ss.runs.config import RunTarget

LAYERS, RANKS = (1, 4, 8), (8, 32, 128)


class StreamGrid(Ablations):
    """The product of both; its centre is that of `ablations`."""

    name = "stream-grid"
    title = "streams by MSA layers (N_s) and rank of adapters (R_s), 8 nodes each"
    variants = tuple(
        Variant(f"N_s {n}, R_s {r}", options=f"n_msa_layers={n},adapter_rank={r}") for n, r in product(LAYERS, RANKS)
    )
    seeds = 2

    def claims(self, result: Result) -> Sequence[Claim]:
        """Nothing that the papers say."""
        return []


def main() -> None:
    """Train, decode, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--device", default="auto")
    given = parser.parse_args()
    make(StreamGrid(), Request(device=given.device, dtype="float32"), RunTarget(given.out, resume=given.out.exists()))


if __name__ == "__main__":
    main()
