"""Paired samples of a method and a baseline: which of them count, and their sums by question."""

from __future__ import annotations

import numpy as np
import pytest

from specbench_ss.results.ranking import rank_ranges
from specbench_ss.results.summary import summarise
from specbench_ss.runs.records import SampleRecord
from specbench_ss.runs.run_dir import read_run
from specbench_ss.stats.intervals import compare, log_ratio
from specbench_ss.stats.pairs import Pairs, answered_blocks, tau_of, together
from tests.conftest import MakeRun


def sample(question: str, method: str, wall_s: float, tokens: int = 10, repeat: int = 0, turn: int = 0) -> SampleRecord:
    """A sample whose first token is from prefill, with half as many steps as tokens. Its task is the first letter."""
    row = SampleRecord(question, turn, method, repeat, question[0], 0, 0, 0, "", "", "ok")
    row.tokens, row.prefill_tokens, row.steps, row.wall_s = tokens, 1, tokens // 2, wall_s
    return row


def failed(question: str, method: str) -> SampleRecord:
    row = sample(question, method, 0.0)
    row.status = "failed"
    return row


def test_only_prompts_count_that_both_answered() -> None:
    own = [sample("a1", "m", 1.0), sample("a2", "m", 1.0), failed("b1", "m"), sample("b2", "m", 3.0)]
    other = [sample("b2", "ar", 6.0), sample("a1", "ar", 2.0), failed("a2", "ar"), sample("b1", "ar", 9.0)]
    pairs = Pairs(own, other)
    assert [row.question_id for row in pairs.own] == [row.question_id for row in pairs.other] == ["a1", "b2"]
    assert (pairs.n_prompts, pairs.questions, pairs.speedup()) == (2, ["a1", "b2"], 2.0)
    nothing = Pairs(own, [])
    assert (nothing.n_prompts, nothing.speedup(), nothing.interval(), nothing.tau) == (0, None, None, None)


def test_repeats_are_averaged_and_turns_summed_by_question() -> None:
    own = [sample("a1", "m", s, repeat=r, turn=t) for t, r, s in ((0, 0, 1.0), (0, 1, 3.0), (1, 0, 5.0))]
    other = [sample("a1", "ar", 2 * (row.wall_s or 0.0), repeat=row.repeat, turn=row.turn) for row in own]
    other_s, other_tokens, own_s, own_tokens = Pairs(own, other).by_question()
    assert (other_s.tolist(), own_s.tolist()) == ([14.0], [7.0])
    assert other_tokens.tolist() == own_tokens.tolist() == [20.0]
    assert Pairs(own, other).of_samples([1.0, 2.0, 4.0]).tolist() == [7.0]


def test_the_mean_acceptance_length_needs_the_steps_of_every_sample() -> None:
    rows = [sample("a1", "m", 1.0, 11), sample("a2", "m", 1.0, 31)]
    assert tau_of(rows) == (10 + 30) / (5 + 15)
    rows[0].steps = None
    assert tau_of(rows) is None and tau_of([]) is None


def test_tasks_are_strata_and_servers_are_two_processes() -> None:
    rng = np.random.default_rng(0)
    own = [sample(f"{task}{i}", "m", rng.uniform(1, 2)) for task in "ab" for i in range(3)]
    other = [sample(row.question_id, "ar", rng.uniform(1, 2)) for row in own]
    pairs = Pairs(own, other)
    assert pairs.strata.tolist() == [0, 0, 0, 1, 1, 1] and pairs.processes == 1
    a, b, c, d = pairs.by_question()
    assert pairs.log_speedup() == log_ratio((a, d), (b, c), pairs.strata) != log_ratio((a, d), (b, c))
    low, high = pairs.interval() or (0.0, 0.0)
    for row in own:
        row.counted = "usage"
    assert Pairs(own, other).interval() == pytest.approx((low / 1.01, high * 1.01))


def test_one_block_of_several_gives_no_interval() -> None:
    """Its processes answered nothing else, so that nothing shows by how much processes differ."""
    rng = np.random.default_rng(0)
    own, other = ([sample(f"{task}{i}", x, rng.uniform(1, 2)) for task in "ab" for i in range(8)] for x in ("m", "ar"))
    for row in (*own, *other):
        row.block = int(row.question_id[1:]) % 2
    assert Pairs(own, other).interval() and answered_blocks(own) == {0, 1}
    for row in own:
        row.status = "failed" if row.block else "ok"
    pairs = Pairs(own, other)
    assert answered_blocks(own) == {0} and len(pairs.questions) == 8 and pairs.speedup()
    assert pairs.interval() is None and compare(pairs.interval()) == "insufficient data"
    first = [[row for row in side if not row.block] for side in (own, other)]
    assert Pairs(*first).interval()  # all that the run measured


def test_a_server_that_lacks_a_block_has_no_rank_and_takes_no_block_from_the_others(make_run: MakeRun) -> None:
    run = read_run(make_run())
    rows = summarise(run)
    for row in run.rows:
        row.block = int(row.question_id.rpartition("-")[2]) % 3
    alone = rank_ranges(run, [row for row in rows if row.method != "medusa"])
    assert set(rank_ranges(run, rows)) == {"ss", "medusa"}
    for row in run.rows:
        row.status = "failed" if row.method == "medusa" and row.block == 2 else "ok"
    assert rank_ranges(run, rows) == alone and set(alone) == {"ss"}


def test_methods_together_have_the_prompts_that_all_of_them_answered() -> None:
    samples = [
        [sample(q, method, seconds) for q in questions]
        for method, seconds, questions in (("a", 1.0, "uvwx"), ("b", 2.0, "xwvu"), ("c", 3.0, "wuv"))
    ]
    seconds, tokens, strata, *_ = together(samples)
    assert seconds.tolist() == [[1.0] * 3, [2.0] * 3, [3.0] * 3] and tokens.shape == (3, 3) and len(strata) == 3
