"""The frames of a run: one schema, which docs/columns.md repeats; they contain what directory, table and page have."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from specbench_ss import load_run
from specbench_ss.engine.decoder import Step
from specbench_ss.errors import UserError
from specbench_ss.results.analysis import analyse
from specbench_ss.results.compare import COMPARISON, DIFFERENCES
from specbench_ss.results.frames import (
    LEVELS,
    MACHINE,
    OUTPUT_MATCH,
    PLACES,
    SAMPLES,
    SHORT_SUMMARY,
    STEPS,
    SUMMARY,
    TELEMETRY,
)
from specbench_ss.results.summary import SummaryRow
from specbench_ss.runs.columns import Column
from specbench_ss.runs.records import SampleRecord
from tests.tiny import few

PAGE = Path(__file__).parents[2] / "docs" / "columns.md"
DOCS = PAGE.read_text(encoding="utf-8")
MakeRun = Callable[..., Path]
FRAMES = {
    "`samples`": SAMPLES,
    "`steps`": STEPS,
    "`output_match`": OUTPUT_MATCH,
    "`summary()`": SUMMARY,
    "`telemetry`": TELEMETRY,
    "`machine()`": MACHINE,
    "`places()`": PLACES,
    "`concurrency()`": LEVELS,
}
HEADER = "| column | dtype | unit | meaning |\n|---|---|---|---|\n"


def rewritten(page: str) -> str:
    """Return the text of docs/columns.md with the tables of the code; the texts above the tables stay."""
    start, *sections = re.split(r"^#### ", page, flags=re.M)
    tables = {**FRAMES, "`compare().table`": COMPARISON, "`compare().differences`": DIFFERENCES}
    for i, section in enumerate(sections):
        rows = [f"| `{c.name}` | {c.dtype} | {c.unit} | {c.meaning} |\n" for c in tables[section.partition("\n")[0]]]
        sections[i] = f"{section.partition(HEADER)[0].rstrip()}\n\n{HEADER}{''.join(rows)}"
    return "#### ".join([start, *(f"{section}\n" for section in sections)]).rstrip() + "\n"


def documented(heading: str) -> list[Column]:
    """Return the columns in the table below a heading of docs/columns.md."""
    table = DOCS.partition(f"#### {heading}\n")[2].partition("\n#")[0]
    rows = [re.split(r"(?<!\\)\|", line.strip("|")) for line in table.splitlines() if line.startswith("| `")]
    return [Column(row[0].strip(" `"), *(cell.strip() for cell in row[1:])) for row in rows]


@few(3)
@pytest.mark.parametrize(("heading", "columns"), FRAMES.items())
def test_the_documented_columns_are_the_real_ones(heading: str, columns: tuple[Column, ...], make_run: MakeRun) -> None:
    assert documented(heading) == list(columns)
    full = load_run(make_run(failing=("medusa",), questions=5))
    for results in (full, load_run(make_run(labels=("ar",), categories=("qa",), questions=1))):
        frame = getattr(results, heading.strip("`()"))
        if heading.endswith("()`"):
            frame = frame(all=True) if heading == "`summary()`" else frame()
        assert {name: str(kind) for name, kind in frame.dtypes.items()} == {c.name: c.dtype for c in columns}
        assert not any(isinstance(value, float) and value != value for value in frame.astype(object).to_numpy().flat)


def test_every_field_that_is_recorded_is_in_the_frames() -> None:
    names = {columns: {c.name for c in columns} for columns in (SAMPLES, STEPS, OUTPUT_MATCH, SUMMARY)}
    recorded = {field.name for field in fields(SampleRecord)} - {"category"}
    assert recorded | {"task", "judge_score", "step_tokens"} == names[SAMPLES]
    assert {field.name for field in fields(Step)} <= names[STEPS]
    elsewhere = {"speedup_interval", "reference_interval", "quality_interval", "judge_score_interval", "output_match"}
    assert {field.name for field in fields(SummaryRow)} - elsewhere <= names[SUMMARY]
    assert all(re.fullmatch(r"[a-z][a-z0-9_]*", name) for found in names.values() for name in found)


def test_the_frames_hold_what_the_directory_holds(make_run: MakeRun) -> None:
    path = make_run(failing=("medusa",), verdict="numerical tie")
    results = load_run(str(path))
    rows = [json.loads(line) for line in (path / "samples.jsonl").read_text().splitlines()]
    assert results.samples["token_ids"].map(lambda ids: None if ids is pd.NA else ids).tolist() == [
        row["token_ids"] for row in rows
    ]
    failed = results.samples[results.samples["status"] == "failed"]
    assert len(failed) == 4 and failed["tokens"].isna().all() and failed["error"].notna().all()
    steps = results.steps.groupby(["question_id", "turn", "method", "repeat"])["total_s"].sum()
    good = results.samples[results.samples["status"] == "ok"].set_index(["question_id", "turn", "method", "repeat"])
    assert np.allclose(steps.astype(float), good.loc[steps.index, "decode_s"].astype(float))
    row = results.summary(all=True).set_index(["task", "method"]).loc[("overall", "ss")]
    assert (row["n_numerical_tie"], row["n_identical"], row["output"]) == (24, 0, "24 numerical ties of 24")
    assert row["speedup_low"] < row["speedup"] < row["speedup_high"]


def test_the_table_and_the_report_show_the_numbers_of_the_summary(
    make_run: MakeRun, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    from rich.console import Console

    from specbench_ss.cli.printing import print_short
    from specbench_ss.registry import REPORTS, load
    from specbench_ss.runs.run_dir import read_run

    path = make_run(labels=("ar", "ss"))
    read = read_run(path)
    for row in read.rows:
        row.peak_memory_bytes = 3 << 20 if row.method == "ss" else 1 << 20
    row = analyse(read).summary(all=True).set_index(["task", "method"]).loc[("overall", "ss")]
    print_short(analyse(read), Console())
    shown = capsys.readouterr().out
    assert (
        f"{row['speedup']:.2f}×" in shown
        and f"{row['mean_acceptance_length']:.2f}" in shown
        and f"{row['tokens_per_s']:.1f}" in shown
    )
    load(REPORTS, "html")().write(analyse(read), tmp_path / "report.html")
    html = (tmp_path / "report.html").read_text()
    for name, unit in (("speedup", "×"), ("mean_acceptance_length", ""), ("decode_speedup", "×")):
        assert f"{row[name]:.2f}{unit}" in html
    assert re.search(rf"{100 * row['acceptance_rate']:.0f}(\.\d)? ?%", html)
    assert row["peak_memory_bytes"] == 3 << 20 and "peak memory" in html and ">3.0<" in html


def test_sums_of_the_samples_are_tau_and_the_acceptance_rate(make_run: MakeRun) -> None:
    results = load_run(make_run())
    sums = results.samples.groupby("method")[["step_tokens", "steps", "accepted_tokens", "draft_depth"]].sum()
    overall = results.summary().query("task == 'overall'").set_index("method")
    for label in results.run.labels:
        own, row = sums.loc[label], overall.loc[label]
        assert own["step_tokens"] / own["steps"] == pytest.approx(row["mean_acceptance_length"])
        if own["draft_depth"]:
            assert own["accepted_tokens"] / own["draft_depth"] == pytest.approx(row["acceptance_rate"])
    assert overall.loc["ss", "acceptance_rate"] > 0


def test_the_short_summary_has_some_of_the_columns_of_the_whole(make_run: MakeRun) -> None:
    results = load_run(make_run())
    short, whole = results.summary(), results.summary(all=True)
    pd.testing.assert_frame_equal(short, whole[list(short)])
    assert tuple(short) == SHORT_SUMMARY and len(short.columns) < 15
    row = whole.set_index(["task", "method"]).loc[("overall", "ss")]
    steps = whole[whole["task"] == "overall"].set_index("method")["step_s"]
    assert row["relative_step_time"] == pytest.approx(steps["ss"] / steps["ar"])
    assert row["decode_speedup"] == pytest.approx(row["mean_acceptance_length"] / row["relative_step_time"])


def test_a_column_by_task_is_a_pivot_of_the_summary(make_run: MakeRun) -> None:
    results = load_run(make_run())
    rates = results.by_task("acceptance_rate")
    assert list(rates.index) == list(results.run.categories) and list(rates) == list(results.run.labels)
    cells = results.summary().set_index(["task", "method"])["acceptance_rate"]
    assert rates.loc["qa", "ss"] == cells["qa", "ss"]
    with pytest.raises(UserError, match="did you mean acceptance_rate"):
        results.by_task("aceptance_rate")


def test_a_notebook_shows_headline_and_summary_escaped(make_run: MakeRun) -> None:
    results = load_run(make_run(labels=("ar", "ss")))
    results.headline = "<b>ss</b> & others"
    shown = results._repr_html_()
    assert shown.startswith("<p>&lt;b&gt;ss&lt;/b&gt; &amp; others</p>") and shown.count("<tr") == 3
    assert "relative_step_time" in shown and "<td></td>" in shown and "NA" not in shown and "nan" not in shown.lower()


if __name__ == "__main__":  # python -m tests.core.test_frames
    PAGE.write_text(rewritten(DOCS), encoding="utf-8")
