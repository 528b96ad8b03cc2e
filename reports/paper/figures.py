"""What the experiments share: their sources, and figures in one style."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from specbench_ss.results.checks import checks, worst_first
from specbench_ss.results.concurrency import at_a_time
from specbench_ss.results.summary import OVERALL, summarise
from specbench_ss.runs.records import Run

ACL, OLD = "ACL", "2024"
A100 = "one NVIDIA A100-80G, float16, batch 1"  # ACL sec. 3, 2024 sec. 4.1
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#7A8089")
OF_THE_RUN = ("incomplete", "warnings", "sessions", "disturbed", "noise")  # checks that no method is named in
SYMBOLS = ("circle", "square", "diamond", "triangle-up", "cross", "x", "circle-open")
DASHES = ("solid", "dash", "dot", "dashdot")


def source(paper: str, kind: str, number: int | str) -> str:
    """Return the name of a source, as in 'ACL table 3' or 'ACL appendix C'."""
    return f"{paper} {kind} {number}"


def lines(series: Mapping[str, Sequence[tuple[float, float | None]]]) -> list[dict[str, Any]]:
    """Return Plotly traces: a line with markers for each series of (x, y)."""
    return [
        {
            "type": "scatter",
            "mode": "lines+markers",
            "name": name,
            "x": [x for x, _ in points],
            "y": [y for _, y in points],
            "line": {"color": COLOURS[i % len(COLOURS)], "dash": DASHES[i % len(DASHES)], "width": 2},
            "marker": {"color": COLOURS[i % len(COLOURS)], "symbol": SYMBOLS[i % len(SYMBOLS)], "size": 9},
        }
        for i, (name, points) in enumerate(series.items())
    ]


def bars(series: Mapping[str, Sequence[tuple[str, float | None]]]) -> list[dict[str, Any]]:
    """Return Plotly traces: a group of bars for each series of (name, height)."""
    return [
        {
            "type": "bar",
            "name": name,
            "x": [x for x, _ in points],
            "y": [y for _, y in points],
            "marker": {"color": COLOURS[i % len(COLOURS)]},
        }
        for i, (name, points) in enumerate(series.items())
    ]


def axes(x: str, y: str, **more: Any) -> dict[str, Any]:
    """Return a Plotly layout with these axis titles. more: settings of the y axis."""
    return {"xaxis": {"title": {"text": x}}, "yaxis": {"title": {"text": y}, **more}, "barmode": "group"}


def machine(run: Run) -> str:
    """Describe the machine of a run, as in 'lab, float32, cpu: AMD EPYC, 1 thread, batch 1'."""
    model, here = run.manifest["model"], run.manifest["environment"]
    on_gpu = model["device"].startswith("cuda") and here["gpus"]
    chip = here["gpus"][0]["name"] if on_gpu else (here.get("cpu") or {}).get("model")
    count = (here.get("threads") or {}).get("intra_op")
    threads = "" if on_gpu else f", {count} thread{'s' * (count != 1)}"
    return f"{model['name']}, {model['dtype']}, {model['device']}: {chip}{threads}, batch {at_a_time(run.manifest)}"


def health(run: Run) -> list[str]:
    """Return what makes the numbers of a run hard to believe: of single methods, then of the whole run."""
    overall = [row for row in summarise(run) if row.category == OVERALL]
    of_methods = [f"{row.method}: {finding}" for row in overall for finding in row.health]
    told = [check for check in worst_first(checks(run, overall)) if check.name in OF_THE_RUN]
    return [*of_methods, *(check.sentence for check in told)]
