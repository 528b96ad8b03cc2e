"""How fast: the cards, the matrix of tasks and methods, the bars, and the table with everything."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from specbench_ss.reports.palette import Style
from specbench_ss.reports.view import Cell, Chart, Column, Table, figure, interval, number, plain, times, title
from specbench_ss.stats import Summary

OVERALL = "Overall"
PILLS = {
    "faster": ("faster", "good"),
    "slower": ("slower", "bad"),
    "not distinguishable": ("not distinguishable", ""),
    "reference": ("reference", ""),
}
Cells = Mapping[tuple[str, str], Summary]  # by (method, task)


@dataclass(frozen=True, slots=True)
class Card:
    """One method at a glance."""

    label: str
    style: Style
    verdict: tuple[str, str]
    speedup: str
    interval: str
    facts: Sequence[tuple[str, str]]


def by_task(summaries: Sequence[Summary]) -> Cells:
    """The summaries by method and task; OVERALL is over all tasks."""
    return {(s.method, OVERALL if s.category is None else s.category): s for s in summaries}


def tasks(cells: Cells) -> list[str]:
    """OVERALL, then the tasks in their order."""
    named = dict.fromkeys(task for _, task in cells if task != OVERALL)
    return [OVERALL, *named]


def cards(cells: Cells, styles: Mapping[str, Style]) -> list[Card]:
    """One card a method, the fastest first, the reference last."""
    found = [(cells[label, OVERALL], style) for label, style in styles.items() if (label, OVERALL) in cells]
    found.sort(key=lambda pair: (pair[0].verdict == "reference", -(pair[0].speedup or 0)))
    return [_card(summary, style) for summary, style in found]


def _card(s: Summary, style: Style) -> Card:
    reference = s.verdict == "reference"
    bounds = f"95 % interval {interval(s.interval)}" if s.interval else "no interval: too few questions"
    facts = [
        ("tokens per second", number(s.tokens_per_s, 1)),
        ("tokens per step, τ", number(s.tokens_per_step)),
        ("output", s.sameness),
        ("quality", _quality(s)),
        ("prompts", number(s.n, 0)),
    ]
    return Card(s.method, style, PILLS[s.verdict], times(s.speedup), "by definition" if reference else bounds, facts)


def _quality(s: Summary) -> str:
    return number(s.quality)


def matrix(cells: Cells, styles: Mapping[str, Style]) -> Table:
    """Task by method: the speedup and what it may be."""
    columns = [Column("task", False), *(Column(label) for label in styles), Column("n", help="Prompts")]
    rows = [
        [
            plain(title(task)),
            *(_matrix_cell(cells.get((label, task))) for label in styles),
            figure(max((cells[label, task].n for label in styles if (label, task) in cells), default=None), 0),
        ]
        for task in tasks(cells)
    ]
    return Table("matrix", columns, rows, total=True)


def _matrix_cell(s: Summary | None) -> Cell:
    if s is None or s.speedup is None:
        return Cell(number(None))
    if s.verdict == "reference":
        return Cell(times(s.speedup), s.speedup, small=f"{number(s.tokens_per_s, 1)} tokens/s")
    small = interval(s.interval) or "too few questions"
    if s.verdict == "not distinguishable":
        small += " ≈ 1"
    return Cell(times(s.speedup), s.speedup, small=small, strong=s.verdict != "not distinguishable")


def bars(cells: Cells, styles: Mapping[str, Style]) -> Chart:
    """Speedup by task, with whiskers and a line at 1."""
    named = tasks(cells)
    drawn = {label: style for label, style in styles.items() if cells[label, OVERALL].verdict != "reference"}
    data = []
    for label, style in drawn.items():
        found = [cells.get((label, task)) for task in named]
        speedups = [None if s is None else s.speedup for s in found]
        bounds = [(s.interval if s and s.interval else None) for s in found]
        data.append(
            {
                "type": "bar",
                "name": label,
                "x": [title(task) for task in named],
                "y": speedups,
                "marker": style.marker(),
                "error_y": {
                    "type": "data",
                    "symmetric": False,
                    "array": [b[1] - v if b and v else 0 for b, v in zip(bounds, speedups, strict=True)],
                    "arrayminus": [v - b[0] if b and v else 0 for b, v in zip(bounds, speedups, strict=True)],
                    "color": "var(--text)",
                    "thickness": 1.2,
                    "width": 3,
                },
                "customdata": [interval(b) or "no interval" for b in bounds],
                "hovertemplate": f"{label.replace('%', '')}, %{{x}}: %{{y:.2f}}× (%{{customdata}})<extra></extra>",
            }
        )
    return Chart(
        "speedup",
        "Speedup by task",
        "Bar chart: speedup of each method over the reference, by task, with 95 % intervals and a line at 1.",
        data,
        {
            "barmode": "group",
            "xaxis": {"showgrid": False},
            "yaxis": {"title": {"text": "speedup over the reference"}, "ticksuffix": "×", "rangemode": "tozero"},
            "shapes": [
                {
                    "type": "line",
                    "xref": "paper",
                    "x0": 0,
                    "x1": 1,
                    "y0": 1,
                    "y1": 1,
                    "line": {"color": "var(--text)", "width": 1.3, "dash": "dash"},
                }
            ],
        },
        _speedups(cells, drawn, named),
        "Whiskers are 95 % intervals. The dashed line is plain decoding: below it a method costs more than it saves.",
        height=390,
    )


def _speedups(cells: Cells, styles: Mapping[str, Style], named: Sequence[str]) -> Table:
    columns = [Column("method", False), Column("task", False), Column("speedup"), Column("low"), Column("high")]
    rows = []
    for label, style in styles.items():
        for s, task in ((cells[label, task], task) for task in named if (label, task) in cells):
            low, high = s.interval or (None, None)
            ends = (figure(low), figure(high))
            rows.append([Cell(label, label, swatch=style.css), plain(title(task)), figure(s.speedup, 2, "×"), *ends])
    return Table("speedup", columns, rows)


def everything(cells: Cells, styles: Mapping[str, Style]) -> Table:
    """One row for each task and method."""
    columns = [
        Column("task", False),
        Column("method", False),
        Column("speedup", help="Wall time per token, reference over method, paired by prompt"),
        Column("95 % interval"),
        Column("verdict", False),
        Column("tokens/s", help="Kept tokens over wall time, prefill included"),
        Column("τ", help="Tokens per step, pooled"),
        Column("quality", help="Mean score against the references, 0 to 1"),
        Column("n", help="Prompts"),
    ]
    rows = [_row(cells[label, task], task, style) for task in tasks(cells) for label, style in styles.items() if (label, task) in cells]
    return Table("everything", columns, rows)


def _row(s: Summary, task: str, style: Style) -> list[Cell]:
    text, tag = PILLS[s.verdict]
    return [
        plain(title(task)),
        Cell(s.method, s.method, swatch=style.css),
        figure(s.speedup, 2, "×", strong=True),
        Cell(interval(s.interval), s.interval[0] if s.interval else None),
        Cell(text, text, tag=tag or "flat"),
        figure(s.tokens_per_s, 1),
        figure(s.tokens_per_step),
        figure(s.quality, 3),
        figure(s.n, 0),
    ]
