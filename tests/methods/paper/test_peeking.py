"""Figure 4: what a prediction sees of the future, and what it must not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from specbench_ss.engine.target import Target
from specbench_ss.errors import UserError
from specbench_ss.reports.paper import training_figures as peeking
from specbench_ss.reports.paper.training_figures import Figure4, PeekingTrainee, held_out, least_sure
from specbench_ss.results.report import Bench, Request
from specbench_ss.training.batch import base_states
from specbench_ss.training.loop import Budget, DrafterText
from tests.methods.decoders import randomise
from tests.tiny import WITHOUT_WINDOW, tiny_model

END = 2
IDS = torch.tensor([[5, 6, 7, 8, 9, 10, 11, 12, 13, 14]])
AT = torch.tensor([[3, 5]])


def trainee(gamma: int) -> tuple[PeekingTrainee, Target]:
    target = Target(tiny_model("llama"))
    made = PeekingTrainee(target, gamma, lora_rank=4)
    randomise(made.module, 1, std=0.2)
    return made, target


def future(ids: torch.Tensor, gamma: int) -> torch.Tensor:
    """x_{i+2}.. of the positions AT."""
    return torch.stack([ids[:, i + 2 : i + 2 + gamma] for i in AT[0].tolist()], 1)


def read(made: PeekingTrainee, target: Target, ids: torch.Tensor, ahead: torch.Tensor | None = None) -> torch.Tensor:
    """Logits at AT."""
    with torch.no_grad():
        ahead = future(ids, made.gamma) if ahead is None else ahead
        return made.logits(base_states(target, ids, (), 0), ids, AT, ahead)


def text(rows: int = 6) -> DrafterText:
    ids = np.random.default_rng(0).integers(3, 61, (rows, 24)).astype(np.int32)
    ids[:, 11] = END
    return DrafterText(ids, lambda row: np.arange(len(row)) >= 5, END)


@pytest.mark.parametrize("kind", WITHOUT_WINDOW)
def test_untrained_and_without_peeks_it_is_the_base(kind: str) -> None:
    target = Target(tiny_model(kind))
    with torch.no_grad():
        plain = target.model(IDS).logits[:, AT[0]]
    torch.testing.assert_close(read(PeekingTrainee(target, 0), target, IDS), plain, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("gamma", [1, 3])
def test_a_prediction_depends_on_its_peeks_but_not_on_its_own_token(gamma: int) -> None:
    made, target = trainee(gamma)
    before = read(made, target, IDS)
    for place in range(IDS.shape[1]):
        changed = IDS.clone()
        changed[0, place] = 40
        after = read(made, target, changed)
        for column, at in enumerate(AT[0].tolist()):
            seen = place <= at or at + 2 <= place < at + 2 + gamma
            assert torch.equal(before[:, column], after[:, column]) is not seen, (at, place)


def test_peeks_beyond_the_answer_are_not_seen() -> None:
    unseen = read(*trainee(2), IDS, future(IDS, 2).index_fill(2, torch.tensor([1]), -100))
    one = read(*trainee(1), IDS)
    torch.testing.assert_close(unseen, one, atol=1e-5, rtol=1e-5)


def test_it_learns_where_the_base_is_least_sure() -> None:
    logits = torch.zeros(1, 6, 4)
    logits[0, :, 0] = torch.tensor([0.0, 1.0, 9.0, 3.0, 2.0, 5.0])  # the larger, the surer
    labels = torch.arange(12).view(1, 6, 2)
    labels[0, 0] = -100  # no answer's
    assert least_sure(logits, labels, 3).at.tolist() == [[1, 4, 3]]
    assert least_sure(logits, labels, 3).labels.tolist() == [[[2, 3], [8, 9], [6, 7]]]
    assert least_sure(logits, labels, 6).labels[0, -1].tolist() == [-100, -100]


def test_an_answer_is_right_only_as_a_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two answers a row, one ending at token 11; all tokens are guessed but one of the second answer."""
    (made, target), data = trainee(1), text()

    def guess(states: Any, ids: torch.Tensor, at: torch.Tensor, ahead: torch.Tensor) -> torch.Tensor:
        logits = torch.nn.functional.one_hot(ids[:, at[0] + 1], 61).float()
        logits[:, at[0] == 20] = 0.0
        return logits

    monkeypatch.setattr(made, "logits", guess)
    (found,) = held_out(target, [made], data)
    assert found.tokens == 6 * 19 and found.answers == 0.5
    assert found.right == pytest.approx(18 / 19)


def test_the_figure_trains_every_gamma_and_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = Target(tiny_model("llama"))
    monkeypatch.setattr(peeking, "PEEKING_BUDGET", Budget(steps=2, rows_per_step=2, anchors_per_row=4, warmup=1))
    monkeypatch.setattr(peeking, "lab_text", lambda *_: text())
    said: list[str] = []
    bench = Bench(Request(), tmp_path, unused, lambda: target, said.append)
    first, again = Figure4().run(bench), Figure4().run(bench)
    assert len(said) == 1 and all(f"gamma-{g} loss" in said[0] for g in peeking.GAMMAS)
    assert [row[:2] for row in first.grids[0].rows] == [("base", 0), *(("2 steps", g) for g in peeking.GAMMAS)]
    assert first.grids == again.grids
    assert len({row[4] for row in first.grids[0].rows}) == len(first.grids[0].rows)


def test_it_needs_training_text(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="training text for org/model"):
        Figure4().run(Bench(Request("org/model"), tmp_path, unused, unused))


def unused(*_: Any) -> Any:
    raise AssertionError("not to be called")
