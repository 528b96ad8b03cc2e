"""Columns of the result tables: declared once, equal in the terminal and in Markdown, named as in the frames."""

from __future__ import annotations

from dataclasses import replace

import pytest

from specbench_ss.cli.printing import COLUMNS, print_verbose
from specbench_ss.results.analysis import Results, analyse
from specbench_ss.results.frames import SUMMARY
from specbench_ss.results.table import EXPORTED, ranking_columns, summary_latex, summary_markdown
from specbench_ss.runs.run_dir import read_run
from tests.cli import printed
from tests.conftest import MakeRun


@pytest.fixture
def results(make_run: MakeRun) -> Results:
    """Results with fixed numbers, so that no change of the statistics changes the tables."""
    results = analyse(read_run(make_run(labels=("ar", "ss"), categories=("qa",), questions=5)))
    fixed = {"mean_acceptance_length": 2.5, "relative_step_time": 1.25, "acceptance_rate": 0.625, "quality": 0.5}
    ar, ss = (replace(row, **fixed, tokens_per_s=1234.5) for row in results.overall)  # type: ignore[arg-type]
    fast = replace(ss, speedup=1.834, speedup_interval=(1.71, 1.97), comparison="faster")
    results.__dict__["rows"] = [replace(ar, speedup=1.0), fast]
    return results


def test_markdown_has_the_numbers_of_the_terminal(results: Results) -> None:
    assert summary_markdown(results).splitlines() == [
        "| task | method | speedup | 95% CI | verdict | τ | output | quality | tokens/s | n |",
        "| --- | --- | ---: | ---: | --- | ---: | --- | ---: | ---: | ---: |",
        "| all | ss | 1.83× | 1.71–1.97 | faster | 2.50 | identical | 0.50 | 1,234.5 | 5 |",
        "| all | ar | 1.00× |  | baseline | 2.50 | baseline | 0.50 | 1,234.5 | 5 |",
    ]
    lines = printed(print_verbose, results, width=120).splitlines()
    head = next(i for i, line in enumerate(lines) if line.strip().startswith("method"))
    titles = "method speedup 95% CI decode τ accept step time tok/s quality output n"
    assert " ".join(lines[head].split()) == titles
    cells = "ss 1.83× 1.71–1.97 2.00× 2.50 62% 1.25× 1,234.5 0.50 identical 5"
    assert " ".join(lines[head + 1].split()) == cells


def test_latex_has_the_numbers_of_markdown(results: Results) -> None:
    results.rows[1] = replace(results.rows[1], method="ss[weights=a_b]", quality=None)
    assert summary_latex(results).splitlines() == [
        r"\begin{tabular}{llrrlrlrrr}",
        r"\toprule",
        r"task & method & speedup & 95\% CI & verdict & $\tau$ & output & quality & tokens/s & n \\",
        r"\midrule",
        r"all & ss[weights=a\_b] & 1.83$\times$ & 1.71--1.97 & faster & 2.50 & identical & -- & 1,234.5 & 5 \\",
        r"all & ar & 1.00$\times$ &  & baseline & 2.50 & baseline & 0.50 & 1,234.5 & 5 \\",
        r"\bottomrule",
        r"\end{tabular}",
    ]


def test_the_keys_of_columns_are_those_of_the_summary(results: Results) -> None:
    columns = ranking_columns(results.config)
    names = {column.name for column in SUMMARY} | {"speedup_interval"}
    assert columns.keys() <= names and {*EXPORTED, *COLUMNS} <= columns.keys()
