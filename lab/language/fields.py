"""A fact and another of its field beside it: what the explaining categories, stem and humanities, are told from.

Knows no category and no wording.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence

Fact = Mapping[str, str]


def two_of_a_field(
    rng: random.Random, facts: Sequence[Fact], grammar: Callable[[str], dict[str, str]]
) -> dict[str, str]:
    """Slots of a random fact, and those of another one behind `other_`; `other` is its name.

    facts: each with a `name` and a `field`, two or more in every field. grammar: the words that agree with a name.
    """
    fact = rng.choice(facts)
    # Comparing makes sense within one field only.
    other = rng.choice([each for each in facts if each["field"] == fact["field"] and each is not fact])
    slots, others = ({**each, **grammar(each["name"])} for each in (fact, other))
    return {**slots, "other": other["name"], **{f"other_{slot}": words for slot, words in others.items()}}
