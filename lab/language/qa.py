"""Closed-book questions over real facts and the invented gazetteer.

The key is a fact with one of its wordings: evaluation asks for facts that training told, in words it
did not use.
"""

from __future__ import annotations

import random
from functools import cache

from lab.example import Example
from lab.language.gazetteer import world
from lab.language.qa_relations import RELATIONS, Relation
from lab.language.real_facts import Entity, real_world
from lab.language.words import key_of, say, variants


@cache
def facts() -> tuple[tuple[Relation, Entity], ...]:
    """Every fact: an attribute of an entity."""
    entities = {**real_world(), **world()}
    return tuple((relation, entity) for relation in RELATIONS for entity in entities[relation.kind])


def generate(rng: random.Random) -> Example:
    """A uniformly drawn fact in a uniformly drawn wording."""
    relation, entity = rng.choice(facts())
    wording = rng.randrange(len(relation.questions))
    return Example(
        category="qa",
        turns=(say(rng, relation.questions[wording], entity),),
        answers=(variants(rng, relation.answers, entity),),
        key=key_of(relation.kind, relation.attribute, entity["name"], str(wording)),
        metric="token_f1",
    )
