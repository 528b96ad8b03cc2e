"""From questions to prompt ids, and whether they fit the model. Knows target and questions, no method."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from specbench_ss.decoding.loop import Limits
from specbench_ss.decoding.outline import Outline
from specbench_ss.decoding.target import Target
from specbench_ss.errors import UserError
from specbench_ss.options import encodable
from specbench_ss.runs.suite import Question, SuiteData, SuiteRequest


def prompt_ids(target: Outline, question: Question, answers: Sequence[str] = ()) -> list[int]:
    """Return the prompt ids of the turn after these answers, with all that was said before it."""
    return target.encode_chat(question.messages(answers))


def suite_request(categories: Sequence[str], limit: int | None, data: str | None, target: Outline) -> SuiteRequest:
    """What is asked of a suite for this model."""
    return SuiteRequest(
        tuple(categories),
        limit,
        None if data is None else Path(data),
        target.is_lab,
        target.context_length,
        None if target.tokenizer is None else _counter(target.tokenizer),
    )


def _counter(tokenizer: Any) -> Callable[[str], int]:
    return lambda text: len(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])


def check_ids(data: SuiteData) -> None:
    """Raises UserError for two questions with the same id."""
    for name, n in Counter(q.id for q in data.questions).items():
        if n > 1:
            raise UserError(f"suite {data.name!r} has {n} questions with the id {name!r}")


def check_texts(data: SuiteData) -> None:
    """Raises UserError for a question that holds what is no character: it could be neither asked nor written down."""
    for q in data.questions:
        said = (*q.turns, *(text for texts in q.references for text in texts), *(m.content for m in q.history))
        if not encodable("".join((q.id, q.category, *said))):
            raise UserError(f"question {ascii(q.id)} of suite {data.name!r} holds half of a surrogate pair")


def check_history(target: Outline, data: SuiteData) -> None:
    """Raise UserError where the chat template refuses or leaves out messages that stand before a question."""
    for q in (q for q in data.questions if q.history):
        try:
            text = target.chat_text(q.messages())
        except UserError as error:
            raise UserError(f"question {q.id!r}: {error}") from None
        lost = next((m for m in q.messages() if m["role"] != "assistant" and m["content"].strip() not in text), None)
        if lost is not None:
            raise UserError(
                f"question {q.id!r}: the chat template of {target.name!r} leaves out its {lost['role']} message; "
                "remove the message, or give another --chat-template"
            )


def check_room(target: Outline, data: SuiteData) -> None:
    """Raises UserError where a first turn leaves no room for an answer in the model's context.

    How long later turns are depends on the answers before them; one that is too long fails by itself.
    """
    room = target.context_length
    long = [(q, n) for q in data.questions if (n := len(prompt_ids(target, q))) >= room]
    if long:
        question, tokens = long[0]
        others = f" ({len(long)} of {len(data.questions)} questions are too long)" if len(long) > 1 else ""
        raise UserError(
            f"the prompt of question {question.id!r} ({question.category}) has {tokens} tokens and leaves no room in "
            f"the context of {target.name!r}, {room}{others}: choose others with --categories, --limit or --data FILE"
        )


def limits(target: Target, max_new_tokens: int, stop: Sequence[str] = ()) -> Limits:
    """Where answers of this target end: its end tokens, the stop texts, `max_new_tokens`. Raises as `stop_ids` does."""
    special = stop_ids(target.tokenizer, stop)
    return Limits(max_new_tokens, target.eos_ids.union(special.values()), tuple(x for x in stop if x not in special))


def stop_ids(tokenizer: Any, stop: Sequence[str]) -> dict[str, int]:
    """Those of the stop texts that are exactly one special token, with its id.

    Raises UserError for a text that holds a special token among other characters: it would never be found.
    """
    special = special_tokens(tokenizer) if stop else {}
    for text in stop:
        inside = [token for token in special if token in text]
        if inside and text not in special:
            raise UserError(
                f"--stop {text!r} holds the special token {max(inside, key=len)!r} among other characters; answers are "
                "searched without special tokens: give the token alone, or the text without it"
            )
    return {text: special[text] for text in stop if text in special}


def special_tokens(tokenizer: Any) -> dict[str, int]:
    """Text -> id of every token that is left out of decoded text; empty without a tokenizer."""
    if tokenizer is None:
        return {}
    named = {token: tokenizer.convert_tokens_to_ids(token) for token in tokenizer.all_special_tokens}
    added = {str(token): i for i, token in tokenizer.added_tokens_decoder.items() if token.special}
    return {token: i for token, i in {**added, **named}.items() if token and i is not None}
