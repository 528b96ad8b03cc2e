"""Conversations in a model's chat format, and which tokens the assistant says."""

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


Span = tuple[int, int]

# an anchor of a drafter needs the next token and one to draft: shorter completions teach nothing
LEAST_COMPLETION = 2


@dataclass(frozen=True, slots=True)
class Rendered:
    """Token ids int32 [n] of a conversation. spans: (first, last + 1) of each completion, in order.

    A completion begins with the first token after the generation prompt and ends with the end-of-turn token, where the
    template has one. Between two completions, and before the first, there is at least one other token.
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
        """Return the same up to the end of a completion, at most `length` tokens long.

        The cut is after the last completion that ends in time. Where none does, it is inside the first completion;
        where less than a shortest completion of that would be left, None is returned.
        """
        ending = [span for span in self.spans if span[1] <= length]
        if ending:
            return Rendered(self.ids[: ending[-1][1]], tuple(ending))
        if not self.spans or self.spans[0][0] + LEAST_COMPLETION > length:
            return None
        return Rendered(self.ids[:length], ((self.spans[0][0], length),))


class Renderer:
    """Renders conversations for one tokenizer. pad: the id that fills up rows."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        added = tokenizer.added_tokens_decoder.items()
        self.special = frozenset(tokenizer.all_special_ids) | {i for i, token in added if token.special}
        self.pad = next((i for i in (tokenizer.pad_token_id, tokenizer.eos_token_id) if i is not None), 0)
        self._glue: dict[int, bool] = {}

    def render(self, messages: Sequence[Message], place: str = "", generation_prompt: bool = False) -> Rendered:
        """Return ids and completions of a conversation. generation_prompt: the next answer is about to begin.

        The ids are those of the whole conversation filled into the template. If the rendering up to a completion, with
        generation prompt, is a prefix of the whole, the completion begins where that prefix ends. Templates that render
        an early turn differently from the last one have no such prefix; then it begins (and ends) where its text
        stands. Raises UserError, with the place, where neither works.
        """
        filled = fill(self.tokenizer, messages, place, generation_prompt)
        rendered = self._by_prefixes(filled)
        if rendered is None and getattr(self.tokenizer, "is_fast", False):
            places = completion_places(self.tokenizer, messages, filled.text, generation_prompt)
            rendered = None if places is None else self._by_offsets(filled.text, places)
        if rendered is None:
            raise UserError(
                f"{place}: the chat template does not let the assistant's words be found again among the tokens"
            )
        return rendered

    def _encode(self, texts: Sequence[str]) -> list[list[int]]:
        return list(self.tokenizer(list(texts), add_special_tokens=False)["input_ids"])

    def _by_prefixes(self, filled: Filled) -> Rendered | None:
        """Find completions where the renderings up to each one and with it are prefixes of the whole in tokens."""
        starts, ends = filled.before, filled.after
        if not all(filled.text.startswith(text) for text in (*starts, *ends)):
            return None
        ids, *prefixes = self._encode([filled.text, *starts, *ends])
        if not all(ids[: len(prefix)] == prefix for prefix in prefixes):
            return None
        firsts, behinds = (list(map(len, part)) for part in (prefixes[: len(starts)], prefixes[len(starts) :]))
        spans = [(first, self._without_glue(ids, first, last)) for first, last in zip(firsts, behinds, strict=True)]
        return self._checked(ids, spans)

    def _by_offsets(self, text: str, places: Sequence[Span]) -> Rendered | None:
        """Find completions by their places in the text. A token that crosses a completion's start is not in it."""
        encoded = self.tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        ids, (firsts, lasts) = encoded["input_ids"], zip(*encoded["offset_mapping"], strict=True)
        spans = []
        for on_prefill, end in places:
            first = max(bisect_left(firsts, on_prefill), self._behind(ids, text[:on_prefill]))
            spans.append((first, self._without_glue(ids, first, bisect_right(lasts, end))))
        return self._checked(ids, spans)

    def _behind(self, ids: list[int], before: str) -> int:
        """Return the first token after the text `before`, counted by tokens, since offsets may leave out a space."""
        prompt = self._encode([before])[0]
        same = next((i for i, (a, b) in enumerate(zip(ids, prompt, strict=False)) if a != b), len(prompt))
        return 0 if same == len(prompt) else same + 1

    def _checked(self, ids: list[int], spans: list[Span]) -> Rendered | None:
        """Return None where completions touch each other or the start, since a mask could then not tell them apart."""
        behind = 0
        for first, last in spans:
            if not behind < first < last:
                return None
            behind = last
        return Rendered(np.asarray(ids, np.int32), tuple(spans))

    def _without_glue(self, ids: list[int], first: int, last: int) -> int:
        """Return the end of a completion without what follows its end-of-turn token, as ChatML's line end does."""
        tail = last
        while tail > first and self._is_glue(ids[tail - 1]):
            tail -= 1
        return next((i + 1 for i in range(tail, last) if ids[i] in self.special), last)

    def _is_glue(self, token: int) -> bool:
        """Say whether a token is special, or nothing but white space."""
        if token not in self._glue:
            self._glue[token] = token in self.special or not self.tokenizer.decode([token]).strip()
        return self._glue[token]
