"""`ssbench paper draft-length`: how long a draft should be when several requests are decoded at a time.

Beyond the papers, whose figure 18 draws one length. What each batch size costs is decided by the same prompts, answered
by chains of several lengths; length 0 is plain decoding, which is the best where drafting does not pay.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar

from specbench_ss.options import REFERENCE
from specbench_ss.reports.paper.figures import COLOURS, SYMBOLS, axes
from specbench_ss.reports.paper.sweeps import BATCHES, Point, Sweep, label_in_run
from specbench_ss.reports.paper.tables import MT_BENCH
from specbench_ss.results.concurrency import level_rows, requests_of
from specbench_ss.results.ranking import by_question
from specbench_ss.results.report import Column, Grid, Plot, Request, Value
from specbench_ss.results.text import interval
from specbench_ss.runs.records import Run
from specbench_ss.stats import FEWEST, pairwise

STREAMS, DRAFT_MODEL = "SS", "a draft model"
BEST, LEVEL = "best", "not told from it"
LONGEST = 8  # tokens of a draft
SERIES, SIZE, LENGTH, RATIO, PLACE = 0, 1, 2, 3, 8  # columns of the table
APART = 1.04  # factor between the places of two series, so that marks do not hide each other


class DraftLength(Sweep):
    """The experiment `draft-length`: chains of streams and of a draft model, by their length and the batch size."""

    name, source = "draft-length", "Beyond the papers"
    title = "the best length of a draft against batch size"
    x_title = "length of the draft"
    settings: ClassVar[dict[str, Any]] = {
        "suite": "specbench", "categories": MT_BENCH, "limit": 1, "repeats": 2, "concurrency": BATCHES[1:],
    }  # fmt: skip
    published = "nothing: the papers draw one length (figure 18)"
    points = (
        *(Point(STREAMS, g, f"ss[gamma={g},mode=chain,n_draft=0,prune=off]") for g in (1, 2, 3, 4)),
        *(Point(DRAFT_MODEL, g, f"sd[gamma={g}]") for g in (1, 2, 4, LONGEST)),
    )

    def _grid(self, points: Sequence[Point], runs: dict[str, Run], request: Request) -> Grid:
        (run,) = runs.values()
        columns = (
            Column("drafted by", "text"),
            Column("batch size", "count"),
            Column(self.x_title, "count"),
            Column("throughput over ar's", "times"),
            Column("speedup of a request", "times"),
            Column("95 % interval", "text"),
            Column("tau"),
            Column("answers", "count"),
            Column("of its batch size", "text"),
        )
        rows = [
            row for series in dict.fromkeys(p.series for p in points) for row in _rows(series, points, run, request)
        ]
        return Grid("lengths", columns, tuple(rows), f"{self.source}: chains by length, 0: plain decoding")

    def plot(self, grid: Grid) -> Plot:
        """Plot the best length of each series over the batch size, and those that cannot be told from it."""
        found = _best(grid)
        data = [
            trace for i, name in enumerate(dict.fromkeys(r[0] for r in found.rows)) for trace in _drawn(i, name, grid)
        ]
        layout = axes("requests decoded at a time", "tokens of the best draft", range=[-0.4, LONGEST + 0.4], dtick=1)
        layout["xaxis"] |= {"type": "log", "tickvals": list(BATCHES), "ticktext": [str(size) for size in BATCHES]}
        label = "Chart: length of the best draft against batch size, a line a method. Hollow: not told from it."
        return Plot("figure", f"{self.title}; hollow: cannot be told from the best; 0: plain decoding", label, data,
                    layout, found)  # fmt: skip


def _rows(series: str, points: Sequence[Point], run: Run, request: Request) -> Iterator[tuple[Value, ...]]:
    """Yield a row for each batch size and length of a series, plain decoding among them."""
    labels = {0: REFERENCE} | {int(p.x): label_in_run(p, request) for p in points if p.series == series}
    levels = {(row.method, row.concurrency): row for row in level_rows(run)}
    for size in BATCHES:
        there = {
            n: row for n, label in labels.items() if (row := levels.get((label, size))) and row.requests > row.failed
        }
        places = _places(run, {n: labels[n] for n in there}, size)
        for n, row in there.items():
            around = interval(row.speedup_interval) or None
            done = row.requests - row.failed
            yield (series, size, n, row.throughput_ratio, row.speedup, around, row.tau, done, places.get(n))


def _places(run: Run, labels: Mapping[int, str], size: int) -> dict[int, str]:
    """Name the length with the fewest seconds per token, and all that cannot be told from it; none of few questions.

    All requests of a repeat share what disturbs it, which no resampling of questions sees: a length is told from the
    best only where it is slower in every repeat, and of one repeat, or a short one, nothing is told.
    """
    samples = [requests_of(run, label, size) for label in labels.values()]
    seconds, tokens = by_question(samples)
    if seconds.shape[1] < FEWEST:
        return {}
    paces = (seconds.sum(1) / tokens.sum(1)).tolist()
    best = paces.index(min(paces))
    repeats = {row.repeat for row in samples[best]}
    slower = [len(repeats) > 1] * len(labels)
    for repeat in repeats:
        seconds, tokens = by_question([[row for row in own if row.repeat == repeat] for own in samples])
        if seconds.shape[1] < FEWEST:  # of which nothing can be told
            slower = [False] * len(labels)
            break
        slower = [told and low > 1 for told, (low, _) in zip(slower, pairwise(seconds, tokens)[best], strict=True)]
    level = {n: LEVEL for n, told in zip(labels, slower, strict=True) if not told}
    return level | {list(labels)[best]: BEST}


def _best(grid: Grid) -> Grid:
    """Return a row for each series and batch size: the best length, those not told from it, and its throughput."""
    columns = (
        *grid.columns[: SIZE + 1],
        Column("best length", "count"),
        Column("not told from it", "text"),
        grid.columns[RATIO],
    )
    rows = []
    for best in (row for row in grid.rows if row[PLACE] == BEST):
        level = [str(row[LENGTH]) for row in grid.rows if row[:LENGTH] == best[:LENGTH] and row[PLACE] == LEVEL]
        rows.append((*best[: LENGTH + 1], ", ".join(level) or None, best[RATIO]))
    return Grid("best", columns, tuple(rows), "The best length of a draft at each batch size")


def _drawn(i: int, series: Value, grid: Grid) -> list[dict[str, Any]]:
    """Return the line through the best lengths of the i-th series, and hollow marks for those not told from them."""
    traces = []
    for place in (BEST, LEVEL):
        own = [row for row in grid.rows if (row[SERIES], row[PLACE]) == (series, place)]
        marker = {"color": COLOURS[i], "symbol": SYMBOLS[i] + ("" if place == BEST else "-open"), "size": 11}
        traces.append({
            "type": "scatter", "mode": "lines+markers" if place == BEST else "markers", "name": f"{series}: {place}",
            "x": [float(row[SIZE] or 0) * APART**i for row in own], "y": [row[LENGTH] for row in own], "marker": marker,
            "line": {"color": COLOURS[i], "width": 2},
        })  # fmt: skip
    return traces
