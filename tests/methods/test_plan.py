"""`ssbench plan`: a row for each kind of drafter, and the speedup that a profile's acceptance would give."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import pytest
import torch

from specbench_ss import load_run
from specbench_ss.cli.main import main
from specbench_ss.engine import batch_runner
from specbench_ss.engine.target import Target
from specbench_ss.errors import UserError
from specbench_ss.methods._plan import against
from specbench_ss.methods._plan.against import PredictedRun, Prediction
from specbench_ss.methods._plan.step_cost import (
    EAGLE,
    GROUPS,
    LOOKUP,
    MEDUSA,
    SD,
    SS,
    TEXT,
    Requests,
    node_groups,
    untrained,
)
from specbench_ss.methods.pld import PromptLookup
from specbench_ss.results.acceptance_profile import read_profile
from tests.cli import failing
from tests.refusals import in_manifest
from tests.tiny import thorough

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


@thorough
def test_every_context_and_batch_size_has_rows_and_a_best_number(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    more = ["--batch-size", "3,1", "--context", "24,16", "--nodes", "2", "--profile", profile(tmp_path / "p.json")]
    assert main([*SMALL, *more, "--json"]) == 0
    made = json.loads(capsys.readouterr().out)
    places = [(context, batch) for context in (16, 24) for batch in (1, 3)]
    of_medusa = [row for row in made["rows"] if row["drafter"] == "medusa"]
    assert [(row["context"], row["batch_size"], row["nodes"]) for row in of_medusa] == [
        (*place, n) for place in places for n in (1, 2, 3)
    ]
    assert all((row["draft_ms"] is None) == (row["batch_size"] > 1) for row in made["rows"])
    assert [(row["context"], row["batch_size"]) for row in made["best"]] == places
    for row in made["best"]:
        own = [other for other in of_medusa if all(other[name] == row[name] for name in ("context", "batch_size"))]
        assert row["profile_speedup"] == max(other["profile_tau"] / other["ratio"] for other in own)


@torch.inference_mode()
@pytest.mark.parametrize("batch_size", [1, 3])
def test_forced_steps_continue_the_text_and_requests_share_their_passes(
    batch_size: int, lab: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    served = list[int]()

    def serve(passes: Any, dim: int, inner: Callable[..., Any] = batch_runner._serve) -> Any:
        served.append(len(passes))
        return inner(passes, dim)

    monkeypatch.setattr(batch_runner, "_serve", serve)
    requests = Requests(untrained(MEDUSA, lab, 4), TEXT, 16, 4, batch_size)
    made = requests.advance(4)
    assert len(made) == 4 and all(seconds > 0 and step.draft_nodes == 4 for seconds, step in made)
    for begun, state in requests.requests:
        assert len(begun.ids) == 16 + 1 + 2 * 4 and state.ids == begun.ids
        assert begun.ids[17:] == [TEXT[i % len(TEXT)] for i in range(17, 25)]
    assert served == ([] if batch_size == 1 else [batch_size] * len(served)) and (batch_size == 1) != bool(served)


@torch.inference_mode()
@pytest.mark.parametrize("kind", [LOOKUP, MEDUSA, SS, EAGLE, SD])
def test_every_request_drafts_the_same_number_of_tokens(kind: str, lab: Target) -> None:
    requests = Requests(untrained(kind, lab, 5, draft=lab), TEXT, 16, 1, 3)
    assert [len(begun.propose(state)) for begun, state in requests.requests] == [6] * 3


@torch.inference_mode()
@pytest.mark.parametrize("nodes", [0, 3, None])
def test_a_method_that_copies_drafts_the_limited_number_of_tokens(nodes: int | None, lab: Target) -> None:
    requests = Requests(PromptLookup(lab), TEXT, 60, 8, nodes=nodes)
    drafted = {step.draft_nodes for _, step in requests.advance(8)[3:]}
    assert drafted == {PromptLookup.Options().length if nodes is None else nodes}


@pytest.mark.parametrize("drafted", [[4] * 9, [0, 0, 0, 10], list(range(11)) * 3, [0] * 50 + list(range(40))])
def test_groups_stand_for_all_steps(drafted: list[int]) -> None:
    groups = node_groups(drafted)
    assert len(groups) <= GROUPS and sum(share for _, share in groups) == pytest.approx(1)
    assert sum(n * share for n, share in groups) == pytest.approx(np.mean(drafted), abs=0.5)
    if len({*drafted}) <= GROUPS:
        assert {n: round(share * len(drafted)) for n, share in groups} == {n: drafted.count(n) for n in drafted}


@pytest.fixture(scope="module")
def lab_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small run on the lab of methods with constant, varying and unknown kinds of drafts."""
    out = tmp_path_factory.mktemp("plan") / "run"
    words = "--model lab --device cpu --dtype float32 --suite specbench --tasks qa --limit 2 --max-new-tokens 24"
    words += " --methods pld,medusa,lookahead --warmup 0 --batch-size 2"
    assert main(["run", *words.split(), "--out", str(out)]) == 0
    return out


def step_of(run: Path, method: str) -> float:
    """Mean seconds of a step with two requests at a time."""
    rows = [row for row in load_run(run).run.requests if row.method == method]
    return sum(row.decode_s or 0.0 for row in rows) / sum(row.steps or 0 for row in rows)


@thorough
def test_predictions_are_of_the_runs_methods(lab_run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    capsys.readouterr()
    assert main(["plan", "--against", str(lab_run), "--steps", "2", "--json"]) == 0
    made = json.loads(capsys.readouterr().out)
    measured = load_run(lab_run).machine().set_index("method")["decode_speedup"]
    steps = load_run(lab_run).steps.groupby("method")
    rows = {row["method"]: row for row in made["rows"] if row["batch_size"] == 1}
    assert {*rows, *made["left_out"]} == {"pld", "medusa", "lookahead"} and {"pld", "medusa"} <= rows.keys()
    assert {label: row["kind"] for label, row in rows.items() if row["kind"]} == {"pld": LOOKUP, "medusa": MEDUSA}
    assert made["without_kind"] == ["lookahead"]
    for label, row in rows.items():
        own = steps.get_group(label)
        assert row["tau"] == pytest.approx(own["tokens"].mean()) and row["measured"] == measured[label]
        assert row["nodes"] == pytest.approx(own["draft_nodes"].mean())
        assert row["predicted"] == row["tau"] / row["ratio"]
        assert row["error"] == pytest.approx(row["predicted"] / row["measured"] - 1)
    together = {row["method"]: row for row in made["rows"] if row["batch_size"] == 2}
    assert together.keys() == rows.keys() and len(made["rows"]) == 2 * len(rows)
    level = load_run(lab_run).concurrency().query("concurrency == 2").set_index("method")
    for label, row in together.items():
        assert row["tau"] == pytest.approx(level["mean_acceptance_length"][label])
        assert row["measured"] == pytest.approx(row["tau"] / step_of(lab_run, label) * step_of(lab_run, "ar"))
    assert main(["plan", "--against", str(lab_run), "--steps", "1"]) == 0
    text = capsys.readouterr().out
    assert "while decoding, without prefill" in text and "no kind of drafter stands for: lookahead" in text


@thorough
def test_an_untrained_drafter_that_fails_leaves_the_prediction(
    lab_run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fails(*_: Any) -> NoReturn:
        raise UserError("no room")

    monkeypatch.setattr(against, "untrained", fails)
    capsys.readouterr()
    assert main(["plan", "--against", str(lab_run), "--steps", "1", "--json"]) == 0
    made = json.loads(capsys.readouterr().out)
    medusa = [row for row in made["rows"] if row["method"] == "medusa"]
    assert [(row["batch_size"], row["kind_predicted"]) for row in medusa] == [(1, None), (2, None)]
    assert all(row["predicted"] for row in medusa)
    assert made["left_out"]["medusa by an untrained drafter"] == "no room"


def test_reversed_pairs_of_a_batch_size_are_named_with_ar_among_them() -> None:
    def pairs(*methods: tuple[str, int, float, float]) -> list[tuple[bool, str]]:
        made = [Prediction(name, batch, tau, 4.0, measured, 1.0, None, None) for name, batch, tau, measured in methods]
        found = PredictedRun(Path(), 8, made, {}, [], [], []).pairs()
        return [(right, text.partition(" (")[0]) for right, text in found]

    assert pairs(("a", 1, 1.3, 1.2), ("b", 1, 1.1, 1.05)) == [(True, "ar and a"), (True, "ar and b"), (True, "a and b")]
    assert pairs(("a", 1, 1.3, 0.9), ("b", 1, 1.1, 1.05)) == [
        (False, "ar and a"), (True, "ar and b"), (False, "a and b")
    ]  # fmt: skip
    assert pairs(("a", 1, 1.3, 1.1), ("b", 4, 1.1, 1.2)) == [(True, "ar and a"), (True, "ar and b")]


def changed(run: Path, folder: Path, *keys: str, value: Any) -> str:
    """A copy of a run with one entry of its manifest changed."""
    shutil.copytree(run, folder)
    in_manifest(*keys, value=value)(folder)
    return str(folder)


@thorough
def test_a_method_that_is_another_one_now_is_left_out(
    lab_run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    methods = json.loads((lab_run / "manifest.json").read_text())["methods"]
    next(entry for entry in methods if entry["name"] == "medusa")["resolved"]["heads_hash"] = "0" * 16
    run = changed(lab_run, tmp_path / "run", "methods", value=methods)
    capsys.readouterr()
    assert main(["plan", "--against", run, "--steps", "1", "--json"]) == 0
    made = json.loads(capsys.readouterr().out)
    assert "differ from the run's" in made["left_out"]["medusa"]
    assert "medusa" not in [row["method"] for row in made["rows"]]


@pytest.mark.parametrize(
    ("keys", "value", "reported"),
    [
        (("model", "hash"), "0" * 16, "other weights"),
        (("config", "endpoints"), [{"label": "ar", "url": "http://localhost:1"}], "run of servers"),
        (("config", "model"), None, "does not state model"),
    ],
)
def test_a_run_that_cannot_be_predicted_is_one_line(
    lab_run: Path, tmp_path: Path, keys: tuple[str, ...], value: Any, reported: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert reported in failing(["plan", "--against", changed(lab_run, tmp_path / "run", *keys, value=value)], capsys)


@pytest.mark.parametrize(("kept", "reported"), [("ar", "no method that drafts"), ("pld", "no samples of its baseline")])
def test_a_run_needs_a_baseline_and_another_method(
    lab_run: Path, tmp_path: Path, kept: str, reported: str, capsys: pytest.CaptureFixture[str]
) -> None:
    entries = json.loads((lab_run / "manifest.json").read_text())["methods"]
    run = tmp_path / "run"
    changed(lab_run, run, "methods", value=[entry for entry in entries if entry["name"] in ("ar", kept)])
    for name in ("samples.jsonl", "output_match.jsonl"):
        lines = (run / name).read_text().splitlines(True)
        (run / name).write_text("".join(line for line in lines if json.loads(line)["method"] == kept))
    assert reported in failing(["plan", "--against", str(run)], capsys)


@thorough
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
        (["--batch-size", "1,,4"], "--batch-size"),
        (["--batch-size", "0,4"], "1 to 1024"),
        (["--batch-size", "2", "--engine", "graph"], "--engine graph"),
        (["--context", "512,many"], "--context"),
        (["--context", "4"], "at least 8"),
        (["--against", "missing"], "--against does not go with"),
        (["--context", "4000"], "more than the context"),
        (["--steps", "900"], "more than the context"),
        (["--draft-vocab", "99999"], "size of the vocabulary"),
        (["--profile", "missing.json"], "missing.json"),
    ],
)
def test_wrong_options_are_one_line(options: list[str], reported: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert reported in failing([*SMALL, *options], capsys)
