"""SuffixDecoding: continuations of the newest tokens in this request and, optionally, in earlier answers. Lossless.

Longer matches give longer drafts. All lookups are on the host. docs/methods/suffix.md.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Annotated, Any, ClassVar, Literal

import torch
from annotated_types import Ge, Gt, Le

from specbench_ss.engine.decoder import Decoder, DecodeState
from specbench_ss.engine.target import Target
from specbench_ss.engine.tree import MOST_NODES, DraftTree, indices
from specbench_ss.options import Bounded, option


@dataclass(slots=True)
class Draft:
    """Nodes 1.. of a draft under node 0: tokens, parents; score: the sum of their path probabilities."""

    tokens: list[int] = field(default_factory=list)
    parents: list[int] = field(default_factory=list)
    score: float = 0.0


class SuffixAutomaton:
    """An online suffix automaton with counts (Blumer et al. 1985): every substring of a growing text.

    A state represents substrings that end at the same positions, with their count and continuations. It has at most two
    states per token. Adding a token takes a few operations, and one for each suffix that occurred before: up to the
    length of the text if it repeats one token.

    State 0 is the empty text. Each state has its next states by token, suffix link, length and count.
    """

    def __init__(self) -> None:
        self.next: list[dict[int, int]] = [{}]
        self.link = [-1]
        self.length = [0]
        self.count = [0]
        self.last = 0  # the state of the whole text

    def end(self) -> None:
        """End the text; the next token begins another one."""
        self.last = 0

    def extend(self, token: int) -> None:
        """Add a token."""
        child = self.next[self.last].get(token)  # exists only if an earlier text has it
        if child is None:
            self.last = self._append(token)
        else:
            self.last = self._split(self.last, token, child)
        state = self.last
        while state > 0:
            self.count[state] += 1
            state = self.link[state]

    def follow(self, state: int, length: int, token: int) -> tuple[int, int]:
        """Return the state and length of the longest suffix of (match + token) that occurs."""
        while token not in self.next[state]:
            if state == 0:
                return 0, 0
            state = self.link[state]
            length = self.length[state]
        return self.next[state][token], length + 1

    def draft(self, state: int, most: int, least: float, chain: bool) -> Draft:
        """Return a draft after a state: the `most` likeliest nodes, best first, of path probability `least` or more.

        A child's probability is its relative frequency among its parent's continuations. Of equally likely nodes the
        shallower comes first, of siblings the one that occurred last for the first time. chain: only the likeliest
        child of each node.
        """
        draft = Draft()
        heap: list[tuple[float, int, int, int, int]] = []  # -probability, tie, parent, token, state
        node, p, tie = 0, 1.0, 0
        while len(draft.tokens) < most:
            following = self.next[state]
            total = sum(map(self.count.__getitem__, following.values()))
            for token, child in reversed(following.items()):
                probability = p * self.count[child] / total
                if probability >= least:
                    tie += 1
                    heapq.heappush(heap, (-probability, tie, node, token, child))
            if not heap:
                break
            q, _, parent, token, state = heapq.heappop(heap)
            draft.tokens.append(token)
            draft.parents.append(parent)
            draft.score -= q
            node, p = len(draft.tokens), -q
            if chain:
                heap.clear()
        return draft

    def _new(self, following: dict[int, int], link: int, length: int, count: int) -> int:
        self.next.append(following)
        self.link.append(link)
        self.length.append(length)
        self.count.append(count)
        return len(self.next) - 1

    def _append(self, token: int) -> int:
        """Add and return a state for the text with a token that never followed it before."""
        new, state = self._new({}, 0, self.length[self.last] + 1, 0), self.last
        while state >= 0 and token not in self.next[state]:
            self.next[state][token] = new
            state = self.link[state]
        if state >= 0:
            self.link[new] = self._split(state, token, self.next[state][token])
        return new

    def _split(self, state: int, token: int, child: int) -> int:
        """Return the state of the longest text of `state` with the token: the child, or a state split off it."""
        if self.length[child] == self.length[state] + 1:
            return child
        new = self._new(dict(self.next[child]), self.link[child], self.length[state] + 1, self.count[child])
        self.link[child] = new
        while state >= 0 and self.next[state].get(token) == child:
            self.next[state][token] = new
            state = self.link[state]
        return new


@dataclass(frozen=True, slots=True)
class SuffixOptions(Bounded):
    """Options of `suffix`; defaults as published, except that earlier answers are not used."""

    owner: ClassVar[str] = "suffix"
    form: Literal["tree", "chain"] = option("tree", "Draft shape: a tree, or a chain with only its likeliest path.")
    factor: Annotated[float, Ge(0)] = option(1.0, "Number of drafted nodes per matched token.")
    offset: float = option(0.0, "Number of additional drafted nodes.")
    min_prob: Annotated[float, Gt(0), Le(1)] = option(0.1, "Minimum estimated path probability of a drafted node.")
    depth: Annotated[int, Ge(1)] = option(64, "Maximum length of the match.")
    nodes: Annotated[int, Ge(1), Le(MOST_NODES)] = option(64, "Maximum number of drafted nodes per step.")
    past: bool = option(False, "Also use the answers to earlier prompts.")
    requests: Annotated[int, Ge(1)] = option(
        512, "With `past`: maximum number of stored answers; beyond it the older half is dropped."
    )

    def budget(self, matched: int) -> int:
        """Return the number of nodes to draft after a match of this length."""
        return max(0, min(self.nodes, int(self.factor * matched + self.offset)))


class Suffix(Decoder):
    """Suffix decoder: takes the draft of the greatest expected acceptance among all match lengths."""

    name = "suffix"
    summary = "SuffixDecoding: suffix automaton of the request, as an option of past answers; no training"
    paper = "Oliaro et al. 2024, arXiv:2411.04975"
    Options = SuffixOptions
    node_options = ("nodes",)

    def __init__(self, target: Target, options: Any = None) -> None:
        super().__init__(target, options)
        self.stateful = self.options.past
        self.request = SuffixAutomaton()
        self.past = Past(self.options.requests)
        self.matched = (0, 0)  # state and length of the newest tokens' match in the past
        self.read = 0  # tokens of the request that are in the automaton
        self.last_request: DecodeState | None = None

    @classmethod
    def test_instances(cls, target: Target) -> Mapping[str, Callable[[], Decoder]]:
        shapes = {
            "default": SuffixOptions(),
            "chain": SuffixOptions(form="chain", factor=2.0, depth=2, nodes=3),
            "eager": SuffixOptions(offset=8, min_prob=0.01),
            "past": SuffixOptions(past=True, requests=2, offset=4),
        }
        return {label: partial(cls, target, options) for label, options in shapes.items()}

    def search_space(self) -> Mapping[str, Sequence[Any]]:
        return {
            "nodes": (2, 4, 6, 8, 12, 16, 24, 32, 64),
            "min_prob": (0.5, 0.3, 0.2, 0.1, 0.05),
            "factor": (0.5, 1.0, 2.0, 4.0),
            "offset": (0.0, 1.0, 2.0, 4.0),
            "form": ("chain", "tree"),
        }

    def max_tokens_per_step(self) -> int:
        return 1 + int(self.options.nodes)

    def reset_history(self) -> None:
        self.past, self.last_request = Past(self.options.requests), None

    def on_prefill(self, state: DecodeState) -> None:
        """Add the last answer, which is complete now, to the past; start the new request."""
        if self.options.past and self.last_request is not None:
            self.past.add(self.last_request.ids[self.last_request.prompt_tokens :])
        self.last_request = state if self.options.past else None
        self.request, self.read, self.matched = SuffixAutomaton(), 0, (0, 0)
        self._read(state)

    def propose(self, state: DecodeState) -> DraftTree:
        """Return the draft of the best score."""
        self._read(state)
        best = Draft()
        for text, match, matched in self._matches():
            most = self.options.budget(matched)
            if most > best.score:  # no node's probability is above one
                draft = text.draft(match, most, self.options.min_prob, self.options.form == "chain")
                best = draft if draft.score > best.score else best
        return DraftTree.from_parents(
            torch.cat((state.root, indices(best.tokens, self.target.device))), (-1, *best.parents)
        )

    def _read(self, state: DecodeState) -> None:
        """Add the request's new tokens to its automaton and extend the match in the past."""
        new = state.ids[self.read :]
        self.read = len(state.ids)
        for token in new:
            self.request.extend(token)
        if self.options.past:
            for token in new[-self.options.depth :]:
                self.matched = self.past.text.follow(*self.matched, token)

    def _matches(self) -> Iterator[tuple[SuffixAutomaton, int, int]]:
        """Yield earlier occurrences of the newest tokens, longest match first: text, state, length of the match."""
        request = self.request
        yield from self._shorter(request, request.link[request.last], self.options.depth)
        if self.options.past:
            yield from self._shorter(self.past.text, *self.matched)

    def _shorter(self, text: SuffixAutomaton, state: int, length: int) -> Iterator[tuple[SuffixAutomaton, int, int]]:
        """Yield the states of a match and of its suffixes, at most `depth` long."""
        length = min(length, self.options.depth)
        while state > 0:
            if text.length[text.link[state]] < length:
                yield text, state, min(length, text.length[state])
            state = text.link[state]


class Past:
    """The last answers, at most `most`; beyond that the older half is dropped."""

    def __init__(self, most: int) -> None:
        self.most = most
        self.answers: deque[list[int]] = deque()
        self.text = SuffixAutomaton()

    def add(self, answer: list[int]) -> None:
        """Add an answer."""
        self.answers.append(answer)
        new = [answer]
        if len(self.answers) > self.most:
            while len(self.answers) > max(1, self.most // 2):
                self.answers.popleft()
            self.text, new = SuffixAutomaton(), list(self.answers)
        for answer in new:
            for token in answer:
                self.text.extend(token)
            self.text.end()
