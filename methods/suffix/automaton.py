"""An online suffix automaton with counts (Blumer et al. 1985): every substring of a text that grows at its end.

A state stands for substrings that end at the same places, so it knows how often each occurred and what followed. At
most two states a token; a few operations for each token added, and one for each suffix that occurred before: in a text
that repeats one token throughout that is its length.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass, field


@dataclass(slots=True)
class Draft:
    """Nodes 1.. of a draft under node 0: tokens, parents; score: the sum of their path probabilities."""

    tokens: list[int] = field(default_factory=list)
    parents: list[int] = field(default_factory=list)
    score: float = 0.0


class SuffixAutomaton:
    """State 0 is the empty text. Of each state: next states by token, the longest shorter suffix, length, count."""

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
