"""Figures of sweeps: the same questions for many variants, in one run or one run per value of a setting."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from specbench_ss.options import REFERENCE
from specbench_ss.reports import charts
from specbench_ss.reports.paper.claims import NOWHERE, Ratio, ahead, all_of, number_or_none, point
from specbench_ss.reports.paper.experiment import (
    MEASURED,
    MT_BENCH,
    RunExperiment,
    config_for,
    interval_text,
    measured,
    missing_for,
    overall,
    spec_for,
    table,
)
from specbench_ss.reports.paper.figures import TIMES, bars, lines, plot
from specbench_ss.results.analysis import Results
from specbench_ss.results.concurrency import requests_of
from specbench_ss.results.report import Claim, Grid, Part, Plot, Request, Result, Value
from specbench_ss.runs.config import Load, RunConfig
from specbench_ss.runs.records import Run
from specbench_ss.stats.intervals import FEWEST, pairwise
from specbench_ss.stats.pairs import together

X = float | str


@dataclass(frozen=True, slots=True)
class Point:
    """One variant: its series and x value, the method, and its run with the run's settings."""

    series: str
    x: X
    method: str
    run: str = "run"
    settings: dict[str, Any] = field(default_factory=dict)

    def label(self, request: Request) -> str:
        """Return the method's label in its run, with the user's settings."""
        return spec_for(request, self.method).label


class Sweep(RunExperiment):
    """Speedup and τ of each point. settings: of every run; its `limit` is the default."""

    x_title: ClassVar[str]
    y_title: ClassVar[str] = "speedup over ar"
    settings: ClassVar[dict[str, Any]] = {"suite": "specbench", "categories": MT_BENCH, "limit": 1}
    points: ClassVar[tuple[Point, ...]]

    def parts(self, request: Request) -> Sequence[Part]:
        return [Part(f"{p.series} {p.x}", missing_for(p.method, request)) for p in self.points]

    def configs(self, request: Request) -> dict[str, RunConfig]:
        """Return a run for each group of points that can run."""
        groups: dict[str, list[Point]] = {}
        for p in self.points:
            if not missing_for(p.method, request):
                groups.setdefault(p.run, []).append(p)
        return {
            name: config_for(request, [p.method for p in group], **(self.settings | group[0].settings))
            for name, group in groups.items()
        }

    def show(self, runs: Mapping[str, Results], request: Request) -> Result:
        able = [p for p in self.points if p.run in runs and not missing_for(p.method, request)]
        grid = self.grid(able, runs, request)
        return Result((grid,), (self.plot(grid),))

    def grid(self, points: Sequence[Point], runs: Mapping[str, Results], request: Request) -> Grid:
        found = {name: overall(run) for name, run in runs.items()}
        rows = [{"series": p.series, self.x_title: p.x, **measured(found[p.run][p.label(request)])} for p in points]
        forms = {"series": "text", self.x_title: "text" if isinstance(points[0].x, str) else "count", **MEASURED}
        return table("speedup", forms, rows, f"{self.source}: {self.title}")

    def plot(self, grid: Grid) -> Plot:
        """Plot the third column of each series over the axis: lines over numbers, bars over names."""
        draw, columns = bars if isinstance(grid.rows[0][1], str) else lines, {"": grid.columns[2].title}
        more = {**TIMES, "yaxis_rangemode": "tozero"}
        return draw("figure", self.title, grid, self.x_title, columns, self.y_title, by="series", **more)


def _tree(k: int, prune: str) -> str:
    return f"ss[gamma=3,k={k},n_draft=0,prune={prune}]"


def _points(result: Result) -> Mapping[tuple[Value, Value], Ratio]:
    """Return speedups with intervals by series and x value; NOWHERE for a point that was not measured."""
    grid = result.grids[0]
    return defaultdict(lambda: NOWHERE, {(row[0], row[1]): point(grid, row, "speedup") for row in grid.rows})


class Figure10(Sweep):
    """Figure 10: candidates per stream, with and without pruning."""

    name, source = "figure-10", "EMNLP figure 10"
    title = "speedup against k, gamma = 3, with and without pruning"
    x_title = "k"
    points = tuple(
        Point(series, k, _tree(k, prune))
        for series, prune in (("with pruning", "on"), ("without pruning", "off"))
        for k in (1, 2, 3, 4, 5, 6)
    )

    def claims(self, result: Result) -> Sequence[Claim]:
        """Test the caption: speedup rises and falls with k; pruning offers more."""
        found = _points(result)
        inner = [k for k in (2, 3, 4, 5) if found["with pruning", k][0] is not None]
        best = max(inner, key=lambda k: found["with pruning", k][0] or 0.0, default=3)
        top = found["with pruning", best]
        return [
            all_of(
                f"With pruning, speedup rises with k and falls again (k = {best} compared with 1 and 6)",
                [ahead("", top, found["with pruning", k]) for k in (1, 6)],
            ),
            all_of(
                "Pruning gives more speedup (k = 4, 5, 6)",
                [ahead("", *(found[series, k] for series in ("with pruning", "without pruning"))) for k in (4, 5, 6)],
            ),
        ]


class Figure12b(Sweep):
    """Figure 12 (b): top-k sampling."""

    name, source = "figure-12b", "EMNLP figure 12 (b)"
    title = "top-k sampling at temperature 1"
    x_title = "top-k"
    settings = {"suite": "apps", "categories": ("meaning_representation",), "limit": 8}
    points = tuple(
        Point(series, k, method, f"top-{k}", {"temperature": 1.0, "top_k": k})
        for series, method in (("Medusa", "medusa"), ("SS", "ss"), ("SS-Shared", "ss-shared"))
        for k in (1, 5, 10, 50)
    )

    def claims(self, result: Result) -> Sequence[Claim]:
        """Test app. E.3: larger k lowers speedups, and SS keeps its lead."""
        found = _points(result)
        return [
            all_of(
                "SS is ahead of Medusa at every top-k",
                [ahead("", found["SS", k], found["Medusa", k]) for k in (1, 5, 10, 50)],
            ),
            ahead("SS is faster at top-1 than at top-50", found["SS", 1], found["SS", 50]),
        ]


class Figure13(Sweep):
    """Figure 13: from chain to pruned tree."""

    name, source = "figure-13", "EMNLP figure 13"
    title = "breakdown of the speedup: chain, tree, pruned tree"
    x_title = "drafting"
    points = (
        Point("ss", "chain", "ss[mode=chain,n_draft=0,prune=off]"),
        Point("ss", "tree", "ss[k=3,n_draft=0,prune=off]"),
        Point("ss", "tree, pruned", "ss[k=3,n_draft=0]"),
        Point("ss", "best nodes, pruned (ours)", "ss"),
    )

    def claims(self, result: Result) -> Sequence[Claim]:
        """Test app. E.6: the mechanisms compound."""
        found = _points(result)
        chain, tree, pruned = (found["ss", name] for name in ("chain", "tree", "tree, pruned"))
        return [
            ahead("A tree is faster than a chain", tree, chain),
            ahead("Pruning makes the tree faster", pruned, tree),
        ]


BATCHES = (1, 2, 4, 8)
CHAIN = "SS, chain"


class Figure18(Sweep):
    """Figure 18: batching, with tree and pruning off; beyond the paper, shorter chains, and the heads."""

    name, source = "figure-18", "EMNLP figure 18"
    title = "throughput against batch size, chains without pruning"
    x_title, y_title = "batch size", "throughput over ar's in batches of the same size"
    settings = {**Sweep.settings, "concurrency": BATCHES[1:]}
    published = (
        "above 2x at every batch size on an A100-80G, Vicuna-7B (appendix L); the values are plotted, not printed"
    )
    points = tuple(
        Point(series, size, method)
        for series, method in (
            (CHAIN, "ss[mode=chain,n_draft=0,prune=off]"),
            *((f"{CHAIN} of {g}", f"ss[gamma={g},mode=chain,n_draft=0,prune=off]") for g in (1, 2, 3)),
            ("Medusa", "medusa"),
        )
        for size in BATCHES
    )

    def grid(self, points: Sequence[Point], runs: Mapping[str, Results], request: Request) -> Grid:
        """Return a row for each point with a measured batch size; one that ran out of memory has none."""
        found = {(row.method, row.concurrency): row for run in runs.values() for row in run.concurrency_rows}
        placed = [(p.series, p.x, found.get((p.label(request), int(p.x)))) for p in points]
        rows = [
            (name, x, r.throughput_ratio, r.tokens_per_s, r.mean_acceptance_length, r.requests - r.failed)
            for name, x, r in placed
            if r
        ]
        forms = {
            "series": "text", self.x_title: "count", "throughput over ar's": "times", "tokens a second": "number 0",
            "τ": "number", "answers": "count",
        }  # fmt: skip
        return table("throughput", forms, rows, f"{self.source}: {self.title}")

    def claims(self, result: Result) -> Sequence[Claim]:
        """Test appendix L: faster than `ar` at every batch size. Single ratios without intervals."""
        ratios = {row[1]: number_or_none(row[2]) for row in result.grids[0].rows if row[0] == CHAIN}
        known = {size: ratio for size, ratio in ratios.items() if ratio is not None}
        if len(known) < len(BATCHES):
            return []
        found = ", ".join(f"{ratio:.2f} at {size}" for size, ratio in known.items())
        statement = "Speculative Streaming is ahead of autoregressive decoding at every batch size"
        return [Claim(statement, min(known.values()) > 1, found, sure=False)]


class Figure21(Sweep):
    """Figure 21: long context."""

    name, source = "figure-21", "EMNLP figure 21"
    title = "long prompts: speedup against k, gamma = 3"
    x_title = "k"
    settings = {"suite": "specbench", "categories": ("summarization", "rag"), "limit": 6}
    published = (
        "2.64x at gamma = 3, k = 4 on an A100-80G: LongBench summarization, streams trained on arXiv papers (app. O). "
        "The lab's context is 1,024 tokens; its longest prompts stand in"
    )
    points = tuple(Point("SS-Lossless", k, _tree(k, "on")) for k in (1, 2, 3, 4))

    def claims(self, result: Result) -> Sequence[Claim]:
        """Test app. O: long prompts are sped up too."""
        found = _points(result)["SS-Lossless", 4]
        return [ahead("Long prompts are sped up at k = 4", found, (1.0, (1.0, 1.0)))]


# -- beyond the papers: the length of drafts in batches -------------------------------------------------------------

STREAMS, DRAFT_MODEL = "SS", "a draft model"
BEST, LEVEL = "best", "not significantly different"
LONGEST = 8  # tokens of a draft
SERIES, SIZE, LENGTH, RATIO, RANK = 0, 1, 2, 3, 8  # columns of the table
APART = 1.04  # factor between the x values of two series, so that marks do not hide each other


class DraftLength(Sweep):
    """The experiment `draft-length`: chains of streams and of a draft model, by their length and the batch size."""

    name, source = "draft-length", "Beyond the papers"
    title = "the best length of a draft against batch size"
    x_title = "length of the draft"
    settings = {**Sweep.settings, "repeats": 2, "concurrency": BATCHES[1:]}
    published = "nothing: the papers have one length (figure 18)"
    points = (
        *(Point(STREAMS, g, f"ss[gamma={g},mode=chain,n_draft=0,prune=off]") for g in (1, 2, 3, 4)),
        *(Point(DRAFT_MODEL, g, f"sd[gamma={g}]") for g in (1, 2, 4, LONGEST)),
    )

    def grid(self, points: Sequence[Point], runs: Mapping[str, Results], request: Request) -> Grid:
        (run,) = runs.values()
        forms = {
            "drafted by": "text", "batch size": "count", self.x_title: "count", "throughput over ar's": "times",
            "speedup of a request": "times", "95 % interval": "text", "τ": "number", "answers": "count",
            "of its batch size": "text",
        }  # fmt: skip
        labels: dict[str, dict[int, str]] = {}
        for p in points:
            labels.setdefault(p.series, {0: REFERENCE})[int(p.x)] = p.label(request)
        rows = [row for series, own in labels.items() for row in _rows(series, own, run)]
        return table("lengths", forms, rows, f"{self.source}: chains by length, 0: autoregressive decoding")

    def plot(self, grid: Grid) -> Plot:
        """Plot the best length of each series over the batch size, and lengths that do not differ from it."""
        best = _best(grid)
        series = {
            f"{name}: {rank}": [
                (float(row[SIZE] or 0) * APART**i, number_or_none(row[LENGTH]))
                for row in grid.rows
                if (row[SERIES], row[RANK]) == (name, rank)
            ]
            for i, name in enumerate(dict.fromkeys(row[SERIES] for row in best.rows))
            for rank in (BEST, LEVEL)
        }
        drawn = charts.lines(series, "requests decoded at a time", "tokens of the best draft")
        for line, level in zip(drawn.data[::2], drawn.data[1::2], strict=True):
            colour, symbol = line.line.color, f"{line.marker.symbol}-open"
            level.update(mode="markers", line_color=colour, marker_color=colour, marker_symbol=symbol)
        title = f"{self.title}; hollow: not significantly different from the best; 0: autoregressive decoding"
        ticks: dict[str, Any] = {"xaxis_type": "log", "xaxis_tickvals": BATCHES, "yaxis_dtick": 1}
        return plot("figure", title, best, drawn, **ticks, yaxis_range=[-0.4, LONGEST + 0.4])


def _rows(series: str, labels: Mapping[int, str], results: Results) -> Iterator[tuple[Value, ...]]:
    """Yield a row for each batch size and length of a series, including autoregressive decoding."""
    levels = {(row.method, row.concurrency): row for row in results.concurrency_rows if row.comparison != "invalid"}
    for size in BATCHES:
        measured_rows = {
            n: row for n, label in labels.items() if (row := levels.get((label, size))) and row.requests > row.failed
        }
        ranks = _ranks(results.run, {n: labels[n] for n in measured_rows}, size)
        for n, row in measured_rows.items():
            speeds = row.throughput_ratio, row.speedup, interval_text(row), row.mean_acceptance_length
            yield (series, size, n, *speeds, row.requests - row.failed, ranks.get(n))


def _ranks(run: Run, labels: Mapping[int, str], size: int) -> dict[int, str]:
    """Return the fastest length per token, and all not significantly different from it; none for few questions.

    Requests of a repeat share its noise, which an interval over questions does not cover. So a length differs from the
    best only if it is slower in every repeat; with one repeat, or few questions, no length differs.
    """
    samples = [requests_of(run, label, Load(size)) for label in labels.values()]
    seconds, tokens, *_ = together(samples)
    if seconds.shape[1] < FEWEST:
        return {}
    paces = (seconds.sum(1) / tokens.sum(1)).tolist()
    best = paces.index(min(paces))
    repeats = {row.repeat for row in samples[best]}
    parts = [together([[row for row in own if row.repeat == repeat] for own in samples]) for repeat in repeats]
    decidable = len(parts) > 1 and all(seconds.shape[1] >= FEWEST for seconds, *_ in parts)
    bounds = [pairwise(*part[:3], simultaneous=False)[best] for part in parts] if decidable else []
    slower = [decidable and all(bound[i][0] > 1 for bound in bounds) for i in range(len(labels))]
    level = {n: LEVEL for n, behind in zip(labels, slower, strict=True) if not behind}
    return level | {list(labels)[best]: BEST}


def _best(grid: Grid) -> Grid:
    """Return a row per series and batch size: the best length, lengths that do not differ, and its throughput."""
    rows = []
    for best in (row for row in grid.rows if row[RANK] == BEST):
        level = [str(row[LENGTH]) for row in grid.rows if row[:LENGTH] == best[:LENGTH] and row[RANK] == LEVEL]
        rows.append((*best[: LENGTH + 1], ", ".join(level) or None, best[RATIO]))
    forms = {
        "drafted by": "text", "batch size": "count", "best length": "count", LEVEL: "text",
        "throughput over ar's": "times",
    }  # fmt: skip
    return table("best", forms, rows, "The best length of a draft at each batch size")
