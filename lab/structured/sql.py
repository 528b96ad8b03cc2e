"""Questions on a small schema, each with the one SQL query that answers it."""

from __future__ import annotations

import random

from lab.example import Example, load
from lab.structured.sql_words import LINKS, TABLES, VALUES, Column, Table
from lab.structured.wording import key_of, pick, punctuated, say

_FRAMES = load("sql.frames", tuple[str, ...])
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


def generate(rng: random.Random) -> Example:
    """A schema and a question; the answer is one query."""
    schema, ask, sql = _join(rng) if rng.random() < 0.12 else _single(rng)
    question = punctuated(say(rng, ask, {}))
    prompt = say(rng, pick(rng, _FRAMES), {"schema": schema, "question": question})
    return Example("sql", (prompt,), ((sql + ";",),), key_of(schema, sql), "exact_sql")
