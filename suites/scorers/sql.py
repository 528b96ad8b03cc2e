"""Compare SQL queries, ignoring the way they are written. Nothing is executed and no schema is known.

These count as the same: letter case of keywords and names, spaces, brackets around a single condition, `!=` and `<>`,
`JOIN` and `INNER JOIN`, an explicit `ASC`, single and double quotes around a value, a closing semicolon, and a Markdown
fence around the query.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Sequence
from functools import lru_cache
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sqlglot import exp

_FENCE = re.compile(r"```(?:\w+[ \t]*\n)?(.*?)(?:```|$)", re.DOTALL)


def exact_sql(answer: str, references: Sequence[str]) -> float:
    """Return 1 if the query equals a reference in normal form. Text that is not SQL is compared as text."""
    return float(normal_sql(answer) in [normal_sql(reference) for reference in references])


@lru_cache(maxsize=4096)
def normal_sql(text: str) -> str:
    """Return the normal form of a query."""
    fenced = _FENCE.search(text)
    query = (fenced[1] if fenced else text).strip().rstrip("; \n")
    return _parsed(query) or " ".join(query.lower().split())


def _parsed(query: str) -> str:
    """Return the query as sqlglot writes it; '' if it cannot be read."""
    import sqlglot
    from sqlglot.errors import SqlglotError
    from sqlglot.optimizer.normalize_identifiers import normalize_identifiers

    logging.getLogger("sqlglot").setLevel(logging.ERROR)
    try:
        tree = sqlglot.parse_one(query, read="sqlite")
        _make_plain(tree)
        return normalize_identifiers(tree, dialect="sqlite").sql("sqlite")
    except (SqlglotError, RecursionError):
        return ""


def _make_plain(tree: exp.Expr) -> None:
    """Remove from the tree, in place, what depends only on how the query is written."""
    from sqlglot import exp

    for column in list(tree.find_all(exp.Column)):
        if isinstance(column.this, exp.Identifier) and column.this.quoted and not column.table:
            # sqlite reads "x" as a value where no column is called so
            column.replace(exp.Literal.string(column.name))
    for ordered in tree.find_all(exp.Ordered):
        ordered.set("desc", bool(ordered.args.get("desc")))
    for join in tree.find_all(exp.Join):
        join.set("kind", None if join.kind == "INNER" else join.args.get("kind"))
    for bracket in reversed(list(tree.find_all(exp.Paren))):
        inside = isinstance(bracket.parent, exp.Paren | exp.Connector | exp.Where | exp.Having | exp.Join)
        if inside and isinstance(bracket.this, exp.Predicate):
            bracket.replace(bracket.this)
