"""Tuning: what is chosen for known costs, what it rests on, and where it ends. Time is a number that costs add to."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from contextlib import nullcontext

import pytest

from specbench_ss import registry
from specbench_ss.conformance import tiny_target
from specbench_ss.engine.generate import StopParams
from specbench_ss.options import MethodSpec
from specbench_ss.stats.intervals import FEWEST
from specbench_ss.tuning.search import CUTS, FIRST_CHECK, Cost, Measurements
from specbench_ss.tuning.session import DecoderBench, TuneResult, halves, sentence, tune
from tests.core.planted_lies import AcceptsAnything, Honest

TimeEstimate = Callable[[dict[str, str], int], float]  # options, prompt -> seconds per token
GRID = {"size": ["4", "8", "16", "32"], "depth": ["1", "2", "3"]}


class FakeBench:
    """Answers take `pace` a token, times a noise of so much; `before` may raise instead of an answer."""

    warm_s, ar_pace = 0.01, 0.002

    def __init__(
        self, pace: TimeEstimate, noise: float = 0.05, values: dict[str, list[str]] = GRID, seed: int = 0
    ) -> None:
        self.pace, self.noise, self.values = pace, noise, values
        self.rng, self.now = random.Random(seed), 0.0
        self.asked: list[tuple[str, int]] = []
        self.races: list[tuple[str, tuple[str, ...]]] = []
        self.warnings: list[str] = []
        self.searched: frozenset[int] = frozenset()
        self.warmed: set[str] = set()
        self.sought: list[str] = []
        self.before: Callable[[MethodSpec], None] = lambda spec: None

    def options(self, at: MethodSpec) -> list[str]:
        return list(self.values)

    def around(self, at: MethodSpec, option: str) -> list[MethodSpec]:
        self.sought.append(option)
        others = [{**at.options, option: value} for value in self.values[option]]
        return [MethodSpec(at.name, options) for options in others if options != at.options]

    def warm_up(self, spec: MethodSpec, prompt: int) -> None:
        self.now += self.warm_s
        self.warmed.add(spec.label)

    def measure(self, spec: MethodSpec, prompt: int) -> Cost:
        self.before(spec)
        self.asked.append((spec.label, prompt))
        pace = self.ar_pace if spec.name == "ar" else self.pace(spec.options, prompt)
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

    def tune(self, prompts: int = 40, budget: float = 60.0, seed: int = 0) -> TuneResult:
        categories = ["c"] * prompts
        self.searched = frozenset(halves(categories, seed)[0])
        return tune(self, MethodSpec("m"), categories, budget, seed, self, lambda: self.now)

    @property
    def confirmed(self) -> list[tuple[str, int]]:
        """Return the measurements on prompts of the second half."""
        return [(label, prompt) for label, prompt in self.asked if prompt not in self.searched]


def bowl(options: dict[str, str], prompt: int) -> float:
    """Best at size 16 and depth 2, where the default is size 8 and depth 3."""
    size, depth = int(options.get("size", 8)), int(options.get("depth", 3))
    return 0.001 * (1 + 0.3 * abs(size.bit_length() - 5)) * (1 + 0.2 * abs(depth - 2))


def flat(options: dict[str, str], prompt: int) -> float:
    return 0.001


def test_the_fastest_combination_is_found_through_noise() -> None:
    covered = 0
    for seed in range(5):
        tuned = FakeBench(bowl, seed=seed).tune(seed=seed)
        assert tuned.outcome == "faster"
        assert tuned.chosen.options == {"size": "16", "depth": "2"}
        around = tuned.over_default.interval
        assert around is not None
        covered += around[0] < 1.3 * 1.2 < around[1]
    assert covered >= 4


def test_what_makes_no_difference_is_left_at_the_default() -> None:
    """A/A: neither does the search see a leader in noise, nor does the confirmation believe one."""
    done = [FakeBench(flat, seed=seed).tune(seed=seed) for seed in range(20)]
    assert sum(tuned.chosen == tuned.default for tuned in done) >= 19
    assert sum(tuned.leader == tuned.default for tuned in done) >= 15  # a dozen comparisons each
    assert {tuned.outcome for tuned in done} <= {"not significant", "nothing better", "faster", "slower"}


def test_the_winner_is_judged_on_prompts_that_did_not_choose_it() -> None:
    """Fast on the half that the search has, slow on the other one."""

    def pace(options: dict[str, str], prompt: int) -> float:
        lucky = options.get("size") == "16"
        return 0.001 * ((0.6 if prompt in bench.searched else 1.4) if lucky else 1)

    bench = FakeBench(pace, values={"size": ["16"]})
    tuned = bench.tune()
    assert tuned.leader.options == {"size": "16"}
    assert (tuned.outcome, tuned.chosen.options) == ("slower", {})
    order = [prompt not in bench.searched for _, prompt in bench.asked]
    assert order == sorted(order) and set(order) == {False, True}


@pytest.mark.parametrize(("ar_pace", "longer"), [(0.002, 1.0), (0.02, 6.0)])
@pytest.mark.parametrize("budget", [4.0, 5.0, 6.0, 8.0, 12.0])
def test_a_leader_is_always_confirmed_unless_interrupted(budget: float, ar_pace: float, longer: float) -> None:
    """Time for it is kept back, as measured: also where the reference is far slower than what races."""
    for seed in range(3):
        bench = FakeBench(bowl, seed=seed)
        bench.ar_pace = ar_pace
        tuned = bench.tune(budget=budget * longer, seed=seed)
        assert tuned.outcome != "not confirmed"
        if tuned.leader != tuned.default:
            assert tuned.over_default.prompts >= FEWEST


def test_what_is_not_confirmed_is_named_and_not_chosen() -> None:
    """The prompts that confirm turn out ten times as long as those that chose."""
    bench = FakeBench(
        lambda options, prompt: bowl(options, prompt) * (1 if prompt in bench.searched else 1000), noise=0.01
    )
    tuned = bench.tune(budget=8)
    assert tuned.leader != tuned.default
    assert (tuned.outcome, tuned.chosen) == ("not confirmed", tuned.default)
    assert tuned.finalist.label in sentence(tuned) and f"{tuned.to_confirm:.0f} s more" in sentence(tuned)


@pytest.mark.parametrize("seed", range(4))
def test_both_halves_have_every_category_that_has_two_prompts(seed: int) -> None:
    categories = [c for c in "abcdefgh" for _ in range(1 + ord(c) % 4)]
    search, confirm = halves(categories, seed)
    assert sorted(search + confirm) == list(range(len(categories)))
    assert 0 <= len(search) - len(confirm) <= 1
    several = {c for c in categories if categories.count(c) > 1}
    assert several <= {categories[i] for i in search} and several <= {categories[i] for i in confirm}
    for c in several:
        assert abs(sum(categories[i] == c for i in search) - sum(categories[i] == c for i in confirm)) <= 1


def test_every_block_holds_the_default_and_each_configuration_once() -> None:
    bench = FakeBench(bowl)
    bench.tune()
    block: list[str] = []
    places = Counter[int]()
    booked = bench.asked[2:]  # after one answer of the reference and the default, to have their pace
    prompt = booked[0][1]
    for label, asked in [*booked, ("", -1)]:
        if asked != prompt:
            assert "m" in block and len(set(block)) == len(block)
            places[block.index("m")] += 1
            block, prompt = [], asked
        block.append(label)
    assert len(places) > 3, "the default must not always come first"


def test_hopeless_ones_are_dropped_early_and_no_race_is_endless() -> None:
    def pace(options: dict[str, str], prompt: int) -> float:
        return 0.001 / {"16": 0.78, "32": 0.72}.get(options.get("size", ""), 1.0)

    bench = FakeBench(pace, noise=0.001, values={"size": GRID["size"]})
    bench.tune(budget=1e6)
    answers = Counter(label for label, prompt in bench.asked if prompt in bench.searched)
    assert answers["m[size=32]"] == FIRST_CHECK
    assert answers["m[size=16]"] == CUTS[0]  # three quarters of the leader's speed: it may be noise
    assert answers["m"] <= CUTS[-1] + 1  # one to have the pace


@pytest.mark.parametrize("after", [1, 60, 150])
def test_interrupted_it_gives_what_was_confirmed_so_far(after: int) -> None:
    bench = FakeBench(bowl, noise=0.01)

    def stop(spec: MethodSpec) -> None:
        if len(bench.asked) >= after:
            raise KeyboardInterrupt

    bench.before = stop
    tuned = bench.tune()
    assert tuned.interrupted and len(bench.asked) == after
    assert (tuned.outcome, tuned.leader.options, tuned.chosen.options) in (
        ("nothing better", {}, {}),
        ("not confirmed", {"size": "16"}, {}),
        ("not confirmed", {"size": "16", "depth": "2"}, {}),
        ("faster", {"size": "16", "depth": "2"}, {"size": "16", "depth": "2"}),
    )
    assert (tuned.outcome == "nothing better") == (after == 1)


def test_a_comparison_is_of_common_blocks_and_adds_up_blocks_of_one_prompt() -> None:
    book = Measurements()
    for prompt in (0, 1, 0):
        block = book.open_block(prompt)
        book.add("a", block, Cost(1.0, 10))
        if prompt == 0:
            book.add("b", block, Cost(2.0, 10))
    found = book.compare("a", "b")
    assert (found.speedup, found.prompts, found.tokens_per_s) == (2.0, 1, 10.0)
    assert (found.interval, found.verdict) == (None, "insufficient data")
    assert book.compare("a", "a").verdict == "baseline"
    assert book.compare("a", "c").speedup is None


def test_a_configuration_with_wrong_output_is_no_candidate() -> None:
    target = tiny_target("llama", words=61)
    good, bad = Honest(target), AcceptsAnything(target)
    for decoder, error in ((good, ""), (bad, "mismatch with ar's output")):
        spec, reference = MethodSpec(decoder.name), registry.load_method(MethodSpec("ar"), target)
        bench = DecoderBench(spec, decoder, reference, [[3, 4, 5, 6]], StopParams(8))
        with pytest.raises(ValueError, match=error) if error else nullcontext():
            bench.measure(spec, 0)
