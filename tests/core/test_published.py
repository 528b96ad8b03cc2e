"""A run next to published numbers, and which of them compare."""

from __future__ import annotations

from importlib.metadata import entry_points
from typing import Any

import pytest

from specbench_ss.results.published import comparable, compare_with_published, marks, published
from specbench_ss.runs.run_dir import read_run
from tests.conftest import MakeRun

SAME: dict[str, Any] = {
    "model": {"name": "lmsys/vicuna-7b-v1.3", "parameters": 6_738_415_616, "dtype": "float16", "device": "cuda"},
    "suite": {"name": "specbench", "edition": "official", "size": 480},
    "config": {"temperature": 0.0},
    "environment": {"gpus": [{"name": "NVIDIA A100-SXM4-80GB"}]},
}
TABLE = {(entry.method, entry.size, entry.gpu): entry for entry in published()}


def test_every_published_method_that_is_named_is_one_of_ours() -> None:
    names = {point.name for point in entry_points(group="specbench_ss.methods")}
    assert {entry.method for entry in published()} - {""} <= names
    assert len(TABLE) == len(published()) == 41 and all(entry.source for entry in published())
    assert (TABLE["recycling", "7B", "A100"].tau, TABLE["recycling", "7B", "3090"].speedup) == (2.73, 1.40)


@pytest.mark.parametrize(
    ("part", "changes", "mark", "still"),
    [
        ("model", {}, "same", "τ and speedup"),
        ("model", {"name": "vicuna-7b-v1.5"}, "part", "nothing"),
        ("model", {"parameters": 13_000_000_000}, "part", "nothing"),
        ("model", {"name": "Qwen3-8B"}, "other", "nothing"),
        ("questions", {"size": 60}, "part", "nothing"),
        ("questions", {"edition": "generated"}, "other", "nothing"),
        ("questions", {"name": "apps"}, "other", "nothing"),
        ("decoding", {"temperature": 1.0}, "other", "nothing"),
        ("decoding", {"stop": ["Q:"]}, "other", "nothing"),
        ("number format", {"dtype": "float32"}, "other", "τ"),
        ("GPU", {"gpus": [{"name": "NVIDIA H100"}]}, "other", "τ"),
        ("GPU", {"device": "cpu"}, "other", "τ"),
    ],
)
def test_a_number_compares_only_where_everything_that_decides_it_is_the_same(
    part: str, changes: dict[str, Any], mark: str, still: str
) -> None:
    manifest = {
        name: {**of, **{k: v for k, v in changes.items() if k in of or (name, k) == ("config", "stop")}}
        for name, of in SAME.items()
    }
    found = marks(manifest, TABLE["pld", "7B", "A100"])
    assert found[part] == mark and comparable(found) == still


def test_a_method_that_nobody_published_has_dashes(make_run: MakeRun) -> None:
    run = make_run()
    rows = compare_with_published(read_run(run).manifest, {"ar": (1.0, 1.0), "ss": (2.5, 1.9), "medusa": (2.0, 1.5)})
    assert [(row.method, row.entry and row.entry.tau) for row in rows] == [
        ("ss", None), ("medusa", 2.32), ("medusa", 2.31), ("medusa", 2.39), ("medusa", 2.33),
    ]  # fmt: skip
