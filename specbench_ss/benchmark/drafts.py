"""The draft of every step of some answers, in a second, untimed pass: what was drafted, what became of it, how likely.

Greedy answers, and sampled ones with their seed, come out the same again. Methods that remember prompts are left out.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from specbench_ss.benchmark.schedule import Sample
from specbench_ss.decoding.decoder import Decoder, State
from specbench_ss.decoding.generation import Generation
from specbench_ss.decoding.sampling import Sampling
from specbench_ss.decoding.target import Output
from specbench_ss.decoding.tree import DraftTree
from specbench_ss.decoding.verify import Verdict
from specbench_ss.decoding.wrapped import Wrapped
from specbench_ss.runs.side_files import Drafts, DraftStep

MOST_STEPS = 256  # recorded of an answer, so that a record stays small
REMEMBERS = "the method remembers prompts: a second pass would be answered from memory"
DIGITS = 5  # of a probability


def chosen(samples: Sequence[Sample], which: str, seed: int) -> list[Sample]:
    """Return the samples whose drafts are recorded: first turns and first repeats of some questions, every method.

    which: `first`, the first question of each task, or a share of all questions, drawn by the seed.
    """
    own = [s for s in samples if s.turn == 0 and s.repeat == 0]
    questions = list({s.question.id: s.question for s in own}.values())
    if which == "first":
        kept = {q.category: q.id for q in reversed(questions)}.values()
        return [s for s in own if s.question.id in set(kept)]
    many = round(float(which) * len(questions))
    drawn = {q.id for q in random.Random(f"drafts:{seed}").sample(questions, many)}
    return [s for s in own if s.question.id in drawn]


class Recorder(Wrapped):
    """Wraps another decoder, and keeps the draft of each of its first steps."""

    name, summary = "recorder", "another decoder, whose drafts are kept"

    def __init__(self, inner: Decoder) -> None:
        super().__init__(inner)
        self.steps: list[DraftStep] = []
        self._drafted: DraftTree | None = None

    def forward(self, state: State, tree: DraftTree) -> Output:
        """Delegates to the wrapped decoder, and keeps the draft as it was verified against."""
        self._drafted = tree
        return self.inner.forward(state, tree)

    def accept(self, state: State, tree: DraftTree, output: Output) -> Verdict:
        """Delegates to the wrapped decoder, and keeps what was accepted."""
        verdict = self.inner.accept(state, tree, output)
        if len(self.steps) < MOST_STEPS and self._drafted is not None:
            self.steps.append(draft_step(self.target, self._drafted, tree, output.logits[0], verdict, state.sampling))
        return verdict


def draft_step(
    target: Any, drafted: DraftTree, kept: DraftTree, logits: Tensor, verdict: Verdict, sampling: Sampling
) -> DraftStep:
    """Return the record of a step. logits [n, V]: of the n nodes of `kept`, what is left of `drafted`."""
    tokens, parents = drafted.tokens.tolist(), list(drafted.shape.parents)
    place = places(drafted, kept)
    p: list[float | None] = [None] * len(tokens)
    for node, value in enumerate(_target_probs(kept, logits, sampling), start=1):
        p[place[node]] = value
    return DraftStep(
        tokens,
        parents,
        [_text(target, token) for token in tokens],
        path=[place[node] for node in verdict.path],
        next=int(verdict.next_token),
        next_text=_text(target, int(verdict.next_token)),
        pruned=sorted(set(range(len(tokens))) - set(place)),
        p=p,
        q=_draft_probs(drafted),
    )


def places(drafted: DraftTree, kept: DraftTree) -> list[int]:
    """Return for each kept node its number in the drafted tree: the kept ones are in the same order there.

    Raises ValueError where `kept` is no part of `drafted`.
    """
    tokens, wanted = drafted.tokens.tolist(), kept.tokens.tolist()
    found = [0]
    for node in range(1, len(kept)):
        parent = found[kept.shape.parents[node]]
        rest = range(found[-1] + 1, len(drafted))
        here = (i for i in rest if tokens[i] == wanted[node] and drafted.shape.parents[i] == parent)
        number = next(here, None)
        if number is None:
            raise ValueError("the verified tree is no part of the drafted one")
        found.append(number)
    return found


def _target_probs(kept: DraftTree, logits: Tensor, sampling: Sampling) -> list[float]:
    """The target's probability of every node but the root, behind its parent; at T=0 that of T=1."""
    if len(kept) == 1:
        return []
    p = logits.float().softmax(-1) if sampling.greedy else sampling.probs(logits)
    return [round(x, DIGITS) for x in p[kept.parents()[1:], kept.tokens[1:]].tolist()]


def _draft_probs(drafted: DraftTree) -> list[float] | None:
    """With which probability each node was drawn; that of the root is 1."""
    if drafted.draft_probs is None:
        return None
    q = drafted.draft_probs[drafted.parents(), drafted.tokens].tolist()
    return [1.0, *(round(x, DIGITS) for x in q[1:])]


def _text(target: Any, token: int) -> str:
    if target.tokenizer is None:
        return ""
    return str(target.tokenizer.decode([token], skip_special_tokens=False))


def recorded(sample: Sample, recorder: Recorder, again: Generation, timed: Sequence[int]) -> Drafts:
    """Return the record of an answer. again: the second pass. timed: the tokens of the first one.

    Raises RuntimeError where other steps were recorded than those of the answer.
    """
    if len(recorder.steps) != min(len(again.steps), MOST_STEPS):
        raise RuntimeError(f"{len(recorder.steps)} steps were recorded of an answer of {len(again.steps)}")
    same = again.tokens == list(timed)
    reason = "" if same else "the second pass gave another answer"
    reason = f"only the first {MOST_STEPS} steps are kept" if len(again.steps) > MOST_STEPS and same else reason
    return Drafts(*sample.key, same_answer=same, reason=reason, steps=recorder.steps)
