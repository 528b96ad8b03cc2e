"""What a step of training costs: metered steps are those of the common loop, and peaks are what tensors hold."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from specbench_ss.engine.target import Target
from specbench_ss.reports.paper.training import (
    BASE,
    MeteredTrainer,
    measure,
    new_trainees,
    peak_bytes,
    share,
    timed_steps,
)
from specbench_ss.results.report import Bench, Request
from specbench_ss.training.distributed import Machine
from specbench_ss.training.loop import Budget, DrafterLoop, DrafterText
from tests.tiny import tiny_model

BUDGET = Budget(steps=7, rows_per_step=2, anchors_per_row=4, warmup=1)
LABELS = ["medusa", "ss[mode=shared]"]


def text() -> DrafterText:
    ids = np.random.default_rng(0).integers(3, 61, (6, 24)).astype(np.int32)
    return DrafterText(ids, lambda row: np.arange(len(row)) >= 5, 2)


def bench(folder: Path, request: Request | None = None) -> Bench:
    never: Any = None
    return Bench(request or Request(), folder, never, never)


def trainer(kind: type[DrafterLoop], folder: Path) -> Any:
    target = Target(tiny_model("llama"))
    made = new_trainees(dict(zip(LABELS, LABELS, strict=True)), target, bench(folder))
    return kind(target, made, text(), BUDGET, folder, Machine(target.device, exact=True))


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


def test_every_trainer_takes_each_step_in_its_turn(tmp_path: Path) -> None:
    order: list[str] = []

    class Told(MeteredTrainer):
        def take(self, meter: Any = None) -> dict[str, float]:
            order.append(self.folder.name)
            return super().take(meter)

    measure([trainer(Told, tmp_path / name) for name in "ab"], 4, bench(tmp_path))
    assert order == ["a", "b"] * 7


def test_a_peak_is_what_tensors_hold_at_once() -> None:
    def one_after_the_other() -> None:
        for _ in range(3):
            torch.ones(1000, 250)

    def at_once() -> list[torch.Tensor]:
        return [torch.ones(1000, 250) for _ in range(3)]

    cpu, size = torch.device("cpu"), 1_000_000
    works: list[tuple[Callable[[], object], int]] = [(one_after_the_other, size), (at_once, 3 * size)]
    for work, held in works:
        assert held <= peak_bytes(work, cpu)[1] < held + size / 10
    assert peak_bytes(lambda: 5, cpu) == (5, 0)


def test_times_are_compared_by_sums_over_the_same_steps() -> None:
    own, other = np.array([1.0, 2.0, 3.0, 4.0]), np.array([2.0, 4.0, 6.0, 8.0])
    over, around = share(own, other)
    assert over == 0.5 and around is not None and 0.48 < around[0] < 0.5 < around[1] < 0.52


def test_there_are_enough_steps_for_an_interval() -> None:
    assert [timed_steps(Request(limit=limit), 8) for limit in (None, 0, 1, 9)] == [8, 8, 4, 9]
