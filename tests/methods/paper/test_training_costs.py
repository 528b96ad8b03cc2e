"""Appendix J: all drafters learn at the same positions, and what is counted is what is computed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from specbench_ss.engine.target import Target
from specbench_ss.errors import UserError
from specbench_ss.reports.paper import training_cost_figures as costs
from specbench_ss.reports.paper.training import BASE
from specbench_ss.reports.paper.training_cost_figures import (
    LOSSLESS,
    LOSSLESS_NAIVE,
    MEDUSA,
    AppendixJ,
    EveryAnswer,
    counted_steps,
)
from specbench_ss.results.report import Bench, Column, Grid, Request, Result
from specbench_ss.training.loop import Budget, DrafterText
from tests.tiny import tiny_model

NEVER: Any = None
FEW = {MEDUSA: "medusa", LOSSLESS: "ss[segment=8]", LOSSLESS_NAIVE: "ss", "SS-Shared": "ss[mode=shared,segment=8]"}


def text(*_: Any) -> DrafterText:
    ids = np.random.default_rng(0).integers(3, 61, (6, 24)).astype(np.int32)
    return DrafterText(ids, lambda row: np.arange(len(row)) >= row[0] % 7 + 3, 2)


def test_every_answer_position_is_learnt_once() -> None:
    plain = text()
    every = EveryAnswer(plain.rows, plain.answer_mask, plain.end)
    batch = every.batch(1, Budget(steps=3, rows_per_step=3, anchors_per_row=2), torch.device("cpu"))
    known = batch.labels[..., 1] != -100
    assert known.sum(1).unique().numel() > 1, "rows differ in length, so some anchors are padding"
    assert batch.anchors.at.shape[1] == known.sum(1).max()
    for at, labels, answer in zip(batch.anchors.at, batch.anchors.labels, known, strict=True):
        learnt = at[labels[:, 1] != -100]
        assert sorted(learnt.tolist()) == answer.nonzero().flatten().tolist()


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch) -> Target:
    monkeypatch.setattr(costs, "LENGTH", 24)
    monkeypatch.setattr(costs, "meta_target", lambda name: Target(tiny_model("llama").to("meta")))
    monkeypatch.setattr(costs, "lab_text", text)
    monkeypatch.setattr(costs, "DRAFTERS", FEW)
    monkeypatch.setattr(costs, "COUNTED", (MEDUSA, LOSSLESS))
    monkeypatch.setattr(costs, "LEARNT", (0.5, 1.0))
    return Target(tiny_model("llama"))


def test_the_base_is_counted_for_those_who_need_it(tiny: Target, tmp_path: Path) -> None:
    result = AppendixJ().run(Bench(Request(limit=1), tmp_path, NEVER, lambda: tiny))
    rows: dict[Any, Any] = {row[0]: row for row in result.grids[0].rows}
    assert list(rows) == [BASE, *FEW] and rows[MEDUSA][4] == 1 and rows[MEDUSA][5] is None
    for name in (MEDUSA, LOSSLESS):
        assert rows[name][3] == pytest.approx(rows[name][2] + rows[BASE][2])
    assert rows["SS-Shared"][3] == rows["SS-Shared"][2], "it runs a base of its own"
    assert (
        rows[LOSSLESS][1] == rows[LOSSLESS_NAIVE][1] < rows[MEDUSA][1] and rows[LOSSLESS][6] < rows[LOSSLESS_NAIVE][6]
    )
    assert [claim.found != "" for claim in AppendixJ().claims(result)] == [True, True]


def test_flops_of_heads_are_their_products_forwards_and_backwards(tiny: Target, tmp_path: Path) -> None:
    bench = Bench(Request(), tmp_path, NEVER, NEVER)
    found = list(counted_steps("", {name: FEW[name] for name in (MEDUSA, LOSSLESS_NAIVE)}, bench))
    h, v = tiny.hidden_size, tiny.vocab_size
    of = {(step.drafter, step.share): step for step in found}
    for share in costs.LEARNT:
        anchors = int(share * 24)
        block, head = 2 * anchors * h * h, 2 * anchors * h * v
        assert of[MEDUSA, share].own == 4 * (2 * block + 3 * head)  # the block's input needs no gradient
        assert of[MEDUSA, share].base == of[MEDUSA, 1.0].base == of[LOSSLESS_NAIVE, share].base > 0
    assert of[LOSSLESS_NAIVE, 0.5].own < of[LOSSLESS_NAIVE, 1.0].own


@pytest.mark.parametrize(
    "around,counted,holds",
    [
        ("0.9–1.1", (1.1, 1.3), [True, True]),
        ("1.4–1.6", (1.4, 1.5), [False, False]),
        ("1.2–1.5", (1.2, 1.5), [None, None]),
    ],
)
def test_about_as_long_is_a_third_more_at_most(
    around: str, counted: tuple[float, float], holds: list[bool | None]
) -> None:
    titles = ("drafter", "parameters", "own", "whole", "over Medusa's", "95 % interval")
    steps = Grid("steps", tuple(Column(t) for t in titles), ((LOSSLESS, 1, 1.0, 1.0, 1.3, around),))
    titles = ("drafter", "share", "own", "whole", "over Medusa's")
    rows = tuple((LOSSLESS, share, 1.0, 1.0, over) for share, over in zip((0.5, 1.0), counted, strict=True))
    flops = Grid("flops", tuple(Column(t) for t in titles), (*rows, (MEDUSA, 1.0, 1.0, 1.0, 9.0)))
    assert [claim.holds for claim in AppendixJ().claims(Result((steps, flops)))] == holds


def test_it_needs_training_text(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="appendix-j: no row can run: Medusa needs training text for org/model"):
        AppendixJ().run(Bench(Request("org/model"), tmp_path, NEVER, NEVER))
