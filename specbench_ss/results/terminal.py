"""Tables of runs, comparisons and experiments in the terminal."""

from __future__ import annotations

import csv
import io
import json
import os
import re
import textwrap
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
from specbench_ss.results.checks import FINDINGS, Check, worst_first
from specbench_ss.results.compare import (
    FAILED,
    INVALID,
    NO_VERDICT,
    OTHER_MACHINE,
    OTHER_THREADS,
    SAME,
    Change,
    ComparedRow,
    RunComparison,
    judged,
)
from specbench_ss.results.concurrency import ConcurrencyRow, limits_text
from specbench_ss.results.cost_model import MachineRow
from specbench_ss.results.ranking import (
    MARKED,
    MARKS,
    NO_MEAN,
    chat_group,
    contends,
    marked_speedup,
    more_questions,
    notes,
    own_model,
    quality,
    quality_text,
    short_n,
    short_output,
    speedup,
    speedup_of,
    task_groups,
)
from specbench_ss.results.report import Column, Grid, Mark, Part, Result, Span, Value
from specbench_ss.results.summary import OVERALL, SummaryRow
from specbench_ss.results.text import (
    MISSING,
    cut,
    format_number,
    format_speedup,
    interval,
    percent,
    pluralize,
    safe,
    scientific,
    table,
)
from specbench_ss.runs.config import verification_text
from specbench_ss.runs.records import Run
from specbench_ss.stats.intervals import FEWEST
from specbench_ss.stats.pairs import Pairs
from specbench_ss.storage import write_text

CLOSES = 0.02  # share of a step by which its parts, from another clock, may differ from it without a note
SHOWN_SHARE = 0.0005  # of a step: less is 0.0 %


def machine_lines(rows: Sequence[MachineRow], manifest: Mapping[str, Any]) -> list[str]:
    """Return a line on the time of a step outside its parts, and lines on the limits of the machine.

    rows, manifest: of the run.
    """
    if manifest["config"].get("endpoints"):
        return []
    busy = ((manifest.get("machine") or {}).get("limits") or {}).get("busy", "")
    noted = [f"roofline limits: possibly too low; when they were measured, {busy}"] if busy else []
    return [*_host_share(rows), _limits(rows), *noted]


def _host_share(rows: Sequence[MachineRow]) -> Iterator[str]:
    known = [row for row in rows if row.host_share is not None]
    most = max(known, key=lambda row: row.host_share or 0.0, default=None)
    off = [f"{row.method} {row.parts_residual or 0.0:+.1%}" for row in known if abs(row.parts_residual or 0.0) > CLOSES]
    if most is not None and (off or (most.host_share or 0.0) >= SHOWN_SHARE):
        rest = f"; the parts and the step, by two clocks, differ: {'; '.join(off)}" if off else ""
        yield f"steps: host time outside draft, verify and accept: at most {most.host_share:.1%} ({most.method}){rest}"


def _limits(rows: Sequence[MachineRow]) -> str:
    reached = [row for row in rows if row.bandwidth_share is not None and row.compute_share is not None]
    if not reached:
        return "roofline limits: not measured on this machine; run `ssbench doctor --calibrate`"
    parts = [f"{row.method} {row.bandwidth_share:.0%} and {row.compute_share:.1%}" for row in reached]
    return f"roofline limits: share of memory bandwidth and of peak FLOP/s, counted from shapes: {'; '.join(parts)}"


COLUMNS = ("method", "speedup", "95% CI", "decode", "τ", "accept", "step time", "tok/s", "quality", "judge", "output")
# dropped in this order in a narrow terminal
DISPENSABLE = ("n", "judge", "quality", "decode", "tok/s", "accept", "step time")
OPTIONAL = ("decode", "τ", "accept", "step time", "quality", "judge")  # left out if no row has a value
BY_TASK = "by task"  # head of the labels in the table of speedups by task
LEFT = ("task", "method", BY_TASK, "95% CI", "output", "configuration", "verdict")
FOLDING = ("output",)  # columns that may take several lines
LABELS = ("method", BY_TASK)  # these too, but they break after commas
NARROW = 28  # characters of a label before other columns are dropped for it
LABEL_LINES = 3  # of a label in a table
WIDTH = 120  # without a terminal
MOST_TASKS = 6  # columns of the short table by task
MOST_METHODS = 6  # its rows
SHORTEST_HEAD = 5  # characters of a task in its head
MOST_WARNINGS = 3
SHOWN = 8  # details of a check
MOST_LOST = 0.5  # share of the gain by tau that step time may take before `why` names it
MOSTLY = 0.6  # share of the added time of drafting and verification above which `why` names one alone
STATE_MARKS = {"wrong": "[red]x[/]", "warning": "[yellow]![/]", "not checked": "[dim]·[/]"}
PLACE = re.compile(r"(?P<error>.*) \((?P<where>(?P<file>[^\s:]+):\d+ in \S+)\)", re.DOTALL)  # `errors.failure_text`
Line = dict[str, str]  # cells by column


def widen(console: Console, width: int = WIDTH) -> None:
    """Give tables room without a terminal, unless the variable COLUMNS states a width."""
    if not console.is_terminal and "COLUMNS" not in os.environ:
        console.width = max(console.width, width)


def print_answer(results: Results, console: Console) -> None:
    """Print the finding over all tasks in one line, marked if times are noisy or unstable."""
    timing = next((check for check in results.checks if check.name == "timing" and check.state == "warning"), None)
    mark = ""
    if timing is not None and not results.all_noisy:
        mark = f"  [yellow]! {'noisy' if 'noisy' in timing.findings else 'timing'}[/]"
    console.print(f"[bold]{escape(results.headline)}[/]{mark}", highlight=False, soft_wrap=True)
    for line in (line for check in results.checks if check.name == "lossy" for line in check.lines):
        console.print(f"  lossy  {escape(line)}", highlight=False, soft_wrap=True)


def print_short(results: Results, console: Console) -> None:
    """Print the finding, tables over all tasks and by task, reasons of the speedups, and the worst checks.

    These are at most 18 lines for four methods.
    """
    widen(console)
    print_answer(results, console)
    rows = ranked(results.overall)
    columns = _columns(rows, results.config)
    _print_line(console, _legend(rows, columns), "  ", 1, style="dim")
    cells = [_cells(row, results.config, short=True) for row in rows]
    _print(console, "", columns, [cells], folding=())
    by_task = _by_task(results)
    reasons = _reasons(rows)
    for i, reason in enumerate(reasons):
        _print_line(console, reason, "       " if i else "  why  ", 1)
    if by_task:
        if len(reasons) < 2:  # the output has 18 lines at most
            console.print()
        _print(console, "", *_fitted(by_task, console.width))
    elif scarce := _few_per_task(results.run):
        _print_line(console, scarce, "  ")
    _print_warnings(results, console, brief=bool(by_task))


def print_verbose(results: Results, console: Console) -> None:
    """Print the finding, tables by task and over all tasks, notes, and all checks with their details."""
    widen(console)
    print_answer(results, console)
    rule = verification_text(results.config)
    for line in (*([rule] if rule else []), *machine_lines(results.machine_rows, results.manifest)):
        console.print(line, markup=False, highlight=False, soft_wrap=True)
    config, rows, n_repeats = results.config, results.rows, int(results.config["repeats"])
    repeats = f", {n_repeats} repeats" if n_repeats > 1 else ""
    repeats += f" in {results.run.sessions} sessions" if results.run.sessions > 1 else ""
    tasks = [ranked(list(group)) for name, group in groupby(rows, key=lambda row: row.task) if name != OVERALL]
    overall = ranked(results.overall)
    columns = (*_columns(overall, config), "n")
    by_task = [[_cells(row, config) for row in task] for task in tasks]
    tables = [(f"\nBy task{repeats}", ("task", *columns), by_task)] if len(tasks) > 1 else []
    name = f"\nOverall, {len(tasks)} tasks{repeats}" if len(tasks) > 1 else f"\nOverall{repeats}"
    for title_of, shown, groups in (*tables, (name, columns, [[_cells(row, config) for row in overall]])):
        if dropped := _print(console, title_of, shown, groups):
            console.print(f"not shown in a terminal of {console.width} columns: {', '.join(dropped)}", style="dim")
    for note in _notes_of(results, overall):
        console.print(note, style="dim", markup=False, highlight=False, soft_wrap=True)
    for check in worst_first(results.checks):
        if check.name != "invalid" or check.state != "not checked" or _asked(check, results):
            _print_check(console, check)


def _notes_of(results: Results, overall: Sequence[SummaryRow]) -> Iterator[str]:
    run = results.run
    for row in overall if run.sessions > 1 else ():
        if row.comparison not in ("baseline", "invalid"):
            each = Pairs(run.of(row.method), run.of(run.baseline)).session_speedups()
            yield f"{row.method}: speedup by session {', '.join(map(format_speedup, each))}"
    yield from notes(results.rows, results.config, short=True)
    if results.run.judged_scores:
        yield f"judge: score of 10 by {results.run.judge}, a mean over questions"
    for row in overall:
        if row.reference_speedup is not None:
            yield f"{row.method} over {row.reference}, its own model: {own_model(row)}"
        if row.quality_verdict is not None:
            yield f"{row.method}: {quality_text(row)}"


def ranked(rows: Sequence[SummaryRow]) -> list[SummaryRow]:
    """Return the rows of a task by speedup; those without one come last."""
    return sorted(rows, key=lambda row: (row.speedup is None, -(row.speedup or 0)))


def _columns(rows: Sequence[SummaryRow], config: Mapping[str, Any]) -> tuple[str, ...]:
    cells = [_figures(row, config) for row in rows]
    return tuple(name for name in COLUMNS if name not in OPTIONAL or any(line[name] != MISSING for line in cells))


def _figures(row: SummaryRow, config: Mapping[str, Any]) -> Line:
    return {
        "decode": format_speedup(row.decode_speedup),
        "τ": format_number(row.mean_acceptance_length),
        "accept": percent(row.acceptance_rate),
        "step time": _step_time(row),
        "tok/s": format_number(row.tokens_per_s, 1),
        "quality": format_number(quality(row, config)),
        "judge": format_number(row.judge_score),
    }


def _cells(row: SummaryRow, config: Mapping[str, Any], short: bool = False) -> Line:
    significant = row.comparison in ("faster", "slower")
    return _figures(row, config) | {
        "task": escape(row.task),
        "method": escape(row.method),
        "speedup": f"[bold]{speedup(row)}[/]" if significant else speedup(row),
        "95% CI": _interval(row, short),
        "output": escape(_match(row) if short else short_output(row, config)),
        "n": short_n(row),
    }


def _interval(row: SummaryRow, short: bool) -> str:
    if row.n_failed and not row.n_prompts:
        return "failed"
    if row.method == row.baseline or row.comparison == "invalid":
        return ""
    if row.comparison == "insufficient data":
        return "" if short else row.comparison
    return interval(row.speedup_interval)


VERDICTS = ("mismatch", "text differs", "length differs", "numerical tie", "identical", "sampled")  # the worst first


def _match(row: SummaryRow) -> str:
    """Return the worst verdict on the outputs, or 'baseline'."""
    if row.method == row.baseline or row.reference_of:
        return "baseline"
    if not row.lossless:
        return "lossy"
    if row.bias:
        return "biased" if row.bias == "biased" else "sampled"
    return next((verdict for verdict in VERDICTS if row.output_match.get(verdict)), MISSING)


LEGEND = {"decode": "without prefill", "τ": "tokens per step", "accept": "of the draft's depth"}


def _legend(rows: Sequence[SummaryRow], columns: Sequence[str]) -> str:
    """Return the meaning of the marks at these speedups and of the columns."""
    used = {row.comparison for row in rows if row.speedup is not None}
    marks = [f"{mark} {MARKED[comparison]}" for comparison, mark in MARKS.items() if comparison in used]
    return "; ".join([*marks, *(f"{column}: {LEGEND[column]}" for column in columns if column in LEGEND)])


def _reasons(rows: Sequence[SummaryRow]) -> list[str]:
    """Return τ and step time of the fastest method, and of the one that loses most of its gain by its step time."""
    known = [row for row in rows if row.speedup and row.relative_step_time and row.mean_acceptance_length]
    base = next((row for row in known if row.method == row.baseline), None)
    known = [row for row in known if contends(row) and not row.reference_of]
    if base is None:
        return []
    worst = max(known[1:], key=_lost, default=None)
    shown = [*known[:1], *([worst] if worst and _lost(worst) >= MOST_LOST else [])]
    return [_reason(row, base) for row in shown]


def _reason(row: SummaryRow, base: SummaryRow) -> str:
    """Return τ and step time of a method as text, with the part of a step that takes most of the longer time."""
    tau, same = format_number(row.mean_acceptance_length), _step_time(row) == _step_time(base)
    length = f"as long as {base.method}'s" if same else f"{_step_time(row)} as long"
    text = f"{cut(row.method, NARROW)}: {tau} tokens per step, a step is {length}"
    longer = not same and (row.relative_step_time or 0.0) > 1
    if row.draft_s is None or row.verify_s is None or base.verify_s is None or not longer:
        return text
    parts = {"drafting": row.draft_s - (base.draft_s or 0.0), "verification": row.verify_s - base.verify_s}
    added = {part: seconds for part, seconds in parts.items() if seconds > 0}
    most = max(added, key=lambda part: added[part], default="")
    if not most:
        return text
    return (
        f"{text}, mostly by {most}"
        if added[most] > MOSTLY * sum(added.values())
        else f"{text}, by {' and '.join(added)}"
    )


def _step_time(row: SummaryRow) -> str:
    return format_speedup(row.relative_step_time)


def _lost(row: SummaryRow) -> float:
    """Return the share of the gain by fewer steps that a longer step costs."""
    tau = row.mean_acceptance_length or 1.0
    return (tau - tau / (row.relative_step_time or 1.0)) / (tau - 1) if tau > 1 else 0.0


def _print_line(console: Console, text: str, mark: str, most: int = 2, style: str = "") -> None:
    """Print a text after a mark, wrapped and indented, in so many lines at most."""
    width = max(20, console.width - cell_len(Text.from_markup(mark).plain))
    lines = textwrap.wrap(text, width, max_lines=most, placeholder=" ...", break_on_hyphens=False)
    blank = " " * cell_len(Text.from_markup(mark).plain)
    for i, line in enumerate(lines):
        console.print(f"{blank if i else mark}{escape(line)}", style=style, highlight=False, soft_wrap=True)


def _print_warnings(results: Results, console: Console, brief: bool) -> None:
    """Print the methods that failed and the worst checks. brief: in 3 lines at most, else in 7."""
    found = [check for check in worst_first(results.checks) if check.state != "not checked" or _asked(check, results)]
    failed = [row for row in results.overall if row.n_failed]
    found = [check for check in found if check.name not in ("failed", "lossy")]  # they have lines of their own
    most = MOST_WARNINGS if not brief else 1 if failed else 2
    rest = len(failed) + len(found) - most
    for row in failed[:most]:
        _print_failure(results, row.method, console)
    shown = found[: max(0, most - len(failed))]
    for check in shown:
        detail = f" {check.lines[0]}" if check.name in FINDINGS and check.lines else ""
        lines = 1 if (rest > 0 and (brief or check is shown[-1])) or (brief and check is not shown[0]) else 2
        _print_line(console, check.sentence + detail, f"  {STATE_MARKS[check.state]} ", lines)
    if rest > 0:
        console.print(f"  [yellow]![/] {pluralize(rest, 'more warning')}: ssbench report -v", highlight=False)


def _asked(check: Check, results: Results) -> bool:
    """Return whether the run was meant to show outputs from memory, which only repeats can."""
    return check.name == "invalid" and results.run.repeats > 1


def _print_failure(results: Results, label: str, console: Console) -> None:
    """Print how many prompts a method failed on, the first error, and where it was raised."""
    rows = results.run.of(label)
    failed = {(row.question_id, row.turn): row.error or "" for row in reversed(rows) if not row.ok}
    error = " ".join(list(failed.values())[-1].split())
    place = PLACE.fullmatch(error)
    text = place["error"] if place else error
    often = f"failed on {len(failed)} of {len({(row.question_id, row.turn) for row in rows})} prompts: "
    text = text if text.startswith("failed in warm-up") else often + text
    _print_line(console, f"{cut(label)} {text}", f"  {STATE_MARKS['wrong']} ", 1 if place else 2)
    if place:
        plugins = [file["file"] for file in results.manifest["config"].get("plugin", [])]
        own = next((file for file in plugins if Path(file).name == place["file"]), None)
        what = f"--plugin {own}" if own else results.run.entry(label)["name"]
        console.print(
            f"      {escape(place['where'])}   ->  ssbench check {escape(what)}", highlight=False, soft_wrap=True
        )


def _by_task(results: Results) -> list[Line]:
    """Return the speedups of the fastest methods by task; nothing with too few prompts, or for too many columns."""
    groups = _task_groups(results.run)
    if not 2 <= len(groups) <= MOST_TASKS or _few_per_task(results.run):
        return []
    rows = [row for row in ranked(results.overall) if row.method != row.baseline and row.comparison != "invalid"]
    return [
        {BY_TASK: escape(row.method)}
        | {name: format_speedup(speedup_of(results.run, row.method, of)) for name, of in groups.items()}
        for row in rows[:MOST_METHODS]
    ]


def _task_groups(run: Run) -> dict[str, tuple[str, ...]]:
    """Return the tasks by the names that --tasks takes, with those of MT-Bench as one group."""
    groups = task_groups(run.categories, chat_group(run, short=True))
    return {name if len(tasks) > 1 else tasks[0]: tasks for name, tasks in groups.items()}


def _few_per_task(run: Run) -> str:
    """Return a line that states how many questions the tasks have, if that is too few for results by task; else ''."""
    answered = {task: len({row.question_id for row in run.rows if row.category == task}) for task in run.categories}
    groups, sizes = _task_groups(run), list(answered.values())
    if len(groups) < 2 or min(sum(answered[task] for task in tasks) for tasks in groups.values()) >= FEWEST:
        return ""
    prompts = len({(row.question_id, row.turn) for row in run.rows})
    each = f"{min(sizes)}" if min(sizes) == max(sizes) else f"{min(sizes)}–{max(sizes)}"
    more = f" ({prompts:,} prompts)" if prompts > sum(sizes) else ""
    remedy = more_questions(run)
    return f"{pluralize(sum(sizes), 'question')}{more}, {each} per task: too few for results by task ({remedy})"


def _fitted(lines: Sequence[Line], width: int) -> tuple[list[str], list[list[Line]]]:
    """Return the columns of a table by task and its lines, with heads that are cut as far as the width demands."""
    for most in range(max(map(len, lines[0])), SHORTEST_HEAD - 1, -1):
        heads = [name if name == BY_TASK else escape(cut(name, most)) for name in lines[0]]
        fitted = [dict(zip(heads, line.values(), strict=True)) for line in lines]
        if _width(heads, fitted) <= width:
            break
    return heads, [fitted]


def _print_check(console: Console, check: Check) -> None:
    style, lines, rest = "dim" if check.state == "not checked" else "", check.lines[:SHOWN], len(check.lines) - SHOWN
    console.print(f"{STATE_MARKS[check.state]} {escape(check.sentence)}", style=style, highlight=False, soft_wrap=True)
    for line in (*lines, f"and {rest} more") if rest > 0 else lines:
        console.print(f"    {escape(line)}", highlight=False, soft_wrap=True)


def _print(
    console: Console,
    name: str,
    columns: Sequence[str],
    groups: Sequence[Sequence[Line]],
    folding: Collection[str] = FOLDING,
) -> dict[str, None]:
    """Print a table with as many of the columns as there is room for; return those left out.

    folding: columns that may take several lines to save others.
    """
    left_out: dict[str, None] = {}
    lines = [line for group in groups for line in group]
    for column in ("", *DISPENSABLE):
        left_out |= {column: None} if column in columns else {}
        shown = [column for column in columns if column not in left_out]
        if _width(shown, lines, folding=folding) <= console.width:
            break
    room = NARROW + console.width - _width(shown, lines, labels=NARROW)
    table = result_table(name, shown)
    table.box, table.padding, table.title_style = None, (0, 0, 0, 2), "bold"
    for group in groups:
        for i, line in enumerate(group):
            table.add_row(*("" if i and column == "task" else _cell(line, column, room) for column in shown))
    console.print(table)
    return left_out


def _cell(line: Line, column: str, room: int) -> str:
    return escape(broken(Text.from_markup(line[column]).plain, room)) if column in LABELS else line[column]


def broken(label: str, width: int) -> str:
    """Return a label in lines of at most this many characters, broken after commas; its middle is cut if it is long."""
    lines = [""]
    for part in re.findall(r"[^,]*,|[^,]+$", cut(label, LABEL_LINES * width)):
        if lines[-1] and cell_len(lines[-1] + part) > width:
            lines.append("")
        lines[-1] += part
    return "\n".join(lines)


def _width(columns: Sequence[str], lines: Sequence[Line], labels: int = 0, folding: Collection[str] = FOLDING) -> int:
    """Return the width of a table: each column's longest text (or word, where it folds), and the padding.

    labels: the width of a column of labels, where it is given.
    """

    def longest(column: str) -> int:
        texts = [column, *(Text.from_markup(line[column]).plain for line in lines)]
        widest = max(cell_len(part) for text in texts for part in (text.split() if column in folding else [text]))
        return (labels or min(widest, NARROW)) if column in LABELS else widest

    return sum(longest(column) + 2 for column in columns)


def result_table(name: str, columns: Sequence[str], left: Collection[str] = LEFT) -> Table:
    """Return an empty table in the form that all results have. left: columns of text."""
    table = Table(title=name, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD, header_style="bold")
    for column in columns:
        wraps = column in FOLDING + LABELS
        overflow: OverflowMethod = "fold" if wraps else "ellipsis"
        table.add_column(column, justify="left" if column in left else "right", no_wrap=not wraps, overflow=overflow)
    return table


def _of_one(row: ConcurrencyRow) -> str:
    """Return the speedup by time per token of a request, as in '≈ 1.13×'."""
    return "baseline" if row.is_baseline else marked_speedup(row.speedup, row.comparison)


def _compared(row: ConcurrencyRow) -> bool:
    return not row.is_baseline


LEVEL_CELLS: dict[str, Callable[[ConcurrencyRow], str]] = {
    "load": lambda row: str(row.load),
    "method": lambda row: row.method,
    "tokens/s": lambda row: format_number(row.tokens_per_s, 1),
    "× baseline": lambda row: format_speedup(row.throughput_ratio),
    "speedup": _of_one,
    "95% CI": lambda row: interval(row.speedup_interval),
    "τ": lambda row: format_number(row.mean_acceptance_length),
    "same": lambda row: percent(row.same_output),
    "first ms": lambda row: format_number(row.waits["ttft_s_p50"], 2, scale=1000),
    "ms/token": lambda row: format_number(row.waits["tpot_s_p50"], 2, scale=1000),
    "s": lambda row: format_number(row.waits["latency_s_p50"], 2),
    "goodput": lambda row: format_number(row.goodput),
    "SLO": lambda row: percent(row.slo_attainment),
    "failed": lambda row: str(row.failed),
}
LEVEL_SHOWN: dict[str, Callable[[ConcurrencyRow], bool]] = {  # these columns are left out if no row has such a cell
    "× baseline": _compared,
    "speedup": _compared,
    "95% CI": _compared,
    "τ": lambda row: row.mean_acceptance_length is not None,
    "same": lambda row: _compared(row) and row.same_output is not None,
    "failed": lambda row: row.failed > 0,
}
LIMIT_CELLS, WITHOUT_LIMITS = (
    ("goodput", "SLO"),
    ("× baseline", "same", "s"),
)  # 120 characters have room for one of the pairs
TITLE = "By load: throughput, and medians over requests"
LEVEL_LEGEND = {
    "× baseline": "throughput over the baseline's with as many requests in flight",
    "speedup": "time per token of a request, baseline / method, with its 95% CI",
    "same": "outputs equal to the baseline's of one request at a time",
    "first ms": "time to first token",
    "ms/token": "time per output token",
    "s": "latency of a request",
    "SLO": "share of requests within the limits",
}
RATES = ", or arrivals per second (/s), which set the throughput; times then count from the planned arrival"


def _level_cells(results: Results) -> tuple[list[str], list[list[str]]]:
    """Return the columns of the table of load levels and the cells of each row."""
    rows, left_out = results.concurrency_rows, WITHOUT_LIMITS if limits_text(results.manifest) else LIMIT_CELLS
    shown = {
        name: cell
        for name, cell in LEVEL_CELLS.items()
        if name not in left_out and (name not in LEVEL_SHOWN or any(map(LEVEL_SHOWN[name], rows)))
    }
    return list(shown), [[cell(row) for cell in shown.values()] for row in rows]


def _level_legend(results: Results, columns: Sequence[str]) -> str:
    """Return the meanings of these columns."""
    rates = RATES if any(row.rate for row in results.concurrency_rows) else ""
    limits = {"goodput": f"requests/s with {limits_text(results.manifest)}"}
    meanings = {"load": f"requests in flight{rates}"} | LEVEL_LEGEND | limits
    return "; ".join(f"{column}: {meanings[column]}" for column in columns if column in meanings)


def print_concurrency(results: Results, console: Console) -> None:
    """Print a row for each load and method, and the draft schedule, also as vLLM reads it, if the run has them."""
    found = results.concurrency_rows
    if found:
        widen(console)
        columns, lines = _level_cells(results)
        table = result_table(TITLE, columns)
        table.columns[1].min_width = min(16, max(cell_len(row.method) for row in found))
        for _, level in groupby(lines, key=lambda line: line[0]):
            for i, (load, *cells) in enumerate(level):
                table.add_row("" if i else load, *map(escape, cells))
            table.add_section()
        console.print(table)
        console.print(_level_legend(results, columns), soft_wrap=True, highlight=False)
    if schedule := results.draft_schedule:
        console.print(f"schedule {escape(schedule.text())}", soft_wrap=True, highlight=False)
        for group, fields in schedule.vllm().items():
            console.print(f"vllm     {escape(f'{group}: {json.dumps(fields)}')}", soft_wrap=True, highlight=False)


def markdown_concurrency(results: Results) -> Iterator[str]:
    """Yield the table of load levels as Markdown with its heading, and the draft schedule, if the run has them."""
    if results.concurrency_rows:
        columns, lines = _level_cells(results)
        legend = _level_legend(results, columns)
        yield f"## {TITLE}\n\n{table(columns, lines, ('method',))}\n{legend[0].upper()}{legend[1:]}.\n"
    if schedule := results.draft_schedule:
        yield f"Draft schedule: {safe(schedule.text())}.\n"


NAMES = {  # figure -> title of its table, digits
    "speedup": ("Speedup over {}", 2),
    "tokens_per_s": ("Tokens per second", 1),
    "mean_acceptance_length": ("τ, tokens per step", 2),
    "quality": ("Quality", 2),
}
POINTS = ("quality",)  # figures whose change is a difference; that of the others is a share
ROUNDING = 1e-9  # a change by rounding alone


def print_comparison(made: RunComparison, console: Console, verbose: bool = False) -> None:
    """Print the finding, warnings, the tables, and the differences in configuration.

    verbose: include tasks without an interval.
    """
    widen(console)
    console.print(f"A: {escape(str(made.a))}\nB: {escape(str(made.b))}", highlight=False, soft_wrap=True)
    console.print(escape(comparison_finding(made.rows)), style="bold", highlight=False, soft_wrap=True)
    for note in _notes(made):
        console.print(escape(note), highlight=False, soft_wrap=True)
    no_mean = len(made.measures) > 1
    for metric in (name for name in NAMES if not (name == "quality" and no_mean)):
        shown = [row for row in made.rows if _shown(row, metric, verbose)]
        if any(row.changes[metric].a is not None for row in shown):
            _print_metric(metric, shown, console)
    if no_mean:
        console.print(f"{NO_MEAN.capitalize()} ({', '.join(made.measures)}).", highlight=False, soft_wrap=True)
    _print_differences(made, console)


def _shown(row: ComparedRow, metric: str, verbose: bool) -> bool:
    """Return whether a row is in a table: tasks are in that of the speedup only, AR where it is not 1 by definition."""
    of_task = metric == "speedup" and (verbose or row.changes[metric].interval is not None)
    return judged(metric, row) and (of_task or row.task == OVERALL)


def _print_differences(made: RunComparison, console: Console) -> None:
    if not made.found:
        console.print("Nothing differs in configuration, versions or machine.")
        return
    table = result_table("What differs", ("what", "A", "B"))
    for column in table.columns:
        column.justify, column.no_wrap, column.overflow = "left", False, "fold"
    for one in made.found:
        table.add_row("[red]✕[/] " * one.blocking + escape(one.what), escape(one.a), escape(one.b))
    console.print(table)


def _print_metric(metric: str, rows: Sequence[ComparedRow], console: Console) -> None:
    tasks = list(dict.fromkeys(row.task for row in rows))
    several = len(tasks) > 2  # a single task is all of them
    head = (*(("task",) if several else ()), "method", "A", "B", "change", "95% CI", "verdict", "prompts")
    table = result_table(NAMES[metric][0].format(rows[0].baseline), head)
    for task in [*tasks[1:], tasks[0]] if several else tasks[:1]:  # all tasks together come last
        for i, row in enumerate(row for row in rows if row.task == task):
            name = ("" if i else escape(task),) if several else ()
            table.add_row(*name, *_comparison_cells(metric, row))
        table.add_section()
    console.print(table)


def _comparison_cells(metric: str, row: ComparedRow) -> tuple[str, ...]:
    change, digits = row.changes[metric], NAMES[metric][1]
    verdict = change.verdict if change.verdict in (SAME, *NO_VERDICT) else f"[bold]{change.verdict}[/]"
    changed = change_text(metric, change.change), interval_text(metric, change)
    if change.change is not None and _unchanged(change):
        verdict, changed = "unchanged", (changed[0], "")
    figures = format_number(change.a, digits), format_number(change.b, digits)
    return escape(row.method), *figures, *changed, verdict, f"{row.n_prompts:,}"


def _unchanged(change: Change) -> bool:
    """Return True for a change of 0 with an interval of 0, as of τ where both runs make the same steps."""
    return all(abs(value) < ROUNDING for value in (change.change or 0.0, *(change.interval or ())))


def change_text(metric: str, value: float | None) -> str:
    """Return a change as in '−3.1%', of quality as in '+0.02'."""
    if value is None:
        return MISSING
    value = 0.0 if abs(value) < ROUNDING else value
    return (f"{value:+.2f}" if metric in POINTS else f"{100 * value:+.1f}%").replace("-", "−")


def interval_text(metric: str, change: Change) -> str:
    """Return the interval of a change as in '−5.0% to −1.2%'."""
    return MISSING if change.interval is None else " to ".join(change_text(metric, end) for end in change.interval)


def _notes(made: RunComparison) -> Iterator[str]:
    """Yield notes on machines, outputs, failures and doubts."""
    rows = [row for row in made.rows if row.task == OVERALL]
    rates = [row.changes["tokens_per_s"] for row in rows]
    for rate in [rate for rate in rates if rate.verdict in (OTHER_MACHINE, OTHER_THREADS)][:1]:
        where = "Same machine, other threads" if rate.verdict == OTHER_THREADS else "Other machine"
        yield f"{where} ({rate.reason}): compare speedups, not tokens/s."
    for row in rows:
        if row.n_other_outputs:
            yield f"{row.method}: {row.n_other_outputs} of {row.n_outputs} outputs have other tokens in B."
    same = [row.method for row in rows if row.n_outputs and not row.n_other_outputs]
    others = made.uncompared or any(row.n_failed_a or row.n_failed_b for row in rows)
    if same and len(same) == len(rows) and not others:
        yield "All outputs of both runs have the same tokens."
    elif same:
        yield f"{', '.join(same)}: the outputs that both runs have are of the same tokens."
    for row in rows:
        if row.n_failed_a or row.n_failed_b:
            counts = f"{row.n_failed_a} samples failed in A, {row.n_failed_b} in B"
            yield f"{row.method}: {counts} ({row.error}); no number includes them."
    yield from (f"Warning: {text}" for text in made.warnings)


def comparison_finding(rows: Sequence[ComparedRow]) -> str:
    """Return the finding over all tasks in one line."""
    found = {r.method: r.changes["speedup"] for r in rows if r.task == OVERALL and r.method != r.baseline}
    known = {method: change for method, change in found.items() if change.interval}
    reasons = dict.fromkeys(change.reason for change in found.values() if change.verdict in (FAILED, INVALID))
    failed = " ".join(f"{reason}; no speedup is compared." for reason in reasons)
    if not known:
        return failed or f"Too few common prompts to compare speedups: an interval needs {FEWEST}."
    return f"{_changes(known)} {failed}".rstrip()


def _changes(known: Mapping[str, Change]) -> str:
    """Return the speedups that changed in a sentence. known: the changes that have an interval, by method."""
    changed = sorted((item for item in known.items() if item[1].verdict != SAME), key=lambda item: item[1].change or 0)
    if not changed:
        method, widest = max(known.items(), key=lambda item: (i := item[1].interval or (0, 0))[1] - i[0])
        ends = {interval_text("speedup", change) for change in known.values()}
        which = f"widest 95% CI: {cut(method)}," if len(ends) > 1 else "every 95% CI:" if len(known) > 1 else "95% CI:"
        return f"No speedup changed significantly ({which} {interval_text('speedup', widest)})."
    parts = [
        f"{cut(method)} is {c.verdict}: {format_speedup(c.a)} to {format_speedup(c.b)} "
        f"({change_text('speedup', c.change)}, 95% CI {interval_text('speedup', c)})"
        for method, c in changed
    ]
    rest = len(known) - len(changed)
    return "; ".join(parts) + (f"; {rest} not significant." if rest else ".")


TABLE, RESULT, FIGURE = "table.csv", "result.json", "figure.html"
EXPERIMENT_WIDTH = 140  # without a terminal
STYLES: dict[Mark, str] = {"plain": "", "accepted": "green", "rejected": "red strike", "next": "bold"}
BRACKETS: dict[Mark, tuple[str, str]] = {  # without colours
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
            csv.writer(text := io.StringIO(), lineterminator="\n").writerows(
                [[column.title for column in grid.columns], *grid.rows]
            )
            write_text(paths[-1], text.getvalue())
        paths.append(folder / RESULT)
        content = json.dumps({**about, **asdict(result)}, indent=1, ensure_ascii=False, default=str)
        write_text(paths[-1], content + "\n")
    except OSError as error:
        raise UserError(f"cannot write to {folder}: {os_reason(error)}") from error
    return paths
