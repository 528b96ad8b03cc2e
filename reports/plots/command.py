"""`ssbench plot`: one figure of a run, for a paper."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from specbench_ss.errors import UserError

Kind = Literal["ranking", "acceptance", "waterfall", "roofline", "pareto"]


def command(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="Directory of the run.")],
    kind: Annotated[
        Kind,
        typer.Option(
            help="ranking: speedups with intervals. acceptance: share of accepted tokens by position in the draft. "
            "waterfall: milliseconds a token from plain decoding to each method. roofline: operations a second against "
            "operations a byte, under the machine's measured limits. pareto: tokens a step against what a step costs."
        ),
    ] = "ranking",
    out: Annotated[
        Path | None,
        typer.Option("--out", help="File to write: .pdf, .svg or .png. Default: KIND.pdf in the run directory."),
    ] = None,
    methods: Annotated[
        str,
        typer.Option(
            metavar="A,B", help="Draw only these methods. Default: all but plain decodings of changed models."
        ),
    ] = "",
    width: Annotated[
        float, typer.Option(min=2.0, max=20.0, help="Width in inches; a column of a paper has 3.3.")
    ] = 5.0,
    height: Annotated[
        float, typer.Option(min=0.0, max=40.0, help="Height in inches. 0: what the content needs.")
    ] = 0.0,
) -> None:
    """Draw one figure of a run for a paper: vector graphics with fixed fonts."""
    from specbench_ss.runs.run_dir import read_run

    check_matplotlib()
    from specbench_ss.options import split_methods
    from specbench_ss.reports.plots.kinds import write_plot

    done = read_run(run)
    path = out or done.path / f"{kind}.pdf"
    write_plot(done, kind, path, split_methods(methods), width, height)
    print(f"figure: {path}")


def check_matplotlib() -> None:
    """Raise UserError where matplotlib is missing."""
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise UserError("figures need matplotlib: pip install -e '.[plot]'") from None
