"""The order of samples: balanced, seeded, and independent of what was done before."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise

import numpy as np
import pytest

from specbench_ss.bench.schedule import (
    arrivals,
    interleave_tasks,
    method_order,
    plan,
    question_blocks,
    sample_seed,
    turns_of_servers,
    williams,
)
from specbench_ss.suite import Question

QUESTIONS = [Question(f"q{i}", "c", ("one", "two")[: 1 + i % 2]) for i in range(7)]


@pytest.mark.parametrize("n", range(1, 10))
def test_williams_is_balanced_for_position_and_predecessor(n: int) -> None:
    rows = williams(n)
    for position in range(n):
        assert len(set(Counter(row[position] for row in rows).values())) == 1
    after = Counter(pair for row in rows for pair in pairwise(row))
    assert len(after) == n * (n - 1)
    assert len(set(after.values())) <= 1


@pytest.mark.parametrize("n", [1, 2, 3, 4, 7])
def test_over_a_cycle_every_method_stands_at_every_position_equally_often(n: int) -> None:
    methods = [f"m{i}" for i in range(n)]
    cycle = len(williams(n))
    for first in (0, 3 * cycle):
        orders = [method_order(methods, block, seed=5) for block in range(first, first + cycle)]
        counts = Counter((name, i) for order in orders for i, name in enumerate(order))
        assert set(counts.values()) == {cycle // n}
        assert len(counts) == n * n


def test_order_is_shuffled_by_the_seed_and_differs_between_cycles() -> None:
    methods = list("abcdef")
    orders = {tuple(method_order(methods, block, seed) for block in range(6)) for seed in range(5)}
    assert len(orders) == 5
    assert [method_order(methods, b, 0) for b in range(6)] != [method_order(methods, b, 0) for b in range(6, 12)]


def test_an_order_does_not_depend_on_those_before_it() -> None:
    forwards = [method_order("abc", b, 1) for b in range(20)]
    assert [method_order("abc", b, 1) for b in reversed(range(20))] == forwards[::-1]


def test_plan_holds_every_sample_once_and_turn_by_turn() -> None:
    samples = list(plan(QUESTIONS, ["ar", "a", "b"], repeats=2, seed=0))
    prompts = sum(len(q.turns) for q in QUESTIONS)
    assert len({s.key for s in samples}) == len(samples) == prompts * 2 * 3
    assert [s.index for s in samples] == list(range(len(samples)))
    place = {s.key: s.index for s in samples}
    for s in samples:
        if s.turn:  # what a later turn continues has been made before
            assert place[s.question.id, s.turn - 1, "ar", 0] < s.index
            assert place[s.question.id, s.turn - 1, s.method, s.repeat] < s.index


def test_methods_are_interleaved_on_each_prompt() -> None:
    samples = list(plan(QUESTIONS, ["ar", "a", "b"], repeats=2, seed=0))
    for i in range(0, len(samples), 3):
        block = samples[i : i + 3]
        assert len({(s.question.id, s.turn, s.repeat) for s in block}) == 1
        assert [s.position for s in block] == [0, 1, 2]


@pytest.mark.parametrize("blocks", [2, 4, 10])
@pytest.mark.parametrize("n", [2, 3, 6])
def test_all_servers_have_the_same_mean_place(n: int, blocks: int) -> None:
    servers = [f"s{i}" for i in range(n)]
    turns = turns_of_servers(servers, blocks, seed=3)
    visits = [server for order in turns for server in order]
    assert all(set(order) == set(servers) for order in turns) and len(turns) == blocks
    means = {server: np.mean([i for i, other in enumerate(visits) if other == server]) for server in servers}
    assert set(means.values()) == {(n * blocks - 1) / 2}
    assert [order.index("s0") for order in turns] == [0, n - 1] * (blocks // 2)


def test_a_server_alone_has_its_turn_and_an_odd_block_begins_with_the_first() -> None:
    assert turns_of_servers(["s0"], 1, 0) == [("s0",)]
    assert [order[0] for order in turns_of_servers(["s0", "s1"], 3, 0)] == ["s0", "s1", "s0"]


@pytest.mark.parametrize("number", [1, 2, 3, 4, 99])
def test_blocks_have_about_as_many_questions_of_every_task(number: int) -> None:
    sizes = {"a": 7, "b": 4, "c": 1, "d": 12}
    asked = interleave_tasks([Question(f"{t}{i}", t, ("?",)) for t, many in sizes.items() for i in range(many)])
    found = question_blocks(asked, number)
    assert set(found.values()) == set(range(min(number, len(asked))))
    for chosen in (asked, *([q for q in asked if q.category == task] for task in sizes)):
        many = Counter(dict.fromkeys(found.values(), 0)) + Counter(found[q.id] for q in chosen)
        counts = [many[block] for block in set(found.values())]
        assert max(counts) - min(counts) <= 1


def test_sampling_seeds_are_stable_and_distinct() -> None:
    seeds = {sample_seed(s, q, t, r) for s in range(3) for q in ("a", "b", "a1") for t in range(2) for r in (1, 11)}
    assert len(seeds) == 3 * 3 * 2 * 2
    assert all(0 <= s < 2**63 for s in seeds)
    assert sample_seed(0, "a", 0, 0) == 7912067167977763541


def test_where_tasks_take_turns_each_is_as_far_as_the_others() -> None:
    sizes = {"long": 30, "short": 3, "middle": 10}
    asked = [Question(f"{task}-{i}", task, ("?",)) for task, many in sizes.items() for i in range(many)]
    ordered = interleave_tasks(asked)
    assert sorted(q.id for q in ordered) == sorted(q.id for q in asked)
    for cut in range(len(ordered)):
        for task, many in sizes.items():
            seen = [q.id for q in ordered[:cut] if q.category == task]
            assert seen == [f"{task}-{i}" for i in range(len(seen))]
            assert abs(len(seen) - many * cut / len(ordered)) <= 2
        assert cut < len(sizes) or {q.category for q in ordered[:cut]} == set(sizes)


def test_arrivals_are_poisson_with_an_exact_mean_rate_and_depend_on_seed_and_repeat_alone() -> None:
    times = arrivals(4000, 2.0, 7, 0)
    gaps = np.diff([0.0, *times])
    assert times[-1] == pytest.approx(2000.0) and (gaps > 0).all()
    assert gaps.std() / gaps.mean() == pytest.approx(1, abs=0.1)  # of an exponential distribution
    assert (gaps > gaps.mean()).mean() == pytest.approx(np.exp(-1), abs=0.03)
    assert arrivals(4000, 8.0, 7, 0) == pytest.approx([time / 4 for time in times])
    assert len({tuple(arrivals(5, 2.0, seed, repeat)) for seed in (0, 1) for repeat in (0, 1)}) == 4
