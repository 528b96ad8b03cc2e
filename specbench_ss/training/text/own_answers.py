"""A model's own answers in place of those in the data ("distillation data"), stored batch by batch as they are made."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from specbench_ss import storage, user_files
from specbench_ss.conversations import Conversation, Message
from specbench_ss.engine.target import Target
from specbench_ss.training.text.answering import Answering, own_answers
from specbench_ss.training.text.rendering import Rendered, Renderer, Span

KEPT = "answers.jsonl"


@dataclass(frozen=True, slots=True)
class OwnAnswers:
    """Answers by this model, of at most `limit` tokens; temperature 0 is greedy. batch: conversations at a time."""

    target: Target
    limit: int = 512
    temperature: float = 0.0
    batch: int = 32

    def about(self) -> dict[str, Any]:
        """Return what the answers depend on."""
        return {
            "base": self.target.weights_hash, "dtype": str(self.target.dtype), "ends": sorted(self.target.eos_ids),
            "limit": self.limit, "temperature": self.temperature, "batch": self.batch,
        }  # fmt: skip


class ChatTalk:
    """A conversation whose answers the model gives, in the form of its chat template.

    Every prompt is the template filled with what was said so far, as text, just as when the model is used; the newest
    answer is kept token by token. The conversation ends at an answer that did not end within the limit, and at a prompt
    that leaves no room for an answer in a row.
    """

    def __init__(self, number: int, conversation: Conversation, renderer: Renderer, longest: int) -> None:
        self.number, self.place, self.renderer, self.longest = number, conversation.place, renderer, longest
        self.asked = list(conversation.questions)
        self.said: list[Message] = []
        self.asking: Rendered | None = None
        self.document: Rendered | None = None

    def prompt(self) -> list[int] | None:
        """Return the token ids up to the next answer."""
        while self.asked and (not self.said or self.said[-1]["role"] != "user"):
            self.said.append(self.asked.pop(0))
        if not self.said or self.said[-1]["role"] != "user":
            return None
        self.asking = self.renderer.render(self.said, self.place, generation_prompt=True)
        return self.asking.ids.tolist() if len(self.asking.ids) <= self.longest else None

    def answered(self, answer: list[int], ended: bool) -> None:
        """Add the answer to the document."""
        assert self.asking is not None
        first = len(self.asking.ids)
        ids = np.append(self.asking.ids, np.asarray(answer, np.int32))
        self.document = Rendered(ids, (*self.asking.spans, (first, len(ids))))
        text = self.renderer.tokenizer.decode(answer, skip_special_tokens=True)
        self.said.append({"role": "assistant", "content": text})
        if not ended or not text.strip():
            self.asked.clear()


@dataclass(frozen=True, slots=True)
class _Kept:
    """A line of the file of answers: one conversation of the batch at `place`.

    ids: [n]; empty where it got no answer.
    """

    place: int
    number: int
    ids: list[int]
    spans: list[Span]

    def document(self) -> Rendered | None:
        return Rendered(np.asarray(self.ids, np.int32), tuple(self.spans)) if self.ids else None


def own_documents(
    own: OwnAnswers, renderer: Renderer, talks: Sequence[Conversation], length: int, seed: int, work: Path,
    log: Callable[[str], None],
) -> list[Rendered | None]:  # fmt: skip
    """Return the conversations with the model's answers; None for one whose prompt leaves an answer no room in a row.

    Finished batches are kept in the folder `work`: a process that was cut off goes on with the next one.
    """
    alike = sorted(range(len(talks)), key=lambda i: (len(talks[i].questions), sum(map(_size, talks[i].questions)), i))
    chats = [ChatTalk(i, talks[i], renderer, length - own.limit) for i in alike]
    kept = storage.cut(work / KEPT, user_files.decoder(_Kept))
    sizes = {place: len(chats[place : place + own.batch]) for place in range(0, len(chats), own.batch)}
    done = {place for place in sizes if sum(k.place == place for k in kept) >= sizes[place]}
    how = Answering(own.target.eos_ids, own.limit, own.temperature, seed)
    answers = {k.number: k for k in kept if k.place in done}
    with (work / KEPT).open("ab", buffering=0) as file:
        for place, answered in own_answers(own.target, chats, how, own.batch, done):
            lines = [_line(place, chat) for chat in answered]
            storage.append(file, lines)
            answers |= {k.number: k for k in user_files.convert(lines, list[_Kept])}
            log(f"own answers: {len(answers)} of {len(talks)} conversations")
    return [answers[i].document() for i in range(len(talks))]


def _size(message: Message) -> int:
    return len(message["content"])


def _line(place: int, chat: ChatTalk) -> dict[str, Any]:
    document = chat.document
    ids, spans = ([], ()) if document is None else (document.ids.tolist(), document.spans)
    return {"place": place, "number": chat.number, "ids": ids, "spans": [list(span) for span in spans]}
