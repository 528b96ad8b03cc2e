"""From an answer and a server's counters to a row. What a server does not tell stays None."""

from __future__ import annotations

from specbench_ss.runs.rows import Row
from specbench_ss.served.answer import HIDDEN, Answer
from specbench_ss.served.counters import Counters


def grown(before: Counters | None, after: Counters | None, tokens: int, answers: int = 1) -> Counters | None:
    """Return what a server counted for some answers; None where it cannot be told from what it did for others.

    tokens: of these answers. A server that made more than these, and one for the end of each, answered somebody else;
    so did one that accepted more than these, and what a draft may have behind the end of each.
    """
    made = after.since(before) if before is not None and after is not None else None
    if made is None or (made.generated is not None and made.generated > tokens + answers):
        return None
    return made if made.accepted <= min(made.drafted, tokens + HIDDEN * answers) else None


def filled(row: Row, answer: Answer, counts: Counters | None) -> Row:
    """Return the row with what came."""
    row.text, row.finish, row.tokens = answer.text, answer.finish, answer.tokens
    row.counted, row.chunks, row.prompt_tokens = answer.counted, answer.chunks, answer.prompt_tokens
    row.prefill_tokens = 1  # the first token is that of the prompt's pass, in every engine
    row.prefill_s, row.wall_s = answer.ttft_s or 0.0, answer.wall_s
    row.decode_s = answer.wall_s - row.prefill_s
    row.drafted, row.accepted = answer.drafted, answer.accepted
    if counts is not None:
        row.drafts, row.drafted, row.accepted = counts.drafts, counts.drafted, counts.accepted
    return row
