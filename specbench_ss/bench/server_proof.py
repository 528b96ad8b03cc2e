"""Proof of a served engine's outputs, by the log-probabilities that it reports.

Greedy: where an output first differs from the baseline's, the baseline's log-probabilities decide whether both tokens
are equally good to the model. Sampled: every token is compared with the distribution that it should be drawn from, of
which a server reports the most probable tokens. Requests of this module are not timed.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from specbench_ss.bench.sampled_tokens import compare, proof_seed
from specbench_ss.bench.server_client import Answer, AnswerError, Message, Server, TokenLogprob
from specbench_ss.bench.server_counts import NEUTRAL
from specbench_ss.engine.numerics import near_tie_drop
from specbench_ss.engine.sampling import SamplingParams
from specbench_ss.errors import error_text
from specbench_ss.runs.output_match import match_tokens, not_compared
from specbench_ss.runs.records import OutputMatch, SampleRecord
from specbench_ss.stats.betting import SampledTokens, tail

TOP = 20  # log-probabilities that are requested for each position; the limit of OpenAI's interface and of vLLM
DTYPE = "bfloat16"  # assumed of a server's model, for the bound of numerical ties
PROVED = 4096  # sampled tokens of a server after which no more are compared
PROVED_EACH = 64  # tokens of a request that are compared at most
FILTERS = {  # settings that change the distribution
    "top_p", "top_k", "min_p", "repetition_penalty", "repeat_penalty", "presence_penalty", "frequency_penalty",
    "logit_bias",
}  # fmt: skip
NO_LOGPROBS = "the server sends no log-probabilities"


def fields(server: Server) -> Mapping[str, Any]:
    """Return the fields of a request by which a server reports log-probabilities."""
    by_id = {"return_tokens_as_token_ids": True} if server.engine == "vLLM" else {}  # texts of tokens are ambiguous
    return {"logprobs": True, "top_logprobs": TOP, **by_id}


def match_text(row: SampleRecord, reference: SampleRecord) -> OutputMatch:
    """Compare two outputs as texts, reasoning included, for servers that send no token ids."""
    actual, expected = ((one.reasoning or "") + (one.text or "") for one in (row, reference))
    if not actual and not expected:
        return not_compared(row, "both outputs have no text")
    if (row.text, row.reasoning) == (reference.text, reference.reasoning):
        return OutputMatch(*row.key, verdict="identical")
    shorter = min(len(actual), len(expected))
    at = next((i for i in range(shorter) if actual[i] != expected[i]), shorter)
    return OutputMatch(*row.key, verdict="text differs", reason=f"from character {at} on")


def match_greedy(
    row: SampleRecord,
    reference: SampleRecord,
    baseline: Server,
    messages: Sequence[Message],
    settings: Mapping[str, Any],
) -> OutputMatch:
    """Compare two greedy outputs, by token ids if both servers sent them.

    baseline: the server of the reference, which is asked again for its log-probabilities at the first difference.
    """
    expected, actual = reference.token_ids or [], row.token_ids or []
    if not expected or not actual:
        return match_text(row, reference)
    position = match_tokens(row, reference)
    if isinstance(position, OutputMatch):
        return position
    try:
        again = baseline.ask(messages, {**settings, **fields(baseline), "max_tokens": position + 1})
    except AnswerError as e:
        return _unexplained(row, position, f"no log-probabilities to explain it: {error_text(e)}")
    return _explained(row, position, (expected, actual), again)


def _unexplained(row: SampleRecord, position: int, reason: str) -> OutputMatch:
    return OutputMatch(*row.key, verdict="text differs", first_difference=position, reason=reason)


def _explained(row: SampleRecord, position: int, outputs: tuple[list[int], list[int]], again: Answer) -> OutputMatch:
    """Return a numerical tie if both tokens are about as probable, else a mismatch."""
    expected, actual = outputs
    if again.token_ids[: position + 1] != expected[: position + 1]:
        return _unexplained(row, position, "the baseline's own output changed when it was asked again")
    if len(again.logprobs) <= position:
        return _unexplained(row, position, NO_LOGPROBS)
    known = {one.token: one.logprob for one in again.logprobs[position].top_logprobs or ()}
    if not any(token.startswith("token_id:") for token in known):
        return _unexplained(row, position, "the server's log-probabilities have no token ids")
    best, second = (sorted(known.values(), reverse=True) + [-math.inf] * 2)[:2]
    chosen = [known.get(f"token_id:{output[position]}", -math.inf) for output in (expected, actual)]
    drop, gap = best - min(chosen), best - second
    tie = drop <= near_tie_drop(DTYPE, 0.0)
    known_gap, known_drop = (value if math.isfinite(value) else None for value in (gap, drop))
    reason = "" if math.isfinite(drop) else f"not among the {TOP} most probable tokens"
    return OutputMatch(*row.key, "numerical tie" if tie else "mismatch", position, known_gap, known_drop, reason)


def match_sampled(
    row: SampleRecord, server: Server, messages: Sequence[Message], settings: Mapping[str, Any]
) -> OutputMatch:
    """Request a sampled output again, with log-probabilities, and compare its tokens with their distributions."""
    if reason := _untestable(server, settings):
        return not_compared(row, reason)
    most = min(PROVED_EACH, settings["max_tokens"])
    try:
        answer = server.ask(messages, {**settings, **fields(server), "max_tokens": most})
    except AnswerError as e:
        return not_compared(row, f"no log-probabilities to test it: {error_text(e)}")
    if not any(one.top_logprobs for one in answer.logprobs):
        return not_compared(row, NO_LOGPROBS)
    if len(answer.logprobs) != answer.tokens or not all(one.top_logprobs for one in answer.logprobs):
        return not_compared(row, "the server sends no log-probabilities of some tokens")
    statistics = sampled_tokens(answer.logprobs, settings["temperature"], proof_seed(row))
    return OutputMatch(*row.key, "sampled", sampled=statistics)


def _untestable(server: Server, settings: Mapping[str, Any]) -> str:
    """Return why sampled outputs cannot be compared with a server's log-probabilities; '' if they can."""
    if server.engine not in NEUTRAL:
        return "the sampling defaults of this server are not known"
    if server.engine == "SGLang" and settings["temperature"] != 1:
        return "SGLang reports log-probabilities after --temperature is applied"
    if changed := sorted(FILTERS & settings.keys()):
        return f"servers report distributions before {changed[0]} is applied"
    return ""


def sampled_tokens(logprobs: Sequence[TokenLogprob], temperature: float, seed: int) -> SampledTokens:
    """Compare sampled tokens with the most probable ones at their positions, which a server reports at temperature 1.

    Only tokens above the second to last reported one are used: the last place is the chosen token's in vLLM if it is
    not among the others, and tokens as probable as the one before it may or may not be reported. A chosen token among
    them follows their distribution; whether it is among them follows their probability in all.
    """
    total = SampledTokens()
    rows, chosen = list[list[float]](), list[int]()
    for one in logprobs:
        reported = sorted(one.top_logprobs or (), key=lambda top: -top.logprob)
        limit = reported[-2].logprob if len(reported) > 1 else math.inf
        best = [top for top in reported if top.logprob > limit]
        names = [top.token for top in best]
        if not best or len(set(names)) < len(names):
            continue
        values = [top.logprob for top in best]
        total += tail(_tail_bound(values, limit, temperature), one.token not in names)
        if one.token in names:
            chosen.append(names.index(one.token))
            rows.append(values + [-math.inf] * (TOP - len(values)))
    if not rows:
        return total
    logits = torch.tensor(rows).clamp_min(torch.finfo(torch.float32).min)
    return total + compare([logits], chosen, (), SamplingParams(temperature), "float32", seed)


def _tail_bound(logprobs: Sequence[float], limit: float, temperature: float) -> float:
    """Return an upper bound of the probability of all other tokens at a temperature.

    logprobs: of the most probable tokens at temperature 1. limit: no other token has more. Such a token of probability
    p has the weight p^(1/T) <= p * exp(limit)^(1/T - 1) where T <= 1. Above 1 nothing is known.
    """
    if temperature > 1:
        return 1.0
    power = 1 / temperature
    rest = max(0.0, 1 - math.fsum(map(math.exp, logprobs))) * math.exp(limit * (power - 1))
    return rest / (rest + math.fsum(math.exp(value * power) for value in logprobs))
