"""The kinds of short pieces `writing` asks for, with their wordings and follow-ups.

All prompts of a piece give the same details. Slots: to, me, town, day, time, n and those of DETAILS.
"""

from __future__ import annotations

from dataclasses import dataclass

from lab.example import load
from lab.language.words import Turn


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
