"""Tuning: what is chosen for known costs, what it rests on, and where it ends. Time is a number that costs add to."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Collection, Sequence

import pytest

from specbench_ss.config import MethodSpec
from specbench_ss.errors import UserError
from specbench_ss.tuning.book import Book, Cost
from specbench_ss.tuning.search import CUTS, FIRST_LOOK, HOPELESS
from specbench_ss.tuning.session import Tuned, tune

Pace = Callable[[dict[str, str], int], float]  # options, prompt -> seconds per token
GRID = {"size": ["4", "8", "16", "32"], "depth": ["1", "2", "3"]}


class FakeBench:
    """Answers take `pace` a token, times a noise of so much; `before` may raise instead of an answer."""

    def __init__(self, pace: Pace, noise: float = 0.05, values: dict[str, list[str]] = GRID, seed: int = 0) -> None:
        self.pace, self.noise, self.values = pace, noise, values
        self.rng, self.now = random.Random(seed), 0.0
        self.asked: list[tuple[str, int]] = []
        self.races: list[tuple[str, tuple[str, ...]]] = []
        self.warnings: list[str] = []
        self.before: Callable[[MethodSpec], None] = lambda spec: None

    def options(self, at: MethodSpec) -> list[str]:
        return list(self.values)

    def around(self, at: MethodSpec, option: str) -> list[MethodSpec]:
        others = [{**at.options, option: value} for value in self.values[option]]
        return [MethodSpec(at.name, options) for options in others if options != at.options]

    def warm_up(self, spec: MethodSpec, prompt: int) -> None:
        self.now += 0.01

    def measure(self, spec: MethodSpec, prompt: int) -> Cost:
        self.before(spec)
        self.asked.append((spec.label, prompt))
        pace = 0.002 if spec.name == "ar" else self.pace(spec.options, prompt)
        tokens = 40 + 10 * (prompt % 7)
        seconds = pace * tokens * self.rng.lognormvariate(0, self.noise)
        self.now += seconds
        return Cost(seconds, tokens)

    def keep(self, labels: Collection[str]) -> None:
        pass

    def on_race(self, what: str, labels: Sequence[str]) -> None:
        self.races.append((what, tuple(labels)))

    def on_sample(self, label: str) -> None:
        pass

    def on_warning(self, text: str) -> None:
        self.warnings.append(text)

    def tune(self, prompts: int = 40, budget: float = 60.0, seed: int = 0) -> Tuned:
        return tune(self, MethodSpec("m"), prompts, budget, seed, self, lambda: self.now)


def bowl(options: dict[str, str], prompt: int) -> float:
    """Best at size 16 and depth 2, where the default is size 8 and depth 3."""
    size, depth = int(options.get("size", 8)), int(options.get("depth", 3))
    return 0.001 * (1 + 0.3 * abs(size.bit_length() - 5)) * (1 + 0.2 * abs(depth - 2))


def flat(options: dict[str, str], prompt: int) -> float:
    return 0.001


@pytest.mark.parametrize("seed", range(5))
def test_the_fastest_combination_is_found_through_noise(seed: int) -> None:
    tuned = FakeBench(bowl, seed=seed).tune(seed=seed)
    assert tuned.outcome == "faster"
    assert tuned.chosen.options == {"size": "16", "depth": "2"}
    around = tuned.over_default.interval
    assert around is not None and around[0] < 1.3 * 1.2 < around[1]


def test_what_makes_no_difference_is_left_at_the_default() -> None:
    """A/A: neither does the search see a leader in noise, nor does the confirmation believe one."""
    done = [FakeBench(flat, seed=seed).tune(seed=seed) for seed in range(20)]
    assert sum(tuned.chosen == tuned.default for tuned in done) >= 19
    assert sum(tuned.leader == tuned.default for tuned in done) >= 15  # a dozen comparisons each
    assert {tuned.outcome for tuned in done} <= {"not distinguishable", "nothing better", "faster", "slower"}


def test_of_equally_fast_values_the_simplest_is_taken() -> None:
    def pace(options: dict[str, str], prompt: int) -> float:
        return 0.0005 if options.get("size") in ("4", "16", "32") else 0.001

    assert FakeBench(pace, noise=0.01, values={"size": GRID["size"]}).tune().chosen.options == {"size": "4"}


def test_the_winner_is_judged_on_prompts_that_did_not_choose_it() -> None:
    """Fast on the half that the search has, slow on the other one."""

    def pace(options: dict[str, str], prompt: int) -> float:
        lucky = options.get("size") == "16"
        return 0.001 * ((0.6 if prompt % 2 == 0 else 1.4) if lucky else 1)

    bench = FakeBench(pace, values={"size": ["16"]})
    tuned = bench.tune()
    assert tuned.leader.options == {"size": "16"}
    assert (tuned.outcome, tuned.chosen.options) == ("slower", {})
    halves = [prompt % 2 for _, prompt in bench.asked]
    assert halves == sorted(halves) and set(halves) == {0, 1}


def test_every_block_holds_the_default_and_each_configuration_once() -> None:
    bench = FakeBench(bowl)
    bench.tune()
    block: list[str] = []
    places = Counter[int]()
    prompt = bench.asked[0][1]
    for label, asked in [*bench.asked, ("", -1)]:
        if asked != prompt:
            assert "m" in block and len(set(block)) == len(block)
            places[block.index("m")] += 1
            block, prompt = [], asked
        block.append(label)
    assert len(places) > 3, "the default must not always come first"


def test_hopeless_ones_are_dropped_early_and_no_race_is_endless() -> None:
    def pace(options: dict[str, str], prompt: int) -> float:
        return 0.001 / (HOPELESS - 0.2) if options.get("size") == "32" else 0.001

    bench = FakeBench(pace, values={"size": GRID["size"]})
    bench.tune(budget=1e6)
    answers = Counter(label for label, prompt in bench.asked if prompt % 2 == 0)
    assert answers["m[size=32]"] == FIRST_LOOK
    assert answers["m"] <= CUTS[-1]


@pytest.mark.parametrize("budget", [0.5, 3.0, 10.0])
def test_the_budget_is_kept_but_for_the_block_at_hand(budget: float) -> None:
    bench = FakeBench(bowl)
    tuned = bench.tune(budget=budget)
    assert tuned.seconds == bench.now <= budget + 1.5


@pytest.mark.parametrize("after", [1, 60, 150])
def test_interrupted_it_gives_the_best_so_far(after: int) -> None:
    bench = FakeBench(bowl, noise=0.01)

    def stop(spec: MethodSpec) -> None:
        if len(bench.asked) >= after:
            raise KeyboardInterrupt

    bench.before = stop
    tuned = bench.tune()
    assert tuned.interrupted and len(bench.asked) == after
    assert tuned.chosen == (tuned.default if after == 1 else tuned.leader)
    assert (tuned.outcome, tuned.chosen.options) in (
        ("nothing better", {}),
        ("not confirmed", {"size": "16"}),
        ("not confirmed", {"size": "16", "depth": "2"}),
        ("faster", {"size": "16", "depth": "2"}),
    )


def test_a_failing_configuration_is_out_and_named_and_the_others_go_on() -> None:
    bench = FakeBench(bowl)

    def fail(spec: MethodSpec) -> None:
        if spec.options.get("size") == "16":
            raise RuntimeError("out of memory")

    bench.before = fail
    tuned = bench.tune()
    assert tuned.failed["m[size=16]"] == "RuntimeError: out of memory"
    assert any("m[size=16] is out" in text for text in bench.warnings)
    assert tuned.chosen.options["depth"] == "2"


@pytest.mark.parametrize("name", ["m", "ar"])
def test_nothing_compares_where_the_default_or_the_reference_fails(name: str) -> None:
    bench = FakeBench(bowl)

    def fail(spec: MethodSpec) -> None:
        if spec.label == name:
            raise RuntimeError("out of memory")

    bench.before = fail
    with pytest.raises(UserError, match=f"{name} fails, .*out of memory"):
        bench.tune()


def test_too_few_prompts_and_nothing_to_tune_are_told() -> None:
    with pytest.raises(UserError, match="at least 8 prompts.* 7"):
        FakeBench(bowl).tune(prompts=7)
    with pytest.raises(UserError, match="nothing to tune"):
        FakeBench(bowl, values={}).tune()


def test_a_comparison_is_of_common_blocks_and_adds_up_blocks_of_one_prompt() -> None:
    book = Book()
    for prompt in (0, 1, 0):
        block = book.open_block(prompt)
        book.add("a", block, Cost(1.0, 10))
        if prompt == 0:
            book.add("b", block, Cost(2.0, 10))
    found = book.compare("a", "b")
    assert (found.speedup, found.prompts, found.tokens_per_s) == (2.0, 1, 10.0)
    assert (found.interval, found.verdict) == (None, "too few")
    assert book.compare("a", "a").verdict == "reference"
    assert book.compare("a", "c").speedup is None
