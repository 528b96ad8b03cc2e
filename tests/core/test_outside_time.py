"""Work outside the clock: what passes during answers and is not measured voids a method, and nothing else does."""

from __future__ import annotations

import pytest

from specbench_ss.conformance import tiny_target
from specbench_ss.engine.decoder import Decoder, DecodeState
from specbench_ss.engine.generate import StopParams, generate
from specbench_ss.engine.sampling import SamplingParams
from specbench_ss.engine.tree import DraftTree
from specbench_ss.results.summary import OVERALL, summarise
from specbench_ss.runs.records import Run
from specbench_ss.runs.run_dir import read_run
from tests.conftest import MakeRun


@pytest.fixture
def timed(make_run: MakeRun) -> Run:
    return read_run(make_run(labels=("ar", "ss"), categories=("qa",), questions=6))


def passing(run: Run, label: str, share: float, more: float = 0.0) -> None:
    """Let so many times the measured time pass during each answer, and so many seconds more."""
    for row in run.rows:
        if row.method == label:
            row.started, row.ended = 100.0, 100.0 + share * (row.wall_s or 0.0) + more


def invalid(run: Run) -> bool:
    row = next(row for row in summarise(run) if (row.task, row.method) == (OVERALL, "ss"))
    assert (row.comparison == "invalid") == (row.speedup is None)
    return any("outside the clock" in finding.text for finding in row.health)


@pytest.mark.parametrize(
    ("ar", "ss", "found"),
    [
        ((1.1, 0.0), (1.1, 0.0), False),
        ((1.0, 0.0), (3.7, 0.0), True),
        ((1.0, 0.0), (1.4, 0.0), True),
        ((1.0, 5.0), (1.0, 5.0), False),  # the harness itself is slow
        ((1.0, 5.0), (3.0, 5.0), True),
        ((3.0, 0.0), (1.0, 0.0), False),
    ],
)
def test_more_time_than_was_measured_voids_a_method(
    timed: Run, ar: tuple[float, float], ss: tuple[float, float], found: bool
) -> None:
    passing(timed, "ar", *ar)
    passing(timed, "ss", *ss)
    assert invalid(timed) is found


def test_one_long_answer_voids_nothing(timed: Run) -> None:
    """As where the machine slept: the clock stands then."""
    passing(timed, "ss", 1.0)
    next(row for row in timed.rows if row.method == "ss").ended = 4000.0
    assert not invalid(timed)


@pytest.mark.parametrize("name", ["started", "counted"])
def test_what_is_not_known_is_not_found(timed: Run, name: str) -> None:
    passing(timed, "ss", 3.0)
    setattr(timed.rows[0], name, None if name == "started" else "usage")
    assert not any("outside the clock" in one.text for row in summarise(timed) for one in row.health)


def test_too_few_questions_are_not_judged(make_run: MakeRun) -> None:
    run = read_run(make_run(labels=("ar", "ss"), categories=("qa",), questions=3))
    passing(run, "ss", 3.0)
    assert not invalid(run)


class Asks(Decoder):
    """Works where its rows are asked for."""

    name, summary = "asks", "works in max_rows"
    seconds = 0.0

    def max_tokens_per_step(self) -> int:
        type(self).seconds += 1.0
        return 1

    def propose(self, state: DecodeState) -> DraftTree:
        return DraftTree.root_only(state.root)


def test_what_a_method_does_before_its_first_token_is_in_its_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a clock that this work alone moves on."""
    for module in ("timing", "generate"):
        monkeypatch.setattr(f"specbench_ss.engine.{module}.now", lambda: Asks.seconds)
    made = generate(Asks(tiny_target("llama")), [3, 4], StopParams(4), SamplingParams())
    assert made.prefill_s == Asks.seconds > 0
