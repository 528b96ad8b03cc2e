"""`ssbench plot`: one figure of a run as SVG, PDF, PNG or HTML."""

from __future__ import annotations

import re
from collections.abc import Collection
from pathlib import Path
from typing import Annotated, Literal

import typer
from plotly.graph_objects import Figure

from specbench_ss.errors import UserError, os_reason
from specbench_ss.options import split_methods
from specbench_ss.reports.html.assets import plotly_js
from specbench_ss.reports.run_figures import RunFigures
from specbench_ss.results.analysis import Results, load_run

Kind = Literal["ranking", "acceptance", "waterfall", "roofline", "pareto", "tasks", "time", "memory"]
FORMATS = (".pdf", ".svg", ".png", ".html")
INCH, PNG_SCALE = 96, 2  # pixels
NO_EXTRA = "figures as files need kaleido: pip install -e '.[plot]'; --out NAME.html needs nothing"
NO_BROWSER = "figures as files need Chrome or Chromium: install chromium, or set BROWSER_PATH; or use --out NAME.html"


def command(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="Directory of the run.")],
    kind: Annotated[
        Kind,
        typer.Option(
            help="ranking: speedups with intervals. acceptance: acceptance rate by draft position. waterfall: "
            "milliseconds per token from the baseline to each method. roofline: FLOP per second against FLOP per byte, "
            "under the machine's measured limits. pareto: tokens per step against relative step time. tasks: heat map "
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
    done = load_run(run)
    path = out or done.path / f"{kind}.pdf"
    write_plot(done, kind, path, split_methods(methods), width, height)
    print(f"figure: {path}")


def write_plot(
    results: Results, kind: Kind, path: Path, methods: Collection[str] = (), width: float = 6.0, height: float = 0.0
) -> None:
    """Write one figure of a run, in inches; a height of 0 is what the content needs. Raises UserError."""
    if path.suffix not in FORMATS:
        raise UserError(f"cannot draw {path}: the name must end in {', '.join(FORMATS)}")
    if path.is_dir():
        raise UserError(f"cannot write {path}: it is a folder")
    figures = RunFigures(results, methods)
    figure: Figure = getattr(figures, kind)()
    figure.update_layout(
        title={"text": figures.title, "font": {"size": 11, "color": "#56606C"}, "x": 0.01, "y": 0.99, "yanchor": "top"},
        margin_t=44, paper_bgcolor="white", width=round(width * INCH),
        height=round(height * INCH) if height else figure.layout.height + 34,
    )  # fmt: skip
    try:
        path.write_bytes(_html(figure) if path.suffix == ".html" else _image(figure, path.suffix[1:]))
    except OSError as error:
        raise UserError(f"cannot write {path}: {os_reason(error)}") from error


def _html(figure: Figure) -> bytes:
    drawn = figure.to_html(full_html=False, include_plotlyjs=False, div_id="figure")
    head = (
        f'<!doctype html>\n<html lang="en"><meta charset="utf-8"><title>ssbench</title>\n<script>{plotly_js()}</script>'
    )
    return f"{head}\n{drawn}\n</html>\n".encode()


def _image(figure: Figure, suffix: str) -> bytes:
    """Return the bytes of an image, the same for the same figure. Raises UserError without kaleido or a browser."""
    try:
        import kaleido
        from choreographer.errors import ChromeNotFoundError
    except ImportError:
        raise UserError(NO_EXTRA) from None
    try:
        options = {"format": suffix, "scale": PNG_SCALE if suffix == "png" else 1}
        drawn = bytes(kaleido.calc_fig_sync(figure, opts=options))
    except (ChromeNotFoundError, kaleido.errors.KaleidoError) as error:
        raise UserError(NO_BROWSER) from error
    if suffix == "pdf":  # the browser writes the time
        return re.sub(rb"\(D:\d{14}", b"(D:20000101000000", drawn)
    if suffix == "svg" and (uid := re.search(rb'id="topdefs-(\w+)"', drawn)):  # Plotly names clips at random
        return drawn.replace(uid[1], b"figure")
    return drawn
