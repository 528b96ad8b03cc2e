"""Fill conversations into a chat template, and find the assistant's own words in the text.

This module knows no tokens.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from os.path import commonprefix
from typing import Any

from specbench_ss.conversations import Message
from specbench_ss.errors import UserError

# from Unicode's private use area: no template and no text has them, and no strip() takes them away
MARK = "\ue000{}\ue001"
MARKS = re.compile("\ue000([0-9]+)\ue001")


@dataclass(frozen=True, slots=True)
class Filled:
    """The text of a conversation. before, after: for each answer, the text up to it and ready for it, and with it."""

    text: str
    before: tuple[str, ...]
    after: tuple[str, ...]


def fill(tokenizer: Any, messages: Sequence[Message], place: str = "", generation_prompt: bool = False) -> Filled:
    """Return the conversation in the tokenizer's chat form.

    Raises UserError, with the place, where the template refuses.
    """
    answers = [i for i, m in enumerate(messages) if m["role"] == "assistant"]
    return Filled(
        apply(tokenizer, messages, place, generation_prompt),
        tuple(apply(tokenizer, messages[:i], place, True) for i in answers),
        tuple(apply(tokenizer, messages[: i + 1], place, False) for i in answers),
    )


def completion_places(
    tokenizer: Any, messages: Sequence[Message], text: str, generation_prompt: bool = False
) -> list[tuple[int, int]] | None:
    """Return (first, last + 1) characters of each answer's completion in the text; None where they cannot be told.

    The template is filled once more with marks in place of contents; what stands between the marks is the template's
    own. A completion is the content, what opens it after the generation prompt, and what closes it. Putting the
    contents back in place of the marks must give the text again; otherwise the template does more than place them and
    is not understood.
    """
    marked = [{**m, "content": MARK.format(i)} for i, m in enumerate(messages)]
    whole = fill(tokenizer, marked, "", generation_prompt)
    places = _content_places(text, whole.text, [m["content"] for m in messages])
    answers = [i for i, m in enumerate(messages) if m["role"] == "assistant"]
    if places is None or not all(i in places for i in answers):
        return None
    found = []
    for i, before, after in zip(answers, whole.before, whole.after, strict=True):
        ahead, behind = (MARKS.split(part) for part in whole.text.split(MARK.format(i)))
        asked = MARKS.split(before)[-1]
        opening = ahead[-1].removeprefix(asked) if ahead[-1].startswith(asked) else ""
        closing = commonprefix([MARKS.split(after)[-1], behind[0]])
        first, last = places[i]
        found.append((first - len(opening), last + len(closing)))
    return found


def _content_places(text: str, marked: str, contents: Sequence[str]) -> dict[int, tuple[int, int]] | None:
    """Return where each content of `marked` stands in the text; None where filling it in gives another text."""
    start, *pieces = MARKS.split(marked)
    if not text.startswith(start):
        return None
    at, found = len(start), dict[int, tuple[int, int]]()
    for number, glue in zip(map(int, pieces[::2]), pieces[1::2], strict=True):
        content = contents[number]
        forms = (content, content.rstrip(), content.lstrip(), content.strip())  # templates may strip
        form = next((f for f in forms if text.startswith(f + glue, at)), None)
        if form is None or number in found:
            return None
        found[number] = (at, at + len(form))
        at += len(form) + len(glue)
    return found if at == len(text) else None


def apply(tokenizer: Any, messages: Sequence[Message], place: str, generation_prompt: bool) -> str:
    """Return the chat template's text. Raises UserError, with the place, where the template refuses."""
    try:
        text = tokenizer.apply_chat_template(list(messages), add_generation_prompt=generation_prompt, tokenize=False)
    except Exception as error:  # Jinja's own errors, and whatever a template raises by itself
        raise UserError(f"{place}: the chat template refuses this conversation: {error}") from error
    return str(text)
