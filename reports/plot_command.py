"""`ssbench plot`: one figure of a run as SVG, PDF, PNG or HTML. `ssbench --help` imports it: nothing large here."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

Kind = Literal["ranking", "acceptance", "waterfall", "roofline", "pareto", "tasks", "time", "memory"]


def command(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="Directory of the run.")],
    kind: Annotated[
        Kind,
        typer.Option(
            help="ranking: speedups with intervals. acceptance: acceptance rate by draft position. waterfall: "
            "milliseconds per token from the baseline to each method. roofline: FLOP per second against FLOP per byte, "
            "under the machine's measured limits. pareto: τ against relative step time. tasks: heat map "
            "of speedups. time: parts of a step. memory: peak memory of a sample."
        ),
    ] = "ranking",
    out: Annotated[
        Path | None,
        typer.Option("--out", help="File to write: .pdf, .svg, .png or .html. Default: KIND.pdf in the run directory."),
    ] = None,
    methods: Annotated[
        str,
        typer.Option(metavar="A,B", help="Draw only these methods. Default: all but baselines of changed models."),
    ] = "",
    width: Annotated[
        float, typer.Option(min=2.0, max=20.0, help="Width in inches; a column of a paper has 3.3.")
    ] = 6.0,
    height: Annotated[
        float, typer.Option(min=0.0, max=40.0, help="Height in inches. 0: what the content needs.")
    ] = 0.0,
) -> None:
    """Draw one figure of a run for a paper: vector graphics with fixed fonts."""
    from specbench_ss.options import split_methods
    from specbench_ss.reports.run_figures import write_plot
    from specbench_ss.results.analysis import load_run

    done = load_run(run)
    path = out or done.path / f"{kind}.pdf"
    write_plot(done, kind, path, split_methods(methods), width, height)
    print(f"figure: {path}")
