"""Checks of sampled decoding: every token is drawn from the target's distribution.

Each token x of a step is compared with the distribution p [V] of its position, given all tokens before it. Its place
in the cumulative distribution is uniform (Rosenblatt 1952), and P(x is drafted) is the sum of p over drafted tokens.
The evidence is the betting score that a run uses for its own samples (`stats/betting.py`), kept for each position in
the draft, so that chance exceeds it with at most the stated probability, wherever counting ends.

Drafts of random weights are seldom accepted, so the acceptance rule is given logits under which drafted tokens are
likely, and is called many times for each verified draft, with another seed each time.
"""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from specbench_ss.conformance.exact_checks import REPEATING, not_exact
from specbench_ss.conformance.harness import Case, Check, RecordingDecoder, StepRecord, Subject, Trace, Untested
from specbench_ss.engine.decoder import Decoder, DecodeState
from specbench_ss.engine.generate import StopParams
from specbench_ss.engine.sampling import BLOCK, TOKEN, SamplingParams, exponential_race
from specbench_ss.engine.target import Output
from specbench_ss.engine.tree import DraftTree
from specbench_ss.engine.verify import VerifyResult
from specbench_ss.stats.betting import PIT_BINS, SampledTokens, acceptance, bound

# so many tokens find an acceptance of 0.98 where 0.85 is right with probability 0.99, at p < 1e-5 after Bonferroni over
# 24 positions
MIN_DRAWS, POSITIONS = 400, 24
SUM_TOLERANCE = 1e-6  # of a sum of float32 probabilities


class Decision:
    """The distribution p [V] that a token is decided by.

    First in its cumulative order are the tokens that a rule which accepts too much gives too often: the drafted ones,
    or, if they were drawn from q [V], those that q favours.
    """

    def __init__(self, p: Tensor, drafted: Sequence[int] = (), q: Tensor | None = None) -> None:
        self.p = p.double().numpy()
        self.drafted = frozenset(drafted if q is None else (q > p).nonzero()[:, 0].tolist())
        first = np.isin(np.arange(len(self.p)), list(self.drafted))
        order = np.lexsort((-self.p, ~first))
        self.chance = float(self.p[first].sum())  # that the token is a drafted one
        self.before = np.empty_like(self.p)  # the probability of all tokens that come before each
        self.before[order] = np.cumsum(self.p[order]) - self.p[order]


class Tallies:
    """Statistics of decided tokens by position in the draft."""

    def __init__(self, seed: int) -> None:
        self.by_position = defaultdict[str, SampledTokens](SampledTokens)
        self.rng = np.random.default_rng(seed)

    def add(self, where: str, decision: Decision, token: int) -> None:
        """Add a token that should have been drawn from the decision's p. Raises Impossible if p(token) is 0."""
        p = float(decision.p[token])
        if p <= 0:
            raise Impossible(f"{where}: token {token} has probability 0")
        place = float(decision.before[token]) + self.rng.random() * p
        if 0 < decision.chance < 1 - SUM_TOLERANCE:
            self.by_position[where] += acceptance(decision.chance, token in decision.drafted)
        self.by_position[where].pit_counts[min(int(place * PIT_BINS), PIT_BINS - 1)] += 1

    def scarce(self, wanted: int = MIN_DRAWS) -> list[str]:
        """Return the positions at which fewer tokens were decided."""
        return [where for where, tally in self.by_position.items() if tally.tokens < wanted]

    @property
    def tested_acceptance(self) -> bool:
        """Return True if drafted tokens were decided often enough at some position."""
        return any(tally.offered >= MIN_DRAWS for tally in self.by_position.values())

    def worst(self) -> tuple[float, str]:
        """Return the least p-value of any position, times the number of positions (Bonferroni), and the position.

        It holds wherever counting ends, so that counting may end as soon as it is small.
        """
        many = max(POSITIONS, len(self.by_position))
        return min(((many * bound(tally), where) for where, tally in self.by_position.items()), default=(1.0, ""))

    def found(self, where: str) -> str:
        """Describe what was counted at a position."""
        tally = self.by_position[where]
        found = f"{where}: {tally.tokens} tokens are not distributed as the logits are"
        if not tally.offered:
            return found
        share, expected = tally.accepted / tally.offered, tally.expected / tally.offered
        return f"{found}; {share:.3f} of {tally.offered} are drafted ones, their probability is {expected:.3f}"


class Impossible(Exception):  # noqa: N818
    """Raised for a token that its distribution never gives."""


# one of each filter and rule, temperatures on both sides of those that people use, and one that no method can expect
SAMPLINGS = (
    SamplingParams(1.0), SamplingParams(0.3), SamplingParams(0.7, top_p=0.95), SamplingParams(1.3, top_k=3),
    SamplingParams(1.0, verification=BLOCK), SamplingParams(round(random.SystemRandom().uniform(0.4, 1.6), 2)),
)  # fmt: skip
# p-values below which a test is repeated with other seeds, and below which it then fails: chance does both
# in less than one of 10**8 cases, and the kit has some thousands for all registered methods
ALPHA, RETRY_ALPHA = 1e-3, 1e-5
WORDS = 7  # of which a prompt has every pair
LENGTH, ANSWERS = 4, 200  # tokens of an answer, and answers, on the model of seven words
LONG, FEW_ANSWERS = 24, 24  # and on the one of thousands
LOOK = 10  # answers between two looks at the p-value
NUMBERED = 4  # the first tokens of an answer are tested each by itself


def samplings(subject: Subject) -> Iterator[Case]:
    """Yield requests for each kind of sampling; of an instance that is not tried in full, one of them.

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
    answers = ANSWERS if case.max_new_tokens <= LENGTH else FEW_ANSWERS
    return confirmed(subject, lambda seed, alpha: of_answers(subject, case, range(seed, seed + answers), alpha))


def confirmed(subject: Subject, tallied: Callable[[int, float], Tallies]) -> str:
    """Describe the least p-value if it is too small twice, with other seeds the second time; '' otherwise.

    A token of probability 0 is too much at once. tallied: counts from a seed on, and may end where the p-value is at
    most alpha. Raises Untested if there were too few tokens for any test.
    """
    found = ""
    for attempt, alpha in enumerate((ALPHA, RETRY_ALPHA)):
        try:
            tallies = tallied(1_000_000 * subject.number + 100_000 * attempt, alpha)
        except Impossible as impossible:
            return str(impossible)
        if not tallies.by_position:
            raise Untested("too few tokens were sampled")
        p, where = tallies.worst()
        if p > alpha:
            return ""
        found = f"{tallies.found(where)} (p = {p:.1g})"
    return found


def of_answers(subject: Subject, case: Case, seeds: range, alpha: float) -> Tallies:
    """Tally the tokens of one answer a seed, until their p-value is at most alpha."""
    decoder, tallies, known = subject.decoder(), Tallies(seeds[0]), dict[tuple[object, ...], Decision]()
    for seed in seeds:
        watched = RecordingDecoder(decoder)
        sampling = replace(case.sampling, seed=seed)
        trace = subject.answer(watched, case.prompt, StopParams(case.max_new_tokens), sampling)
        subject.logits(case.prompt, trace.tokens[:-1])  # one pass for all of them
        # a block that is accepted up to some depth depends on later drafts: only its tokens by number follow p
        as_block = sampling.verification == BLOCK
        for number, (token, (where, drafted, q)) in enumerate(zip(trace.tokens, decided(trace), strict=False)):  # cut
            before = tuple(trace.tokens[:number])
            drafted, q = ([], None) if as_block else (drafted, q)
            key = (before, tuple(drafted), where == "the first token")
            if q is not None or key not in known:
                p = case.sampling.probs(subject.logits(case.prompt, before))
                known[key] = Decision(p, drafted, q)
            tallies.add(f"token {number + 1}" if number < NUMBERED else "later tokens", known[key], token)
            if not as_block:
                tallies.add(where, known[key], token)
        for step in trace.steps:
            add_draws(tallies, step)
        if seed % LOOK == 0 and tallies.worst()[0] <= alpha:
            break
    return tallies


def decided(trace: Trace) -> Iterator[tuple[str, list[int], torch.Tensor | None]]:
    """Yield, for each token of an answer, its position in the draft, what was drafted there, and q [V] if drawn."""
    yield "the first token", [], None
    for seen in trace.steps:
        assert seen.tree is not None and seen.result is not None
        children = seen.tree.topology.children()
        for depth, node in enumerate(seen.result.path):
            q = seen.tree.children_probs(node)
            drafted = seen.tree.tokens[children[node]].tolist()
            yield position(depth, drafted), drafted, q if drafted else None


def position(depth: int, drafted: list[int]) -> str:
    """Name a position in a draft: deep ones are seen too seldom to be tested each by itself."""
    return f"depth {min(depth, 14)} of the draft" if drafted else "after all of a draft"


def add_draws(tallies: Tallies, seen: StepRecord) -> None:
    """Tally the sampled tokens of a draft: siblings are drawn from draft_probs of their parent without replacement.

    A token that is repeated among siblings stands for one that is missing, where draft_probs has fewer tokens.
    """
    tree = seen.drafted
    for node, children in enumerate(tree.topology.children()):
        q = tree.children_probs(node)
        if q is None:
            return
        left = q.double()
        for token in dict.fromkeys(tree.tokens[children].tolist()):
            if float(left[token]) <= 0:
                raise Impossible(f"draws from draft_probs: token {token} has probability 0")
            tallies.add("draws from draft_probs", Decision(left / left.sum()), token)
            left = left.clone()
            left[token] = 0


BLOCK_LENGTH = 16
LIKELY = 0.85  # probability of what was drafted
REPEATS, MORE = 40, 240  # verdicts on each draft; if drafts or tokens deep in them are seldom
MAX_VERDICTS = 6000  # verdicts in all; at LIKELY a depth of 14 is then reached often enough
SAMPLED = 3  # times as many for sampled drafts, in which a rule that accepts too much shows less
LEAST_ANSWERS, MOST_ANSWERS = 3, 24


class Designed(RecordingDecoder):
    """Accepts as the wrapped decoder does, but from logits that make the drafted tokens likely."""

    def accept(self, state: DecodeState, tree: DraftTree, output: Output) -> VerifyResult:
        output.logits = designed(output.logits[0], tree, state.sampling)[None]
        self.steps[-1].logits = output.logits[0].clone()
        return super().accept(state, tree, output)


class Repeated(Designed):
    """As `Designed`, and calls `accept` many times for each draft, tallying what it decides."""

    def __init__(self, inner: Decoder, tallies: Tallies, seed: int, repeats: int) -> None:
        super().__init__(inner)
        self.tallies, self.seed, self.repeats = tallies, seed, repeats
        self.verdicts, self.sampled = 0, False

    def accept(self, state: DecodeState, tree: DraftTree, output: Output) -> VerifyResult:
        """Tally repeated verdicts, then return the one that counts."""
        logits = designed(output.logits[0], tree, state.sampling)
        children = tree.topology.children()
        probs = state.sampling.probs(logits)
        known = dict[int, Decision]()
        self.sampled = self.sampled or tree.draft_probs is not None
        for _ in range(self.repeats if len(tree) > 1 else REPEATS // 10):
            self.verdicts += 1
            rng = torch.Generator().manual_seed(self.seed * MAX_VERDICTS * 10 + self.verdicts)
            drawn = redrawn(tree, rng)
            again, given = replace(state, ids=[*state.ids], rng=rng), replace(output, logits=logits.clone()[None])
            verdict = self.inner.accept(again, drawn, given)
            for depth, (node, token) in enumerate(zip(verdict.path, verdict.tokens, strict=True)):
                drafted = children[node]
                if node not in known:
                    q = tree.children_probs(node) if drafted else None
                    known[node] = Decision(probs[node], tree.tokens[drafted].tolist(), q)
                self.tallies.add(position(depth, drafted), known[node], token)
        return super().accept(state, tree, output)


def redrawn(tree: DraftTree, rng: torch.Generator) -> DraftTree:
    """Return the tree with other sampled tokens, drawn from the same draft_probs; deterministic ones stay.

    Exactness of sampled drafts holds on average over what is drawn.
    """
    q = tree.draft_probs
    if q is None or len(tree) == 1:
        return tree
    parents = tree.parents()[1:]
    places = (parents[:, None] == parents).tril(-1).sum(-1)  # among siblings
    order = exponential_race(q, rng).topk(int(places.max()) + 1).indices  # without replacement
    rows = parents.clamp_max(len(q) - 1)
    drawn = order[rows, places]
    drawn = torch.where(q[rows, drawn] > 0, drawn, order[rows, 0])  # the first again where q has fewer tokens
    drawn = torch.where(parents < len(q), drawn, tree.tokens[1:])
    return replace(tree, tokens=torch.cat((tree.tokens[:1], drawn)))


def designed(logits: Tensor, tree: DraftTree, sampling: SamplingParams) -> Tensor:
    """Return logits [n, V] of which the temperature makes a stated mixture; nodes without children keep theirs.

    LIKELY is the share of the drafted tokens, or of the distribution that they were drawn from. The rest goes to what
    is not drafted, by the model's own probabilities; for sampled drafts most of it goes to the token that is drafted
    least, so that one of seven is refused and not fewer.
    """
    wanted = torch.zeros_like(logits, dtype=torch.float32)
    parents, q = tree.parents()[1:], tree.draft_probs
    own = logits.float().softmax(-1)
    certain = parents >= (0 if q is None else len(q))
    n = torch.arange(1, len(tree), dtype=torch.float32)[certain]
    wanted.index_put_((parents[certain], tree.tokens[1:][certain]), 1 / (1.0 + n), accumulate=True)
    rest = own.masked_fill(wanted > 0, 0)
    if q is not None:
        drawn = parents[~certain].unique()
        wanted[drawn] = q[drawn].float()
        least = torch.zeros_like(own).scatter_(1, wanted.argmin(-1, keepdim=True), 1.0)
        rest[drawn] = (0.8 * least + 0.2 * own)[drawn]
    drafted, undrafted = wanted.sum(-1, keepdim=True), rest.sum(-1, keepdim=True)
    tiny = torch.finfo(torch.float32).tiny
    rest = torch.where(undrafted > 0, rest / undrafted.clamp_min(tiny), own)
    mixed = LIKELY * wanted / drafted.clamp_min(tiny) + (1 - LIKELY) * rest
    temperature = sampling.temperature or 1.0
    return torch.where(drafted > 0, temperature * mixed.clamp_min(tiny).log(), logits.float()).to(logits.dtype)


def long(subject: Subject) -> Iterator[Case]:
    """Yield requests for answers of many blocks."""
    yield Case(REPEATING, BLOCK_LENGTH)
    for case in samplings(subject):
        if case.sampling.verification == TOKEN:  # by depth, see `of_answers`
            yield replace(case, max_new_tokens=BLOCK_LENGTH)


def blocks(subject: Subject, case: Case) -> str:
    """At T>0, test what is accepted at every depth; at T=0, test the argmax."""
    if case.sampling.greedy:
        return greediness(subject, case)
    return confirmed(subject, lambda seed, alpha: of_verdicts(subject, case, seed, alpha))


def greediness(subject: Subject, case: Case) -> str:
    """Test that at T=0 every token is the most probable one in the logits that the rule was given."""
    trace = subject.answer(Designed(subject.decoder()), case.prompt, StopParams(case.max_new_tokens), case.sampling)
    if subject.one.max_tokens_per_step() != 1 and not any(seen.tree and len(seen.tree) > 1 for seen in trace.steps):
        raise Untested("nothing was drafted at temperature 0")
    for seen in trace.steps:
        assert seen.result is not None
        for node, token in zip(seen.result.path, seen.result.tokens, strict=True):
            row = seen.logits[node]
            if float(row[token]) < float(row.max()):
                return f"after {seen.ids}, node {node} of the draft: {token}, the logits have {int(row.argmax())} first"
    return ""


def of_verdicts(subject: Subject, case: Case, first: int, alpha: float) -> Tallies:
    """Tally verdicts on the drafts of some answers, until every position of a draft was decided often enough.

    Counting ends before where the p-value is at most alpha.
    """
    decoder, tallies, verdicts = subject.decoder(), Tallies(first), 0
    for answer in range(MOST_ANSWERS):
        watched = Repeated(decoder, tallies, first + answer, REPEATS if answer < LEAST_ANSWERS else MORE)
        sampling = replace(case.sampling, seed=first + answer)
        subject.answer(watched, case.prompt, StopParams(case.max_new_tokens), sampling)
        verdicts += watched.verdicts
        if tallies.worst()[0] <= alpha:
            return tallies
        wanted = MIN_DRAWS * SAMPLED if watched.sampled else MIN_DRAWS
        enough = (
            tallies.tested_acceptance or subject.one.max_tokens_per_step() == 1
        )  # a pass of one row accepts nothing
        if verdicts >= MAX_VERDICTS or (answer + 1 >= LEAST_ANSWERS and enough and not tallies.scarce(wanted)):
            break
    if not enough:
        raise Untested("too few drafted tokens to test acceptance")
    if scarce := tallies.scarce():
        others = f" and {len(scarce) - 1} more positions" if len(scarce) > 1 else ""
        subject.untested[f"few samples at {scarce[0]}{others}"] = None
    return tallies


SAMPLING_CHECKS = (
    Check("distribution", "at temperature > 0 tokens follow the probabilities of a fresh pass", samplings,
        distribution, not_exact, on=("small", "long")),
    Check("blocks", "acceptance and the token after it are exact at every depth (at temperature 0: the argmax)", long,
        blocks, not_exact, on=("small", "long"), suffices=lambda case: not case.sampling.greedy),
)  # fmt: skip
