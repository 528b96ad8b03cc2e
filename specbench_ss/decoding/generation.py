"""What one decoded request leaves behind: tokens, steps, times. Definitions: docs/metrics.md."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

Finish = Literal["eos", "stop", "length", "context"]


@dataclass(slots=True)
class Step:
    """One forward pass of the target that verifies. Times in seconds.

    nodes: drafted nodes (the root is not a draft). verified: drafted nodes that reached the last layer
    (fewer than nodes where a method prunes). depth: depth of the drafted tree, before pruning. accepted: drafted tokens
    accepted, before any cut.
    tokens: tokens kept, after the cut at the first end token, stop string or limit (accepted + 1 when uncut).
    draft_s + verify_s + accept_s + host_s = total_s.
    """

    nodes: int
    verified: int
    depth: int
    accepted: int
    tokens: int
    draft_s: float
    verify_s: float
    accept_s: float
    host_s: float
    total_s: float


@dataclass(frozen=True, slots=True)
class Offer:
    """Drafted tokens that were offered for one token of an answer.

    tokens: of the candidates, in order of proposal. q: the draft probability that the first was drawn with; None where
    the candidates were chosen, not drawn.
    """

    tokens: tuple[int, ...] = ()
    q: float | None = None


@dataclass(slots=True)
class Generation:
    """The answer to one prompt.

    tokens: kept ids, the end token included when it ended the answer. The first one comes from prefill, the
    others from steps: len(tokens) == prefill_tokens + sum(step.tokens).
    overshoot: accepted tokens beyond the cut, counted nowhere else.
    offers: at a temperature above 0, the candidates for each token, for the test of what was accepted.
    """

    tokens: list[int]
    prompt_tokens: int
    finish: Finish
    prefill_s: float
    prefill_tokens: int
    steps: list[Step] = field(default_factory=list)
    overshoot: int = 0
    draft_calls: int = 0
    offers: list[Offer] = field(default_factory=list)

    @property
    def decode_s(self) -> float:
        """Seconds spent in steps."""
        return sum(step.total_s for step in self.steps)

    @property
    def wall_s(self) -> float:
        """Prefill and decode, seconds."""
        return self.prefill_s + self.decode_s

    @property
    def tokens_per_step(self) -> float | None:
        """tau of this request: tokens that steps produced / steps; None without a step."""
        return sum(s.tokens for s in self.steps) / len(self.steps) if self.steps else None

    def check(self) -> None:
        """Raise RuntimeError where the counts do not add up (an impossible result is a bug)."""
        wrong = [
            s for s in self.steps if not (0 <= s.accepted <= s.depth <= s.nodes and 0 <= s.tokens <= s.accepted + 1)
        ]
        if wrong:
            raise RuntimeError(f"impossible counts of a step: {wrong[0]}")
        made = self.prefill_tokens + sum(s.accepted + 1 for s in self.steps)
        kept = self.prefill_tokens + sum(s.tokens for s in self.steps)
        if len(self.tokens) != kept or kept + self.overshoot != made:
            raise RuntimeError(f"counts do not add up: {len(self.tokens)} tokens, {kept} kept, {made} made")
