"""From questions to prompt ids, and whether they fit the model. Knows target and questions, no method."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING

from specbench_ss.errors import UserError
from specbench_ss.suite import SuiteData

if TYPE_CHECKING:
    from specbench_ss.outline import Outline


def prompt_ids(target: Outline, turns: Sequence[str], answers: Sequence[str] = ()) -> list[int]:
    """Prompt ids of the turn after these answers: the earlier turns, each with its answer, then what is asked now."""
    messages: list[dict[str, str]] = []
    for turn, answer in zip(turns, answers, strict=False):
        messages += [{"role": "user", "content": turn}, {"role": "assistant", "content": answer}]
    return target.encode_chat([*messages, {"role": "user", "content": turns[len(answers)]}])


def check_ids(data: SuiteData) -> None:
    """Raises UserError for two questions with the same id."""
    for name, n in Counter(q.id for q in data.questions).items():
        if n > 1:
            raise UserError(f"suite {data.name!r} has {n} questions with the id {name!r}")


def check_room(target: Outline, data: SuiteData) -> None:
    """Raises UserError where a first turn leaves no room for an answer in the model's context.

    How long later turns are depends on the answers before them; one that is too long fails by itself.
    """
    room = target.context_length
    long = [(q, n) for q in data.questions if (n := len(prompt_ids(target, q.turns[:1]))) >= room]
    if long:
        question, tokens = long[0]
        others = f" ({len(long)} of {len(data.questions)} questions are too long)" if len(long) > 1 else ""
        raise UserError(
            f"the prompt of question {question.id!r} ({question.category}) has {tokens} tokens and leaves no room in "
            f"the context of {target.name!r}, {room}{others}: choose others with --categories, --limit or --data FILE"
        )
