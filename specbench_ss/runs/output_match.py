"""Output match: whether two answers are the same, and the numerical tie, length or fault that explains a difference.

Whole sequences are compared, never only their common part.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import replace

from specbench_ss.engine.decoder import Decoder, Step
from specbench_ss.engine.numerics import near_tie_drop
from specbench_ss.errors import error_text
from specbench_ss.runs.records import OutputMatch, SampleRecord, step_line
from specbench_ss.runs.step_files import read_step_line
from specbench_ss.user_files import encoded


def check_readable(row: SampleRecord, steps: Sequence[Step]) -> None:
    """Raise ValueError or TypeError where the lines of a sample could not be read again.

    That is where a count is negative or not a whole number, or a time is not finite.
    """
    SampleRecord.read(encoded(row.as_dict()))
    for index, step in enumerate(steps):
        read_step_line(encoded(step_line(row.key, index, step)))


FAILED = ("the sample failed", "the reference failed")  # why there may be no verdict; not for ever


def first_difference(a: Sequence[int], b: Sequence[int]) -> int | None:
    """Return the index of the first token that differs or that only one sequence has; None for equal sequences."""
    common = min(len(a), len(b))
    for i in range(common):
        if a[i] != b[i]:
            return i
    return None if len(a) == len(b) else common


def judge(decoder: Decoder, prompt_ids: list[int], reference: SampleRecord, row: SampleRecord) -> OutputMatch:
    """Return the verdict on a greedy answer to the same prompt as the reference's. Both samples must have succeeded.

    decoder: the reference's decoder, which is asked for its logits at the place where the answers part.
    """
    expected, got = list(reference.token_ids or ()), list(row.token_ids or ())
    at = first_difference(expected, got)
    if at is None:
        return OutputMatch(*row.key, verdict="identical")
    if at == min(len(expected), len(got)):
        reason = f"{len(got)} tokens ({row.finish}) for {len(expected)} ({reference.finish})"
        return OutputMatch(*row.key, verdict="length differs", first_difference=at, reason=reason)
    return _explained(decoder, prompt_ids, expected[:at], (expected[at], got[at]), row)


def judge_alone(decoder: Decoder, prompt_ids: list[int], row: SampleRecord, reason: str) -> OutputMatch:
    """Return the verdict on a greedy answer of an autoregressive method that is compared with no other one.

    One of its tokens, drawn by the sample's key, must be the likeliest by the method's own `next_logits`. reason: why
    the answer is not compared, which is the verdict then.
    """
    tokens = list(row.token_ids or ())
    at = random.Random(repr(row.key)).randrange(len(tokens))
    found = _explained(decoder, prompt_ids, tokens[:at], (tokens[at], tokens[at]), row)
    if found.verdict != "mismatch":
        return not_compared(row, reason)
    return replace(found, reason=found.reason or "not the likeliest token by its own next_logits")


def _explained(
    decoder: Decoder, prompt: list[int], answer: list[int], chosen: tuple[int, int], row: SampleRecord
) -> OutputMatch:
    """Return a numerical tie where both tokens may follow the answer by the decoder's logits, else a mismatch."""
    at = len(answer)
    try:
        logits = decoder.next_logits(prompt, answer).float()
        best, second = logits.topk(2).values.tolist()
        gap, drop = best - second, best - min(float(logits[token]) for token in chosen)
    except Exception as e:  # a difference that nothing explains is never called harmless
        reason = f"no logits to explain it: {error_text(e)}"
        return OutputMatch(*row.key, verdict="mismatch", first_difference=at, reason=reason)
    if not (math.isfinite(gap) and math.isfinite(drop)):
        return OutputMatch(*row.key, verdict="mismatch", first_difference=at, reason="logits are not finite")
    tie = drop <= near_tie_drop(str(decoder.target.dtype), best)
    return OutputMatch(*row.key, "numerical tie" if tie else "mismatch", at, gap, drop)


def not_compared(row: SampleRecord, reason: str) -> OutputMatch:
    """Return the verdict for an answer whose equality is not promised or cannot be tested."""
    return OutputMatch(*row.key, verdict="not compared", reason=reason)
