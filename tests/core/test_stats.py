"""The numbers of the tables: checks they obey, and intervals that cover."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from specbench_ss.engine.decoder import Generation, Step
from specbench_ss.results import sample_checks
from specbench_ss.results.quality import conservative_interval, non_inferiority
from specbench_ss.results.summary import OVERALL, SummaryRow, summarise
from specbench_ss.runs.records import OutputMatch, Run, SampleRecord, Steps
from specbench_ss.stats.intervals import FEWEST, compare, mean_interval, speedup_interval

RNG = np.random.default_rng


def step(seconds: float, depth: int = 0, accepted: int = 0, kept: int | None = None) -> Step:
    parts = (0.2 * seconds, 0.6 * seconds, 0.1 * seconds, 0.1 * seconds)
    tokens = accepted + 1 if kept is None else kept
    return Step(depth * 2, depth * 2, depth, accepted, tokens, *parts, sum(parts))


def make(samples: list[tuple[Any, ...]], labels: tuple[str, ...] = ("ar", "m"), lossless: bool = True) -> Run:
    """samples: (question, method, steps[, prefill_s[, quality[, turn[, repeat]]]]); steps None = failed."""
    rows, steps = [], {}
    for i, (question, method, made, *rest) in enumerate(samples):
        prefill, quality, turn, repeat = [*rest, *(0.1, None, 0, 0)[len(rest) :]]
        row = SampleRecord(question, turn, method, repeat, question[0], i, 0, 0, "e", "h", "ok")
        if made is None:
            row.status, row.error = "failed", "RuntimeError: no"
        else:
            n = 1 + sum(s.tokens for s in made)
            row.fill(
                Generation(
                    [5] * n, 9, "length", prefill, 1, list(made), sum(s.accepted_tokens + 1 - s.tokens for s in made)
                )
            )
            row.quality = quality
            steps[row.key] = list(made)
        rows.append(row)
    methods = [{"label": x, "lossless": lossless} for x in labels]
    return Run(
        Path(), {"methods": methods, "config": {}, "model": {"dtype": "float32"}}, rows, Steps.from_samples(steps)
    )


def overall(run: Run, method: str = "m") -> SummaryRow:
    return next(r for r in summarise(run) if (r.task, r.method) == (OVERALL, method))


def test_a_worked_example() -> None:
    """Two prompts; the reference needs 10 ms a step, the method 12 ms and keeps 3 tokens a step."""
    ar = [step(0.010)] * 6
    m = [step(0.012, depth=4, accepted=2)] * 2
    row = overall(make([("a1", "ar", ar, 0.02), ("a1", "m", m, 0.02), ("b1", "ar", ar, 0.04), ("b1", "m", m, 0.04)]))
    assert row.speedup == pytest.approx((0.08 + 0.10) / (0.044 + 0.064))
    assert row.speedup_geomean == pytest.approx(math.sqrt(0.08 / 0.044 * 0.10 / 0.064))
    assert row.speedup_specbench == pytest.approx((7 / 0.044 + 7 / 0.064) / (7 / 0.08 + 7 / 0.10))
    assert row.tokens_per_s == pytest.approx(14 / 0.108)
    assert (row.mean_acceptance_length, row.request_mean_acceptance_length, row.acceptance_rate) == (3.0, 3.0, 0.5)
    assert row.acceptance_rate_per_pos == (1.0, 1.0, 0.0, 0.0)
    assert row.acceptance_rate_per_pos_n == (4, 4, 4, 4)
    assert row.conditional_acceptance_rate == (1.0, 1.0, 0.0)
    assert row.conditional_acceptance_rate_n == (4, 4, 4)  # position 4 was never reached
    assert (row.num_target_forwards, row.n_prompts, row.n_questions, row.n_failed) == (2.0, 2, 2, 0)
    assert row.health == ()


def test_the_decomposition_and_the_parts_close() -> None:
    rng = RNG(0)
    samples: list[tuple[Any, ...]] = []
    for i in range(12):
        samples.append((f"a{i}", "ar", [step(rng.uniform(0.009, 0.011)) for _ in range(30)]))
        samples.append((f"a{i}", "m", [step(rng.uniform(0.012, 0.015), 3, int(rng.integers(0, 4))) for _ in range(12)]))
    for row in summarise(make(samples)):
        assert row.mean_acceptance_length is not None
        assert row.relative_step_time is not None
        assert row.other_factor is not None
        assert row.speedup == pytest.approx(row.mean_acceptance_length / row.relative_step_time * row.other_factor)
        parts = [row.draft_s, row.verify_s, row.accept_s, row.host_s, row.parts_residual_s]
        assert sum(p or 0 for p in parts) == pytest.approx(row.step_s)
        assert row.parts_residual_s == pytest.approx(0, abs=1e-12)
    no_prefill = make([(q, m, s, 1e-12) for q, m, s in samples])
    assert overall(no_prefill).other_factor == pytest.approx(1, rel=0.05)  # what is left is the first token


def test_tau_is_pooled_and_the_request_mean_is_not() -> None:
    long, short = [step(0.01, 1, 0)] * 9, [step(0.01, 1, 1)]
    ar = [step(0.01)] * 9
    row = overall(make([("a", "ar", ar), ("a", "m", long), ("b", "ar", ar), ("b", "m", short)]))
    assert row.mean_acceptance_length == pytest.approx(11 / 10)
    assert row.request_mean_acceptance_length == pytest.approx((1 + 2) / 2)


def test_the_reference_against_itself_is_one() -> None:
    run = make([(f"a{i}", m, [step(0.01 + i / 1000)] * 5) for i in range(3) for m in ("ar", "m")])
    row = overall(run, "ar")
    assert (row.speedup, row.speedup_geomean, row.speedup_specbench, row.mean_acceptance_length) == (1.0, 1.0, 1.0, 1.0)
    assert (row.comparison, row.speedup_interval, row.other_factor) == ("baseline", None, 1.0)


def test_only_prompts_good_on_both_sides_count() -> None:
    s = [step(0.01)] * 5
    slow = [step(0.9)] * 5
    run = make([
        ("a", "ar", s), ("a", "m", s),
        ("b", "ar", slow), ("b", "m", None),
        ("c", "ar", None), ("c", "m", slow),
    ])  # fmt: skip
    row = overall(run)
    assert (row.speedup, row.n_prompts, row.n_failed) == (1.0, 1, 1)
    assert row.step_s == pytest.approx(0.01)
    assert any(str(h).startswith("failed: 1 sample, first b") for h in row.health)
    nothing = overall(make([("a", "ar", None), ("a", "m", None)]))
    assert (nothing.speedup, nothing.mean_acceptance_length, nothing.n_prompts, nothing.comparison) == (
        None,
        None,
        0,
        "insufficient data",
    )


def test_repeats_are_averaged_and_turns_kept_together() -> None:
    fast, slow = [step(0.01)] * 4, [step(0.03)] * 4
    samples: list[tuple[Any, ...]] = []
    for turn in (0, 1):
        for repeat in (0, 1):
            samples.append(("a", "ar", fast if repeat else slow, 0.0001, None, turn, repeat))
            samples.append(("a", "m", fast, 0.0001, None, turn, repeat))
    row = overall(make(samples))
    assert row.speedup == pytest.approx((0.04 + 0.12) / 0.08, rel=0.01)
    assert (row.n_prompts, row.n_questions) == (2, 1)
    assert (row.speedup_interval, row.comparison) == (
        None,
        "insufficient data",
    )  # one question states nothing of others


def test_a_prompt_with_a_failed_repeat_weighs_as_much_as_the_others() -> None:
    quick, slow = [step(0.01)] * 4, [step(0.03)] * 4
    a = [("a", m, quick, 1e-9, None, 0, r) for r in (0, 1) for m in ("ar", "m")]
    b = [
        ("b", m, made, 1e-9, None, 0, r)
        for m, r, made in (("ar", 0, slow), ("m", 0, quick), ("ar", 1, None), ("m", 1, quick))
    ]
    assert overall(make([*a, *b])).speedup == pytest.approx((0.04 + 0.12) / 0.08)


def test_quality_is_compared_in_pairs() -> None:
    s = [step(0.01)] * 3
    rng = RNG(1)
    samples: list[tuple[Any, ...]] = []
    for i in range(30):
        base = rng.uniform(0.3, 0.6)
        samples += [(f"a{i}", "ar", s, 0.1, base), (f"a{i}", "m", s, 0.1, base + 0.1)]
    samples += [("b", "ar", s, 0.1, None), ("b", "m", s, 0.1, None)]
    row = overall(make(samples))
    assert row.quality_difference == pytest.approx(0.1)
    assert row.quality_n == 30
    assert row.quality_interval is not None
    assert row.quality_interval[0] > 0.09


def test_a_row_for_every_method_and_category() -> None:
    s = [step(0.01)] * 3
    rows = summarise(make([(q, m, s) for q in ("a1", "b1", "a2") for m in ("ar", "m")]))
    assert [(r.task, r.method) for r in rows] == [(c, m) for c in (OVERALL, "a", "b") for m in ("ar", "m")]
    assert rows[0].n_prompts == sum(r.n_prompts for r in rows[2::2]) == 3


def noisy(rng: np.random.Generator, n: int, noise: float, factor: float = 1.0) -> tuple[Any, ...]:
    work, tokens = rng.lognormal(0, 0.6, n), rng.integers(20, 128, n).astype(float)
    own = work / factor * np.exp(rng.normal(0, noise, n))
    return work * np.exp(rng.normal(0, noise, n)), tokens, own, tokens


@pytest.mark.parametrize(("n", "noise"), [(6, 0.02), (13, 0.07), (40, 0.07), (40, 0.005)])
def test_the_same_method_twice_is_not_distinguishable(n: int, noise: float) -> None:
    """A/A: 95 of 100 or more; identical runs of such benchmarks are known to differ by 7 %."""
    rng = RNG(3)
    found = [compare(speedup_interval(*noisy(rng, n, noise))) for _ in range(1000)]
    assert found.count("not significant") >= 945


@pytest.mark.parametrize("factor", [0.8, 1.3])
def test_a_real_difference_is_seen_and_covered(factor: float) -> None:
    rng = RNG(4)
    found = [speedup_interval(*noisy(rng, 30, 0.07, factor)) for _ in range(60)]
    assert sum(i is not None and i[0] <= factor <= i[1] for i in found) >= 0.93 * 60
    want = "faster" if factor > 1 else "slower"
    assert sum(compare(i) == want for i in found) == 60


def test_the_mean_interval_covers() -> None:
    rng = RNG(5)
    found = [mean_interval(rng.choice([0.0, 0.5, 1.0, -0.5], 24, p=[0.6, 0.2, 0.1, 0.1])) for _ in range(1000)]
    assert sum(i is not None and i[0] <= 0.15 <= i[1] for i in found) >= 935


def test_intervals_of_little_or_constant_data() -> None:
    for n in range(FEWEST):
        few = np.ones(n)
        assert speedup_interval(2 * few, few, few, few) is None
        assert mean_interval(few) is None
    ones = np.ones(FEWEST)
    low, high = speedup_interval(2 * ones, ones, ones, ones) or (0, 0)
    assert low == pytest.approx(2 / 1.01)
    assert high == pytest.approx(2 * 1.01)
    assert mean_interval(np.zeros(4)) == (0.0, 0.0)


def test_intervals_do_not_change_from_call_to_call() -> None:
    data = noisy(RNG(6), 20, 0.05)
    assert speedup_interval(*data) == speedup_interval(*data)


def broken(**changes: Any) -> Step:
    s = step(0.01, 3, 2)
    for name, value in changes.items():
        setattr(s, name, value)
    return s


@pytest.mark.parametrize(
    ("bad", "text"),
    [
        (broken(accepted_tokens=4), "depth of the draft"),
        (broken(accepted_tokens=9, draft_depth=9), "more accepted than drafted"),
        (broken(tokens=4), "kept more tokens"),
        (broken(draft_s=-0.001), "negative time"),
        (broken(verify_s=0.02), "parts of a step exceed"),
        (broken(verified_nodes=99), "verified than drafted"),
    ],
)
def test_impossible_steps_are_reported(bad: Step, text: str) -> None:
    row = overall(make([("a", "ar", [step(0.01)] * 3), ("a", "m", [bad])]))
    assert any(h.kind == "impossible" and text in h.text for h in row.health), row.health


def test_impossible_sums_are_reported() -> None:
    run = make([("a", "ar", [step(0.01)] * 3), ("a", "m", [step(0.01)] * 3)])
    run.rows[1].tokens = 9
    run.rows[1].wall_s = 0.05
    found = [finding.text for finding in overall(run).health]
    assert any("do not add up (1 sample" in h for h in found)
    assert any("wall time" in h for h in found)


def quick(factor: float, rest: float, depth: int = 0) -> list[tuple[Any, ...]]:
    """Eight prompts; the method's verifying takes `factor` of the reference's, everything else `rest`."""
    verify, other = 0.006 * factor, 0.004 * rest / 3
    made = Step(depth * 2, depth * 2, depth, 0, 1, other, verify, other, other, verify + 3 * other)
    return [(f"a{i}", m, [step(0.01) if m == "ar" else made] * 20) for i in range(8) for m in ("ar", "m")]


def test_answers_that_took_less_than_their_steps_can_are_reported_once_that_is_beyond_noise() -> None:
    row = overall(make(quick(1.0, 0.1)))
    assert any("impossible: at least 1." in str(h) and "with 1.00 tokens per step" in str(h) for h in row.health)
    assert row.speedup_within_bound is False and row.speedup is None
    assert sample_checks.too_fast((0.9, 1.4), 1.0) == []
    assert sample_checks.speedup_within_bound((0.9, 1.4)) is True


def test_only_a_method_that_drafts_may_have_cheaper_passes() -> None:
    """Several rows may use another kernel than one: a speedup over tau is right then, if nothing else is cheaper."""
    drafting = overall(make(quick(0.6, 1.0, depth=2)))
    assert (drafting.speedup or 0) > 1.15 > (
        drafting.mean_acceptance_length or 0
    ) and drafting.speedup_within_bound is True
    assert overall(make(quick(0.6, 1.0))).speedup_within_bound is False, (
        "it verifies a single row, as the reference does"
    )
    assert overall(make(quick(0.6, 0.1, depth=2))).speedup_within_bound is False, (
        "and verifying does not explain the rest"
    )


def test_the_least_time_is_of_each_prompt() -> None:
    """More tokens a step where steps of both take long: the speedup exceeds tau, and nothing is wrong."""
    made: list[tuple[Any, ...]] = []
    for i in range(8):
        slow, kept = (0.04, 4) if i % 2 else (0.002, 0)
        made += [(f"a{i}", "ar", [step(slow)] * 50, 1e-6)]
        made += [(f"a{i}", "m", [step(slow, depth=4, accepted=kept)] * (50 // (kept + 1)), 1e-6)]
    row = overall(make(made))
    assert (
        (row.speedup or 0) > (row.mean_acceptance_length or 0) + 1
        and row.speedup_within_bound is True
        and row.health == ()
    )


def test_a_speedup_beyond_tau_without_an_interval_is_no_finding_but_not_checked() -> None:
    """One question states nothing of noise, so a step that seems 18% cheaper than one of ar is no impossibility."""
    run = make([("a", "ar", [step(0.01)] * 20, 1e-9), ("a", "m", [step(0.0085)] * 20, 1e-9)])
    row = overall(run)
    assert (row.speedup_interval, row.health, row.speedup_within_bound) == (None, (), None)
    assert row.speedup == pytest.approx(1.18, abs=0.01)


def test_answers_that_are_longer_than_the_references_may_exceed_tau() -> None:
    """Prefill weighs less in a longer answer: a speedup over tau is no impossibility."""
    made = [(f"a{i}", m, [step(0.01)] * (4 if m == "ar" else 40), 1.0) for i in range(8) for m in ("ar", "m")]
    row = overall(make(made))
    assert (row.speedup or 0) > 5
    assert row.health == () and row.speedup_within_bound is True


def test_unstable_times_are_reported() -> None:
    calm = [(f"a{i}", m, [step(0.01)] * 9, 0.001) for i in range(8) for m in ("ar", "m")]
    assert overall(make(calm), "ar").unstable is False
    assert overall(make(calm[:6]), "ar").unstable is None  # three prompts are too few to state so
    wild = [(f"a{i}", m, [step(0.01 * (1 + i % 2))] * 9, 0.001) for i in range(8) for m in ("ar", "m")]
    assert overall(make(wild), "ar").unstable
    assert overall(make(wild)).unstable is None  # a method's steps may differ in work from prompt to prompt
    twice = [("a", m, [step(0.01 * (1 + r))] * 9, 0.001, None, 0, r) for r in (0, 1) for m in ("ar", "m")]
    assert overall(make(twice)).unstable
    steady = [("a", m, [step(0.01)] * 9, 0.001, None, 0, r) for r in range(4) for m in ("ar", "m")]
    assert overall(make(steady)).unstable is False
    assert overall(make(steady[:4])).unstable is None  # two repeats of one answer


def test_output_match_counts_and_differences_are_reported() -> None:
    run = make([(q, m, [step(0.01)] * 3) for q in ("a", "b", "c") for m in ("ar", "m")])
    run.output_match = [
        OutputMatch(q, 0, "m", 0, v) for q, v in zip("abc", ("identical", "numerical tie", "mismatch"), strict=True)
    ]  # type: ignore[arg-type]
    row = overall(run)
    assert row.output_match == {"identical": 1, "numerical tie": 1, "mismatch": 1}
    assert [h.kind for h in row.health] == ["mismatch", "numerical-tie"]
    run.manifest["model"]["dtype"] = "bfloat16"
    assert [h.kind for h in overall(run).health] == ["mismatch"]


@pytest.mark.parametrize(("questions", "verdict"), [(4, "not shown"), (100, "not shown"), (160, "non-inferior")])
def test_equal_scores_of_few_questions_do_not_show_that_a_method_is_no_worse(questions: int, verdict: str) -> None:
    """A change that nobody saw in n questions may be one in n / 3: the margin is 0.02, so it takes 150."""
    steps = [step(0.01)] * 3
    made = [(f"a{i}", method, steps, 0.1, 1.0) for i in range(questions) for method in ("ar", "m")]
    row = overall(make(made, lossless=False))
    assert row.quality_verdict == verdict
    assert row.quality_interval is not None and row.quality_interval[0] == pytest.approx(-3 / questions, rel=0.4)
    assert overall(make(made)).quality_interval == (0, 0), (
        "a method that promises the same answers promises their score"
    )


def test_few_changed_questions_show_neither_worse_nor_no_worse() -> None:
    changes = {0: -1.0, 4: -0.005}
    assert [non_inferiority(conservative_interval(np.full(4, change)), 0.02) for change in (-0.25, 0.25)] == [
        "not shown"
    ] * 2
    low, high = conservative_interval(np.array([changes.get(i, 0.0) for i in range(400)])) or (0, 0)
    assert -0.02 < low < -1 / 400 < high, "one of 400 lost: at most 1.2% of all are"
    assert non_inferiority(conservative_interval(np.full(5, -0.25)), 0.02) == "inferior"
    noise = RNG(1).normal(0, 0.05, 400)
    assert conservative_interval(noise) == mean_interval(noise)
