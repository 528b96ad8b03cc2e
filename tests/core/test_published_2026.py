"""Numbers published in 2026: the files, their reader, and which of the numbers compare with a run."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from specbench_ss import registry
from specbench_ss.errors import UserError
from specbench_ss.results.published_2026 import (
    SERIES,
    VALUES,
    Measured,
    PublishedValue,
    comparability,
    compare_values,
    published_values,
    read_values,
)
from specbench_ss.results.summary import SummaryRow, summarise
from specbench_ss.runs.records import Run
from specbench_ss.runs.run_dir import read_run
from tests.conftest import MakeRun

SAME: dict[str, Any] = {
    "model": {"name": "Qwen/Qwen3-4B", "dtype": "bfloat16", "device": "cuda:0"},
    "suite": {"name": "gsm8k", "edition": "official", "size": 1319},
    "config": {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "verification": "token"},
    "environment": {"gpus": [{"name": "NVIDIA H100 80GB HBM3"}]},
}


@pytest.fixture
def run(make_run: MakeRun) -> Run:
    """A run whose method `medusa` is `dflash`."""
    found = read_run(make_run(categories=("qa",), questions=2))
    found.entry("medusa")["name"] = "dflash"
    return found


@pytest.fixture
def row(run: Run) -> SummaryRow:
    return next(row for row in summarise(run) if row.method == "medusa")


def value_of(published_as: str, benchmark: str = "GSM8K", model: str = "Qwen3-4B") -> PublishedValue:
    (found,) = (
        one
        for one in published_values()
        if (one.of.published_as, one.benchmark, one.model) == (published_as, benchmark, model)
    )
    return found


def test_every_row_is_there() -> None:
    found = published_values()
    assert Counter(one.of.method for one in found) == {
        "": 73, "dflash": 68, "eagle3": 87, "dspark": 75, "uno": 15, "mtp": 10, "peagle": 6, "medusa": 4,
    }  # fmt: skip
    assert len(found) == 338 and {one.of.series for one in found} == {str(i) for i in range(1, 107)}
    table = [one for one in found if one.of.source == "arXiv 2607.05147 table 1"]
    assert len(table) == 108 and round(sum(one.value for one in table), 2) == 455.67
    assert {(one.of.temperature, one.of.pooling, one.of.counts, one.of.draft_length) for one in table} == {
        (1.0, "pooled", "with bonus", 7)
    }


def test_methods_are_ours_or_planned() -> None:
    assert {one.of.method for one in published_values()} - {""} <= set(registry.names(registry.METHODS))


@pytest.mark.parametrize(
    ("file", "old", "new", "message"),
    [
        (VALUES, "5.14", "5,14", "values.csv line 2: more cells than columns"),
        (VALUES, "5.14", "fast", "values.csv line 2: Expected `float`"),
        (VALUES, "5.14", "nan", "values.csv line 2: the value nan is no positive number"),
        (VALUES, "5.14", "", "values.csv line 2: Object missing required field `value`"),
        (VALUES, "MATH-500,4.62", "GSM8K,4.62", "values.csv line 3: a second value"),
        (VALUES, "1,Qwen3-4B", "999,Qwen3-4B", "values.csv line 2: unknown series '999'; define it in series.csv"),
        (VALUES, "benchmark", "set", "values.csv line 2: unknown column set"),
        (SERIES, ",eagle3,", ",eagle9,", "series.csv line 2: Invalid enum value 'eagle9'"),
        (SERIES, "\n2,", "\n1,", "series.csv line 3: the series '1' is defined twice"),
        (SERIES, "speedup,0,,", "speedup,0,pooled,", "pooling and counts belong to tau, not to speedup"),
    ],
)
def test_a_mistake_in_a_file_is_one_clear_error(file: Path, old: str, new: str, message: str, tmp_path: Path) -> None:
    paths = {VALUES: tmp_path / "values.csv", SERIES: tmp_path / "series.csv"}
    for source, path in paths.items():
        text = source.read_text(encoding="utf-8")
        path.write_text(text.replace(old, new, 1) if source == file else text, encoding="utf-8")
    with pytest.raises(UserError) as caught:
        read_values(paths[VALUES], paths[SERIES])
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("changes", "mark"),
    [
        ({}, "comparable"),
        ({"temperature": 0.0}, "differs: temperature"),
        ({"top_p": 0.9}, "differs: top-p or top-k"),
        ({"verification": "block"}, "differs: verification"),
        ({"stop": ["Q:"]}, "differs: stop strings"),
        ({"name": "Qwen/Qwen3-4B-Base"}, "differs: model"),
        ({"size": 100}, "differs: questions"),
        ({"edition": "generated"}, "differs: questions"),
    ],
)
def test_a_number_compares_only_if_every_condition_is_the_same(
    changes: dict[str, Any], mark: str, row: SummaryRow
) -> None:
    manifest = {
        part: {**of, **{k: v for k, v in changes.items() if k in of or (part, k) == ("config", "stop")}}
        for part, of in SAME.items()
    }
    if "name" in changes:
        manifest["suite"] = SAME["suite"]
    here = Measured("dflash", row, 7, "chain")
    assert str(comparability(manifest, here, value_of("DFlash (DeepSpec)"))) == mark
    assert here.value(value_of("DFlash (DeepSpec)").of) == row.mean_acceptance_length


def test_another_draft_or_counting_does_not_compare(row: SummaryRow) -> None:
    value = value_of("DFlash (DeepSpec)")

    def mark(here: Measured, **changes: Any) -> str:
        return str(comparability(SAME, here, replace(value, of=replace(value.of, **changes))))

    chain = Measured("dflash", row, 7, "chain")
    assert mark(Measured("dflash", row, 7, "tree")) == mark(Measured("dflash", row, 3, "chain")) == "differs: draft"
    assert mark(chain, counts="without bonus") == mark(chain, counts="per forward") == "differs: counting"
    assert mark(chain, draft_length=3, draft_shape="") == "differs: draft"
    assert mark(chain, draft_shape="") == "not stated: draft"
    assert mark(chain, pooling="") == "not stated: pooling" and mark(chain, counts="") == "not stated: counting"
    per_request = replace(value.of, pooling="per request")
    assert chain.value(per_request) == row.request_mean_acceptance_length != row.mean_acceptance_length
    assert chain.value(replace(value.of, counts="per forward")) is None


def test_sampled_numbers_never_compare_with_a_greedy_run(run: Run, row: SummaryRow) -> None:
    greedy = {**SAME, "config": {**SAME["config"], "temperature": 0.0}}
    for value in published_values():
        if value.of.temperature == 1.0:
            found = comparability(greedy, Measured(value.of.method, row, value.of.draft_length, "chain"), value)
            assert "temperature" in found.differs and not found.comparable


def test_speedups_need_the_same_hardware(row: SummaryRow) -> None:
    value = value_of("UNO r16 K=4", "documents of 2000 tokens", "Gemma4-26B-A4B AWQ")
    found = comparability(SAME, Measured("uno", row, 4, "chain"), value)
    assert "hardware" in found.differs and "dtype" in found.unstated
    h100 = replace(value, of=replace(value.of, hardware="H100"))
    assert "hardware" not in comparability(SAME, Measured("uno", row, 4, "chain"), h100).differs


def test_numbers_are_those_of_the_methods_of_the_run(run: Run) -> None:
    rows = [row for row in summarise(run) if row.task == "overall" and row.method != "ar"]
    found = compare_values(run, rows)
    assert len(found) == 68 and {(one.method, one.value.of.method) for one in found} == {("medusa", "dflash")}
    assert not any(one.compares.comparable for one in found), "the model is another one"
    assert [one.value.of.metric != "tau" for one in found] == sorted(one.value.of.metric != "tau" for one in found)
    assert compare_values(run, [row for row in rows if row.method == "ss"]) == []
