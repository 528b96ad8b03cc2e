"""Why a method is as fast as it is: the parts add up, and the sentence says the same."""

from __future__ import annotations

import re

import pytest

from specbench_ss.reports.html.health import order_in_words
from specbench_ss.reports.html.report import page
from specbench_ss.results.analysis import analyse
from specbench_ss.results.cost_model import pairs, waterfalls
from specbench_ss.results.published import compare_with_published
from specbench_ss.results.summary import OVERALL, summarise
from specbench_ss.runs.run_dir import read_run
from tests.conftest import MakeRun


def test_the_parts_lead_from_the_reference_to_the_method_and_give_its_speedup(make_run: MakeRun) -> None:
    run = read_run(make_run(failing=("medusa",), repeats=2))
    found, rows = waterfalls(pairs(run)), {r.method: r for r in summarise(run) if r.category == OVERALL}
    assert set(found) == {"ss", "medusa"}
    for label, one in found.items():
        assert one.reference_ms + sum(one.parts.values()) == pytest.approx(one.method_ms)
        assert one.reference_ms / one.method_ms == pytest.approx(rows[label].speedup)
        assert one.tau == pytest.approx(rows[label].mean_acceptance_length)


def test_passes_saved_are_the_references_passes_less_often_made(make_run: MakeRun) -> None:
    run = read_run(make_run(labels=("ar", "ss")))
    one = waterfalls(pairs(run))["ss"]
    by = {label: [row for row in run.rows if row.method == label] for label in run.labels}
    passes = {label: sum(r.steps or 0 for r in own) / sum(r.tokens or 0 for r in own) for label, own in by.items()}
    verify = {label: run.steps.together([r.key for r in own]).verify_s.mean() * 1000 for label, own in by.items()}
    assert one.parts["passes saved"] == pytest.approx(verify["ar"] * (passes["ss"] - passes["ar"]))
    assert one.parts["verifying widened"] == pytest.approx((verify["ss"] - verify["ar"]) * passes["ss"])
    assert one.pass_ratio == pytest.approx(verify["ss"] / verify["ar"])


def test_reading_the_prompt_is_a_part_of_its_own(make_run: MakeRun) -> None:
    run = read_run(make_run(labels=("ar", "ss")))
    before = waterfalls(pairs(run))["ss"]
    for row in run.rows:
        if row.method == "ss":
            row.prefill_s, row.wall_s = (row.prefill_s or 0) + 0.1, (row.wall_s or 0) + 0.1
    after = waterfalls(pairs(run))["ss"]
    per_token = 100 * sum(r.method == "ss" for r in run.rows) / sum(r.tokens or 0 for r in run.rows if r.method == "ss")
    assert (
        after.parts["reading prompts"] - before.parts["reading prompts"]
        == pytest.approx(per_token)
        == pytest.approx(after.method_ms - before.method_ms)
    )
    assert after.parts["other"] == pytest.approx(before.parts["other"])


def test_the_sentence_has_the_numbers_of_the_drawing(make_run: MakeRun) -> None:
    one = waterfalls(pairs(read_run(make_run(labels=("ar", "ss")))))["ss"]
    said, saved = one.sentence(), -one.parts["passes saved"]
    assert said.startswith(f"ss keeps {one.tau:.2f} tokens a pass, which saves {saved:.2f} ms a token")
    assert said.endswith(f"{one.reference_ms:.2f} ms a token become {one.method_ms:.2f}.")
    rest = ("reading the prompt and other work", one.parts["reading prompts"] + one.parts["other"])
    for name, part in (("Verifying", one.parts["verifying widened"]), ("drafting", one.parts["drafting added"]), rest):
        told = re.search(rf"{name} (adds nothing|adds|saves)", said)
        assert told is not None
        assert told[1] == ("adds nothing" if abs(part) < 0.005 else "adds" if part > 0 else "saves")


def test_without_steps_or_pairs_there_is_no_waterfall(make_run: MakeRun) -> None:
    assert waterfalls(pairs(read_run(make_run(labels=("ar",))))) == {}
    run = read_run(make_run(labels=("ar", "ss"), categories=("qa",), questions=1, failing=("ss",)))
    assert waterfalls(pairs(run)) == {}


def test_published_numbers_stand_beside_the_runs_and_say_what_compares(make_run: MakeRun) -> None:
    found = page(analyse(read_run(make_run())))
    table = found["published"]
    assert {row[0].text for row in table.rows} == {"medusa"}, "nobody has published code of ss"
    row, overall = table.rows[0], {row.label: row for row in found["ranking"]}
    assert row[1].text == overall["medusa"].tau and row[7].text == "nothing" and row[5].text.startswith("✕ vicuna")


def test_the_published_order_is_told_in_words_beside_ours(make_run: MakeRun) -> None:
    manifest = read_run(make_run()).manifest
    method, names = manifest["methods"][1], ("eagle2", "medusa", "pld")
    manifest["methods"] = [{**method, "label": name, "name": name} for name in names]
    ours = {"eagle2": (3.0, 1.1), "medusa": (2.0, 1.5), "pld": (1.5, 1.0)}
    (said,) = order_in_words(compare_with_published(manifest, ours))
    assert said == (
        "No number of these compares with this run's; orders can be set side by side. By speedup, the order published "
        "for vicuna 7B v1.3 on 3090 is eagle2, pld, medusa; here it is medusa, eagle2, "
        "pld. 1 of 3 pairs stand in the same order, those counted too whose order is not sure here. Where model or "
        "machine are others, it may well differ."
    )
    assert order_in_words(compare_with_published(manifest, {**ours, "pld": (1.5, None)})) == []
