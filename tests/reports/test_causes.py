"""Why a method is as fast as it is: the parts add up, and the sentence has the same numbers."""

from __future__ import annotations

import re

import pytest

from specbench_ss.reports import charts
from specbench_ss.reports.html.health import order_note
from specbench_ss.reports.html.report import page
from specbench_ss.results.analysis import analyse
from specbench_ss.results.cost_model import pairs, waterfalls
from specbench_ss.results.published import compare_with_published
from specbench_ss.results.summary import OVERALL, summarise
from specbench_ss.runs.run_dir import read_run
from tests.conftest import MakeRun


def test_the_parts_lead_from_the_reference_to_the_method_and_give_its_speedup(make_run: MakeRun) -> None:
    run = read_run(make_run(failing=("medusa",), repeats=2))
    found, rows = waterfalls(pairs(run)), {r.method: r for r in summarise(run) if r.task == OVERALL}
    assert set(found) == {"ss", "medusa"}
    for label, one in found.items():
        assert one.baseline_ms + sum(one.parts.values()) == pytest.approx(one.method_ms)
        assert one.baseline_ms / one.method_ms == pytest.approx(rows[label].speedup)
        assert one.tau == pytest.approx(rows[label].mean_acceptance_length)


def test_passes_saved_are_the_references_passes_less_often_made(make_run: MakeRun) -> None:
    run = read_run(make_run(labels=("ar", "ss")))
    one = waterfalls(pairs(run))["ss"]
    by = {label: [row for row in run.rows if row.method == label] for label in run.labels}
    passes = {label: sum(r.steps or 0 for r in own) / sum(r.tokens or 0 for r in own) for label, own in by.items()}
    verify = {label: run.steps.together([r.key for r in own]).verify_s.mean() * 1000 for label, own in by.items()}
    assert one.parts["fewer steps"] == pytest.approx(verify["ar"] * (passes["ss"] - passes["ar"]))
    assert one.parts["slower verification"] == pytest.approx((verify["ss"] - verify["ar"]) * passes["ss"])
    assert one.relative_verify_time == pytest.approx(verify["ss"] / verify["ar"])


def test_reading_the_prompt_is_a_part_of_its_own(make_run: MakeRun) -> None:
    run = read_run(make_run(labels=("ar", "ss")))
    before = waterfalls(pairs(run))["ss"]
    for row in run.rows:
        if row.method == "ss":
            row.prefill_s, row.wall_s = (row.prefill_s or 0) + 0.1, (row.wall_s or 0) + 0.1
    after = waterfalls(pairs(run))["ss"]
    per_token = 100 * sum(r.method == "ss" for r in run.rows) / sum(r.tokens or 0 for r in run.rows if r.method == "ss")
    assert (
        after.parts["prefill"] - before.parts["prefill"]
        == pytest.approx(per_token)
        == pytest.approx(after.method_ms - before.method_ms)
    )
    assert after.parts["other"] == pytest.approx(before.parts["other"])


def test_the_sentence_has_the_numbers_of_the_drawing(make_run: MakeRun) -> None:
    one = waterfalls(pairs(read_run(make_run(labels=("ar", "ss")))))["ss"]
    text, saved = one.sentence(), -one.parts["fewer steps"]
    assert text.startswith(f"ss, {one.tau:.2f} tokens per step: fewer steps save {saved:.2f} ms")
    assert text.endswith(f"{one.baseline_ms:.2f} to {one.method_ms:.2f} ms per token.")
    rest = ("prefill and other work", one.parts["prefill"] + one.parts["other"])
    verification, drafting = one.parts["slower verification"], one.parts["draft overhead"]
    for name, part in (("verification", verification), ("drafting", drafting), rest):
        message = re.search(rf"{name} (adds nothing|adds|saves)", text)
        assert message is not None
        assert message[1] == ("adds nothing" if abs(part) < 0.005 else "adds" if part > 0 else "saves")


def test_without_steps_or_pairs_there_is_no_waterfall(make_run: MakeRun) -> None:
    assert waterfalls(pairs(read_run(make_run(labels=("ar",))))) == {}
    run = read_run(make_run(labels=("ar", "ss"), categories=("qa",), questions=1, failing=("ss",)))
    assert waterfalls(pairs(run)) == {}


def test_published_numbers_are_marked_by_comparability(make_run: MakeRun) -> None:
    found = page(analyse(read_run(make_run())))
    table = found["published"]
    assert {row[0].text for row in table.rows} == {"medusa"}, "no published number of ss is stored"
    row, overall = table.rows[0], {row.label: row for row in found["ranking"]}
    assert row[1].text == overall["medusa"].cells["mean_acceptance_length"]
    assert row[7].text == "nothing" and row[5].text.startswith("✕ vicuna")


def test_the_published_order_is_compared_with_ours(make_run: MakeRun) -> None:
    manifest = read_run(make_run()).manifest
    method, names = manifest["methods"][1], ("eagle2", "medusa", "pld")
    manifest["methods"] = [{**method, "label": name, "name": name} for name in names]
    ours = {"eagle2": (3.0, 1.1), "medusa": (2.0, 1.5), "pld": (1.5, 1.0)}
    (text,) = order_note(compare_with_published(manifest, ours))
    assert "vicuna 7B v1.3 on 3090: eagle2, pld, medusa; order here: medusa, eagle2, pld. 1 of 3 pairs" in text
    assert "comparable" in text, "the model is another one"
    assert order_note(compare_with_published(manifest, {**ours, "pld": (1.5, None)})) == []


def test_numbers_of_2026_are_shown_for_their_methods_alone(make_run: MakeRun) -> None:
    assert page(analyse(read_run(make_run(labels=("ar", "ss"), questions=1))))["published_2026"] is None
    table = page(analyse(read_run(make_run(questions=1))))["published_2026"]
    assert {row[0].text for row in table.rows} == {"medusa"} and len(table.rows) == 4
    name, benchmark, temperature, metric, number, here, mark = table.rows[0][1:8]
    assert (name.text, name.small, benchmark.text) == ("MEDUSA + KL", ["draft 6"], "mean of 3")
    assert (temperature.text, metric.small, number.text, here.text) == ("0", ["counting not stated"], "2.19", "–")
    assert (mark.text, mark.small) == ("differs: model, questions, draft", ["not stated: counting"])
    assert "0 of 4 are comparable" in table.notes[0]
    assert table.csv().splitlines()[1].startswith("medusa,MEDUSA + KL,6,,1,mean of 3,Llama-3.1-8B-Instruct,0.0,τ,")


def test_the_parts_of_a_single_waterfall_have_names(make_run: MakeRun) -> None:
    one = waterfalls(pairs(read_run(make_run(labels=("ar", "ss")))))["ss"]
    assert charts.waterfall([one]).layout.yaxis.ticktext == ("ar", *one.parts, "total")
