"""Output match: comparison of two outputs, with the cause of a difference: numerical tie, length or mismatch.

Whole sequences are compared, never only their common part.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from specbench_ss.engine.decoder import Decoder, Step
from specbench_ss.engine.numerics import near_tie_drop
from specbench_ss.errors import error_text
from specbench_ss.runs.records import OutputMatch, SampleRecord, baseline_of, step_line
from specbench_ss.runs.step_files import read_step_line
from specbench_ss.user_files import encoded


def check_readable(row: SampleRecord, steps: Sequence[Step]) -> None:
    """Raise ValueError or TypeError if the lines of a sample could not be read again.

    That is the case for a negative or fractional count, or a time that is not finite.
    """
    SampleRecord.read(encoded(row))
    for index, step in enumerate(steps):
        read_step_line(encoded(step_line(row.key, index, step)))


FAILED = ("the sample failed", "the reference failed")  # reasons of temporarily missing verdicts


def is_wrong(verdict: str, served: bool) -> bool:
    """Return whether a verdict shows a fault of the method. A server may leave out the end token of an output."""
    return verdict == "mismatch" or (verdict == "length differs" and not served)


def wrong_methods(verdicts: Iterable[OutputMatch], manifest: Mapping[str, Any]) -> set[str]:
    """Return the methods with wrong outputs. A server of a model with another name than the baseline's has none."""
    models = {m["label"]: {**m["resolved"], **m["served"]}.get("model") for m in manifest["methods"] if "served" in m}
    wrong = {one.method for one in verdicts if is_wrong(one.verdict, bool(models))}
    return {label for label in wrong if models.get(label) == models.get(baseline_of(manifest))}


def first_difference(a: Sequence[int], b: Sequence[int]) -> int | None:
    """Return the index of the first differing or missing token; None for equal sequences."""
    common = min(len(a), len(b))
    for i in range(common):
        if a[i] != b[i]:
            return i
    return None if len(a) == len(b) else common


def match_tokens(row: SampleRecord, reference: SampleRecord) -> OutputMatch | int:
    """Return the verdict on two equal outputs, or outputs of which one is a prefix of the other.

    Of others: the index of the first different token, which log-probabilities have to explain.
    """
    expected, actual = reference.token_ids or [], row.token_ids or []
    position = first_difference(expected, actual)
    if position is None:
        return OutputMatch(*row.key, verdict="identical")
    if position == min(len(expected), len(actual)):
        reason = f"{len(actual)} tokens ({row.finish}) for {len(expected)} ({reference.finish})"
        return OutputMatch(*row.key, verdict="length differs", first_difference=position, reason=reason)
    return position


def judge(decoder: Decoder, prompt_ids: list[int], reference: SampleRecord, row: SampleRecord) -> OutputMatch:
    """Return the verdict on a greedy output for the same prompt as the reference's. Both samples have succeeded.

    decoder: the reference's decoder, for its logits at the first difference.
    """
    position = match_tokens(row, reference)
    if isinstance(position, OutputMatch):
        return position
    expected, actual = list(reference.token_ids or ()), list(row.token_ids or ())
    return _explain_difference(decoder, prompt_ids, expected[:position], (expected[position], actual[position]), row)


def judge_alone(decoder: Decoder, prompt_ids: list[int], row: SampleRecord, reason: str) -> OutputMatch:
    """Return the verdict on a greedy output of an autoregressive method without a reference.

    One of its tokens, chosen by the sample's key, must be the argmax of the method's own `next_logits`. reason: of the
    missing comparison, for the verdict.
    """
    tokens = list(row.token_ids or ())
    position = random.Random(repr(row.key)).randrange(len(tokens))
    match = _explain_difference(decoder, prompt_ids, tokens[:position], (tokens[position], tokens[position]), row)
    if match.verdict != "mismatch":
        return not_compared(row, reason)
    return replace(match, reason=match.reason or "not the likeliest token by its own next_logits")


def _explain_difference(
    decoder: Decoder, prompt: list[int], answer: list[int], chosen: tuple[int, int], row: SampleRecord
) -> OutputMatch:
    """Return a numerical tie if the decoder's logits allow both tokens, else a mismatch."""
    position = len(answer)
    try:
        logits = decoder.next_logits(prompt, answer).float()
        if (processors := decoder.target.processors) is not None:
            logits = processors.process_answer(logits[None], prompt, answer, position)[0]
        best, second = logits.topk(2).values.tolist()
        gap, drop = best - second, best - min(float(logits[token]) for token in chosen)
    except Exception as e:  # without logits a difference counts as a mismatch
        reason = f"no logits to explain it: {error_text(e)}"
        return OutputMatch(*row.key, verdict="mismatch", first_difference=position, reason=reason)
    if not (math.isfinite(gap) and math.isfinite(drop)):
        return OutputMatch(*row.key, verdict="mismatch", first_difference=position, reason="logits are not finite")
    tie = drop <= near_tie_drop(str(decoder.target.dtype), best)
    return OutputMatch(*row.key, "numerical tie" if tie else "mismatch", position, gap, drop)


def not_compared(row: SampleRecord, reason: str) -> OutputMatch:
    """Return the verdict on an output whose equality is not promised or cannot be tested."""
    return OutputMatch(*row.key, verdict="not compared", reason=reason)
