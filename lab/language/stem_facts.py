"""Simple science: what a thing is, why it happens, an example, a use and a picture for it.

Each text is a clause that follows fixed words: `is` after "Evaporation is", `because` after "This is
so because" or "The point is that", `example` after "An example is", `use` after "It helps us to",
`like` after "It is a little like".
"""

from __future__ import annotations

from lab.example import table

_HEADER = ("name", "field", "is", "because", "example", "use", "like")

CONCEPTS = [dict(zip(_HEADER, row, strict=True)) for row in table("stem_facts")]
