"""pandas frames of a run, and their Parquet files."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from operator import attrgetter
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq

from specbench_ss.errors import first_line
from specbench_ss.results import ranking
from specbench_ss.results.concurrency import ConcurrencyRow
from specbench_ss.results.cost_model import MachineRow
from specbench_ss.results.places import PlaceRow
from specbench_ss.results.sample_checks import unfinished
from specbench_ss.results.summary import SummaryRow, summarise
from specbench_ss.runs.columns import Column, columns_of, table
from specbench_ss.runs.records import KEY, OutputMatch, Run, SampleRecord, StepColumns, Steps
from specbench_ss.runs.run_dir import SAMPLES as SAMPLES_FILE
from specbench_ss.runs.run_dir import STEPS as STEP_LINES
from specbench_ss.runs.run_dir import Readings, read_run
from specbench_ss.runs.step_files import (
    CHECKSUM,
    MADE_FROM,
    OUTPUT_MATCH_PARQUET,
    PARQUET,
    SAMPLES_PARQUET,
    STEPS_PARQUET,
    SUMMARY_PARQUET,
    checksum,
    made_from,
)
from specbench_ss.stats.betting import SampledTokens
from specbench_ss.storage import replacing

Facts = dict[bytes, bytes]
TALLIED = ("tokens", "steps", "share")  # columns of `tokens_per_step` after the method
_KEY = (
    "question_id | string | | id of the question",
    "turn | Int64 | | number of the turn within the question, from 0",
    "method | string | | label of the method: its name with the given options",
    "repeat | Int64 | | number of the repeat, from 0",
)
_TASK = "task | string | | task of the suite that the question belongs to"
JUDGED = table("judge_score | Float64 | 0 to 1 | rating of the judge, divided by ten; missing without a rating")


def _behind(columns: Sequence[Column], name: str, more: Sequence[Column]) -> tuple[Column, ...]:
    """Return the columns with some more behind the one of this name."""
    at = [column.name for column in columns].index(name) + 1
    return (*columns[:at], *more, *columns[at:])


STEP_TOKENS = Column(
    "step_tokens",
    "Int64",
    "tokens",
    "output tokens from steps: tokens - prefill_tokens",
    lambda row: None if row.tokens is None else row.later,
)
_RECORDED = tuple(
    replace(column, name="task", value=attrgetter("category")) if column.name == "category" else column
    for column in columns_of(SampleRecord)
)
SAMPLES = (
    *table(*_KEY),
    *_behind(_behind(_RECORDED, "prefill_tokens", (STEP_TOKENS,)), "quality", JUDGED),
)
TELEMETRY = table(
    *_KEY,
    "attempt | Int64 | | attempt at the sample, from 0; the last attempt is the recorded sample",
    "noise_reason | string | | reason why the time of the attempt is noisy, or empty",
    "t_s | Float64 | s | time since the first reading of the attempt, just before its start",
    "host_cpu_share | Float64 | 0 to 1 | share of the usable cores that this process used since the reading before",
    "host_foreign_share | Float64 | 0 to 1 | share of the usable cores that other processes used since then",
    "host_core_share | object | 0 to 1 | utilization of each usable core since then, all processes; a list",
    "host_mhz | Float64 | MHz | clock of the processor, if the system reports it; read before and after the attempt",
    "host_rss_bytes | Int64 | bytes | resident memory of this process",
    "host_page_faults | Int64 | | page faults of this process since its start, minor ones included",
    "nvml_kernel_busy | Float64 | 0 to 1 | share of NVML's last sampling period with at least one running kernel",
    "nvml_memory_busy | Float64 | 0 to 1 | share of that period with memory traffic on the device",
    "nvml_sm_mhz | Int64 | MHz | SM clock",
    "nvml_mem_mhz | Int64 | MHz | memory clock",
    "nvml_clock_events | Int64 | | NVML's clock event reasons, a bit mask",
    "nvml_power_w | Float64 | W | power of the device",
    "nvml_energy_j | Float64 | J | energy of the device since its driver was loaded",
    "nvml_used_bytes | Int64 | bytes | device memory in use by all processes",
    "nvml_foreign_processes | Int64 | | other compute processes on the device",
    "gpm_sm_active | Float64 | 0 to 1 | SM activity since the reading before",
    "gpm_tensor_active | Float64 | 0 to 1 | tensor core activity since the reading before",
    "gpm_dram_active | Float64 | 0 to 1 | used share of the memory bandwidth since the reading before",
)

STEPS = table(
    *_KEY,
    _TASK,
    "index | Int64 | | number of the step within the sample, from 0",
    "draft_nodes | Int64 | nodes | nodes of the draft tree, root not counted",
    "verified_nodes | Int64 | nodes | drafted nodes that are left after pruning and reach the last layer",
    "draft_depth | Int64 | tokens | depth of the draft tree, before pruning",
    "accepted_tokens | Int64 | tokens | accepted drafted tokens, before the output is cut at its end",
    "tokens | Int64 | tokens | output tokens of the step",
    "draft_s | Float64 | s | drafting, and updates of the drafter after the step",
    "verify_s | Float64 | s | forward pass of the target model over the draft",
    "accept_s | Float64 | s | acceptance, and compaction of the KV cache",
    "host_s | Float64 | s | rest of the step",
    "total_s | Float64 | s | whole step: sum of the four parts",
)


def _sampled(name: str) -> Callable[[OutputMatch], Any]:
    return lambda row: None if row.sampled is None else getattr(row.sampled, name)


TESTED = table("tokens | Int64 | tokens | tokens of a sampled output that were compared with the target's distribution")
RENAMED = {"pit_counts": "pit", "log_ratios": "ratios"}  # fields of `SampledTokens` -> names of their columns
OUTPUT_MATCH = (
    *table(*_KEY, _TASK),
    *columns_of(OutputMatch),
    *(
        replace(column, name=f"sampled_{RENAMED.get(column.name, column.name)}", value=_sampled(column.name))
        for column in (*TESTED, *columns_of(SampledTokens))
    ),
)


def _number_of(verdict: str) -> Callable[[SummaryRow], Any]:
    return lambda row: row.output_match.get(verdict, 0)


VERDICTS = {  # verdict of the output match -> meaning of its count
    "identical": "outputs with the same tokens as the baseline's",
    "numerical tie": "outputs that differ first where both tokens have the same logit within rounding",
    "length differs": "outputs that are a prefix of the baseline's, or the reverse",
    "mismatch": "outputs that differ in any other way: a bug",
    "text differs": "outputs of servers with another text, beyond a tie",
    "sampled": "sampled outputs whose tokens were tested against the target's distribution",
    "not compared": "outputs that were not compared, for instance because the method is not lossless",
}
COUNTED = [
    Column(f"n_{verdict.replace('-', '_').replace(' ', '_')}", "Int64", "outputs", meaning, _number_of(verdict))
    for verdict, meaning in VERDICTS.items()
]
OUTPUT = table("output | string | | output match as text, as in the report")
DECODE = table(
    "decode_speedup | Float64 | × | mean_acceptance_length / relative_step_time: without prefill; missing if invalid"
)
SUMMARY = tuple(
    replace(column, items=str, value=lambda row: tuple(map(str, row.health))) if column.name == "health" else column
    for column in columns_of(SummaryRow)
)
for _name, _more in (("speedup_high", DECODE), ("peak_memory_bytes", (*COUNTED, *OUTPUT))):
    SUMMARY = _behind(SUMMARY, _name, _more)
SHORT_SUMMARY = (
    "task", "method", "speedup", "speedup_low", "speedup_high", "comparison", "decode_speedup",
    "mean_acceptance_length", "acceptance_rate", "relative_step_time", "tokens_per_s", "output", "n_prompts",
)  # fmt: skip
MACHINE = columns_of(MachineRow)
PLACES = columns_of(PlaceRow)


def _wait(name: str) -> Callable[[ConcurrencyRow], Any]:
    return lambda row: row.waits[name]


LEVELS = (
    *columns_of(ConcurrencyRow),
    *(
        Column(f"{name}_s_{quantile}", "Float64", "s", f"{what}: {words} over requests", _wait(f"{name}_s_{quantile}"))
        for name, what in (
            ("ttft", "time to first token"),
            ("tpot", "time per output token after the first"),
            ("latency", "time of a whole request"),
        )
        for quantile, words in (("p50", "median"), ("p95", "95th percentile"), ("p99", "99th percentile"))
    ),
)


def frame(columns: Sequence[Column], records: Iterable[Any], **of: Callable[[Any], Any]) -> pd.DataFrame:
    """Return a frame with a row for each record. of: gives the cells of the columns of these names."""
    rows = list(records)
    return pd.DataFrame({c.name: _series(c, [of.get(c.name, c.cell)(row) for row in rows]) for c in columns})


def _series(column: Column, values: list[Any]) -> pd.Series:
    return pd.Series(array(column, [pd.NA if value is None else value for value in values]))


def array(column: Column, values: Any) -> Any:
    """Return values as an array of the column's dtype."""
    if column.dtype == "object":
        return pd.Series(values, dtype="object").array
    try:
        return pd.array(values, dtype=column.dtype)
    except UnicodeEncodeError:  # half of a surrogate pair: Python's strings hold it, Arrow's do not
        return pd.array([value if value is pd.NA else _without_halves(value) for value in values], dtype=column.dtype)


def _without_halves(text: str) -> str:
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def samples(run: Run) -> pd.DataFrame:
    """Return one row for each sample, failed ones included."""
    return frame(SAMPLES, run.rows, judge_score=lambda row: run.judged_scores.get(row.key))


def steps(run: Run) -> pd.DataFrame:
    """Return one row for each step, in order of time."""
    return step_frame(run.steps, _tasks(run))


def step_frame(steps: Steps, tasks: Mapping[Any, str]) -> pd.DataFrame:
    """Return the steps with the columns of `STEPS`. tasks: of each sample."""
    counts = steps.counts
    of_sample = {name: [key[i] for key in steps.keys] for i, name in enumerate(KEY)}
    of_sample["task"] = [tasks[key] for key in steps.keys]

    def values(column: Column) -> Any:
        if column.name in of_sample:
            by_sample = array(column, of_sample[column.name])
            return by_sample.take(np.repeat(np.arange(len(counts)), counts))
        return array(column, steps.index if column.name == "index" else getattr(steps.columns, column.name))

    return pd.DataFrame({column.name: values(column) for column in STEPS}, copy=False)


def output_match(run: Run) -> pd.DataFrame:
    """Return one row for each comparison of an output with the baseline's."""
    tasks = _tasks(run)
    return frame(OUTPUT_MATCH, run.output_match, task=lambda row: tasks.get(row.key))


def _tasks(run: Run) -> dict[Any, str]:
    return {row.key: row.category for row in run.rows}


def summary_of(rows: Iterable[SummaryRow], config: Mapping[str, Any]) -> pd.DataFrame:
    """Return the summary's rows as a frame. config: that of the manifest."""
    return frame(SUMMARY, rows, output=lambda row: ranking.output(row, config))


def summary_value(row: SummaryRow, name: str) -> Any:
    """Return a cell of the summary, by the name of its column."""
    return next(column for column in SUMMARY if column.name == name).cell(row)


def tokens_per_step(run: Run) -> pd.DataFrame:
    """Return the steps of each method by their output tokens: method, tokens, steps, share."""
    frames = []
    for label, steps in _by_method(run).items():
        counts = np.bincount(steps.tokens)
        tokens = np.flatnonzero(counts)
        columns = {"method": label, "tokens": tokens, "steps": counts[tokens], "share": counts[tokens] / len(steps)}
        frames.append(pd.DataFrame(columns))
    return pd.concat(frames, ignore_index=True) if frames else pd.DataFrame(columns=["method", *TALLIED])


def median_step_ms(run: Run) -> dict[str, float]:
    """Return the median milliseconds of a step, by method."""
    return {label: float(np.median(steps.total_s)) * 1000 for label, steps in _by_method(run).items()}


def _by_method(run: Run) -> dict[str, StepColumns]:
    """Return the steps of each method that has some."""
    found = {label: run.steps.together(row.key for row in run.of(label)) for label in sorted(run.labels)}
    return {label: steps for label, steps in found.items() if len(steps)}


def telemetry(tries: list[Readings]) -> pd.DataFrame:
    """Return one row for each reading of the machine, in order of time."""

    def values(column: Column) -> Iterator[Any]:
        for one in tries:
            n = len(one.columns.get("t_s", ()))
            read = [getattr(one, column.name)] * n if hasattr(one, column.name) else one.columns.get(column.name, [])
            yield from (pd.NA if value is None else value for value in (*read[:n], *[None] * (n - len(read))))

    return pd.DataFrame({column.name: pd.Series(array(column, list(values(column)))) for column in TELEMETRY})


ARROW = {"Int64": pa.int64(), "Float64": pa.float64(), "string": pa.string(), "boolean": pa.bool_()}
ITEMS = {int: pa.list_(pa.int64()), float: pa.list_(pa.float64()), str: pa.list_(pa.string())}
SAMPLES_AT_ONCE = 1000  # whose steps are put into a frame and written together


def write_parquet(run: Run, rows: Sequence[SummaryRow]) -> str:
    """Write the Parquet files of a complete run into its directory; return why they could not be written, or ''.

    rows: the run's summary.
    """
    return "" if unfinished(run) else _whole_or_none(run, PARQUET, lambda: write_frames(run, rows, run.path))


def rewrite_scores(path: Path) -> str:
    """Write the files that hold a judge's ratings again, where they are; return as `write_parquet` does."""
    run, there = read_run(path), [name for name in (SAMPLES_PARQUET, SUMMARY_PARQUET) if (path / name).exists()]
    if not there or unfinished(run):
        return ""
    return _whole_or_none(run, there, lambda: _write_scores(run, summarise(run), path))


def _whole_or_none(run: Run, names: Sequence[str], write: Callable[[], None]) -> str:
    """Write some of a run's files, or remove them and return why they could not be written."""
    try:
        write()
        return ""
    except Exception as error:  # a full disk, or whatever Arrow raises: the run itself is there, and whole
        for name in names:
            with contextlib.suppress(OSError):
                (run.path / name).unlink(missing_ok=True)
        return f"the Parquet files of {run.path} could not be written: {first_line(error)}"


def _write_scores(run: Run, rows: Sequence[SummaryRow], folder: Path) -> None:
    _put(folder / SAMPLES_PARQUET, SAMPLES, [samples(run)])
    _put(folder / SUMMARY_PARQUET, SUMMARY, [summary_of(rows, run.manifest["config"])])


def write_frames(run: Run, rows: Sequence[SummaryRow], folder: Path) -> None:
    """Write the four frames of a run into a folder. rows: its summary."""
    files = (run.path / SAMPLES_FILE, run.path / STEP_LINES)
    _write_scores(run, rows, folder)
    _put(folder / OUTPUT_MATCH_PARQUET, OUTPUT_MATCH, [output_match(run)])
    _put(folder / STEPS_PARQUET, STEPS, _step_frames(run), {MADE_FROM: made_from(files), CHECKSUM: checksum(run.steps)})


def _step_frames(run: Run) -> Iterator[pd.DataFrame]:
    """Yield the frame of all steps in parts. At least one, which may be empty."""
    tasks = _tasks(run)
    for start in range(0, max(1, len(run.steps.keys)), SAMPLES_AT_ONCE):
        some = np.arange(start, min(start + SAMPLES_AT_ONCE, len(run.steps.keys)))
        yield step_frame(run.steps.only(some), tasks)


def _put(file: Path, columns: Sequence[Column], parts: Iterable[pd.DataFrame], facts: Facts | None = None) -> None:
    """Write frames with these columns, one after the other, as one file."""
    schema = pa.schema([(c.name, ARROW.get(c.dtype) or ITEMS[c.items]) for c in columns])
    texts = [c.name for c in columns if c.dtype not in ("Int64", "Float64")]  # times hardly ever come twice
    lists = [c.name for c in columns if c.dtype == "object"]
    writer = None
    with replacing(file) as raw, contextlib.ExitStack() as stack:
        for part in parts:
            plain = part.assign(
                **{name: part[name].map(lambda one: None if one is pd.NA else list(one)) for name in lists}
            )
            table = pa.Table.from_pandas(plain, schema=schema, preserve_index=False)
            if writer is None:  # pandas puts into the metadata which dtypes the columns are read back as
                schema = schema.with_metadata({**(table.schema.metadata or {}), **(facts or {})})
                made = pq.ParquetWriter(raw, schema, use_dictionary=texts, write_page_checksum=True)
                writer = stack.enter_context(made)
            writer.write_table(table.cast(schema))
