"""The law of the distribution: at T>0 each token is drawn from the model's own probabilities at its position."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import torch

from specbench_ss.decoding.loop import Limits
from specbench_ss.decoding.sampling import Sampling
from specbench_ss.testing.exactness import Decision, Impossible, Tallies
from specbench_ss.testing.law import Case, Law, Subject, Untested
from specbench_ss.testing.laws_greedy import not_exact
from specbench_ss.testing.watched_decoder import Seen, Trace, Watched

# one of each filter, and temperatures on both sides of those that people use
SAMPLINGS = (Sampling(1.0), Sampling(0.3), Sampling(0.7, top_p=0.95), Sampling(1.3, top_k=3))
# p-values below which a test is made again with other seeds, and below which it then breaks the law: chance does both
# in less than one of 10**8 cases, and the kit has some thousands for all registered methods
FIRST, SECOND = 1e-3, 1e-5
WORDS = 7  # of which a prompt has every pair
LENGTH, ANSWERS = 4, 200  # tokens of an answer, and answers, on the model of seven words
LONG, FEW = 24, 24  # and on the one of thousands
NUMBERED = 4  # the first tokens of an answer are tested each by itself


def samplings(subject: Subject) -> Iterator[Case]:
    """Yield requests for each kind of sampling; of a shape that is not tried in full, one of them.

    Any two tokens of the small model follow each other in the prompt, so that methods that look up text find some.
    """
    large = subject.target.vocab_size > 100
    prompt = subject.random_prompt(24) * 3 if large else every_pair(min(WORDS, subject.target.vocab_size))
    kinds = SAMPLINGS if subject.whole else SAMPLINGS[subject.number % len(SAMPLINGS) :][:1]
    for sampling in kinds[:2] if large else kinds:
        yield Case(prompt, LONG if large else LENGTH, sampling)


def every_pair(words: int) -> tuple[int, ...]:
    """Return a text in which every pair of these tokens occurs once (a de Bruijn sequence), and the first again."""
    pairs = [(a, b) for a in range(words) for b in range(a, words)]
    text = [x for a, b in pairs for x in ((a,) if a == b else (a, b))]
    return (*text, text[0])


def distribution(subject: Subject, case: Case) -> str:
    """Test every token against the probabilities of a fresh pass, and drawn drafts against their own."""
    answers = ANSWERS if case.max_new_tokens <= LENGTH else FEW
    return confirmed(subject, lambda seed: of_answers(subject, case, range(seed, seed + answers)))


def confirmed(subject: Subject, tallied: Callable[[int], Tallies]) -> str:
    """Describe the least p-value if it is too small twice, with other seeds the second time; '' otherwise.

    A token of probability 0 is too much at once. Raises Untested if there were too few tokens for any test.
    """
    found = ""
    for attempt, unlikely in enumerate((FIRST, SECOND)):
        try:
            tallies = tallied(1_000_000 * subject.number + 100_000 * attempt)
        except Impossible as impossible:
            return str(impossible)
        p = tallies.p_values()
        if not p:
            raise Untested("too few tokens were sampled")
        worst = min(p, key=lambda what: p[what])
        if p[worst] > unlikely:
            return ""
        found = f"{worst} (p = {p[worst]:.1g})"
    return found


def of_answers(subject: Subject, case: Case, seeds: range) -> Tallies:
    """Tally the tokens of one answer a seed."""
    decoder, tallies, known = subject.decoder(), Tallies(seeds[0]), dict[tuple[object, ...], Decision]()
    for seed in seeds:
        watched = Watched(decoder)
        sampling = replace(case.sampling, seed=seed)
        trace = subject.answer(watched, case.prompt, Limits(case.max_new_tokens), sampling)
        subject.logits(case.prompt, trace.tokens[:-1])  # one pass for all of them
        for number, (token, (where, drafted, q)) in enumerate(zip(trace.tokens, decided(trace), strict=False)):  # cut
            before = tuple(trace.tokens[:number])
            key = (before, tuple(drafted), where == "the first token")
            if q is not None or key not in known:
                p = case.sampling.probs(subject.logits(case.prompt, before))
                known[key] = Decision(p, drafted if q is None else (q > p).nonzero()[:, 0].tolist())
            tallies.add(f"token {number + 1}" if number < NUMBERED else "later tokens", known[key], token)
            tallies.add(where, known[key], token)
        for step in trace.steps:
            add_draws(tallies, step)
    return tallies


def decided(trace: Trace) -> Iterator[tuple[str, list[int], torch.Tensor | None]]:
    """Yield, for each token of an answer, its position in the draft, what was drafted there, and q [V] if drawn."""
    yield "the first token", [], None
    for seen in trace.steps:
        assert seen.tree is not None and seen.verdict is not None
        children = seen.tree.shape.children()
        for depth, node in enumerate(seen.verdict.path):
            q = None if seen.tree.draft_probs is None else seen.tree.draft_probs[node]
            drafted = seen.tree.tokens[children[node]].tolist()
            yield position(depth, drafted), drafted, q if drafted else None


def position(depth: int, drafted: list[int]) -> str:
    """Name a position in a draft: deep ones are seen too seldom to be tested each by itself."""
    return f"depth {min(depth, 14)} of the draft" if drafted else "after all of a draft"


def add_draws(tallies: Tallies, seen: Seen) -> None:
    """Tally the sampled tokens of a draft: siblings are drawn from draft_probs of their parent without replacement.

    A token that is repeated among siblings stands for one that is missing, where draft_probs has fewer tokens.
    """
    tree = seen.drafted
    if tree.draft_probs is None:
        return
    for node, children in enumerate(tree.shape.children()):
        left = tree.draft_probs[node].double()
        for token in dict.fromkeys(tree.tokens[children].tolist()):
            if float(left[token]) <= 0:
                raise Impossible(f"draws from draft_probs: token {token} has probability 0")
            tallies.add("draws from draft_probs", Decision(left / left.sum()), token)
            left = left.clone()
            left[token] = 0


LAWS = (
    Law("distribution", "at T>0 every token is drawn from the model's own probabilities", samplings, distribution,
        not_exact, on=("small", "long")),
)  # fmt: skip
