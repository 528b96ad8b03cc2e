"""SuffixDecoding: what followed the newest tokens in this request and, where asked, in earlier answers. Lossless.

The longer the match, the longer the draft. Lookups on the host only. docs/methods/suffix.md.
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
    """An online suffix automaton with counts (Blumer et al. 1985): every substring of a text that grows at its end.

    A state stands for substrings that end at the same places, so it knows how often each occurred and what followed. At
    most two states a token; a few operations for each token added, and one for each suffix that occurred before: in a
    text that repeats one token throughout that is its length.

    State 0 is the empty text. Of each state: next states by token, the longest shorter suffix, length, count.
    """

    def __init__(self) -> None:
        self.next: list[dict[int, int]] = [{}]
        self.link = [-1]
        self.length = [0]
        self.count = [0]
        self.last = 0  # the state of the whole text

    def end(self) -> None:
        """The text is complete; what is added now begins another one."""
        self.last = 0

    def extend(self, token: int) -> None:
        """One more token."""
        known = self.next[self.last].get(token)  # only where another text was here before
        if known is None:
            self.last = self._append(token)
        else:
            self.last = self._exactly(self.last, token, known)
        state = self.last
        while state > 0:
            self.count[state] += 1
            state = self.link[state]

    def follow(self, state: int, length: int, token: int) -> tuple[int, int]:
        """The longest suffix of (what was matched + token) that occurs: its state and length."""
        while token not in self.next[state]:
            if state == 0:
                return 0, 0
            state = self.link[state]
            length = self.length[state]
        return self.next[state][token], length + 1

    def draft(self, state: int, most: int, least: float, chain: bool) -> Draft:
        """What may follow a state: the `most` likeliest nodes, best first, of path probability `least` or more.

        A child's probability is its share of what followed its parent. Of equally likely nodes the shallower goes
        first, of siblings the one whose token was first seen last. chain: only the likeliest child of each node.
        """
        found = Draft()
        heap: list[tuple[float, int, int, int, int]] = []  # -probability, tie, parent, token, state
        node, p, tie = 0, 1.0, 0
        while len(found.tokens) < most:
            following = self.next[state]
            shown = sum(map(self.count.__getitem__, following.values()))
            for token, child in reversed(following.items()):
                probability = p * self.count[child] / shown
                if probability >= least:
                    tie += 1
                    heapq.heappush(heap, (-probability, tie, node, token, child))
            if not heap:
                break
            q, _, parent, token, state = heapq.heappop(heap)
            found.tokens.append(token)
            found.parents.append(parent)
            found.score -= q
            node, p = len(found.tokens), -q
            if chain:
                heap.clear()
        return found

    def _new(self, following: dict[int, int], link: int, length: int, count: int) -> int:
        self.next.append(following)
        self.link.append(link)
        self.length.append(length)
        self.count.append(count)
        return len(self.next) - 1

    def _append(self, token: int) -> int:
        """A state for the text with the token, which it never had behind it before."""
        new, state = self._new({}, 0, self.length[self.last] + 1, 0), self.last
        while state >= 0 and token not in self.next[state]:
            self.next[state][token] = new
            state = self.link[state]
        if state >= 0:
            self.link[new] = self._exactly(state, token, self.next[state][token])
        return new

    def _exactly(self, state: int, token: int, child: int) -> int:
        """The state of the state's longest text with the token: the child, or what is split off it."""
        if self.length[child] == self.length[state] + 1:
            return child
        split = self._new(dict(self.next[child]), self.link[child], self.length[state] + 1, self.count[child])
        self.link[child] = split
        while state >= 0 and self.next[state].get(token) == child:
            self.next[state][token] = split
            state = self.link[state]
        return split


@dataclass(frozen=True, slots=True)
class SuffixOptions(Bounded):
    """Options of `suffix`; defaults as published, but that earlier answers are not looked into.

    Raises UserError for values beyond their bounds.
    """

    owner: ClassVar[str] = "suffix"
    form: Literal["tree", "chain"] = option("tree", "Form of the draft: a tree, or as a chain only its likeliest path.")
    factor: Annotated[float, Ge(0)] = option(1.0, "How many nodes are drafted for every token that matched.")
    offset: float = option(0.0, "How many nodes are drafted in addition, however many tokens matched.")
    min_prob: Annotated[float, Gt(0), Le(1)] = option(
        0.1, "A node is drafted only if its path is estimated to be at least this probable."
    )
    depth: Annotated[int, Ge(1)] = option(64, "How many of the newest tokens are compared at most.")
    nodes: Annotated[int, Ge(1), Le(MOST_NODES)] = option(64, "How many nodes a step drafts at most.")
    past: bool = option(False, "Look into the answers to earlier prompts as well.")
    requests: Annotated[int, Ge(1)] = option(
        512, "With `past`: how many answers are kept at most. Beyond that the older half is forgotten."
    )

    def budget(self, matched: int) -> int:
        """Nodes to draft after a match of this length."""
        return max(0, min(self.nodes, int(self.factor * matched + self.offset)))


class Suffix(Decoder):
    """Of the drafts for all lengths of match, here and in the past, the one of the greatest expected acceptance."""

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
        self.matched = (0, 0)  # state and length of what the newest tokens match in the past
        self.read = 0  # tokens of the request that are in the automaton
        self.answered: DecodeState | None = None

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
        self.past, self.answered = Past(self.options.requests), None

    def on_prefill(self, state: DecodeState) -> None:
        """The request is read anew; the last answer, complete only now, becomes part of the past."""
        if self.options.past and self.answered is not None:
            self.past.add(self.answered.ids[self.answered.prompt_tokens :])
        self.answered = state if self.options.past else None
        self.request, self.read, self.matched = SuffixAutomaton(), 0, (0, 0)
        self._read(state)

    def propose(self, state: DecodeState) -> DraftTree:
        """The draft of the best score."""
        self._read(state)
        best = Draft()
        for text, place, matched in self._matches():
            most = self.options.budget(matched)
            if most > best.score:  # no node's probability is above one
                found = text.draft(place, most, self.options.min_prob, self.options.form == "chain")
                best = found if found.score > best.score else best
        return DraftTree.from_parents(
            torch.cat((state.root, indices(best.tokens, self.target.device))), (-1, *best.parents)
        )

    def _read(self, state: DecodeState) -> None:
        """What is new of the request into its automaton; the match in the past goes along."""
        new = state.ids[self.read :]
        self.read = len(state.ids)
        for token in new:
            self.request.extend(token)
        if self.options.past:
            for token in new[-self.options.depth :]:
                self.matched = self.past.text.follow(*self.matched, token)

    def _matches(self) -> Iterator[tuple[SuffixAutomaton, int, int]]:
        """Where the newest tokens occurred before, longest match first: text, state, length of the match."""
        request = self.request
        yield from self._shorter(request, request.link[request.last], self.options.depth)
        if self.options.past:
            yield from self._shorter(self.past.text, *self.matched)

    def _shorter(self, text: SuffixAutomaton, state: int, length: int) -> Iterator[tuple[SuffixAutomaton, int, int]]:
        """The states of a match and of its suffixes, at most `depth` long."""
        length = min(length, self.options.depth)
        while state > 0:
            if text.length[text.link[state]] < length:
                yield text, state, min(length, text.length[state])
            state = text.link[state]


class Past:
    """The last answers, at most `most`: when they are more, the older half is forgotten at once."""

    def __init__(self, most: int) -> None:
        self.most = most
        self.answers: deque[list[int]] = deque()
        self.text = SuffixAutomaton()

    def add(self, answer: list[int]) -> None:
        """One more answer."""
        self.answers.append(answer)
        new = [answer]
        if len(self.answers) > self.most:
            while len(self.answers) > max(1, self.most // 2):
                self.answers.popleft()
            self.text, new = SuffixAutomaton(), list(self.answers)
        for each in new:
            for token in each:
                self.text.extend(token)
            self.text.end()
