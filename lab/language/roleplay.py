"""A visitor brings a trouble to someone whom the answer plays in the first person."""

from __future__ import annotations

import random

from lab.example import Example
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
        "[Good day|Hello|Welcome], {visitor}! I am {me}, the {role} [of|here in] {town}. [You say that|I hear "
        "that|So] {yours}? [Then you should|I think you should|My advice is simple: you should] {advice}. [Believe "
        "me, I have seen this many times.|That has always worked in {town}.|If it does not help, come back to my "
        "{place}.]",
        "[Ah|Oh], {visitor}, [do not worry|come in|sit down]. As the {role} [of|here in] {town}, I [often hear "
        "this|know this trouble well]. [You should|First, you should] {advice}. [Trust {me}!|My word as a(n) "
        "{role}!|Tell me how it went.]",
    ),
)
FOLLOW_UPS = (
    Turn(
        ("What do you like about your work?", "What is the best part of your work?"),
        (
            "[What I like most is|I love|The best part is] {joy}. [As a(n) {role}, I could not live without it.|It "
            "makes me proud to be the {role} of {town}.|That is why I became a(n) {role}.]",
        ),
    ),
    Turn(
        ("And what do you dislike about it?", "Is there something you do not like about your job?"),
        (
            "[To be honest, I do not like|I could do without|The hard part is] {worry}. [But every {role} must live "
            "with that.|Still, I would not change my life in {town}.|But {joy} makes up for it.]",
        ),
    ),
    Turn(
        (
            "How long have you been doing this? Say that it has been {years} years.",
            "Tell me about your {years} years in this job.",
        ),
        (
            "I have been a(n) {role} [in {town} for {years} years|for {years} years now]. [All that time, my {tool} "
            "has served me well.|I still use my first {tool}.|The {place} has become my home.]",
        ),
    ),
    Turn(
        ("Which tool do you use most?", "What do you always have with you?"),
        (
            "[I would be lost without|I could not work without|My best friend is] my {tool}. [A(n) {role} needs it "
            "every day.|It has served me well in {town}.|You will see it in my {place}.]",
        ),
    ),
    Turn(
        ("{visitor} thanks you and leaves. Say goodbye.", "Say goodbye to {visitor}."),
        (
            "[Goodbye|Farewell|Take care], {visitor}! [Remember: {advice}.|And do not forget to {advice}.] [My "
            "{place} is always open to you.|Come back to {town} soon.]",
        ),
    ),
)
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
