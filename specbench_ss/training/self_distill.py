"""Self-distillation: a model's own answers to prompts, made in batches and stored as they are made."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import numpy as np
import torch

from specbench_ss import storage, user_files
from specbench_ss.conversations import Conversation, Message
from specbench_ss.engine.target import Target
from specbench_ss.training.chat_format import Rendered, Renderer, Span

if TYPE_CHECKING:
    from torch import Tensor


LOOK_EVERY = 8  # tokens from one look at which answers have ended to the next: each waits for the device
WORTH = 0.75  # of the answers go on, at most, where the others are taken out of the batch


class PromptBatch:
    """Prompts [B] of any length, left-padded, and the answers that are being made.

    seen bool [B, longest + limit]: False at padding. places int64, the same shape: positions in each prompt's own text.
    numbers [B']: of the answers that go on, in `answers` int64 [B, limit], which holds -1 where nothing is said.
    """

    def __init__(self, target: Target, prompts: Sequence[Sequence[int]], limit: int) -> None:
        self.target, self.limit, self.made = target, limit, 0
        device, longest = target.device, max(map(len, prompts))
        self.ids = torch.zeros(len(prompts), longest, dtype=torch.long, device=device)
        self.seen = torch.ones(len(prompts), longest + limit, dtype=torch.bool, device=device)
        for i, prompt in enumerate(prompts):
            self.ids[i, longest - len(prompt) :] = torch.tensor(prompt, device=device)
            self.seen[i, : longest - len(prompt)] = False
        self.places = (self.seen.cumsum(1) - 1).clamp_min(0)
        self.cache = target.new_cache(longest + limit)
        self.numbers = torch.arange(len(prompts), device=device)
        self.answers = torch.full((len(prompts), limit), -1, device=device)
        self.ended = torch.zeros(len(prompts), dtype=torch.bool, device=device)

    def logits(self, ids: Tensor) -> Tensor:
        """Run ids [B', q], which follow what the cache holds; return the logits [B', V] after the last of each."""
        target, past, q = self.target, self.cache.get_seq_length(), ids.shape[1]
        positions = self.places[:, past : past + q]
        x, rotary = target.embed(ids, positions), target.rotary(positions, past + q)
        masks = {w: self._mask(past, q, w) for w in {block.window for block in target.family.blocks}}
        for block in target.family.blocks:
            x = block(x, self.cache, masks[block.window], rotary)
        self.cache.commit(q)
        return target.logits(target.family.norm(x[:, -1:]))[:, 0]

    def _mask(self, past: int, q: int, window: int | None) -> Tensor:
        """Return what q new rows see of all: additive [B', 1, q, past + q]."""
        end, device = past + q, self.ids.device
        later = torch.arange(end, device=device) > torch.arange(past, end, device=device)[:, None]
        hidden = later | ~self.seen[:, None, :end]
        if window is not None:
            hidden = hidden | (self.places[:, past:end, None] - self.places[:, None, :end] >= window)
        mask = torch.zeros(hidden.shape, dtype=self.target.dtype, device=device)
        return mask.masked_fill_(hidden, torch.finfo(self.target.dtype).min)[:, None]

    def say(self, tokens: Tensor, ends: Tensor) -> None:
        """Put the next token [B'] of each answer down. ends: tokens that end an answer."""
        self.answers[self.numbers, self.made] = torch.where(self.ended, -1, tokens)
        self.ended |= torch.isin(tokens, ends)
        self.made += 1

    def goes_on(self) -> bool:
        """Say whether there is more to be said; now and then take out what has ended."""
        if self.made == self.limit:
            return False
        if self.made % LOOK_EVERY:
            return True
        left = (~self.ended).nonzero()[:, 0]
        if 0 < len(left) <= WORTH * len(self.ended):
            self.numbers, self.ended, self.seen, self.places = (
                x[left] for x in (self.numbers, self.ended, self.seen, self.places)
            )
            self.cache.select_sequences(left)
        return len(left) > 0

    def newest(self) -> Tensor:
        """Return the newest token of each answer that goes on, [B', 1]."""
        return self.answers[self.numbers, self.made - 1 : self.made].clamp_min(0)


class Talk(Protocol):
    """A conversation in which the model gives every answer."""

    def prompt(self) -> list[int] | None:
        """Return token ids that end where the next answer begins; None where there is nothing more to answer."""

    def answered(self, answer: list[int], ended: bool) -> None:
        """Take the answer, its end token included. ended: whether there is an end token."""


@dataclass(frozen=True, slots=True)
class GenerationOptions:
    """How answers are made: at most `limit` tokens each; temperature 0 is greedy, any other is plain sampling.

    ends: token ids that end an answer.
    """

    ends: Collection[int]
    limit: int = 192
    temperature: float = 0.0
    seed: int = 0


T = TypeVar("T", bound=Talk)


def regenerate_responses(
    target: Target, talks: Sequence[T], how: GenerationOptions, batch: int = 128, skip: Collection[int] = ()
) -> Iterator[tuple[int, list[T]]]:
    """Answer every talk to its end, and yield (place, talks) for one batch after the other.

    A batch is the `batch` talks from `place` on, so similar talks should be neighbours: their answers end together.
    Batches come in random order; those whose place is in `skip` are left out. What a batch says depends only on the
    seed and its place.
    """
    for start in np.random.default_rng(0).permutation(range(0, len(talks), batch)).tolist():
        if start in skip:
            continue
        chosen = talks[start : start + batch]
        _converse(target, chosen, how, (how.seed, start))
        yield start, list(chosen)


def _converse(target: Target, talks: Sequence[Talk], how: GenerationOptions, seed: tuple[int, ...]) -> None:
    turn = 0
    while going := [(talk, prompt) for talk in talks if (prompt := talk.prompt()) is not None]:
        answers = answer_batch(target, [prompt for _, prompt in going], how, (*seed, turn))
        for (talk, _), answer in zip(going, answers, strict=True):
            talk.answered(answer, bool(answer) and answer[-1] in how.ends)
        turn += 1


@torch.inference_mode()
def answer_batch(
    target: Target, prompts: Sequence[Sequence[int]], how: GenerationOptions, seed: tuple[int, ...] = (0,)
) -> list[list[int]]:
    """Return answers (end token included) to prompts of any length, made in one batch.

    seed: for temperature > 0.
    """
    start = int(np.random.SeedSequence(seed).generate_state(1, np.uint64)[0] >> 1)
    rng = torch.Generator(target.device).manual_seed(start)
    batch = PromptBatch(target, prompts, how.limit)
    ends = torch.tensor(sorted(how.ends), device=target.device)
    ids = batch.ids
    while True:
        logits = batch.logits(ids)
        if how.temperature > 0:
            tokens = (logits.float() / how.temperature).softmax(-1).multinomial(1, generator=rng)[:, 0]
        else:
            tokens = logits.argmax(-1)
        batch.say(tokens, ends)
        if not batch.goes_on():
            return [[token for token in row if token >= 0] for row in batch.answers.tolist()]
        ids = batch.newest()


KEPT = "answers.jsonl"


@dataclass(frozen=True, slots=True)
class ResponseCache:
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
    """A line of the file of answers: one conversation of the batch at `place`. ids: [n]; empty without an answer."""

    place: int
    number: int
    ids: list[int]
    spans: list[Span]

    @classmethod
    def of(cls, place: int, chat: ChatTalk) -> _Kept:
        made = chat.document
        return cls(place, chat.number, made.ids.tolist() if made else [], list(made.spans) if made else [])

    def document(self) -> Rendered | None:
        return Rendered(np.asarray(self.ids, np.int32), tuple(self.spans)) if self.ids else None


def own_documents(
    own: ResponseCache, renderer: Renderer, talks: Sequence[Conversation], length: int, seed: int, work: Path,
    log: Callable[[str], None],
) -> list[Rendered | None]:  # fmt: skip
    """Return the conversations with the model's answers; None for one whose prompt leaves an answer no room in a row.

    Finished batches are kept in the folder `work`: a process that was cut off goes on with the next one.
    """
    sizes = [[len(message["content"]) for message in talk.questions] for talk in talks]
    alike = sorted(range(len(talks)), key=lambda i: (len(sizes[i]), sum(sizes[i]), i))
    chats = [ChatTalk(i, talks[i], renderer, length - own.limit) for i in alike]
    kept = storage.cut(work / KEPT, user_files.decoder(_Kept))
    places, found = range(0, len(chats), own.batch), Counter(k.place for k in kept)
    done = {place for place in places if found[place] >= min(own.batch, len(chats) - place)}
    how = GenerationOptions(own.target.eos_ids, own.limit, own.temperature, seed)
    answers = {k.number: k for k in kept if k.place in done}
    with (work / KEPT).open("ab", buffering=0) as file:
        for place, answered in regenerate_responses(own.target, chats, how, own.batch, done):
            lines = [_Kept.of(place, chat) for chat in answered]
            storage.append(file, [asdict(line) for line in lines])
            answers |= {line.number: line for line in lines}
            log(f"own answers: {len(answers)} of {len(talks)} conversations")
    return [answers[i].document() for i in range(len(talks))]
