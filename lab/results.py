"""Tables of docs/results from the CSV files of that folder.

A comment `<!-- values: FILE -->` stands before each such table. The first code of a row is the method's label in the
file, and the head of a column names its value; cells with another head are kept as they are.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path

import pandas as pd

from specbench_ss.errors import UserError
from specbench_ss.results.ranking import MARKS
from specbench_ss.results.text import MISSING, format_number, interval, percent
from specbench_ss.runs.records import SampleRecord
from specbench_ss.stats.intervals import compare
from specbench_ss.stats.pairs import Pairs
from specbench_ss.suite import MT_BENCH

FOLDER = Path(__file__).parents[1] / "docs" / "results"
TABLE = re.compile(r"(?<=<!-- values: )(\S+)( -->\n\n)((?:\|.*\n)+)")
BASELINE = "ar"
GROUPS = {  # heads of columns -> tasks
    "MT-Bench": MT_BENCH,
    "translation": ("translation",),
    "summarization": ("summarization",),
    "QA": ("qa",),
    "mathematics": ("math_reasoning",),
    "RAG": ("rag",),
}
SUMMARY = {"τ": "mean_acceptance_length", "decode": "decode_speedup", "relative step time": "relative_step_time"}
SECONDS = ("draft_s", "verify_s", "accept_s")
Cell = Callable[[pd.DataFrame, str, str], str | None]  # values, method, head of the column; None: it is kept


def rewrite(folder: Path, check: bool) -> list[Path]:
    """Write the tables of the folder's pages from its CSV files, and return the pages that differed.

    check: write nothing. Raises UserError for a file that is not there, or that lacks a row's method.
    """
    changed = []
    for page in sorted(folder.glob("*.md")):
        text = page.read_text(encoding="utf-8")
        new = TABLE.sub(lambda found: found[1] + found[2] + _filled(found[3], folder / found[1]), text)
        if new != text:
            changed.append(page)
            if not check:
                page.write_text(new, encoding="utf-8")
    return changed


def _filled(table: str, source: Path) -> str:
    """Return a Markdown table with the values of a file."""
    head, rule, *lines = table.splitlines()
    values, cell = read_values(source)
    heads = _cells(head)
    return "\n".join([head, rule, *(_line(_cells(line), heads, values, cell, source.name) for line in lines)]) + "\n"


def _line(cells: Sequence[str], heads: Sequence[str], values: pd.DataFrame, cell: Cell, name: str) -> str:
    label = re.search(r"`([^`]+)`", cells[0])
    if not label or label[1] not in set(values["method"]) or len(cells) != len(heads):
        raise UserError(f"{name} has no values of the row {cells[0]!r}: begin it with a method, and fill its columns")
    made = [cell(values, label[1], head) for head in heads[1:]]
    new = [old if value is None else value for old, value in zip(cells[1:], made, strict=True)]
    return f"|{'|'.join((cells[0], *new))}|"


def _cells(line: str) -> list[str]:
    return line.split("|")[1:-1]


@cache
def read_values(source: Path) -> tuple[pd.DataFrame, Cell]:
    """Return the values of a file, with the function that writes a cell of them."""
    if not source.is_file():
        raise UserError(f"{source.name} is not there: give a table the values of a file of docs/results")
    values = pd.read_json(source, lines=True) if ".jsonl" in source.suffixes else pd.read_csv(source)
    values = values.rename(columns={"category": "task"})
    if "width" in values:
        values = values[values["kernels"].str.startswith("Triton")]
        return values.drop_duplicates(["method", "width", "context"], keep="last"), of_widths
    if "speedup_low" in values:
        return values, of_summary
    return (values, of_samples) if "tokens" in values else (values, of_accepted)


def of_samples(values: pd.DataFrame, method: str, head: str) -> str | None:
    """Return a cell of a table of methods, of groups of tasks, of places of an answer or of parts of its text."""
    if head in GROUPS:
        return with_interval(paired(values[values["task"].isin(GROUPS[head])], method))
    if place := re.fullmatch(r"(\d+)–(\d+)", head):
        pairs = paired(at_place(values, int(place[1]), int(place[2])), method, first=0)
        return f"{format_number(pairs.tau)}; {format_number(pairs.speedup())}"
    if part := re.fullmatch(r"(copied|new) lines", head):
        pairs = paired(of_part(values, part[1]), method, first=0)
        return f"{with_interval(pairs)}; {format_number(pairs.tau)}"
    if head.startswith("speedup"):
        return MISSING if method == BASELINE else with_interval(paired(values, method))
    return of_steps(values, method, head)


def of_steps(values: pd.DataFrame, method: str, head: str) -> str | None:
    """Return τ, the speedup of the steps alone, their time relative to the baseline's, or their parts in ms."""
    own, ref = (_per_step(values[values["method"] == name]) for name in (method, BASELINE))
    digits, step = (1 if ref["decode_s"] > 0.01 else 2), own["decode_s"] / ref["decode_s"]
    if head == "τ":
        return format_number(own["later"])
    if head == "decode":
        return MISSING if method == BASELINE else format_number(own["later"] / step)
    if head.startswith("step"):
        return f"1 ({1000 * own['decode_s']:.{digits}f} ms)" if method == BASELINE else format_number(step)
    if "ms per step" in head and set(SECONDS) <= set(own):
        return ", ".join(f"{1000 * own[part]:.{digits}f}" for part in SECONDS)
    return None


def _per_step(own: pd.DataFrame) -> dict[str, float]:
    """Return the seconds of a mean step, and its tokens (`later`)."""
    sums = own.assign(later=own["tokens"] - 1).sum(numeric_only=True)
    return {name: float(sums[name] / sums["steps"]) for name in ("later", "decode_s", *SECONDS) if name in sums}


def of_summary(values: pd.DataFrame, method: str, head: str) -> str | None:
    """Return a cell of a file that has one line per method, or per task and method."""
    tasks = GROUPS.get(head, ("overall",))
    if len(tasks) > 1:
        return None  # a mean of tasks has no interval
    own = values[values["method"] == method]
    (row,) = (own[own["task"] == tasks[0]] if "task" in own else own).to_dict("records")
    marked = _marked(row["comparison"], row["speedup"])
    if head.startswith("speedup"):
        return f"{marked} ({interval((row['speedup_low'], row['speedup_high']))})"
    if head in GROUPS:
        return marked
    return format_number(row[SUMMARY[head]]) if SUMMARY.get(head) in row else None


def of_accepted(values: pd.DataFrame, method: str, head: str) -> str | None:
    """Return the share of steps with at least so many accepted tokens."""
    own = values[values["method"] == method]
    share = own.loc[own["accepted_tokens"] >= int(head), "steps"].sum() / own["steps"].sum()
    return percent(share).replace("%", " %") if share else MISSING


def of_widths(values: pd.DataFrame, method: str, head: str) -> str | None:
    """Return the time of a step with so many verified tokens behind so many others, relative to the baseline's."""
    width, context = map(int, head.split(" after "))
    at = values[(values["method"] == method) & (values["width"] == width) & (values["context"] == context)]
    return format_number(float(at["ratio"].iloc[0])) if len(at) else None


def paired(values: pd.DataFrame, method: str, first: int = 1) -> Pairs[SampleRecord]:
    """Return the samples of a method and of the baseline. first: tokens of each that prefill makes."""
    return Pairs(*(_records(values[values["method"] == name], first) for name in (method, BASELINE)))


def _records(values: pd.DataFrame, first: int) -> list[SampleRecord]:
    rows: list[SampleRecord] = []
    for line in values.to_dict("records"):
        key = (line["question_id"], line.get("turn", 0), line["method"], 0)
        row = SampleRecord(*key, line.get("task", ""), len(rows), 0, 0, "", "", "ok")
        row.tokens, row.steps, row.prefill_tokens = line["tokens"], line["steps"], first
        row.wall_s = line["decode_s"] + line.get("prefill_s", 0.0)
        rows.append(row)
    return rows


def at_place(values: pd.DataFrame, begin: int, end: int) -> pd.DataFrame:
    """Return the samples with these tokens of their output alone, without the first one, which prefill makes."""
    name = next(column.removeprefix("steps ") for column in values if column.startswith(f"steps {begin}-"))
    tokens = values["tokens"].clip(upper=end) - max(begin - 1, 1)
    own = values.assign(**{f"tokens {name}": tokens})
    return of_part(own[tokens > 0], name)


def of_part(values: pd.DataFrame, name: str) -> pd.DataFrame:
    """Return the samples with the tokens, steps and seconds of a part of their output."""
    columns = {"tokens": f"tokens {name}", "steps": f"steps {name}", "decode_s": f"seconds {name}"}
    return values.drop(columns="prefill_s").assign(**{new: values[old] for new, old in columns.items()})


def with_interval(pairs: Pairs[SampleRecord]) -> str:
    """Return a speedup with its interval, as in '≈ 1.07 (0.92–1.24)'."""
    around = pairs.interval()
    return f"{_marked(compare(around), pairs.speedup())} ({interval(around)})"


def _marked(comparison: str, speedup: float | None) -> str:
    return f"{MARKS.get(comparison, '')} {format_number(speedup)}".strip()
