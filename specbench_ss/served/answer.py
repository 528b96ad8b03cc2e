"""One streamed answer: its text, its times, and its counts within what is possible."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from specbench_ss.served.protocol import AnswerError, Event

OVER = 1  # tokens above max_tokens that are accepted: an end token that is counted beside them
HIDDEN = 16  # tokens without text that are accepted: end tokens, markers of thinking, what a draft has behind the end


@dataclass(slots=True)
class Answer:
    """An answer as it came. Times are seconds from the moment that the request was sent.

    max_tokens, stop: as they were asked for. counted: whether `tokens` is the server's own count, or the number of
    `chunks`, pieces of text. text_bytes: of the text and of the thinking. ttft_s: to the first piece. drafted,
    accepted: llama.cpp's counts of this request.
    """

    max_tokens: int = 0
    stop: Sequence[str] = ()
    text: str = ""
    finish: str = ""
    tokens: int = 0
    counted: Literal["usage", "chunks"] = "chunks"
    chunks: int = 0
    text_bytes: int = 0
    prompt_tokens: int | None = None
    ttft_s: float | None = None
    wall_s: float = 0.0
    drafted: int | None = None
    accepted: int | None = None
    parts: list[str] = field(default_factory=list)

    def add(self, found: Event, at_s: float) -> bool:
        """Take in an event that came `at_s` seconds after the request, and return whether the answer grew or ended.

        Raises AnswerError for more pieces of text than there can be tokens.
        """
        before = self.chunks, self.finish
        for choice in found.choices or ():
            delta = choice.delta
            thought = (delta.reasoning_content or delta.reasoning or "") if delta else ""
            if delta and (delta.content or thought):
                self.parts.append(delta.content or "")
                self.text_bytes += len((self.parts[-1] + thought).encode(errors="surrogatepass"))
                self.chunks += 1
                self.ttft_s = at_s if self.ttft_s is None else self.ttft_s
                self.wall_s = at_s
            if choice.finish_reason:
                self.finish, self.wall_s = choice.finish_reason, at_s
        if found.usage is not None:
            self.tokens, self.prompt_tokens = found.usage.completion_tokens, found.usage.prompt_tokens
            self.counted = "usage"
        if found.timings is not None:
            self.drafted, self.accepted = found.timings.draft_n, found.timings.draft_n_accepted
        if self.chunks > self.max_tokens + HIDDEN:
            raise AnswerError(f"the server sent {self.chunks} pieces of text with max_tokens {self.max_tokens}")
        return before != (self.chunks, self.finish)

    def checked(self) -> Answer:
        """Return the answer when its stream has ended. Raises AnswerError for one that is not whole or cannot be."""
        if not self.finish:
            what = f"after {self.chunks} pieces of text" if self.chunks else "before any text"
            raise AnswerError(f"the stream ended {what}, and the server did not say that the answer was finished")
        if self.counted == "usage" and not self.tokens and self.chunks:
            raise AnswerError(f"the server counts 0 tokens in an answer of {self.chunks} pieces of text")
        if self.counted == "chunks":
            self.tokens = self.chunks
        if not self.tokens:
            raise AnswerError("the stream had no text")
        self._check_tokens()
        self._check_drafts()
        self.text = "".join(self.parts)
        self.ttft_s = self.wall_s if self.ttft_s is None else self.ttft_s
        return self

    def _check_tokens(self) -> None:
        """Raise AnswerError for more tokens than were asked for, or than the text has bytes."""
        if self.tokens > self.max_tokens + OVER:
            what = "counts" if self.counted == "usage" else "sent pieces of text that count as"
            raise AnswerError(f"the server {what} {self.tokens} tokens with max_tokens {self.max_tokens}")
        stop = max((len(text.encode()) for text in self.stop), default=0)  # a server keeps it out of the text
        if self.tokens > self.text_bytes + stop + HIDDEN:
            raise AnswerError(f"the server counts {self.tokens} tokens in a text of {self.text_bytes} bytes")

    def _check_drafts(self) -> None:
        """Raise AnswerError for more accepted tokens than were drafted, or than the answer has."""
        accepted, drafted = self.accepted or 0, self.drafted or 0
        if accepted > drafted:
            raise AnswerError(f"the server counts {accepted} of {drafted} drafted tokens as accepted")
        if accepted > self.tokens + (HIDDEN if self.counted == "chunks" else -1):
            raise AnswerError(f"the server counts {accepted} accepted tokens in an answer of {self.tokens} tokens")
