"""The laws as most tests hold decoders to them: all of them, the costly ones on what can tell something new.

SSBENCH_THOROUGH=1, which CI sets, holds all to all, but for the statistical laws, whose hundreds of answers are made on
two architectures of each method: they rest on the rule of acceptance, which is one, and on logits, which other laws
hold to the model's own on every architecture.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from specbench_ss.decoding.decoder import Decoder
from specbench_ss.testing import ARCHITECTURES, LAWS, Case, Law
from specbench_ss.testing.law import Subject
from specbench_ss.testing.laws_greedy import REPEATING, WARM
from tests.tiny import THOROUGH

STATISTICAL = ("distribution", "blocks")
SHORTER = 64  # tokens


def architectures(turn: int) -> Sequence[str]:
    """Two of them, other ones at every turn, so that those who take turns have all; every one if thorough."""
    return ARCHITECTURES if THOROUGH else two(turn)


def two(turn: int) -> Sequence[str]:
    """Two architectures, other ones at every turn."""
    n = len(ARCHITECTURES)
    return [ARCHITECTURES[turn % n], ARCHITECTURES[(turn + 3) % n]]


def laws(turn: int, thorough: bool = THOROUGH) -> tuple[Law, ...]:
    """All of them. The first shape is tried in every case, the others in two of each law: other ones by turn and shape.

    Of the two laws with hundreds of answers a shape is held to one, by one kind of sampling; which ones differ from
    shape to shape and from turn to turn. A shape whose candidates are not drawn, accepted by the core's rule, is as
    exact as this rule and the logits are, which tests of the rule and other laws look at: of such shapes the first is
    enough. Answers of the law `long` end earlier in three of four turns.
    """
    return LAWS if thorough else tuple((_thinned if law.name in STATISTICAL else _fewer)(law, turn) for law in LAWS)


def statistical(turn: int) -> list[Law]:
    """Of these laws, those with hundreds of answers."""
    return [law for law in laws(turn) if law.name in STATISTICAL]


def plain(turn: int) -> list[Law]:
    """The others."""
    return [law for law in laws(turn) if law.name not in STATISTICAL]


def _fewer(law: Law, turn: int) -> Law:
    def cases(subject: Subject) -> Iterator[Case]:
        every = list(law.cases(subject))
        if law.name == "long" and turn % 4:
            every = [replace(case, max_new_tokens=min(SHORTER, case.max_new_tokens)) for case in every]
        others = every[1:]
        few = [*every[:1], *others[(turn + subject.number) % max(1, len(others)) :][:1]]
        yield from every if subject.number == 0 else few

    return replace(law, cases=cases)


def _thinned(law: Law, turn: int) -> Law:
    def cases(subject: Subject) -> Iterator[Case]:
        if STATISTICAL.index(law.name) != (turn + subject.number) % 2 or (subject.number and not _of_its_own(subject)):
            return
        sampled = list[Case]()
        for case in law.cases(subject):
            if case.sampling.greedy:
                yield case
            else:
                sampled.append(case)
        yield sampled[(turn + subject.number) % len(sampled)]

    return replace(law, cases=cases)


def _of_its_own(subject: Subject) -> bool:
    """Whether it draws its candidates, or accepts by a rule of its own."""
    drafts = [step.drafted for step in subject.watch(Case(REPEATING, 10, WARM)).steps]
    drawn = any(draft.draft_probs is not None for draft in drafts)
    return drawn or type(subject.one).accept is not Decoder.accept
