"""The bilingual lexicon of `translation`: German forms with their English.

Only strong nouns are listed, so case shows in the article and adjective alone.
"""

from __future__ import annotations

from dataclasses import dataclass

from lab.example import load, rows


@dataclass(frozen=True, slots=True)
class Noun:
    """A noun with gender m, f or n and its plurals."""

    german: str
    gender: str
    english: str
    german_plural: str
    english_plural: str


@dataclass(frozen=True, slots=True)
class Verb:
    """A transitive verb with the forms sentences need, and the noun class its object comes from."""

    infinitive: str
    present: str
    past: str
    past_plural: str
    participle: str
    english: str
    english_third: str
    english_past: str
    objects: str


def _nouns(table: str) -> list[Noun]:
    return [Noun(*row) for row in rows(table)]


PEOPLE = _nouns(load("german_lexicon.people", str))
ANIMALS = _nouns(load("german_lexicon.animals", str))
THINGS = _nouns(load("german_lexicon.things", str))
FOODS = _nouns(load("german_lexicon.foods", str))
TEXTS = _nouns(load("german_lexicon.texts", str))
BUILDINGS = _nouns(load("german_lexicon.buildings", str))
OBJECTS = load("german_lexicon.objects", dict[str, list[Noun]])

VERBS = [Verb(*row) for row in rows(load("german_lexicon.verbs", str))]

# Stem and English; the stems take plain endings (no dunkel, teuer or hoch).
ADJECTIVES = rows(load("german_lexicon.adjectives", str))
COLOURS = rows("rot|red\nblau|blue\ngrün|green\nweiß|white\nschwarz|black\nbraun|brown\ngelb|yellow\ngrau|grey")
PERSON_ADJECTIVES = rows(load("german_lexicon.person_adjectives", str))
FITTING = load("german_lexicon.fitting", dict[str, list[tuple[str, ...]]])

# German with its preposition and contraction, English.
PLACES = rows(load("german_lexicon.places", str))
PAST_TIMES = rows(load("german_lexicon.past_times", str))
PRESENT_TIMES = rows(load("german_lexicon.present_times", str))
FUTURE_TIMES = rows(load("german_lexicon.future_times", str))
NUMBERS = rows(
    "zwei|two\ndrei|three\nvier|four\nfünf|five\nsechs|six\nsieben|seven\nacht|eight\nzehn|ten\nzwölf|twelve"
)

# Intransitive: past singular, past plural, present, English past, English third person, infinitive pair.
ACTIONS = rows(load("german_lexicon.actions", str))
# Clauses after weil or obwohl (verb last), as a main clause, and in English.
REASONS = rows(load("german_lexicon.reasons", str))
MODALS = rows(load("german_lexicon.modals", str))
FEELINGS = rows(load("german_lexicon.feelings", str))
