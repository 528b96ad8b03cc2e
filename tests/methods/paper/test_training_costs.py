"""Figure 16 and appendix J: metered steps are those of the common loop, and what is counted is what is computed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from specbench_ss.engine.target import Target
from specbench_ss.reports.paper import training_cost_figures as costs
from specbench_ss.reports.paper.experiment import share, table
from specbench_ss.reports.paper.training import BASE, MeteredTrainer, measure, new_trainees, peak_bytes, timed_steps
from specbench_ss.reports.paper.training_cost_figures import (
    COMPLETION,
    FORMS,
    LOSSLESS,
    LOSSLESS_NAIVE,
    MEDUSA,
    NAIVE,
    PROMPT,
    STREAMS,
    WHOLE,
    AppendixJ,
    EveryAnswer,
    Figure16,
    Kind,
    counted_step,
    pattern,
    pattern_plot,
)
from specbench_ss.results.report import Request, Result
from specbench_ss.results.text import interval_of
from specbench_ss.training.data import TrainingRows
from specbench_ss.training.distributed import DistributedContext
from specbench_ss.training.loop import Budget, DrafterLoop, PackedText
from tests.methods.paper.shared import bench, text
from tests.tiny import thorough, tiny_model

FEW = {MEDUSA: "medusa", LOSSLESS: "ss[segment=8]", LOSSLESS_NAIVE: "ss", "SS-Shared": "ss[mode=shared,segment=8]"}
BUDGET = Budget(steps=7, rows_per_step=2, anchors_per_row=4, warmup=1)
LABELS = ["medusa", "ss[mode=shared]"]

# -- metered steps ----------------------------------------------------------------------------------------------------


def trainer(kind: type[DrafterLoop], folder: Path) -> Any:
    target = Target(tiny_model("llama"))
    made = new_trainees(dict(zip(LABELS, LABELS, strict=True)), target, bench(folder))
    return kind(target, made, text(), BUDGET, folder, DistributedContext(target.device, exact=True))


@thorough
def test_metered_steps_are_those_of_the_common_loop(tmp_path: Path) -> None:
    plain, metered = trainer(DrafterLoop, tmp_path / "a"), trainer(MeteredTrainer, tmp_path / "b")
    (found,) = measure([metered], 4, bench(tmp_path))
    plain.train(lambda line: None)
    assert list(found) == [BASE, *LABELS] and metered.step == 7, "two to warm up, four timed, one for memory"
    assert all(len(cost.seconds) == 4 and cost.peak > 0 for cost in found.values())
    assert [len(found[name].loss) for name in found] == [0, 4, 4]
    for one, other in zip(plain.modules, metered.modules, strict=True):
        for a, b in zip(one.parameters(), other.parameters(), strict=True):
            assert torch.equal(a, b)


def test_a_peak_is_what_tensors_hold_at_once() -> None:
    def one_after_the_other() -> None:
        for _ in range(3):
            torch.ones(1000, 250)

    def at_once() -> list[torch.Tensor]:
        return [torch.ones(1000, 250) for _ in range(3)]

    cpu, size = torch.device("cpu"), 1_000_000
    works: list[tuple[Callable[[], object], int]] = [(one_after_the_other, size), (at_once, 3 * size)]
    for work, kept in works:
        assert kept <= peak_bytes(work, cpu)[1] < kept + size / 10
    assert peak_bytes(lambda: 5, cpu) == (5, 0)


def test_times_are_compared_by_sums_over_the_same_steps_which_are_enough_for_an_interval() -> None:
    over, around = share([1.0, 2.0, 3.0, 4.0], [2.0, 4.0, 6.0, 8.0])
    bounds = interval_of(around)
    assert over == 0.5 and bounds is not None and 0.48 < bounds[0] <= 0.5 <= bounds[1] < 0.52
    assert [timed_steps(Request(limit=limit), 8) for limit in (None, 0, 1, 9)] == [8, 8, 4, 9]


# -- figure 16: the pattern is that of training, and segments change memory, not what is learnt ------------------------


def pairs() -> dict[tuple[str, str], Kind]:
    places, kinds = pattern()
    return {
        (row.name, key.name): kind
        for row, own in zip(places, kinds, strict=True)
        for key, kind in zip(places, own, strict=True)
    }


def test_segments_keep_less_and_hide_nothing_that_was_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    cut = pairs()
    monkeypatch.setattr(costs, "SEGMENT", PROMPT + COMPLETION)
    whole = pairs()
    assert cut.keys() == whole.keys() and "absent" not in whole.values()
    absent = {pair for pair, kind in cut.items() if kind == "absent"}
    assert len(absent) > len(cut) / 4
    assert {whole[pair] for pair in absent} == {"masked"}
    assert all(cut[pair] == kind for pair, kind in whole.items() if pair not in absent)


def test_a_stream_sees_the_streams_of_its_position_and_main_rows_before() -> None:
    places, kinds = pattern()
    streams = [place for place in places if place.stream]
    assert {place.position for place in streams} == set(range(PROMPT - 1, PROMPT + COMPLETION - 1))
    assert len(streams) == STREAMS * COMPLETION, "the prompt has streams at its last position alone"
    for row, own in zip(places, kinds, strict=True):
        for key, kind in zip(places, own, strict=True):
            if row.stream and key.stream:
                assert (kind == "stream") == (row.position == key.position and key.stream <= row.stream)
            elif not key.stream:
                assert (kind == "main") == (key.position <= row.position)
            else:
                assert (kind == "stream") == (key.position == row.position), "eq. 3: a main row sees its streams"


def test_what_is_drawn_is_what_is_listed() -> None:
    places, kinds = pattern(attends=False)
    plot = pattern_plot(places, kinds)
    assert len(plot.data[0]["z"]) == len(places) == len(plot.grid.rows)
    signs = "".join(str(cell) for cell in plot.grid.rows[0][1:])
    assert len(signs) == len(places) and signs.startswith("■·") and "●" not in signs


def rows_of(*given: Any) -> PackedText:
    ids = np.random.default_rng(0).integers(3, 61, (6, given[4])).astype(np.int32)
    ids[:, -4:] = 0
    rows = TrainingRows(ids, (np.arange(given[4]) >= 40) & (ids != 0), np.where(ids == 0, -1, 0))
    return PackedText(rows, plain=True)


@thorough
def test_segments_lower_the_peak_and_keep_the_loss(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"LENGTHS": (96, 10**6), "PIECES": (6, 2), "lab_text": rows_of}.items():
        monkeypatch.setattr(costs, name, value)
    here = bench(tmp_path, Request(limit=1), Target(tiny_model("llama")))
    result = Figure16().run(here)
    rows = {row[1]: row for row in result.grids[0].rows}
    assert list(rows) == [NAIVE, WHOLE, "segments of 16", "segments of 48"], "one length: the other is too long"
    peaks: dict[Any, Any] = {name: row[2] for name, row in rows.items()}
    assert peaks["segments of 16"] < peaks["segments of 48"] < peaks[WHOLE] < peaks[NAIVE]
    claims = Figure16().claims(result)
    assert [claims[i].holds for i in (0, 1, 4)] == [True, True, True]
    assert all(row[6] and row[8] for name, row in rows.items() if "segments" in str(name)), "four steps: intervals"
    assert len(result.plots) == 3
    monkeypatch.setattr(costs, "measure", None)  # what an earlier session measured is not measured again
    assert Figure16().run(here).grids == result.grids


def row(form: str, peak: float, time: str, alone: str, differs: float | None) -> tuple[Any, ...]:
    return (512, form, 100.0, peak, 1.0, 1.0, time, 1.0, alone, differs)


def test_claims_hold_by_intervals_and_by_counts() -> None:
    def kept(*cut: tuple[Any, ...], whole: float = 0.6) -> list[bool | None]:
        grid = table("segments", FORMS, [row(NAIVE, 1, "", "", None), row(WHOLE, whole, "", "", None), *cut], "")
        return [claim.holds for claim in Figure16().claims(Result((grid,)))]

    good = row("segments of 64", 0.4, "0.5–0.6", "0.75–0.85", 1e-6)
    assert kept(good) == [True, True, True, True, True]
    assert kept(good, row("segments of 256", 0.7, "0.95–1.03", "1.1–1.3", 1e-3)) == [True, False, None, False, False]
    assert kept(row("segments of 256", 0.5, "1.1–1.3", "1.1–1.3", 0.0), whole=1.1) == [False, True, False, False, True]
    assert kept() == [True, None, None, None, None]


# -- appendix J: all drafters learn at the same positions --------------------------------------------------------------


def test_every_answer_position_is_learnt_once() -> None:
    plain = text()
    every = EveryAnswer(plain.packed, plain=True)
    batch = every.batch(1, Budget(steps=3, rows_per_step=3, anchors_per_row=2), torch.device("cpu"))
    known = batch.labels[..., 1] != -100
    assert known.sum(1).unique().numel() > 1, "rows differ in length, so some anchors are padding"
    assert batch.anchors.at.shape[1] == known.sum(1).max()
    for at, labels, answer in zip(batch.anchors.at, batch.anchors.labels, known, strict=True):
        learnt = at[labels[:, 1] != -100]
        assert sorted(learnt.tolist()) == answer.nonzero().flatten().tolist()


@thorough
def test_the_base_is_counted_for_those_who_need_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    tiny = Target(tiny_model("llama"))
    for name, value in {"LENGTH": 24, "lab_text": text, "DRAFTERS": FEW, "COUNTED": (MEDUSA, LOSSLESS)}.items():
        monkeypatch.setattr(costs, name, value)
    monkeypatch.setattr(costs, "meta_target", lambda name: Target(tiny_model("llama").to("meta")))
    result = AppendixJ().run(bench(tmp_path, Request(limit=1), tiny))
    rows: dict[Any, Any] = {row[0]: row for row in result.grids[0].rows}
    assert list(rows) == [BASE, *FEW] and rows[MEDUSA][4] == 1 and rows[MEDUSA][5] is None
    for name in (MEDUSA, LOSSLESS):
        assert rows[name][3] == pytest.approx(rows[name][2] + rows[BASE][2])
    assert rows["SS-Shared"][3] == rows["SS-Shared"][2], "it runs a base of its own"
    naive, cut = rows[LOSSLESS_NAIVE], rows[LOSSLESS]
    assert cut[1] == naive[1] < rows[MEDUSA][1] and cut[6] < naive[6]
    assert [claim.found != "" for claim in AppendixJ().claims(result)] == [True, True]


@thorough
def test_flops_of_heads_are_their_products_forwards_and_backwards(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(costs, "LENGTH", 24)
    target = Target(tiny_model("llama").to("meta"))
    with costs.META:
        medusa, naive = new_trainees({MEDUSA: "medusa", LOSSLESS_NAIVE: "ss"}, target, bench(tmp_path))
    h, v = target.hidden_size, target.vocab_size
    bases = set()
    for learnt in (0.5, 1.0):
        anchors = int(learnt * 24)
        block, head = 2 * anchors * h * h, 2 * anchors * h * v
        own, base = counted_step(medusa, learnt, target)
        assert own == 4 * (2 * block + 3 * head)  # the block's input needs no gradient
        bases |= {base, counted_step(naive, learnt, target)[1]}
    assert len(bases) == 1 and bases.pop() > 0
    assert counted_step(naive, 0.5, target)[0] < counted_step(naive, 1.0, target)[0]


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
    forms = dict.fromkeys(("drafter", "parameters", "own", "whole", "over Medusa's", "95 % interval"), "text")
    steps = table("steps", forms, [(LOSSLESS, 1, 1.0, 1.0, 1.3, around)], "")
    rows = [(LOSSLESS, share, 1.0, 1.0, over) for share, over in zip((0.5, 1.0), counted, strict=True)]
    forms = dict.fromkeys(("drafter", "share", "own", "whole", "over Medusa's"), "text")
    flops = table("flops", forms, [*rows, (MEDUSA, 1.0, 1.0, 1.0, 9.0)], "")
    assert [claim.holds for claim in AppendixJ().claims(Result((steps, flops)))] == holds
