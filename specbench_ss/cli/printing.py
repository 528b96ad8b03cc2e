"""Results of a run in the terminal: the ranking, checks and load levels."""

from __future__ import annotations

import json
import os
import re
import textwrap
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import groupby, starmap
from pathlib import Path
from typing import Any

from rich import box
from rich.cells import cell_len
from rich.console import Console, OverflowMethod
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from specbench_ss.cli.shared import print_text
from specbench_ss.results.analysis import Results
from specbench_ss.results.concurrency import kv_caches
from specbench_ss.results.cost_model import machine_lines
from specbench_ss.results.findings import FINDINGS, Check, worst_first
from specbench_ss.results.ranking import (
    MARKED,
    MARKS,
    by_speed,
    chat_group,
    contends,
    more_questions,
    notes,
    own_model,
    quality_text,
    short_output,
    speedup_of,
    task_groups,
)
from specbench_ss.results.summary import OVERALL, SummaryRow
from specbench_ss.results.table import LOADS, Column, legend, level_columns, ranking_columns
from specbench_ss.results.text import MISSING, cut, first_lines, format_number, format_speedup, interval, pluralize
from specbench_ss.runs.config import decoding_notes
from specbench_ss.runs.records import Run
from specbench_ss.stats.intervals import FEWEST
from specbench_ss.stats.pairs import Pairs

COLUMNS = (  # keys of the columns of the ranking
    "method", "speedup", "speedup_interval", "decode_speedup", "mean_acceptance_length", "acceptance_rate",
    "relative_step_time", "tokens_per_s", "quality", "judge_score", "output",
)  # fmt: skip
# titles, dropped in this order in a narrow terminal
DISPENSABLE = ("n", "judge", "quality", "decode", "tok/s", "accept", "step time")
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
        print_text(console, f"  lossy  {line}")


def print_short(results: Results, console: Console) -> None:
    """Print the finding, tables over all tasks and by task, reasons of the speedups, and the worst checks.

    These are at most 18 lines for four methods.
    """
    widen(console)
    print_answer(results, console)
    rows = by_speed(results.overall)
    columns = _columns(rows, results.config, short=True)
    _print_line(console, _legend(rows, columns), "  ", 1, style="dim")
    _print(console, "", columns, [rows], folding=())
    by_task, fastest = _by_task(results)
    reasons = _reasons(rows)
    for i, reason in enumerate(reasons):
        _print_line(console, reason, "       " if i else "  why  ", 1)
    if by_task:
        if len(reasons) < 2:  # the output has 18 lines at most
            console.print()
        _print(console, "", _fitted(by_task, fastest, console.width), [fastest])
    elif scarce := _few_per_task(results.run):
        _print_line(console, scarce, "  ")
    _print_warnings(results, console, brief=bool(by_task))


def print_verbose(results: Results, console: Console) -> None:
    """Print the finding, tables by task and over all tasks, notes, and all checks with their details."""
    widen(console)
    print_answer(results, console)
    for line in (*decoding_notes(results.config), *machine_lines(results.machine_rows, results.manifest)):
        print_text(console, line)
    config, rows, n_repeats = results.config, results.rows, int(results.config["repeats"])
    repeats = f", {n_repeats} repeats" if n_repeats > 1 else ""
    repeats += f" in {results.run.sessions} sessions" if results.run.sessions > 1 else ""
    tasks = [by_speed(list(group)) for name, group in groupby(rows, key=lambda row: row.task) if name != OVERALL]
    overall = by_speed(results.overall)
    every = ranking_columns(config)
    columns = [*_columns(overall, config), every["n_prompts"]]
    of_task = [replace(every["task"], cell=lambda row: row.task), *columns]
    tables = [(f"\nBy task{repeats}", of_task, tasks)] if len(tasks) > 1 else []
    name = f"\nOverall, {len(tasks)} tasks{repeats}" if len(tasks) > 1 else f"\nOverall{repeats}"
    for title_of, shown, groups in (*tables, (name, columns, [overall])):
        if dropped := _print(console, title_of, shown, groups):
            console.print(f"not shown in a terminal of {console.width} columns: {', '.join(dropped)}", style="dim")
    for note in _notes_of(results, overall):
        print_text(console, note, "dim")
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


def _columns(rows: Sequence[SummaryRow], config: Mapping[str, Any], short: bool = False) -> list[Column]:
    """Return the columns for which a row has a value. short: of the short form."""
    own = {
        "speedup_interval": lambda row: _interval(row, short),
        "output": lambda row: _match(row) if short else short_output(row, config),
    }
    columns = (column for key, column in ranking_columns(config).items() if key in COLUMNS and column.has_value(rows))
    found = {column.key: replace(column, cell=own.get(column.key, column.cell)) for column in columns}
    return [found[key] for key in COLUMNS if key in found]


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


def _legend(rows: Sequence[SummaryRow], columns: Sequence[Column]) -> str:
    """Return the meaning of the marks at these speedups and of the columns."""
    used = {row.comparison for row in rows if row.speedup is not None}
    marks = [f"{mark} {MARKED[comparison]}" for comparison, mark in MARKS.items() if comparison in used]
    return "; ".join([*marks, *legend(columns, short=True)])


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
        print_text(console, f"      {place['where']}   ->  ssbench check {what}")


def _by_task(results: Results) -> tuple[list[Column], list[SummaryRow]]:
    """Return the columns and rows of the speedups by task: of the fastest methods.

    No columns with too few prompts, or for too many tasks.
    """
    run, groups = results.run, _task_groups(results.run)
    rows = [row for row in by_speed(results.overall) if row.method != row.baseline and row.comparison != "invalid"]
    rows = rows[:MOST_METHODS]
    if not rows or not 2 <= len(groups) <= MOST_TASKS or _few_per_task(run):
        return [], rows

    def of_task(name: str, tasks: Sequence[str]) -> Column:
        found = {row.method: format_speedup(speedup_of(run, row.method, tasks)) for row in rows}
        return Column("speedup", name, lambda row: found[row.method])

    return [Column("method", BY_TASK, lambda row: row.method), *starmap(of_task, groups.items())], rows


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


def _fitted(columns: Sequence[Column], rows: Sequence[SummaryRow], width: int) -> list[Column]:
    """Return the columns of a table by task with heads that are cut as far as the width demands."""
    for most in range(max(len(column.title) for column in columns), SHORTEST_HEAD - 1, -1):
        fitted = [columns[0], *(replace(column, title=escape(cut(column.title, most))) for column in columns[1:])]
        if _width(fitted, rows) <= width:
            break
    return fitted


def _print_check(console: Console, check: Check) -> None:
    style = "dim" if check.state == "not checked" else ""
    console.print(f"{STATE_MARKS[check.state]} {escape(check.sentence)}", style=style, highlight=False, soft_wrap=True)
    for line in first_lines(check.lines, SHOWN):
        print_text(console, f"    {line}")


def _print(
    console: Console,
    name: str,
    columns: Sequence[Column],
    groups: Sequence[Sequence[SummaryRow]],
    folding: Collection[str] = FOLDING,
) -> list[str]:
    """Print a table with as many of the columns as there is room for; return the heads of those left out.

    folding: columns that may take several lines to save others.
    """
    rows, heads = [row for group in groups for row in group], [column.head for column in columns]
    left_out = list[str]()
    for head in ("", *DISPENSABLE):
        left_out += [head] * (head in heads)
        shown = [column for column in columns if column.head not in left_out]
        if _width(shown, rows, folding=folding) <= console.width:
            break
    room = NARROW + console.width - _width(shown, rows, labels=NARROW)
    shown = [replace(one, cell=partial(_label, one, room)) if one.head in LABELS else one for one in shown]
    table = filled_table(name, shown, groups, once=shown[0].key == "task")
    table.box, table.padding, table.title_style = None, (0, 0, 0, 2), "bold"
    console.print(table)
    return left_out


def _label(column: Column, room: int, row: SummaryRow) -> str:
    return broken(column.cell(row), room)


def broken(label: str, width: int) -> str:
    """Return a label in lines of at most this many characters, broken after commas; its middle is cut if it is long."""
    lines = [""]
    for part in re.findall(r"[^,]*,|[^,]+$", cut(label, LABEL_LINES * width)):
        if lines[-1] and cell_len(lines[-1] + part) > width:
            lines.append("")
        lines[-1] += part
    return "\n".join(lines)


def _width(
    columns: Sequence[Column], rows: Sequence[SummaryRow], labels: int = 0, folding: Collection[str] = FOLDING
) -> int:
    """Return the width of a table: each column's longest text (or word, where it folds), and the padding.

    labels: the width of a column of labels, where it is given.
    """

    def longest(column: Column) -> int:
        texts = [column.head, *map(column.cell, rows)]
        parts = [part for text in texts for part in (text.split() if column.head in folding else [text])]
        widest = max(map(cell_len, parts))
        return (labels or min(widest, NARROW)) if column.head in LABELS else widest

    return sum(longest(column) + 2 for column in columns)


def result_table(name: str, columns: Sequence[str], left: Collection[str] = LEFT) -> Table:
    """Return an empty table in the form that all results have. left: columns of text."""
    table = Table(title=name, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD, header_style="bold")
    for column in columns:
        wraps = column in FOLDING + LABELS
        overflow: OverflowMethod = "fold" if wraps else "ellipsis"
        table.add_column(column, justify="left" if column in left else "right", no_wrap=not wraps, overflow=overflow)
    return table


def filled_table(name: str, columns: Sequence[Column], groups: Iterable[Iterable[Any]], once: bool = False) -> Table:
    """Return a table of rows in groups, with a line between two of them.

    once: the rows of a group share the text in the first column.
    """
    table = result_table(
        name, [column.head for column in columns], {*LEFT, *(column.head for column in columns if column.left)}
    )
    for group in groups:
        for i, row in enumerate(group):
            first = "" if once and i else markup(columns[0], row)
            table.add_row(first, *(markup(column, row) for column in columns[1:]))
        table.add_section()
    return table


def print_table(columns: Sequence[Column], groups: Iterable[Iterable[Any]]) -> None:
    """Print `filled_table` to standard output; the rows of a group share the text in the first column."""
    console = Console()
    widen(console)
    console.print(filled_table("", columns, groups, once=True))


def markup(column: Column, row: Any) -> str:
    """Return the text of a row for rich, bold if the column wants it so."""
    text = escape(column.cell(row))
    return f"[bold]{text}[/]" if column.strong and column.strong(row) else text


def print_concurrency(results: Results, console: Console) -> None:
    """Print a row for each load and method, the draft schedule, also as vLLM reads it, and the servers' KV caches.

    The run may have none of them.
    """
    if found := results.concurrency_rows:
        widen(console)
        columns = level_columns(results)
        levels = [list(level) for _, level in groupby(found, key=lambda row: row.load)]
        table = filled_table(LOADS, columns, levels, once=True)
        table.padding = (0, 0, 0, 1)  # twelve columns fit into 120 characters
        table.columns[1].min_width = min(16, max(cell_len(row.method) for row in found))
        console.print(table)
        print_text(console, "; ".join(legend(columns)))
    if schedule := results.draft_schedule:
        print_text(console, f"schedule {schedule.text()}")
        for group, fields in schedule.vllm().items():
            print_text(console, f"vllm     {group}: {json.dumps(fields)}")
    caches = kv_caches(results.manifest)
    for label, (text, _) in caches.items() if any(tokens for _, tokens in caches.values()) else ():
        print_text(console, f"kv cache {label}: {text}")
