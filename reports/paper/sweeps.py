"""Figures that are a sweep: the same questions for many variants, in one run or one for each value of a setting."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from specbench_ss.options import REFERENCE
from specbench_ss.reports.paper.claims import NOWHERE, ahead, all_of, number_or_none, points
from specbench_ss.reports.paper.figures import ACL, axes, bars, health, lines, machine, source
from specbench_ss.reports.paper.missing_parts import config_for, nothing_runs, of_method
from specbench_ss.reports.paper.tables import MT_BENCH
from specbench_ss.results.concurrency import level_rows
from specbench_ss.results.report import Bench, Claim, Column, Experiment, Grid, Part, Plot, Request, Result, Value
from specbench_ss.results.summary import OVERALL, SummaryRow, summarise
from specbench_ss.results.text import interval
from specbench_ss.runs.config import RunConfig
from specbench_ss.runs.records import Run

X = float | str


@dataclass(frozen=True, slots=True)
class Point:
    """One variant: its series and place on the axis, the method, and the run that it belongs to, with its settings."""

    series: str
    x: X
    method: str
    run: str = "run"
    settings: dict[str, Any] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """Return the name under which it is listed."""
        return f"{self.series} {self.x}"


class Sweep(Experiment):
    """Speedup and tau of each point. settings: those of every run; its `limit` holds where the user gives none."""

    x_title: ClassVar[str]
    y_title: ClassVar[str] = "speedup over ar"
    settings: ClassVar[dict[str, Any]]
    published: ClassVar[str] = "the paper draws its values and prints none"
    points: ClassVar[tuple[Point, ...]]

    def parts(self, request: Request) -> Sequence[Part]:
        """Return a row for each point."""
        return [Part(p.name, self.missing(p, request)) for p in self.points]

    def missing(self, point: Point, request: Request) -> str:
        """Say what a point lacks; '' for nothing."""
        return of_method(point.method, request)

    def configs(self, request: Request) -> dict[str, RunConfig]:
        """Return a run for each group of points that can run."""
        able = [p for p in self.points if not self.missing(p, request)]
        made = {}
        for name in dict.fromkeys(p.run for p in able):
            group = [p for p in able if p.run == name]
            made[name] = self._config(group[0], request, group)
        return made

    def _config(self, point: Point, request: Request, group: Sequence[Point]) -> RunConfig:
        methods = dict.fromkeys(p.method for p in group if not of_method(p.method, request))
        return config_for(request, list(methods), **(self.settings | point.settings))

    def run(self, bench: Bench) -> Result:
        """Measure every run, then read every point off its run."""
        configs = self.configs(bench.request)
        parts = self.parts(bench.request)
        if not configs:
            raise nothing_runs(self.name, parts)
        runs = {name: bench.measure(config, name) for name, config in configs.items()}
        able = [p for p in self.points if p.run in runs and not self.missing(p, bench.request)]
        grid = self._grid(able, runs, bench.request)
        notes = [f"ours: {machine(next(iter(runs.values())))}", *(n for run in runs.values() for n in health(run))]
        out = [f"left out: {p.name} needs {p.missing}" for p in parts if p.missing]
        return Result((grid,), (self.plot(grid),), notes=(*notes, f"published: {self.published}", *out))

    def _grid(self, points: Sequence[Point], runs: dict[str, Run], request: Request) -> Grid:
        found = {name: {r.method: r for r in summarise(run) if r.category == OVERALL} for name, run in runs.items()}
        rows = [self._row(p, found[p.run][label_in_run(p, request)]) for p in points]
        columns = (
            Column("series", "text"),
            Column(self.x_title, "text" if isinstance(points[0].x, str) else "count"),
            Column("speedup", "times"),
            Column("95 % interval", "text"),
            Column("tau"),
            Column("step time over ar's", "times"),
            Column("prompts", "count"),
        )
        return Grid("speedup", columns, tuple(rows), f"{self.source}: {self.title}")

    @staticmethod
    def _row(point: Point, row: SummaryRow) -> tuple[Value, ...]:
        cost = None if not row.step_ratio else 1 / row.step_ratio
        around = interval(row.speedup_interval) or None
        return (point.series, point.x, row.speedup, around, row.tau, cost, row.n_prompts)

    def plot(self, grid: Grid) -> Plot:
        """Plot the speedup of each series over the axis: lines over numbers, bars over names."""
        series: dict[str, list[tuple[Any, Any]]] = {}
        for row in grid.rows:
            series.setdefault(str(row[0]), []).append((row[1], row[2]))
        named = isinstance(grid.rows[0][1], str)
        label = f"Chart: {self.y_title} against {self.x_title}, for {', '.join(series)}."
        layout = axes(self.x_title, self.y_title, ticksuffix="×", rangemode="tozero")
        return Plot("figure", self.title, label, bars(series) if named else lines(series), layout, grid)


def label_in_run(point: Point, request: Request) -> str:
    """Return the label of the point's method in its run, with the settings that the user gave for it."""
    config = config_for(request, [point.method])
    return next((s.label for s in config.methods if s.label != REFERENCE), REFERENCE)


def _tree(k: int, prune: str) -> str:
    return f"ss[gamma=3,k={k},n_draft=0,prune={prune}]"


class Figure10(Sweep):
    """Figure 10: candidates per stream, with and without pruning."""

    name, source = "figure-10", source(ACL, "figure", 10)
    title = "speedup against k, gamma = 3, with and without pruning"
    x_title = "k"
    settings: ClassVar[dict[str, Any]] = {"suite": "specbench", "categories": MT_BENCH, "limit": 1}
    points = tuple(
        Point(series, k, _tree(k, prune))
        for series, prune in (("with pruning", "on"), ("without pruning", "off"))
        for k in (1, 2, 3, 4, 5, 6)
    )

    def claims(self, result: Result) -> Sequence[Claim]:
        """Caption: speedup rises and falls with k; pruning offers more."""
        found = points(result.grids[0], 1)
        inner = [k for k in (2, 3, 4, 5) if found.get(("with pruning", k), NOWHERE)[0] is not None]
        best = max(inner, key=lambda k: found["with pruning", k][0] or 0.0, default=3)
        top = found.get(("with pruning", best), NOWHERE)
        return [
            all_of(
                f"With pruning, speedup rises with k and falls again (k = {best} held against 1 and 6)",
                [ahead("", top, found.get(("with pruning", k), NOWHERE)) for k in (1, 6)],
            ),
            all_of(
                "Pruning gives more speedup (k = 4, 5, 6)",
                [
                    ahead("", *(found.get((series, k), NOWHERE) for series in ("with pruning", "without pruning")))
                    for k in (4, 5, 6)
                ],
            ),
        ]


class Figure12b(Sweep):
    """Figure 12 (b): top-k sampling."""

    name, source = "figure-12b", source(ACL, "figure", 12) + " (b)"
    title = "top-k sampling at temperature 1"
    x_title = "top-k"
    settings: ClassVar[dict[str, Any]] = {"suite": "apps", "categories": ("meaning_representation",), "limit": 8}
    points = tuple(
        Point(series, k, method, f"top-{k}", {"temperature": 1.0, "top_k": k})
        for series, method in (("Medusa", "medusa"), ("SS", "ss"), ("SS-Shared", "ss-shared"))
        for k in (1, 5, 10, 50)
    )

    def claims(self, result: Result) -> Sequence[Claim]:
        """App. E.3: larger k lowers speedups, and SS keeps its lead."""
        found = points(result.grids[0], 1)
        return [
            all_of(
                "SS is ahead of Medusa at every top-k",
                [ahead("", found.get(("SS", k), NOWHERE), found.get(("Medusa", k), NOWHERE)) for k in (1, 5, 10, 50)],
            ),
            ahead(
                "SS is faster at top-1 than at top-50", found.get(("SS", 1), NOWHERE), found.get(("SS", 50), NOWHERE)
            ),
        ]


class Figure13(Sweep):
    """Figure 13: from chain to pruned tree."""

    name, source = "figure-13", source(ACL, "figure", 13)
    title = "breakdown of the speedup: chain, tree, pruned tree"
    x_title = "drafting"
    settings: ClassVar[dict[str, Any]] = {"suite": "specbench", "categories": MT_BENCH, "limit": 1}
    points = (
        Point("ss", "chain", "ss[mode=chain,n_draft=0,prune=off]"),
        Point("ss", "tree", "ss[k=3,n_draft=0,prune=off]"),
        Point("ss", "tree, pruned", "ss[k=3,n_draft=0]"),
        Point("ss", "best nodes, pruned (ours)", "ss"),
    )

    def claims(self, result: Result) -> Sequence[Claim]:
        """App. E.6: the mechanisms compound."""
        found = points(result.grids[0], 1)
        chain, tree, pruned = (found.get(("ss", name), NOWHERE) for name in ("chain", "tree", "tree, pruned"))
        return [
            ahead("A tree is faster than a chain", tree, chain),
            ahead("Pruning makes the tree faster", pruned, tree),
        ]


BATCHES = (1, 2, 4, 8)
CHAIN = "SS, chain"


class Figure18(Sweep):
    """Figure 18: batching, with tree and pruning off; beyond the paper, shorter chains, and the heads."""

    name, source = "figure-18", source(ACL, "figure", 18)
    title = "throughput against batch size, chains without pruning"
    x_title, y_title = "batch size", "throughput over ar's in batches of the same size"
    settings: ClassVar[dict[str, Any]] = {
        "suite": "specbench", "categories": MT_BENCH, "limit": 1, "concurrency": BATCHES[1:],
    }  # fmt: skip
    published = "above 2x at every batch size on an A100-80G, Vicuna-7B (appendix L); the values are drawn, not printed"
    points = tuple(
        Point(series, size, method)
        for series, method in (
            (CHAIN, "ss[mode=chain,n_draft=0,prune=off]"),
            *((f"{CHAIN} of {g}", f"ss[gamma={g},mode=chain,n_draft=0,prune=off]") for g in (1, 2, 3)),
            ("Medusa", "medusa"),
        )
        for size in BATCHES
    )

    def _grid(self, points: Sequence[Point], runs: dict[str, Run], request: Request) -> Grid:
        found = {(row.method, row.concurrency): row for run in runs.values() for row in level_rows(run)}
        placed = [(p.series, p.x, found.get((label_in_run(p, request), int(p.x)))) for p in points]
        rows = [(name, x, row) for name, x, row in placed if row is not None]  # a level may have been given up
        columns = (
            Column("series", "text"),
            Column(self.x_title, "count"),
            Column("throughput over ar's", "times"),
            Column("tokens a second", digits=0),
            Column("tau"),
            Column("answers", "count"),
        )
        cells = [(name, x, r.throughput_ratio, r.tokens_per_s, r.tau, r.requests - r.failed) for name, x, r in rows]
        return Grid("throughput", columns, tuple(cells), f"{self.source}: {self.title}")

    def claims(self, result: Result) -> Sequence[Claim]:
        """Appendix L: faster than plain decoding at every batch size. One ratio each, so without an interval."""
        ratios = {row[1]: number_or_none(row[2]) for row in result.grids[0].rows if row[0] == CHAIN}
        known = {size: ratio for size, ratio in ratios.items() if ratio is not None}
        if len(known) < len(BATCHES):
            return []
        found = ", ".join(f"{ratio:.2f} at {size}" for size, ratio in known.items())
        says = "Speculative Streaming is ahead of plain decoding at every batch size"
        return [Claim(says, min(known.values()) > 1, found, sure=False)]


class Figure21(Sweep):
    """Figure 21: long context."""

    name, source = "figure-21", source(ACL, "figure", 21)
    title = "long prompts: speedup against k, gamma = 3"
    x_title = "k"
    settings: ClassVar[dict[str, Any]] = {"suite": "specbench", "categories": ("summarization", "rag"), "limit": 6}
    published = (
        "2.64x at gamma = 3, k = 4 on an A100-80G: LongBench summarization, streams trained on arXiv papers (app. O). "
        "The lab's context is 1,024 tokens; its longest prompts stand in"
    )
    points = tuple(Point("SS-Lossless", k, _tree(k, "on")) for k in (1, 2, 3, 4))

    def claims(self, result: Result) -> Sequence[Claim]:
        """App. O: long prompts are sped up too."""
        found = points(result.grids[0], 1).get(("SS-Lossless", 4), NOWHERE)
        return [ahead("Long prompts are sped up at k = 4", found, (1.0, (1.0, 1.0)))]
