"""The samples of the page: all prompts are there, equal texts once, numbers as in the run."""

from __future__ import annotations

import pytest

from specbench_ss.reports.html.report import page as page_of
from specbench_ss.reports.html.samples import MOST
from specbench_ss.results.analysis import analyse
from specbench_ss.results.text import visible
from specbench_ss.runs.run_dir import read_run
from tests.conftest import MakeRun


def test_every_prompt_is_packed_with_every_method(make_run: MakeRun) -> None:
    run = read_run(make_run(questions=5, turns=2, repeats=2))
    packed = page_of(analyse(run))["samples"]
    names = list(zip(packed["prompts"]["id"], packed["prompts"]["turn"], strict=True))
    assert names == [(q.id, turn) for q in run.questions for turn in range(2)]
    for method in packed["methods"]:
        rows = {(r.question_id, r.turn, r.repeat): r for r in run.rows if r.method == method["label"]}
        for i, (id, turn) in enumerate(names):
            first, again = rows[id, turn, 0], rows[id, turn, 1]
            assert packed["texts"][method["text"][i]] == first.text
            seconds, tokens = ((getattr(first, n) or 0) + (getattr(again, n) or 0) for n in ("wall_s", "tokens"))
            assert method["ms"][i] == pytest.approx(1000 * seconds / tokens, rel=1e-4)
            assert method["tokens"][i] == first.tokens
    assert [packed["texts"][i] for i in packed["prompts"]["asked"]][0] == run.questions[0].turns[0]


def test_equal_texts_are_stored_once(make_run: MakeRun) -> None:
    run = read_run(make_run(questions=3))
    for row in run.rows:
        row.text = f"the answer to {row.question_id}"
    packed = page_of(analyse(run))["samples"]
    assert len(packed["texts"]) == len(set(packed["texts"]))
    assert sum(text.startswith("the answer") for text in packed["texts"]) == len(run.questions)
    assert all(method["text"] == packed["methods"][0]["text"] for method in packed["methods"])


def test_failed_and_missing_samples_have_no_numbers(make_run: MakeRun) -> None:
    run = read_run(make_run(labels=("ar", "ss"), categories=("qa",), questions=3, failing=("ss",)))
    run.rows = [row for row in run.rows if (row.method, row.question_id) != ("ss", "qa-2")]
    packed = page_of(analyse(run))["samples"]
    ss = next(method for method in packed["methods"] if method["label"] == "ss")
    assert packed["texts"][ss["text"][0]] == "RuntimeError: out of luck"
    assert packed["verdicts"][ss["verdict"][0]] == ("failed", "bad")
    assert (ss["ms"][0], ss["tau"][0], ss["tokens"][0]) == (None, None, None)
    assert ss["text"][2] == ss["verdict"][2] == -1 and ss["ms"][2] is None


def test_noisy_samples_are_marked(make_run: MakeRun) -> None:
    run = read_run(make_run(labels=("ar", "ss"), categories=("qa",), questions=3))
    for row in run.rows:
        row.noise_reason = "others" if (row.method, row.question_id) == ("ss", "qa-1") else ""
    packed = page_of(analyse(run))["samples"]
    assert {method["label"]: method["noisy"] for method in packed["methods"]} == {"ar": [], "ss": [1]}


def test_long_texts_are_whole_to_a_limit_which_is_shown(make_run: MakeRun) -> None:
    run = read_run(make_run(labels=("ar",), categories=("qa",), questions=2))
    run.rows[0].text, run.rows[1].text = "x" * 50_000, "y" * (MOST + 5)
    texts = page_of(analyse(run))["samples"]["texts"]
    assert "x" * 50_000 in texts
    assert "y" * MOST + "\n⟨5 more characters are in the run directory⟩" in texts


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("tab\tand\nline", "tab\tand\nline"),
        ("a\r\nb\rc", "a\nb⟨CR⟩c"),
        ("\x00\x07\x7f\x85", "⟨NUL⟩⟨BEL⟩⟨DEL⟩⟨U+0085⟩"),
        ("\u2066\u202eabc\u2069", "⟨LEFT-TO-RIGHT ISOLATE⟩⟨RIGHT-TO-LEFT OVERRIDE⟩abc⟨POP DIRECTIONAL ISOLATE⟩"),
        ("שלום 👩\u200d👧 ب\u200cت", "שלום 👩\u200d👧 ب\u200cت"),
    ],
)
def test_hidden_characters_stand_by_their_names(text: str, shown: str) -> None:
    assert visible(text) == shown
