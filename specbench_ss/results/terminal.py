"""Tables of runs, comparisons and experiments in the terminal."""

from __future__ import annotations

import csv
import json
import os
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import asdict
from itertools import groupby
from pathlib import Path
from typing import Any

from rich import box
from rich.cells import cell_len
from rich.console import Console, OverflowMethod
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from specbench_ss.errors import UserError, os_reason
from specbench_ss.results.analysis import Results
from specbench_ss.results.checks import Check, worst_first
from specbench_ss.results.compare import (
    FAILED,
    OTHER_MACHINE,
    OTHER_THREADS,
    SAME,
    UNJUDGED,
    Change,
    ComparedRow,
    RunComparison,
    judged,
)
from specbench_ss.results.concurrency import ConcurrencyRow, concurrency_rows
from specbench_ss.results.cost_model import MachineRow
from specbench_ss.results.ranking import (
    MARKS,
    non_inferiority,
    notes,
    own_model,
    quality,
    quality_difference,
    short_n,
    short_output,
    speedup,
)
from specbench_ss.results.report import Column, Grid, Mark, Part, Result, Span, Value
from specbench_ss.results.summary import OVERALL, SummaryRow
from specbench_ss.results.text import (
    MISSING,
    format_number,
    format_speedup,
    interval,
    percent,
    safe,
    scientific,
    table,
    title,
)
from specbench_ss.runs.records import Run

CLOSES = 0.02  # share of a step by which its parts, of another clock, may differ from it without a word


def machine_lines(rows: Sequence[MachineRow], manifest: Mapping[str, Any]) -> list[str]:
    """Return a line on each thing that is known: what the parts of a step leave, and limits reached.

    rows, manifest: of the run.
    """
    if manifest["config"].get("endpoints"):
        return []
    busy = ((manifest.get("machine") or {}).get("limits") or {}).get("busy", "")
    noted = [f"limits: too low, perhaps: when they were measured, {busy}"] if busy else []
    return [*_left(rows), _limits(rows), *noted]


def _left(rows: Sequence[MachineRow]) -> Iterator[str]:
    known = [row for row in rows if row.host_share is not None]
    if known:
        most = max(known, key=lambda row: row.host_share or 0.0)
        share = f"{most.host_share or 0.0:.1%}"
        told = f"steps: what is neither drafting, verifying nor accepting takes at most {share} of a step "
        open_ = [row for row in known if abs(row.parts_residual or 0.0) > CLOSES]
        off = "; ".join(f"{row.method} {row.parts_residual or 0.0:+.1%}" for row in open_)
        rest = f"; beyond that, the parts and the step, two clocks, differ: {off}" if off else ""
        yield f"{told}({most.method}); tables call it host{rest}"


def _limits(rows: Sequence[MachineRow]) -> str:
    reached = [row for row in rows if row.bandwidth_share is not None and row.compute_share is not None]
    if not reached:
        return "limits: not known here, so no share of them is told; `ssbench doctor --calibrate` measures them once"
    parts = [f"{row.method} {row.bandwidth_share:.0%} and {row.compute_share:.1%}" for row in reached]
    return f"limits: of memory bandwidth and of products, steps reached (counted from shapes): {'; '.join(parts)}"


RESULT_COLUMNS = ("method", "speedup", "95% interval", "τ", "output", "quality", "judged", "tokens/s", "n")
DISPENSABLE = ("tokens/s", "judged", "quality", "n")  # left out in this order where a terminal is too narrow
FOLDED = ("task", "fastest", "speedup", "95% interval", "τ", "faster", "n")  # one row a task, of many methods
LEFT = ("task", "method", "fastest", "output", "configuration")
FOLDING = ("output",)  # columns that may take several lines
LABELS = ("method", "fastest")  # these too, but they break where a label has commas
NARROW = 28  # characters that a label may take before other columns are left out for it
WIDTH = 110  # where there is no terminal to ask
MANY = 6  # tasks; with more, no blank lines between them
MOST = 40  # rows of all tasks; with more, each task has one
SHOWN = 8  # details of a check
STATE_MARKS = {"wrong": "[red]✕[/]", "warning": "[yellow]![/]", "not checked": "[dim]?[/]"}
Line = dict[str, str]  # cells by column


def widen(console: Console, width: int = WIDTH) -> None:
    """Give tables room where there is no terminal and the variable COLUMNS does not state a width."""
    if not console.is_terminal and "COLUMNS" not in os.environ:
        console.width = max(console.width, width)


def print_tables(results: Results, console: Console) -> None:
    """Print both tables, notes on how to read them, what is wrong or was not checked, and the finding."""
    widen(console)
    run, rows, config = results.run, results.rows, results.config
    often = f", {config['repeats']} repeats" if config["repeats"] > 1 else ""
    columns = tuple(name for name in RESULT_COLUMNS if name != "judged" or run.judged_scores)
    overall = ranked(results.overall)
    tasks = [
        ranked(list(group)) for category, group in groupby(rows, key=lambda row: row.category) if category != OVERALL
    ]
    left_out = _print_tasks(console, columns, tasks, often, config)
    console.rule(f"[bold]Overall, {len(tasks)} tasks{often}[/]" if len(tasks) > 1 else f"[bold]Overall{often}[/]")
    left_out |= _print(console, "", columns, [[_line(row, config) for row in overall]])
    if left_out:
        console.print(
            f"not shown since the terminal is too narrow (see the report): {', '.join(left_out)}", style="dim"
        )
    for note in notes(rows, config, short=True):
        console.print(note, style="dim", markup=False, highlight=False, soft_wrap=True)
    if run.judged_scores:
        console.print(f"judged: rating over ten by {run.judge}, a mean over questions", style="dim", markup=False)
    for row in overall:
        if row.reference_speedup is not None:
            console.print(f"{row.method} over {row.reference}, its own model: {own_model(row)}", markup=False)
        if row.quality_verdict is not None:
            told = f"{row.method}: quality {quality_difference(row)}, {non_inferiority(row)}"
            console.print(told, markup=False, highlight=False, soft_wrap=True)
    for check in reversed(one_line(worst_first(results.checks))):
        _print_check(console, check)
    console.print(results.headline, style="bold", markup=False, highlight=False, soft_wrap=True)


def ranked(rows: Sequence[SummaryRow]) -> list[SummaryRow]:
    """Return the rows of a task with the reference first, then the fastest first."""
    return sorted(rows, key=lambda row: (row.comparison != "reference", row.speedup is None, -(row.speedup or 0)))


def _print_tasks(
    console: Console,
    columns: Sequence[str],
    tasks: Sequence[Sequence[SummaryRow]],
    often: str,
    config: Mapping[str, Any],
) -> dict[str, None]:
    if sum(map(len, tasks)) <= MOST:
        return _print(console, f"By task{often}", ("task", *columns), [[_line(r, config) for r in t] for t in tasks])
    name = f"By task{often}: the fastest of {len(tasks[0]) - 1} methods (the report has all of them)"
    return _print(console, name, FOLDED, [[_folded(rows, config)] for rows in tasks])


def _folded(rows: Sequence[SummaryRow], config: Mapping[str, Any]) -> Line:
    """Return a task's row: its fastest method, and how many are faster than the reference. rows: ranked."""
    others = [row for row in rows if row.comparison != "reference"]
    faster = sum(row.comparison == "faster" for row in others)
    line = _line(others[0], config)
    return line | {"fastest": line["method"], "faster": f"{faster} of {len(others)}"}


def one_line(made: Sequence[Check]) -> list[Check]:
    """Return the checks with all that was not checked as one, which comes last."""
    rest = [check.sentence for check in made if check.state == "not checked"]
    told = [check for check in made if check.state != "not checked"]
    return [*told, *([Check("not checked", "not checked", " ".join(rest))] if rest else [])]


def _print_check(console: Console, check: Check) -> None:
    style, lines, rest = "dim" if check.state == "not checked" else "", check.lines[:SHOWN], len(check.lines) - SHOWN
    console.print(f"{STATE_MARKS[check.state]} {escape(check.sentence)}", style=style, highlight=False, soft_wrap=True)
    for line in (*lines, f"and {rest} more") if rest > 0 else lines:
        console.print(f"    {escape(line)}", highlight=False, soft_wrap=True)


def _print(console: Console, name: str, columns: Sequence[str], groups: Sequence[Sequence[Line]]) -> dict[str, None]:
    """Print a table with as many of the columns as there is room for; return those left out."""
    left_out: dict[str, None] = {}
    lines = [line for group in groups for line in group]
    for column in ("", *DISPENSABLE):
        left_out |= {column: None} if column in columns else {}
        shown = [column for column in columns if column not in left_out]
        if _width(shown, lines) <= console.width:
            break
    room = NARROW + console.width - _width(shown, lines, labels=NARROW)
    table = result_table(name, shown)
    for group in groups:
        for i, line in enumerate(group):
            table.add_row(*("" if i and column == "task" else _cell(line, column, room) for column in shown))
        if len(groups) <= MANY:
            table.add_section()
    console.print(table)
    return left_out


def _cell(line: Line, column: str, room: int) -> str:
    return escape(broken(Text.from_markup(line[column]).plain, room)) if column in LABELS else line[column]


def broken(label: str, width: int) -> str:
    """Return a label in lines of at most this many characters, broken after commas where it has any."""
    lines = [""]
    for part in re.findall(r"[^,]*,|[^,]+$", label):
        if lines[-1] and cell_len(lines[-1] + part) > width:
            lines.append("")
        lines[-1] += part
    return "\n".join(lines)


def _width(columns: Sequence[str], lines: Sequence[Line], labels: int = 0) -> int:
    """Return the width of a table: each column's longest text (or word, where it folds), and what is in between.

    labels: the width of a column of labels, where it is given.
    """

    def longest(column: str) -> int:
        texts = [column, *(Text.from_markup(line[column]).plain for line in lines)]
        widest = max(cell_len(part) for text in texts for part in (text.split() if column in FOLDING else [text]))
        return (labels or min(widest, NARROW)) if column in LABELS else widest

    return 1 + sum(longest(column) + 3 for column in columns)


def result_table(name: str, columns: Sequence[str], left: Collection[str] = LEFT) -> Table:
    """Return an empty table in the form that all results have. left: columns of text."""
    table = Table(title=name, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD, header_style="bold")
    for column in columns:
        wraps = column in FOLDING + LABELS
        overflow: OverflowMethod = "fold" if wraps else "ellipsis"
        table.add_column(column, justify="left" if column in left else "right", no_wrap=not wraps, overflow=overflow)
    return table


def _line(row: SummaryRow, config: Mapping[str, Any]) -> Line:
    around = "" if row.comparison == "invalid" else interval(row.speedup_interval)
    return {
        "task": escape(title(row.category)),
        "method": escape(row.method),
        "speedup": f"[bold]{speedup(row)}[/]" if row.comparison in ("faster", "slower") else speedup(row),
        "95% interval": around or row.comparison,
        "tokens/s": format_number(row.tokens_per_s, 1),
        "τ": format_number(row.mean_acceptance_length),
        "output": escape(short_output(row, config)),
        "quality": format_number(quality(row, config)),
        "judged": format_number(row.judge_score),
        "n": short_n(row),
    }


def _of_one(row: ConcurrencyRow) -> str:
    """Return the speedup of single requests as in '≈ 1.13×'."""
    if row.comparison == "reference":
        return "reference"
    return f"{MARKS.get(row.comparison, '')} {format_speedup(row.speedup)}".strip()


LEVEL_CELLS: dict[str, Callable[[ConcurrencyRow], str]] = {
    "in flight": lambda row: str(row.concurrency),
    "method": lambda row: row.method,
    "tokens/s": lambda row: format_number(row.tokens_per_s, 1),
    "× baseline": lambda row: format_speedup(row.throughput_ratio),
    "speedup": _of_one,
    "95% interval": lambda row: (
        interval(row.speedup_interval) or ("" if row.comparison == "reference" else row.comparison)
    ),
    "first ms": lambda row: format_number(row.waits["ttft_s_p50"], 2, scale=1000),
    "ms/token": lambda row: format_number(row.waits["tpot_s_p50"], 2, scale=1000),
    "s": lambda row: format_number(row.waits["latency_s_p50"], 2),
    "failed": lambda row: str(row.failed),
}
TITLE = "By requests in flight: throughput, and medians over requests"
EXPLAINED = (
    "× baseline: throughput over the baseline's with as many in flight, which has no interval; speedup: of single "
    "requests, by the time per token from when each was begun; first ms, ms/token and s: medians of a request's first "
    "token, later tokens and whole time"
)


def print_concurrency(run: Run, console: Console) -> None:
    """Print a row for each number of requests in flight and server; nothing where one was in flight alone."""
    found = concurrency_rows(run)
    if not found:
        return
    widen(console)
    table = result_table(TITLE, tuple(LEVEL_CELLS))
    table.columns[1].min_width = min(16, max(cell_len(row.method) for row in found))
    for _, level in groupby(found, key=lambda row: row.concurrency):
        for i, row in enumerate(level):
            count, *cells = (escape(cell(row)) for cell in LEVEL_CELLS.values())
            table.add_row("" if i else count, *cells)
        table.add_section()
    console.print(table)
    console.print(EXPLAINED, soft_wrap=True, highlight=False)


def markdown_concurrency(run: Run) -> str:
    """Return the same as a Markdown table with its heading."""
    cells = [[cell(row) for cell in LEVEL_CELLS.values()] for row in concurrency_rows(run)]
    return f"## {TITLE}\n\n{table(list(LEVEL_CELLS), cells, ('method',))}\n{EXPLAINED[0].upper()}{EXPLAINED[1:]}.\n"


NAMES = {  # figure -> title of its table, digits
    "speedup": ("Speedup over {}", 2),
    "tokens_per_s": ("Tokens per second", 1),
    "mean_acceptance_length": ("τ, tokens per step", 2),
    "quality": ("Quality", 2),
}
POINTS = ("quality",)  # figures whose change is a difference; that of the others is a share
UNSAID = 1e-9  # a change of rounding


def print_comparison(made: RunComparison, console: Console) -> None:
    """Print both runs' differences, the tables, warnings and the finding."""
    widen(console)
    _print_differences(made, console)
    for metric in NAMES:
        shown = [row for row in made.rows if _shown(row, metric)]
        if any(row.changes[metric].a is not None for row in shown):
            _print_metric(metric, shown, console)
    for said in _notes(made):
        console.print(escape(said), highlight=False, soft_wrap=True)
    console.print(escape(comparison_finding(made.rows)), style="bold", highlight=False, soft_wrap=True)


def _shown(row: ComparedRow, metric: str) -> bool:
    """Tasks are shown of the speedup alone, autoregressive decoding only where it is no 1 by definition."""
    return judged(metric, row) and (metric == "speedup" or row.category == OVERALL)


def _print_differences(made: RunComparison, console: Console) -> None:
    console.print(f"A: {escape(str(made.a))}\nB: {escape(str(made.b))}", highlight=False, soft_wrap=True)
    if not made.found:
        console.print("Nothing differs in configuration, versions or machine.")
        return
    table = result_table("What differs", ("what", "in A", "in B"))
    for column in table.columns:
        column.justify, column.no_wrap, column.overflow = "left", False, "fold"
    for one in made.found:
        table.add_row("[red]✕[/] " * one.blocking + escape(one.what), escape(one.a), escape(one.b))
    console.print(table)


def _print_metric(metric: str, rows: Sequence[ComparedRow], console: Console) -> None:
    tasks = list(dict.fromkeys(row.category for row in rows))
    several = len(tasks) > 2  # a single task is all of them
    head = (*(("task",) if several else ()), "method", "A", "B", "change", "95% interval", "verdict", "n")
    table = result_table(NAMES[metric][0].format(rows[0].baseline), head)
    for task in [*tasks[1:], tasks[0]] if several else tasks[:1]:  # all tasks together come last
        for i, row in enumerate(row for row in rows if row.category == task):
            name = ("" if i else escape(title(task)),) if several else ()
            table.add_row(*name, *_comparison_cells(metric, row))
        table.add_section()
    console.print(table)


def _comparison_cells(metric: str, row: ComparedRow) -> tuple[str, ...]:
    change, digits = row.changes[metric], NAMES[metric][1]
    told = change.verdict if change.verdict in (SAME, *UNJUDGED) else f"[bold]{change.verdict}[/]"
    changed = change_text(metric, change.change), interval_text(metric, change)
    figures = format_number(change.a, digits), format_number(change.b, digits)
    return escape(row.method), *figures, *changed, told, f"{row.n_prompts:,}"


def change_text(metric: str, value: float | None) -> str:
    """Return a change as in '−3.1%', of quality as in '+0.02'."""
    if value is None:
        return MISSING
    value = 0.0 if abs(value) < UNSAID else value
    return (f"{value:+.2f}" if metric in POINTS else f"{100 * value:+.1f}%").replace("-", "−")


def interval_text(metric: str, change: Change) -> str:
    """Return the interval of a change as in '−5.0% to −1.2%'."""
    return MISSING if change.interval is None else " to ".join(change_text(metric, end) for end in change.interval)


def _notes(made: RunComparison) -> Iterator[str]:
    """Yield what the tables leave unsaid."""
    rows = [row for row in made.rows if row.category == OVERALL]
    rates = [row.changes["tokens_per_s"] for row in rows]
    for rate in [rate for rate in rates if rate.verdict in (OTHER_MACHINE, OTHER_THREADS)][:1]:
        yield (
            f"{rate.verdict.capitalize()} ({rate.reason}): times do not compare; speedups do, since each is relative "
            "to autoregressive decoding there."
        )
    for row in rows:
        if row.n_other_answers:
            yield f"{row.method}: {row.n_other_answers} of {row.n_answers} answers have other tokens in B."
    if any(row.n_answers for row in rows) and not any(row.n_other_answers for row in rows):
        yield "All answers that are in both runs have the same tokens."
    for row in rows:
        if row.n_failed_a or row.n_failed_b:
            counts = f"{row.n_failed_a} samples failed in A, {row.n_failed_b} in B"
            yield f"{row.method}: {counts} ({row.error}); no number includes them."
    yield from (f"Warning: {said}" for said in made.warnings)


def comparison_finding(rows: Sequence[ComparedRow]) -> str:
    """Return the finding over all tasks in a sentence."""
    found = {r.method: r.changes["speedup"] for r in rows if r.category == OVERALL and r.method != r.baseline}
    told = {method: change for method, change in found.items() if change.interval}
    reasons = dict.fromkeys(change.reason for change in found.values() if change.verdict == FAILED)
    failed = " ".join(f"{reason}; no speedup is compared." for reason in reasons)
    if not told:
        return failed or "Too few questions are in both runs to tell whether a speedup changed."
    return f"{_changes(rows[0].baseline, told)} {failed}".rstrip()


def _changes(baseline: str, told: Mapping[str, Change]) -> str:
    """Return the speedups that changed in a sentence. told: the changes that have an interval, by method."""
    changed = sorted((item for item in told.items() if item[1].verdict != SAME), key=lambda item: item[1].change or 0)
    if not changed:
        method, widest = max(told.items(), key=lambda item: (i := item[1].interval or (0, 0))[1] - i[0])
        noise = f"the widest interval is {method}'s, {interval_text('speedup', widest)}"
        return f"No speedup changed from A to B by more than noise ({noise})."
    said = [
        f"{method} is {c.verdict}, {format_number(c.a)}× in A and {format_number(c.b)}× in B "
        f"({change_text('speedup', c.change)}, 95% interval {interval_text('speedup', c)})"
        for method, c in changed
    ]
    rest = len(told) - len(changed)
    return f"Speedup over {baseline}: {'; '.join(said)}." + (f" {rest} not significant." if rest else "")


TABLE, RESULT, FIGURE = "table.csv", "result.json", "figure.html"
EXPERIMENT_WIDTH = 140  # where there is no terminal to ask
STYLES: dict[Mark, str] = {"plain": "", "accepted": "green", "rejected": "red strike", "next": "bold"}
BRACKETS: dict[Mark, tuple[str, str]] = {  # where there are no colours
    "plain": ("", ""),
    "accepted": ("", ""),
    "rejected": ("[-", "-]"),
    "next": ("*", "*"),
}


def cell(value: Value, column: Column) -> str:
    """Return a value as text for people."""
    if value is None:
        return MISSING
    if isinstance(value, str):
        return value
    if column.form in ("count", "text"):
        return f"{value:,}"
    written = {
        "number": format_number,
        "times": lambda v, _: format_speedup(v),
        "percent": percent,
        "scientific": scientific,
    }
    return written[column.form](value, column.digits)


def print_result(result: Result, console: Console) -> None:
    """Print the lines, tables and notes of a result."""
    widen(console, EXPERIMENT_WIDTH)
    for line in result.lines:
        console.print(marked(line, console.is_terminal), soft_wrap=True)
    for grid in result.all_grids():
        console.print(_table(grid))
    for note in result.notes:
        console.print(note, style="dim", markup=False, highlight=False, soft_wrap=True)


def marked(line: Sequence[Span], colours: bool) -> Text:
    """Show accepted text green, rejected text red and struck out, the next token bold; use brackets without colours."""
    text = Text()
    for span in line:
        before, after = ("", "") if colours else BRACKETS[span.mark]
        text.append(before + span.text + after, STYLES[span.mark] if colours else "")
    return text


def _table(grid: Grid) -> Table:
    left = [column.title for column in grid.columns if column.form == "text"]
    table = result_table(grid.caption or grid.name, [column.title for column in grid.columns], left)
    for column in table.columns:
        column.no_wrap = False
    for row in grid.rows:
        table.add_row(*(escape(cell(v, c)) for v, c in zip(row, grid.columns, strict=True)))
    return table


def markdown(result: Result, most: int) -> Iterator[str]:
    """Yield the lines of a result as Markdown: marked text, tables of `most` rows each, and notes."""
    if result.lines:
        yield from ("", "```text", *(marked(line, False).plain for line in result.lines), "```")
    for grid in result.all_grids():
        rows = [[cell(v, c) for v, c in zip(row, grid.columns, strict=True)] for row in grid.rows[:most]]
        left = [c.title for c in grid.columns if c.form == "text"]
        yield from ("", f"{grid.caption or grid.name}:", "", table([c.title for c in grid.columns], rows, left))
        if len(grid.rows) > most:
            yield f"These are the first {most} of {len(grid.rows):,} rows."
    if result.notes:
        yield from ("", *(f"- {safe(note)}" for note in result.notes))


def status(parts: Sequence[Part]) -> list[str]:
    """Return 'runs: a, b' and, for each missing piece X, 'needs X: c, d'."""
    lacking: dict[str, list[str]] = {}
    for part in parts:
        lacking.setdefault(part.missing, []).append(part.name)
    lines = [f"runs: {', '.join(lacking.pop(''))}"] if "" in lacking else []
    return lines + [f"needs {what}: {', '.join(names)}" for what, names in lacking.items()]


def write_result(result: Result, about: Mapping[str, Any], folder: Path) -> list[Path]:
    """Write table.csv (and NAME.csv for each further table) and result.json; return their paths. Raises UserError."""
    paths = []
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for i, grid in enumerate(result.all_grids()):
            paths.append(folder / (TABLE if i == 0 else f"{grid.name}.csv"))
            with paths[-1].open("w", newline="", encoding="utf-8") as file:
                writer = csv.writer(file, lineterminator="\n")
                writer.writerows([[column.title for column in grid.columns], *grid.rows])
        paths.append(folder / RESULT)
        text = json.dumps({**about, **asdict(result)}, indent=1, ensure_ascii=False, default=str)
        paths[-1].write_text(text + "\n", encoding="utf-8")
    except OSError as error:
        raise UserError(f"cannot write to {folder}: {os_reason(error)}") from error
    return paths
