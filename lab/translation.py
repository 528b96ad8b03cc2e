"""German sentences with their English translations."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

from lab.example import Example, load, rows
from lab.phrases import REFERENCES, say

# The bilingual lexicon of `translation`: German forms with their English.


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


# German to English: a small bilingual grammar over `german_lexicon`.

PROMPTS = load("translation.prompts", tuple[str, ...])
_DEFINITE = load("translation.definite", dict[str, dict[str, str]])
_INDEFINITE = load("translation.indefinite", dict[str, dict[str, str]])
_MIXED_NOMINATIVE = {"m": "er", "f": "e", "n": "es"}
_PRONOUNS = {"m": ("er", "he"), "f": ("sie", "she")}

# A sentence: German, and English as a template with choices.
Pair = tuple[str, str]


@dataclass(frozen=True, slots=True)
class Phrase:
    """A noun phrase: its German in the nominative, accusative and dative, and its English."""

    nom: str
    acc: str
    dat: str
    english: str
    gender: str
    plural: bool = False


def _ending(gender: str, case: str, definite: bool) -> str:
    """The ending of an adjective after der (weak) or ein (mixed)."""
    if case == "dat" or (case == "acc" and gender == "m"):
        return "en"
    return "e" if definite else _MIXED_NOMINATIVE[gender]


def _inflected(stem: str, ending: str) -> str:
    """The adjective with its ending; a stem in -e (müde) does not double the e."""
    return (stem.removesuffix("e") if ending.startswith("e") else stem) + ending


def singular(rng: random.Random, noun: Noun, kind: str, definite: bool) -> Phrase:
    """One of something, half the time with an adjective."""
    adjective = rng.choice(FITTING[kind]) if rng.random() < 0.5 else None
    articles = _DEFINITE if definite else _INDEFINITE
    forms = []
    for case in ("nom", "acc", "dat"):
        middle = f" {_inflected(adjective[0], _ending(noun.gender, case, definite))}" if adjective else ""
        forms.append(f"{articles[case][noun.gender]}{middle} {noun.german}")
    english = f"{adjective[1]} {noun.english}" if adjective else noun.english
    return Phrase(forms[0], forms[1], forms[2], f"{'the' if definite else 'a(n)'} {english}", noun.gender)


def counted(rng: random.Random, noun: Noun, kind: str) -> Phrase:
    """Several of something: no article, strong plural endings; never used in the dative."""
    number = rng.choice(NUMBERS)
    adjective = rng.choice(FITTING[kind])
    german = f"{number[0]} {_inflected(adjective[0], 'e')} {noun.german_plural}"
    return Phrase(german, german, german, f"{number[1]} {adjective[1]} {noun.english_plural}", "p", True)


def subject(rng: random.Random) -> Phrase:
    """Someone who does something, always one definite person."""
    return singular(rng, rng.choice(PEOPLE), "person", rng.random() < 0.85)


def thing(rng: random.Random, kind: str) -> Phrase:
    """The object of a verb."""
    noun = rng.choice(OBJECTS[kind])
    if rng.random() < 0.2:
        return counted(rng, noun, kind)
    return singular(rng, noun, kind, rng.random() < 0.4)


def _scene(rng: random.Random) -> tuple[Phrase, Verb, Phrase]:
    verb, who = rng.choice(VERBS), subject(rng)
    what = thing(rng, verb.objects)
    # Nobody greets the same noun: "the friend greets the friend".
    while what.nom.split()[-1] == who.nom.split()[-1]:
        what = thing(rng, verb.objects)
    return who, verb, what


def present(rng: random.Random) -> Pair:
    """Der Koch kauft heute einen Hut."""
    who, verb, what = _scene(rng)
    time, when = rng.choice(PRESENT_TIMES)
    frequent = when in ("often", "sometimes", "always")
    english = (
        f"{who.english} {when} {verb.english_third} {what.english}."
        if frequent
        else f"[{who.english} {verb.english_third} {what.english} {when}.|"
        f"{when}, {who.english} {verb.english_third} {what.english}.]"
    )
    return f"{who.nom} {verb.present} {time} {what.acc}.", english


def perfect(rng: random.Random) -> Pair:
    """Gestern hat der Koch einen Hut gekauft."""
    who, verb, what = _scene(rng)
    time, when = rng.choice(PAST_TIMES)
    german = rng.choice(
        (f"{time} hat {who.nom} {what.acc} {verb.participle}.", f"{who.nom} hat {time} {what.acc} {verb.participle}.")
    )
    return german, _past_english(who, verb, what, when)


def _past_english(who: Phrase, verb: Verb, what: Phrase, when: str) -> str:
    return (
        f"[{who.english} {verb.english_past} {what.english} {when}.|"
        f"{when}[,|] {who.english} {verb.english_past} {what.english}.]"
    )


def in_year(rng: random.Random) -> Pair:
    """Im Jahr 1998 kaufte die Frau drei alte Häuser."""
    who, verb, what = _scene(rng)
    year = str(rng.randint(1900, 2023))
    return f"Im Jahr {year} {verb.past} {who.nom} {what.acc}.", _past_english(who, verb, what, f"in {year}")


def at_place(rng: random.Random) -> Pair:
    """Der Koch wartete gestern am Bahnhof."""
    who, action, place = subject(rng), rng.choice(ACTIONS), rng.choice(PLACES)
    time, when = rng.choice(PAST_TIMES)
    english = f"[{who.english} {action[3]} {place[1]} {when}.|{when}[,|] {who.english} {action[3]} {place[1]}.]"
    return f"{time} {action[0]} {who.nom} {place[0]}.", english


def because(rng: random.Random) -> Pair:
    """Weil das Wetter schlecht war, kaufte der Koch ein Buch; also with obwohl."""
    who, verb, what = _scene(rng)
    reason, why = rng.choice(REASONS)
    german_word, english_word = rng.choice((("weil", "because"), ("obwohl", "although")))
    main = f"{who.english} {verb.english_past} {what.english}"
    english = f"[{english_word} {why}, {main}.|{main} {english_word} {why}.]"
    if rng.random() < 0.5:
        return f"{german_word} {reason}, {verb.past} {who.nom} {what.acc}.", english
    return f"{who.nom} {verb.past} {what.acc}, {german_word} {reason}.", english


def reported(rng: random.Random) -> Pair:
    """Der Koch sagte, dass die Frau den Brief gelesen hat."""
    speaker, (who, verb, what) = subject(rng), _scene(rng)
    word, english_word = rng.choice(
        (("sagte", "said"), ("glaubte", "believed"), ("wusste", "knew"), ("erzählte", "[told us|reported]"))
    )
    done = f"[{verb.english_past}|had {_participle(verb)}]"
    english = f"{speaker.english} {english_word} that {who.english} {done} {what.english}."
    return f"{speaker.nom} {word}, dass {who.nom} {what.acc} {verb.participle} hat.", english


_ENGLISH_PARTICIPLES = load("translation.english_participles", dict[str, str])


def _participle(verb: Verb) -> str:
    return _ENGLISH_PARTICIPLES.get(verb.english_past, verb.english_past)


def relative(rng: random.Random) -> Pair:
    """Die Frau, die in Berlin wohnt, verkauft ein Haus."""
    who, verb, what = _scene(rng)
    action, place = rng.choice(ACTIONS), rng.choice(PLACES)
    pronoun = _DEFINITE["nom"][who.gender]
    english = (
        f"[{who.english}, who {action[4]} {place[1]}, {verb.english_third} {what.english}.|"
        f"{who.english} who {action[4]} {place[1]} {verb.english_third} {what.english}.]"
    )
    return f"{who.nom}, {pronoun} {place[0]} {action[2]}, {verb.present} {what.acc}.", english


def modal(rng: random.Random) -> Pair:
    """Der Koch muss morgen den Bericht lesen."""
    who, verb, what = _scene(rng)
    word = rng.choice(MODALS)
    time, when = rng.choice(FUTURE_TIMES)
    german = rng.choice(
        (
            f"{who.nom} {word[0]} {time} {what.acc} {verb.infinitive}.",
            f"{time} {word[0]} {who.nom} {what.acc} {verb.infinitive}.",
        )
    )
    core = f"{who.english} {word[3]} {verb.english} {what.english}"
    return german, f"[{core} {when}.|{when}[,|] {core}.]"


def we_modal(rng: random.Random) -> Pair:
    """Wir wollen morgen ein Museum besuchen."""
    _, verb, what = _scene(rng)
    word, (time, when) = rng.choice(MODALS), rng.choice(FUTURE_TIMES)
    core = f"we {word[4]} {verb.english} {what.english}"
    return f"Wir {word[1]} {time} {what.acc} {verb.infinitive}.", f"[{core} {when}.|{when}[,|] {core}.]"


def giving(rng: random.Random) -> Pair:
    """Die Mutter gab dem Kind einen Apfel."""
    (giver, taker), what = rng.sample(PEOPLE, 2), thing(rng, rng.choice(("thing", "food", "text")))
    who, whom = singular(rng, giver, "person", True), singular(rng, taker, "person", rng.random() < 0.85)
    verb, english = rng.choice((("gab", "gave"), ("zeigte", "showed"), ("schenkte", "gave"), ("brachte", "brought")))
    return (
        f"{who.nom} {verb} {whom.dat} {what.acc}.",
        f"{who.english} {english} [{whom.english} {what.english}|{what.english} to {whom.english}].",
    )


def there_is(rng: random.Random) -> Pair:
    """In der Stadt gibt es eine neue Brücke."""
    place, noun = rng.choice(PLACES[1:2] + PLACES[12:]), rng.choice(BUILDINGS)
    what = counted(rng, noun, "building") if rng.random() < 0.4 else singular(rng, noun, "building", False)
    be = "are" if what.plural else "is"
    return (
        f"{place[0]} gibt es {what.acc}.",
        f"[there {be} {what.english} {place[1]}.|{place[1]} there {be} {what.english}.]",
    )


def lifted(pair: Pair) -> Pair:
    """German sentences start with a capital; English ones get theirs when a wording is drawn."""
    return pair[0][0].upper() + pair[0][1:], pair[1]


def feeling(rng: random.Random) -> Pair:
    """Er war müde, weil das Wetter schlecht war: a second sentence that can follow any first."""
    who, english_who = rng.choice(tuple(_PRONOUNS.values()))
    mood, english_mood = rng.choice(FEELINGS)
    reason, why = rng.choice(REASONS)
    return f"{who} war {mood}, weil {reason}.", f"{english_who} was {english_mood} because {why}."


SENTENCES: tuple[Callable[[random.Random], Pair], ...] = (
    present,
    perfect,
    perfect,
    in_year,
    at_place,
    because,
    because,
    reported,
    relative,
    modal,
    we_modal,
    giving,
    there_is,
)


def generate_translation(rng: random.Random) -> Example:
    """One or two sentences; the text itself is the key, as it is all the content there is."""
    pairs = [lifted(rng.choice(SENTENCES)(rng))]
    if rng.random() < 0.85:
        pairs.append(lifted(rng.choice((*SENTENCES, feeling, feeling))(rng)))
    german, english = (" ".join(parts) for parts in zip(*pairs, strict=True))
    prompt = rng.choice(PROMPTS).format(german=german)
    answers = tuple(dict.fromkeys(say(rng, english, {}) for _ in range(REFERENCES)))
    return Example("translation", (prompt,), (answers,), german, "bleu")
