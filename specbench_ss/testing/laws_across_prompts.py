"""The laws that hold across answers: seeds, memory, the target left unchanged, and tunable options."""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from specbench_ss.decoding.decoder import Decoder
from specbench_ss.decoding.generation import Generation
from specbench_ss.decoding.loop import Limits
from specbench_ss.decoding.sampling import Sampling
from specbench_ss.decoding.together import Answered, Asked, Together, check_together
from specbench_ss.errors import UserError
from specbench_ss.testing.law import Case, Law, Subject, seeded
from specbench_ss.testing.laws_greedy import GREEDY, REPEATING, WARM, asked, not_exact
from specbench_ss.testing.watched_decoder import Trace

SEEDS = 12
LATER = 4  # tokens that one of several requests is longer than the others


def sampled(subject: Subject) -> Iterator[Case]:
    """Yield a request with sampling."""
    yield Case(REPEATING[:5], 6, Sampling(1.3, seed=7))


def seed(subject: Subject, case: Case) -> str:
    """Test that the process's own random generators do not matter, and that seeds matter beyond the first token.

    The first token is drawn by the core.
    """
    one, two = (_at_global_seed(i, subject, case) for i in (1, 2))
    if problem := _differing(one, two, "with the process's generators at another point"):
        return problem
    if not subject.exact or case.max_new_tokens < 3:
        return ""
    after: dict[int, set[tuple[int, ...]]] = defaultdict(set)
    for i in range(SEEDS):
        first, *others = subject.watch(replace(case, sampling=replace(case.sampling, seed=i))).tokens
        after[first].add(tuple(others))
        if len(after[first]) > 1:
            return ""
    return f"{SEEDS} seeds gave only {dict(after)}"


def _at_global_seed(number: int, subject: Subject, case: Case) -> Trace:
    state, decoder = random.getstate(), subject.decoder()
    with seeded(number):
        random.seed(number)
        try:
            return subject.watch(case, decoder=decoder)
        finally:
            random.setstate(state)


def _differing(one: Trace, two: Trace, when: str, steps: bool = True) -> str:
    if one.tokens != two.tokens:
        return f"{one.tokens}; {when} {two.tokens}"
    if steps and one.counts != two.counts:
        names = "nodes, verified, depth and accepted"
        return f"the same tokens in other steps: {names} are {one.counts}; {when} {two.counts}"
    return ""


def asked_again(subject: Subject) -> Iterator[Case]:
    """Yield requests that repeat earlier text.

    What a method remembers may change only its steps, so that one is greedy.
    """
    yield GREEDY
    if not subject.one.remembers:
        yield Case(subject.random_prompt(6), 8, Sampling(0.9, seed=2))


def memory(subject: Subject, case: Case) -> str:
    """Test that a decoder that has answered other prompts, and this one, answers as a new one does."""
    used, alone = subject.decoder(), subject.watch(case)
    others = ((*case.prompt, *alone.tokens, *case.prompt), subject.random_prompt(9, seed=1), case.prompt)
    for i, prompt in enumerate(others):
        subject.watch(Case(prompt[:60], 9, replace(WARM, seed=i), forced=True), decoder=used)
    again, remembers = subject.watch(case, decoder=used), subject.one.remembers
    problem = _differing(alone, again, "after other prompts", steps=not remembers)
    if problem or not remembers:
        return problem
    used.forget()
    return _differing(alone, subject.watch(case, decoder=used), "after other prompts and forget()")


def together(subject: Subject, case: Case) -> str:
    """Test that an answer is the same beside others, of which some end earlier and some later."""
    lengths = (2, case.max_new_tokens, 3, case.max_new_tokens + LATER)
    prompts = (subject.random_prompt(3, seed=1), case.prompt, subject.random_prompt(9, seed=2), case.prompt[:4])
    requests = [Asked(p, Limits(n), case.sampling) for p, n in zip(prompts, lengths, strict=True)]
    found: dict[int, Answered] = {}
    Together(subject.decoder(), 3).answer(requests, found.__setitem__)
    for place, request in enumerate(requests):
        alone = subject.watch(Case(tuple(request.prompt), request.limits.max_new_tokens, case.sampling)).generation
        made, error = found[place].generation, found[place].error
        said = f"prompt {list(request.prompt)}, at most {request.limits.max_new_tokens} tokens, beside three others: "
        if made is None:
            return said + str(error)
        if made.tokens != alone.tokens:
            return f"{said}{made.tokens}, alone {alone.tokens}{_hint(subject)}"
        if _counts(made) != _counts(alone):
            return f"{said}the same tokens in other steps: {_counts(made)}, alone {_counts(alone)}{_hint(subject)}"
    return ""


def _hint(subject: Subject) -> str:
    """Name what is wrong most often."""
    itself = subject.one.beside() is subject.one
    return "; its beside() gives the method itself" if itself else "; what beside() gives may share state with it"


def _counts(of: Generation) -> list[tuple[int, ...]]:
    return [(s.nodes, s.verified, s.depth, s.accepted) for s in of.steps]


def not_together(subject: Subject) -> str:
    """Say why it is never answered beside others."""
    try:
        check_together(subject.one)
    except UserError as e:
        return str(e)
    return ""


def untouched(subject: Subject, case: Case) -> str:
    """Test that the target's logits are, to the last bit, what they were before the method was made."""
    subject.watch(case)
    off = float((subject.place.now() - subject.place.before).abs().max())
    return "" if off == 0 else f"logits of the target itself have changed by {off:.2g}"


def tuned(subject: Subject) -> Iterator[Case]:
    """Yield one request."""
    if subject.whole:
        yield GREEDY


def tunable(subject: Subject, case: Case) -> str:
    """Test every value of every option that tuning may try."""
    decoder = subject.decoder()
    for option, values in decoder.tunable().items():
        for value in values:
            other = _variant(decoder, option, value)
            if other is None:
                continue
            tokens = subject.watch(case, decoder=other).tokens
            if problem := subject.wrong_token(case.prompt, tokens):
                return f"with {option}={value}: {problem}"
    return ""


def _variant(decoder: Decoder, option: str, value: Any) -> Decoder | None:
    """Return the decoder with this value, or None where the method refuses it, as tuning leaves such a value out."""
    try:
        return decoder.variant(replace(decoder.options, **{option: value}))
    except UserError:
        return None


def nothing_tunable(subject: Subject) -> str:
    """Say why there is no option to try."""
    return not_exact(subject) or ("" if subject.one.tunable() else "it declares nothing tunable")


LAWS = (
    Law("seed", "the same seed gives the same answer, another seed another one", sampled, seed, on=("small",)),
    Law("memory", "an answer depends on nothing that was answered before", asked_again, memory, on=("small",)),
    Law("together", "an answer is the same beside other requests", asked_again, together, not_together),
    Law("target", "the target is left as it was", asked, untouched),
    Law("tunable", "no value that tuning may try changes the output", tuned, tunable, nothing_tunable, on=("small",)),
)  # fmt: skip
