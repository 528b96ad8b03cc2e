"""SQL queries, meaning representations and dialogue summaries."""

from __future__ import annotations

import random
from dataclasses import dataclass

from lab.example import Example, load
from lab.wording import KINDS, draw_slots, key_of, people, person_forms, pick, punctuated, render, render_all, wordings

# The tables, columns and values that the SQL questions are about.


@dataclass(frozen=True, slots=True)
class Column:
    """A column: its name, and its kind of value, or for a number the range."""

    name: str
    kind: str | tuple[int, int]

    @property
    def words(self) -> str:
        """Return the name as used in a question, with a number for counts."""
        counted = isinstance(self.kind, tuple) and (self.name.endswith("s") or self.name in ("staff", "crew"))
        return ("number of " if counted else "") + self.name.replace("_", " ")


Columns = list[Column]


@dataclass(frozen=True, slots=True)
class Table:
    """A table (a plural noun), the noun for one row, and its columns; the first column names a row."""

    name: str
    single: str
    kinds: dict[str, str | tuple[int, int]]

    @property
    def columns(self) -> Columns:
        """Return all columns."""
        return [Column(name, kind) for name, kind in self.kinds.items()]


@dataclass(frozen=True, slots=True)
class Link:
    """A table whose rows belong to rows of another."""

    child: Table
    parent: Table


VALUES = load("sql.values", dict[str, tuple[str, ...]])
TABLES = load("sql.tables", list[Table])
LINKS = load("sql.links", list[Link])

# Questions on a small schema, each with the one SQL query that answers it.

_SQL_FRAMES = load("sql.frames", tuple[str, ...])
# How a question asks for rows; "the" follows.
_ASK = "[List|Show|Give me|Find|Return] the"
_COMPARE = ((">", "[more than|above|greater than|over]"), ("<", "[less than|below|under|smaller than]"))
_TOTALS = load("sql.totals", tuple[tuple[str, str], ...])
_ENDS = (("DESC", "[highest|largest]"), ("ASC", "[lowest|smallest]"))
_ORDERS = (("DESC", "[from high to low|in descending order]"), ("ASC", "[from low to high|in ascending order]"))


def _number(rng: random.Random, low: int, high: int) -> int:
    value = rng.randint(low, high)
    # Large numbers are round, as people ask for them.
    return value // 1000 * 1000 if value >= 10000 else value // 100 * 100 if value >= 2100 else value


def _text_columns(columns: Columns) -> Columns:
    return [column for column in columns if isinstance(column.kind, str) and column.kind != "name"]


def _number_columns(columns: Columns) -> Columns:
    return [column for column in columns if isinstance(column.kind, tuple)]


def _condition(rng: random.Random, column: Column, prefix: str = "") -> tuple[str, str]:
    """Return a condition as text and as SQL."""
    name = prefix + column.name
    if isinstance(column.kind, str):
        value = pick(rng, VALUES[column.kind])
        return f"{column.words} is {value}", f"{name} = '{value}'"
    low = _number(rng, *column.kind)
    if rng.random() < 0.25:
        low, high = sorted((low, _number(rng, *column.kind)))
        if low < high:
            return f"{column.words} is between {low} and {high}", f"{name} BETWEEN {low} AND {high}"
    sign, words = pick(rng, _COMPARE)
    return f"{column.words} is {words} {low}", f"{name} {sign} {low}"


def _where(rng: random.Random, columns: Columns, counts: tuple[int, ...], *used: Column) -> tuple[str, str]:
    """Return `whose ...` and `WHERE ...` with conditions on otherwise unused columns; both empty for none."""
    count, free = pick(rng, counts), [column for column in columns[1:] if column not in used]
    if not count or not free:
        return "", ""
    pairs = [_condition(rng, column) for column in rng.sample(free, min(count, len(free)))]
    word = "or" if rng.random() < 0.25 else "and"
    words = f" {word} ".join(text for text, _ in pairs)
    return f" whose {words}", " WHERE " + f" {word.upper()} ".join(sql for _, sql in pairs)


def _rows(rng: random.Random, table: str, columns: Columns) -> tuple[str, str]:
    shown = rng.sample(columns, pick(rng, (1, 1, 2)))
    words, where = _where(rng, columns, (0, 1, 1, 1, 2, 2), *shown)
    which = "[all|the]" if words else "all"
    ask = f"{_ASK} {' and '.join(column.words for column in shown)} of {which} {table}{words}."
    return ask, f"SELECT {', '.join(column.name for column in shown)} FROM {table}{where}"


def _count(rng: random.Random, table: str, columns: Columns) -> tuple[str, str]:
    words, where = _where(rng, columns, (0, 1, 1, 2))
    return f"[How many {table} are there|Count the {table}]{words}", f"SELECT COUNT(*) FROM {table}{where}"


def _total(rng: random.Random, table: str, columns: Columns) -> tuple[str, str]:
    column = pick(rng, _number_columns(columns))
    name, words = pick(rng, _TOTALS)
    whose, where = _where(rng, columns, (0, 1, 1), column)
    ask = f"[What is|Find|Give me] the {words} {column.words} of [all|the] {table}{whose}"
    return ask, f"SELECT {name}({column.name}) FROM {table}{where}"


def _top(rng: random.Random, table: str, columns: Columns) -> tuple[str, str]:
    column = pick(rng, _number_columns(columns))
    order, words = pick(rng, _ENDS)
    shown = columns[0] if rng.random() < 0.6 else pick(rng, [other for other in columns if other is not column])
    count = rng.randint(2, 10)
    ask = f"{_ASK} {shown.words} of the {count} {table} with the {words} {column.words}."
    return ask, f"SELECT {shown.name} FROM {table} ORDER BY {column.name} {order} LIMIT {count}"


def _sorted(rng: random.Random, table: str, columns: Columns) -> tuple[str, str]:
    column = pick(rng, _number_columns(columns))
    order, words = pick(rng, _ORDERS)
    shown = pick(rng, [other for other in columns if other is not column])
    whose, where = _where(rng, columns, (0, 0, 1), column, shown)
    ask = f"{_ASK} {shown.words} of the {table}{whose}, [sorted|ordered] by {column.words} {words}."
    return ask, f"SELECT {shown.name} FROM {table}{where} ORDER BY {column.name} {order}"


def _grouped(rng: random.Random, table: str, columns: Columns) -> tuple[str, str]:
    by = pick(rng, _text_columns(columns))
    if rng.random() < 0.4:
        ask = f"[How many {table} are there|What is the number of {table}] for each {by.words}"
        return ask, f"SELECT {by.name}, COUNT(*) FROM {table} GROUP BY {by.name}"
    column = pick(rng, _number_columns(columns))
    name, words = pick(rng, _TOTALS)
    ask = f"[What is|Show|Give me] the {words} {column.words} of the {table} for each {by.words}"
    return ask, f"SELECT {by.name}, {name}({column.name}) FROM {table} GROUP BY {by.name}"


def _distinct(rng: random.Random, table: str, columns: Columns) -> tuple[str, str]:
    column = pick(rng, _text_columns(columns))
    whose, where = _where(rng, columns, (0, 1, 1), column)
    ask = f"[List|Show|Find|Give me] [each different|every distinct] {column.words} of the {table}{whose}."
    return ask, f"SELECT DISTINCT {column.name} FROM {table}{where}"


_SHAPES = (_rows, _rows, _rows, _count, _count, _total, _total, _top, _sorted, _grouped, _grouped, _distinct)


def _some_columns(rng: random.Random, table: Table) -> Columns:
    """Return the row's name, at least one text and one number column, and maybe more."""
    first, *rest = table.columns
    keep = (pick(rng, _text_columns(rest)), pick(rng, _number_columns(rest)))
    share = rng.random()
    return [first] + [column for column in rest if column in keep or rng.random() < share]


def _schema(name: str, columns: Columns, *ids: str) -> str:
    parts = [f"{column} INTEGER" for column in ids]
    parts += [f"{column.name} {'TEXT' if isinstance(column.kind, str) else 'INTEGER'}" for column in columns]
    return f"CREATE TABLE {name} ({', '.join(parts)});"


def _join(rng: random.Random) -> tuple[str, str, str]:
    link = pick(rng, LINKS)
    child, parent = link.child, link.parent
    ours = rng.sample(child.columns, rng.randint(2, 3))
    first, *rest = parent.columns
    theirs = [first, *rng.sample(rest, rng.randint(1, 2))]
    shown, other = pick(rng, ours), pick(rng, theirs[1:])
    words, where = _condition(rng, other, f"{parent.name}.")
    key = f"{parent.single}_id"
    if rng.random() < 0.5:
        ask = f"{_ASK} {shown.words} of the {child.name} of {parent.name} whose {words}."
        head = f"{child.name}.{shown.name}"
    else:
        ask = f"{_ASK} {parent.single} name and {shown.words} of each {child.single}, for {parent.name} whose {words}."
        head = f"{parent.name}.name, {child.name}.{shown.name}"
    sql = f"SELECT {head} FROM {child.name} JOIN {parent.name} ON {child.name}.{key} = {parent.name}.id WHERE {where}"
    return f"{_schema(child.name, ours, key)} {_schema(parent.name, theirs, 'id')}", ask, sql


def _single(rng: random.Random) -> tuple[str, str, str]:
    table = pick(rng, TABLES)
    columns = _some_columns(rng, table)
    ask, sql = pick(rng, _SHAPES)(rng, table.name, columns)
    first, *rest = columns
    rng.shuffle(rest)
    schema = _schema(table.name, [first, *rest])
    if rng.random() < 0.15:  # a second table that the question is not about
        other = pick(rng, TABLES)
        if other is not table:
            extra = _schema(other.name, other.columns[:3])
            schema = f"{schema} {extra}" if rng.random() < 0.5 else f"{extra} {schema}"
    return schema, ask, sql


def generate_sql(rng: random.Random) -> Example:
    """Return a schema and a question; the answer is one query."""
    schema, ask, sql = _join(rng) if rng.random() < 0.12 else _single(rng)
    question = punctuated(render(rng, ask, {}))
    prompt = render(rng, pick(rng, _SQL_FRAMES), {"schema": schema, "question": question})
    return Example("sql", (prompt,), ((sql + ";",),), key_of(schema, sql), "exact_sql")


# Attributes of a thing (a restaurant, a hotel, a film, ...) to be put into a fluent description.


@dataclass(frozen=True, slots=True)
class Domain:
    """One kind of thing.

    head: a noun phrase of the first attributes. place: its location, or empty. facts: for every further attribute, the
    rest of a sentence that begins with "it".
    """

    names: tuple[tuple[str, ...], tuple[str, ...]]
    values: dict[str, tuple[str, ...]]
    head: str
    place: str
    facts: dict[str, str]


DOMAINS = load("meaning_representation.domains", dict[str, Domain])
_DATA_FRAMES = load("meaning_representation.frames", tuple[str, ...])
_OPENINGS = load("meaning_representation.openings", tuple[str, ...])
# Sentences with one, two, three or four facts.
_SENTENCES = load("meaning_representation.sentences", tuple[str, ...])


def _template(rng: random.Random, domain: Domain, values: dict[str, str], shown: list[str]) -> str:
    """Return one wording, with its slots still open: an opening, then one or two sentences of facts."""
    opening = pick(rng, _OPENINGS).replace("{head}", domain.head).replace("{place}", domain.place)
    facts = [domain.facts.get(name) or domain.facts[f"{name}={values[name]}"] for name in shown]
    return f"{opening}. {_SENTENCES[len(facts) - 1].format(*facts)}"


def generate_meaning_representation(rng: random.Random) -> Example:
    """Return a list of attributes; the answer describes the thing in two or three sentences."""
    kind = pick(rng, tuple(DOMAINS))
    domain = DOMAINS[kind]
    drawn = {name: pick(rng, options) for name, options in domain.values.items()}
    head = [name for name in drawn if f"{{{name}}}" in domain.head + domain.place]
    facts = [name for name in drawn if name not in head]
    shown = sorted(rng.sample(facts, min(len(facts), pick(rng, (2, 3, 3, 4)))), key=facts.index)
    values = {name: drawn[name] for name in (*head, *shown)}
    name = " ".join(pick(rng, part) for part in domain.names)
    data = ", ".join(f"{attribute}[{value}]" for attribute, value in {"name": name, **values}.items())
    slots = {"name": name, "data": data, "kind": kind, **values}
    prompt = render(rng, pick(rng, _DATA_FRAMES), slots)
    answers = wordings(lambda: render(rng, _template(rng, domain, values, shown), slots))
    return Example("meaning_representation", (prompt,), (answers,), key_of(kind, data), "rouge_l")


# Short dialogues on everyday matters, to be summed up in a sentence or two.


@dataclass(frozen=True, slots=True)
class Scene:
    """A kind of dialogue: its slots, its lines (`?` marks optional ones) and the ways to sum it up."""

    name: str
    slots: str
    lines: tuple[str, ...]
    summaries: tuple[str, ...]


SCENES = load("dialogue_summary.scenes", tuple[Scene, ...])
_SCENE_KINDS = {**KINDS, **load("dialogue_summary.kinds", dict[str, tuple[str, ...]])}
_DIALOGUE_FRAMES = load("dialogue_summary.frames", tuple[str, ...])


def _names(rng: random.Random) -> dict[str, object]:
    """Return two speakers with their pronouns; speakers without names are `they`."""
    if rng.random() < 0.25:
        return {"A": "#Person1#", "B": "#Person2#", "hisA": "their", "himA": "them", "hisB": "their", "himB": "them"}
    first, second = people(rng, 2)
    (_, his_a, him_a), (_, his_b, him_b) = person_forms(first), person_forms(second)
    return {"A": first, "B": second, "hisA": his_a, "himA": him_a, "hisB": his_b, "himB": him_b}


def _dialogue(rng: random.Random, scene: Scene, slots: dict[str, object]) -> str:
    """Return the lines as spoken. Optional lines come and go together, so that no question loses its answer."""
    full = rng.random() < 0.5
    spoken = [line.removeprefix("?") for line in scene.lines if full or not line.startswith("?")]
    text, last = "", ""
    for line in spoken:
        # two lines of one speaker are one turn
        text += " " if line[0] == last else f"\n{slots[line[0]]}: "
        text, last = text + render(rng, line[3:], slots), line[0]
    return text[1:]


def generate_dialogue_summary(rng: random.Random) -> Example:
    """Return a dialogue of four to eight lines; the answer sums it up."""
    scene = pick(rng, SCENES)
    facts = draw_slots(rng, scene.slots, _SCENE_KINDS)
    slots = {**facts, **_names(rng)}
    prompt = render(rng, pick(rng, _DIALOGUE_FRAMES), {"dialogue": _dialogue(rng, scene, slots)})
    key = key_of(scene.name, slots["A"], slots["B"], *facts.values())
    return Example("dialogue_summary", (prompt,), (render_all(rng, scene.summaries, slots),), key, "rouge_l")
