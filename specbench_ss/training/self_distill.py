"""Self-distillation: a model's own responses to prompts, generated in batches and stored as they finish."""

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


CHECK_EVERY = 8  # tokens between checks for finished answers, each of which synchronises with the device
COMPACT_SHARE = 0.75  # finished answers leave the batch if at most this share continues


class PromptBatch:
    """Prompts [B] of any length, left-padded, and their answers in progress.

    visible: bool [B, longest + limit], False at padding.
    position_ids: int64, same shape, positions in each prompt's text.
    rows: [B'], rows of the unfinished answers in `answers` int64 [B, limit], which is -1 after an end.
    """

    def __init__(self, target: Target, prompts: Sequence[Sequence[int]], limit: int) -> None:
        self.target, self.limit, self.n_tokens = target, limit, 0
        device, longest = target.device, max(map(len, prompts))
        self.ids = torch.zeros(len(prompts), longest, dtype=torch.long, device=device)
        self.visible = torch.ones(len(prompts), longest + limit, dtype=torch.bool, device=device)
        for i, prompt in enumerate(prompts):
            self.ids[i, longest - len(prompt) :] = torch.tensor(prompt, device=device)
            self.visible[i, : longest - len(prompt)] = False
        self.position_ids = (self.visible.cumsum(1) - 1).clamp_min(0)
        self.cache = target.new_cache(longest + limit)
        self.rows = torch.arange(len(prompts), device=device)
        self.answers = torch.full((len(prompts), limit), -1, device=device)
        self.ended = torch.zeros(len(prompts), dtype=torch.bool, device=device)

    def logits(self, ids: Tensor) -> Tensor:
        """Run ids [B', q] after the cached tokens; return the logits [B', V] after the last of each."""
        target, past, q = self.target, self.cache.get_seq_length(), ids.shape[1]
        positions = self.position_ids[:, past : past + q]
        x, rotary = target.embed(ids, positions), target.rotary(positions, past + q)
        masks = {w: self._mask(past, q, w) for w in {block.window for block in target.family.blocks}}
        for block in target.family.blocks:
            x = block(x, self.cache, masks[block.window], rotary)
        self.cache.commit(q)
        return target.logits(target.family.norm(x[:, -1:]))[:, 0]

    def _mask(self, past: int, q: int, window: int | None) -> Tensor:
        """Return the additive mask [B', 1, q, past + q] of q new tokens."""
        end, device = past + q, self.ids.device
        later = torch.arange(end, device=device) > torch.arange(past, end, device=device)[:, None]
        masked = later | ~self.visible[:, None, :end]
        if window is not None:
            masked = masked | (self.position_ids[:, past:end, None] - self.position_ids[:, None, :end] >= window)
        mask = torch.zeros(masked.shape, dtype=self.target.dtype, device=device)
        return mask.masked_fill_(masked, torch.finfo(self.target.dtype).min)[:, None]

    def append_tokens(self, tokens: Tensor, ends: Tensor) -> None:
        """Append the next token [B'] of each answer. ends: tokens that end an answer."""
        self.answers[self.rows, self.n_tokens] = torch.where(self.ended, -1, tokens)
        self.ended |= torch.isin(tokens, ends)
        self.n_tokens += 1

    def continues(self) -> bool:
        """Return True if an answer is unfinished; remove finished ones from the batch now and then."""
        if self.n_tokens == self.limit:
            return False
        if self.n_tokens % CHECK_EVERY:
            return True
        active = (~self.ended).nonzero()[:, 0]
        if 0 < len(active) <= COMPACT_SHARE * len(self.ended):
            self.rows, self.ended, self.visible, self.position_ids = (
                x[active] for x in (self.rows, self.ended, self.visible, self.position_ids)
            )
            self.cache.select_sequences(active)
        return len(active) > 0

    def newest(self) -> Tensor:
        """Return the newest token of each unfinished answer, [B', 1]."""
        return self.answers[self.rows, self.n_tokens - 1 : self.n_tokens].clamp_min(0)


class OpenConversation(Protocol):
    """A conversation in which the model gives every answer."""

    def prompt(self) -> list[int] | None:
        """Return the token ids up to the next answer, or None at the end."""

    def answered(self, answer: list[int], ended: bool) -> None:
        """Add the answer with its end token, if any. ended: there is an end token."""


@dataclass(frozen=True, slots=True)
class GenerationOptions:
    """Generation of answers: at most `limit` tokens each; temperature 0 is greedy, else plain sampling.

    ends: token ids that end an answer.
    """

    ends: Collection[int]
    limit: int = 192
    temperature: float = 0.0
    seed: int = 0


T = TypeVar("T", bound=OpenConversation)


def regenerate_responses(
    target: Target, conversations: Sequence[T], options: GenerationOptions, batch: int = 128, skip: Collection[int] = ()
) -> Iterator[tuple[int, list[T]]]:
    """Answer every conversation to its end, and yield (place, conversations) batch by batch.

    A batch is the `batch` conversations from `place` on, so neighbours should be similar, to end together. Batches come
    in random order without the places in `skip`. A batch's answers depend only on the seed and its place.
    """
    for start in np.random.default_rng(0).permutation(range(0, len(conversations), batch)).tolist():
        if start in skip:
            continue
        chosen = conversations[start : start + batch]
        _complete_conversations(target, chosen, options, (options.seed, start))
        yield start, list(chosen)


def _complete_conversations(
    target: Target, conversations: Sequence[OpenConversation], options: GenerationOptions, seed: tuple[int, ...]
) -> None:
    turn = 0
    while pending := [
        (conversation, prompt) for conversation in conversations if (prompt := conversation.prompt()) is not None
    ]:
        answers = answer_batch(target, [prompt for _, prompt in pending], options, (*seed, turn))
        for (conversation, _), answer in zip(pending, answers, strict=True):
            conversation.answered(answer, bool(answer) and answer[-1] in options.ends)
        turn += 1


@torch.inference_mode()
def answer_batch(
    target: Target, prompts: Sequence[Sequence[int]], options: GenerationOptions, seed: tuple[int, ...] = (0,)
) -> list[list[int]]:
    """Return answers (with end token) to prompts of any length, generated in one batch.

    seed: for temperature > 0.
    """
    start = int(np.random.SeedSequence(seed).generate_state(1, np.uint64)[0] >> 1)
    rng = torch.Generator(target.device).manual_seed(start)
    batch = PromptBatch(target, prompts, options.limit)
    ends = torch.tensor(sorted(options.ends), device=target.device)
    ids = batch.ids
    while True:
        logits = batch.logits(ids)
        if options.temperature > 0:
            tokens = (logits.float() / options.temperature).softmax(-1).multinomial(1, generator=rng)[:, 0]
        else:
            tokens = logits.argmax(-1)
        batch.append_tokens(tokens, ends)
        if not batch.continues():
            return [[token for token in row if token >= 0] for row in batch.answers.tolist()]
        ids = batch.newest()


ANSWERS_FILE = "answers.jsonl"


@dataclass(frozen=True, slots=True)
class ResponseCache:
    """Answers by this model, of at most `limit` tokens; temperature 0 is greedy. batch: conversations at a time."""

    target: Target
    limit: int = 512
    temperature: float = 0.0
    batch: int = 32

    def about(self) -> dict[str, Any]:
        """Return the facts that determine the answers."""
        return {
            "base": self.target.weights_hash, "dtype": str(self.target.dtype), "ends": sorted(self.target.eos_ids),
            "limit": self.limit, "temperature": self.temperature, "batch": self.batch,
        }  # fmt: skip


class ChatConversation:
    """A conversation with the model's answers, in its chat format.

    Every prompt is the template filled with the texts so far, as in use; the newest answer is kept token by token. The
    conversation ends at an answer without an end token, and at a prompt that leaves no room for an answer in a row.
    """

    def __init__(self, number: int, conversation: Conversation, renderer: Renderer, longest: int) -> None:
        self.number, self.place, self.renderer, self.longest = number, conversation.place, renderer, longest
        self.questions = list(conversation.questions)
        self.messages: list[Message] = []
        self.rendered_prompt: Rendered | None = None
        self.document: Rendered | None = None

    def prompt(self) -> list[int] | None:
        """Return the token ids up to the next answer."""
        while self.questions and (not self.messages or self.messages[-1]["role"] != "user"):
            self.messages.append(self.questions.pop(0))
        if not self.messages or self.messages[-1]["role"] != "user":
            return None
        self.rendered_prompt = self.renderer.render(self.messages, self.place, generation_prompt=True)
        return self.rendered_prompt.ids.tolist() if len(self.rendered_prompt.ids) <= self.longest else None

    def answered(self, answer: list[int], ended: bool) -> None:
        """Add the answer to the document."""
        assert self.rendered_prompt is not None
        first = len(self.rendered_prompt.ids)
        ids = np.append(self.rendered_prompt.ids, np.asarray(answer, np.int32))
        self.document = Rendered(ids, (*self.rendered_prompt.spans, (first, len(ids))))
        text = self.renderer.tokenizer.decode(answer, skip_special_tokens=True)
        self.messages.append({"role": "assistant", "content": text})
        if not ended or not text.strip():
            self.questions.clear()


@dataclass(frozen=True, slots=True)
class _StoredAnswer:
    """A line of the file of answers: one conversation of the batch at `place`. ids: [n]; empty without an answer."""

    place: int
    number: int
    ids: list[int]
    spans: list[Span]

    @classmethod
    def of(cls, place: int, chat: ChatConversation) -> _StoredAnswer:
        document = chat.document
        return cls(
            place, chat.number, document.ids.tolist() if document else [], list(document.spans) if document else []
        )

    def document(self) -> Rendered | None:
        return Rendered(np.asarray(self.ids, np.int32), tuple(self.spans)) if self.ids else None


def own_documents(
    own: ResponseCache, renderer: Renderer, conversations: Sequence[Conversation], length: int, seed: int, work: Path,
    log: Callable[[str], None],
) -> list[Rendered | None]:  # fmt: skip
    """Return the conversations with the model's answers; None if a prompt leaves no room for an answer.

    Finished batches are stored in the folder `work`, so that an interrupted process resumes with the next one.
    """
    sizes = [[len(message["content"]) for message in conversation.questions] for conversation in conversations]
    order = sorted(range(len(conversations)), key=lambda i: (len(sizes[i]), sum(sizes[i]), i))
    chats = [ChatConversation(i, conversations[i], renderer, length - own.limit) for i in order]
    stored = storage.cut(work / ANSWERS_FILE, user_files.decoder(_StoredAnswer))
    places, counts = range(0, len(chats), own.batch), Counter(k.place for k in stored)
    done = {place for place in places if counts[place] >= min(own.batch, len(chats) - place)}
    options = GenerationOptions(own.target.eos_ids, own.limit, own.temperature, seed)
    answers = {k.number: k for k in stored if k.place in done}
    with (work / ANSWERS_FILE).open("ab", buffering=0) as file:
        for place, finished in regenerate_responses(own.target, chats, options, own.batch, done):
            lines = [_StoredAnswer.of(place, chat) for chat in finished]
            storage.append(file, [asdict(line) for line in lines])
            answers |= {line.number: line for line in lines}
            log(f"regenerated responses: {len(answers)} of {len(conversations)} conversations")
    return [answers[i].document() for i in range(len(conversations))]
