"""`--target-ci`: repeats are added while they help, and a run states why no more were made; it stays resumable."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from scipy import stats

from specbench_ss.bench import run_loop
from specbench_ss.bench.build_config import stopping_rule_of
from specbench_ss.bench.runner import LocalSession
from specbench_ss.bench.schedule import method_order, plan
from specbench_ss.bench.stopping import why_stop
from specbench_ss.cli.main import main
from specbench_ss.errors import UserError
from specbench_ss.options import MethodSpec
from specbench_ss.results.sample_checks import unfinished
from specbench_ss.runs.config import RunConfig, StoppingRule
from specbench_ss.runs.records import SampleRecord
from specbench_ss.runs.run_dir import read_run
from specbench_ss.runs.run_options import RunOptions, read_share
from specbench_ss.stats import precision
from specbench_ss.stats.intervals import TIMING_FLOOR, Part
from specbench_ss.stats.pairs import Pairs
from specbench_ss.stats.precision import Width, advice, repeats_share, widest_ci
from tests.core.test_runner import ASKED, Bench

LABELS = ("ar", "m")


def measured(repeats: int, questions: float = 0.0, noise: float = 0.0, asked: int = 24) -> list[SampleRecord]:
    """Samples of a method that is twice as fast, with this spread of its speed over questions and over repeats."""
    rng, paces, rows = random.Random(1), random.Random(2), list[SampleRecord]()
    for question in range(asked):
        pace = 2 * (1 + questions * paces.gauss(0, 1))
        for repeat in range(repeats):
            for label, speed in (("ar", 1.0), ("m", pace)):
                row = SampleRecord(f"q{question}", 0, label, repeat, "qa", len(rows), 0, 0, "", "", "ok")
                row.tokens, row.wall_s = 100, (1 + noise * rng.gauss(0, 1)) / speed
                rows.append(row)
    return rows


def test_a_narrow_interval_ends_the_run_and_a_wide_one_does_not() -> None:
    rows = measured(2, noise=0.05)
    half = widest_ci(rows, LABELS, 2).half
    assert half is not None and 0.02 < half < 0.06
    assert "every interval is within" in why_stop(rows, LABELS, 2, StoppingRule(half + 0.001))
    assert why_stop(rows, LABELS, 2, StoppingRule(0.02)) == ""


def test_questions_that_differ_cannot_be_mended_by_repeats() -> None:
    stated = why_stop(measured(2, questions=0.2, noise=0.02), LABELS, 2, StoppingRule(0.02))
    assert "after 2 repeats: between-question variance dominates" in stated and "--limit" in stated
    assert why_stop(measured(1, questions=0.2), LABELS, 1, StoppingRule(0.02)) == ""  # one repeat does not show


def test_how_many_questions_would_do_is_stated_about_rightly() -> None:
    few = widest_ci(measured(2, questions=0.2, noise=0.02), LABELS, 2)
    needed = few.needed(0.04)
    assert f"about {needed} questions in place of 24" in why_stop(
        measured(2, questions=0.2, noise=0.02), LABELS, 2, StoppingRule(0.04)
    )
    assert needed is not None and needed > 48
    half = widest_ci(measured(2, questions=0.2, noise=0.02, asked=needed), LABELS, 2).half
    assert half is not None and 0.03 < half < 0.05


def in_blocks(rows: list[SampleRecord], effect: float) -> list[SampleRecord]:
    """Return samples of servers in four blocks, in turn slower and faster by a share `effect`."""
    for row in rows:
        row.block, row.counted = int(row.question_id[1:]) % 4, "usage"
        if row.method == "m" and row.wall_s:
            row.wall_s *= math.exp(effect * (-1) ** row.block)
    return rows


def test_blocks_that_differ_need_more_blocks_and_not_more_questions() -> None:
    """No number of questions reaches the target: this is stated, without a search that never ends."""
    rows = in_blocks(measured(2, questions=0.02, noise=0.02), 0.05)
    width = widest_ci(rows, LABELS, 2)
    assert width.half and width.needed(0.03) is None and width.needed(0.9 * width.half) is None
    stated = why_stop(rows, LABELS, 2, StoppingRule(0.03))
    assert "after 2 repeats: variance between processes dominates" in stated and "--limit" not in stated
    assert "no number of questions would do; more processes would (blocks in a file of servers" in stated
    text = advice(width, tasks=1)
    assert text.startswith("no number of questions would halve the interval of m, ±") and "--sessions" in text


def test_many_questions_leave_the_width_that_processes_give() -> None:
    """The error over questions falls to 0, and the degrees of freedom are those of two blocks."""
    floor = 2 * math.log1p(TIMING_FLOOR)
    width = Width("m", (Part(0.0, 0.0, 37.0), Part(0.025**2, 0.01**2, 1.0)), 52, floor)
    least = math.sinh(float(stats.t.isf(0.025, 1)) * 0.01 + floor)
    assert least == pytest.approx(0.1475, abs=1e-4)
    needed = width.needed(1.02 * least)
    assert width.half and width.half > 2 * least and needed and needed > 52 * 50
    assert width.needed(least) is None


def test_a_share_may_be_given_in_percent() -> None:
    assert read_share("3%") == pytest.approx(0.03) and read_share("0.03") == 0.03
    assert main(["run", "--methods", "ss", "--target-ci", "3%", "--dry-run"]) == 0
    assert main(["run", "--methods", "ss", "--target-ci", "300%", "--dry-run"]) == 2
    assert main(["run", "--methods", "ss", "--target-ci", "x%", "--dry-run"]) == 2


def test_what_repeats_can_reach_is_predicted() -> None:
    """The width at best, reported after few repeats, is not above that of very many, so that nothing is given up
    early."""
    few, many = (measured(n, questions=0.1, noise=0.1, asked=48) for n in (4, 64))
    reported, true = widest_ci(few, LABELS, 4), widest_ci(many, LABELS, 64)
    assert reported.half and reported.at_best and true.half and true.half < 0.9 * reported.half
    assert 0.7 * true.half < reported.at_best < 1.05 * true.half
    shares = [repeats_share(Pairs(_of(few, "m", n), _of(few, "ar", n))) for n in (1, 4)]
    assert shares[0] is None and shares[1] is not None and 0.2 < shares[1] < 0.9


def _of(rows: list[SampleRecord], label: str, repeats: int) -> list[SampleRecord]:
    return [row for row in rows if row.method == label and row.repeat < repeats]


def test_repeats_end_where_the_last_ones_did_not_help_or_where_they_may_not_be_made(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rows = measured(4, noise=0.1)
    assert why_stop(rows, LABELS, 4, StoppingRule(0.012)) == ""
    assert "(--max-repeats 4)" in why_stop(rows, LABELS, 4, StoppingRule(0.012, max_repeats=4))
    seconds = sum(row.wall_s or 0.0 for row in rows)
    assert "(--budget)" in why_stop(rows, LABELS, 4, StoppingRule(0.012, budget=1.2 * seconds))
    assert why_stop(rows, LABELS, 4, StoppingRule(0.012, budget=1.3 * seconds)) == ""
    monkeypatch.setattr(precision, "repeats_share", lambda pairs: None)
    for row in rows:
        if row.repeat > 1:  # two repeats that add nothing: the first two again
            row.wall_s = next(
                r.wall_s
                for r in rows
                if (r.question_id, r.method, r.repeat) == (row.question_id, row.method, row.repeat - 2)
            )
    assert "the last repeats did not narrow it" in why_stop(rows, LABELS, 4, StoppingRule(0.012))


def test_too_few_questions_are_stated() -> None:
    assert "needs 4 questions" in why_stop(measured(2, asked=3), LABELS, 2, StoppingRule(0.02))
    assert "no method to compare" in why_stop(measured(2), ("ar",), 2, StoppingRule(0.02))


def test_two_servers_are_two_processes() -> None:
    """Each adds 1 % to the interval, which no repeat and no question narrows."""
    rows = measured(2, noise=0.05)
    alone = widest_ci(rows, LABELS, 2)
    for row in rows:
        row.counted = "usage"
    served = widest_ci(rows, LABELS, 2)
    assert alone.half and served.half and served.half - alone.half == pytest.approx(0.01, rel=0.1)
    assert (alone.floor, served.floor) == pytest.approx((math.log1p(TIMING_FLOOR), 2 * math.log1p(TIMING_FLOOR)))
    with pytest.raises(UserError, match="above 0.02 for servers"):
        stopping_rule_of(RunOptions(target_ci=0.02, endpoint=["http://localhost:1"]))


def test_rounds_continue_the_schedule() -> None:
    """Indices go on, and so do the cycles in which the order of the methods is balanced."""
    whole = [*plan(ASKED, LABELS, 2, 0), *plan(ASKED, LABELS, 3, 0, first=2), *plan(ASKED, LABELS, 4, 0, first=3)]
    assert [s.index for s in whole] == list(range(4 * 5 * 2)) and len({s.key for s in whole}) == len(whole)
    order = [s.method for s in whole]
    assert [tuple(order[i : i + 2]) for i in range(0, 40, 2)] == [method_order(LABELS, block, 0) for block in range(20)]
    assert list(plan(ASKED, LABELS, 2, 0, first=0)) == whole[:20]


class Repeating(Bench):
    """A bench with a goal that is reached after `until` repeats."""

    goal: StoppingRule | None = StoppingRule(0.02)


@pytest.fixture
def three(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_loop, "why_stop", lambda rows, labels, made, goal: "enough" if made >= 3 else "")


def test_a_run_grows_by_whole_repeats_and_states_what_it_reached(tmp_path: Path, three: None) -> None:
    bench = Repeating(tmp_path)
    done = bench.run()
    assert len(done.rows) == done.samples == bench.events.total == 5 * 2 * 3 and not unfinished(done)
    assert done.repeats == 3 and done.manifest["config"]["repeats"] == 1
    assert [row.repeat for row in done.rows] == [0] * 10 + [1] * 10 + [2] * 10
    assert [row.index for row in done.rows] == list(range(30)) and len(done.output_match) == 5 * 3 + 5 * 2
    assert done.manifest["target_ci"]["why"] == "enough" and done.manifest["target_ci"]["repeats"] == 3
    assert done.manifest["fingerprint"] == RunConfig(tuple(map(MethodSpec, LABELS)), warmup=0).fingerprint


def test_a_method_that_is_measured_no_more_does_not_decide(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    decided, run_pending = list[tuple[str, ...]](), LocalSession.run_pending

    def drop(self: LocalSession, samples: Sequence[Any]) -> None:
        run_pending(self, samples)
        self.dropped["m"] = "it ended"

    def why(rows: Any, labels: Sequence[str], made: int, goal: StoppingRule) -> str:
        decided.append(tuple(labels))
        return "enough" if made == 2 else ""

    monkeypatch.setattr(LocalSession, "run_pending", drop)
    monkeypatch.setattr(run_loop, "why_stop", why)
    done = Repeating(tmp_path, ("ar", "m", "n")).run()
    assert decided == [("ar", "n")] * 2 and {row.method for row in done.rows if not row.ok} == {"m"}


@pytest.mark.parametrize("after", [3, 10, 14, 29])
def test_a_run_that_was_interrupted_in_any_repeat_goes_on(tmp_path: Path, three: None, after: int) -> None:
    whole = Repeating(tmp_path / "whole").run()
    bench, calls = Repeating(tmp_path / "cut"), count()

    def interrupt(label: str, prompt: str) -> None:
        if next(calls) == after:
            raise KeyboardInterrupt

    bench.before = interrupt
    with pytest.raises(KeyboardInterrupt):
        bench.run()
    cut = read_run(tmp_path / "cut")
    assert (
        len(cut.rows) == after
        and unfinished(cut)
        and cut.samples == 10 * (1 + after // 10 if after % 10 else max(1, after // 10 + 1))
    )
    done = Repeating(tmp_path / "cut").run(resume=True)
    assert [(r.key, r.index, r.position, r.seed) for r in done.rows] == [
        (r.key, r.index, r.position, r.seed) for r in whole.rows
    ]
    assert not unfinished(done) and done.repeats == 3


def test_a_run_without_a_goal_is_as_before_and_may_be_continued_with_one(tmp_path: Path, three: None) -> None:
    plain = Repeating(tmp_path)
    plain.goal = None
    done = plain.run()
    assert (done.repeats, done.samples) == (1, 10) and not {"repeats_made", "target_ci"} & set(done.manifest)
    more = Repeating(tmp_path).run(resume=True)
    assert more.repeats == 3 and [r.key for r in more.rows[:10]] == [r.key for r in done.rows]
    again = Repeating(tmp_path)
    again.goal = None
    assert again.run(resume=True).repeats == 3 and not again.calls


def test_goals() -> None:
    assert stopping_rule_of(RunOptions(target_ci=0.02, repeats=2)) == StoppingRule(0.02, 16, None)
    assert stopping_rule_of(RunOptions(repeats=2)) is None


def test_advice_is_how_many_questions_halve_the_interval_and_whether_repeats_can() -> None:
    by_questions, by_repeats = measured(6, questions=0.1), measured(6, noise=0.1)
    width = widest_ci(by_questions, LABELS, 6)
    text = advice(width, tasks=2)
    assert width.half is not None and width.repeats_cannot_help and "repeats cannot" in text
    many = int(text.split()[1])
    assert 4 <= many / width.questions < 7 and f"(--limit {-(-many // 2)})" in text
    again = widest_ci(measured(6, questions=0.1, asked=many), LABELS, 6).half
    assert again is not None and 0.3 < again / width.half < 0.7
    text = advice(widest_ci(by_repeats, LABELS, 6), tasks=2)
    assert "repeats cannot" not in text and int(text.split()[1]) > 2 * 24
    assert advice(widest_ci(measured(6), LABELS, 6), tasks=2) == ""
