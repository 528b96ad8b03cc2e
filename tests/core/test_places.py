"""`Results.places`: the parts of an answer add up to all steps, and each step lies where its first token does."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from specbench_ss import UserError, load_run
from specbench_ss.engine.architectures import ModelInfo
from specbench_ss.results.analysis import analyse
from specbench_ss.results.places import names, place_rows
from specbench_ss.runs.run_dir import read_run
from tests.conftest import MakeRun
from tests.tiny import few, thorough, tiny_model


@thorough
def test_parts_add_up_to_the_run(make_run: MakeRun) -> None:
    results = load_run(make_run(turns=2, repeats=2, failing=("medusa",)))
    places, whole = results.places(ends=(8, 16, 40)), {row.method: row for row in results.overall}
    assert places["place"].unique().tolist() == names((8, 16, 40)) == ["1-8", "9-16", "17-40", "41-"]
    ok = results.samples.query("status == 'ok'")
    good = ok[ok.question_id.isin(ok[ok.method == "medusa"].question_id)]
    for method in ("ss", "medusa"):
        own = places[places.method == method]
        expected = (good if method == "medusa" else ok).query("method == @method")
        assert own.steps.sum() == expected.steps.sum() and own.tokens.sum() == expected.step_tokens.sum()
        tau = own.tokens.sum() / own.steps.sum()
        assert tau == pytest.approx(whole[method].mean_acceptance_length, abs=1e-9)
    baseline = places[places.method == "ar"]
    assert (baseline.mean_acceptance_length == 1).all() and (baseline.decode_speedup == 1).all()
    assert baseline.decode_speedup_low.isna().all() and places.decode_speedup_low.notna().any()


def test_a_step_lies_where_its_first_token_does(make_run: MakeRun) -> None:
    run = read_run(make_run(labels=("ar", "ss"), questions=2))
    for along, before in (("answer", 0), ("context", 50)):  # prompts have 50 tokens
        rows = [row for row in place_rows(run, (), along, (before + 20,)) if row.method == "ss"]  # type: ignore[arg-type]
        early = 0
        for sample in run.of("ss"):
            tokens = run.steps.of(sample.key).tokens
            first = 1 + np.cumsum(tokens) - tokens + 1  # prefill gives the first token of the answer
            early += int((first <= 20).sum())
        assert rows[0].steps == early and sum(row.steps for row in rows) == sum(r.steps or 0 for r in run.of("ss"))


def test_the_speed_of_a_place_is_that_of_its_steps(make_run: MakeRun) -> None:
    """Steps behind token 20 take twice as long, for one method."""
    run = read_run(make_run(labels=("ar", "ss"), questions=5))
    slow, columns, at = run.steps.columns.total_s.copy(), run.steps.columns, 0
    for key, count in zip(run.steps.keys, run.steps.counts.tolist(), strict=True):
        tokens = columns.tokens[at : at + count]
        late = 1 + np.cumsum(tokens) - tokens >= 20
        slow[at : at + count] = np.where(late & (key[2] == "ss"), 2.0, 1.0)
        at += count
    planted = replace(run, steps=replace(run.steps, columns=replace(columns, total_s=slow)))
    early, late = (row for row in place_rows(planted, ends=(20,)) if row.method == "ss")
    assert early.relative_step_time == pytest.approx(1) and late.relative_step_time == pytest.approx(2)
    assert early.decode_speedup == pytest.approx(early.mean_acceptance_length, rel=0.05)
    assert late.decode_speedup == pytest.approx((late.mean_acceptance_length or 0) / 2, rel=0.05)


def test_thinking_and_answer_are_places(make_run: MakeRun) -> None:
    run = read_run(make_run(labels=("ar", "ss"), questions=3))
    with pytest.raises(UserError, match="places by part"):
        place_rows(run, (), "part")
    for row in run.rows:
        row.thinking_tokens = 20
    parts = place_rows(run, (), "part")
    assert [replace(row, place="") for row in parts] == [replace(row, place="") for row in place_rows(run, ends=(20,))]
    assert [row.place for row in parts] == ["thinking"] * 2 + ["answer"] * 2
    run.of("ss")[0].thinking_tokens = run.of("ss")[0].tokens
    with pytest.warns(UserWarning, match=f"^1 of {len(run.rows)} outputs end before </think>"):
        unclosed = {(row.place, row.method): row for row in place_rows(run, (), "part")}
    assert unclosed["thinking", "ss"].tokens > parts[1].tokens


@pytest.mark.parametrize(
    ("prompt", "output", "expected"),
    [
        ("hi", "<think>b</think>c", 16),
        ("hi<think>\n", "b</think>c", 9),
        ("hi<think>", "bc", 2),
        ("<think></think>", "b", 0),
        ("hi", "a <think>b</think>", 0),
    ],
)
def test_thinking_ends_with_its_tag(prompt: str, output: str, expected: int) -> None:
    class Letters:
        def decode(self, ids: list[int]) -> str:
            return "".join(map(chr, ids))

    info = ModelInfo(tiny_model("llama").config, Letters(), "m")
    assert info.thinking_tokens([*map(ord, prompt)], [*map(ord, output)]) == expected


@few(3)
@pytest.mark.parametrize(
    "wrong",
    [
        {"ends": (8, 8)},
        {"ends": (0, 5)},
        {"ends": 16},
        {"ends": (1.5,)},
        {"along": "x"},
        {"along": "part", "ends": (8,)},
    ],
)
def test_wrong_places_are_refused(make_run: MakeRun, wrong: dict[str, Any]) -> None:
    with pytest.raises(UserError, match="places"):
        analyse(read_run(make_run())).places(**wrong)
