# ruff: noqa: E501 - a template or a word list is one line
"""Short texts with facts to extract: their slots, their wordings, their fields, and follow-up questions.

A kind starts with `# name | slots | fields`; a field is `label=slot`. `T:` lines are ways to write the
text, `Q:` a follow-up question with its answer after ` => `.
"""

from lab.example import load

TEXTS = load("extraction_words.texts", str)
MORE = load("extraction_words.more", str)
