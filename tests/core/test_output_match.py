"""Verdicts on differing answers: whole sequences are compared, and only a numerical tie of the target is excused."""

from __future__ import annotations

from typing import Any, cast

import pytest
import torch

from specbench_ss.engine.numerics import near_tie_drop
from specbench_ss.methods.ar import Autoregressive
from specbench_ss.runs.output_match import first_difference, judge
from specbench_ss.runs.records import SampleRecord
from specbench_ss.user_files import encoded


class LogitTarget:
    """Logits fixed in advance; remembers for which ids it was asked."""

    processors = None

    def __init__(self, logits: list[float], dtype: torch.dtype = torch.float32) -> None:
        self.logits, self.dtype = torch.tensor(logits), dtype
        self.asked: list[list[int]] = []

    def next_logits(self, ids: list[int], cache: Any = None) -> torch.Tensor:
        self.asked.append(list(ids))
        return self.logits


def answer(method: str, ids: list[int], finish: str = "length") -> SampleRecord:
    return SampleRecord("q", 0, method, 0, "c", 0, 0, 0, "e", "s", "ok", token_ids=ids, finish=finish)


def verdict(target: Any, reference: list[int], got: list[int]) -> Any:
    return judge(Autoregressive(cast(Any, target)), [9, 8], answer("ar", reference), answer("m", got))


@pytest.mark.parametrize(
    ("a", "b", "at"),
    [([], [], None), ([1], [1], None), ([1, 2], [1, 3], 1), ([1, 2], [1], 1), ([], [4], 0), ([5, 1, 1], [4, 1, 1], 0)],
)
def test_first_difference(a: list[int], b: list[int], at: int | None) -> None:
    assert first_difference(a, b) == at
    assert first_difference(b, a) == at


def test_equal_answers_are_identical_without_asking_the_target() -> None:
    target = LogitTarget([0.0])
    assert verdict(target, [1, 2], [1, 2]).verdict == "identical"
    assert target.asked == []


@pytest.mark.parametrize(("reference", "got"), [([1, 2, 3], [1, 2]), ([1, 2], [1, 2, 3]), ([1], [])])
def test_a_prefix_is_a_length_difference_never_identical(reference: list[int], got: list[int]) -> None:
    found = verdict(LogitTarget([0.0]), reference, got)
    assert found.verdict == "length differs"
    assert found.first_difference == min(len(reference), len(got))
    assert "tokens" in found.reason


def test_the_target_is_asked_after_the_common_part() -> None:
    target = LogitTarget([0.0, 1.0, 1.0 + 5e-5])
    found = verdict(target, [7, 1, 4], [7, 2, 4])
    assert target.asked == [[9, 8, 7]]
    assert found.verdict == "numerical tie"
    assert found.first_difference == 1
    assert found.gap == pytest.approx(5e-5, rel=0.01)


def test_a_clear_choice_of_the_target_makes_it_a_mismatch() -> None:
    found = verdict(LogitTarget([0.0, 1.0, 1.01]), [1], [2])
    assert (found.verdict, found.first_difference) == ("mismatch", 0)
    assert found.gap == pytest.approx(0.01, rel=1e-3)


def test_a_tie_between_others_excuses_no_third_token() -> None:
    found = verdict(LogitTarget([5.0, 5.0, -3.0]), [0], [2])
    assert found.verdict == "mismatch"
    assert (found.gap, found.drop) == (0.0, 8.0)


def test_half_precision_has_wider_bounds() -> None:
    logits, (a, b) = [0.0, 20.0, 20.25], ([1], [2])
    assert verdict(LogitTarget(logits, torch.float32), a, b).verdict == "mismatch"
    assert verdict(LogitTarget(logits, torch.float16), a, b).verdict == "mismatch"
    assert verdict(LogitTarget(logits, torch.bfloat16), a, b).verdict == "numerical tie"
    bounds = [near_tie_drop(name, 0.0) for name in ("float64", "float32", "float16", "bfloat16")]
    assert bounds == sorted(bounds)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("best", [0.01, 15.9, 16.0, 31.9, 32.0, 40.0, 63.0, 100.0, -20.0, -100.0])
def test_bounds_of_half_precision_are_four_steps_at_the_best_logit(dtype: torch.dtype, best: float) -> None:
    """Of small logits as at 16: their sums went through larger numbers."""
    at = torch.tensor(max(abs(best), 16.0)).to(dtype)
    step = float(torch.nextafter(at, torch.tensor(torch.inf, dtype=dtype))) - float(at)
    assert near_tie_drop(str(dtype), best) == 4 * step
    within, beyond = ([best - share * 4 * step, best - 1e3] for share in (0.999, 1.01))
    assert verdict(LogitTarget([best, *within], dtype), [0], [1]).verdict == "numerical tie"
    assert verdict(LogitTarget([best, *beyond], dtype), [0], [1]).verdict == "mismatch"


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("place", range(3))
def test_logits_that_are_not_finite_are_a_mismatch_that_can_be_written(value: float, place: int) -> None:
    logits = [5.0, 5.0, 5.0]
    logits[place] = value
    found = verdict(LogitTarget(logits), [0], [1])
    encoded(found)
    if place == 2 and value < 0:  # no part of the question
        assert found.verdict == "numerical tie"
    else:
        assert (found.verdict, found.gap, found.drop) == ("mismatch", None, None)
        assert found.reason == "logits are not finite"
