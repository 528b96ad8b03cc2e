"""Chat templates of conversations, and the token spans of the assistant's completions."""

from __future__ import annotations

import re
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from os.path import commonprefix
from typing import Any

import numpy as np
from numpy.typing import NDArray

from specbench_ss.conversations import Message
from specbench_ss.errors import UserError

# private use area of Unicode: no template or text has these, and strip() keeps them
MARK = "\ue000{}\ue001"
MARKS = re.compile("\ue000([0-9]+)\ue001")


@dataclass(frozen=True, slots=True)
class Filled:
    """Text of a conversation. before, after: for each answer, the text with generation prompt, and with it."""

    text: str
    before: tuple[str, ...]
    after: tuple[str, ...]


def fill(tokenizer: Any, messages: Sequence[Message], place: str = "", generation_prompt: bool = False) -> Filled:
    """Return the conversation in the tokenizer's chat format.

    Raises UserError, with the place, if the template rejects it.
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
    """Return (first, last + 1) characters of each answer's completion in the text, or None if unknown.

    The template is filled again with marks instead of contents; the text between marks belongs to the template. A
    completion is the content, its opening after the generation prompt, and its closing. Replacing the marks by the
    contents must reproduce the text; otherwise the template transforms contents and is not supported.
    """
    marked = [{**m, "content": MARK.format(i)} for i, m in enumerate(messages)]
    whole = fill(tokenizer, marked, "", generation_prompt)
    spans = _content_places(text, whole.text, [m["content"] for m in messages])
    answers = [i for i, m in enumerate(messages) if m["role"] == "assistant"]
    if spans is None or not all(i in spans for i in answers):
        return None
    completions = []
    for i, before, after in zip(answers, whole.before, whole.after, strict=True):
        ahead, behind = (MARKS.split(part) for part in whole.text.split(MARK.format(i)))
        prompt_end = MARKS.split(before)[-1]
        opening = ahead[-1].removeprefix(prompt_end) if ahead[-1].startswith(prompt_end) else ""
        closing = commonprefix([MARKS.split(after)[-1], behind[0]])
        first, last = spans[i]
        completions.append((first - len(opening), last + len(closing)))
    return completions


def _content_places(text: str, marked: str, contents: Sequence[str]) -> dict[int, tuple[int, int]] | None:
    """Return the span of each content of `marked` in the text; None if filling them in gives another text."""
    start, *pieces = MARKS.split(marked)
    if not text.startswith(start):
        return None
    position, spans = len(start), dict[int, tuple[int, int]]()
    for number, glue in zip(map(int, pieces[::2]), pieces[1::2], strict=True):
        content = contents[number]
        forms = (content, content.rstrip(), content.lstrip(), content.strip())  # templates may strip
        form = next((f for f in forms if text.startswith(f + glue, position)), None)
        if form is None or number in spans:
            return None
        spans[number] = (position, position + len(form))
        position += len(form) + len(glue)
    return spans if position == len(text) else None


def apply(tokenizer: Any, messages: Sequence[Message], place: str, generation_prompt: bool) -> str:
    """Return the chat template's text. Raises UserError, with the place, if the template rejects the messages."""
    try:
        text = tokenizer.apply_chat_template(list(messages), add_generation_prompt=generation_prompt, tokenize=False)
    except Exception as error:  # Jinja's errors and those that a template raises
        raise UserError(f"{place}: the chat template rejects this conversation: {error}") from error
    return str(text)


Span = tuple[int, int]

# an anchor needs the next token and one to draft
MIN_COMPLETION = 2


@dataclass(frozen=True, slots=True)
class Rendered:
    """Token ids int32 [n] of a conversation. spans: (first, last + 1) of each completion, in order.

    A completion begins with the first token after the generation prompt and ends with the template's end-of-turn token,
    if any. Before each completion there is at least one other token.
    """

    ids: NDArray[np.int32]
    spans: tuple[Span, ...]

    @property
    def mask(self) -> NDArray[np.bool_]:
        """Return bool [n], True inside completions."""
        mask = np.zeros(len(self.ids), bool)
        for first, last in self.spans:
            mask[first:last] = True
        return mask

    def fit(self, length: int) -> Rendered | None:
        """Return the beginning of the conversation up to `length` tokens.

        It ends after the last completion that fits, or else within the first one; None if that leaves less than the
        shortest completion.
        """
        ending = [span for span in self.spans if span[1] <= length]
        if ending:
            return Rendered(self.ids[: ending[-1][1]], tuple(ending))
        if not self.spans or self.spans[0][0] + MIN_COMPLETION > length:
            return None
        return Rendered(self.ids[:length], ((self.spans[0][0], length),))


class Renderer:
    """Renders conversations for one tokenizer. pad: the padding id."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        added = tokenizer.added_tokens_decoder.items()
        self.special = frozenset(tokenizer.all_special_ids) | {i for i, token in added if token.special}
        self.pad = next((i for i in (tokenizer.pad_token_id, tokenizer.eos_token_id) if i is not None), 0)
        self._glue: dict[int, bool] = {}

    def render(self, messages: Sequence[Message], place: str = "", generation_prompt: bool = False) -> Rendered:
        """Return ids and completions of a conversation. generation_prompt: end with the generation prompt.

        The ids are those of the whole conversation. If the rendering up to a completion, with generation prompt, is a
        prefix of the whole, the completion begins at its end. Templates that render an early turn differently from the
        last one have no such prefix; then completions are found by their text. Raises UserError, with the place, if
        neither works.
        """
        filled = fill(self.tokenizer, messages, place, generation_prompt)
        rendered = self._by_prefixes(filled)
        if rendered is None and getattr(self.tokenizer, "is_fast", False):
            places = completion_places(self.tokenizer, messages, filled.text, generation_prompt)
            rendered = None if places is None else self._by_offsets(filled.text, places)
        if rendered is None:
            raise UserError(
                f"{place}: the chat template hides which tokens are the assistant's; use another --chat-template"
            )
        return rendered

    def _encode(self, texts: Sequence[str]) -> list[list[int]]:
        return list(self.tokenizer(list(texts), add_special_tokens=False)["input_ids"])

    def _by_prefixes(self, filled: Filled) -> Rendered | None:
        """Find completions if the renderings up to and with each one are token prefixes of the whole."""
        starts, ends = filled.before, filled.after
        if not all(filled.text.startswith(text) for text in (*starts, *ends)):
            return None
        ids, *prefixes = self._encode([filled.text, *starts, *ends])
        if not all(ids[: len(prefix)] == prefix for prefix in prefixes):
            return None
        firsts, behinds = (list(map(len, part)) for part in (prefixes[: len(starts)], prefixes[len(starts) :]))
        spans = [(first, self._without_glue(ids, first, last)) for first, last in zip(firsts, behinds, strict=True)]
        return self._valid_spans(ids, spans)

    def _by_offsets(self, text: str, places: Sequence[Span]) -> Rendered | None:
        """Find completions by their spans in the text; a token across a completion's start is not in it."""
        encoded = self.tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        ids, (firsts, lasts) = encoded["input_ids"], zip(*encoded["offset_mapping"], strict=True)
        spans = []
        for start, end in places:
            first = max(bisect_left(firsts, start), self._behind(ids, text[:start]))
            spans.append((first, self._without_glue(ids, first, bisect_right(lasts, end))))
        return self._valid_spans(ids, spans)

    def _behind(self, ids: list[int], before: str) -> int:
        """Return the first token after the text `before`, by tokens, since offsets may omit a space."""
        prompt = self._encode([before])[0]
        same = next((i for i, (a, b) in enumerate(zip(ids, prompt, strict=False)) if a != b), len(prompt))
        return 0 if same == len(prompt) else same + 1

    def _valid_spans(self, ids: list[int], spans: list[Span]) -> Rendered | None:
        """Return None if completions touch each other or the start, since a mask could not separate them."""
        behind = 0
        for first, last in spans:
            if not behind < first < last:
                return None
            behind = last
        return Rendered(np.asarray(ids, np.int32), tuple(spans))

    def _without_glue(self, ids: list[int], first: int, last: int) -> int:
        """Return the end of a completion with its end-of-turn token, without what follows, such as ChatML's newline."""
        tail = last
        while tail > first and self._is_glue(ids[tail - 1]):
            tail -= 1
        return next((i + 1 for i in range(tail, last) if ids[i] in self.special), last)

    def _is_glue(self, token: int) -> bool:
        """Return True for a special token or white space."""
        if token not in self._glue:
            self._glue[token] = token in self.special or not self.tokenizer.decode([token]).strip()
        return self._glue[token]
