"""Results of experiments in the terminal and in files, and how its rows are listed."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import pytest

from specbench_ss.cli.paper import print_result, status, write_result
from specbench_ss.results.report import Column, Grid, Part, Result, Span
from tests.cli import printed

GRID = Grid("found", (Column("method", "text"), Column("speedup", "times"), Column("n", "count")),
            (("ss[k=1]", 1.234, 1200), ("medusa", None, 3)))  # fmt: skip
LINE = (Span("a "), Span("b ", "accepted"), Span("c", "rejected"), Span("d", "next"))


@pytest.mark.parametrize(
    "value,column,text",
    [(None, Column("x"), "–"), ("a", Column("x"), "a"), (1200, Column("x", "count"), "1,200"),
     (40960, Column("x", "scientific", 3), "4.096E4"), (1.239, Column("x", "times"), "1.24×"),
     (0.5, Column("x", "percent", 0), "50%"), (2, Column("x"), "2.00")],
)  # fmt: skip
def test_cells(value: float | str | None, column: Column, text: str) -> None:
    assert column.text(value) == text


def test_text_for_people_has_every_value_and_no_markup_is_read_into_names() -> None:
    text = printed(print_result, Result((GRID,), lines=(LINE,), notes=("note [k=1]",)))
    assert all(part in text for part in ("ss[k=1]", "1.23×", "1,200", "–", "note [k=1]", "a b [-c-]*d*"))


def test_rows_are_grouped_by_what_they_lack() -> None:
    parts = [Part("a"), Part("b", "method x"), Part("c"), Part("d", "method x"), Part("e", "a CUDA device")]
    assert status(parts) == ["runs: a, c", "needs method x: b, d", "needs a CUDA device: e"]
    assert status([Part("b", "y")]) == ["needs y: b"]


def test_files_hold_raw_values(tmp_path: Path) -> None:
    more = Grid("more", (Column("x"),), ((0.1 + 0.2,),))
    paths = write_result(Result((GRID, more)), {"command": ["ssbench", "paper", "x"]}, tmp_path / "new")
    assert [p.name for p in paths] == ["table.csv", "more.csv", "result.json"]
    assert list(csv.reader(paths[0].open()))[1:] == [["ss[k=1]", "1.234", "1200"], ["medusa", "", "3"]]
    kept = json.loads(paths[2].read_text())
    assert kept["command"] == ["ssbench", "paper", "x"]
    assert kept["grids"][1]["rows"] == [[0.1 + 0.2]]
