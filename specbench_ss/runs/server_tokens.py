"""Tokens of servers' outputs: their number where a server reports none, and the time of those after the first."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from specbench_ss.runs.records import SampleRecord

LEAST_LATER = 0.2  # share of an output that must arrive after its first text for a time per token
COUNTED = ("usage", "tokenizer")  # ways of counting that are no guess
END_TOKENS, UNEQUAL = 1, 0.02  # of equal outputs: tokens of the end that one server counts alone; share of all tokens
ONE_EACH = 0.9  # of the tokens per byte of the best count, above which a server's pieces of text are tokens


def decode_seconds(row: SampleRecord) -> float | None:
    """Return the time of the tokens after the first one, at the rate of those after the first text.

    The first text may have several tokens, as of a parser that holds text back. Their number is estimated from the
    share of the text, or of the token ids, with at least a token in each piece. None: too few tokens came later.
    """
    tokens, chunks, first_chunks = row.tokens or 0, row.chunks or 0, row.first_chunks or 0
    seconds = (row.wall_s or 0.0) - (row.prefill_s or 0.0)
    if tokens <= 1:
        return seconds
    fewest, most = (first_chunks, tokens - chunks + first_chunks) if chunks <= tokens else (1, tokens)
    later = tokens - max(fewest, 1, min(most, round((row.first_share or 0.0) * tokens)))
    return None if later < LEAST_LATER * tokens else seconds * (tokens - 1) / later


def accounted(rows: Sequence[SampleRecord]) -> list[SampleRecord]:
    """Return the samples of a run, with a better number of tokens where pieces of a server's text were counted.

    Equal outputs have equal numbers: the one that a server reported, else the largest number of pieces. Others are
    estimated from the length of their text, at the tokens per byte of the server with the best count.
    """
    guessed = {row.method for row in rows if row.counted == "chunks"}
    best: defaultdict[Any, tuple[bool, int]] = defaultdict(lambda: (False, 0))
    sums: defaultdict[str, list[int]] = defaultdict(lambda: [0, 0])  # tokens and bytes of each server
    for row in rows if guessed else ():
        if row.ok and row.counted:
            best[_output(row)] = max(best[_output(row)], (row.counted in COUNTED, row.tokens or 0))
            sums[row.method] = [sums[row.method][0] + (row.tokens or 0), sums[row.method][1] + _size(row)]
    density = {label: tokens / size for label, (tokens, size) in sums.items() if size}
    highest = max(density, key=lambda label: (label not in guessed, density[label]), default="")
    joined = {label for label in density if label in guessed and density[label] < ONE_EACH * density[highest]}
    return [
        _recounted(row, *best[_output(row)], density[highest] if row.method in joined else 0.0)
        if row.counted == "chunks" and row.ok
        else row
        for row in rows
    ]


def _output(row: SampleRecord) -> Any:
    return row.question_id, row.turn, row.text, row.reasoning or ""


def _size(row: SampleRecord) -> int:
    return len(((row.text or "") + (row.reasoning or "")).encode(errors="surrogatepass"))


def _recounted(row: SampleRecord, sure: bool, tokens: int, density: float) -> SampleRecord:
    """Return the sample with the number of an equal output, or an estimate by its length if no other one is better."""
    way: Any = "equal output"
    if not sure and tokens == row.tokens:
        tokens, way = (max(1, round(density * _size(row))), "length") if density else (tokens, "chunks")
    new = replace(row, tokens=tokens, counted=way)
    new.decode_s = decode_seconds(new)
    if new.steps is not None and new.accepted_tokens is not None:
        new.steps = max(new.steps, new.later - new.accepted_tokens)
    return new


def contradiction(rows: Sequence[SampleRecord], label: str, baseline: str) -> str:
    """Return how the reported numbers of tokens of equal outputs of two servers differ; '' if they agree."""
    sure = [row for row in rows if row.ok and row.counted in COUNTED]
    known = {_output(row): row.tokens or 0 for row in sure if row.method == baseline}
    own = [row for row in sure if row.method == label and _output(row) in known]
    a, b = sum(row.tokens or 0 for row in own), sum(known[_output(row)] for row in own)
    if abs(a - b) <= END_TOKENS * len(own) + UNEQUAL * max(a, b):
        return ""
    return f"{a} tokens in {len(own)} outputs, and {b} in the equal outputs of {baseline}"
