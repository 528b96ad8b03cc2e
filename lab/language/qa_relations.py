"""How to ask for each attribute of each kind of entity, and how to answer.

Questions are plain sentences without choices: a fact and the number of its wording fix the prompt.
"""

from __future__ import annotations

from dataclasses import dataclass

from lab.example import table


@dataclass(frozen=True, slots=True)
class Relation:
    """An attribute of a kind of entity: six or more questions, and answers that add a related fact."""

    kind: str
    attribute: str
    questions: tuple[str, ...]
    answers: tuple[str, ...]


# Wordings that fit any attribute told as a noun phrase ("the capital of {name}").
_PHRASE_QUESTIONS = (
    "What is {phrase}?",
    "Tell me {phrase}.",
    "Can you name {phrase}?",
    "I need to know {phrase}.",
    "Do you know {phrase}?",
    "Please tell me {phrase}.",
    "I forgot {phrase}. What is it?",
    "Question: what is {phrase}?",
)
# Wordings that fit any attribute told as a clause ("which river {name} lies on").
_CLAUSE_QUESTIONS = (
    "Tell me {clause}.",
    "Do you know {clause}?",
    "Can you say {clause}?",
    "I would like to know {clause}.",
    "Please tell me {clause}.",
    "Could you explain {clause}?",
    "I wonder {clause}.",
)


def _answers(fact: str, more: str) -> tuple[str, ...]:
    """Every way to state the fact with every related fact."""
    return tuple(f"{first.strip()} {second.strip()}" for first in fact.split(" / ") for second in more.split(" / "))


def _relations(name: str, wordings: tuple[str, ...], slot: str) -> list[Relation]:
    return [
        Relation(
            kind, attribute, tuple(wording.replace(f"{{{slot}}}", asked) for wording in wordings), _answers(fact, more)
        )
        for kind, attribute, asked, fact, more in table(name)
    ]


RELATIONS = (
    *_relations("qa_by_phrase", _PHRASE_QUESTIONS, "phrase"),
    *_relations("qa_by_clause", _CLAUSE_QUESTIONS, "clause"),
)
