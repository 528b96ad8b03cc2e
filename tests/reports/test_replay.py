"""The replay holds what was recorded, at the times that were measured."""

from __future__ import annotations

import json
import re

import pytest

from specbench_ss.reports.html import samples as replay
from specbench_ss.reports.html.report import page, view_of
from specbench_ss.results.analysis import analyse
from specbench_ss.runs.records import Run
from specbench_ss.runs.run_dir import read_run
from tests.conftest import MakeRun
from tests.reports.drafts_made import record

LABELS = ("ar", "ss", "medusa")
EVIL = "</script><b>\u202e\x07"


@pytest.fixture
def run(make_run: MakeRun) -> Run:
    path = make_run(labels=LABELS)
    record(path, "qa-1")
    record(path, "qa-2", EVIL)
    return read_run(path)


def test_steps_tokens_and_times_are_those_of_the_timed_answer(run: Run) -> None:
    made = page(analyse(run))["replay"]
    assert made is not None and len(made["answers"]) == 2 * len(LABELS)
    for one in made["answers"]:
        id, turn = made["prompts"][one["prompt"]][0].rsplit(".", 1)
        (row,) = [
            r
            for r in run.rows
            if (r.question_id, str(r.turn), r.method) == (id, turn, made["methods"][one["method"]]["label"])
        ]
        assert 1 + sum(len(path) for _, _, path, *_ in one["steps"]) == 1 + sum(run.steps.of(row.key).tokens)
        assert one["ends"] == sorted(one["ends"]) and len(one["ends"]) == row.steps
        assert one["ends"][-1] == pytest.approx(1000 * (row.prefill_s + row.decode_s), rel=0.02)


def test_an_answer_with_other_tokens_has_no_times(run: Run) -> None:
    drafts = replay.recorded(run)
    drafts[0].same_answer = False
    made = replay.replay(view_of(analyse(run)), drafts)
    assert made is not None
    assert [one["ends"] is None for one in made["answers"]].count(True) == 1


def test_texts_are_made_visible_and_kept_once(run: Run) -> None:
    made = page(analyse(run))["replay"]
    assert made is not None
    assert len(set(made["texts"])) == len(made["texts"]) == 3
    assert not re.search("[\u202e\x07]", json.dumps(made, ensure_ascii=False))


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        (" word", "start of a word"), ("Word", "start of a word"), ("ing", "inside a word"),
        (" 12", "digits"), (",", "punctuation"), (" +", "punctuation"), ("\n", "white space"), ("", "white space"),
        ("x1", "other"), (" שלום", "start of a word"),
    ],
)  # fmt: skip
def test_kinds_of_tokens(text: str, kind: str) -> None:
    assert replay.kind(text) == kind


def test_shares_of_kinds_count_every_token_once(run: Run) -> None:
    table = page(analyse(run))["kinds"]
    assert {row[0].text for row in table.rows} == {"ss", "medusa"}, "autoregressive decoding drafts nothing"
    for row in table.rows:
        shares = {column.title: cell for column, cell in zip(table.columns[1:], row[1:], strict=True)}
        accepted, _, of = shares["start of a word"].note.partition(" of ")
        assert accepted == of, "all of these were drafted, none is the model's own"
        assert shares["punctuation"].sort == 0
