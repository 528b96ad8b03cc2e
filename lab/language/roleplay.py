"""A visitor brings a trouble to someone whom the answer plays in the first person."""

from __future__ import annotations

import random

from lab.example import Example, load
from lab.language import names
from lab.language.roleplay_roles import ROLES
from lab.language.words import Turn, conversation, key_of

FIRST = Turn(
    (
        'You are {me}, a(n) {role} in {town}. {visitor} says: "{problem}." Answer as {me}.',
        "Play a(n) {role} called {me} from {town}. A visitor, {visitor}, comes with this problem: {problem}.",
        "Act as {me}, who is a(n) {role} in {town}. I am {visitor}. {problem}. What do you say?",
        "Pretend to be {me}, the {role} of {town}. {visitor} tells you: {problem}.",
    ),
    (
        load("roleplay.first", str),
        "[Ah|Oh], {visitor}, [do not worry|come in|sit down]. As the {role} [of|here in] {town}, I [often hear "
        "this|know this trouble well]. [You should|First, you should] {advice}. [Trust {me}!|My word as a(n) "
        "{role}!|Tell me how it went.]",
    ),
)
FOLLOW_UPS = load("roleplay.follow_ups", tuple[Turn, ...])
# How a listener turns the words of a speaker round.
_TURNED = {"I": "you", "am": "are", "my": "your", "me": "you"}


def _turned(problem: str) -> str:
    """The visitor's trouble as said back to the visitor."""
    return " ".join(_TURNED.get(word, word) for word in problem.split())


def generate(rng: random.Random) -> Example:
    """A role, its name and town, a visitor and a trouble make the key."""
    role = rng.choice(ROLES)
    problem, advice = rng.choice(role.problems)
    me, visitor = names.two_first_names(rng)
    slots = {
        "role": role.name,
        "place": role.place,
        "tool": role.tool,
        "joy": role.joy,
        "worry": role.worry,
        "problem": problem,
        "yours": _turned(problem),
        "advice": advice,
        "me": me,
        "town": names.town(rng),
        "visitor": visitor,
        "years": str(rng.randint(3, 40)),
    }
    key = key_of(role.name, slots["me"], slots["town"], slots["visitor"], problem)
    return conversation(rng, "roleplay", "rouge_l", key, slots, (FIRST, rng.choice(FOLLOW_UPS)))
