"""Conformance checks of the test suite: all of them, the costly ones on few shapes and architectures.

SSBENCH_THOROUGH=1, which CI sets, tries every architecture and shape. A method meets an architecture only through the
target, whose passes other tests hold to transformers' own on all of them, so what breaks on one breaks in any case.
If thorough, the first shape is therefore tested in all cases on two architectures, other ones for every method, and in
two of each check on the others (in one of the check `together`); else in all cases on one. Every other shape, which may
draft in its own way, is tested in two cases of each check, on an architecture of its own and the model of seven words.

The statistical checks, whose hundreds of answers are made on the model of seven words alone, rest on the rule of
acceptance, which is one, and on logits, which other checks hold to the model's own. Methods share the kinds of sampling
among them where they share the rule. `tests/core/test_verify.py` holds the rule to enumerated distributions.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from specbench_ss.conformance import ARCHITECTURES, CHECKS, Case, Check
from specbench_ss.conformance.exact_checks import REPEATING, WARM
from specbench_ss.conformance.harness import Subject
from specbench_ss.engine.decoder import Decoder
from tests.tiny import THOROUGH

STATISTICAL = ("distribution", "blocks")
SHORTER = 64  # tokens
DEAR = "together"  # a check whose every case is seven answers
LARGE = 4  # layers of the models of every architecture


def architectures(turn: int) -> Sequence[str]:
    """One of them, another one at every turn, so that those who take turns have all; every one if thorough."""
    return ARCHITECTURES if THOROUGH else two(turn)[:1]


def two(turn: int) -> Sequence[str]:
    """Two architectures, other ones at every turn."""
    n = len(ARCHITECTURES)
    return [ARCHITECTURES[turn % n], ARCHITECTURES[(turn + 3) % n]]


def checks(turn: int, thorough: bool = THOROUGH) -> tuple[Check, ...]:
    """Return all of them: the first shape in every case, the others in two cases of each check, by turn and shape.

    If thorough, see above which shape is tried in every case where, and answers of the check `long` have their length,
    where they else end earlier in three of four turns.

    A shape is tried by one of the two statistical checks with one kind of sampling; if thorough, the first shape by
    both, with a third of the kinds each where it accepts by a rule of its own or draws its candidates. The choice
    differs from shape to shape and from turn to turn. Other shapes whose candidates are not drawn, accepted by the
    core's rule, are as exact as this rule and the logits are, which other tests look at: they are left out.
    """
    return tuple((_thinned if check.name in STATISTICAL else _fewer)(check, turn, thorough) for check in CHECKS)


def statistical(turn: int) -> list[Check]:
    """Of these checks, those with hundreds of answers."""
    return [check for check in checks(turn) if check.name in STATISTICAL]


def plain(turn: int, thorough: bool = THOROUGH) -> list[Check]:
    """The others."""
    return [check for check in checks(turn, thorough) if check.name not in STATISTICAL]


def _fewer(check: Check, turn: int, thorough: bool) -> Check:
    def cases(subject: Subject) -> Iterator[Case]:
        every = list(check.cases(subject))
        if check.name == "long" and not thorough and turn % 4:
            every = [replace(case, max_new_tokens=min(SHORTER, case.max_new_tokens)) for case in every]
        which, others = turn + _number(subject), every[1:]
        few = [*every[:1], *others[which % max(1, len(others)) :][:1]]
        if check.name == DEAR and thorough:
            few = every[which % max(1, len(every)) :][:1]
        yield from every if _in_full(subject, turn, thorough) else few

    return replace(check, cases=cases)


def _in_full(subject: Subject, turn: int, thorough: bool) -> bool:
    """Return True if it is tried in every case of a check."""
    first, large = subject.number == 0, subject.target.n_layers == LARGE
    if not thorough:
        return first
    return first and (not large or _architecture(subject) in two(turn))


def _architecture(subject: Subject) -> str:
    return subject.target.name.removeprefix("tiny ")


def _number(subject: Subject) -> int:
    """Another one for each shape, and for each architecture that a shape is tried on."""
    kind = _architecture(subject)
    return subject.number + (ARCHITECTURES.index(kind) if kind in ARCHITECTURES else 0)


def _thinned(check: Check, turn: int, thorough: bool) -> Check:
    def cases(subject: Subject) -> Iterator[Case]:
        which = turn + subject.number + STATISTICAL.index(check.name)
        in_full = thorough and not subject.number
        own = (in_full or subject.number) and _of_its_own(subject)
        if (which % 2 and not in_full) or (subject.number and not own):
            return
        sampled = list[Case]()
        for case in check.cases(subject):
            if case.sampling.greedy:
                yield case
            else:
                sampled.append(case)
        if in_full and own and len(sampled) > 2:  # on the model of seven words
            yield from sampled[which % 3 :: 3]
        else:
            yield from sampled[which % max(1, len(sampled)) :][:1]

    return replace(check, cases=cases)


def _of_its_own(subject: Subject) -> bool:
    """Return True if it draws its candidates, or accepts by a rule of its own."""
    drafts = [step.drafted for step in subject.watch(Case(REPEATING, 10, WARM)).steps]
    drawn = any(draft.draft_probs is not None for draft in drafts)
    return drawn or type(subject.one).accept is not Decoder.accept
