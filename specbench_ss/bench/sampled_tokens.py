"""Statistics of one sampled answer under the target's distribution.

Each token x of an answer is a sample from p, the model's distribution after the earlier tokens. The functions here
compare x with p; `stats/betting.py` has the score of their results. docs/design/sampled-output.md has the reasons.
"""

from __future__ import annotations

import hashlib
import math
import random
from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import Tensor

from specbench_ss.bench.timed_sample import oom_message
from specbench_ss.engine.decoder import Decoder
from specbench_ss.engine.numerics import near_tie_drop
from specbench_ss.engine.sampling import SamplingParams
from specbench_ss.engine.verify import Offer
from specbench_ss.runs.output_match import not_compared
from specbench_ss.runs.records import OutputMatch, SampleRecord
from specbench_ss.stats.betting import OUTSIDE, PIT_BINS, TILTS, SampledTokens, acceptance

UNDERFLOW = 100.0  # nats below the most probable token at which a probability is 0 in float32
SUMMED = 1e-5  # generous bound of float32 errors in the cumulative sum of probabilities


def judge_sampled(
    decoder: Decoder, prompt: Sequence[int], row: SampleRecord, sampling: SamplingParams, offers: Sequence[Offer] = ()
) -> OutputMatch:
    """Return the verdict on a sampled answer: its tokens compared with the distributions of the decoder's model.

    decoder: of the method whose distribution the answer should follow, for a fresh pass of its model.
    offers: draft candidates of each token; empty if unknown.
    """
    answer, seed = list(row.token_ids or ()), proof_seed(row)
    at: Sequence[int] = range(len(answer))
    if decoder.one_position_per_pass:
        at = positions(len(answer), seed)
    tokens, drafted = [answer[i] for i in at], [offers[i] for i in at if i < len(offers)]
    try:
        with torch.inference_mode():
            statistics = compare(
                _logits(decoder, prompt, answer, at), tokens, drafted, sampling, str(decoder.target.dtype), seed
            )
    except Exception as e:  # the sample is valid but not compared
        return not_compared(row, f"no logits to test it: {oom_message(e, decoder)}")
    return OutputMatch(*row.key, verdict="sampled", sampled=statistics)


def positions(n: int, seed: int) -> list[int]:
    """Return positions of an answer of n tokens, randomly spaced by up to their own index: about 18 of 1,000.

    They do not depend on n, which depends on the tokens; otherwise EOS tokens would be too frequent.
    """
    rng, at, chosen = random.Random(seed), 0, list[int]()
    while at < n:
        chosen.append(at)
        at += 1 + rng.randint(0, at)
    return chosen


def _logits(decoder: Decoder, prompt: Sequence[int], answer: Sequence[int], at: Sequence[int]) -> Iterator[Tensor]:
    """Yield the logits at these positions of an answer, after the model's logits processors."""
    one_each, processors, start = decoder.one_position_per_pass, decoder.target.processors, 0
    parts = (decoder.next_logits(prompt, answer[:n])[None] for n in at)
    for i, part in enumerate(parts if one_each else decoder.answer_logits(prompt, answer)):
        if not bool(part.isfinite().all()):
            raise ValueError("the logits of a fresh pass are not finite")
        start = at[i] if one_each else start
        yield part if processors is None else processors.process_answer(part, prompt, answer, start)
        start += len(part)


def proof_seed(row: SampleRecord) -> int:
    """Return a seed unique to this sample, different from its sampling seed."""
    return int.from_bytes(hashlib.sha256(repr((row.seed, row.key)).encode()).digest()[:8], "big") >> 1


def compare(
    logits: Iterable[Tensor],
    answer: Sequence[int],
    offers: Sequence[Offer],
    sampling: SamplingParams,
    dtype: str,
    seed: int,
) -> SampledTokens:
    """Compare the tokens of an answer with the distributions that they should be sampled from.

    logits: float32 [n, V] each, at successive tokens of the answer; they may end before the answer.
    offers: draft candidates of each token; empty if unknown.
    dtype: of the model, for tolerances.
    seed: of the uniform numbers that make the PIT values continuous.
    """
    rng, at = torch.Generator().manual_seed(seed), 0
    total = SampledTokens()
    for part in logits:
        tokens = torch.tensor(answer[at : at + len(part)], device=part.device)
        uniform = torch.rand(len(tokens), generator=rng, dtype=torch.float64)
        p = sampling.probs(part)
        total += _compare(part, p, tokens, uniform, sampling, dtype)
        total += _acceptance(p, tokens.tolist(), offers[at : at + len(tokens)])
        at += len(tokens)
    return total


def _compare(
    logits: Tensor, p: Tensor, tokens: Tensor, uniform: Tensor, sampling: SamplingParams, dtype: str
) -> SampledTokens:
    """Compare tokens [n] with logits and their distributions [n, V]. uniform: [n], in [0, 1)."""
    p_x = p.gather(1, tokens[:, None])
    ids = torch.arange(p.shape[1], device=p.device)
    before = (p > p_x) | ((p == p_x) & (ids < tokens[:, None]))  # by probability, ties by id
    above = (p * before).sum(1).double().cpu()
    probability = p_x[:, 0].double().cpu()
    bins = ((above + uniform * probability) * PIT_BINS).long().clamp(0, PIT_BINS - 1)
    log_p_x = p_x[:, 0].log()
    for i in (probability == 0).nonzero()[:, 0].tolist():
        outside = _clearly_outside(logits[i], int(tokens[i]), sampling, dtype)
        bins[i] = OUTSIDE if outside else PIT_BINS - 1
        if not outside and int((p[i] > 0).sum()) == sampling.top_k:  # this token replaced the last kept one
            last = p[i][p[i] > 0].min()
            bins[i] = min(PIT_BINS - 1, int((1 - float(uniform[i] * last)) * PIT_BINS))
            log_p_x[i] = last.log()
        elif not outside:
            log_p_x[i] = _log_p_if_kept(logits[i], p[i], int(tokens[i]), sampling)
    inside = bins != OUTSIDE
    log_p_x = log_p_x.double().cpu()[inside]
    norms = [norm.double().cpu()[inside].sum() for norm in _norms(p)]
    ratios = [tilt * log_p_x.sum() - norm for tilt, norm in zip(TILTS, norms, strict=True)]
    entropy = torch.special.entr(p).sum(1).double().cpu()
    squares = (p * p.log().nan_to_num(neginf=0.0).square()).sum(1).double().cpu()
    return SampledTokens(
        pit_counts=torch.bincount(bins, minlength=PIT_BINS + 1).tolist(),
        log_ratios=[float(ratio) for ratio in ratios],
        surplus=float(log_p_x.sum() + entropy[inside].sum()),
        variance=float((squares - entropy.square()).clamp_min(0).sum()),
        rounding=sum(near_tie_drop(dtype, best) for best in logits.amax(1).tolist()) / sampling.temperature,
    )


def _acceptance(p: Tensor, tokens: Sequence[int], offers: Sequence[Offer]) -> SampledTokens:
    """Compare the frequency of accepted draft tokens with p [n, V].

    Deterministic candidates are accepted with their total probability under p. The first of sampled ones is accepted
    with min(1, p / q), independent of the others.
    """
    candidates = [(i, x) for i, offer in enumerate(offers) for x in dict.fromkeys(offer.tokens)]
    if not candidates:
        return SampledTokens()
    rows, columns = (torch.tensor(part, device=p.device) for part in zip(*candidates, strict=True))
    chances = dict(zip(candidates, p[rows, columns].tolist(), strict=True))
    statistics = SampledTokens()
    for i, (token, offer) in enumerate(zip(tokens, offers, strict=False)):
        if offer.tokens:
            own = offer.tokens if offer.q is None else offer.tokens[:1]
            total = sum(chances[i, x] for x in dict.fromkeys(own))
            statistics += acceptance(_chance(total, offer.q), token in own)
    return statistics


def _chance(p: float, q: float | None) -> float:
    """Return the acceptance probability: p of deterministic candidates (q is None), min(1, p / q) of a sampled one."""
    if not q:
        return min(1.0, p) if q is None else float(p > 0)
    return min(1.0, p / q)


def _norms(p: Tensor) -> list[Tensor]:
    """Return log sum p^(1 + tilt) of each row, for each of `TILTS`, by square roots, which are faster than powers."""
    half = p.sqrt()
    quarter = half.sqrt()
    eighth = quarter.sqrt()
    sixteenth = eighth.sqrt()
    powers = (half * quarter, half * quarter * eighth * sixteenth, p * sixteenth, p * quarter, p * p)
    return [power.sum(1).log() for power in powers]


def _log_p_if_kept(logits: Tensor, p: Tensor, token: int, sampling: SamplingParams) -> float:
    """Return log p(token) with the token added to the kept set."""
    whole = (logits / sampling.temperature).log_softmax(-1)
    return float(whole[token] - whole[p > 0].logsumexp(-1))


def _clearly_outside(logits: Tensor, token: int, sampling: SamplingParams, dtype: str) -> bool:
    """Return True if top-k or top-p excludes the token beyond rounding. logits: [V].

    Only tokens whose logit is larger by more than a numerical tie count as before it. A numerical tie also bounds
    how far rounding can shift probability between these tokens and the rest.
    """
    tie = near_tie_drop(dtype, float(logits.max()))
    before = logits > logits[token] + tie
    if sampling.top_k and int(before.sum()) >= sampling.top_k:
        return True
    if sampling.top_p >= 1:  # without any filter
        return not sampling.top_k and float(logits.max() - logits[token] - tie) / sampling.temperature > UNDERFLOW
    mass = float(SamplingParams(sampling.temperature, top_k=sampling.top_k).probs(logits)[before].sum())
    limit = sampling.top_p + SUMMED
    return limit < 1 and mass > 0 and _log_odds(mass) - tie / sampling.temperature >= _log_odds(limit)


def _log_odds(p: float) -> float:
    return math.inf if p >= 1 else math.log(p / (1 - p))
