"""German sentences with their English translations."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from lab import wording
from lab.example import Example, load, tables
from lab.phrases import REFERENCES, render

# A word, as a table of the lexicon has it: column -> form. The stems of adjectives take plain endings (no dunkel).
Word = Mapping[str, str]

NOUNS = tables("german.nouns")  # by class; gender is m, f or n
ADJECTIVES = tables("german.adjectives")  # those that fit a class of nouns
WORDS = tables("german.words")
_ARTICLES = load("translation.articles", dict[str, dict[str, dict[str, str]]])
_MIXED_NOMINATIVE = {"m": "er", "f": "e", "n": "es"}


@dataclass(frozen=True, slots=True)
class Phrase:
    """A noun phrase: its German in the nominative, accusative and dative, and its English."""

    nom: str
    acc: str
    dat: str
    english: str
    pronoun: str = ""


def _ending(gender: str, case: str, definite: bool) -> str:
    """Return the ending of an adjective after der (weak) or ein (mixed)."""
    if case == "dat" or (case == "acc" and gender == "m"):
        return "en"
    return "e" if definite else _MIXED_NOMINATIVE[gender]


def _inflected(stem: str, ending: str) -> str:
    """Return the adjective with its ending; a stem in -e (müde) does not double the e."""
    return stem.removesuffix("e") + ending


def singular(rng: random.Random, noun: Word, kind: str, definite: bool) -> Phrase:
    """Return one of something, half the time with an adjective."""
    adjective = rng.choice(ADJECTIVES[kind]) if rng.random() < 0.5 else None
    forms = []
    for case, articles in _ARTICLES["definite" if definite else "indefinite"].items():
        middle = f" {_inflected(adjective['german'], _ending(noun['gender'], case, definite))}" if adjective else ""
        forms.append(f"{articles[noun['gender']]}{middle} {noun['german']}")
    english = f"{adjective['english']} {noun['english']}" if adjective else noun["english"]
    pronoun = _ARTICLES["definite"]["nom"][noun["gender"]]
    return Phrase(forms[0], forms[1], forms[2], f"{'the' if definite else 'a(n)'} {english}", pronoun)


def counted(rng: random.Random, noun: Word, kind: str) -> Phrase:
    """Return a plural phrase: no article, strong endings; never used in the dative."""
    number, adjective = rng.choice(WORDS["number"]), rng.choice(ADJECTIVES[kind])
    german = f"{number['german']} {_inflected(adjective['german'], 'e')} {noun['german_plural']}"
    return Phrase(german, german, german, f"{number['english']} {adjective['english']} {noun['english_plural']}")


def subject(rng: random.Random) -> Phrase:
    """Return a singular subject."""
    return singular(rng, rng.choice(NOUNS["person"]), "person", rng.random() < 0.85)


def thing(rng: random.Random, kind: str) -> Phrase:
    """Return the object of a verb."""
    noun = rng.choice(NOUNS[kind])
    if rng.random() < 0.2:
        return counted(rng, noun, kind)
    return singular(rng, noun, kind, rng.random() < 0.4)


def scene(rng: random.Random) -> dict[str, object]:
    """Return a subject, a verb and its object."""
    verb, who = rng.choice(WORDS["verb"]), subject(rng)
    what = thing(rng, verb["objects"])
    # Nobody greets the same noun: "the friend greets the friend".
    while what.nom.split()[-1] == who.nom.split()[-1]:
        what = thing(rng, verb["objects"])
    return {"who": who, "verb": verb, "what": what}


def gift(rng: random.Random) -> dict[str, object]:
    """Return a giver, a receiver and a thing."""
    (giver, taker), what = rng.sample(NOUNS["person"], 2), thing(rng, rng.choice(("thing", "food", "text")))
    who = singular(rng, giver, "person", True)
    return {"who": who, "whom": singular(rng, taker, "person", rng.random() < 0.85), "what": what}


def building(rng: random.Random) -> dict[str, object]:
    """Return a place in which there is a building, or several."""
    places = WORDS["place"]
    place, noun = rng.choice(places[1:2] + places[12:]), rng.choice(NOUNS["building"])
    several = rng.random() < 0.4
    what = counted(rng, noun, "building") if several else singular(rng, noun, "building", False)
    return {"place": place, "what": what, "be": "are" if several else "is"}


_SCENES = {"scene": scene, "gift": gift, "building": building}


# Sentences, and what is drawn for them.


@dataclass(frozen=True, slots=True)
class Sentence:
    """A kind of sentence. draws: scenes, subjects and words in turn. english: a template with choices."""

    draws: tuple[str, ...]
    german: tuple[str, ...]
    english: str


SENTENCES = load("translation.sentences", dict[str, Sentence])
PROMPTS = load("translation.prompts", tuple[str, ...])
_OFTEN = load("translation.often", tuple[str, ...])  # words that stand before the English verb
_KINDS = (
    *("present", "perfect", "perfect", "in_year", "at_place", "because", "because", "reported"),
    *("relative", "modal", "we_modal", "giving", "there_is"),
)


def _slots(rng: random.Random, draws: tuple[str, ...]) -> dict[str, Any]:
    slots: dict[str, Any] = {}
    for name in draws:
        if name in _SCENES:
            slots.update(_SCENES[name](rng))
        elif name in ("who", "speaker"):
            slots[name] = subject(rng)
        else:
            slots[name] = rng.randint(1900, 2023) if name == "year" else rng.choice(WORDS[name])
    return slots


def sentence(rng: random.Random, kind: str) -> tuple[str, str]:
    """Return a German sentence, and its English as a template with choices."""
    form = SENTENCES[kind]
    slots = _slots(rng, form.draws)
    if kind == "present" and slots["present"]["english"] in _OFTEN:
        form = SENTENCES["present_often"]
    german = form.german[0]
    if len(form.german) > 1:
        # the order of the two draws is fixed by the text of the shipped weights
        german = wording.pick(rng, form.german) if kind == "because" else rng.choice(form.german)
    german = german.format_map(slots)
    return german[0].upper() + german[1:], form.english.format_map(slots)


def generate_translation(rng: random.Random) -> Example:
    """Return one or two sentences; the text itself is the key, as it is all the content there is."""
    pairs = [sentence(rng, rng.choice(_KINDS))]
    if rng.random() < 0.85:
        pairs.append(sentence(rng, rng.choice((*_KINDS, "feeling", "feeling"))))
    german, english = (" ".join(parts) for parts in zip(*pairs, strict=True))
    prompt = rng.choice(PROMPTS).format(german=german)
    answers = tuple(dict.fromkeys(render(rng, english, {}) for _ in range(REFERENCES)))
    return Example("translation", (prompt,), (answers,), german, "bleu")
