"""Generators of prose tasks: lessons, writing, roleplay."""

from __future__ import annotations

import random
from dataclasses import dataclass

from lab import phrases
from lab.example import Example, load, table
from lab.phrases import Turn, conversation, key_of, say, two_of_a_field, variants

# History, geography, arts and economics: topics told in clauses that follow fixed words.

_HUMANITIES_FACTS_HEADER = ("name", "field", "is", "cause", "effect", "example", "one", "two", "three")

TOPICS = [dict(zip(_HUMANITIES_FACTS_HEADER, row, strict=True)) for row in table("humanities_facts")]


# History, geography, arts and economics for a given purpose: explain, compare or list, then ask on.

FORMATS = load("humanities.formats", tuple[str, ...])

_OPENING = load("humanities.opening", str)
HUMANITIES_EXPLAIN = load("humanities.explain", Turn)
COMPARE = load("humanities.compare", Turn)
LIST = load("humanities.list", Turn)
HUMANITIES_FOLLOW_UPS = load("humanities.follow_ups", tuple[Turn, ...])
# Topics that are over are told in the past tense.
_PAST = load("humanities.past", tuple[str, ...])


_PLURAL = ("supply and demand",)


def _verbs(name: str) -> dict[str, str]:
    """The verbs and pronoun that go with a topic: past for what is over, plural for pairs."""
    if name in _PAST:
        forms = ("was", "it", "came", "went", "led", "brought", "was")
    elif name in _PLURAL:
        forms = ("are", "they", "come", "go", "lead", "bring", "is")
    else:
        forms = ("is", "it", "comes", "goes", "leads", "brings", "is")
    return dict(zip(("was", "it", "came", "went", "led", "brought", "effect_was"), forms, strict=True))


def generate_humanities(rng: random.Random) -> Example:
    """A topic told for an occasion; a comparison's key holds the second topic too."""
    slots = two_of_a_field(rng, TOPICS, _verbs)
    form, town = rng.choice(FORMATS), phrases.town(rng)
    kind, first = rng.choice((("explain", HUMANITIES_EXPLAIN), ("compare", COMPARE), ("list", LIST)))
    slots |= {"form": form, "town": town}
    key = key_of(kind, slots["name"], slots["other"] if kind == "compare" else "", form, town)
    # Who has just had a list is not asked for the same list again.
    follow_ups = HUMANITIES_FOLLOW_UPS[:-1] if kind == "list" else HUMANITIES_FOLLOW_UPS
    return conversation(rng, "humanities", "rouge_l", key, slots, (first, rng.choice(follow_ups)))


# Simple science: what a thing is, why it happens, an example, a use and a picture for it.

_STEM_FACTS_HEADER = ("name", "field", "is", "because", "example", "use", "like")

CONCEPTS = [dict(zip(_STEM_FACTS_HEADER, row, strict=True)) for row in table("stem_facts")]


# Simple science explained to a given person, then an example, a comparison or a use.

JOBS = load("stem.jobs", tuple[str, ...])

_TO_SOMEONE = load("stem.to_someone", str)
STEM_EXPLAIN = load("stem.explain", Turn)
WHY = load("stem.why", Turn)
STEM_FOLLOW_UPS = load("stem.follow_ups", tuple[Turn, ...])


def _verb(name: str) -> dict[str, str]:
    return {"be": "are" if name in ("the tides", "the seasons") else "is"}


def generate_stem(rng: random.Random) -> Example:
    """A concept told to someone; the key is the concept, the listener and the question."""
    slots = two_of_a_field(rng, CONCEPTS, _verb)
    who, job = phrases.full_name(rng), rng.choice(JOBS)
    kind, first = rng.choice((("explain", STEM_EXPLAIN), ("explain", STEM_EXPLAIN), ("why", WHY)))
    slots |= {"who": who, "job": job}
    key = key_of(kind, slots["name"], who, job)
    return conversation(rng, "stem", "rouge_l", key, slots, (first, rng.choice(STEM_FOLLOW_UPS)))


# Events that short reports tell of, with the sentences that tell and sum them up.


@dataclass(frozen=True, slots=True)
class Event:
    """A kind of event: the lead, the sentences that follow, summaries, what a second sentence of a
    summary may add, and the event's own lists of details."""

    name: str
    lead: str
    body: tuple[str, ...]
    summaries: tuple[str, ...]
    more: tuple[str, ...]
    lists: dict[str, tuple[str, ...]]


# Remarks that may stand anywhere in a report and never belong in its summary.
FILLERS = load("report_events.fillers", tuple[str, ...])

EVENTS = load("report_events.events", tuple[Event, ...])


# Short reports to sum up: an event's details told over four to six sentences.

_PROMPTS = load("summarization.prompts", tuple[str, ...])


def generate_summarization(rng: random.Random) -> Example:
    """The key is the event with all its details; a remark that matters little is not to be summed up."""
    event = rng.choice(EVENTS)
    slots = {
        "town": phrases.town(rng),
        "day": rng.choice(phrases.WEEKDAYS),
        "who": phrases.full_name(rng),
        "other": phrases.full_name(rng),
        "n": str(rng.randrange(20, 900, 10)),
        "m": str(rng.randint(2, 19)),
        "k": str(rng.randint(3, 40)),
        "month": rng.choice(phrases.MONTHS),
        "year": str(rng.randint(1880, 2015)),
    }
    slots.update({slot: rng.choice(values) for slot, values in event.lists.items()})
    body = list(event.body)
    body.insert(rng.randint(1, len(body)), rng.choice(FILLERS))
    article = say(rng, " ".join((event.lead, *body)), slots)
    told = event.lead + " ".join(event.body)
    # Only details the article always tells tell prompts apart.
    key = key_of(event.name, *(value for slot, value in slots.items() if f"{{{slot}}}" in told))
    prompt = rng.choice(_PROMPTS).format(article=article)
    summaries = [f"{summary} {more}" for summary in event.summaries for more in event.more]
    return Example("summarization", (prompt,), (variants(rng, summaries, slots),), key, "rouge_l")


# The kinds of short pieces `writing` asks for, with their wordings and follow-ups.


@dataclass(frozen=True, slots=True)
class Piece:
    """A kind of piece: how it is asked for and written, and what may be asked next."""

    name: str
    first: Turn
    follow_ups: tuple[Turn, ...]


DETAILS = load("writing_pieces.details", dict[str, tuple[str, ...]])

EMAIL = load("writing_pieces.email", Piece)

STORY = Piece(
    "story",
    Turn(
        (
            "Write the opening of a story about {me}, a(n) {job}, who finds a(n) {thing} in {place}.",
            "Begin a short story: {me} is a(n) {job} and finds a(n) {thing} in {place}.",
            "I need the first lines of a story. {me}, a(n) {job}, discovers a(n) {thing} in {place}.",
        ),
        (load("writing_pieces.story_0", str),),
    ),
    (
        Turn(
            ("Give the story a title.", "What would be a good title?"),
            (load("writing_pieces.story_1", str),),
        ),
        Turn(
            ("Continue with two more sentences.", "What happens next?"),
            (load("writing_pieces.story_2", str),),
        ),
        Turn(
            ("Rewrite it in the first person.", "Tell it from the view of {me}."),
            (
                "[It was almost dark when|The clock had just struck nine when] I, a(n) {job} named {me}, [stepped "
                "into|entered] {place}. [On the floor|In a corner] lay a(n) {thing}, and [I knew my life would "
                "change|I wondered who had left it there].",
            ),
        ),
    ),
)

PRODUCT = load("writing_pieces.product", Piece)

TRAVEL = Piece(
    "travel",
    Turn(
        (
            "Write a short travel note about {town}. Mention {sight} and the {dish}.",
            "I was in {town}, saw {sight} and ate {dish}. Turn this into a travel note.",
            "Write a few lines for my travel blog about {town}, {sight} and the local {dish}.",
        ),
        (load("writing_pieces.travel", str),),
    ),
    (
        Turn(
            ("Add a tip for rainy days.", "What can I do there when it rains?"),
            (
                "[When it rains|On a rainy day|In bad weather], [stay inside and enjoy|find a cosy inn and order] "
                "the {dish}, [then|and later] visit {sight} [with an umbrella|when the sky clears]. {town} is "
                "[charming|pretty|worth seeing] in any weather.",
            ),
        ),
        Turn(
            ("Give the note a title.", "Suggest a headline."),
            (
                '[A fitting title is|I would choose the headline|You could call it] "[A Day in {town}|{town} and '
                'its {dish}|From {sight} to the {dish}]".',
            ),
        ),
        Turn(
            ("Make it shorter.", "Write it as a postcard to {to}."),
            (
                "[Greetings from {town}!|Dear friends, {town} is great!] [I saw|Today I visited] {sight} and "
                "[ate|tried] the {dish}. [Wish you were here.|It was wonderful.|You would love it.]",
            ),
        ),
    ),
)

INVITATION = Piece(
    "invitation",
    Turn(
        (
            "Write an invitation from {me} to {to} for a(n) {party} in {town} on {day} at {time}.",
            "{me} wants to invite {to} to a(n) {party} on {day} at {time} in {town}. Write the invitation.",
            "Please write a friendly invitation: {party}, {day}, {time}, {town}; from {me} to {to}.",
        ),
        (load("writing_pieces.invitation", str),),
    ),
    (
        Turn(
            ("Ask {to} to bring {gift}.", "Add a request to bring {gift}."),
            (
                "Dear {to}, [you are warmly invited|please come] to a(n) {party} in {town} on {day} at {time}. "
                "[Could you bring|Would you please bring|May I ask you to bring] {gift}? [I look forward to it.|See "
                "you there!] [Yours|Best], {me}",
            ),
        ),
        Turn(
            ("Make it more formal.", "Rewrite it formally."),
            (
                "Dear {to}, [it is my pleasure to invite you|I have the honour of inviting you] to a(n) {party}, "
                "which will take place in {town} on {day} at {time}. [I would be grateful for a reply.|Kindly "
                "confirm your attendance.] [Yours sincerely|Respectfully], {me}",
            ),
        ),
        Turn(
            ("Write the answer of {to}, who can come.", "Now write a reply in which {to} accepts."),
            (
                "Dear {me}, [thank you for the invitation|thank you so much for asking me|how kind of you]. I [will "
                "gladly come|am happy to come|would love to come] to the {party} in {town} on {day} at {time}. [See "
                "you then|Best wishes|Yours], {to}",
            ),
        ),
    ),
)

REVIEW = load("writing_pieces.review", Piece)

PIECES = (EMAIL, STORY, PRODUCT, TRAVEL, INVITATION, REVIEW)


# Short pieces of writing that must use given details, then a request to change the piece.


def generate_writing(rng: random.Random) -> Example:
    """One piece and one follow-up; the key is the piece with the details its first prompt gives."""
    piece = rng.choice(PIECES)
    to, me = phrases.two_first_names(rng)
    slots = {
        "to": to,
        "me": me,
        "town": phrases.town(rng),
        "day": rng.choice(phrases.WEEKDAYS),
        "time": phrases.clock(rng),
        "n": str(rng.randint(5, 95)),
        **{slot: rng.choice(values) for slot, values in DETAILS.items()},
    }
    asked = piece.first.prompts[0]
    key = key_of(piece.name, *(value for slot, value in slots.items() if f"{{{slot}}}" in asked))
    return conversation(rng, "writing", "rouge_l", key, slots, (piece.first, rng.choice(piece.follow_ups)))


# Roles to play: what each is proud of, uses, likes and dislikes, and how each answers its visitors' troubles.


@dataclass(frozen=True, slots=True)
class Role:
    """Someone to speak as."""

    name: str
    place: str
    tool: str
    joy: str
    worry: str
    problems: tuple[tuple[str, str], ...]


def _role(row: tuple[str, ...]) -> Role:
    pairs = tuple((problem, advice) for problem, _, advice in (pair.partition(" > ") for pair in row[5:]))
    return Role(row[0], row[1], row[2], row[3], row[4], tuple((a.strip(), b.strip()) for a, b in pairs))


ROLES = [_role(row) for row in table("roleplay_roles")]


# A visitor brings a trouble to someone whom the answer plays in the first person.

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


def generate_roleplay(rng: random.Random) -> Example:
    """A role, its name and town, a visitor and a trouble make the key."""
    role = rng.choice(ROLES)
    problem, advice = rng.choice(role.problems)
    me, visitor = phrases.two_first_names(rng)
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
        "town": phrases.town(rng),
        "visitor": visitor,
        "years": str(rng.randint(3, 40)),
    }
    key = key_of(role.name, slots["me"], slots["town"], slots["visitor"], problem)
    return conversation(rng, "roleplay", "rouge_l", key, slots, (FIRST, rng.choice(FOLLOW_UPS)))
