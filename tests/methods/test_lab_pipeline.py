"""Stages of the lab's training, and what keeps one work folder from mixing two trainings."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lab import cards, pipeline
from lab.pipeline import train
from lab.training import LabTraining, train_tokenizer, training_rows
from specbench_ss.errors import UserError
from specbench_ss.training.loop import CHECKPOINT
from tests.tiny import thorough

Toy = list[str]
CUT = "cpu:9"  # where the second stage is cut off


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch) -> Toy:
    """Three stages that only write down what they found: begun or resumed."""
    found: Toy = []

    def stage(name: str) -> Callable[[LabTraining], None]:
        def run(lab: LabTraining) -> None:
            part = lab.folder(name) / CHECKPOINT
            found.append(f"{name} {'goes on' if part.exists() else 'begins'}")
            part.touch()
            if name == "two" and lab.device == CUT:
                raise KeyboardInterrupt

        return run

    monkeypatch.setattr(pipeline, "STAGES", {name: stage(name) for name in ("one", "two", "three")})
    monkeypatch.setattr(pipeline, "resolve_device", lambda device: device)
    return found


def test_what_is_done_is_skipped_and_what_is_named_is_run_again(ran: Toy, tmp_path: Path) -> None:
    train(tmp_path, log=lambda _: None)
    assert ran == ["one begins", "two begins", "three begins"]
    stated: list[str] = []
    train(tmp_path, log=stated.append)
    assert len(ran) == 3
    assert stated == ["one: done before", "two: done before", "three: done before"]
    stated.clear()
    train(tmp_path, stages=("two",), log=stated.append)
    assert ran[3:] == ["two begins"]  # from nothing, and neither the stage before nor the one after
    assert [line.split(";")[0] for line in stated] == ["two: done before, run again"]
    train(tmp_path, log=stated.append)
    assert len(ran) == 4


def test_a_stage_run_again_and_cut_off_goes_on(ran: Toy, tmp_path: Path) -> None:
    train(tmp_path, log=lambda _: None)
    with pytest.raises(KeyboardInterrupt, match="in stage two; to go on: the same command with --stages two$"):
        train(tmp_path, stages=("one", "two"), device=CUT, log=lambda _: None)
    train(tmp_path, stages=("two",), log=lambda _: None)
    assert ran[3:] == ["one begins", "two begins", "two goes on"]
    with pytest.raises(KeyboardInterrupt):
        train(tmp_path, stages=("two",), device=CUT, log=lambda _: None)
    train(tmp_path, log=lambda _: None)  # no stage named: what is not done
    assert ran[6:] == ["two begins", "two goes on"]


@pytest.mark.parametrize(("other", "stated"), [({"seed": 1}, "seed 0, not 1"), ({"size": "m"}, "size s, not m")])
def test_a_folder_is_for_one_training(other: dict[str, Any], stated: str, ran: Toy, tmp_path: Path) -> None:
    train(tmp_path, stages=("one",), log=lambda _: None)
    with pytest.raises(UserError, match=f"one was made with {stated}; use another --out"):
        train(tmp_path, log=lambda _: None, **other)
    assert ran == ["one begins"]


def training_with(tmp_path: Path, vocab: int, stated: list[str]) -> LabTraining:
    """A training whose tokenizer has this many entries."""
    lab = LabTraining(tmp_path, "s", "cpu", 0, 1.0, stated.append)
    train_tokenizer(["what is the sum of one and two and three"] * 9, vocab).save_pretrained(lab.folder("tokenizer"))
    return lab


def test_rows_are_made_once_for_a_tokenizer_and_a_budget(tmp_path: Path) -> None:
    stated: list[str] = []
    lab = training_with(tmp_path, 280, stated)
    first = np.array(training_rows(lab, 6_000, 2, 1))
    assert np.array_equal(training_rows(lab, 6_000, 2, 1), first)
    assert len(stated) == 1
    assert first.size >= 6_000 - 2 * 512 and not len(first) % 2
    other = np.array(training_rows(training_with(tmp_path, 262, stated), 6_000, 2, 1))
    assert len(stated) == 2
    assert first.max() >= 262 > other.max()


@thorough
def test_without_a_training_run_cards_measures_the_shipped_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stated: list[str] = []
    monkeypatch.setattr(cards, "SPECBENCH_CATEGORIES", ("qa",))
    monkeypatch.setattr(cards, "APP_CATEGORIES", ("sql",))
    train(tmp_path, stages=("cards",), budget_scale=0.001, log=stated.append)
    assert "the shipped weights are measured" in stated[0]
    card = (tmp_path / "shipped" / "ss" / "README.md").read_text()
    assert "--stages cards --out DIR" in card
    assert sorted(p.name for p in tmp_path.iterdir()) == ["shipped"]  # nothing that a later training would skip
    with pytest.raises(UserError, match="no weights of size m"):
        train(tmp_path, size="m", stages=("cards",))
    (tmp_path / "tokenizer").mkdir()
    with pytest.raises(UserError, match="run stage 'export' first"):
        train(tmp_path, stages=("cards",))
