"""Acceptance and speed by the place of a token: along the answer, along the whole context, or by its part.

A step belongs to the place in which its first token lies. Seconds are those of steps, so prefill is left out.
"""

from __future__ import annotations

import warnings
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise, product
from typing import Annotated as Col
from typing import Literal

import numpy as np

from specbench_ss.errors import UserError
from specbench_ss.results.summary import Number, safe_div, total
from specbench_ss.runs.columns import Ends
from specbench_ss.runs.records import Array, Run, SampleRecord
from specbench_ss.stats.intervals import Interval
from specbench_ss.stats.pairs import Pairs

ENDS = {  # last tokens of all places but the last one
    "answer": (64, 256, 1024),
    "context": (512, 2048, 8192, 32768),
    "part": (),  # the last token of the thinking, of each output
}
PARTS = ("thinking", "answer")
Along = Literal["answer", "context", "part"]


@dataclass(frozen=True, slots=True)
class PlaceRow:
    """One method on the steps that begin in one place."""

    place: Col[str, "first and last token of the place, as in `65-256`; or `thinking`, `answer`"]
    method: Col[str, "label of the method: its name with the given options"]
    n_questions: Col[int, "questions with such steps of both the method and the baseline", "questions"]
    tokens: Col[int, "output tokens of these steps", "tokens"]
    steps: Col[int, "steps that begin in the place", "steps"]
    mean_acceptance_length: Col[Number, "τ: tokens / steps", "tokens"]
    acceptance_rate: Col[Number, "accepted tokens / draft depth", "0 to 1"]
    relative_step_time: Col[Number, "mean step time / that of the baseline in this place; missing if invalid", "×"]
    decode_speedup: Col[
        Number, "time per token of the steps: baseline / method, paired by prompt; missing if invalid", "×"
    ]
    decode_speedup_interval: Col[Interval | None, Ends("decode_speedup", "×")] = None


def place_rows(
    run: Run, invalid: Collection[str] = (), along: Along = "answer", ends: Sequence[int] = ()
) -> list[PlaceRow]:
    """Return a row for each place and method; none for servers, which report no steps.

    invalid: methods without valid times, whose rows have none.

    along: count tokens of the answer, or of prompt and answer; `part` separates thinking and answer.
    ends: last token of each place but the last one; empty: ENDS. Only prompts count for which both the method and the
    baseline have steps in the place. Raises UserError for another `along`, for ends that are no whole numbers or do not
    increase from 1 on, and for `part` with ends, or of a run that did not record it.
    """
    if along not in ENDS:
        raise UserError(f"places are counted along 'answer', 'context' or 'part', not {along!r}")
    if along == "part":
        _check_thinking(run, ends)
    if not (isinstance(ends, Sequence) and all(type(end) is int for end in ends)):
        raise UserError(f"places end at whole numbers of tokens, as in (64, 256), not at {ends!r}")
    ends = tuple(ends) or ENDS[along]
    if any(later <= before for before, later in pairwise((0, *ends))):
        raise UserError(f"places end at increasing numbers of tokens, not at {', '.join(map(str, ends))}")
    found: dict[tuple[int, str], list[SampleRecord]] = {}
    for place, row in _parts(run, along, ends):
        found.setdefault((place, row.method), []).append(row)
    rows = []
    for (place, name), method in product(enumerate(PARTS if along == "part" else names(ends)), run.labels):
        pairs = Pairs(found.get((place, method), ()), found.get((place, run.baseline), ()))
        if pairs.questions:
            rows.append(_row(name, method, pairs, valid=method not in invalid, own=method == run.baseline))
    return rows


def _check_thinking(run: Run, ends: Sequence[int]) -> None:
    """Warn of outputs without an answer. Raise UserError for ends, or for a run without records of thinking."""
    outputs = [row.thinking_tokens for row in run.rows if row.ok and not row.counted]
    if ends or None in outputs:
        raise UserError(
            "places by part have no ends" if ends else "places by part need thinking_tokens: make the run again"
        )
    if unclosed := sum(row.ok and row.thinking_tokens == row.tokens for row in run.rows):
        warnings.warn(f"{unclosed} of {len(outputs)} outputs end before </think>: all of it is thinking", stacklevel=4)


def names(ends: Sequence[int]) -> list[str]:
    """Return the names of the places, as '1-64' and '1025-'."""
    starts = [1, *(end + 1 for end in ends)]
    return [f"{start}-{end}" for start, end in zip(starts, [*map(str, ends), ""], strict=True)]


def _parts(run: Run, along: Along, ends: Sequence[int]) -> list[tuple[int, SampleRecord]]:
    """Return the parts of all successful samples: the place, and a sample with the steps of that place alone."""
    steps, rows = run.steps, {row.key: row for row in run.rows if row.ok}
    kept = steps.only(steps.places(rows))
    samples = [rows[key] for key in kept.keys]
    offset = np.array([_before(row, along) for row in samples], np.int64)
    tokens = kept.columns.tokens.astype(np.int64)
    earlier = np.cumsum(tokens) - tokens  # of all samples together
    first = earlier - np.repeat(earlier[kept.starts[:-1]] - offset, kept.counts)  # tokens before each step
    wide = len(PARTS) if along == "part" else len(ends) + 1
    place: Array = np.searchsorted(ends, first, side="right")
    if along == "part":
        place = first >= np.repeat([row.thinking_tokens or 0 for row in samples], kept.counts)
    cell = np.repeat(np.arange(len(samples)), kept.counts) * wide + place
    many = np.bincount(cell, minlength=len(samples) * wide)
    sums = {
        name: np.bincount(cell, getattr(kept.columns, name), len(many))
        for name in ("tokens", "accepted_tokens", "draft_depth", "total_s")
    }
    return [
        (
            at % wide,
            replace(
                samples[at // wide],
                prefill_tokens=0,
                tokens=int(sums["tokens"][at]),
                steps=int(many[at]),
                accepted_tokens=int(sums["accepted_tokens"][at]),
                draft_depth=int(sums["draft_depth"][at]),
                wall_s=float(sums["total_s"][at]),
            ),
        )
        for at in np.flatnonzero(many).tolist()
    ]


def _before(row: SampleRecord, along: Along) -> int:
    """Return the tokens before the first step: of prefill, and of the prompt where the context is counted."""
    return (row.prefill_tokens or 0) + (row.prompt_tokens or 0 if along == "context" else 0)


def _row(place: str, method: str, pairs: Pairs[SampleRecord], valid: bool, own: bool) -> PlaceRow:
    """Return the row of a method. own: it is the baseline."""
    columns = ("tokens", "steps", "accepted_tokens", "draft_depth")
    tokens, steps, accepted, depth = (int(total(pairs.own, name)) for name in columns)
    pace, of_ref = (total(rows, "wall_s") / total(rows, "steps") for rows in (pairs.own, pairs.other))
    return PlaceRow(
        place=place,
        method=method,
        n_questions=len(pairs.questions),
        tokens=tokens,
        steps=steps,
        mean_acceptance_length=pairs.tau,
        acceptance_rate=safe_div(accepted, depth),
        relative_step_time=safe_div(pace, of_ref) if valid else None,
        decode_speedup=pairs.speedup() if valid else None,
        decode_speedup_interval=pairs.interval() if valid and not own else None,
    )
