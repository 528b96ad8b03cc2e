"""What a page shows of served engines, and of methods and engines with many requests in flight."""

from __future__ import annotations

from collections.abc import Mapping

from specbench_ss.reports.html.page_parts import Cell, Column, Table, figure, plain
from specbench_ss.reports.html.palette import Style
from specbench_ss.results import ranking
from specbench_ss.results.concurrency import LevelRow, level_rows
from specbench_ss.results.summary import SummaryRow
from specbench_ss.results.text import interval, number, percent, times
from specbench_ss.runs.records import Run

MEASURED = "Tokens are those that the servers count, and pieces of text where a server does not tell."


def servers(run: Run, overall: Mapping[str, SummaryRow], styles: Mapping[str, Style]) -> Table | None:
    """Return a row for each server; None for a run of methods in this process."""
    if not run.manifest["config"].get("endpoints"):
        return None
    names = ("server", "address", "model", "software", "tokens", "acceptance")
    columns = [
        *(Column(name, False) for name in names),
        Column(
            "τ", help="Tokens per step that had a draft: 1 + accepted tokens over drafts, by the server's own counts"
        ),
        Column("accepted", help="Accepted over drafted tokens, by the same counts"),
    ]
    rows = []
    for entry in run.manifest["methods"]:
        about, found, row = entry.get("served", {}), entry["resolved"], overall[entry["label"]]
        software = " ".join(filter(None, (about.get("software"), found.get("version"))))
        told = (found.get("url"), found.get("model"), software, about.get("tokens"), about.get("acceptance"))
        cells = [styles[row.method].cell(), *(plain(text or "not told") for text in told)]
        rows.append([*cells, figure(row.tau), Cell(percent(row.acceptance_rate, 1), row.acceptance_rate)])
    return Table("servers", columns, rows, "What the servers tell of themselves", notes=[MEASURED])


def in_flight(run: Run, styles: Mapping[str, Style]) -> Table | None:
    """Return a row for each number of requests in flight and method; None where all were made one at a time."""
    found, served = level_rows(run), bool(run.manifest["config"].get("endpoints"))
    columns = [
        Column("in flight", help="Requests at a time"),
        Column("server" if served else "method", False),
        Column("tokens/s", help="Throughput: tokens of all answers over the time of all requests together"),
        Column("× baseline", help=f"This over that of {run.baseline} with as many in flight"),
        Column("speedup", help=f"Of single requests: seconds per token of {run.baseline} over its own, by prompt"),
        Column("95 % interval", help="Of the speedup of single requests"),
        Column(
            "first text" if served else "first token",
            help=f"Milliseconds to the first {'piece of text' if served else 'token'}: median and 95th percentile",
        ),
        Column("per token", help="Milliseconds per token after the first: median and 95th percentile"),
        Column("request", help="Milliseconds of a whole request: median and 95th percentile"),
        Column("τ", help="By the server's own counts" if served else "Tokens per step, as everywhere"),
        Column("requests"),
    ]
    rows = [_row(row, styles[row.method]) for row in found]
    return (
        Table("in-flight", columns, rows, "Several requests at a time: throughput and waiting times") if found else None
    )


def _row(row: LevelRow, style: Style) -> list[Cell]:
    mark = ranking.MARKS.get(row.comparison, "")
    said = "" if row.speedup is None else f"{mark} {times(row.speedup)}".strip()
    return [
        figure(row.concurrency, 0),
        style.cell(),
        figure(row.tokens_per_s, 1),
        Cell(times(row.throughput_ratio), row.throughput_ratio),
        Cell(said, row.speedup),
        plain(interval(row.speedup_interval)),
        *(_wait(row, name) for name in ("ttft", "tpot", "latency")),
        figure(row.tau),
        figure(row.requests, 0, small=[f"{row.failed} failed"] if row.failed else []),
    ]


def _wait(row: LevelRow, name: str) -> Cell:
    median, late = (row.waits[f"{name}_s_{quantile}"] for quantile in ("p50", "p95"))
    digits = 2 if name == "tpot" else 1
    small = [] if late is None else [f"95 %: {number(1000 * late, digits)}"]
    return figure(None if median is None else 1000 * median, digits, small=small)
