"""Equation 10 and figure 20: when streaming beats a draft model, from costs and advances alone."""

from __future__ import annotations

from collections.abc import Sequence

from specbench_ss.reports.paper.figures import ACL, axes, lines, source
from specbench_ss.results.report import Bench, Column, Experiment, Grid, Part, Plot, Request, Result

GAMMA = 4
RATIOS = (2.0, 5.0, 10.0, 20.0, 50.0, 100.0)  # C_target / C_draft
ADVANCES = tuple(round(0.6 + 0.1 * i, 1) for i in range(15))  # zeta / beta


def streaming_over_draft(advance: float, ratio: float, gamma: int = GAMMA, cost: float = 1.0) -> float:
    """Return eq. 10 as a speedup: time per token with a draft model over that with streaming.

    advance = zeta / beta, the tokens that a verifying pass advances with the draft model over those with streaming;
    ratio = C_target / C_draft; cost = C_ss / C_target.
    """
    return (gamma / ratio + 1) / advance / cost


def parity(ratio: float, gamma: int = GAMMA, cost: float = 1.0) -> float:
    """Return the zeta / beta at which both take the same time: 1.4 for gamma = 4 and ratio 10 (ACL appendix N)."""
    return (gamma / ratio + 1) / cost


class Figure20(Experiment):
    """The experiment `figure-20`."""

    name = "figure-20"
    title = "speedup of streaming over a draft model, in theory (equation 10)"
    source = source(ACL, "figure", 20)
    uses = ()

    def parts(self, request: Request) -> Sequence[Part]:
        """Return a single row, which always runs, since nothing is measured."""
        return [Part("the equation")]

    def run(self, bench: Bench) -> Result:
        """Draw a line for each ratio of target to draft latency, and find where it crosses 1."""
        columns = (Column("zeta / beta"), *(Column(f"ratio {r:g}", "times") for r in RATIOS))
        rows = tuple((a, *(streaming_over_draft(a, r) for r in RATIOS)) for a in ADVANCES)
        grid = Grid(
            "speedup", columns, rows, f"Speedup of streaming over a draft model, gamma = {GAMMA}, by C_target / C_draft"
        )
        at = Grid(
            "parity",
            (Column("C_target / C_draft"), Column("zeta / beta at parity")),
            tuple((r, parity(r)) for r in RATIOS),
            "Parity",
        )
        series = {f"ratio {r:g}": [(a, streaming_over_draft(a, r)) for a in ADVANCES] for r in RATIOS}
        layout = axes("zeta / beta", "speedup of streaming", ticksuffix="×")
        label = (
            "Line chart: speedup of streaming over a draft model against zeta over beta, a line for each latency ratio."
        )
        plot = Plot("speedup", self.title, label, lines(series), layout, grid)
        return Result(
            (grid, at), (plot,), notes=(f"Published: zeta = 1.4 beta at ratio 10; equation 10: {parity(10):g}.",)
        )
