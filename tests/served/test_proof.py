"""Outputs of servers against the log-probabilities that they report."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence

import pytest

from specbench_ss.bench.server_client import Answer, TokenLogprob
from specbench_ss.bench.server_proof import TOP, _explained, _tail_bound, match_text, sampled_tokens
from specbench_ss.runs.records import SampleRecord
from specbench_ss.stats.betting import BIASED, SampledTokens, bound, pool
from tests.tiny import few

VOCABULARY = 60


def distribution(rng: random.Random, temperature: float) -> tuple[list[float], list[float]]:
    """Return log-probabilities at temperature 1, best first, and the probabilities at the temperature."""
    logits = sorted((rng.gauss(0, 2.0) for _ in range(VOCABULARY)), reverse=True)
    norm = math.log(math.fsum(map(math.exp, logits)))
    logprobs = [x - norm for x in logits]
    powers = [math.exp(x / temperature) for x in logprobs]
    return logprobs, [x / math.fsum(powers) for x in powers]


def reported(logprobs: Sequence[float], chosen: int) -> TokenLogprob:
    """Return a position as vLLM reports it: the chosen token first, then the most probable others, 20 in all."""
    others = [i for i in range(VOCABULARY) if i != chosen][: TOP - 1]
    top = [TokenLogprob(f"token_id:{i}", logprobs[i]) for i in (chosen, *others)]
    return TokenLogprob(f"token_id:{chosen}", logprobs[chosen], top)


def sampled(temperature: float, of: float, answers: int = 60, seed: int = 0) -> SampledTokens:
    """Return the test of answers of 64 tokens, drawn at another temperature than they are tested for."""
    rng, found = random.Random(seed), []
    for number in range(answers):
        positions = []
        for _ in range(64):
            logprobs, _ = distribution(rng, 1.0)
            weights = [math.exp(x / of) for x in logprobs]
            positions.append(reported(logprobs, rng.choices(range(VOCABULARY), weights)[0]))
        found.append(sampled_tokens(positions, temperature, number))
    return pool(found)


@few(1)
@pytest.mark.parametrize("temperature", [0.7, 1.0, 1.3])
def test_tokens_of_the_right_distribution_are_never_called_biased(temperature: float) -> None:
    pooled = sampled(temperature, temperature)
    assert bound(pooled) > 1e-3 and pooled.tokens + pooled.tail == 60 * 64
    assert temperature > 1 or pooled.tail <= pooled.tail_expected + 5 * math.sqrt(pooled.tail_expected)


@few(2)
@pytest.mark.parametrize(("temperature", "of"), [(0.7, 1.0), (1.0, 0.7), (1.0, 1e9), (0.7, 1e9)])
def test_tokens_of_another_distribution_are_found(temperature: float, of: float) -> None:
    assert bound(sampled(temperature, of)) < BIASED


@pytest.mark.parametrize("temperature", [0.3, 0.7, 1.0])
def test_the_bound_of_improbable_tokens_is_one(temperature: float) -> None:
    rng = random.Random(1)
    for _ in range(50):
        logprobs, p = distribution(rng, temperature)
        true, above = math.fsum(p[TOP - 2 :]), _tail_bound(logprobs[: TOP - 2], logprobs[TOP - 2], temperature)
        assert true <= above * (1 + 1e-9)
        assert temperature < 1 or above == pytest.approx(true)


def test_a_tie_at_the_end_of_the_reported_tokens_decides_nothing() -> None:
    """The chosen token is reported in place of another one that is as probable: neither counts among the others."""
    top = [-1.0, -2.0, -3.0, -3.0]
    listed = [TokenLogprob(str(i), logprob) for i, logprob in enumerate(top)]
    for chosen in ("2", "3"):
        others = [one for one in listed if one.token != chosen][:3]
        position = TokenLogprob(chosen, -3.0, [*[one for one in listed if one.token == chosen], *others[:2]])
        found = sampled_tokens([position], 1.0, 0)
        assert (found.tokens, found.tail) == (0, 1)


def row(text: str, ids: list[int] | None = None, reasoning: str | None = None) -> SampleRecord:
    record = SampleRecord("q", 0, "m", 0, "task", 0, 0, 0, "", "", "ok")
    record.text, record.token_ids, record.reasoning = text, ids, reasoning
    return record


def test_texts_compare_with_their_reasoning_and_nothing_is_not_identical() -> None:
    assert match_text(row("a"), row("a")).verdict == "identical"
    assert match_text(row("", reasoning="one"), row("", reasoning="two")).verdict == "text differs"
    assert match_text(row(""), row("")).verdict == "not compared"
    assert match_text(row("abcd"), row("abxd")).reason == "from character 2 on"


@pytest.mark.parametrize(("logprob", "verdict"), [(-1.1, "numerical tie"), (-3.0, "mismatch")])
def test_a_difference_is_a_tie_only_where_both_tokens_are_about_as_probable(logprob: float, verdict: str) -> None:
    top = [TokenLogprob("token_id:5", -1.0), TokenLogprob("token_id:6", logprob)]
    again = Answer(token_ids=[4, 5], logprobs=[TokenLogprob("token_id:4", 0.0), TokenLogprob("token_id:5", -1.0, top)])
    outputs = ([4, 5, 9], [4, 6, 7])
    found = _explained(row(""), 1, outputs, again)
    assert (found.verdict, found.first_difference) == (verdict, 1)
    assert _explained(row(""), 1, ([4, 5], [4, 7]), again).verdict == "mismatch"  # it is not among the reported
    changed = Answer(token_ids=[4, 6], logprobs=again.logprobs)
    assert _explained(row(""), 1, outputs, changed).verdict == "text differs"
