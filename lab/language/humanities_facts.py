"""History, geography, arts and economics: topics told in clauses that follow fixed words.

`is` follows "Inflation is"; `cause`, `effect` and `example` are noun phrases; `three` lists aspects.
"""

from __future__ import annotations

from lab.example import table

_HEADER = ("name", "field", "is", "cause", "effect", "example", "one", "two", "three")

TOPICS = [dict(zip(_HEADER, row, strict=True)) for row in table("humanities_facts")]
