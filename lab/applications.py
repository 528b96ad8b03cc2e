# ruff: noqa: E501 - a template or a word list is one line
"""SQL queries, meaning representations and dialogue summaries."""

from __future__ import annotations

import random
from dataclasses import dataclass
from functools import cache

from lab.example import Example, load
from lab.wording import (
    KINDS,
    draw_slots,
    key_of,
    more_kinds,
    people,
    person_forms,
    pick,
    punctuated,
    say,
    say_all,
    several,
    wordings,
)

# The tables, columns and values that the SQL questions are about.


@dataclass(frozen=True, slots=True)
class Column:
    """A column: its name, its kind of value, or for a number the range."""

    name: str
    kind: str
    low: int = 0
    high: int = 0

    @property
    def is_number(self) -> bool:
        return not self.kind

    @property
    def words(self) -> str:
        """The name as a question says it; what is counted is a number of things."""
        counted = self.is_number and (self.name.endswith("s") or self.name in ("staff", "crew"))
        return ("number of " if counted else "") + self.name.replace("_", " ")


@dataclass(frozen=True, slots=True)
class Table:
    """A table (a plural noun), the noun for one row, and its columns; the first column names a row."""

    name: str
    single: str
    columns: tuple[Column, ...]


VALUES = load("sql_words.values", dict[str, tuple[str, ...]])

_TABLES = load("sql_words.tables", str)

_LINKS = load("sql_words.links", str)


def _column(text: str) -> Column:
    name, _, kind = text.partition("=")
    low, dash, high = kind.partition("-")
    return Column(name, "", int(low), int(high)) if dash else Column(name, kind or "name")


def _table(name: str, single: str, columns: list[str]) -> Table:
    return Table(name, single, tuple(_column(column) for column in columns))


def _link(line: str) -> tuple[Table, Table]:
    left, right = line.split(" ; ")
    child, child_one, parent, parent_one, *columns = left.split()
    return _table(child, child_one, columns), _table(parent, parent_one, right.split())


TABLES = tuple(_table(words[0], words[1], words[2:]) for words in map(str.split, _TABLES.strip().splitlines()))
LINKS = tuple(_link(line) for line in _LINKS.strip().splitlines())


# Questions on a small schema, each with the one SQL query that answers it.

_SQL_FRAMES = load("sql.frames", tuple[str, ...])
# How a question asks for rows; "the" follows.
_ASK = "[List|Show|Give me|Find|Return] the"
_COMPARE = ((">", "[more than|above|greater than|over]"), ("<", "[less than|below|under|smaller than]"))
_TOTALS = load("sql.totals", tuple[tuple[str, ...], ...])  # fmt: skip
_ENDS = (("DESC", "[highest|largest]"), ("ASC", "[lowest|smallest]"))


def _number(rng: random.Random, column: Column) -> int:
    value = rng.randint(column.low, column.high)
    # Large numbers are round, as people ask for them.
    return value // 1000 * 1000 if value >= 10000 else value // 100 * 100 if value >= 2100 else value


def _text_columns(columns: list[Column]) -> list[Column]:
    return [column for column in columns if column.kind and column.kind != "name"]


def _number_columns(columns: list[Column]) -> list[Column]:
    return [column for column in columns if column.is_number]


def _condition(rng: random.Random, column: Column, prefix: str = "") -> tuple[str, str]:
    """A condition in words and in SQL."""
    name = prefix + column.name
    if not column.is_number:
        value = pick(rng, VALUES[column.kind])
        return f"{column.words} is {value}", f"{name} = '{value}'"
    low = _number(rng, column)
    if rng.random() < 0.25:
        low, high = sorted((low, _number(rng, column)))
        if low < high:
            return f"{column.words} is between {low} and {high}", f"{name} BETWEEN {low} AND {high}"
    sign, words = pick(rng, _COMPARE)
    return f"{column.words} is {words} {low}", f"{name} {sign} {low}"


def _where(rng: random.Random, columns: list[Column], count: int) -> tuple[str, str]:
    """`whose ...` and `WHERE ...` with some conditions; both empty for none."""
    if not count or not columns:
        return "", ""
    pairs = [_condition(rng, column) for column in rng.sample(columns, min(count, len(columns)))]
    word = "or" if rng.random() < 0.25 else "and"
    words = f" {word} ".join(text for text, _ in pairs)
    return f" whose {words}", " WHERE " + f" {word.upper()} ".join(sql for _, sql in pairs)


def _rows(rng: random.Random, table: Table, columns: list[Column]) -> tuple[str, str]:
    shown = rng.sample(columns, pick(rng, (1, 1, 2)))
    free = [column for column in columns[1:] if column not in shown]
    words, where = _where(rng, free, pick(rng, (0, 1, 1, 1, 2, 2)))
    which = "[all|the]" if words else "all"
    ask = f"{_ASK} {' and '.join(column.words for column in shown)} of {which} {table.name}{words}."
    return ask, f"SELECT {', '.join(column.name for column in shown)} FROM {table.name}{where}"


def _count(rng: random.Random, table: Table, columns: list[Column]) -> tuple[str, str]:
    words, where = _where(rng, columns[1:], pick(rng, (0, 1, 1, 2)))
    ask = f"[How many {table.name} are there|Count the {table.name}]{words}"
    return ask, f"SELECT COUNT(*) FROM {table.name}{where}"


def _total(rng: random.Random, table: Table, columns: list[Column]) -> tuple[str, str]:
    column = pick(rng, _number_columns(columns))
    name, words = pick(rng, _TOTALS)
    free = [other for other in columns[1:] if other is not column]
    whose, where = _where(rng, free, pick(rng, (0, 1, 1)))
    ask = f"[What is|Find|Give me] the {words} {column.words} of [all|the] {table.name}{whose}"
    return ask, f"SELECT {name}({column.name}) FROM {table.name}{where}"


def _top(rng: random.Random, table: Table, columns: list[Column]) -> tuple[str, str]:
    column = pick(rng, _number_columns(columns))
    order, words = pick(rng, _ENDS)
    shown = columns[0] if rng.random() < 0.6 else pick(rng, [other for other in columns if other is not column])
    count = rng.randint(2, 10)
    ask = f"{_ASK} {shown.words} of the {count} {table.name} with the {words} {column.words}."
    return ask, f"SELECT {shown.name} FROM {table.name} ORDER BY {column.name} {order} LIMIT {count}"


def _sorted(rng: random.Random, table: Table, columns: list[Column]) -> tuple[str, str]:
    column = pick(rng, _number_columns(columns))
    order, words = pick(
        rng, (("DESC", "[from high to low|in descending order]"), ("ASC", "[from low to high|in ascending order]"))
    )
    shown = pick(rng, [other for other in columns if other is not column])
    free = [other for other in columns[1:] if other not in (column, shown)]
    whose, where = _where(rng, free, pick(rng, (0, 0, 1)))
    ask = f"{_ASK} {shown.words} of the {table.name}{whose}, [sorted|ordered] by {column.words} {words}."
    return ask, f"SELECT {shown.name} FROM {table.name}{where} ORDER BY {column.name} {order}"


def _grouped(rng: random.Random, table: Table, columns: list[Column]) -> tuple[str, str]:
    by = pick(rng, _text_columns(columns))
    if rng.random() < 0.4:
        ask = f"[How many {table.name} are there|What is the number of {table.name}] for each {by.words}"
        return ask, f"SELECT {by.name}, COUNT(*) FROM {table.name} GROUP BY {by.name}"
    column = pick(rng, _number_columns(columns))
    name, words = pick(rng, _TOTALS)
    ask = f"[What is|Show|Give me] the {words} {column.words} of the {table.name} for each {by.words}"
    return ask, f"SELECT {by.name}, {name}({column.name}) FROM {table.name} GROUP BY {by.name}"


def _distinct(rng: random.Random, table: Table, columns: list[Column]) -> tuple[str, str]:
    column = pick(rng, _text_columns(columns))
    free = [other for other in columns[1:] if other is not column]
    whose, where = _where(rng, free, pick(rng, (0, 1, 1)))
    ask = f"[List|Show|Find|Give me] [each different|every distinct] {column.words} of the {table.name}{whose}."
    return ask, f"SELECT DISTINCT {column.name} FROM {table.name}{where}"


_SHAPES = (_rows, _rows, _rows, _count, _count, _total, _total, _top, _sorted, _grouped, _grouped, _distinct)


def _some_columns(rng: random.Random, table: Table) -> list[Column]:
    """The row's name, at least one text and one number column, and maybe more."""
    first, rest = table.columns[0], list(table.columns[1:])
    keep = {pick(rng, _text_columns(rest)).name, pick(rng, _number_columns(rest)).name}
    share = rng.random()
    return [first] + [column for column in rest if column.name in keep or rng.random() < share]


def _schema(name: str, columns: list[Column], ids: tuple[str, ...] = ()) -> str:
    parts = [f"{column} INTEGER" for column in ids]
    parts += [f"{column.name} {'INTEGER' if column.is_number else 'TEXT'}" for column in columns]
    return f"CREATE TABLE {name} ({', '.join(parts)});"


def _join(rng: random.Random) -> tuple[str, str, str]:
    child, parent = pick(rng, LINKS)
    ours = rng.sample(child.columns, rng.randint(2, 3))
    theirs = [parent.columns[0], *rng.sample(parent.columns[1:], rng.randint(1, 2))]
    shown, other = pick(rng, ours), pick(rng, theirs[1:])
    words, where = _condition(rng, other, f"{parent.name}.")
    link = f"{parent.single}_id"
    if rng.random() < 0.5:
        ask = f"{_ASK} {shown.words} of the {child.name} of {parent.name} whose {words}."
        head = f"{child.name}.{shown.name}"
    else:
        ask = f"{_ASK} {parent.single} name and {shown.words} of each {child.single}, for {parent.name} whose {words}."
        head = f"{parent.name}.name, {child.name}.{shown.name}"
    sql = f"SELECT {head} FROM {child.name} JOIN {parent.name} ON {child.name}.{link} = {parent.name}.id WHERE {where}"
    return _schema(child.name, ours, (link,)) + " " + _schema(parent.name, theirs, ("id",)), ask, sql


def _single(rng: random.Random) -> tuple[str, str, str]:
    table = pick(rng, TABLES)
    columns = _some_columns(rng, table)
    ask, sql = pick(rng, _SHAPES)(rng, table, columns)
    rest = columns[1:]
    rng.shuffle(rest)
    schema = _schema(table.name, [columns[0], *rest])
    if rng.random() < 0.15:  # a second table that the question is not about
        other = pick(rng, TABLES)
        if other is not table:
            extra = _schema(other.name, list(other.columns[:3]))
            schema = f"{schema} {extra}" if rng.random() < 0.5 else f"{extra} {schema}"
    return schema, ask, sql


def generate_sql(rng: random.Random) -> Example:
    """A schema and a question; the answer is one query."""
    schema, ask, sql = _join(rng) if rng.random() < 0.12 else _single(rng)
    question = punctuated(say(rng, ask, {}))
    prompt = say(rng, pick(rng, _SQL_FRAMES), {"schema": schema, "question": question})
    return Example("sql", (prompt,), ((sql + ";",),), key_of(schema, sql), "exact_sql")


# The domains that meaning representations describe: their attributes, values and how each is said.


@dataclass(frozen=True, slots=True)
class Domain:
    """One kind of thing.

    head: a noun phrase made of the first attributes. place: where it is, or empty. facts: for every
    further attribute, how a sentence that begins with "it" says it.
    """

    names: tuple[tuple[str, ...], tuple[str, ...]]
    values: dict[str, tuple[str, ...]]
    head: str
    place: str
    facts: dict[str, str]


_ADJECTIVES = load("description_words.adjectives", tuple[str, ...])
_NOUNS = load("description_words.nouns", tuple[str, ...])
_AREAS = several(
    "riverside area;city centre;old town;harbour;university quarter;market square;station district;north end"
)
_NEAR = tuple(
    f"the {name}" for name in several("town hall;central park;opera house;bus station;cathedral;library;stadium;zoo")
)
_CITIES = KINDS["city"]

RESTAURANT = load("description_words.restaurant", Domain)
HOTEL = load("description_words.hotel", Domain)
MUSEUM = load("description_words.museum", Domain)
PRODUCT = load("description_words.product", Domain)  # fmt: skip
FILM = load("description_words.film", Domain)  # fmt: skip
DOMAINS = {"restaurant": RESTAURANT, "hotel": HOTEL, "museum": MUSEUM, "product": PRODUCT, "film": FILM}


# Attributes of a thing (a restaurant, a hotel, a film, ...) to be put into a fluent description.

_MEANING_REPRESENTATION_FRAMES = load("meaning_representation.frames", tuple[str, ...])
_OPENINGS = load("meaning_representation.openings", tuple[str, ...])


def _head_names(domain: Domain) -> list[str]:
    """The attributes that the first sentence says."""
    said = domain.head + domain.place
    return [name for name in domain.values if f"{{{name}}}" in said]


def _template(rng: random.Random, domain: Domain, values: dict[str, str], shown: list[str]) -> str:
    """One wording, with its slots still open: an opening, then one or two sentences of facts."""
    opening = pick(rng, _OPENINGS).replace("{head}", domain.head).replace("{place}", domain.place)
    phrases = [domain.facts.get(name) or domain.facts[f"{name}={values[name]}"] for name in shown]
    if len(phrases) == 1:
        return f"{opening}. It {phrases[0]}."
    if len(phrases) == 2:
        return f"{opening}. It {phrases[0]} and [|it ]{phrases[1]}."
    if len(phrases) == 3:
        return f"{opening}. It {phrases[0]}, {phrases[1]} and {phrases[2]}."
    return (
        f"{opening}. It {phrases[0]} and {phrases[1]}. [It|In addition, it|Besides, it] {phrases[2]} and {phrases[3]}."
    )


def generate_meaning_representation(rng: random.Random) -> Example:
    """A list of attributes; the answer describes the thing in two or three sentences."""
    kind = pick(rng, tuple(DOMAINS))
    domain = DOMAINS[kind]
    values = {name: pick(rng, options) for name, options in domain.values.items()}
    head = _head_names(domain)
    facts = [name for name in domain.values if name not in head]
    shown = sorted(rng.sample(facts, min(len(facts), pick(rng, (2, 3, 3, 4)))), key=facts.index)
    values = {name: values[name] for name in (*head, *shown)}
    name = " ".join(pick(rng, part) for part in domain.names)
    data = ", ".join([f"name[{name}]", *(f"{attribute}[{value}]" for attribute, value in values.items())])
    slots = {"name": name, "data": data, "kind": kind, **values}
    prompt = say(rng, pick(rng, _MEANING_REPRESENTATION_FRAMES), slots)
    answers = wordings(lambda: say(rng, _template(rng, domain, values, shown), slots))
    return Example("meaning_representation", (prompt,), (answers,), key_of(kind, data), "rouge_l")


# Dialogues of friends, families, students and colleagues, in the notation of dialogue_scenes_service.

LIFE = load("dialogue_scenes_life.life", str)


# Dialogues of customers, patients and travellers with those who serve them.

SERVICE = load("dialogue_scenes_service.service", str)


# Short dialogues on everyday matters, to be summed up in a sentence or two.

_MORE = load("dialogue_summary.more", str)
_KINDS = {**KINDS, **more_kinds(_MORE)}
_DIALOGUE_SUMMARY_FRAMES = load("dialogue_summary.frames", tuple[str, ...])


@dataclass(frozen=True, slots=True)
class Scene:
    """A kind of dialogue: its slots, its lines and the ways to sum it up."""

    name: str
    spec: str
    lines: tuple[str, ...]
    summaries: tuple[str, ...]


def _scene(block: str) -> Scene:
    head, *rest = block.strip().split("\n")
    name, spec = head.split(" | ")
    lines = tuple(line for line in rest if not line.startswith("= "))
    return Scene(name, spec, lines, tuple(line[2:] for line in rest if line.startswith("= ")))


@cache
def scenes() -> tuple[Scene, ...]:
    """All scenes."""
    return tuple(_scene(block) for text in (SERVICE, LIFE) for block in text.strip().removeprefix("# ").split("\n# "))


def _names(rng: random.Random) -> dict[str, object]:
    """Two speakers with their pronouns; speakers without names are `they`."""
    if rng.random() < 0.25:
        return {"A": "#Person1#", "B": "#Person2#", "hisA": "their", "himA": "them", "hisB": "their", "himB": "them"}
    first, second = people(rng, 2)
    slots: dict[str, object] = {"A": first, "B": second}
    for letter, name in (("A", first), ("B", second)):
        _, slots[f"his{letter}"], slots[f"him{letter}"] = person_forms(name)
    return slots


def _dialogue(rng: random.Random, scene: Scene, slots: dict[str, object]) -> str:
    """The lines as spoken. Optional lines come and go together, so that no question loses its answer."""
    full = rng.random() < 0.5
    spoken = [line.removeprefix("?") for line in scene.lines if full or not line.startswith("?")]
    text, last = "", ""
    for line in spoken:
        # two lines of one speaker are one turn
        text += " " if line[0] == last else f"\n{slots[line[0]]}: "
        text, last = text + say(rng, line[3:], slots), line[0]
    return text[1:]


def generate_dialogue_summary(rng: random.Random) -> Example:
    """A dialogue of four to eight lines; the answer sums it up."""
    scene = pick(rng, scenes())
    facts = draw_slots(rng, scene.spec, _KINDS)
    slots = {**facts, **_names(rng)}
    prompt = say(rng, pick(rng, _DIALOGUE_SUMMARY_FRAMES), {"dialogue": _dialogue(rng, scene, slots)})
    key = key_of(scene.name, slots["A"], slots["B"], *facts.values())
    return Example("dialogue_summary", (prompt,), (say_all(rng, scene.summaries, slots),), key, "rouge_l")
