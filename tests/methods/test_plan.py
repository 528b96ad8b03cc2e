"""`ssbench plan`: a row for each kind of drafter, and the speedup that a profile's acceptance would give."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from specbench_ss.cli.main import main
from specbench_ss.results.acceptance_profile import read_profile
from tests.cli import failing

SMALL = ["plan", "--model", "lab", "--device", "cpu", "--dtype", "float32", "--context", "16", "--steps", "1"]
RATES = [0.75, 0.5, 0.25]


def profile(path: Path, **changes: Any) -> str:
    """A profile of a chain of three tokens."""
    made = {
        "schema_version": "1.0", "measured": True, "method": "medusa", "num_speculative_tokens": 3,
        "mean_accept_length": 2.5, "marginal_accept_rates": RATES, "accept_length_model": "chain_analytic",
    }  # fmt: skip
    path.write_text(json.dumps(made | changes))
    return str(path)


def planned(capsys: pytest.CaptureFixture[str], *more: str) -> list[dict[str, Any]]:
    capsys.readouterr()
    assert main([*SMALL, "--json", *more]) == 0
    rows: list[dict[str, Any]] = json.loads(capsys.readouterr().out)["rows"]
    return rows


def test_every_kind_and_number_of_nodes_has_a_row(capsys: pytest.CaptureFixture[str]) -> None:
    rows = planned(capsys, "--nodes", "2,5", "--draft", "lab")
    kinds = ("lookup", "medusa", "ss", "eagle", "sd")
    assert [(row["drafter"], row["nodes"]) for row in rows] == [(kind, n) for kind in kinds for n in (2, 5)]
    for row in rows:
        assert row["ratio"] > 0 and row["ar_ms"] > 0 and row["verify_ms"] > 0
        assert row["speedup"] == {tau: float(tau) / row["ratio"] for tau in ("1.5", "2", "3", "4")[: row["nodes"] + 1]}
    assert rows[1]["draft_ms"] < rows[-1]["draft_ms"]


def test_a_profile_gives_speedups_of_its_kind_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = planned(capsys, "--nodes", "2", "--profile", profile(tmp_path / "p.json"))
    predicted = {row["nodes"]: row for row in rows if "profile_tau" in row}
    assert {row["drafter"] for row in predicted.values()} == {"medusa"}
    assert {n: row["profile_tau"] for n, row in predicted.items()} == {1: 1.75, 2: 2.25, 3: 2.5}
    assert all(row["profile_speedup"] == row["profile_tau"] / row["ratio"] for row in predicted.values())
    assert main([*SMALL, "--nodes", "2", "--profile", str(tmp_path / "p.json")]) == 0
    assert "expected of medusa, batch size 1, 16 tokens of context: " in capsys.readouterr().out


@pytest.mark.parametrize(
    ("changes", "lengths"),
    [
        ({}, {1: 1.75, 2: 2.25, 3: 2.5}),
        ({"accept_length_model": "measured_per_k"}, {3: 2.5}),
        ({"accept_length_model": "measured_per_k", "accept_length_by_k": {"1": 1.7, "3": 2.5}}, {1: 1.7, 3: 2.5}),
        ({"marginal_accept_rates": None}, {3: 2.5}),
        ({"accept_length_model": "", "measurement_conditions": {"draft_nodes_per_step": 7.6}}, {8: 2.5}),
    ],
)
def test_lengths_are_those_that_a_profile_states(
    tmp_path: Path, changes: dict[str, Any], lengths: dict[int, float]
) -> None:
    assert read_profile(Path(profile(tmp_path / "p.json", **changes))).mean_lengths() == lengths


@pytest.mark.parametrize(
    ("changes", "reported"),
    [
        ({"marginal_accept_rates": [0.5, 1.5, 0.1]}, "marginal_accept_rates"),
        ({"marginal_accept_rates": [0.5, 0.6, 0.1]}, "increase"),
        ({"marginal_accept_rates": [0.5]}, "for 3 draft tokens"),
        ({"measured": False}, "profile of nothing"),
        ({"num_speculative_tokens": "many"}, "num_speculative_tokens"),
        ({"mean_accept_length": None}, "mean_accept_length"),
        ({"mean_accept_length": float("inf")}, "JSON"),
        ({"method": "dflash"}, "dflash"),
        ({"method": "draft_model"}, "--draft"),
    ],
)
def test_a_wrong_profile_is_one_line(
    tmp_path: Path, changes: dict[str, Any], reported: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert reported in failing([*SMALL, "--profile", profile(tmp_path / "p.json", **changes)], capsys)


@pytest.mark.parametrize(
    ("options", "reported"),
    [
        (["--nodes", "two"], "whole numbers"),
        (["--nodes", "0"], "1 to 256"),
        (["--context", "4000"], "more than the context"),
        (["--steps", "900"], "more than the context"),
        (["--draft-vocab", "99999"], "size of the vocabulary"),
        (["--profile", "missing.json"], "missing.json"),
    ],
)
def test_wrong_options_are_one_line(options: list[str], reported: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert reported in failing([*SMALL, *options], capsys)
